"""A GPU's properties for reports, and waiting for OpenVINO's background compilation of GPU kernels."""

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

OWNERS_FREED_AT_EXIT: weakref.WeakSet[ModelOwner] = weakref.WeakSet()
QUIET_SECONDS = 0.25  # background idle time after which compilation counts as finished
LONGEST_WAIT_SECONDS = 30.0


def read_gpu_facts(device: str) -> JsonObject:
    """Return a GPU's memory in bytes, driver, matrix unit (XMX) and default KV cache; {} for another device.

    A property is None if the plugin lacks it.
    """
    if not is_gpu(device):
        return {}
    read_property = functools.partial(read_device_property, device)
    property_names = sorted(read_property("SUPPORTED_PROPERTIES") or ())
    driver_versions = [str(read_property(name)) for name in property_names if name.endswith("DRIVER_VERSION")]
    capabilities = read_property("OPTIMIZATION_CAPABILITIES")
    kv_precision = read_property("KV_CACHE_PRECISION")
    return {
        "name": read_property("FULL_DEVICE_NAME"),
        "architecture": read_property("DEVICE_ARCHITECTURE"),
        "memory": read_property("GPU_DEVICE_TOTAL_MEM_SIZE"),
        "shares_memory": uses_main_memory(device),
        "driver": next(iter(driver_versions), None),
        "xmx": None if capabilities is None else "GPU_HW_MATMUL" in capabilities,
        "kv_precision": kv_precision and format_property(kv_precision),
    }


def format_gpu_facts(facts: JsonObject) -> str:
    """Return the facts of ``read_gpu_facts`` in words."""
    fact_texts: list[str] = []
    if facts["memory"]:
        fact_texts.append(f"{facts['memory'] / 1e9:.1f} GB" + " of main memory" * facts["shares_memory"])
    fact_texts.append(f"driver {facts['driver'] or 'unknown'}")
    if facts["xmx"] is not None:
        fact_texts.append("XMX" if facts["xmx"] else "no XMX")
    default_precision = facts["kv_precision"]
    if default_precision in (None, "dynamic"):
        default_precision = "chosen by the device, often i8"
    fact_texts.append(f"KV cache f16 (OpenVINO's default: {default_precision})")
    return ", ".join(fact_texts)


def wait_for_compilation() -> None:
    """Wait until the threads of this process are idle, kernel compilers included; for half a minute at most."""
    process = psutil.Process()
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    cpu_seconds = math.inf
    while cpu_seconds > QUIET_SECONDS / 10 and time.monotonic() < deadline:
        seconds_before = sum(process.cpu_times()[:2])
        time.sleep(QUIET_SECONDS)
        cpu_seconds = sum(process.cpu_times()[:2]) - seconds_before


class ModelOwner(Protocol):
    """An owner of compiled models, able to free them."""

    def free(self) -> None: ...


def free_models_at_exit(owner: ModelOwner) -> None:
    """Free compiled models before this process ends, once no kernels are being compiled.

    OpenVINO's GPU plugin would crash otherwise (2026.4.1): its tables are gone before its threads and models.
    """
    if not OWNERS_FREED_AT_EXIT:
        atexit.unregister(free_registered_models)
        atexit.register(free_registered_models)
    OWNERS_FREED_AT_EXIT.add(owner)


def free_registered_models() -> None:
    if OWNERS_FREED_AT_EXIT:
        wait_for_compilation()
    for owner in list(OWNERS_FREED_AT_EXIT):
        owner.free()
    OWNERS_FREED_AT_EXIT.clear()
