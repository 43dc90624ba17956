"""Write a Llama checkpoint as GGUF, for llama.cpp.

    .cache/peers/llamacpp/bin/python scripts/bench/peers/gguf_writer.py CHECKPOINT OUT

gguf's own numpy code quantises the matrices to Q8_0; norms stay f32. The vocabulary is the tokenizer's, padded with
unused ids.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import numpy as np

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, values as f32) of a safetensors file in bf16, f16 or f32, because numpy has no bf16."""
    with file.open("rb") as source:
        size = int.from_bytes(source.read(8), "little")
        header: dict[str, Any] = json.loads(source.read(size))
    for name, about in header.items():
        if name == "__metadata__":
            continue
        kind = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[about["dtype"]]
        begin, end = about["data_offsets"]
        count = (end - begin) // np.dtype(kind).itemsize
        stored = np.fromfile(file, kind, count, offset=8 + size + begin).reshape(about["shape"])
        bf16 = kind is np.uint16
        yield name, (stored.astype(np.uint32) << 16).view(np.float32) if bf16 else stored.astype(np.float32)


def interleaved(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of queries or keys in llama.cpp's order: its RoPE rotates neighbours, Hugging Face's halves."""
    halves = matrix.reshape(heads, 2, -1, matrix.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(matrix.shape)


def add_vocabulary(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    names = [f"[unused {i}]" for i in range(config["vocab_size"])]
    kinds = [gguf.TokenType.UNUSED] * len(names)
    for name, i in tokenizer["model"]["vocab"].items():
        names[i], kinds[i] = name, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        names[added["id"]], kinds[added["id"]] = added["content"], gguf.TokenType.CONTROL
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def write(folder: Path, out: Path) -> None:
    """Write the checkpoint in ``folder``."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layers = config["num_hidden_layers"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(unfinished(out), "llama")
    writer.add_name(folder.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_vocabulary(writer, folder, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, values in tensors(folder / "model.safetensors"):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = interleaved(values, heads if name.endswith("q_proj.weight") else kv_heads)
        theirs = names.get_name(name, try_suffixes=(".weight",))
        assert theirs, name
        if values.ndim == 1:
            writer.add_tensor(theirs, values)
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(values, Q8_0), raw_dtype=Q8_0)
    finish(writer, out)


def unfinished(out: Path) -> Path:
    """Return the name of a file until it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    return out.with_suffix(".unfinished")


def finish(writer: Any, out: Path) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished(out).replace(out)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    write(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
