"""The machines of a cluster: what they have, and models on their way to them in pieces, by Ray's object store."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ovspec.base.errors import OvspecError
from ovspec.base.files import create_folder_once, read_blocks
from ovspec.batch.ray.processors import processors
from ovspec.ir.compile import MODEL_FILE
from ovspec.ir.device import default_cache_dir
from ovspec.setup.identity import hash_model_folder

PIECE = 1 << 26  # bytes


@dataclass(frozen=True)
class Shipment:
    """A folder as its driver has it: its ``identity``, and its files in pieces, each (name, reference to bytes)."""

    folder: Path
    identity: str
    pieces: list[tuple[str, ray.ObjectRef]]

    def is_here(self) -> bool:
        return (self.folder / MODEL_FILE).is_file()

    def arrive(self) -> Path:
        """Return the folder itself if this machine has it, else a copy in the cache, which is made once.

        Raises OvspecError if another model is in its place, or if all machines had it when it was shipped.
        """
        if self.is_here():
            if hash_model_folder(self.folder) != self.identity:
                raise OvspecError(f"{self.folder} has another model on {platform.node()}; remove it there.")
            return self.folder
        copy = default_cache_dir() / "ray" / "models" / self.identity
        if not self.pieces and not copy.is_dir():
            raise OvspecError(f"{self.folder} is missing on {platform.node()}, which joined late; start again.")
        create_folder_once(copy, ((name, ray.get(piece)) for name, piece in self.pieces))
        return copy


def ship(folder: Path) -> Shipment:
    """Return ``folder``, with its files put into the object store if a machine of the cluster doesn't have it."""
    shipment = Shipment(folder.resolve(), hash_model_folder(folder), [])
    if not all(on_each_node(shipment.is_here).values()):
        for file in filter(Path.is_file, folder.rglob("*")):
            name = file.relative_to(folder).as_posix()
            shipment.pieces.extend((name, ray.put(piece)) for piece in read_blocks(file, PIECE))
    return shipment


def on_each_node(function: Callable[[], Any], timeout: float | None = None) -> dict[str, Any]:
    """Return what ``function`` returns on each machine of the cluster, by the id of its node; wait ``timeout`` s."""
    task = ray.remote(num_cpus=0, max_retries=0)(lambda: function())  # for lack of memory, Ray would retry for ever
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    asked = [task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in nodes]
    return dict(zip(nodes, ray.get([each.remote() for each in asked], timeout=timeout), strict=True))


def workers(cpus: int | None) -> tuple[int, int]:
    """Return how many workers the cluster has room for, and the processors of each: a NUMA node's, or ``cpus``."""
    nodes = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]}
    if cpus is None:
        shares = on_each_node(processors)
        cpus = min((min(size, *map(len, shares[node])) for node, size in nodes.items() if size), default=1)
    room = sum(size // cpus for size in nodes.values())
    if not room:
        raise OvspecError(f"No machine of the cluster has {cpus} processors; set `cpus_per_worker` to less.")
    return room, cpus


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Raise an OvspecError of a worker without Ray's and the worker's stack, and one of what Ray says in its errors."""
    try:
        yield
    except RayError as error:
        cause: Any = error
        while found := getattr(cause, "cause", None) or cause.__cause__:
            cause = found
        if isinstance(cause, OvspecError):
            raise OvspecError(str(cause)) from None
        if isinstance(cause, RayError):
            raise OvspecError(f"Ray: {str(cause).strip().splitlines()[0]}") from None
        raise
