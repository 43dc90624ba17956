"""How a worker's process ended: Ray doesn't report it, so workers record signals in a file on their machine."""

from __future__ import annotations

import faulthandler
import os
import signal

import ray
from ray.exceptions import ActorUnavailableError, NodeDiedError, OutOfMemoryError, RayActorError, RayError

from ovspec.batch.ray.nodes import run_on_each_node
from ovspec.ir.device import default_cache_dir

SEARCH_SECONDS = 20.0  # time limit for the search on all machines


def record_signals(worker_number: int) -> None:
    """Record a fatal signal of this worker's process in a file from now on, if it can be caught (SIGKILL can't)."""
    signal_file = default_cache_dir() / "ray" / "deaths" / str(worker_number)
    signal_file.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.enable(os.open(signal_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))  # kept open


def read_recorded_signal(worker_number: int) -> str:
    """Return the signal recorded for a worker on this machine, and delete the record; "" if there is none."""
    signal_file = default_cache_dir() / "ray" / "deaths" / str(worker_number)
    if not signal_file.is_file():
        return ""
    first_line = signal_file.read_text(errors="replace").partition("\n")[0]  # such as "Fatal Python error: Aborted"
    signal_description = first_line.partition(": ")[2]
    signal_file.unlink()
    signal_names = {str(signal.strsignal(number)).partition(":")[0]: number.name for number in signal.Signals}
    return signal_names.get(signal_description, signal_description)


def find_recorded_signal(worker_number: int) -> str:
    """Return the recorded signal of a worker on another machine of the cluster."""
    if sum(node["Alive"] for node in ray.nodes()) == 1:
        return ""
    try:
        return next(
            filter(None, run_on_each_node(lambda: read_recorded_signal(worker_number), SEARCH_SECONDS).values()), ""
        )
    except RayError:  # a machine leaving the cluster
        return ""


def describe_death(worker_number: int, error: RayError) -> str:
    """Return the end of a sentence about a dead worker: how its process ended; ``error`` is from its failed calls."""
    if isinstance(error, NodeDiedError) or "node has died" in str(error):
        return "was lost with its machine"
    if isinstance(error, ActorUnavailableError):
        return "was unreachable"
    if isinstance(error, OutOfMemoryError):
        return "was killed by Ray, because its machine ran out of memory"
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return f"failed to start ({str(error).splitlines()[-1].strip()})"
    signal_name = read_recorded_signal(worker_number) or find_recorded_signal(worker_number)
    if not signal_name:
        return "was killed (by SIGKILL, as the system does when memory runs out)"
    return f"died of {signal_name}"
