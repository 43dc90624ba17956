"""Checksums and settings to recognise a model and its configuration, for session files and certificates."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import openvino as ov

from ovspec.base.files import require_model_path
from ovspec.base.json_types import JsonObject
from ovspec.ir.compile import MODEL_FILE
from ovspec.ir.device import format_property, system_and_processor
from ovspec.ir.instruction_set import describe_instruction_set
from ovspec.setup.engine_choice import CompiledModel
from ovspec.text.chat_template import CHAT_TEMPLATE_FILE, TEMPLATES_FOLDER
from ovspec.text.tokenizer_files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

# Number of samples of the weights to hash.
HASHED_PIECES = 256
HASHED_PIECE_BYTES = 4096
# The OpenVINO properties with an effect on a model's logits.
NUMERIC_PROPERTIES = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
THREADS_PROPERTY = "INFERENCE_NUM_THREADS"


def hash_model_and_tokenizer(folder: Path) -> str:
    """Return a checksum of a model's graph, weights and tokenizer."""
    weights_file = require_model_path((folder / MODEL_FILE).with_suffix(".bin"))
    checksum = hashlib.sha256()
    for name in (MODEL_FILE, TOKENIZER_FILE):
        checksum.update(read_bytes_if_present(folder / name))
    weights_bytes = weights_file.stat().st_size
    checksum.update(str(weights_bytes).encode())
    with weights_file.open("rb") as file:
        for offset in np.linspace(0, max(0, weights_bytes - HASHED_PIECE_BYTES), HASHED_PIECES).astype(int).tolist():
            file.seek(offset)
            checksum.update(file.read(HASHED_PIECE_BYTES))
    return checksum.hexdigest()


def read_bytes_if_present(file: Path) -> bytes:
    """Return the content of a file, or nothing if it doesn't exist."""
    return file.read_bytes() if file.is_file() else b""


def list_model_files(path: Path) -> list[Path]:
    """Return the files of a model, sorted: a folder's files, or a GGUF file and all its shards, present or missing."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file())
    shard_match = re.fullmatch(r"(.*-)\d{5}-of-(\d{5})\.gguf", path.name)
    if not shard_match:
        return [path]
    return [
        path.with_name(f"{shard_match[1]}{shard_number:05}-of-{shard_match[2]}.gguf")
        for shard_number in range(1, int(shard_match[2]) + 1)
    ]


def compute_files_revision(path: Path) -> str:
    """Return a checksum of a model's files by names, sizes and times: it changes with every change of a file."""
    files = [(file.name, file.stat()) for file in list_model_files(path) if file.exists()]
    status_text = repr([(name, file_status.st_size, file_status.st_mtime_ns) for name, file_status in files])
    return hashlib.sha256(status_text.encode()).hexdigest()[:40]


def hash_prompt_files(folder: Path) -> str:
    """Return a checksum of the files with an effect on a prompt's tokens and a text's end."""
    checksum = hashlib.sha256()
    template_names = sorted(f"{TEMPLATES_FOLDER}/{file.name}" for file in (folder / TEMPLATES_FOLDER).glob("*.jinja"))
    for name in (CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, "generation_config.json", "config.json", *template_names):
        checksum.update(name.encode() + read_bytes_if_present(folder / name))
    return checksum.hexdigest()


def hash_model_folder(folder: Path) -> str:
    """Return a checksum of the files in a folder with an effect on texts."""
    return hashlib.sha256(f"{hash_model_and_tokenizer(folder)} {hash_prompt_files(folder)}".encode()).hexdigest()[:32]


def read_arithmetic_properties(model: CompiledModel) -> dict[str, str]:
    """Return a model's OpenVINO properties with an effect on its logits."""
    compiled_model = model.ir.compiled_model
    supported_properties = set(compiled_model.get_property("SUPPORTED_PROPERTIES"))
    property_names = [name for name in NUMERIC_PROPERTIES if name in supported_properties]
    return {name: format_property(compiled_model.get_property(name)) for name in property_names}


def describe_cache_setting(model: CompiledModel) -> str:
    """Return the engine, device and settings with an effect on the values in a model's cache."""
    properties = [f"{name}={value}" for name, value in read_arithmetic_properties(model).items()]
    platform_text = f"{describe_instruction_set()} OpenVINO {ov.get_version()}"
    return " ".join([model.engine, model.arithmetic, model.ir.device, *properties, platform_text])


def describe_and_hash_arithmetic(model: CompiledModel) -> tuple[str, str]:
    """Return a description of a model's arithmetic, and a checksum of its logits, or of the description if inexact."""
    description = f"{describe_cache_setting(model)}, {model.arithmetic_note}"
    hashed_content = description.encode()
    if model.arithmetic_note == "exact":
        hashed_content = b"".join(model.hash_logits())
    return description, hashlib.sha256(hashed_content).hexdigest()


def make_fingerprint(model: CompiledModel) -> JsonObject:
    """Return the model's folder, identity and configuration as JSON values."""
    compiled_model = model.ir.compiled_model
    has_threads_property = THREADS_PROPERTY in compiled_model.get_property("SUPPORTED_PROPERTIES")
    return {
        "folder": str(model.ir.folder.resolve()),
        "identity": hash_model_and_tokenizer(model.ir.folder),
        "device": model.ir.device,
        "engine": model.engine,
        "arithmetic": model.arithmetic,
        "properties": read_arithmetic_properties(model),
        "threads": int(compiled_model.get_property(THREADS_PROPERTY)) if has_threads_property else None,
        "profile": model.profile,
        "instruction_set": describe_instruction_set(),
        "system": system_and_processor(),
        "openvino": ov.get_version(),
    }
