"""The properties of a GPU that users ask for, and the kernels that its OpenVINO plugin compiles in the background."""

from __future__ import annotations

import atexit
import functools
import math
import time
import weakref
from typing import Any, Protocol

import openvino as ov
import psutil

from ovspec.ir.device import is_gpu, read_device_property, uses_main_memory

FREED_AT_EXIT: weakref.WeakSet[Any] = weakref.WeakSet()  # what is freed at exit
QUIET_SECONDS, LONGEST_WAIT_SECONDS = (
    0.25,
    30.0,
)  # seconds without work in the background, and the most to wait for them


def read_gpu_facts(device: str) -> dict[str, Any]:
    """Return a GPU's memory in bytes, driver, matrix unit (XMX) and default KV cache; {} for another device.

    A property that its plugin lacks is None.
    """
    if not is_gpu(device):
        return {}
    told = functools.partial(read_device_property, device)
    names = sorted(told("SUPPORTED_PROPERTIES") or ())
    drivers = [told(name) for name in names if name.endswith("DRIVER_VERSION")]
    capabilities, kv_precision = told("OPTIMIZATION_CAPABILITIES"), told("KV_CACHE_PRECISION")
    return {
        "name": told("FULL_DEVICE_NAME"),
        "architecture": told("DEVICE_ARCHITECTURE"),
        "memory": told("GPU_DEVICE_TOTAL_MEM_SIZE"),
        "shares_memory": uses_main_memory(device),
        "driver": str(drivers[0]) if drivers else None,
        "xmx": None if capabilities is None else "GPU_HW_MATMUL" in capabilities,
        "kv_precision": kv_precision.get_type_name() if isinstance(kv_precision, ov.Type) else kv_precision,
    }


def format_gpu_facts(facts: dict[str, Any]) -> str:
    """Return ``read_gpu_facts`` in words."""
    memory, kv_precision = facts["memory"], facts["kv_precision"]
    default = "chosen by the device, often i8" if kv_precision in (None, "dynamic") else kv_precision
    parts = [
        f"{memory / 1e9:.1f} GB{' of main memory' if facts['shares_memory'] else ''}" if memory else "",
        f"driver {facts['driver'] or 'unknown'}",
        "" if facts["xmx"] is None else "XMX" if facts["xmx"] else "no XMX",
        f"KV cache f16 (OpenVINO's default: {default})",
    ]
    return ", ".join(filter(None, parts))


def wait_for_compilation() -> None:
    """Wait until no thread of this process works, as those that compile kernels do; for half a minute at most."""
    process, end = psutil.Process(), time.monotonic() + LONGEST_WAIT_SECONDS
    worked = math.inf
    while worked > QUIET_SECONDS / 10 and time.monotonic() < end:
        before = sum(process.cpu_times()[:2])
        time.sleep(QUIET_SECONDS)
        worked = sum(process.cpu_times()[:2]) - before


class Freeable(Protocol):
    """What holds compiled models, and can free them."""

    def free(self) -> None: ...


def free_at_exit(held: Freeable) -> None:
    """Free compiled models before this process ends, when no kernel is compiled any more.

    OpenVINO's GPU plugin would crash otherwise (2026.4.1): its tables are gone before its threads and models are.
    """
    if not FREED_AT_EXIT:
        atexit.unregister(free_registered_models)
        atexit.register(free_registered_models)
    FREED_AT_EXIT.add(held)


def free_registered_models() -> None:
    if FREED_AT_EXIT:
        wait_for_compilation()
    for held in list(FREED_AT_EXIT):
        held.free()
    FREED_AT_EXIT.clear()
