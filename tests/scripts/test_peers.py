"""The benchmark of peers: the parts that run without any peer installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import HAS_BF16, PROMPTS, ROOT

import ovspec

PEERS = ROOT / "scripts" / "peers"
sys.path.insert(0, str(PEERS))

import report  # noqa: E402
import run  # noqa: E402
from arrivals import Load  # noqa: E402
from install import cmake_flags  # noqa: E402
from peer import Worker  # noqa: E402

DEMO = ROOT / "models" / "demo"
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def ask(worker: Worker, prompts: list[str], lm: ovspec.LanguageModel, **request: Any) -> dict[str, Any]:
    return worker.ask({"prompts": [lm.encode(prompt).tolist() for prompt in prompts], "max_tokens": 12, **request})


def test_workers_give_what_ovspec_gives(pair: Path, load: Callable[..., ovspec.LanguageModel]) -> None:
    lm = load(engine="paged")
    expected = [result.token_ids for result in lm.generate(PROMPTS[:2], max_tokens=12, ignore_eos=True)]
    setup = {"target": str(pair), "draft": str(pair / "draft"), "properties": EXACT, "draft_properties": EXACT}
    for name, mode, k in (("ovspec", "draft", 2), ("ovspec", "lookup,draft", None), ("copy_trim", "draft", 3)):
        with Worker(name, setup | {"mode": mode}) as worker:
            assert worker.ready["ready"], worker.ready
            for prompt, tokens in zip(PROMPTS, expected, strict=False):
                answer = ask(worker, [prompt], lm, k=k)
                assert answer["tokens"] == [tokens]
                assert 0 < answer["ttft_ms"][0] < answer["seconds"] * 1e3
                assert answer["tpot_ms"] * 11 == pytest.approx(answer["seconds"] * 1e3 - answer["ttft_ms"][0])
                assert answer["acceptance"] is None or 0 <= answer["acceptance"] <= 1
            together = ask(worker, PROMPTS[:2], lm, k=k)
            if name == "ovspec":
                assert together["tokens"] == expected
            else:
                assert together["error"] == "it has no batches here"


def test_workers_that_fail_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker("ovspec", {"target": str(tmp_path / "none")}) as worker:
        assert "none" in worker.ready["error"]
        assert "\n" not in worker.ready["error"]
        assert not worker.alive
    monkeypatch.setattr("peer.python_of", lambda name: tmp_path / name)
    assert "run scripts/bench/peers/install.py genai" in Worker("genai", {"target": str(DEMO)}).ready["error"]
    (tmp_path / "worker_dying.py").write_text("import sys; sys.stdin.readline(); sys.exit('it is over')")
    (tmp_path / "worker_slow.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr("peer.HERE", tmp_path)
    assert Worker("dying", {}).ready["error"] == "its process ended (exit code 1): it is over"
    assert Worker("slow", {}, seconds=0.5).ready["error"] == "no answer within 0.5 s"


@pytest.mark.slow
def test_a_row_and_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a row at OpenVINO's defaults and with a property that it refuses; copy-and-trim needs no environment."""
    monkeypatch.setattr(run, "WARM_UP", 0.0)
    monkeypatch.setattr(run, "KS", (1, 2))
    monkeypatch.setattr(run, "our_properties", lambda folder: {"DYNAMIC_QUANTIZATION_GROUP_SIZE": str(folder)})
    row = next(row for row in run.ROWS if row.name == "copy-trim")
    bench = run.Bench(DEMO, None, "q8_0", tokens=16, prompts=2)
    lines = list(run.run_row(bench, row, [128], {}))
    assert [(line.peer, line.mode, line.properties) for line in lines] == [
        ("ovspec", "draft", "default"),
        ("ovspec", "lookup,draft", "default"),
        ("copy_trim", "draft", "default"),
        ("copy_trim", "draft", "ours"),
    ]
    ours, auto, theirs, refused = lines
    assert (ours.ratio["draft"], auto.ratio["lookup,draft"]) == (1.0, 1.0)
    # Without bf16, inferences of different widths may round differently with 8-bit weights.
    assert ours.equal == "2 of 2" or not HAS_BF16
    assert theirs.tokens_per_s
    assert theirs.tpot_ms == pytest.approx(1e3 / theirs.tokens_per_s)
    assert set(theirs.ks) >= {"1", "2"}
    assert theirs.own
    assert refused.error
    assert "DYNAMIC_QUANTIZATION" in refused.error
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(f"{run.as_json(line)}\n" for line in lines), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["report.py", str(file), "--plot", str(tmp_path / "speed.png")])
    report.main()
    shown = capsys.readouterr().out
    assert "| copy and trim | draft | default | 0 | 128 |" in shown
    assert "| fails |" in shown
    assert "DYNAMIC_QUANTIZATION" in shown
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(file.read_text().splitlines()[0])["peer"] == "ovspec"


def test_texts_are_compared() -> None:
    assert run.compare([[1, 2, 3], [1, 9, 3]], [[1, 2, 3], [1, 2, 3]]) == ("1 of 2", 2.0)
    assert run.middle([None, 3.0, 1.0]) == 2.0
    assert run.middle([None]) is None


def test_flags_of_the_processor(tmp_path: Path) -> None:
    assert cmake_flags(tmp_path / "none") == []
    (tmp_path / "cpuinfo").write_text("model name: x\nflags\t: fpu avx2 fma avx512f\n")
    wanted = [f"-DGGML_{name}=ON" for name in ("AVX2", "FMA", "AVX512")]
    assert cmake_flags(tmp_path / "cpuinfo") == ["-DGGML_NATIVE=OFF", *wanted]


def test_loads_arrive_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a closed loop a client waits for its answer; in an open loop requests come when they are due."""
    now = 100.0
    monkeypatch.setattr("arrivals.time.perf_counter", lambda: now)
    load = Load([[1], [2], [3]], [4, 5, 6], clients=2)
    assert (load.due(), load.due(), load.wait()) == ([0, 1], [], None)
    load.answered()
    assert load.due() == [2] and load.sent_all
    load = Load(**Load([[1], [2], [3]], [4, 5, 6], starts=[0.0, 2.0, 3.0]).as_json())
    assert load.due() == [0] and load.wait() == 2.0 and not load.sent_all
    now = 103.5
    assert load.due() == [1, 2] and [load.sent(number).sent for number in (1, 2)] == [2.0, 3.0]


def test_the_bench_of_servers_runs(command_environment: dict[str, str], tmp_path: Path) -> None:
    """On the demo draft; each system generates every token it was asked for."""
    file = tmp_path / "figures.json"
    command = [sys.executable, ROOT / "scripts" / "bench" / "serve.py", DEMO / "draft", "--systems", "lm.stream;serve"]
    more = ["--clients", "1,2", "--turns", "1", "--every", "0.2", "--prompts", "chat", "--json", file]
    done = subprocess.run([*command, *more], env=command_environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert [(each["loop"], each["clients"], each["system"]) for each in found] == [
        ("closed", 1, "lm.stream"),
        ("closed", 1, "serve"),
        ("closed", 2, "serve"),
        ("open", 1, "serve"),
        ("open", 2, "serve"),
    ]
    for each in found:
        texts = 4 + 2 * each["clients"]
        assert len(each["ttft"]) == texts and min(each["ttft"]) > 0 and len(each["gaps"]) > 10 * texts
        assert each["speeds"][0] > 0
