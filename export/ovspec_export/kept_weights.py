"""Quantised weights kept in an export: their place, and the form of each kind of tensor in the IR.

A checkpoint with its weights elsewhere has the file ``WEIGHTS_FILE`` with their path.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_json
from ovspec.base.json_types import JsonObject
from ovspec.ir.config import LAYER_KEYS
from ovspec_export.packed_weights import PackedWeights

WEIGHTS_FILE = "kept_weights.json"
FORMS_FILE = "kept_forms.json"
QUANTISATION_KEYS = ("quantization_config", "compression_config")  # of configs with quantised weights


class KeptWeights(Protocol):
    """The weights of a quantised source, by transformers' names of a model's parameters.

    Matrices of experts have the names in their ``ExpertStack``.
    """

    def list_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter in the source."""
        ...

    def list_matrices(self) -> dict[str, bool]:
        """Return the kept matrices, and whether each is transposed in the model.

        Experts' matrices aren't listed; they are transposed. The other parameters are small, and become f32.
        """
        ...

    def read_values(self, name: str) -> np.ndarray:
        """Return the values of any parameter, float32, in the model's shape."""
        ...

    def read_matrix(self, name: str, with_offsets: bool) -> PackedWeights | np.ndarray:
        """Return a matrix (rows, columns) as integers, or as floats in f16, or in bf16 as uint16.

        with_offsets: groups may have offsets; they are faster on some processors, but possible only in products.
        """
        ...

    def describe_kind(self, name: str) -> str:
        """Return the source's name for a matrix's storage format."""
        ...


@dataclass
class KeptForms:
    """The forms of the kept matrices, by the source's kind of tensor, with their counts."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, kind: str, weights: PackedWeights | np.ndarray, matrix_count: int = 1) -> None:
        float_forms = {np.dtype(np.float16): "f16", np.dtype(np.uint16): "bf16", np.dtype(np.float32): "f32"}
        form = weights.form if isinstance(weights, PackedWeights) else float_forms[weights.dtype]
        self.counts[kind, form] += matrix_count

    def write(self, folder: Path) -> None:
        entries = [[kind, form, count] for (kind, form), count in sorted(self.counts.items())]
        (folder / FORMS_FILE).write_text(json.dumps(entries), encoding="utf-8", newline="\n")


def has_kept_weights(folder: Path) -> bool:
    """Return whether the weights of the checkpoint in ``folder`` are elsewhere."""
    return (folder / WEIGHTS_FILE).is_file()


def write_first_layers_config(checkpoint: Path, layer_count: int, folder: Path) -> None:
    """Copy a ``checkpoint`` with its weights elsewhere to ``folder``, with a config of only its first layers."""
    shutil.copytree(checkpoint, folder)
    config: JsonObject = {
        name: layer_count if name in LAYER_KEYS else entry for name, entry in read_json(folder / "config.json").items()
    }
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layer_count]
    location = read_json(folder / WEIGHTS_FILE) | {"layers": layer_count}
    for file_name, entries in (("config.json", config), (WEIGHTS_FILE, location)):
        (folder / file_name).write_text(json.dumps(entries, indent=2), encoding="utf-8", newline="\n")


def read_forms(folder: Path) -> list[str]:
    """Return a line about each kind of tensor from the file an export left in ``folder``, and delete the file."""
    file = folder / FORMS_FILE
    entries: list[tuple[str, str, int]] = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    return [f"{count} {'matrix' if count == 1 else 'matrices'} in {kind}: {form}" for kind, form, count in entries]


def check_numbers(packed: PackedWeights, name: str, source: str) -> None:
    """Raise OvspecError if a scale, zero point or offset isn't a finite number."""
    for part, numbers in {"scale": packed.scales, "zero point": packed.zero_points, "offset": packed.offsets}.items():
        if numbers is not None and not np.isfinite(numbers).all():
            raise OvspecError(f"{source}: its tensor {name} has a NaN or infinite {part}; download the model again.")


def quantise_to_int8(values: np.ndarray) -> PackedWeights:
    """Return weights (rows, columns) rounded to 256 steps between the smallest and the largest of each row."""
    lowest = np.minimum(values.min(1, keepdims=True), 0)
    steps = (np.maximum(values.max(1, keepdims=True), 0) - lowest) / 255
    scales = np.where(steps == 0, 1, steps).astype(np.float32)
    zero_points = np.rint(-lowest / scales)
    integers = np.clip(np.rint(values / scales) + zero_points, 0, 255).astype(np.uint8)
    return PackedWeights(integers, "u8", scales, zero_points.astype(np.uint8), is_requantised=True)
