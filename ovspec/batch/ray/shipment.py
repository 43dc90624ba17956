"""Shipping models to the machines of a cluster, in pieces, by Ray's object store."""

import platform
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ray

from ovspec.base.errors import OvspecError
from ovspec.base.files import PARTIAL_SUFFIX, name_write_errors, rename_with_retries
from ovspec.batch.ray.nodes import run_on_each_node
from ovspec.ir.config import MODEL_FILE
from ovspec.ir.device import default_cache_dir
from ovspec.setup.identity import hash_model_folder


def read_pieces(path: Path, piece_bytes: int) -> Iterator[bytes]:
    """Yield the content of a file in pieces of ``piece_bytes`` bytes; at least one, empty for an empty file."""
    with path.open("rb") as file:
        yield file.read(piece_bytes)
        while piece := file.read(piece_bytes):
            yield piece


def create_folder_once(folder: Path, pieces: Iterable[tuple[str, bytes]]) -> None:
    """Create ``folder`` atomically from ``pieces`` of its files, (file name, bytes) in order, unless it exists."""
    from filelock import FileLock  # it imports slowly

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():
            return
        partial_folder = folder.with_name(f"{folder.name}{PARTIAL_SUFFIX}")
        shutil.rmtree(partial_folder, ignore_errors=True)
        for name, piece in pieces:
            with name_write_errors(folder / name):
                (partial_folder / name).parent.mkdir(parents=True, exist_ok=True)
                with (partial_folder / name).open("ab") as file:
                    file.write(piece)
        rename_with_retries(partial_folder, folder)


PIECE_BYTES = 1 << 26  # bytes


@dataclass(frozen=True)
class Shipment:
    """A folder on its driver's machine: its ``identity``, and its files in pieces, each (name, reference to bytes)."""

    folder: Path
    identity: str
    pieces: list[tuple[str, ray.ObjectRef]]

    def has_local_folder(self) -> bool:
        return (self.folder / MODEL_FILE).is_file()

    def receive_folder(self) -> Path:
        """Return the folder itself if this machine has it, else a copy in the cache, made once.

        Raises OvspecError if another model is in its place, or if all machines had it at shipping time.
        """
        if self.has_local_folder():
            if hash_model_folder(self.folder) != self.identity:
                raise OvspecError(
                    f"{self.folder}: contains another model on the machine {platform.node()}; delete that folder there."
                )
            return self.folder
        cached_folder = default_cache_dir() / "ray" / "models" / self.identity
        if not self.pieces and not cached_folder.is_dir():
            raise OvspecError(
                f"{self.folder}: missing on {platform.node()}, a machine added after the start; start the batch again."
            )
        create_folder_once(cached_folder, ((name, ray.get(piece)) for name, piece in self.pieces))
        return cached_folder


def ship_folder(folder: Path) -> Shipment:
    """Return ``folder``, with its files put into the object store if a machine of the cluster doesn't have it."""
    shipment = Shipment(folder.resolve(), hash_model_folder(folder), [])
    if not all(run_on_each_node(shipment.has_local_folder).values()):
        for file in filter(Path.is_file, folder.rglob("*")):
            name = file.relative_to(folder).as_posix()
            shipment.pieces.extend((name, ray.put(piece)) for piece in read_pieces(file, PIECE_BYTES))
    return shipment
