"""Read GGUF files: their metadata and their tensors' places, with every length checked against the file's size.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The ``gguf`` package's own reader isn't used,
because a damaged length keeps it busy for hours; its tables of quantised types are.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.setup.identity import list_model_files

MAGIC = b"GGUF"
FORMAT_VERSIONS = (2, 3)  # of the format
DEFAULT_ALIGNMENT = 32  # of the tensors, unless the metadata has another
SCALAR_DTYPES = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}
SCALAR_DTYPES |= {10: "<u8", 11: "<i8", 12: "<f8"}
# Far more than in real files; beyond it, a damaged or hostile header would fill the memory.
MAX_HEADER_BYTES = 2**28
MAX_ARRAY_ELEMENTS = 2**24  # of all arrays of the metadata
MAX_ENTRIES, MAX_TENSORS = 2**16, 2**18
READ_BYTES = 2**18  # about so many are converted to floats at a time
FLOAT_TYPE, STRING_TYPE, ARRAY_TYPE = 6, 8, 9
CHECKPOINT_ADVICE = "export the original checkpoint instead"  # if a file can't be read


@dataclass(frozen=True)
class TensorInfo:
    """The place and type of a tensor's data.

    offset: of its first byte in the file.
    shape: as in a checkpoint, the last axis contiguous.
    ggml_type: ggml's number of its type.
    """

    file: Path
    offset: int
    shape: tuple[int, ...]
    ggml_type: int

    @property
    def stored_byte_shape(self) -> tuple[int, ...]:
        """The shape of its data in bytes."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self.ggml_type)]
        if not self.shape or self.shape[-1] % block_elements:
            raise ValueError(
                f"a tensor of the shape {list(self.shape)} can't be stored in blocks of {block_elements} values"
            )
        return *self.shape[:-1], self.shape[-1] // block_elements * block_bytes

    @property
    def type_name(self) -> str:
        """ggml's name of its type."""
        from gguf.constants import GGMLQuantizationType

        return GGMLQuantizationType(self.ggml_type).name

    @property
    def is_quantised(self) -> bool:
        """Whether several of its values share a scale."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        return GGML_QUANT_SIZES[GGMLQuantizationType(self.ggml_type)][0] > 1

    def list_parts(self) -> list[TensorInfo]:
        """Return the parts along its first axis, which follow each other, as tensors without this axis."""
        part_bytes = math.prod(self.stored_byte_shape[1:])
        return [
            replace(self, offset=self.offset + number * part_bytes, shape=self.shape[1:])
            for number in range(self.shape[0])
        ]

    def read_bytes(self) -> np.ndarray:
        """Return its bytes, of the shape ``stored_byte_shape``."""
        return np.memmap(self.file, np.uint8, "r", self.offset, self.stored_byte_shape)

    def read_values(self) -> np.ndarray:
        """Return its values in f32."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        stored = self.read_bytes()
        # A few long rows are faster than many, and blocks don't depend on rows.
        row_count = math.prod(self.shape[:-1])
        least_count = min(max(1, stored.size // READ_BYTES), row_count)
        long_row_count = next(count for count in range(least_count, row_count + 1) if row_count % count == 0)
        long_rows = stored.reshape(long_row_count, -1)
        return dequantize(long_rows, GGMLQuantizationType(self.ggml_type)).reshape(self.shape)


@dataclass(frozen=True)
class GgufHeaders:
    """The content of the headers of a model's files: of all shards, if it has several."""

    path: Path
    metadata: JsonObject
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """ggml's name of the model's family."""
        return str(self.metadata.get("general.architecture"))

    def get_architecture_entry(self, key: str) -> JsonValue:
        """Return the metadata of the architecture under ``key``; None if there is none."""
        return self.metadata.get(f"{self.architecture}.{key}")


def read_gguf_headers(path: Path) -> GgufHeaders:
    """Read the headers of a GGUF file and of its other shards.

    Raises:
        OvspecError: it isn't a GGUF file, is damaged or truncated, or a shard is missing.
    """
    files = list_model_files(path)
    metadata, tensors = read_shard_header(files[0])
    if len(files) != (shard_count := metadata.get("split.count") or 1):
        raise OvspecError(
            f"{path}: the model has {shard_count} files, but this file's name doesn't end in "
            f"-00001-of-{shard_count:05}.gguf or the like; restore the original names of all {shard_count} files."
        )
    for file in files[1:]:
        if not file.is_file():
            raise OvspecError(f"{file}: is missing; download all {len(files)} files of the model.")
        shard_tensors = read_shard_header(file)[1]
        if repeated_name := next((name for name in shard_tensors if name in tensors), None):
            raise OvspecError(
                f"{file}: its tensor {repeated_name} is also in another file of the model; download all files of the "
                "model again."
            )
        tensors |= shard_tensors
    if not tensors:
        raise OvspecError(f"{path}: contains no weights; give the file with the whole model.")
    if len(tensors) != (tensor_count := metadata.get("split.tensors.count") or len(tensors)):
        raise OvspecError(
            f"{path}: has only {len(tensors)} of {tensor_count} tensors; download all files of the model again."
        )
    return GgufHeaders(path, metadata, tensors)


def read_shard_header(file: Path) -> tuple[JsonObject, dict[str, TensorInfo]]:
    """Return the metadata and the tensors of a file; raises OvspecError like ``read_gguf_headers``."""
    with file.open("rb") as stream:
        if stream.read(4) != MAGIC:
            raise OvspecError(f"{file}: not a GGUF file; give a GGUF file or a checkpoint folder.")
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        with data:
            return GgufHeaderReader(data, file).read_metadata_and_tensors()
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        problem = " ".join(str(error).split())[:150]
        raise OvspecError(f"{file}: damaged or truncated ({problem}); download the file again.") from None


class GgufHeaderReader:
    """Reads the header from its beginning; ValueError or struct.error for a truncated file."""

    def __init__(self, data: mmap.mmap, file: Path) -> None:
        self._data = data
        self._file = file
        self._position = len(MAGIC)
        self._element_count = 0  # of all arrays

    def read_metadata_and_tensors(self) -> tuple[JsonObject, dict[str, TensorInfo]]:
        (version,) = self._read_struct("<I")
        if version not in FORMAT_VERSIONS:
            raise ValueError(f"the format version {version} is unknown")
        tensor_count, entry_count = self._read_struct("<QQ")
        if tensor_count > MAX_TENSORS or entry_count > MAX_ENTRIES:
            raise ValueError(
                f"the header announces {tensor_count} tensors and {entry_count} metadata entries, but at most "
                f"{MAX_TENSORS} and {MAX_ENTRIES} are allowed"
            )
        metadata = {}
        for _ in range(entry_count):
            key = self._read_string()
            metadata[key] = self._read_value(*self._read_struct("<I"))
        tensor_entries = [self._read_tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment}, not a positive integer")
        if len({name for name, *_ in tensor_entries}) < len(tensor_entries):
            raise ValueError("two tensors have the same name")
        data_start = -(-self._position // alignment) * alignment
        tensors = {
            name: TensorInfo(self._file, data_start + offset, shape, ggml_type)
            for name, shape, ggml_type, offset in tensor_entries
        }
        check_tensor_types(tensors)
        data_end = max((info.offset + math.prod(info.stored_byte_shape) for info in tensors.values()), default=0)
        if data_end > len(self._data):
            raise ValueError(f"the file has only {len(self._data)} of {data_end} bytes")
        return metadata, tensors

    def _read_struct(self, struct_format: str) -> tuple[Any, ...]:
        numbers = struct.unpack_from(struct_format, self._data, self._position)
        self._position += struct.calcsize(struct_format)
        return numbers

    def _read_bytes(self, byte_count: int) -> bytes:
        if byte_count > len(self._data) - self._position:
            raise ValueError(f"an entry of {byte_count} bytes is longer than the rest of the file")
        if self._position + byte_count > MAX_HEADER_BYTES:
            raise ValueError(f"the header has more than {MAX_HEADER_BYTES} bytes")
        self._position += byte_count
        return self._data[self._position - byte_count : self._position]

    def _read_string(self) -> str:
        return self._read_bytes(*self._read_struct("<Q")).decode()

    def _read_value(self, type_number: int) -> JsonValue:
        if type_number == STRING_TYPE:
            return self._read_string()
        if type_number == FLOAT_TYPE:
            return float(str(np.float32(self._read_array(type_number, 1)[0])))  # 1e-05, not 9.99999974e-06
        if type_number != ARRAY_TYPE:
            return self._read_array(type_number, 1)[0]
        element_type, element_count = self._read_struct("<IQ")
        if element_type == ARRAY_TYPE:
            raise ValueError("a metadata entry is an array of arrays")
        self._element_count += element_count
        if self._element_count > MAX_ARRAY_ELEMENTS:
            raise ValueError(
                f"the metadata has {self._element_count} values, but at most {MAX_ARRAY_ELEMENTS} are allowed"
            )
        if element_type == STRING_TYPE:
            return [self._read_string() for _ in range(element_count)]
        return self._read_array(element_type, element_count)

    def _read_array(self, type_number: int, count: int) -> list[JsonValue]:
        if type_number not in SCALAR_DTYPES:
            raise ValueError(f"a metadata entry has the unknown type {type_number}")
        dtype = np.dtype(SCALAR_DTYPES[type_number])
        return np.frombuffer(self._read_bytes(count * dtype.itemsize), dtype).tolist()

    def _read_tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return a tensor's name, shape, type, and offset from the first tensor."""
        name = self._read_string()
        (axis_count,) = self._read_struct("<I")
        if not 0 < axis_count <= 4:
            raise ValueError(f"the tensor {name} has {axis_count} axes, but 1 to 4 are allowed")
        shape = self._read_struct(f"<{axis_count}Q")
        if not all(shape):
            raise ValueError(f"the tensor {name} has an axis of length 0")
        return name, tuple(reversed(shape)), *self._read_struct("<IQ")


def check_tensor_types(tensors: dict[str, TensorInfo]) -> None:
    """Raise OvspecError for weights of a type that can't be converted."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    for info in {info.ggml_type: info for info in tensors.values()}.values():
        try:
            quantisation_type = GGMLQuantizationType(info.ggml_type)
            dequantize(np.zeros((1, GGML_QUANT_SIZES[quantisation_type][1]), np.uint8), quantisation_type)
        except (ValueError, KeyError, NotImplementedError):
            type_names = {kind.value: kind.name for kind in GGMLQuantizationType}
            type_name = type_names.get(info.ggml_type, str(info.ggml_type))
            raise OvspecError(
                f"{info.file}: weights of the type {type_name} are not supported; use a file of another type, such "
                "as Q8_0."
            ) from None
