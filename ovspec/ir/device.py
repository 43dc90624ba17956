"""Turn the user's device options into a checked OpenVINO device name and compile properties."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openvino as ov
import platformdirs
import psutil

from ovspec.base.errors import OvspecError
from ovspec.ir.instruction_set import check_instruction_set, describe_instruction_set

# KV caches of these types survive trimming, compacting, forking and copying unchanged, in any arithmetic (measured in
# tests/cache); u8 caches don't.
EXACT_KV_PRECISIONS = ("f32", "bf16", "f16")
# Properties to distinguish devices. A plugin may lack some, and has its own name for the driver's version.
IDENTIFYING_PROPERTIES = ("FULL_DEVICE_NAME", "DEVICE_ARCHITECTURE", "GPU_UARCH_VERSION")


@dataclass(frozen=True)
class DeviceOptions:
    """Where and how a model is compiled. ``None`` leaves the choice to the OpenVINO plugin."""

    device: str = "CPU"  # or GPU, GPU.N, AUTO, AUTO:X,Y
    precision: str | None = None  # of the arithmetic: f32, bf16, f16
    kv_precision: str | None = None  # also u8; on the CPU, the default is the type of the arithmetic
    threads: int | None = None
    properties: dict[str, str] = field(default_factory=dict)  # OpenVINO's properties; they override all else
    cache_dir: Path | None = None

    @property
    def fixed_properties(self) -> dict[str, str]:
        """The properties set by these options, under OpenVINO's names."""
        properties = {"INFERENCE_PRECISION_HINT": self.precision, "KV_CACHE_PRECISION": self.kv_precision}
        if self.threads is not None and "CPU" in list_possible_devices(self.device):
            properties["INFERENCE_NUM_THREADS"] = str(self.threads)
        return {name: setting for name, setting in properties.items() if setting is not None} | self.properties

    @property
    def cache_folder(self) -> Path | None:
        """The folder for compiled models and probes; None if the properties switch the cache off."""
        cache_dir = self.properties.get("CACHE_DIR")
        if cache_dir is None:
            return self.cache_dir or default_cache_dir() / "compiled"
        return Path(cache_dir) if cache_dir else None


@functools.cache
def openvino_core() -> ov.Core:
    """Return the process's OpenVINO core."""
    return ov.Core()


def default_cache_dir() -> Path:
    return Path(platformdirs.user_cache_dir("ovspec", appauthor=False))


def identify_machine(device: str = "CPU") -> tuple[str, ...]:
    """Return this machine's properties; cached findings about it are valid while these are the same.

    ``device``: the device of the findings. Devices other than the CPU add their names, architectures and drivers.
    """
    processor = str(openvino_core().get_property("CPU", "FULL_DEVICE_NAME"))
    other_device_facts = [
        device_fact for name in list_possible_devices(device) if name != "CPU" for device_fact in identify_device(name)
    ]
    return (
        processor,
        describe_instruction_set(),
        f"{count_cores()} cores",
        system_and_processor(),
        f"OpenVINO {ov.get_version()}",
        *other_device_facts,
    )


def system_and_processor() -> str:
    """Return the operating system and the kind of processor; both affect the bits of some functions."""
    return f"{platform.system()} {platform.machine()}"


def count_cores() -> int:
    """Return the number of cores available to this process."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):
        return len(process.cpu_affinity())
    return psutil.cpu_count() or 1


def identify_device(name: str) -> list[str]:
    """Return the name of a device, and its model, architecture and driver as far as its plugin provides them."""
    supported_properties = sorted(read_device_property(name, "SUPPORTED_PROPERTIES") or ())
    identifying_properties = [
        key for key in supported_properties if key in IDENTIFYING_PROPERTIES or key.endswith("DRIVER_VERSION")
    ]
    values = {key: read_device_property(name, key) for key in identifying_properties}
    return [name, *(f"{key}={value}" for key, value in values.items() if value is not None)]


def read_device_property(device: str, name: str) -> Any:
    """Return a property of a device; None if its plugin lacks it."""
    with contextlib.suppress(RuntimeError):
        return openvino_core().get_property(device, name)
    return None


def format_property(value: Any) -> str:
    """Return a property of a device or a compiled model as a string; element types become "f16" and the like."""
    return value.get_type_name() if isinstance(value, ov.Type) else str(value)


def list_possible_devices(device: str) -> list[str]:
    """Return the devices on which a model compiled for ``device``, such as AUTO:GPU,CPU or AUTO:-GPU, may run."""
    plugin, _, device_list = device.upper().partition(":")
    if not is_virtual_device(device):
        return [plugin]
    if not device_list:
        return list(openvino_core().available_devices)
    listed_devices = device_list.split(",")
    included_devices = [name for name in listed_devices if not name.startswith("-")]
    return included_devices or [name for name in openvino_core().available_devices if f"-{name}" not in listed_devices]


def is_virtual_device(device: str) -> bool:
    """Return whether ``device`` is a virtual device of OpenVINO, such as AUTO or HETERO, to choose among others."""
    return device.upper().partition(":")[0] in ("AUTO", "HETERO")


def is_gpu(device: str) -> bool:
    """Return whether ``device`` is a GPU itself; AUTO and HETERO don't count, even if they may choose a GPU."""
    return device.upper().partition(".")[0] == "GPU"


def may_use_gpu(device: str) -> bool:
    """Return whether a GPU may run a model compiled for ``device``."""
    return any(map(is_gpu, list_possible_devices(device)))


@functools.cache
def uses_main_memory(device: str) -> bool:
    """Return whether ``device`` uses this machine's main memory: the CPU, or a GPU without memory of its own."""
    if not is_gpu(device):
        return device == "CPU"
    return str(read_device_property(device, "DEVICE_TYPE")).endswith("INTEGRATED")


def list_available_devices() -> list[tuple[str, str]]:
    """Return each device's (name, description)."""
    core = openvino_core()
    return [(name, str(core.get_property(name, "FULL_DEVICE_NAME"))) for name in core.available_devices]


def check_threads_option(threads: int | None, devices: list[str]) -> None:
    """Raise an OvspecError if ``threads`` is set and none of ``devices`` is the CPU."""
    if threads and not any("CPU" in list_possible_devices(device) for device in devices):
        raise OvspecError(
            f"`threads={threads}` works only on a CPU, but the device is {devices[0]}; leave `threads` out."
        )


def parse_device_option(device: str, option: str = "device") -> str:
    """Return OpenVINO's name of ``device``, the value of ``option``; raise OvspecError if it isn't a device."""
    device_name = device.upper()
    plugin, _, device_list = device_name.partition(":")
    if device_list and not is_virtual_device(device_name):
        raise OvspecError(f"`{option}={device!r}`: only AUTO and HETERO take a list of devices, as in AUTO:GPU,CPU.")
    requested_devices = (
        [requested_device.lstrip("-") for requested_device in device_list.split(",")] if device_list else [plugin]
    )
    if requested_devices == ["AUTO"]:
        return device_name
    if "CPU" in requested_devices:
        check_instruction_set()
    available = openvino_core().available_devices
    known_devices = {
        *available,
        *(available_device.partition(".")[0] for available_device in available),
    }  # "GPU" for GPU.0, GPU.1 and so on
    if "GPU" in known_devices:
        known_devices.add("GPU.0")  # OpenVINO calls a single GPU just "GPU"
    if missing_devices := [requested for requested in requested_devices if requested not in known_devices]:
        reason = "no such device"
        if missing_devices[0].startswith("GPU") and "GPU" not in known_devices:
            driver_packages = "on Linux, install the package intel-opencl-icd; on Windows, Intel's graphics driver"
            reason = f"no GPU driver found ({driver_packages})"
        raise OvspecError(f"`{option}={device!r}`: {reason}; available here: {', '.join(available)}.")
    return device_name


def make_compile_properties(options: DeviceOptions) -> dict[str, str]:
    """Return the properties for ``Core.compile_model``."""
    properties = {"PERFORMANCE_HINT": "LATENCY"}
    if options.device.upper().startswith("AUTO"):
        # The KV cache lives in the request: it must not start on the CPU and then move to another device.
        properties["ENABLE_STARTUP_FALLBACK"] = "NO"
    fixed_properties = options.fixed_properties
    default_precisions = default_kv_precisions(options)
    if is_virtual_device(options.device):  # virtual devices don't know the property themselves
        fixed_precision = fixed_properties.pop("KV_CACHE_PRECISION", None)
        precisions = {name: fixed_precision or precision for name, precision in default_precisions.items()}
        kv_precisions_text = ",".join(
            f"{name}:{{KV_CACHE_PRECISION:{precision}}}" for name, precision in precisions.items()
        )
        properties["DEVICE_PROPERTIES"] = f"{{{kv_precisions_text}}}"
    elif kv_precision := default_precisions.get(options.device.upper()):
        properties["KV_CACHE_PRECISION"] = kv_precision
    properties |= fixed_properties
    properties["CACHE_DIR"] = ""
    if options.cache_folder:
        # OpenVINO's own cache key is incomplete: it would load a model compiled with another precision or other
        # properties, or for another instruction set or number of cores.
        compile_setting = repr((identify_machine(options.device), sorted(properties.items())))
        name = f"{ov.get_version()[:20]} {hashlib.sha256(compile_setting.encode()).hexdigest()[:16]}"
        properties["CACHE_DIR"] = str(options.cache_folder / name)
    return properties


def list_native_precisions() -> list[str]:
    """Return the CPU's native 16-bit types; OpenVINO emulates bf16 and computes f16 in f32."""
    capabilities = openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return [name for name, capability in (("bf16", "BF16"), ("f16", "FP16")) if capability in capabilities]


def resolve_precision(options: DeviceOptions) -> str:
    """Return the type of the CPU's arithmetic with these options."""
    fixed_precision = options.fixed_properties.get("INFERENCE_PRECISION_HINT")
    return fixed_precision or openvino_core().get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()


def default_kv_precisions(options: DeviceOptions) -> dict[str, str]:
    """Return the default KV cache type by device: CPU or GPU; AUTO and HETERO may include several.

    It is attention's type, for exact rollback. Rollback isn't exact with u8, the CPU plugin's own default for
    compressed weights (see docs/explanation/engines.md), nor with i8, the default of many GPUs.
    """
    devices = list_possible_devices(parse_device_option(options.device))
    kv_precisions = {device: "f16" for device in devices if is_gpu(device)}
    if "CPU" in devices:
        precision = resolve_precision(options)
        # With a 16-bit cache, attention refuses to run on a CPU without 16-bit instructions of that type.
        kv_precisions["CPU"] = precision if precision in list_native_precisions() else "f32"
    return kv_precisions
