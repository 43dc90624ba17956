"""Every command and feature on a GPU: it runs there, or refuses in one sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hybrid
import pytest
from gpu_texts import DEMO, KERNELS, MARKS, NOISE, PROMPT, on_gpu

pytestmark = MARKS
N = "12"


def run(*arguments: str | Path, input: str = "", rc: int = 0) -> tuple[str, str]:
    command = [sys.executable, "-m", "ovspec", *map(str, arguments)]
    if arguments[0] != "devices":
        command += ["--cache-dir", str(KERNELS)]
    done = subprocess.run(command, input=input, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == rc, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def on(*arguments: str | Path, **more: Any) -> tuple[str, str]:
    return run(*arguments, "--device", "GPU", **more)


def test_devices() -> None:
    out, _ = run("devices")
    line = next(line for line in out.splitlines() if line.startswith("GPU"))
    assert "driver" in line and "XMX" in line and "KV cache f16" in line


def test_generate_says_its_promise_and_compares() -> None:
    out, err = on("generate", DEMO, PROMPT, "-n", N, "--draft", "lookup,draft", "--stats", "full", "--compare")
    assert "fast, not exact on a GPU" in err
    assert "speed-up" in out + err
    if gap := re.search(r"logits are ([0-9.]+) apart", out + err):
        assert float(gap[1]) <= NOISE


def test_chat() -> None:
    out, err = on("chat", DEMO, "-n", N, "--stats", "full", input="Hello\nAnd you?\n")
    assert out.strip() and err.count("device: GPU") == 2


def test_batch(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(f'"def f{i}("\n' for i in range(4)), encoding="utf-8")
    on("batch", DEMO, tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "-n", N, "--draft", "lookup")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 4 and all(line["record"]["model"]["device"] == "GPU" for line in lines)


def test_bench() -> None:
    out, _ = on("bench", DEMO, "-n", N, "--json")
    modes = [json.loads(line)["mode"] for line in out.splitlines()]
    assert modes[:4] == ["plain", "lookup", "draft", "lookup,draft"]


def test_inspect_shows_what_was_probed_and_reports_it(tmp_path: Path) -> None:
    out, _ = on("inspect", DEMO, "--report", tmp_path / "report.json")
    assert "fast, not exact on a GPU" in out and "probed on GPU KV_CACHE_PRECISION=f16" in out
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["text"]["lookup"]["accepted"] > 0
    assert str(Path.home()) not in json.dumps(report)


def test_verify_says_what_it_cannot_certify(tmp_path: Path) -> None:
    text = json.loads(on("generate", DEMO, PROMPT, "-n", N, "--json")[0])
    (tmp_path / "text.json").write_text(json.dumps(text), encoding="utf-8")
    assert run("verify", tmp_path / "text.json")[0] == f"exact: {N} of {N}\n"
    text["token_ids"][3] = 77
    (tmp_path / "text.json").write_text(json.dumps(text), encoding="utf-8")
    out, _ = run("verify", tmp_path / "text.json", rc=1)
    assert "token 4 of 12 is" in out and "neither token can be certified" in out


def test_perplexity(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(PROMPT * 3, encoding="utf-8")
    found = [
        float(re.search(r"perplexity ([0-9.]+)", out)[1])  # type: ignore[index]
        for out in (
            on("perplexity", DEMO, tmp_path / "notes.txt", "--context", "64")[0],
            run("perplexity", DEMO, tmp_path / "notes.txt", "--context", "64", "--precision", "f32")[0],
        )
    ]
    assert abs(found[0] / found[1] - 1) < 0.02


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (("--regex", "[0-9]{3}"), r"[0-9]{3}"),
        (("--json-schema", '{"enum": ["yes", "no"]}'), r'"(yes|no)"'),
        (("--gbnf", "grammar.gbnf"), r"ab+"),
    ],
)
def test_constraints(options: tuple[str, str], pattern: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grammar.gbnf").write_text('root ::= "a" "b"+', encoding="utf-8")
    out, _ = on("generate", DEMO, "x = ", "-n", N, "--draft", "lookup", *options)
    assert re.fullmatch(pattern, out.strip())


def test_healing_and_choices() -> None:
    lm = on_gpu("lookup")
    assert lm.generate("import os\nimport sy", max_tokens=4, heal=True).text
    with lm.session() as session:
        session.append(PROMPT)
        chosen = session.select(["    pass", "    return 1"])
        assert chosen.text in ("    pass", "    return 1")


@pytest.mark.parametrize("attention", [None, "mask", "alibi"])
def test_recurrent_and_hybrid_models(attention: str | None, tmp_path: Path) -> None:
    """Their states are set back after each rejection; in processes of its own, because torch has made it here."""
    folder = hybrid.export(hybrid.Hybrid(4096, attention), tmp_path / "ir", DEMO)
    plain, rejected, accepted = (
        json.loads(on("generate", folder, PROMPT, "-n", N, "--json", *more)[0])
        for more in ((), *(("--draft", path, "--lookahead", "3") for path in (DEMO / "draft", folder)))
    )
    assert plain["stats"]["engine"] == "stateful"
    assert rejected["stats"]["proposed"] > rejected["stats"]["accepted"]
    assert accepted["stats"]["accepted"] > 0
    assert plain["token_ids"] == rejected["token_ids"] == accepted["token_ids"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--device", "GPU.7"), "no such device"),
        (("--device", "GPU", "--threads", "2"), "works only on a CPU"),
        (("--device", "CPU:GPU"), "only AUTO and HETERO take a list"),
        (("--device", "AUTO:GPU,CPU", "--engine", "paged"), "the paged engine needs a CPU or a GPU"),
        (("--device", "AUTO:GPU,CPU", "--kv-precision", "u8"), "works on a GPU only with the paged engine"),
    ],
)
def test_refusals(options: tuple[str, ...], told: str) -> None:
    _, err = run("generate", DEMO, "a", "-n", "1", *options, rc=1)
    assert told in err.splitlines()[-1]
