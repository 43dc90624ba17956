"""The instruction set used by OpenVINO on the CPU: the processor's, up to the caps in the environment.

OpenVINO's matrix products come from oneDNN and obey one variable; its own kernels, attention among them, obey another.
To imitate another processor, set both to a name in ``INSTRUCTION_SETS`` before the first import of OpenVINO.
"""

from __future__ import annotations

import functools
import os
import platform

from ovspec.base.errors import OvspecError

ONEDNN_CAP_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the first has precedence
OPENVINO_CAP_VARIABLE = "OV_CPU_MAX_ISA"
AVX512_FEATURES = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
BF16_FEATURES = AVX512_FEATURES | {"avx512_vnni", "avx512_bf16"}
# oneDNN's instruction sets, lowest first: each with the processor flags it needs, in Linux's names.
INSTRUCTION_SETS: dict[str, frozenset[str]] = {
    "SSE41": frozenset({"sse4_1"}),
    "AVX": frozenset({"avx"}),
    "AVX2": frozenset({"avx2", "fma"}),
    "AVX2_VNNI": frozenset({"avx2", "fma", "avx_vnni"}),
    "AVX2_VNNI_2": frozenset({"avx2", "fma", "avx_vnni", "avx_vnni_int8", "avx_ne_convert"}),
    "AVX512_CORE": AVX512_FEATURES,
    "AVX512_CORE_VNNI": AVX512_FEATURES | {"avx512_vnni"},
    "AVX512_CORE_BF16": BF16_FEATURES,
    "AVX512_CORE_FP16": BF16_FEATURES | {"avx512_fp16"},
    "AVX512_CORE_AMX": BF16_FEATURES | {"avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"},
    "AVX512_CORE_AMX_FP16": BF16_FEATURES | {"avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"},
}
LEAST_INSTRUCTION_SET = "AVX2"  # with less, OpenVINO 2026.4 compiles language models but can't run them


@functools.cache
def list_instruction_sets() -> tuple[str, ...]:
    """Return the names in ``INSTRUCTION_SETS`` supported by this processor; empty if it isn't an x86 processor."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ()
    from archspec.cpu.detect import detected_info  # deferred, because it takes 50 ms

    processor_features = detected_info().features
    return tuple(name for name, needed_features in INSTRUCTION_SETS.items() if needed_features <= processor_features)


def describe_instruction_set() -> str:
    """Return the name of the instruction set in use, or both names if OpenVINO's own kernels use a different set."""
    if not list_instruction_sets():
        return platform.machine()  # not x86
    onednn_cap = next(filter(None, map(os.environ.get, ONEDNN_CAP_VARIABLES)), "")
    onednn_instruction_set = find_best_instruction_set(onednn_cap)
    openvino_instruction_set = find_best_instruction_set(os.environ.get(OPENVINO_CAP_VARIABLE, ""))
    return (
        onednn_instruction_set
        if onednn_instruction_set == openvino_instruction_set
        else f"{onednn_instruction_set} and {openvino_instruction_set}"
    )


def find_best_instruction_set(cap: str) -> str:
    """Return this processor's best level within ``cap``; OpenVINO ignores unknown caps."""
    set_names = list(INSTRUCTION_SETS)
    highest_index = set_names.index(cap.upper()) if cap.upper() in set_names else len(set_names)
    return max(
        list_instruction_sets(), key=lambda name: (set_names.index(name) <= highest_index, set_names.index(name))
    )


def check_instruction_set() -> None:
    """Raise OvspecError if OpenVINO can't run language models with the instruction set in use."""
    too_old_sets = list(INSTRUCTION_SETS)[: list(INSTRUCTION_SETS).index(LEAST_INSTRUCTION_SET)]
    for instruction_set in describe_instruction_set().split(" and "):
        if instruction_set in too_old_sets:
            raise OvspecError(
                f"This processor has {instruction_set}, but OpenVINO needs {LEAST_INSTRUCTION_SET} for language "
                f"models; unset {ONEDNN_CAP_VARIABLES[0]} and {OPENVINO_CAP_VARIABLE} if they are set, or use another "
                "processor."
            )
