"""The weights of a GGUF file by the names of transformers' parameters, as integers if ggml stores integers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec_export.experts import find_expert_stacks, join_experts, join_matrices, unpack_experts
from ovspec_export.gguf_blocks import read_packed_weights
from ovspec_export.gguf_file import CHECKPOINT_ADVICE, GgufHeaders, TensorInfo
from ovspec_export.kept_weights import check_numbers, quantise_to_int8
from ovspec_export.packed_weights import PackedWeights, unpack_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor

# Tensors converted to config entries.
CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
FLOAT_DTYPES = {"F16": np.float16, "BF16": np.uint16, "F32": np.float32}
KEEP_ADVICE = "set `weight_format` to quantise the weights anew"


@dataclass(frozen=True)
class Placement:
    """The destination of a tensor. row_order: (rows,), the file's row of each row; None for the same order."""

    file_name: str
    row_order: np.ndarray | None = None
    is_transposed: bool = False


class GgufWeights:
    """Implements ``KeptWeights`` for a file and its ``model``; the model's parameters need no data.

    layer_count: the model has only the first so many layers of the file; None for all.

    Raises:
        OvspecError: the model has no place for a tensor.
    """

    def __init__(self, headers: GgufHeaders, model: PreTrainedModel, layer_count: int | None = None) -> None:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

        self._headers = headers
        self._processor: TensorProcessor = TENSOR_PROCESSORS.get(headers.architecture, TensorProcessor)(
            config=model.config.to_dict()
        )
        with make_name_tables_once():
            self._hf_names: dict[str, str] = get_gguf_hf_weights_map(model, self._processor)
        self._hf_shapes = {name: tuple(weights.shape) for name, weights in model.state_dict().items()}
        self._expert_stacks = find_expert_stacks(self._hf_shapes)
        self._placements: dict[str, Placement] = {}  # of parameters, and of the matrices of experts
        for name in headers.tensors:
            if name not in CONFIG_TENSORS and (layer_count is None or parse_layer_number(name) < layer_count):
                place = self._place_experts if "_exps." in name else self._place
                place(name)

    def list_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter in the file."""
        return {
            name: shape
            for name, shape in self._hf_shapes.items()
            if name in self._placements
            or (name in self._expert_stacks and self._placements.keys() >= {*self._expert_stacks[name].matrices})
        }

    def list_matrices(self) -> dict[str, bool]:
        """Return the matrices not stored in f32, as described in ``KeptWeights``."""
        return {
            name: placement.is_transposed
            for name, placement in self._placements.items()
            if is_kept_matrix(self._get_info(name))
        }

    def describe_kind(self, name: str) -> str:
        """Return ggml's name of a tensor's type."""
        return self._get_info(name).type_name

    def read_values(self, name: str) -> np.ndarray:
        """Return the values of a parameter, float32."""
        if stack := self._expert_stacks.get(name):
            return join_matrices(stack, self._read_experts)
        stored_values = self._read_finite_values(name, self._get_info(name))
        _, values = self._process(self._placements[name].file_name, stored_values)
        return np.ascontiguousarray(values, np.float32).reshape(self._hf_shapes[name])

    def read_kept_values(self, name: str, with_offsets: bool) -> np.ndarray:
        """Return the same, but matrices as rounded by ``read_matrix``."""
        if stack := self._expert_stacks.get(name):
            return join_matrices(stack, self._read_kept_experts)
        if (is_transposed := self.list_matrices().get(name)) is None:
            return self.read_values(name)
        values = unpack_rows(self.read_matrix(name, with_offsets))
        return np.ascontiguousarray(values.T if is_transposed else values).reshape(self._hf_shapes[name])

    def _read_kept_experts(self, name: str) -> Iterator[np.ndarray]:
        """Yield the values of each expert in a matrix as rounded by ``read_matrix``, float32."""
        return unpack_experts(self.read_matrix(name, False), self._get_info(name).shape[0])

    def _read_experts(self, name: str) -> Iterator[np.ndarray]:
        """Yield the values of each expert in a matrix, float32."""
        for expert in self._get_info(name).list_parts():
            yield self._read_finite_values(name, expert)

    def _read_finite_values(self, name: str, info: TensorInfo) -> np.ndarray:
        """Return the values of a tensor or a part of it in the file's layout, float32."""
        values = info.read_values()
        if not np.isfinite(values).all():
            raise OvspecError(
                f"{self._headers.path}: its tensor {self._placements[name].file_name} has NaN or infinite weights; "
                "download the file again."
            )
        return values

    def read_matrix(self, name: str, with_offsets: bool) -> PackedWeights | np.ndarray:
        """Return a matrix as described in ``KeptWeights``; a type without integers is rounded to int8."""
        info = self._get_info(name)
        placement = self._placements[name]
        if info.type_name in FLOAT_DTYPES:
            stored = info.read_bytes().view(FLOAT_DTYPES[info.type_name]).reshape(-1, info.shape[-1])
            return stored if placement.row_order is None else stored[placement.row_order]
        blocks = info.read_bytes()
        packed = read_packed_weights(blocks.reshape(-1, blocks.shape[-1]), info.type_name, with_offsets)
        if packed is None:
            matrices = info.list_parts() if len(info.shape) > 2 else [info]
            packed = join_experts([quantise_to_int8(matrix.read_values()) for matrix in matrices])
        check_numbers(packed, placement.file_name, str(self._headers.path))
        return packed if placement.row_order is None else packed.take_rows(placement.row_order)

    def _get_info(self, name: str) -> TensorInfo:
        return self._headers.tensors[self._placements[name].file_name]

    def _place_experts(self, name: str) -> None:
        """Find the place of an experts' tensor, by the parameter's rows filled by an expert with a single weight."""
        info = self._headers.tensors[name]
        hf_name, rows = self._process(name, np.ones((1, 1, 1), np.float32))
        stack = self._expert_stacks.get(hf_name or "")
        if stack is None or rows.shape != (1, len(stack.matrices), 1):
            raise self._make_place_error(name)
        if info.shape != stack.shape:
            raise self._make_shape_error(name, stack.shape)
        self._placements[stack.matrices[int(rows.argmax())]] = Placement(name)

    def _place(self, name: str) -> None:
        """Find a tensor's parameter and, by numbering its rows, the order of rows in the parameter."""
        info = self._headers.tensors[name]
        is_kept = is_kept_matrix(info)
        row_count = info.shape[0]
        probe = np.arange(row_count, dtype=np.float32)[:, None] if is_kept else np.zeros(info.shape, np.float32)
        hf_name, rows = self._process(name, probe)
        if hf_name is None or hf_name not in self._hf_shapes:
            raise self._make_place_error(name)
        is_transposed = is_kept and len(rows) == 1
        row_order = rows.reshape(-1).astype(np.int64) if is_kept else None
        if row_order is not None and np.array_equal(row_order, np.arange(row_count)):
            row_order = None
        elif row_order is not None and not np.array_equal(np.sort(row_order), np.arange(row_count)):
            raise OvspecError(
                f"{self._headers.path}: the quantised rows of its tensor {name} can't be exported unchanged; "
                f"{KEEP_ADVICE}."
            )
        self._check_shape(name, info, hf_name, is_transposed)
        self._placements[hf_name] = Placement(name, row_order, is_transposed)

    def _check_shape(self, name: str, info: TensorInfo, hf_name: str, is_transposed: bool) -> None:
        stored_shape = [size for size in (reversed(info.shape) if is_transposed else info.shape) if size > 1]
        if stored_shape != [size for size in self._hf_shapes[hf_name] if size > 1]:
            raise self._make_shape_error(name, self._hf_shapes[hf_name])

    def _make_place_error(self, name: str) -> OvspecError:
        return OvspecError(
            f"{self._headers.path}: its tensor {name} is unknown in the family {self._headers.architecture}; "
            f"{CHECKPOINT_ADVICE}."
        )

    def _make_shape_error(self, name: str, model_shape: tuple[int, ...]) -> OvspecError:
        return OvspecError(
            f"{self._headers.path}: its tensor {name} has the shape {list(self._headers.tensors[name].shape)}, but "
            f"the model needs {list(model_shape)}; download the file again."
        )

    def _process(self, name: str, values: np.ndarray) -> tuple[str | None, np.ndarray]:
        """Return the name of a tensor's parameter, None for none, and the values in the parameter's layout."""
        tensors: dict[str, Any] = {}
        try:
            processed = self._processor.process(
                weights=values, name=name, tensor_key_mapping=self._hf_names, parsed_parameters={"tensors": tensors}
            )
        except (KeyError, ValueError) as error:
            raise OvspecError(
                f"{self._headers.path}: its tensor {name} can't be converted ({error}); {CHECKPOINT_ADVICE}."
            ) from None
        if processed.name is None:  # in ``tensors``, by its new name
            [(hf_name, tensor)] = tensors.items()
            return hf_name, tensor.numpy()
        return self._hf_names.get(processed.name), processed.weights


@contextlib.contextmanager
def make_name_tables_once() -> Iterator[None]:
    """Make transformers build gguf's table of tensor names only once, not again for every module of a model."""
    import gguf

    original_make = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = functools.cache(original_make)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = original_make


def is_kept_matrix(info: TensorInfo) -> bool:
    """Return whether a tensor is stored unchanged in the IR: a matrix not in f32."""
    return len(info.shape) == 2 and min(info.shape) > 1 and (info.is_quantised or info.type_name in ("F16", "BF16"))


def parse_layer_number(name: str) -> int:
    """Return the number of a tensor's layer; -1 outside the layers."""
    name_parts = name.split(".")
    return int(name_parts[1]) if name_parts[0] == "blk" and name_parts[1].isdecimal() else -1
