"""From what the user calls a device to a checked OpenVINO device name and compile properties."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

import openvino as ov
import platformdirs

from ovspec.errors import OvspecError

# A KV cache of these types is the same after trimming, compacting, forking and copying, in any arithmetic
# (tests/decoders measure it); u8 is not.
EXACT_KV_PRECISIONS = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class DeviceOptions:
    """Where and how a model is compiled; ``None`` leaves a choice to the OpenVINO plugin."""

    device: str = "CPU"  # or GPU, GPU.N, AUTO, AUTO:X,Y
    precision: str | None = None  # of the arithmetic: f32, bf16, f16
    kv_precision: str | None = None  # also u8; by default that of the arithmetic on the CPU
    threads: int | None = None
    properties: dict[str, str] = field(default_factory=dict)  # OpenVINO's own; they win over everything else
    cache_dir: Path | None = None

    @property
    def fixed(self) -> dict[str, str]:
        """The properties that are named here, as OpenVINO calls them."""
        named = {
            "INFERENCE_PRECISION_HINT": self.precision,
            "KV_CACHE_PRECISION": self.kv_precision,
            "INFERENCE_NUM_THREADS": self.threads,
        }
        return {name: str(value) for name, value in named.items() if value is not None} | self.properties

    @property
    def cache_folder(self) -> Path | None:
        """Where compiled models and probes are kept; None where the properties switch the cache off."""
        named = self.properties.get("CACHE_DIR")
        if named is None:
            return self.cache_dir or default_cache_dir() / "compiled"
        return Path(named) if named else None


@functools.cache
def core() -> ov.Core:
    """The process's one OpenVINO core."""
    return ov.Core()


def default_cache_dir() -> Path:
    return Path(platformdirs.user_cache_dir("ovspec", appauthor=False))


def available_devices() -> list[tuple[str, str]]:
    """(name, description) of every device that can be used now."""
    return [(name, str(core().get_property(name, "FULL_DEVICE_NAME"))) for name in core().available_devices]


def check_device(device: str) -> str:
    """The device's OpenVINO name, in capitals; raises OvspecError, naming those there are, where it isn't here."""
    name = device.upper()
    base, _, listed = name.partition(":")
    wanted = [part.lstrip("-") for part in listed.split(",")] if listed else [base]
    if base not in ("AUTO", "HETERO") and listed:
        raise OvspecError(f"--device {device}: only AUTO and HETERO take a list of devices, as in AUTO:GPU,CPU.")
    if wanted == ["AUTO"]:
        return name
    present = core().available_devices
    for part in wanted:
        if part in present or (part == "GPU" and any(p.startswith("GPU.") for p in present)):
            continue
        if part == "GPU.0" and "GPU" in present:
            continue
        reason = "no such device"
        if part.startswith("GPU") and not any(p.startswith("GPU") for p in present):
            packages = "on Linux it is the package intel-opencl-icd, on Windows Intel's graphics driver"
            reason = f"no GPU driver found ({packages})"
        raise OvspecError(f"--device {device}: {reason}; available here: {', '.join(present)}.")
    return name


def compile_properties(options: DeviceOptions) -> dict[str, str]:
    """The properties for ``Core.compile_model``."""
    properties = {"PERFORMANCE_HINT": "LATENCY", "CACHE_DIR": str(options.cache_folder or "")}
    if options.device.upper().startswith("AUTO"):
        # The KV cache lives in the request: it must not start on the CPU and move away.
        properties["ENABLE_STARTUP_FALLBACK"] = "NO"
    if kv_precision := default_kv_precision(options):
        properties["KV_CACHE_PRECISION"] = kv_precision
    return properties | options.fixed


def native_precisions() -> list[str]:
    """The 16-bit types in which the CPU itself computes; elsewhere OpenVINO emulates bf16 and computes f16 in f32."""
    capabilities = core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return [name for name, capability in (("bf16", "BF16"), ("f16", "FP16")) if capability in capabilities]


def default_kv_precision(options: DeviceOptions) -> str | None:
    """The KV cache's default type: that in which attention is really computed, so that rolling back is exact.

    The CPU plugin's own default for compressed weights, u8, is not (see ARCHITECTURE.md).
    None on other devices: AUTO and HETERO do not know the property, and a GPU has a choice of its own.
    """
    if check_device(options.device) != "CPU":
        return None
    default = core().get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
    precision = options.fixed.get("INFERENCE_PRECISION_HINT", default)
    # Attention needs the CPU's own 16-bit instructions; with a cache of such a type it refuses to run without them.
    return precision if precision in native_precisions() else "f32"
