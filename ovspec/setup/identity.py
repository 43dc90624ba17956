"""What tells models and their settings apart, for whatever outlives a process: session files and certificates."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from ovspec.base.files import require_present
from ovspec.ir.compile import MODEL_FILE
from ovspec.ir.device import system_name
from ovspec.ir.instruction_set import instruction_set
from ovspec.setup.engine_choice import CompiledModel
from ovspec.text.chat_template import CHAT_TEMPLATE_FILE, TEMPLATES_FOLDER
from ovspec.text.tokenizer_files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

# To tell models apart, this many pieces of the weights are hashed, each of this many bytes.
HASHED_PIECES, HASHED_PIECE_BYTES = 256, 4096
# The OpenVINO properties that a model's numbers depend on.
NUMERIC_PROPERTIES = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
THREADS_PROPERTY = "INFERENCE_NUM_THREADS"


def hash_model(folder: Path) -> str:
    """Return a checksum that tells models with different graphs, weights or tokenizers apart."""
    weights = require_present((folder / MODEL_FILE).with_suffix(".bin"))
    found = hashlib.sha256()
    for name in (MODEL_FILE, TOKENIZER_FILE):
        file = folder / name
        found.update(file.read_bytes() if file.is_file() else b"")
    size = weights.stat().st_size
    found.update(str(size).encode())
    with weights.open("rb") as file:
        for offset in np.linspace(0, max(0, size - HASHED_PIECE_BYTES), HASHED_PIECES).astype(int).tolist():
            file.seek(offset)
            found.update(file.read(HASHED_PIECE_BYTES))
    return found.hexdigest()


def list_model_files(place: Path) -> list[Path]:
    """Return the files of a model, sorted: those in a folder, or a GGUF file and its other shards, there or not."""
    if place.is_dir():
        return sorted(path for path in place.iterdir() if path.is_file())
    shard = re.fullmatch(r"(.*-)\d{5}-of-(\d{5})\.gguf", place.name)
    if not shard:
        return [place]
    return [place.with_name(f"{shard[1]}{number:05}-of-{shard[2]}.gguf") for number in range(1, int(shard[2]) + 1)]


def compute_files_revision(place: Path) -> str:
    """Return a checksum that changes when a file of a model is added, removed or written, without reading them."""
    files = [(path.name, path.stat()) for path in list_model_files(place) if path.exists()]
    found = repr([(name, status.st_size, status.st_mtime_ns) for name, status in files])
    return hashlib.sha256(found.encode()).hexdigest()[:40]


def hash_prompt_files(folder: Path) -> str:
    """Return a checksum of the files that decide how a prompt is written in tokens, and how a text ends."""
    found = hashlib.sha256()
    templates = sorted(f"{TEMPLATES_FOLDER}/{file.name}" for file in (folder / TEMPLATES_FOLDER).glob("*.jinja"))
    for name in (CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, "generation_config.json", "config.json", *templates):
        file = folder / name
        found.update(name.encode() + (file.read_bytes() if file.is_file() else b""))
    return found.hexdigest()


def hash_model_folder(folder: Path) -> str:
    """Return a checksum of what a text depends on in a folder."""
    return hashlib.sha256(f"{hash_model(folder)} {hash_prompt_files(folder)}".encode()).hexdigest()[:32]


def read_numeric_properties(loaded: CompiledModel) -> dict[str, str]:
    """Return those OpenVINO properties of a model that its numbers depend on."""
    compiled = loaded.ir.compiled_model
    known = set(compiled.get_property("SUPPORTED_PROPERTIES"))
    found = {name: compiled.get_property(name) for name in NUMERIC_PROPERTIES if name in known}
    return {name: v.get_type_name() if isinstance(v, ov.Type) else str(v) for name, v in found.items()}


def describe_cache_setting(loaded: CompiledModel) -> str:
    """Return the engine, device and settings that the values in a model's cache depend on."""
    values = [f"{name}={value}" for name, value in read_numeric_properties(loaded).items()]
    used = f"{instruction_set()} OpenVINO {ov.get_version()}"
    return " ".join([loaded.engine, loaded.arithmetic, loaded.ir.device, *values, used])


def describe_arithmetic(loaded: CompiledModel) -> tuple[str, str]:
    """Return what a model's arithmetic depends on, in words, and a checksum, equal where the bits of its logits are.

    Where they differ from one inference to another, the checksum is that of the words.
    """
    words = f"{describe_cache_setting(loaded)}, {loaded.arithmetic_note}"
    bits = b"".join(loaded.hash_logits()) if loaded.arithmetic_note == "exact" else words.encode()
    return words, hashlib.sha256(bits).hexdigest()


def make_fingerprint(loaded: CompiledModel) -> dict[str, Any]:
    """Return the model's folder and identity, and how it was run, as JSON values."""
    compiled = loaded.ir.compiled_model
    tells_threads = THREADS_PROPERTY in compiled.get_property("SUPPORTED_PROPERTIES")
    return {
        "folder": str(loaded.ir.folder.resolve()),
        "identity": hash_model(loaded.ir.folder),
        "device": loaded.ir.device,
        "engine": loaded.engine,
        "arithmetic": loaded.arithmetic,
        "properties": read_numeric_properties(loaded),
        "threads": int(compiled.get_property(THREADS_PROPERTY)) if tells_threads else None,
        "profile": loaded.profile,
        "instruction_set": instruction_set(),
        "system": system_name(),
        "openvino": ov.get_version(),
    }
