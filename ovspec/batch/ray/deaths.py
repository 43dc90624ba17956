"""How the process of a worker ended, which Ray doesn't tell: the signal, kept in a file on the worker's machine."""

from __future__ import annotations

import faulthandler
import os
import signal

import ray
from ray.exceptions import ActorUnavailableError, NodeDiedError, OutOfMemoryError, RayActorError, RayError

from ovspec.batch.ray.nodes import on_each_node
from ovspec.ir.device import default_cache_dir

WAIT = 20.0  # seconds for all machines to look for the file


def note_signals(worker: int) -> None:
    """Let the signal that ends this process, if one does that can be caught, be found as that of ``worker``."""
    file = default_cache_dir() / "ray" / "deaths" / str(worker)
    file.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.enable(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))  # which stays open


def noted(worker: int) -> str:
    """Return how the worker of this number ended on this machine, and forget it; an empty text if nothing says so."""
    file = default_cache_dir() / "ray" / "deaths" / str(worker)
    if not file.is_file():
        return ""
    words = file.read_text(errors="replace").partition("\n")[0].partition(": ")[2]  # Fatal Python error: Aborted
    file.unlink()
    names = {str(signal.strsignal(each)).partition(":")[0]: each.name for each in signal.Signals}
    return names.get(words, words)


def noted_elsewhere(worker: int) -> str:
    """Return what ``noted`` returns on the machine of the cluster that knows."""
    if sum(node["Alive"] for node in ray.nodes()) == 1:
        return ""
    try:
        return next(filter(None, on_each_node(lambda: noted(worker), WAIT).values()), "")
    except RayError:  # a machine that is leaving
        return ""


def how_it_died(worker: int, error: RayError) -> str:
    """Return how a worker ended whose calls raise ``error``, for a sentence whose subject it is."""
    if isinstance(error, NodeDiedError) or "node has died" in str(error):
        return "was lost with its machine"
    if isinstance(error, ActorUnavailableError):
        return "is out of reach"
    if isinstance(error, OutOfMemoryError):
        return "was killed by Ray, because its machine ran out of memory"
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return f"failed to start ({str(error).splitlines()[-1].strip()})"
    name = noted(worker) or noted_elsewhere(worker)
    return f"died of {name}" if name else "was killed (by SIGKILL, as the system does when memory runs out)"
