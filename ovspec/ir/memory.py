"""Estimate the memory for a text before accepting it, and return free memory to the system."""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from pathlib import Path

import psutil

from ovspec.base.errors import OvspecError
from ovspec.ir.compile import MODEL_FILE, CompiledIR, check_weights_file
from ovspec.ir.device import uses_main_memory
from ovspec.ir.heads import FEATURES_OUTPUT

BYTES_PER_VALUE = {"f32": 4.0, "bf16": 2.0, "f16": 2.0, "u8": 1.1}  # per value in the cache; u8 includes its scales
LEAST_CHECKED_BYTES = 100e6  # bytes; reading the free memory takes a system call
LEAST_TRIMMED_BYTES = 8_000_000  # bytes; trimming the heap takes milliseconds


def kv_bytes_per_token(ir: CompiledIR) -> float:
    """Return the growth of a row's KV cache in bytes per token."""
    value_bytes = BYTES_PER_VALUE.get(ir.kv_precision or "", 2.0)
    feature_bytes = BYTES_PER_VALUE["f32"] * ir.output_width(FEATURES_OUTPUT)
    return sum(state.width for state in ir.kv_states) * value_bytes + feature_bytes


def recurrent_row_bytes(ir: CompiledIR) -> float:
    """Return the size of a row's recurrent states in bytes; it doesn't grow with the text. A snapshot is as large."""
    return 2 * 4.0 * sum(state.width for state in ir.recurrent_states)


def weights_fit_into_memory(folder: Path, size_factor: float) -> bool:
    """Return whether the weights in ``folder``, multiplied by ``size_factor``, fit into free memory."""
    return size_factor * check_weights_file(folder / MODEL_FILE) <= psutil.virtual_memory().available


def count_free_tokens(irs: list[CompiledIR], row_count: int, idle_bytes: float = 0) -> float:
    """Return how many tokens, summed over ``row_count`` rows, fit into free memory; see ``count_tokens_in_bytes``.

    ``idle_bytes``: reclaimable bytes in use.
    """
    return count_tokens_in_bytes(irs, row_count, psutil.virtual_memory().available + idle_bytes)


def count_tokens_in_bytes(irs: list[CompiledIR], row_count: int, memory_bytes: float) -> float:
    """Return how many tokens, summed over ``row_count`` rows, fit into memory. Counts only models in main memory."""
    irs = [ir for ir in irs if uses_main_memory(ir.device)]
    token_bytes = sum(map(kv_bytes_per_token, irs))
    if not token_bytes:
        return math.inf
    return (memory_bytes - row_count * sum(map(recurrent_row_bytes, irs))) / token_bytes


def check_memory_for_tokens(irs: list[CompiledIR], token_count: int, idle_bytes: float = 0) -> None:
    """Raise an OvspecError if the states for ``token_count`` more tokens don't fit into free memory.

    Counts only models in main memory.

    ``idle_bytes``: reclaimable bytes in use.
    """
    irs = [ir for ir in irs if uses_main_memory(ir.device)]
    needed_bytes = sum(token_count * kv_bytes_per_token(ir) + recurrent_row_bytes(ir) for ir in irs)
    if needed_bytes <= LEAST_CHECKED_BYTES:
        return
    free_bytes = psutil.virtual_memory().available + idle_bytes
    if needed_bytes > free_bytes:
        sizes = f"takes about {needed_bytes / 1e9:.1f} GB, but only {free_bytes / 1e9:.1f} GB of memory is free"
        advice = "shorten the prompt, lower `max_tokens`, or choose a smaller `kv_precision`, such as u8"
        raise OvspecError(f"The KV cache of {token_count} tokens {sizes}; {advice}.")


def trim_heap() -> None:
    """Make the C library return free memory to the system (glibc only)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
