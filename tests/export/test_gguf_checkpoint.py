"""GGUF files: the checkpoint made of one computes what the original computes, and bad files are refused in a sentence.

llama.cpp's own script writes the files.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, USERS_CACHE
from families import FAMILIES, GROUPED, HEADED
from family_models import warm_jobs
from kept import kept_model
from ovspec_export import Compression, export_pair, gguf_checkpoint
from ovspec_export.convert import choose_group_size
from ovspec_export.gguf_checkpoint import write_gguf_weights, write_json_file
from ovspec_export.gguf_file import read_shard_header
from ovspec_export.source_lookup import find_source
from ovspec_export.sources import GgufSource

import ovspec
from ovspec.base.errors import OvspecError

LLAMA_CPP = USERS_CACHE / "downloads" / "llama.cpp"
needs_llama_cpp = pytest.mark.skipif(not LLAMA_CPP.is_dir(), reason="llama.cpp's files could not be fetched")
TOKENIZER = ROOT / "models" / "demo-hf" / "draft"
LLAMA_3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"max_position_embeddings": 131072, "rope_theta": 5e5}
SIX_LAYERS = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
GEMMA_3 = FAMILIES["gemma3_text"].arguments | SIX_LAYERS
# For types with blocks of 256 weights.
WIDE_EXPERTS = {"hidden_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
# Name -> the config of a random model.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED | {"tie_word_embeddings": True}),
    "llama-3": (
        "LlamaConfig",
        GROUPED | LONG | {"hidden_size": 256, "rope_scaling": LLAMA_3 | {"original_max_position_embeddings": 8192}},
    ),
    "llama-bias": ("LlamaConfig", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("LlamaConfig", GROUPED | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("MistralConfig", GROUPED | {"sliding_window": None}),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen2-yarn": (
        "Qwen2Config",
        GROUPED | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "qwen2_moe": ("Qwen2MoeConfig", FAMILIES["qwen2_moe"].shape(1) | WIDE_EXPERTS),
    "qwen3": ("Qwen3Config", HEADED | {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", FAMILIES["qwen3_moe"].shape(1) | WIDE_EXPERTS | {"norm_topk_prob": True}),
    "phi3": ("Phi3Config", GROUPED | {"partial_rotary_factor": 0.5}),
    "phi3-longrope": ("Phi3Config", FAMILIES["phi3, longrope"].arguments),
    "gemma2": ("Gemma2Config", FAMILIES["gemma2"].arguments),
    "gemma3": ("Gemma3TextConfig", GEMMA_3),
    "gemma3-linear": ("Gemma3TextConfig", GEMMA_3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gpt2": ("GPT2Config", FAMILIES["gpt2"].arguments | {"n_ctx": 256, "bos_token_id": 0, "eos_token_id": 0}),
    "starcoder2": ("Starcoder2Config", GROUPED),
    "stablelm": ("StableLmConfig", GROUPED),
    "lfm2": ("Lfm2Config", FAMILIES["lfm2"].arguments),
}
QUICK = ("llama", "llama-3", "qwen3", "qwen2_moe")
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]


def make(name: str, folder: Path) -> None:
    """Make a random model in ``folder``."""
    kind, arguments = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**arguments)).eval()
    for weights in model.parameters():
        if weights.ndim > 1:
            torch.nn.init.normal_(weights, std=0.2)
        else:
            weights.data += torch.randn_like(weights) * 0.1
    model.save_pretrained(folder)
    for file in TOKENIZER.glob("tok*.json"):
        shutil.copy(file, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json_file(folder / "tokenizer_config.json", config | {"tokenizer_class": "GPT2Tokenizer"})


def converted(folder: Path, names: tuple[str, ...], *options: str) -> None:
    """Make random models in ``folder`` and convert them to GGUF."""
    folder.mkdir()
    places = []
    for name in names:
        make(name, folder / name)
        places += [str(folder / name), str(folder / f"{name}.gguf")]
    script = ROOT / "tests" / "support" / "to_gguf.py"  # its gguf is another version than the installed one
    command = [sys.executable, str(script), str(LLAMA_CPP), *places, "--", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Return a folder with random models as checkpoints and as GGUF files."""
    if not LLAMA_CPP.is_dir():
        pytest.skip("llama.cpp's files could not be fetched")
    slow = "not slow" not in str(request.config.getoption("-m"))
    name, models = ("gguf-all", tuple(MODELS)) if slow else ("gguf", QUICK)
    return kept_model(tmp_path_factory, name, lambda folder: converted(folder, models))


def logits(folder: Path, length: int = 150) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(0, 4000, (1, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(tokens).logits


def unpack(file: Path, folder: Path) -> None:
    source = find_source(str(file))
    assert isinstance(source, GgufSource)
    folder.mkdir()
    write_json_file(folder / "config.json", source.config | {"dtype": "float32"})
    write_gguf_weights(source.gguf_headers, folder, "float32")


@pytest.mark.parametrize("name", ALL)
def test_checkpoint_computes_what_the_original_does(name: str, files: Path, tmp_path: Path) -> None:
    unpack(files / f"{name}.gguf", tmp_path / "made")
    assert torch.equal(logits(tmp_path / "made"), logits(files / name))


def test_weights_in_several_files_are_the_same(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_checkpoint, "SHARD_BYTES", 100_000)
    unpack(files / "llama.gguf", tmp_path / "made")
    assert len(list((tmp_path / "made").glob("*.safetensors"))) > 1
    assert torch.equal(logits(tmp_path / "made"), logits(files / "llama"))


def test_left_out_scaling_would_be_noticed(files: Path, tmp_path: Path) -> None:
    unpack(files / "llama-3.gguf", tmp_path / "made")
    config = json.loads((tmp_path / "made" / "config.json").read_text(encoding="utf-8"))
    del config["rope_scaling"]
    write_json_file(tmp_path / "made" / "config.json", config)
    assert not torch.allclose(logits(tmp_path / "made"), logits(files / "llama-3"), atol=1e-3)


@pytest.mark.slow
def test_shards_are_one_model(files: Path, tmp_path: Path) -> None:
    whole = find_source(str(files / "llama.gguf"))
    assert isinstance(whole, GgufSource)
    script = ROOT / "tests" / "support" / "to_gguf.py"
    command = [sys.executable, str(script), str(LLAMA_CPP), str(files / "llama"), str(tmp_path / "llama.gguf")]
    subprocess.run([*command, "--", "--split-max-tensors", "8"], check=True, capture_output=True)
    shards = sorted(tmp_path.glob("*.gguf"))
    assert len(shards) > 2
    unpack(shards[1], tmp_path / "made")  # any of them names the model
    assert torch.equal(logits(tmp_path / "made"), logits(files / "llama"))
    shutil.copy(shards[0], tmp_path / "renamed.gguf")
    with pytest.raises(OvspecError, match=rf"the model has {len(shards)} files, but .*; restore the original names"):
        find_source(str(tmp_path / "renamed.gguf"))
    shards[-1].unlink()
    with pytest.raises(OvspecError, match=rf"{shards[-1].name}: is missing; download all {len(shards)} files"):
        find_source(str(shards[0]))


def test_file_cut_anywhere_is_refused(files: Path, tmp_path: Path) -> None:
    data = (files / "llama.gguf").read_bytes()
    file = tmp_path / "cut.gguf"
    for share in np.linspace(0, 0.999, 20):
        file.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(OvspecError, match=r"cut\.gguf: (not a GGUF file|damaged or truncated)"):
            find_source(str(file))


@pytest.mark.parametrize("seed", range(3))
def test_damaged_header_is_refused_or_read(seed: int, files: Path, tmp_path: Path) -> None:
    """Random bytes in the header never give another error than ours, and never take long."""
    data, draws = bytearray((files / "llama.gguf").read_bytes()), np.random.default_rng(seed)
    for _ in range(40):
        damaged = data.copy()
        for place in draws.integers(4, 2000, 3):
            damaged[place] = draws.integers(256)
        file = tmp_path / "damaged.gguf"
        file.write_bytes(damaged)
        try:
            source = find_source(str(file))
            assert isinstance(source, GgufSource)
        except OvspecError as error:
            assert "damaged.gguf" in str(error)


def text_bytes(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def tensor_bytes(name: str, *shape: int, offset: int = 0) -> bytes:
    """Return the entry of a tensor in f32."""
    return text_bytes(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)


ARRAY_KEY = text_bytes("many") + struct.pack("<I", 9)


@pytest.mark.parametrize(
    ("told", "header", "zeros"),
    [
        ("the header announces 9223372036854775807 tensors", struct.pack("<QQ", 2**63 - 1, 0), 0),
        ("and 4294967296 metadata entries, but", struct.pack("<QQ", 1, 2**32), 0),
        (
            "the metadata has 20000000 values",
            struct.pack("<QQ", 0, 1) + ARRAY_KEY + struct.pack("<IQ", 0, 20_000_000),
            2**25,
        ),
        ("the header has more than", struct.pack("<QQQ", 0, 1, 2**28), 2**28 + 100),
        ("an array of arrays", struct.pack("<QQ", 0, 1) + ARRAY_KEY + struct.pack("<IQ", 9, 1), 100),
        ("two tensors have the same name", struct.pack("<QQ", 2, 0) + 2 * tensor_bytes("a", 4), 100),
        ("the tensor a has an axis of length 0", struct.pack("<QQ", 1, 0) + tensor_bytes("a", 4, 0), 100),
        ("of 18446744073709551", struct.pack("<QQ", 1, 0) + tensor_bytes("a", 4, offset=2**64 - 64), 100),
        ("of [0-9]{20,} bytes", struct.pack("<QQ", 1, 0) + tensor_bytes("a", 2**62, 2**62), 100),
    ],
)
def test_hostile_headers_are_refused_in_little_memory(told: str, header: bytes, zeros: int, tmp_path: Path) -> None:
    file = tmp_path / "hostile.gguf"
    with file.open("wb") as stream:
        stream.write(b"GGUF" + struct.pack("<I", 3) + header)
        stream.truncate(stream.tell() + zeros)  # zeros that take no room
    tracemalloc.start()
    with pytest.raises(OvspecError, match=rf"hostile\.gguf: damaged or truncated .*{told}"):
        find_source(str(file))
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


def test_a_tensor_of_two_shards_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        file = tmp_path / f"model-{number:05}-of-00002.gguf"
        written(file, split__count=2)
    with pytest.raises(
        OvspecError, match=r"00002-of-00002\.gguf: its tensor token_embd.weight is also in another file"
    ):
        find_source(str(file))


def written(path: Path, architecture: str = "llama", **changes: Any) -> Path:
    """Write a GGUF file with the metadata of a small Llama and one tensor. changes: entries, with "__" for a dot."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    entries: dict[str, Any] = {
        **{f"{architecture}.{key}": 2 for key in ("block_count", "attention.head_count", "attention.head_count_kv")},
        **{f"{architecture}.{key}": 64 for key in ("context_length", "embedding_length", "feed_forward_length")},
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
    }
    for key, value in (entries | {key.replace("__", "."): value for key, value in changes.items()}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((32, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("told", "architecture", "changes"),
    [
        ("its architecture is 'rwkv7', but GGUF files are supported only for llama, qwen2", "rwkv7", {}),
        ("contains an embedding model", "qwen3", {"qwen3__pooling_type": 3}),
        ("contains an embedding model", "bert", {}),
        ("contains an embedding model", "llama", {"llama__attention__causal": False}),
        ("the vision or audio part of a model", "clip", {"general__type": "mmproj"}),
        ("an adapter; merge it", "llama", {"general__type": "adapter"}),
        ("metadata has the unknown entry llama.expert_count", "llama", {"llama__expert_count": 8}),
        ("the RoPE scaling 'ntk' is unknown", "llama", {"llama__rope__scaling__type": "ntk"}),
        ("RoPE rotates 24 values of each head", "qwen2", {"qwen2__rope__dimension_count": 24}),
    ],
)
def test_what_cannot_be_exported_is_refused(
    told: str, architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(OvspecError, match=told):
        find_source(str(written(tmp_path / "model.gguf", architecture, **changes)))


def test_vocabulary_alone_is_refused() -> None:
    if not LLAMA_CPP.is_dir():
        pytest.skip("llama.cpp's files could not be fetched")
    with pytest.raises(OvspecError, match="contains no weights"):
        find_source(str(LLAMA_CPP / "models" / "ggml-vocab-qwen2.gguf"))


def test_weights_of_an_unknown_type_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "model.gguf")
    data = file.read_bytes()
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    file.write_bytes(data[:at] + struct.pack("<I", 99) + data[at + 4 :])
    with pytest.raises(OvspecError, match="weights of the type 99 are not supported"):
        find_source(str(file))


def test_missing_and_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"pickled")
    with pytest.raises(OvspecError, match="not a GGUF file; give a GGUF file or a checkpoint folder"):
        find_source(str(tmp_path / "model.bin"))
    with pytest.raises(OvspecError, match="no such file or folder"):
        find_source(str(tmp_path / "missing.gguf"))


def test_two_vocabularies_are_no_pair(files: Path, tmp_path: Path) -> None:
    data = (files / "llama.gguf").read_bytes()
    (tmp_path / "draft.gguf").write_bytes(data.replace(b"<|im_start|>", b"<|xm_start|>"))
    with pytest.raises(OvspecError, match="draft cannot draft for llama"):
        export_pair(str(files / "llama.gguf"), str(tmp_path / "draft.gguf"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_exported_model_writes_the_original_text(
    name: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_jobs(monkeypatch)
    export_pair(str(files / f"{name}.gguf"), None, tmp_path / "ir", Compression("fp32"))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(files / name, dtype=torch.float32).eval()
    prompt = np.random.default_rng(0).integers(5, 4000, 24).tolist()
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=None)
    lm = ovspec.load(tmp_path / "ir", precision="f32", cache_dir=tmp_path / "cache")
    result = lm.generate(prompt, max_tokens=24, ignore_eos=True)
    assert result.token_ids == expected[0, len(prompt) :].tolist()


def test_int4_has_groups_that_fit(files: Path) -> None:
    source = find_source(str(files / "llama.gguf"))  # has rows of 64 and 128 weights
    assert choose_group_size(source, Compression("int4")) == Compression("int4", group_size=64)
    assert choose_group_size(source, Compression("int8")) == Compression("int8")
    assert choose_group_size(source, Compression("int4", group_size=32)).group_size == 32
    with pytest.raises(
        OvspecError, match=r"`group_size` is 128, but the rows of blk\.\S+ have 64 weights, not .* to 64, or to -1"
    ):
        choose_group_size(source, Compression("int4", awq=True))


def test_gguf_is_to_be_exported_first(tmp_path: Path) -> None:
    with pytest.raises(OvspecError, match="a GGUF file, not an IR; run 'ovspec export"):
        ovspec.load(written(tmp_path / "model.gguf"))


def test_weights_have_16_bits_unless_f32_is_asked_for(files: Path) -> None:
    source = find_source(str(files / "llama.gguf"))
    assert isinstance(source, GgufSource)
    assert [gguf_checkpoint.choose_weight_dtype(source, each) for each in ("fp32", "int8", "fp16")] == [
        "float32",
        "float16",
        "float16",
    ]


def test_where_tensors_are(tmp_path: Path) -> None:
    """A file's axes come in the other order than a checkpoint's, and without its last byte it is refused."""
    file = written(tmp_path / "model.gguf")
    [info] = read_shard_header(file)[1].values()
    assert info.shape == (32, 64) and info.offset + 4 * 32 * 64 == file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(OvspecError, match="damaged or truncated"):
        read_shard_header(file)
