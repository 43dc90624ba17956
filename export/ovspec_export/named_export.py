"""Exports of models by name: the format is chosen automatically, and a line reports the cost in advance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ovspec.base.hub_names import HubName, parse_hub_name
from ovspec.base.progress import format_size, print_note
from ovspec.ir.instruction_set import INSTRUCTION_SETS, describe_instruction_set
from ovspec.setup.manifest import Manifest
from ovspec_export.compression import INT8, KEEP, WEIGHT_FORMATS, Compression
from ovspec_export.export import export_pair
from ovspec_export.folders import check_disk_space
from ovspec_export.hub import choose_gguf_files, read_repository, sum_missing_bytes
from ovspec_export.source_lookup import download_config, find_source
from ovspec_export.sources import EXPORT_PATTERNS, SUBFOLDER_PATTERN, Source

LARGE_MODEL_SHARE = 1 / 3  # share of the memory; a model larger in int8 becomes int4
VNNI_FEATURES = frozenset({"avx_vnni", "avx512_vnni"})
UNQUANTISED_GGUF = ("f16", "bf16", "f32")
BYTES_PER_WEIGHT = {"float32": 4.0}  # of checkpoints, by the type in their config; others have 2
# Rough values for the line before an export, measured on two cores; the download at 100 Mbit/s.
START_SECONDS = 30.0
SECONDS_PER_WEIGHT = 3e-7
SECONDS_PER_KEPT_WEIGHT = 5e-8
FETCHED_BYTES_PER_SECOND = 12.5e6


@dataclass(frozen=True)
class ModelSize:
    """The size of a model to export.

    name: the model's name, with its commit if it is on the hub.
    fetched_bytes: bytes still to fetch.
    weight_bytes: bytes of its weights in the source.
    parameter_count: number of its weights; for a model on the hub, estimated from their bytes.
    keeps_weights: whether its weights are quantised or already an IR's, and so kept by default.
    """

    name: str
    fetched_bytes: float
    weight_bytes: float
    parameter_count: float
    keeps_weights: bool

    def estimate_exported_bytes(self, weight_format: str) -> float:
        """Return the approximate size of its export in bytes."""
        if weight_format == KEEP:
            return 1.1 * self.weight_bytes + 20e6
        return self.parameter_count * WEIGHT_FORMATS[weight_format] / 8 + 20e6


def export_named_model(
    target: str, draft: str | None, output: Path, weight_format: str | None, shown_name: str
) -> Manifest:
    """Export a model and its draft, if named, after a line about the cost.

    Args:
        target, draft: as in ``export_pair``.
        output: the folder to write.
        weight_format: one of ``WEIGHT_FORMATS`` or "keep"; None to choose it by the model's size and the processor.
        shown_name: the name for the line.

    Raises:
        OvspecError: like ``export_pair``.
    """
    model_names = [target]
    if draft and (Path(draft).exists() or parse_hub_name(draft)):
        model_names.append(draft)
    sizes = [measure_model(name) for name in model_names]
    compression = choose_compression(sizes[0]) if weight_format is None else Compression(weight_format)
    print_note(describe_cost(shown_name, sizes, compression.weight_format if compression else KEEP))
    check_room_for_files(sizes)
    pinned_draft = sizes[1].name if len(sizes) > 1 else draft
    return export_pair(sizes[0].name, pinned_draft, output, compression, overwrite=True)


def measure_model(name: str) -> ModelSize:
    """Return the size of a model; on the hub, only small files are fetched.

    Raises:
        OvspecError: the model is unavailable or can't be exported.
    """
    hub = None if Path(name).exists() else parse_hub_name(name)
    if not hub:
        return measure_local_model(name, find_source(name))
    if hub.quantization:
        repository = read_repository(name, hub)
        files = choose_gguf_files(name, hub, repository)
        weight_bytes = float(sum(repository.sizes[file] for file in files))
        is_quantised = hub.quantization.lower() not in UNQUANTISED_GGUF
        missing_bytes = sum_missing_bytes(hub, repository, files)
        pinned_name = str(replace(hub, revision=repository.commit))
        return ModelSize(pinned_name, missing_bytes, weight_bytes, weight_bytes / 2, is_quantised)
    source = download_config(hub, name, trust_remote_code=False)
    pinned_hub = HubName(hub.repository, source.revision)
    repository = read_repository(name, pinned_hub)
    missing_bytes = sum_missing_bytes(hub, repository, EXPORT_PATTERNS, SUBFOLDER_PATTERN)
    weight_suffix = ".bin" if source.is_ir else ".safetensors"
    weight_bytes = float(sum(size for path, size in repository.sizes.items() if path.endswith(weight_suffix)))
    weight_type = str(source.config.get("dtype") or source.config.get("torch_dtype"))
    parameter_count = 0.0 if source.is_ir else weight_bytes / BYTES_PER_WEIGHT.get(weight_type, 2.0)
    return ModelSize(str(pinned_hub), missing_bytes, weight_bytes, parameter_count, source.is_ir or source.is_quantised)


def measure_local_model(name: str, source: Source) -> ModelSize:
    """Return the size of a model with its files on this machine."""
    parameter_count = 0 if source.is_ir else source.parameter_count
    keeps_weights = source.is_ir or source.is_quantised
    return ModelSize(name, 0.0, float(source.size_in_bytes), float(parameter_count), keeps_weights)


def choose_compression(size: ModelSize) -> Compression | None:
    """Return the format for a model's weights: None to keep quantised weights, else int8, or int4 for a large model.

    Without VNNI zero points cost time, so int8 is symmetric there.
    """
    if size.keeps_weights:
        return None
    if size.parameter_count * WEIGHT_FORMATS["int8"] / 8 > LARGE_MODEL_SHARE * psutil.virtual_memory().total:
        return Compression("int4")
    features = INSTRUCTION_SETS.get(describe_instruction_set())
    return Compression("int8", sym=True) if features and not features & VNNI_FEATURES else INT8


def describe_cost(name: str, sizes: Sequence[ModelSize], weight_format: str) -> str:
    """Return the line before an export: bytes to download, space on the disk, and approximate time."""
    fetched_bytes = sum(size.fetched_bytes for size in sizes)
    exported_bytes = sum(size.estimate_exported_bytes(KEEP if size.keeps_weights else weight_format) for size in sizes)
    seconds = fetched_bytes / FETCHED_BYTES_PER_SECOND
    for size in sizes:
        weight_seconds = SECONDS_PER_KEPT_WEIGHT if size.keeps_weights else SECONDS_PER_WEIGHT
        seconds += START_SECONDS + size.parameter_count * weight_seconds
    fetching_text = f"{format_size(fetched_bytes)} to fetch, " * bool(fetched_bytes)
    format_text = "with its own weights" if weight_format == KEEP else f"in {weight_format}"
    minutes = round(seconds / 60)
    duration_text = f"about {minutes} minutes" if minutes > 1 else "about a minute"
    return (
        f"{name}: an export {format_text} is made once: {fetching_text}{format_size(exported_bytes)} of disk, "
        + duration_text
        + " (at 100 Mbit/s)" * bool(fetched_bytes)
    )


def check_room_for_files(sizes: Sequence[ModelSize]) -> None:
    """Raise OvspecError unless the hub's cache has room for the files to fetch."""
    from huggingface_hub.constants import HF_HUB_CACHE

    fetched_bytes = sum(size.fetched_bytes for size in sizes)
    if fetched_bytes:
        check_disk_space(
            Path(HF_HUB_CACHE), fetched_bytes, f"fetching {sizes[0].name}", "free some space, or set HF_HOME"
        )
