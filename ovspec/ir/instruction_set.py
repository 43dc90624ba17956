"""The instruction set that OpenVINO uses on the CPU: the processor's, up to the caps in the environment.

OpenVINO's matrix products come from oneDNN and obey one variable; its own kernels, attention among them, obey the
other. To see what another processor does, set both to one name of ``LEVELS`` before OpenVINO is first imported.
"""

from __future__ import annotations

import functools
import os
import platform

from ovspec.base.errors import OvspecError

ONEDNN_CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the first one that is set counts
OPENVINO_CAP = "OV_CPU_MAX_ISA"
AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
BF16 = AVX512 | {"avx512_vnni", "avx512_bf16"}
# oneDNN's names for instruction sets, from the least to the best: what each needs of a processor, in Linux's names.
LEVELS: dict[str, frozenset[str]] = {
    "SSE41": frozenset({"sse4_1"}),
    "AVX": frozenset({"avx"}),
    "AVX2": frozenset({"avx2", "fma"}),
    "AVX2_VNNI": frozenset({"avx2", "fma", "avx_vnni"}),
    "AVX2_VNNI_2": frozenset({"avx2", "fma", "avx_vnni", "avx_vnni_int8", "avx_ne_convert"}),
    "AVX512_CORE": AVX512,
    "AVX512_CORE_VNNI": AVX512 | {"avx512_vnni"},
    "AVX512_CORE_BF16": BF16,
    "AVX512_CORE_FP16": BF16 | {"avx512_fp16"},
    "AVX512_CORE_AMX": BF16 | {"avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"},
    "AVX512_CORE_AMX_FP16": BF16 | {"avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"},
}
NEEDED = "AVX2"  # with less, OpenVINO 2026.4 compiles language models and then fails


@functools.cache
def processor_levels() -> tuple[str, ...]:
    """Return the names in ``LEVELS`` that this processor has; empty if it isn't an x86 processor."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ()
    from archspec.cpu.detect import detected_info  # deferred, because it takes 50 ms

    has = detected_info().features
    return tuple(name for name, needed in LEVELS.items() if needed <= has)


def instruction_set() -> str:
    """Return the name of the instruction set in use, or both names if OpenVINO's own kernels use another one."""
    if not processor_levels():
        return platform.machine()  # not x86
    onednn = next(filter(None, map(os.environ.get, ONEDNN_CAPS)), "")
    products, others = best_below(onednn), best_below(os.environ.get(OPENVINO_CAP, ""))
    return products if products == others else f"{products} and {others}"


def best_below(cap: str) -> str:
    """Return the best level of this processor that ``cap`` allows; OpenVINO ignores a cap that it doesn't know."""
    names = list(LEVELS)
    most = names.index(cap.upper()) if cap.upper() in names else len(names)
    return max(processor_levels(), key=lambda name: (names.index(name) <= most, names.index(name)))


def check_instruction_set() -> None:
    """Raise OvspecError if OpenVINO can't run language models with the instruction set in use."""
    too_old = list(LEVELS)[: list(LEVELS).index(NEEDED)]
    for used in instruction_set().split(" and "):
        if used in too_old:
            raise OvspecError(
                f"OpenVINO needs a processor with {NEEDED} to run language models, and this one has {used} "
                f"(or {ONEDNN_CAPS[0]} or {OPENVINO_CAP} say so)."
            )
