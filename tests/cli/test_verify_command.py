"""``ovspec verify`` on what the other commands print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_runs import Outcome, runs
from conftest import ROOT

from ovspec.cli.verify import recorded_load_options

FOLDER = Path()  # of the small pair, which loads sooner than the demo pair; ``run`` sets it
Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_dir: Path, pair: Path) -> Iterator[Run]:
    monkeypatch.setattr(sys.modules[__name__], "FOLDER", pair)
    yield from runs(monkeypatch, tmp_path, cache_dir)


def generated(run: Run, *options: str, folder: Path | None = None) -> dict:
    found = run("generate", folder or FOLDER, "def fib(", "-n", "20", "--json", *options)
    assert found.code == 0, found.err
    return json.loads(found.out)


def verified(run: Run, data: object, *options: str) -> Outcome:
    Path("result.json").write_text(json.dumps(data), encoding="utf-8")
    return run("verify", "result.json", *options)


@pytest.mark.parametrize(
    "options", [(), ("--draft",), ("-t", "1", "--samples", "2", "--draft", "lookup", "--ignore-eos")]
)
def test_what_generate_prints(run: Run, options: tuple[str, ...]) -> None:
    found = verified(run, generated(run, *options))
    assert (found.code, found.err) == (0, "")
    assert found.out == ("exact: 40 of 40 tokens in 2 texts\n" if "-t" in options else "exact: 20 of 20\n")


def test_a_forged_token(run: Run) -> None:
    data = generated(run)
    was, data["token_ids"][7] = data["token_ids"][7], 77
    found = verified(run, data)
    assert found.code == 1
    first, top, last = found.out.splitlines()
    assert "token 8 of 20 is" in first and "(id 77), but the model chooses" in first and f"(id {was})" in first
    assert top.startswith("  most likely there: ") or "most likely there" in top
    assert last == "not exact: 7 of 20"
    found = verified(run, data, "--json")
    [text] = json.loads(found.out)["texts"].values()
    assert (found.code, text["exact"], text["ok"], text["difference"]["index"]) == (1, 7, False, 7)


def test_a_batch(run: Run) -> None:
    lines = [
        "a prompt",
        {"prompt": "import", "n": 2, "temperature": 0.9, "seed": 3},
        {"prompt": 5},
        {"custom_id": "x", "url": "/v1/completions", "body": {"prompt": "class"}},
        {"custom_id": "y", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hi"}]}},
    ]
    Path("in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    assert run("batch", FOLDER, "in.jsonl", "-o", "out.jsonl", "--draft", "-n", "12").code == 1  # one line is wrong
    found = run("verify", "out.jsonl")
    assert (found.code, found.err) == (0, "")
    assert found.out.endswith(" tokens in 5 texts\n")
    assert found.out.startswith("exact: ")
    forged = Path("out.jsonl").read_text(encoding="utf-8").splitlines()
    body = json.loads(forged[3])
    body["response"]["body"]["choices"][0]["record"]["token_ids"][2] = 55
    forged[3] = json.dumps(body)
    Path("out.jsonl").write_text("\n".join(forged), encoding="utf-8")
    found = run("verify", "out.jsonl")
    assert found.code == 1
    assert found.out.startswith("out.jsonl, line 4: token 3 of ")


def test_settings_of_another_device_are_not_taken_over() -> None:
    made = {"device": "GPU", "engine": "paged", "arithmetic": "exact", "properties": {"KV_CACHE_PRECISION": "f16"}}
    assert recorded_load_options(made, {"device": "GPU"})["properties"] == {"KV_CACHE_PRECISION": "f16"}
    other = recorded_load_options(made, {"device": "CPU"})
    assert other == {"tune": False, "device": "CPU", "arithmetic": "exact", "properties": {}}


def test_options(run: Run, tmp_path: Path) -> None:
    folder = ROOT / "models" / "demo" / "draft"  # in int8, which OpenVINO reads with one thread, too
    data = generated(run, "--engine", "paged", "--ignore-eos", folder=folder)
    forged = json.loads(json.dumps(data)) | {"token_ids": [5, *data["token_ids"][1:]]}
    found = verified(run, forged, "--arithmetic", "fast")
    assert "arithmetic is fast: where two logits are nearly equal, neither token can be certified" in found.out
    assert "certified" not in verified(run, forged).out
    loads: tuple[tuple[str, dict[str, str]], ...] = (  # options that can be seen apart share one
        ("--engine stateful --device AUTO:CPU --no-tune", {}),
        ("--threads 1 --kv-precision f16", {"INFERENCE_NUM_THREADS": "1", "KV_CACHE_PRECISION": "float16"}),
        (
            f"--precision f32 --property INFERENCE_NUM_THREADS=1 --cache-dir {tmp_path}",
            {"INFERENCE_PRECISION_HINT": "float32", "INFERENCE_NUM_THREADS": "1"},
        ),
    )
    for options, expected in loads:
        found = verified(run, data, "--arithmetic", "fast", *options.split())
        assert found.code in (0, 1) and " of 20" in found.out, (options, found)
        assert found.lm.target.engine == ("stateful" if "stateful" in options else "paged"), "as the text was made"
        for name, value in expected.items():
            assert value in found.property(name), options
    assert verified(run, data, "--model", str(folder)).out == "exact: 20 of 20\n"


def test_a_text_of_another_system(run: Run) -> None:
    data = generated(run)
    data["record"]["model"]["system"] = "Windows AMD64"
    assert verified(run, data).out == "exact: 20 of 20\n", "it may be right nevertheless"
    data["token_ids"][7] = 77
    first, second = verified(run, data).out.splitlines()[:2]
    assert "made on Windows AMD64, but this is " in first and first.endswith("; check it on Windows AMD64")
    assert "token 8 of 20 is" in second


def test_wrong_usage(run: Run) -> None:
    data = generated(run)
    found = verified(run, data, "--draft-device", "CPU")
    assert (found.code, "No such option '--draft-device'" in found.err) == (2, True)
    found = verified(run, [1])
    assert (found.code, "not a result" in found.err) == (2, True)
    found = verified(run, {"text": "a"})
    assert (found.code, "not a result with a record" in found.err) == (1, True)
    found = run("verify", ROOT / "README.md")
    assert (found.code, "not JSON" in found.err) == (2, True)
    found = run("verify", "none.json")
    assert (found.code, "none.json" in found.err) == (1, True)
    data["record"]["model"]["folder"] = "/gone"
    found = verified(run, data)
    assert (found.code, "give the model's folder with --model" in found.err) == (2, True)
    assert verified(run, data, "--model", str(FOLDER)).code == 0
    data["record"]["options"]["accept"] = "rejection"
    found = verified(run, data, "--model", str(FOLDER))
    assert (found.code, "can't be verified" in found.err) == (1, True)
