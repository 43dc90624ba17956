"""The instruction set that OpenVINO uses on the CPU: the processor's, up to the caps in the environment.

OpenVINO's matrix products come from oneDNN and obey one variable; its own kernels, attention among them, obey the
other. To imitate another processor, set both to one name of ``INSTRUCTION_SETS`` before OpenVINO is first imported.
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
INSTRUCTION_SETS: dict[str, frozenset[str]] = {
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
LEAST_INSTRUCTION_SET = "AVX2"  # with less, OpenVINO 2026.4 compiles language models and then fails


@functools.cache
def list_instruction_sets() -> tuple[str, ...]:
    """Return the names in ``INSTRUCTION_SETS`` that this processor has; empty if it isn't an x86 processor."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ()
    from archspec.cpu.detect import detected_info  # deferred, because it takes 50 ms

    features = detected_info().features
    return tuple(name for name, needed in INSTRUCTION_SETS.items() if needed <= features)


def describe_instruction_set() -> str:
    """Return the name of the instruction set in use, or both names if OpenVINO's own kernels use another one."""
    if not list_instruction_sets():
        return platform.machine()  # not x86
    onednn_cap = next(filter(None, map(os.environ.get, ONEDNN_CAPS)), "")
    onednn_level = find_best_level(onednn_cap)
    openvino_level = find_best_level(os.environ.get(OPENVINO_CAP, ""))
    return onednn_level if onednn_level == openvino_level else f"{onednn_level} and {openvino_level}"


def find_best_level(cap: str) -> str:
    """Return the best level of this processor that ``cap`` allows; OpenVINO ignores a cap that it doesn't know."""
    names = list(INSTRUCTION_SETS)
    highest = names.index(cap.upper()) if cap.upper() in names else len(names)
    return max(list_instruction_sets(), key=lambda name: (names.index(name) <= highest, names.index(name)))


def check_instruction_set() -> None:
    """Raise OvspecError if OpenVINO can't run language models with the instruction set in use."""
    too_old = list(INSTRUCTION_SETS)[: list(INSTRUCTION_SETS).index(LEAST_INSTRUCTION_SET)]
    for level in describe_instruction_set().split(" and "):
        if level in too_old:
            raise OvspecError(
                f"OpenVINO needs a processor with {LEAST_INSTRUCTION_SET} to run language models, and this one "
                f"has {level} (or {ONEDNN_CAPS[0]} or {OPENVINO_CAP} say so)."
            )
