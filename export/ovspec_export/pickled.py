"""Names, shapes and small tensors of a file that torch.save wrote, without torch and without running what is in it."""

from __future__ import annotations

import math
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ovspec.base.errors import OvspecError

# Types of elements that are read, by their class in torch.
KINDS = {"LongStorage": "int64", "IntStorage": "int32", "ByteStorage": "uint8", "BoolStorage": "bool"}


@dataclass(frozen=True)
class PickledTensor:
    """A tensor in a file. kind: torch's class. entry: the name of its elements in the archive."""

    shape: list[int]
    kind: str
    entry: str
    start: int

    def read(self, file: Path) -> np.ndarray:
        """Return the elements of a tensor of integers; raises OvspecError if they are something else."""
        if self.kind not in KINDS:
            raise OvspecError(f"{file}: its d2t or t2d holds no integers ({self.kind}).")
        with zipfile.ZipFile(file) as archive:
            data = archive.read(self.entry)
        kind = np.dtype(KINDS[self.kind])
        return np.frombuffer(data, kind, math.prod(self.shape), self.start * kind.itemsize).reshape(self.shape)


class Shapes(pickle.Unpickler):
    """Reads tensors as ``PickledTensor`` and refuses every other object."""

    folder = ""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            return name
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): self.tensor,
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it holds {module}.{name}")
        return known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        _, kind, key, *_ = pid
        return kind, f"{self.folder}/data/{key}"

    @staticmethod
    def tensor(storage: tuple[str, str], start: int, shape: tuple[int, ...], *_: Any) -> PickledTensor:
        return PickledTensor(list(shape), *storage, start)


def pickled_tensors(file: Path) -> dict[str, PickledTensor]:
    """Return the tensors in a file by name.

    Raises:
        OvspecError: it is damaged, or holds something other than tensors by name.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entry = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(entry) as stream:
                reader = Shapes(stream)
                reader.folder = entry.removesuffix("/data.pkl")
                found = reader.load()
        if not isinstance(found, dict) or not all(isinstance(each, PickledTensor) for each in found.values()):
            raise pickle.UnpicklingError("it holds more than tensors by name")
    except Exception as error:  # damaged bytes of a pickle may raise anything
        why = error if isinstance(error, pickle.UnpicklingError) else "not a file of torch.save, or cut off"
        raise OvspecError(f"{file}: cannot be read ({why}); save its tensors as model.safetensors.") from None
    return dict(found)
