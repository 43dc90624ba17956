"""Exported EAGLE-3 heads compute what plain torch functions compute, and heads that don't fit are refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from conftest import DRAFT, PROMPTS, TARGET
from families import HEADED, LOCAL_EXPERTS, WINDOWS, Family
from family_models import make, warm_jobs
from heads import write_head
from ovspec_export import Compression, convert, export_pair
from ovspec_export import export as exporting
from ovspec_export import heads as torch_heads
from ovspec_export.head_agreement import check_head_ir
from ovspec_export.head_layout import is_head_config
from ovspec_export.heads import EagleHead, convert_head_to_ir, load_head_checkpoint
from ovspec_export.source_lookup import find_source
from ovspec_export.sources import Source
from ovspec_export.worker import convert_eagle_head
from safetensors.torch import load_file, save_file
from test_gguf_checkpoint import LLAMA_CPP
from test_gguf_checkpoint import converted as gguf_files
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.ir.compile import find_state_variables
from ovspec.ir.config import read_model_config
from ovspec.ir.device import openvino_core
from ovspec.ir.heads import read_head_graph
from ovspec.ir.paged_attention import rewrite_to_paged
from ovspec.setup.manifest import read_manifest

TARGET_CONFIG: dict[str, Any] = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))
SMALL_CONFIG: dict[str, Any] = json.loads((DRAFT / "config.json").read_text(encoding="utf-8"))
LAYERS = [0, 1, 1]  # inputs of the target's two layers, by which it has none of the default
OUTPUTS = [0, 0, 0]  # the layers' numbers where they are counted by their outputs: inputs of layer 1
F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
FIRST, UNROLLED, LAST = 6, 2, 3  # entries that are read at once, one by one with the head's own states, and at once


class Plain:
    """A head computed from its files by formulas, each time from the beginning of the text."""

    def __init__(self, folder: Path, embedding: torch.Tensor) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.nested = "transformer_layer_config" in config
        self.config: dict[str, Any] = config | config.get("transformer_layer_config", {})
        files = [*folder.glob("model*.safetensors"), *folder.glob("*.bin")]
        read = {
            name.removeprefix("model.").replace("midlayer", "layers.0"): tensor
            for file in files
            for name, tensor in (torch.load(file) if file.suffix == ".bin" else load_file(file)).items()
        }
        self.offsets = read.get("d2t", torch.zeros(self.config.get("draft_vocab_size", len(embedding))).long())
        self.tensors = {name: tensor.float() for name, tensor in read.items()}
        self.taps = 4 if "fc_norm.3.weight" in self.tensors else 3
        self.embedding = self.tensors.get("embed_tokens.weight", embedding.float())
        ids = torch.arange(len(self.offsets)) + self.offsets
        self.lm_head = self.tensors["lm_head.weight"] if "lm_head.weight" in self.tensors else self.embedding[ids]

    def norm(self, name: str, states: torch.Tensor) -> torch.Tensor:
        weight = self.tensors[f"{name}.weight"]
        return functional.rms_norm(states, weight.shape, weight, self.config["rms_norm_eps"])

    def product(self, name: str, states: torch.Tensor) -> torch.Tensor:
        name = f"layers.0.{name}"
        return functional.linear(states, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        if self.config.get("norm_before_fc"):
            states = self.norm("input_norm", states)
        if self.config.get("fc_norm"):
            parts = states.chunk(self.taps, -1)
            states = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
        return states @ self.tensors["fc.weight"].T

    def rotate(self, states: torch.Tensor) -> torch.Tensor:
        """Turn pairs of values [heads, entries, head_dim] by angles that grow with the position."""
        width, scaling = states.shape[-1], self.config.get("rope_scaling")
        frequencies, factor = self.config["rope_theta"] ** (-torch.arange(0, width, 2) / width), 1.0
        if scaling and "mrope_section" not in scaling:  # whose three axes are one for text
            names = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rope_theta")
            options = {name: self.config[name] for name in names} | {"rope_scaling": scaling}
            config = LlamaConfig(**options)
            frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
        angles = torch.arange(states.shape[1])[:, None] * frequencies
        cosines, sines = factor * angles.cos(), factor * angles.sin()
        a, b = states.chunk(2, -1)
        return torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1)

    def read(self, embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and outputs of all entries."""
        normed = self.norm("layers.0.hidden_norm", features)
        both = torch.cat((self.norm("layers.0.input_layernorm", embedded), normed), -1)
        heads = {}
        for name in "qkv":
            found = self.product(f"self_attn.{name}_proj", both).unflatten(-1, (-1, self.config["head_dim"]))
            if name != "v" and f"layers.0.self_attn.{name}_norm.weight" in self.tensors:
                found = self.norm(f"layers.0.self_attn.{name}_norm", found)
            heads[name] = found.transpose(0, 1)
        groups = len(heads["q"]) // len(heads["k"])
        keys, values = self.rotate(heads["k"]).repeat_interleave(groups, 0), heads["v"].repeat_interleave(groups, 0)
        scores = self.rotate(heads["q"]) @ keys.transpose(1, 2) * self.config["head_dim"] ** -0.5
        later = torch.ones(scores.shape[1:]).triu(1).bool()
        seen = (scores.masked_fill(later, -torch.inf).softmax(-1) @ values).transpose(0, 1).flatten(1)
        states = (normed if self.config.get("norm_before_residual") else features) + self.product(
            "self_attn.o_proj", seen
        )
        inner = self.norm("layers.0.post_attention_layernorm", states)
        gate = ACT2FN[self.config["hidden_act"]](self.product("mlp.gate_proj", inner))
        states = states + self.product("mlp.down_proj", gate * self.product("mlp.up_proj", inner))
        normed = self.norm("norm", states)
        before_head = states if not self.nested and self.config.get("norm_output") is False else normed
        output = normed if self.nested and self.config.get("norm_output") else states
        return before_head @ self.lm_head.T, output

    def outputs(self, ids: torch.Tensor, states: torch.Tensor) -> dict[str, np.ndarray]:
        """Return what an IR gives for ``FIRST``, ``UNROLLED`` and ``LAST`` entries, by the output's name."""
        fused, embedded = self.fuse(states), self.embedding[ids].float()
        features = fused[:FIRST]
        for _ in range(UNROLLED):
            features = torch.cat((features, self.read(embedded[: len(features)], features)[1][-1:]))
        logits, hidden = self.read(embedded, torch.cat((features, fused[FIRST:])))
        return {"fused": fused.numpy(), "logits": logits.numpy(), "hidden": hidden.numpy()}


def ir_outputs(folder: Path, ids: torch.Tensor, states: torch.Tensor, embedding: torch.Tensor) -> dict[str, np.ndarray]:
    """Return the outputs of the IR in ``folder``, step by step."""
    request = openvino_core().compile_model(folder / "openvino_model.xml", "CPU", F32).create_infer_request()
    own = "input_ids" in {port.get_any_name() for port in request.model_inputs}

    def infer(entries: slice, features: np.ndarray, known: torch.Tensor) -> dict[str, np.ndarray]:
        tokens = {"input_ids": ids[None, entries].numpy()} if own else {}
        tokens |= {} if own else {"inputs_embeds": embedding[ids[None, entries]].float().numpy()}
        feed = {
            **tokens,
            "hidden_states": features,
            "attention_mask": np.ones((1, entries.stop), np.int64),
            "position_ids": np.arange(entries.start, entries.stop)[None],
            "target_hidden_states": known[None].numpy(),
            "beam_idx": np.zeros(1, np.int32),
        }
        request.infer(feed)
        return {name: request.get_tensor(name).data.copy() for name in ("fused", "logits", "hidden")}

    width = request.get_tensor("hidden").shape[-1]
    fused = infer(slice(0, 1), np.zeros((1, 1, width), np.float32), states)["fused"]
    request.reset_state()
    found = [infer(slice(0, FIRST), fused[:, :FIRST], states)]
    for start in range(FIRST, FIRST + UNROLLED):
        found.append(infer(slice(start, start + 1), found[-1]["hidden"][:, -1:], states))
    found.append(infer(slice(FIRST + UNROLLED, len(ids)), fused[:, FIRST:], states))
    outputs = {name: np.concatenate([each[name][0] for each in found]) for name in ("logits", "hidden")}
    return outputs | {"fused": fused[0]}


def target_embedding(folder: Path = TARGET) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


def differences(folder: Path, head: Path, target: Path = TARGET) -> dict[str, float]:
    """Return by how much each output of an IR differs from the head's, as a share of its spread."""
    embedding = target_embedding(target)
    plain, draws = Plain(head, embedding), torch.Generator().manual_seed(0)
    ids = torch.randint(len(embedding), (FIRST + UNROLLED + LAST,), generator=draws)
    states = torch.randn((FIRST + LAST, plain.tensors["fc.weight"].shape[1]), generator=draws)
    expected, found = plain.outputs(ids, states), ir_outputs(folder, ids, states, embedding)
    return {name: float(np.abs(found[name] - theirs).max() / theirs.std()) for name, theirs in expected.items()}


def converted(head: Path, folder: Path, compression: Compression | None = None) -> Path:
    """Convert a head with the export's job, in this process."""
    chosen = compression or Compression("fp32")
    quantised = chosen.quantization_config() if chosen.weight_format.startswith("int") else {}
    options: dict[str, Any] = {"weight_format": chosen.weight_format, "quantization": quantised, "states_file": ""}
    folder.mkdir()
    convert_eagle_head(str(head), head.name, str(folder), LAYERS, target=str(TARGET), **options)
    return folder


LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "angelslim": {},
    "tied by its config, with an lm_head": {"tie_word_embeddings": True},
    "tied": {"lm_head": False},
    "tied to the target": {"lm_head": False, "embedding": False},
    "without an embedding": {"embedding": False},
    "the target's embedding": {"embedding": target_embedding()},
    "all tokens": {"draft_vocab": None},
    "wider": {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6},
    "of other files": {"pickled": True, "shards": 2},
    "of several files": {"shards": 3, "prefix": "model."},
    "four layers": {"taps": 4, "layer_ids": [0, 0, 0, 0]},
    "specforge": {"style": "specforge", "head_dim": 32, "num_key_value_heads": 4},
    "specforge, norms before": {"style": "specforge", "fc_norm": True, "norm_output": True},
    "specforge, no norm after": {"style": "specforge", "norm_output": False},
    "biases": {"style": "specforge", "biases": True, "hidden_act": "gelu"},
    "speculators": {"style": "speculators"},
    "speculators, gpt-oss": {"style": "speculators", "norm_before_residual": True, "norm_before_fc": True},
    "speculators, 3.1": {"style": "speculators", "fc_norm": True, "norm_output": True, "model_type": "qwen3"},
    "llama3": {"rope_scaling": LLAMA_3 | {"original_max_position_embeddings": 64}, "rope_theta": 5e5},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "mrope": {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}


QUICK = ("tied", "of other files", "specforge, norms before", "speculators, gpt-oss")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in VARIANTS])
def test_heads_compute_what_their_checkpoints_say(name: str, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", target=TARGET_CONFIG, **VARIANTS[name])
    assert max(differences(converted(head, tmp_path / "ir"), head).values()) < 1e-4


@pytest.mark.parametrize(
    ("compression", "types"),
    [
        pytest.param(Compression("bf16"), {"bf16"}, marks=pytest.mark.slow),
        pytest.param(Compression("fp16"), {"f16"}, marks=pytest.mark.slow),
        pytest.param(Compression("int8"), {"u8"}, marks=pytest.mark.slow),
        pytest.param(Compression("int8", sym=True), {"i8"}, marks=pytest.mark.slow),
        (Compression("int4", group_size=64), {"u4", "u8"}),
        pytest.param(Compression("int4", group_size=64, awq=True), {"u4", "u8"}, marks=pytest.mark.slow),
        pytest.param(
            Compression("int4", group_size=32, sym=True, ratio=0.6, backup_precision="none"),
            {"i4", "bf16"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: (
        "-".join([value.weight_format, *value.requested_options()]) if isinstance(value, Compression) else ""
    ),
)
def test_weight_formats(compression: Compression, types: set[str], tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", target=TARGET_CONFIG)
    folder = converted(head, tmp_path / "ir", compression)
    matrices = {}
    for op in openvino_core().read_model(folder / "openvino_model.xml").get_ops():
        shape = list(op.get_output_shape(0)) if op.get_type_name() == "Constant" else []
        if len(shape) > 1 and shape[-1] > 1 and np.prod(shape) > 1000:
            matrices[op.get_friendly_name()] = op.get_element_type().to_string()
    assert len(matrices) == 10
    assert set(matrices.values()) == types
    assert max(differences(folder, head).values()) < {"int8": 0.3, "int4": 3}.get(compression.weight_format, 0.02)


def test_the_interface(tmp_path: Path) -> None:
    """What the runtime relies on."""
    head = write_head(tmp_path / "head", target=TARGET_CONFIG, embedding=target_embedding())
    model = openvino_core().read_model(converted(head, tmp_path / "ir") / "openvino_model.xml")
    inputs, outputs = (
        {p.get_any_name(): f"{p.get_element_type().to_string()} {p.get_partial_shape()}" for p in ports}
        for ports in (model.inputs, model.outputs)
    )
    assert inputs == {
        "inputs_embeds": "f32 [?,?,128]",  # an embedding that is the target's is left out
        "hidden_states": "f32 [?,?,128]",
        "attention_mask": "i64 [?,?]",
        "position_ids": "i64 [?,?]",
        "target_hidden_states": "f32 [?,?,384]",
        "beam_idx": "i32 [?]",
    }
    floats = {"logits": "f32 [?,?,256]", "hidden": "f32 [?,?,128]", "fused": "f32 [?,?,128]"}
    assert outputs == floats | {"d2t": "i64 [256]"}
    d2t = model.output("d2t").get_node().input_value(0).get_node()
    assert (d2t.get_data() == load_file(head / "model.safetensors")["d2t"].numpy()).all()  # type: ignore[attr-defined]
    assert [(state.batch_axis, state.sequence_axis, state.width) for state in find_state_variables(model)] == [
        (0, 2, 32)
    ] * 2
    assert model.get_rt_info(["ovspec", "target_layers"]).astype(str) == "0 1 1"
    assert model.has_rt_info("eagle3_mode")


def test_what_drafts_can_be_paged(pair: Path, tmp_path: Path) -> None:
    checkpoint = write_head(tmp_path / "head", target=TARGET_CONFIG, embedding=False)
    model = read_head_graph(converted(checkpoint, tmp_path / "ir"), pair).model
    rewrite_to_paged(model)
    request = openvino_core().compile_model(model, "CPU", F32).create_infer_request()
    for port in request.model_inputs:
        if "cache" in port.get_any_name():
            shape = [1 if size.is_dynamic else size.get_length() for size in port.get_partial_shape()]
            request.set_tensor(port, ov.Tensor(np.zeros(shape, np.float32)))
    ids = torch.randint(TARGET_CONFIG["vocab_size"], (9,), generator=torch.Generator().manual_seed(0))
    features = torch.randn((9, 128), generator=torch.Generator().manual_seed(1))
    found = []
    for start, end in ((0, 5), (5, 6), (6, 9)):
        feed = {
            "input_ids": ids[start:end].numpy(),
            "hidden_states": features[start:end, None].numpy(),
            "position_ids": np.arange(start, end),
            "past_lens": np.array([start], np.int32),
            "subsequence_begins": np.array([0, end - start], np.int32),
            "block_indices": np.zeros(1, np.int32),
            "block_indices_begins": np.array([0, 1], np.int32),
            "max_context_len": np.array(end, np.int32),
            "logits_idx": np.arange(end - start),
        }
        for name, value in feed.items():
            request.set_tensor(name, ov.Tensor(value.copy()))
        request.infer()
        found.append({name: request.get_tensor(name).data[0].copy() for name in ("logits", "hidden")})
    head, embedded = load_head_checkpoint(checkpoint), target_embedding().float()[ids][None]
    ones = torch.ones((1, 9), dtype=torch.int64)
    taps = torch.zeros(1, 9, head.fc.in_features)
    expected = head(embedded, features[None], ones, ones.cumsum(1) - 1, taps, *head.make_empty_cache())
    for name, theirs in zip(("logits", "hidden"), expected, strict=False):
        assert np.allclose(np.concatenate([each[name] for each in found]), theirs[0], atol=1e-4)


def other_frequencies(head: EagleHead) -> None:
    head.rotary.inv_freq *= 0.5


def no_residual(head: EagleHead) -> None:
    head.layer.layout = dataclasses.replace(head.layout, norm_before_residual=True)


def other_fc(head: EagleHead) -> None:
    head.fc.weight.data = head.fc.weight.data.flip(1)


def other_norm(head: EagleHead) -> None:
    head.norm.weight.data = head.norm.weight.data * 1.1


@pytest.fixture(scope="module")
def one_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head") / "head", target=TARGET_CONFIG)


@pytest.fixture(scope="module")
def its_ir(one_head: Path) -> ov.Model:
    return convert_head_to_ir(load_head_checkpoint(one_head), LAYERS)


@pytest.mark.parametrize("spoil", [None, other_frequencies, no_residual, other_fc, other_norm])
def test_a_wrong_ir_is_found(spoil: Callable[[EagleHead], None] | None, one_head: Path, its_ir: ov.Model) -> None:
    head = load_head_checkpoint(one_head)
    if spoil is None:
        check_head_ir(head, its_ir)
        return
    spoil(head)
    with pytest.raises(
        OvspecError, match=r"the exported head's output '(fused|logits|hidden)' differs from the checkpoint's"
    ):
        check_head_ir(head, its_ir)


def test_padding_that_is_seen_is_found(one_head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch_heads.make_causal_mask
    monkeypatch.setattr(torch_heads, "make_causal_mask", lambda given, new: mask(torch.ones_like(given), new))
    model = convert_head_to_ir(load_head_checkpoint(one_head), LAYERS)
    monkeypatch.undo()
    with pytest.raises(OvspecError, match="the exported head's output 'logits' differs"):
        check_head_ir(load_head_checkpoint(one_head), model)


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_jobs(monkeypatch)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_drafting(folder: Path, cache_dir: Path) -> None:
    """Check that a pair generates the target's own text while its head proposes tokens."""
    options: dict[str, Any] = {"precision": "f32", "cache_dir": cache_dir}
    ours, theirs = (
        ovspec.load(folder, draft, **options).generate(PROMPTS[0], max_tokens=16, ignore_eos=True)
        for draft in (True, False)
    )
    assert ours.token_ids == theirs.token_ids
    assert ours.stats.proposed > 0


def head_for_the_pair(folder: Path, **options: Any) -> Path:
    """Write a head for the small pair's target, whose layers aren't enough for the default ones."""
    return write_head(folder, target=TARGET_CONFIG, layer_ids=OUTPUTS, **options)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert heads in this process."""

    def run_job(job: str, _model: Source, scratch: Path, _told: Any = None, **arguments: Any) -> bool:
        assert job == "convert_eagle_head"
        scratch.mkdir(parents=True, exist_ok=True)
        convert_eagle_head(**arguments)
        return True

    monkeypatch.setattr(convert, "run_worker_job", run_job)


@pytest.mark.usefixtures("here")
def test_a_head_for_an_ir(pair: Path, tmp_path: Path, cache_dir: Path) -> None:
    head = head_for_the_pair(tmp_path / "head", embedding=False)
    manifest = export_pair(str(pair), str(head), tmp_path / "out", draft_compression=Compression("fp32"))
    assert manifest.draft
    assert (manifest.draft.source, manifest.draft.weight_format) == ("head", "fp32")
    assert [state["sequence_axis"] for state in manifest.draft.states] == [2, 2]
    assert read_manifest(tmp_path / "out", verify=True)
    draft = tmp_path / "out" / "draft"
    assert {file.name for file in draft.iterdir()} == {"config.json", "openvino_model.xml", "openvino_model.bin"}
    assert read_model_config(draft).context_length == 512
    assert max(differences(draft, head).values()) < 1e-4
    check_drafting(tmp_path / "out", cache_dir)
    # The IR of a head is copied as it is, and looks for the same target.
    manifest = export_pair(str(pair), str(draft), tmp_path / "again")
    assert manifest.draft
    assert manifest.draft.weight_format == "as it was"
    assert contents(tmp_path / "again" / "draft") == contents(draft)
    with pytest.raises(
        OvspecError,
        match=r"the head reads 384 values per token from 3 target layers, but these layers have 192",
    ):
        export_pair(str(pair / "draft"), str(draft), tmp_path / "other")
    model = openvino_core().read_model(draft / "openvino_model.xml")
    model.remove_result(model.output("fused").get_node())
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    ov.save_model(model, foreign / "openvino_model.xml")
    shutil.copy(draft / "config.json", foreign)
    with pytest.raises(OvspecError, match=r"the head's IR lacks parts of .*; give the head's checkpoint instead"):
        export_pair(str(pair), str(foreign), tmp_path / "other")


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_head_is_read_with_its_target(pair: Path, tmp_path: Path) -> None:
    """Whose graph may have fewer layers to read than its config says."""
    target = tmp_path / "target"
    shutil.copytree(pair, target)
    (target / "config.json").write_text(json.dumps(TARGET_CONFIG | {"num_hidden_layers": 9}), encoding="utf-8")
    head = write_head(tmp_path / "head", target=TARGET_CONFIG)
    with pytest.raises(
        OvspecError, match=r"^head: a head can.t be used .*: only 2 of its 9 layers have their own keys"
    ):
        export_pair(str(target), str(head), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_head_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared on what the target's layers read, and compressed with the target's options."""
    used = []
    load = exporting.convert_head

    def convert_head(*arguments: Any) -> None:
        used.append(np.load(arguments[-1]))
        load(*arguments)

    monkeypatch.setattr(exporting, "convert_head", convert_head)
    head = head_for_the_pair(tmp_path / "head", embedding=target_embedding())
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 30, encoding="utf-8")
    manifest = export_pair(str(TARGET), str(head), tmp_path / "out", Compression("int4"), evaluate=text)
    assert manifest.draft
    assert manifest.draft.options == {"group_size": 64}
    assert not [name for name in manifest.files if name.endswith(".npy")]
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(0, TARGET_CONFIG["vocab_size"], len(used[0]))
    with torch.no_grad():
        states = model(torch.from_numpy(tokens[None]), output_hidden_states=True).hidden_states[1][0]
    assert np.allclose(used[0], np.concatenate([states] * 3, 1), atol=1e-3)


QWEN_3 = {"head_dim": 16, "tie_word_embeddings": True, "max_position_embeddings": 40960, "rope_theta": 1e6}
PUBLIC_ROPE = LLAMA_3 | {"original_max_position_embeddings": 8192}
# Targets and heads with the layers, options and proportions of public ones: the target, and what its head has besides.
PUBLIC: dict[str, tuple[Family, dict[str, Any], list[int]]] = {
    "qwen3-1.7b": (Family("Qwen3Config", HEADED | QWEN_3 | {"num_hidden_layers": 28}), QWEN_3, [2, 14, 25]),
    "qwen3-4b": (
        Family("Qwen3Config", HEADED | QWEN_3 | {"num_hidden_layers": 36}),
        QWEN_3 | {"num_attention_heads": 6, "num_key_value_heads": 3},  # more than the hidden states have room for
        [2, 18, 33],
    ),
    "qwen3-8b": (
        Family("Qwen3Config", HEADED | QWEN_3 | {"num_hidden_layers": 36, "tie_word_embeddings": False}),
        {"style": "speculators", "norm_before_residual": True, "embedding": False, "layer_ids": [2, 18, 33]},
        [2, 18, 33],
    ),
    "llama-3.1-8b": (
        Family("LlamaConfig", HEADED | {"num_hidden_layers": 32, "rope_theta": 5e5, "rope_scaling": PUBLIC_ROPE}),
        {"style": "specforge", "rope_theta": 5e5, "rope_scaling": PUBLIC_ROPE, "pickled": True},
        [2, 16, 29],
    ),
    "gpt-oss-20b": (
        Family(
            "GptOssConfig",
            HEADED | LOCAL_EXPERTS | {"num_hidden_layers": 24, "layer_types": WINDOWS["layer_types"] * 6},
            model_type="gpt_oss",
        ),
        {"style": "specforge", "layer_ids": [1, 11, 21], "intermediate_size": 384, "num_attention_heads": 8},
        [2, 12, 22],
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", PUBLIC)
def test_public_shapes(name: str, tmp_path: Path, cache_dir: Path) -> None:
    family, options, layers = PUBLIC[name]
    make(family.model_type or "llama", family, 0, tmp_path / "target", [], 0)
    config = json.loads((tmp_path / "target" / "config.json").read_text(encoding="utf-8"))
    head = write_head(tmp_path / "head", target=config, **options)
    export_pair(str(tmp_path / "target"), str(head), tmp_path / "out", Compression("fp32"))
    draft = tmp_path / "out" / "draft"
    model = openvino_core().read_model(draft / "openvino_model.xml")
    assert model.get_rt_info(["ovspec", "target_layers"]).astype(str) == " ".join(map(str, layers))
    assert max(differences(draft, head, tmp_path / "target").values()) < 1e-4
    check_drafting(tmp_path / "out", cache_dir)


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.skipif(not LLAMA_CPP.is_dir(), reason="llama.cpp's files could not be fetched")
def test_a_head_for_a_gguf_file(tmp_path: Path, cache_dir: Path) -> None:
    gguf_files(tmp_path / "gguf", ("qwen3",))
    config = json.loads((tmp_path / "gguf" / "qwen3" / "config.json").read_text(encoding="utf-8"))
    rows = load_file(tmp_path / "gguf" / "qwen3" / "model.safetensors")["model.embed_tokens.weight"]
    head = write_head(tmp_path / "head", target=config, layer_ids=OUTPUTS, embedding=rows, lm_head=False)
    file = tmp_path / "gguf" / "qwen3.gguf"
    manifest = export_pair(str(file), str(head), tmp_path / "out", Compression("fp32"))
    assert manifest.draft
    draft = tmp_path / "out" / "draft"
    inputs = {port.get_any_name() for port in openvino_core().read_model(draft / "openvino_model.xml").inputs}
    assert "inputs_embeds" in inputs, "the file's embedding is the same"
    assert max(differences(draft, head, tmp_path / "gguf" / "qwen3").values()) < 1e-4
    check_drafting(tmp_path / "out", cache_dir)
    small = write_head(tmp_path / "small", target=config | {"vocab_size": 4000}, layer_ids=OUTPUTS)
    with pytest.raises(OvspecError, match="vocabulary has 4000 tokens, but the target's has 4096"):
        export_pair(str(file), str(small), tmp_path / "other")


def changed(folder: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> Path:
    """Change a head's config and its tensors; None removes one. Dots in names are written as "__"."""
    file = folder / "model.safetensors"
    found = load_file(file) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, file)
    said = json.loads((folder / "config.json").read_text(encoding="utf-8")) | (config or {})
    said = {name: value for name, value in said.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(said), encoding="utf-8")
    return folder


IDS = torch.arange(256) * 16  # what a head with these offsets proposes
OFFSETS = IDS - torch.arange(256)
FROM_THE_END = torch.cat((OFFSETS[:-1], torch.tensor([4096 - 255])))
BEFORE_THE_START = torch.cat((torch.tensor([-3]), OFFSETS[1:]))
# A head, what is changed in it, and the sentence that refuses it.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (
        "width",
        {"target": SMALL_CONFIG},
        {},
        "reads 192 values per token from 3 target layers, but these layers have 384",
    ),
    (
        "shared width",
        {"embedding": False, "hidden_size": 192},
        {},
        "the head uses the target's embedding, but the head's hidden size is 192, and the target's 128",
    ),
    ("vocabulary", {"target": TARGET_CONFIG | {"vocab_size": 4000}}, {}, "has 4000 tokens, but the target's has 4096"),
    (
        "default layers",
        {"layer_ids": None},
        {},
        "reads the target's layers 2, 1, -1, but the target has only layers 0 to 1",
    ),
    ("layers", {"layer_ids": [0, 0, 1]}, {}, r"layers 1, 1, 2, but the target has only layers 0 to 1"),
    (
        "layers",
        {"style": "speculators", "layer_ids": [0, 1, 2]},
        {},
        r"layers 0, 1, 2, but the target has only layers 0 to 1",
    ),
    (
        "too high",
        {},
        {"d2t": FROM_THE_END, "t2d": None},
        "its tensor d2t has the token id 4096, but the vocabulary has 4096 tokens",
    ),
    (
        "too low",
        {},
        {"d2t": BEFORE_THE_START, "t2d": None},
        "its tensor d2t has the token id -3, but the vocabulary has 4096 tokens",
    ),
    ("twice", {}, {"d2t": -torch.arange(256), "t2d": None}, "its tensor d2t has a token twice"),
    ("other t2d", {}, {"d2t": OFFSETS}, "its tensors t2d and d2t contain different tokens"),
    ("no d2t", {}, {"d2t": None}, "the head proposes 256 of 4096 tokens, but has no tensor d2t"),
    ("short d2t", {}, {"d2t": OFFSETS[:-1].clone()}, "proposes 256 tokens, but the tensor d2t has 255 entries"),
    ("deep", {}, {"config": {"num_hidden_layers": 2}}, "the head has several layers; only a single layer is supported"),
    ("deeper", {}, {"layers__1__mlp__up_proj__weight": IDS}, "the head has several layers"),
    ("window", {}, {"config": {"use_sliding_window": True}}, "attention has a sliding window"),
    ("windows", {"style": "speculators", "layer_types": ["sliding_attention"]}, {}, "attention has a sliding window"),
    (
        "phi3",
        {"model_type": "phi3"},
        {},
        "is of the family phi3; only llama and qwen3 are supported",
    ),
    (
        "rope",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {},
        "rotary embedding is dynamic; only full rotary embeddings",
    ),
    ("part", {"partial_rotary_factor": 0.5}, {}, "rotary embedding is partial"),
    ("norms", {"norm_before_fc": True, "fc_norm": True}, {}, "has both norm_before_fc and fc_norm"),
    ("unknown", {}, {"midlayer__mlp__router": IDS}, r"the unknown tensor layer.mlp.router"),
    ("lacking", {}, {"midlayer__hidden_norm__weight": None}, "the head lacks the tensor layer.hidden_norm.weight"),
    ("no fc", {}, {"fc__weight": None}, "the head lacks the tensor fc.weight"),
    (
        "shape",
        {},
        {"config": {"intermediate_size": 64}},
        r"layer.mlp.down_proj.weight has the shape 128 x 256, but needs 128 x 64",
    ),
    (
        "entry",
        {},
        {"config": {"hidden_size": None}},
        r"config.json has a missing or wrong entry \('hidden_size'\)",
    ),
    (
        "quantised",
        {},
        {"config": {"quantization_config": {"quant_method": "fp8"}}},
        r"its weights are quantised by fp8 and belong to a head",
    ),
]


@pytest.mark.parametrize(("name", "options", "changes", "message"), REFUSED, ids=[each[0] for each in REFUSED])
def test_heads_that_do_not_fit_are_refused_at_once(
    name: str,
    options: dict[str, Any],
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for job in ("convert_source", "convert_head"):
        monkeypatch.setattr(exporting, job, lambda *_: pytest.fail("something was converted"))
    head = write_head(tmp_path / name, **{"target": TARGET_CONFIG, "layer_ids": OUTPUTS} | options)
    if changes:
        changed(head, **changes)
    with pytest.raises(OvspecError, match=message) as error:
        export_pair(str(TARGET), str(head), tmp_path / "out")
    assert name in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_heads_that_cannot_be_read_are_named(tmp_path: Path, one_head: Path) -> None:
    def copied(name: str, **options: Any) -> Path:
        return write_head(tmp_path / name, target=TARGET_CONFIG, layer_ids=OUTPUTS, **options)

    empty, cut, code = copied("empty"), copied("cut", pickled=True), copied("code", pickled=True)
    (empty / "model.safetensors").unlink()
    data = (cut / "pytorch_model.bin").read_bytes()
    (cut / "pytorch_model.bin").write_bytes(data[: len(data) // 2])
    torch.save({"fc.weight": Path("/tmp")}, code / "pytorch_model.bin")
    missing = copied("missing", shards=2)
    next(iter(missing.glob("*2-of-*.safetensors"))).unlink()
    other = copied("other", pickled=True, shards=2)
    next(iter(other.glob("*2-of-*.bin"))).unlink()
    for head, message in [
        (empty, "has no model.safetensors and no pytorch_model.bin"),
        (cut, r"pytorch_model.bin: cannot be read \(it was not written by torch.save, or is truncated\)"),
        (
            code,
            r"pytorch_model.bin: cannot be read \(it contains pathlib.*, not only tensors\); save the tensors as model",
        ),
        (missing, "files with weights, such as model-00002-of-00002.safetensors"),
        (other, "such as pytorch_model-00002-of-00002.bin"),
    ]:
        with pytest.raises(OvspecError, match=message):
            find_source(str(head))
    with pytest.raises(
        OvspecError,
        match="head: an EAGLE-3 head, not a model; export the head's target model, with the head as `draft`",
    ):
        export_pair(str(one_head), None, tmp_path / "out")
    with pytest.raises(OvspecError, match="`draft` can't be combined"):
        export_pair(str(TARGET), str(one_head), tmp_path / "out", draft_layers=1)


def test_what_a_head_needs_of_an_ir(pair: Path, tmp_path: Path) -> None:
    head = head_for_the_pair(tmp_path / "head", embedding=False, lm_head=False)
    with pytest.raises(
        OvspecError,
        match=r"the head needs the embedding from the target's checkpoint, .*; give the target's checkpoint",
    ):
        export_pair(str(pair), str(head), tmp_path / "out")


def test_formats_are_told_apart() -> None:
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert not is_head_config(llama)
    assert is_head_config(llama | {"draft_vocab_size": 32000}), "as EAGLE's authors write theirs"
    assert is_head_config({"speculators_model_type": "eagle3"})
    assert not is_head_config({"speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"]})
    assert not is_head_config({})
