"""Exports that keep the weights of GGUF files: the IR has the weights and logits that the ``gguf`` package reads."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from conftest import ROOT, USERS_CACHE
from exact_texts import check_texts_are_exact
from family_models import warm_jobs
from openvino import opset13 as ops
from ovspec_export import Compression, convert, export_pair, kept_speed, quality
from ovspec_export.export_plan import resolve_compression
from ovspec_export.gguf_checkpoint import write_gguf_checkpoint, write_kept_gguf_checkpoint
from ovspec_export.heads import read_target_embedding
from ovspec_export.kept_weights import FORMS_FILE, WEIGHTS_FILE
from ovspec_export.source_lookup import find_source
from ovspec_export.sources import GgufSource
from peers.install import python_of
from quantised_gguf import EXACT, NEARLY_EXACT, quantise_file
from safetensors.torch import load_file
from test_gguf_checkpoint import LLAMA_CPP, MODELS, logits, unpack
from test_gguf_checkpoint import files as files  # the random models
from transformers import AutoModelForCausalLM, AutoTokenizer

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.ir.compile import MODEL_FILE
from ovspec.sampling.logprobs import log_softmax
from ovspec.setup.manifest import MANIFEST_FILE

KINDS = [*EXACT, *NEARLY_EXACT, "F16", "Q3_K"]


def matrices_in(folder: Path) -> list[np.ndarray]:
    """Return the matrices that the products and look-ups of an IR read, as OpenVINO computes them."""
    model = ov.Core().read_model(folder / MODEL_FILE)
    ports = [
        op.input_value(1 if op.get_type_name() == "MatMul" else 0)
        for op in model.get_ops()
        if op.get_type_name() in ("MatMul", "Gather")
    ]
    found = []
    for port in ports:
        if port.get_partial_shape().is_static and len(port.get_shape()) == 2 and min(port.get_shape()) > 16:
            matrix = ov.Model([ops.result(port)], [])  # type: ignore[arg-type]
            found.append(ov.Core().compile_model(matrix, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})()[0])
    return found


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))


@pytest.fixture(scope="session")
def mixed(files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return a file with all types, and the type of each matrix."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    return path, quantise_file(files / "llama-3.gguf", path, KINDS)


def ids_of(length: int = 150) -> np.ndarray:
    return torch.randint(0, 4000, (1, length), generator=torch.Generator().manual_seed(1)).numpy()


def ir_logits(folder: Path, ids: np.ndarray | None = None) -> np.ndarray:
    ids = ids_of() if ids is None else ids
    properties = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    compiled = ov.Core().compile_model(folder / MODEL_FILE, "CPU", properties)
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "beam_idx": np.zeros(1, np.int32)}
    inputs["position_ids"] = np.arange(ids.shape[1])[None]
    return compiled(inputs)["logits"]


@pytest.fixture(scope="session")
def exported(mixed: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the file's default export, and what that printed."""
    folder = tmp_path_factory.mktemp("kept") / "ir"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(printed):
        warm_jobs(patch)
        export_pair(str(mixed[0]), None, folder)
    return folder, printed.getvalue()


@pytest.fixture(scope="session")
def checkpoint(mixed: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file as a checkpoint in f32."""
    folder = tmp_path_factory.mktemp("unpacked") / "hf"
    unpack(mixed[0], folder)
    return folder


def test_logits_are_the_files(exported: tuple[Path, str], checkpoint: Path) -> None:
    reference = logits(checkpoint)[0].numpy()
    # The one matrix in Q3_K is rounded to 8 bits.
    assert rms(ir_logits(exported[0])[0] - reference) < 0.02 * reference.std()


def test_texts_are_exact(exported: tuple[Path, str], cache_dir: Path) -> None:
    check_texts_are_exact(exported[0], cache_dir)


def test_weights_are_the_files(
    exported: tuple[Path, str], checkpoint: Path, mixed: tuple[Path, dict[str, str]]
) -> None:
    """Each matrix is there to the bit, or nearly; one with sums of groups is checked by the logits."""
    folder, printed = exported
    found = matrices_in(folder)
    weights = load_file(checkpoint / "model.safetensors")
    names = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
    parts = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    parts |= {"attn_output": "self_attn.o_proj", "ffn_up": "mlp.up_proj", "ffn_gate": "mlp.gate_proj"}
    parts |= {"ffn_down": "mlp.down_proj"}
    for name, kind in mixed[1].items():
        if name not in names:
            _, layer, part, _ = name.split(".")
            names[name] = f"model.layers.{layer}.{parts[part]}.weight"
        expected = weights[names[name]].numpy()
        errors = [rms(matrix - expected) / rms(expected) for matrix in found if matrix.shape == expected.shape]
        if kind in (*EXACT, "F16"):
            assert min(errors) == 0, (name, kind)
        elif f"in {kind}: i" not in printed or "Q6_K" in kind:
            assert 0 < min(errors) < (0.02 if kind == "Q3_K" else 1e-3), (name, kind)


def test_forms_are_told(exported: tuple[Path, str], mixed: tuple[Path, dict[str, str]]) -> None:
    folder, printed = exported
    for kind in set(mixed[1].values()):
        assert re.search(rf"matri(x|ces) in {kind}: ", printed)
    assert "in Q3_K: quantised anew to u8 with integer zero points" in printed
    assert "in Q8_0: i8 in groups of 32\n" in printed
    manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    assert manifest["target"]["weight_format"] == "keep"
    assert not (folder / FORMS_FILE).exists() and not (folder / WEIGHTS_FILE).exists()


def test_first_layers_and_comparison(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    """A draft of the first layer keeps its weights, too, and neither differs from the file."""
    warm_jobs(monkeypatch)
    file = tmp_path / "exact.gguf"
    quantise_file(files / "llama-3.gguf", file, list(EXACT))
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 5, encoding="utf-8")
    monkeypatch.setattr(quality, "run_worker_job", convert.run_worker_job)
    export_pair(str(file), None, tmp_path / "pair", draft_layers=1, evaluate=tmp_path / "text.txt")
    lm = ovspec.load(tmp_path / "pair", "draft", precision="f32", cache_dir=cache_dir)
    plain = lm.generate("def f(", max_tokens=12, lookahead=0)
    drafted = lm.generate("def f(", max_tokens=12, lookahead=3)
    assert drafted.token_ids == plain.token_ids and drafted.stats.proposed


def test_heads_get_the_embedding(mixed: tuple[Path, dict[str, str]], checkpoint: Path, tmp_path: Path) -> None:
    source = find_source(str(mixed[0]))
    assert isinstance(source, GgufSource)
    write_kept_gguf_checkpoint(source, tmp_path / "kept")
    embedding = read_target_embedding(tmp_path / "kept")
    assert embedding is not None
    assert torch.equal(embedding, load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"])


@pytest.mark.parametrize(("times", "faster"), [((1.0, 2.0), True), ((2.0, 1.0), False)])
def test_faster_form_is_taken(times: tuple[float, float], faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"offsets": [times[0]] * 3, "zero points": [times[1]] * 3}
    monkeypatch.setattr(kept_speed, "time_products", lambda _: seconds)
    assert kept_speed.are_offsets_faster.__wrapped__() == faster


def test_times_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_speed, "TIMING_TURNS", 1)
    assert kept_speed.are_offsets_faster() in (True, False)


def test_weights_without_scales_are_not_kept(files: Path, tmp_path: Path) -> None:
    source = find_source(str(files / "llama.gguf"))
    assert not source.is_quantised
    assert resolve_compression(source, None) == Compression("int8")
    with pytest.raises(
        OvspecError, match="llama: its weights aren't quantised, so `weight_format` can't be 'keep'; choose another"
    ):
        export_pair(str(files / "llama.gguf"), None, tmp_path / "ir", Compression("keep"))


def test_damaged_scales_are_refused(
    mixed: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_jobs(monkeypatch)
    source = find_source(str(mixed[0]))
    assert isinstance(source, GgufSource)
    [name] = [name for name, kind in mixed[1].items() if kind == "Q8_0"][:1]
    data = bytearray(mixed[0].read_bytes())
    offset = source.gguf_headers.tensors[name].offset
    data[offset : offset + 2] = np.array([np.nan], np.float16).tobytes()
    (tmp_path / "nan.gguf").write_bytes(data)
    with pytest.raises(OvspecError, match=f"nan.gguf: its tensor {name} has a NaN or infinite scale"):
        export_pair(str(tmp_path / "nan.gguf"), None, tmp_path / "ir")
    assert not (tmp_path / "ir").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_is_kept(name: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is the one of the same weights in torch, in all types of a file that are exact."""
    warm_jobs(monkeypatch)
    file = tmp_path / f"{name}.gguf"
    quantise_file(files / f"{name}.gguf", file, list(EXACT))
    unpack(file, tmp_path / "hf")
    export_pair(str(file), None, tmp_path / "ir")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    prompt = np.random.default_rng(0).integers(5, 4000, 24).tolist()
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=None)
    properties = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    lm = ovspec.load(tmp_path / "ir", precision="f32", properties=properties, cache_dir=tmp_path / "cache")
    result = lm.generate(prompt, max_tokens=24, ignore_eos=True)
    assert result.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_exports_compute_what_llama_cpp_does(tmp_path: Path) -> None:
    """The real model, quantised by llama.cpp; llama.cpp also rounds activations, so its logits differ a little."""
    peer, file = python_of("llamacpp"), USERS_CACHE / "downloads" / "model" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not (peer.exists() and file.exists() and LLAMA_CPP.is_dir()):
        pytest.skip("llama.cpp isn't installed (scripts/bench/peers/install.py llamacpp), or the model not fetched")
    source = find_source(str(file))
    assert isinstance(source, GgufSource)
    write_gguf_checkpoint(source, tmp_path / "hf", "fp32")
    support, kinds = ROOT / "tests" / "support", ("F16", "Q8_0", "Q6_K", "Q4_K_M")
    command = [sys.executable, str(support / "to_gguf.py"), str(LLAMA_CPP), str(tmp_path / "hf")]
    subprocess.run([*command, str(tmp_path / "f32.gguf")], check=True, capture_output=True)
    text = (ROOT / "docs" / "explanation" / "lossless.md").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(tmp_path / "hf")(text)["input_ids"][:256]
    (tmp_path / "ids.json").write_text(json.dumps(ids), encoding="utf-8")
    places = [tmp_path / "f32.gguf", tmp_path, tmp_path / "ids.json"]
    subprocess.run([peer, support / "llama_cpp_logits.py", *places, *kinds], check=True, capture_output=True)
    for kind in kinds:
        unpack(tmp_path / f"{kind}.gguf", tmp_path / kind)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype=torch.float32).eval()
        with torch.no_grad():
            of_file = log_softmax(model(torch.tensor([ids])).logits[0].numpy())
        theirs = log_softmax(np.load(tmp_path / f"{kind}.npy"))
        assert divergence(of_file, theirs) < 0.01, kind
        if kind == "F16":  # which is quantised by default
            continue
        export_pair(str(tmp_path / f"{kind}.gguf"), None, tmp_path / f"{kind}-ir")
        ours = log_softmax(ir_logits(tmp_path / f"{kind}-ir", np.array([ids]))[0])
        perplexities = [np.exp(-logprobs[np.arange(255), ids[1:]].mean()) for logprobs in (of_file, ours, theirs)]
        print(kind, divergence(of_file, ours), divergence(of_file, theirs), divergence(theirs, ours), perplexities)
        # Groups of a K-quant have scales and minima with more bits than f16.
        assert divergence(of_file, ours) < 1e-5, kind
        assert abs(perplexities[1] / perplexities[0] - 1) < 1e-3, kind
        assert divergence(theirs, ours) < 0.01, kind


def divergence(reference: np.ndarray, logprobs: np.ndarray) -> float:
    """Return the Kullback-Leibler divergence of each position's next token, in nats, on average."""
    return float((np.exp(reference) * (reference - logprobs)).sum(-1).mean())
