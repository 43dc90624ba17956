"""A Hugging Face checkpoint made from a GGUF file, then exported like any other.

The config and the tokenizer come from the file's metadata, the weights through transformers' names for ggml's tensors.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_json
from ovspec.base.json_types import JsonObject
from ovspec.base.progress import format_size, show_step
from ovspec_export import convert
from ovspec_export.gguf_config import build_generation_config
from ovspec_export.gguf_file import CHECKPOINT_ADVICE, GgufHeaders
from ovspec_export.gguf_tokenizer import read_end_ids
from ovspec_export.gguf_weights import CONFIG_TENSORS, make_name_tables_once, parse_layer_number
from ovspec_export.kept_weights import WEIGHTS_FILE
from ovspec_export.sources import GgufSource, Source
from ovspec_export.tokenizers import load_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor

GGML_BF16 = 30  # ggml's number of the type
SHARD_BYTES = 4_000_000_000  # bytes of weights to collect in memory before writing them


def write_gguf_checkpoint(source: GgufSource, folder: Path, weight_format: str) -> Source:
    """Write the model of a GGUF file as a checkpoint into ``folder`` and return it as a source.

    Its weights are written in f32 for an export in fp32, else in 16 bits.

    Raises:
        OvspecError: the tokenizer or a tensor is unknown, or the disk is full.
    """
    dtype = choose_weight_dtype(source, weight_format)
    with show_step(f"{source.name}: unpacking {format_size(source.size_in_bytes)} to {dtype}", keep_line=True):
        write_gguf_config(source, folder, dtype)
        paths = {"gguf_file": str(source.path.absolute()), "folder": str(folder)}
        convert.run_worker_job("unpack_gguf_weights", source, folder, None, **paths, dtype=dtype)
    return Source(source.name, folder, is_ir=False, revision=source.revision)


def write_kept_gguf_checkpoint(source: GgufSource, folder: Path) -> Source:
    """Write the config and the tokenizer of a GGUF file into ``folder``; its weights are read later.

    Raises:
        OvspecError: the tokenizer isn't understood, or the disk is full.
    """
    write_gguf_config(source, folder, "float32")
    write_json_file(folder / WEIGHTS_FILE, {"gguf": str(source.path.absolute())})
    return Source(source.name, folder, is_ir=False, revision=source.revision)


def write_gguf_config(source: GgufSource, folder: Path, dtype: str) -> None:
    """Write the files of a checkpoint except its weights."""
    folder.mkdir(parents=True)
    load_tokenizer(source).save_pretrained(folder)
    write_json_file(folder / "config.json", source.config | {"dtype": dtype})
    write_json_file(
        folder / "generation_config.json",
        build_generation_config(source.gguf_headers, read_end_ids(source.gguf_headers.metadata)),
    )


def choose_weight_dtype(source: GgufSource, weight_format: str) -> str:
    """Return the type of the unpacked weights; f16 represents quantised weights to a part in 2,000."""
    if weight_format == "fp32":
        return "float32"
    return (
        "bfloat16" if any(info.ggml_type == GGML_BF16 for info in source.gguf_headers.tensors.values()) else "float16"
    )


def write_json_file(file: Path, entries: JsonObject) -> None:
    file.write_text(json.dumps(entries, indent=2), encoding="utf-8", newline="\n")


def write_gguf_weights(headers: GgufHeaders, folder: Path, dtype: str) -> None:
    """Write the tensors of a GGUF file next to the config.json in ``folder``, and its model class into the config.

    Raises:
        OvspecError: the config's model has no place for a tensor.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config_file = folder / "config.json"
    write_json_file(config_file, read_json(config_file) | {"architectures": [type(model).__name__]})
    processor = TENSOR_PROCESSORS.get(headers.architecture, TensorProcessor)(config=config.to_dict())
    with make_name_tables_once():
        hf_names = get_gguf_hf_weights_map(model, processor)
    hf_shapes = {name: tuple(weights.shape) for name, weights in model.state_dict().items()}
    shard_names: dict[str, str] = {}  # by the tensor's name
    tensors: dict[str, torch.Tensor] = {}  # of the next shard

    def write_weight_shard() -> None:
        shard_name = f"model-{len(set(shard_names.values())) + 1:05}.safetensors"
        contiguous_tensors = {name: weights.contiguous() for name, weights in tensors.items()}
        save_file(contiguous_tensors, folder / shard_name, {"format": "pt"})
        shard_names.update(dict.fromkeys(tensors, shard_name))
        tensors.clear()

    numbered_names = sorted((parse_layer_number(name), name) for name in headers.tensors if name not in CONFIG_TENSORS)
    for _, layer_entries in groupby(numbered_names, key=lambda entry: entry[0]):
        for _, name in layer_entries:
            convert_gguf_tensor(headers, name, processor, hf_names, hf_shapes, tensors)
        tensors.update({name: weights.to(getattr(torch, dtype)) for name, weights in tensors.items()})
        if sum(weights.nbytes for weights in tensors.values()) > SHARD_BYTES:
            write_weight_shard()
    write_weight_shard()
    if len(distinct_shard_names := set(shard_names.values())) == 1:
        (folder / distinct_shard_names.pop()).rename(folder / "model.safetensors")
        return
    weight_index = {"metadata": {}, "weight_map": shard_names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weight_index), encoding="utf-8", newline="\n")


def convert_gguf_tensor(
    headers: GgufHeaders,
    name: str,
    processor: TensorProcessor,
    hf_names: dict[str, str],
    hf_shapes: dict[str, tuple[int, ...]],
    tensors: dict[str, torch.Tensor],
) -> None:
    """Add a tensor of the file to ``tensors``, under transformers' name and in its layout."""
    import torch

    processor_options = {"tensor_key_mapping": hf_names, "parsed_parameters": {"tensors": tensors}}
    try:
        processed_tensor = processor.process(
            weights=headers.tensors[name].read_values(), name=name, **processor_options
        )
    except (KeyError, ValueError) as error:
        raise OvspecError(
            f"{headers.path}: its tensor {name} can't be converted ({error}); {CHECKPOINT_ADVICE}."
        ) from None
    if processed_tensor.name is None:  # already in ``tensors``
        return
    if processed_tensor.name not in hf_names:
        raise OvspecError(
            f"{headers.path}: its tensor {name} is unknown in the family {headers.architecture}; {CHECKPOINT_ADVICE}."
        )
    weights = np.array(processed_tensor.weights, np.float32)
    shape = hf_shapes.get(hf_names[processed_tensor.name], weights.shape)
    if [size for size in shape if size > 1] == [size for size in weights.shape if size > 1]:
        weights = weights.reshape(shape)  # files store a matrix with a single row as a matrix or as a vector
    tensors[hf_names[processed_tensor.name]] = torch.from_numpy(weights)
