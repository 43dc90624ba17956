"""The text model in a checkpoint with image or audio input: its config and tensors, as a separate checkpoint.

Only the names and the headers of the safetensors files change; the weights are copied as they are.
"""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from pathlib import Path
from typing import BinaryIO

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec.base.progress import format_size, show_step
from ovspec_export.families import TEXT_MODEL_CLASSES
from ovspec_export.sources import NON_TEXT_TENSORS, TEXT_SUFFIXES, Source, copy_model_files, read_safetensors_header

# Prefixes of the text model's tensor names, in the order to try them, and the new prefixes.
TEXT_TENSOR_PREFIXES = {
    "model.language_model.model.": "model.",  # transformers 5.5's names in Gemma 3
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
    "mtp.": "mtp.",
    # Qwen 2 VL and 2.5 VL have no prefix.
    **{f"model.{part}.": f"model.{part}." for part in ("embed_tokens", "layers", "norm")},
}
# Entries a text model's config inherits from the outer config.
SHARED_ENTRIES = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id")
NON_TEXT_FILES = re.compile("^model|processor")  # in names of files about weights, or about images and sound
CHUNK_BYTES = 1 << 24  # bytes to copy at a time


def extract_text_model(source: Source, folder: Path) -> Source:
    """Write the text model of ``source`` into ``folder`` and return it as a source.

    Raises:
        OvspecError: a tensor belongs neither to the text model nor to a part left out.
    """
    with show_step(f"{source.name}: taking the text model out of it", keep_line=True) as taking:
        folder.mkdir(parents=True)
        new_names = map_text_tensors(source)
        config = build_text_config(source, set(new_names.values()))
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8", newline="\n")
        weight_map = {}
        copied_bytes = 0
        for file in sorted(source.path.glob("model*.safetensors")):
            names_in_file = {name: new_names[name] for name in read_safetensors_header(file) if name in new_names}
            if names_in_file:
                copied_bytes += copy_tensors(file, names_in_file, folder / file.name)
                weight_map |= dict.fromkeys(names_in_file.values(), file.name)
        if set(weight_map.values()) != {"model.safetensors"}:
            weight_index = {"metadata": {"total_size": copied_bytes}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(
                json.dumps(weight_index), encoding="utf-8", newline="\n"
            )
        copy_model_files(
            source.path, folder, lambda file: file.suffix in TEXT_SUFFIXES and not NON_TEXT_FILES.search(file.name)
        )
        taking.result = format_size(copied_bytes)
    return dataclasses.replace(source, path=folder)


def build_text_config(source: Source, tensor_names: set[str]) -> JsonObject:
    """Return the config of the text model, for tensors of these names."""
    outer_config = source.config
    text_config = source.text_config or {}
    model_class = TEXT_MODEL_CLASSES[outer_config["model_type"]][source.model_type]
    if source.text_only_family:
        text_config = source.text_only_family.config_defaults | {
            name: entry for name, entry in text_config.items() if entry is not None
        }
        text_config = merge_rope_config(text_config) | {"model_type": source.model_type}
    config = {name: outer_config[name] for name in SHARED_ENTRIES if name in outer_config}
    config |= {name: entry for name, entry in text_config.items() if entry is not None}
    config["architectures"] = [model_class]
    tied_embeddings_key = "tie_word_embeddings"
    tied_entries = [
        entries[tied_embeddings_key]
        for entries in (outer_config, text_config)
        if entries.get(tied_embeddings_key) is not None
    ]
    if tied_entries:  # transformers 5 reads the outer config's entry, transformers 4 the inner config's
        config[tied_embeddings_key] = True in tied_entries if "lm_head.weight" not in tensor_names else tied_entries[0]
    return config


def merge_rope_config(config: JsonObject) -> JsonObject:
    """Return the config of a text model with a single rotary embedding instead of three: for text they are the same."""
    rope_configs = [config.get(name) for name in ("rope_scaling", "rope_parameters")]  # the first counts
    rope_config: JsonObject = next((rope for rope in rope_configs if rope and isinstance(rope, dict)), {})
    rope_scaling = {name: entry for name, entry in rope_config.items() if not name.startswith("mrope_")}
    merged_config = {name: entry for name, entry in config.items() if name not in ("rope_scaling", "rope_parameters")}
    merged_config["rope_theta"] = rope_scaling.pop("rope_theta", config["rope_theta"])
    if rope_scaling.get("rope_type", rope_scaling.get("type")) not in (None, "mrope", "default"):
        merged_config["rope_scaling"] = rope_scaling
    return merged_config


def map_text_tensors(source: Source) -> dict[str, str]:
    """Return the text model's tensors by name, with their names in a separate text model.

    Raises:
        OvspecError: a tensor belongs neither to the text model nor to a part left out.
    """
    new_names = {}
    for name in source.tensor_headers():
        old_prefix = next((prefix for prefix in TEXT_TENSOR_PREFIXES if name.startswith(prefix)), None)
        if old_prefix:
            new_names[name] = TEXT_TENSOR_PREFIXES[old_prefix] + name.removeprefix(old_prefix)
        elif not NON_TEXT_TENSORS.match(name):
            raise OvspecError(
                f"{source.name}: cannot tell whether its tensor {name} belongs to the text model; choose another "
                "checkpoint."
            )
    if len(set(new_names.values())) < len(new_names) or not new_names:
        problem = (
            "two of its tensors would get the same name in the text model" if new_names else "it contains no text model"
        )
        raise OvspecError(f"{source.name}: {problem}; choose another checkpoint.")
    return new_names


def copy_tensors(file: Path, new_names: dict[str, str], output: Path) -> int:
    """Copy the tensors in ``new_names`` of a safetensors file to ``output``, renamed; return their size in bytes."""
    header = read_safetensors_header(file)
    byte_ranges = []
    copied_bytes = 0
    new_header: JsonObject = {"__metadata__": {"format": "pt"}}
    for name, new_name in sorted(new_names.items(), key=lambda name_pair: header[name_pair[0]]["data_offsets"]):
        start, end = header[name]["data_offsets"]
        new_header[new_name] = header[name] | {"data_offsets": [copied_bytes, copied_bytes + end - start]}
        byte_ranges.append((start, end))
        copied_bytes += end - start
    header_bytes = json.dumps(new_header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    with file.open("rb") as original, output.open("wb") as copy:
        (header_length,) = struct.unpack("<Q", original.read(8))
        copy.write(struct.pack("<Q", len(header_bytes)) + header_bytes)
        for start, end in byte_ranges:
            original.seek(8 + header_length + start)
            copy_bytes(original, copy, end - start)
    return copied_bytes


def copy_bytes(original: BinaryIO, copy: BinaryIO, byte_count: int) -> None:
    while byte_count:
        chunk = original.read(min(byte_count, CHUNK_BYTES))
        if not chunk:
            raise OvspecError(
                f"{original.name}: another program truncated this file during the export; download the model again."
            )
        copy.write(chunk)
        byte_count -= len(chunk)
