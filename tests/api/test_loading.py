"""Loading: damaged, incomplete and unsuitable folders give a one-sentence error, never a traceback or an abort."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from conftest import PROMPTS, ROOT, TARGET

import ovspec
import ovspec.ir.memory
from ovspec.cli import cli
from ovspec.ir import compile as compile_module
from ovspec.ir.compile import compile_ir
from ovspec.ir.device import DeviceOptions
from ovspec.ir.memory import check_memory_for_tokens, kv_bytes_per_token
from ovspec.setup.inspection import compute_weight_format_shares, inspect_models
from ovspec.setup.manifest import read_manifest

DEMO = ROOT / "models" / "demo"
SOONER: dict[str, Any] = {"engine": "stateful", "arithmetic": "fast"}  # which needs no probing


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Return a copy of the demo pair without ovspec's manifest, as optimum-cli would leave it."""
    shutil.copytree(DEMO, tmp_path / "plain")
    (tmp_path / "plain" / "ovspec.json").unlink()
    return tmp_path / "plain"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a copy of the demo draft, which is compiled sooner."""
    return shutil.copytree(DEMO / "draft", tmp_path / "small")


def refused(folder: Path, message: str, **options: Any) -> None:
    with pytest.raises(ovspec.OvspecError, match=message) as error:
        ovspec.load(folder, **options).generate("def f(", max_tokens=2)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("openvino_model.bin", r"openvino_model\.bin: truncated \(\d+ of \d+ bytes\)"),
        ("openvino_model.xml", r"openvino_model\.xml: cannot be read"),
        ("openvino_tokenizer.bin", r"openvino_tokenizer\.bin: truncated"),
        ("openvino_tokenizer.xml", r"openvino_tokenizer\.xml: cannot be compiled"),
        ("config.json", "not valid JSON"),
        ("tokenizer.json", "not valid JSON"),
        ("generation_config.json", "not valid JSON"),
    ],
)
def test_files_that_are_cut_off(small: Path, name: str, message: str) -> None:
    file = small / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    refused(small, message, **({} if "model" in name else SOONER))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("openvino_model.bin", "openvino_model.bin: missing"),
        ("openvino_model.xml", "has no openvino_model.xml"),
        ("openvino_tokenizer.xml", "has no openvino_tokenizer.xml"),
    ],
)
def test_files_that_are_missing(small: Path, name: str, message: str) -> None:
    (small / name).unlink()
    refused(small, message, **({} if "model" in name else SOONER))


@pytest.mark.parametrize("name", ["openvino_model.bin", "openvino_model.xml"])
def test_a_draft_without_its_model(plain: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OVSPEC_TUNE")
    (plain / "draft" / name).unlink()
    with pytest.raises(ovspec.OvspecError, match=rf"draft.*{name}"):
        ovspec.load(plain, True, tune=False, **SOONER)
    done = CliRunner().invoke(cli, ["tune", str(plain / "draft")], catch_exceptions=True, standalone_mode=False)
    assert isinstance(done.exception, ovspec.OvspecError)


def test_folders_that_hold_something_else(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such folder")
    refused(tmp_path, "no openvino_model.xml")
    refused(ROOT / "models" / "demo-hf" / "target", "a Hugging Face checkpoint, not an IR")
    refused(DEMO / "openvino_model.xml", "is a file")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_models_that_do_not_generate_text(tmp_path: Path) -> None:
    import transformers
    from families import GROUPED, SIZES
    from optimum.exporters.openvino import main_export

    bert: dict[str, Any] = SIZES | {"intermediate_size": 64}
    llama: dict[str, Any] = GROUPED
    models: list[tuple[str, Any, str, str]] = [
        ("llama", transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama)), "text-generation", "a KV cache"),
        (
            "bert",
            transformers.BertModel(transformers.BertConfig(**bert)),
            "feature-extraction",
            "not a text generation model",
        ),
    ]
    for name, model, task, message in models:
        model.save_pretrained(tmp_path / name)
        main_export(str(tmp_path / name), tmp_path / f"{name}-ir", task=task, convert_tokenizer=False)
        refused(tmp_path / f"{name}-ir", message)


@pytest.mark.parametrize("seeds", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_broken_xml_never_kills_the_process(small: Path, seeds: int) -> None:
    """Load IR files with random damage in separate processes."""
    code = """
import sys, random, pathlib, ovspec
file = pathlib.Path(sys.argv[1]) / "openvino_model.xml"
whole, rng, counts = file.read_bytes(), random.Random(int(sys.argv[2])), {"loads": 0, "refused": 0}
for turn in range(12):
    text = bytearray(whole)
    for _ in range(rng.choice((1, 3, 30))):
        at = rng.randrange(len(text))
        if rng.random() < 0.5:
            text[at] = rng.randrange(32, 127)
        else:
            del text[at : at + rng.randrange(1, 400)]
    file.write_bytes(text)
    print(turn, flush=True)
    try:
        ovspec.load(sys.argv[1], properties={"CACHE_DIR": ""}).generate("a", max_tokens=1)
        counts["loads"] += 1
    except ovspec.OvspecError as error:
        assert "\\n" not in str(error), error
        counts["refused"] += 1
print(counts)
"""
    for seed in range(seeds):
        done = subprocess.run([sys.executable, "-c", code, str(small), str(seed)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-200:] + done.stderr[-2000:]
        shutil.copy(DEMO / "draft" / "openvino_model.xml", small)


def test_checksums(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "pair")
    weights = tmp_path / "pair" / "openvino_model.bin"
    damaged = bytearray(weights.read_bytes())
    place = random.Random(0).randrange(len(damaged))
    damaged[place] ^= 1
    weights.write_bytes(damaged)
    assert read_manifest(tmp_path / "pair"), "the sizes are unchanged"
    for verifying in (
        lambda: read_manifest(tmp_path / "pair", verify=True),
        lambda: inspect_models(tmp_path / "pair", DeviceOptions(), verify=True),
        lambda: ovspec.load(tmp_path / "pair", engine="stateful", verify=True),
    ):
        with pytest.raises(ovspec.OvspecError, match=r"openvino_model.bin: changed since the export"):
            verifying()
    assert ovspec.load(DEMO, draft=True, engine="stateful", verify=True)


def test_a_draft_of_another_vocabulary(small: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(DEMO / "draft", other)
    data = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = data["model"]["vocab"]
    a, b = [piece for piece, index in vocab.items() if index in (300, 301)]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (other / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    refused(small, "2 ids of their vocabularies differ", draft=other)
    # Without a tokenizer.json, the tokenizers' results are compared, which are the same here.
    (other / "tokenizer.json").unlink()
    assert ovspec.load(small, draft=other, **SOONER).generate("def f(", max_tokens=8, lookahead=2).stats.proposed


# ---------------------------------------------------------------- inspect, memory, perplexity


def test_inspect_tells_what_is_there(pair: Path, cache_dir: Path) -> None:
    found = inspect_models(pair, DeviceOptions(precision="f32", cache_dir=cache_dir))
    target, draft = found["target"], found["draft"]
    assert (target["source"], target["model_type"], target["rollback"]) == (TARGET.name, "llama", "mask")
    assert target["parameters"] == pytest.approx(1_016_448, rel=0.001)
    assert target["weights"] == {"fp32": 1.0}
    assert len(target["states"]) == 4
    # 2 layers, keys and values, f32
    per_slot = sum(state["width"] for state in target["states"])
    config = json.loads((pair / "config.json").read_text(encoding="utf-8"))
    assert per_slot == 2 * 2 * config["num_key_value_heads"] * config["head_dim"]
    assert target["kv_bytes_per_1000_tokens"] == 1000 * 4 * per_slot
    assert draft["parameters"] < target["parameters"]
    assert compute_weight_format_shares(DEMO)[1] == {"int8": 1.0}


def test_the_memory_estimate_is_what_the_cache_takes(pair: Path, cache_dir: Path) -> None:
    ir = compile_ir(pair, DeviceOptions(precision="f32", cache_dir=cache_dir))
    request = ir.compiled_model.create_infer_request()
    import numpy as np

    tokens = 64
    inputs = {
        "input_ids": np.ones((1, tokens), np.int64),
        "attention_mask": np.ones((1, tokens), np.int64),
        "position_ids": np.arange(tokens)[None],
        "beam_idx": np.zeros(1, np.int32),
        "logits_idx": np.zeros(1, np.int64),
    }
    request.infer({name: inputs[name] for name in ir.inputs})
    held = sum(variable.state.data.nbytes for variable in request.query_state())
    assert tokens * kv_bytes_per_token(ir) == held


def test_a_text_that_cannot_fit_into_memory_is_refused(
    load: Callable[..., ovspec.LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    ir = load().target.ir
    check_memory_for_tokens([ir], 1000)
    with pytest.raises(ovspec.OvspecError, match=r"takes about \d+\.\d GB, but only \d+\.\d GB of memory is free"):
        check_memory_for_tokens([ir], 10**9)
    monkeypatch.setattr(ovspec.ir.memory, "kv_bytes_per_token", lambda _: 1e12)
    monkeypatch.setattr(load().runtime.models, "_max_token_bytes", 1e12)
    with pytest.raises(ovspec.OvspecError, match="lower `max_tokens`"):
        load().generate("def f(", max_tokens=5)
    enough = psutil.virtual_memory().available / 1000  # for 1000 tokens, which is less than the context
    monkeypatch.setattr(ovspec.ir.memory, "kv_bytes_per_token", lambda _: enough)
    monkeypatch.setattr(load().runtime.models, "_max_token_bytes", enough)
    with pytest.raises(ovspec.OvspecError, match=r"The KV cache of 1\d{3} tokens"):
        load().generate("def f(", max_tokens=1500)
    for unlimited in (-1, 10**6):  # no number of tokens that the text is sure to need
        assert load().generate("def f(", max_tokens=unlimited, logit_bias={0: 100.0}).finish_reason == "eos"


def test_perplexity_equals_torch(load: Callable[..., ovspec.LanguageModel], reference: Any) -> None:
    """Every token is scored once, in the window that the docs describe."""
    import torch

    text, context = "".join(PROMPTS[:6]), 100
    ids = reference.tokenizer(text)["input_ids"]
    total, scored = 0.0, 0
    for start in range(0, len(ids), context // 2):
        window = torch.tensor([ids[start : start + context]])
        with torch.no_grad():
            logits = reference.model(input_ids=window).logits[0].double().log_softmax(-1)
        first = 1 if start == 0 else context // 2
        for place in range(first, window.shape[1]):
            total -= float(logits[place - 1, window[0, place]])
            scored += 1
        if start + context >= len(ids):
            break
    found = load().perplexity(text, context)
    assert found.scored == scored == len(ids) - 1
    assert found.nats == pytest.approx(total / scored, abs=1e-5)
    with pytest.raises(ovspec.OvspecError, match="fewer than two tokens"):
        load().perplexity("")
    with pytest.raises(ovspec.OvspecError, match="but the model's context is"):
        load().perplexity(text, 100_000)


# ---------------------------------------------------------------- threads and devices


def test_threads_share_a_model(load: Callable[..., ovspec.LanguageModel]) -> None:
    """Sessions, batches and single calls give the same results in several threads as alone."""
    lm = load(draft=True)

    def work(index: int) -> list[Any]:
        prompt = PROMPTS[index]
        with lm.session() as session:
            session.append(prompt)
            first = session.generate(max_tokens=12).token_ids
            session.append("\n")
            second = session.generate(max_tokens=12).token_ids
        batch = [result.token_ids for result in lm.generate([prompt, PROMPTS[index + 1]], max_tokens=12)]
        return [
            first,
            second,
            batch,
            lm.generate(prompt, max_tokens=12, lookahead=2).token_ids,
            lm.encode(prompt).tolist(),
        ]

    alone = [work(index) for index in range(4)]
    together: dict[int, list[Any]] = {}
    threads = [threading.Thread(target=lambda i=i: together.update({i: work(i)})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[index] for index in range(4)] == alone


@pytest.mark.parametrize(
    "devices",
    [
        ("AUTO", "HETERO:CPU"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (("CPU", "AUTO:CPU"), ("HETERO:CPU", "CPU"))),
    ],
)
def test_target_and_draft_on_different_devices(
    load: Callable[..., ovspec.LanguageModel], devices: tuple[str, str]
) -> None:
    expected = load().generate(PROMPTS[1], max_tokens=20)
    lm = load(draft=True, device=devices[0], draft_device=devices[1])
    result = lm.generate(PROMPTS[1], max_tokens=20, lookahead=3)
    assert result.token_ids == expected.token_ids
    assert (result.stats.device, result.stats.draft_device) == devices
    assert result.stats.accepted > 0


def test_models_are_read_one_after_the_other(pair: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that read their first models at once waited for each other for ever."""
    inside, threads = list[int](), set[int]()
    states = compile_module.find_state_variables

    def noted(model: Any) -> Any:
        threads.add(threading.get_ident())
        inside.append(1)
        time.sleep(0.05)
        assert len(inside) == 1
        found = states(model)
        inside.pop()
        return found

    monkeypatch.setattr(compile_module, "find_state_variables", noted)
    options = DeviceOptions(precision="f32", cache_dir=cache_dir)
    with ThreadPoolExecutor(2) as executor:
        list(executor.map(compile_module.compile_ir, [pair, pair / "draft"], [options, options]))
    assert len(threads) == 2
