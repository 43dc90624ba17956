"""The properties of a GPU that users ask for, and the kernels that its OpenVINO plugin compiles in the background."""

from __future__ import annotations

import atexit
import functools
import math
import time
import weakref
from typing import Protocol

import psutil

from ovspec.base.json_types import JsonObject
from ovspec.ir.device import format_property, is_gpu, read_device_property, uses_main_memory

FREED_AT_EXIT: weakref.WeakSet[Freeable] = weakref.WeakSet()
QUIET_SECONDS = 0.25  # without work in the background, after which compilation has ended
LONGEST_WAIT_SECONDS = 30.0


def read_gpu_facts(device: str) -> JsonObject:
    """Return a GPU's memory in bytes, driver, matrix unit (XMX) and default KV cache; {} for another device.

    A property that its plugin lacks is None.
    """
    if not is_gpu(device):
        return {}
    read_property = functools.partial(read_device_property, device)
    names = sorted(read_property("SUPPORTED_PROPERTIES") or ())
    drivers = [str(read_property(name)) for name in names if name.endswith("DRIVER_VERSION")]
    capabilities = read_property("OPTIMIZATION_CAPABILITIES")
    kv_precision = read_property("KV_CACHE_PRECISION")
    return {
        "name": read_property("FULL_DEVICE_NAME"),
        "architecture": read_property("DEVICE_ARCHITECTURE"),
        "memory": read_property("GPU_DEVICE_TOTAL_MEM_SIZE"),
        "shares_memory": uses_main_memory(device),
        "driver": next(iter(drivers), None),
        "xmx": None if capabilities is None else "GPU_HW_MATMUL" in capabilities,
        "kv_precision": kv_precision and format_property(kv_precision),
    }


def format_gpu_facts(facts: JsonObject) -> str:
    """Return the facts of ``read_gpu_facts`` in words."""
    parts: list[str] = []
    if facts["memory"]:
        parts.append(f"{facts['memory'] / 1e9:.1f} GB" + " of main memory" * facts["shares_memory"])
    parts.append(f"driver {facts['driver'] or 'unknown'}")
    if facts["xmx"] is not None:
        parts.append("XMX" if facts["xmx"] else "no XMX")
    default = facts["kv_precision"]
    if default in (None, "dynamic"):
        default = "chosen by the device, often i8"
    parts.append(f"KV cache f16 (OpenVINO's default: {default})")
    return ", ".join(parts)


def wait_for_compilation() -> None:
    """Wait until no thread of this process works, as those that compile kernels do; for half a minute at most."""
    process = psutil.Process()
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    cpu_seconds = math.inf
    while cpu_seconds > QUIET_SECONDS / 10 and time.monotonic() < deadline:
        seconds_before = sum(process.cpu_times()[:2])
        time.sleep(QUIET_SECONDS)
        cpu_seconds = sum(process.cpu_times()[:2]) - seconds_before


class Freeable(Protocol):
    """An owner of compiled models that can free them."""

    def free(self) -> None: ...


def free_at_exit(owner: Freeable) -> None:
    """Free compiled models before this process ends, when no kernel is compiled any more.

    OpenVINO's GPU plugin would crash otherwise (2026.4.1): its tables are gone before its threads and models are.
    """
    if not FREED_AT_EXIT:
        atexit.unregister(free_registered_models)
        atexit.register(free_registered_models)
    FREED_AT_EXIT.add(owner)


def free_registered_models() -> None:
    if FREED_AT_EXIT:
        wait_for_compilation()
    for owner in list(FREED_AT_EXIT):
        owner.free()
    FREED_AT_EXIT.clear()
