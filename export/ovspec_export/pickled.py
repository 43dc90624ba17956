"""The tensors of a file written by torch.save; nothing else in it is read, and none of it is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ovspec.base.errors import OvspecError

if TYPE_CHECKING:
    from torch import Tensor


def read_pickled_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors in a file by name; their elements stay on the disk until used.

    Raises:
        OvspecError: it is damaged, or has content other than named tensors.
    """
    import torch  # deferred, because it takes seconds

    try:
        tensors = torch.load(file, "cpu", weights_only=True, mmap=True)
    except Exception as error:  # damaged bytes of a pickle may raise anything
        reason = "it was not written by torch.save, or is truncated"
        if global_match := re.search(r"GLOBAL ([\w.]+)", str(error)):
            reason = f"it contains {global_match[1]}, not only tensors"
        raise OvspecError(f"{file}: cannot be read ({reason}); save the tensors as model.safetensors.") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise OvspecError(
            f"{file}: contains other objects than tensors with names; save the tensors as model.safetensors."
        )
    return tensors
