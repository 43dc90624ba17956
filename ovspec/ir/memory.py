"""How much memory a text will take, before it is accepted, and giving it back."""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from pathlib import Path

import psutil

from ovspec.errors import OvspecError
from ovspec.ir.compile import MODEL_FILE, CompiledIR, check_weights

BYTES = {"f32": 4.0, "bf16": 2.0, "f16": 2.0, "u8": 1.1}  # of a value in the cache; u8 with its scales

WORTH_CHECKING = 100e6  # bytes: asking what is free takes a system call
WORTH_TRIMMING = 8_000_000  # bytes: giving free memory back takes milliseconds


def kv_bytes_per_token(ir: CompiledIR) -> float:
    """Bytes that the KV cache of a row grows by with each token."""
    value = BYTES.get(ir.properties.get("KV_CACHE_PRECISION", ""), 2.0)
    return sum(state.width for state in ir.kv_states) * value


def recurrent_bytes(ir: CompiledIR) -> float:
    """Bytes of the states of a row that don't grow, kept twice: as they are and as a snapshot."""
    return 2 * 4.0 * sum(state.width for state in ir.recurrent_states)


def room_for(folder: Path, times: float) -> bool:
    """Whether that many times the weights in ``folder`` fit into the memory that is free."""
    return times * check_weights(folder / MODEL_FILE) <= psutil.virtual_memory().available


def token_room(irs: list[CompiledIR], rows: int) -> float:
    """Tokens of a batch of ``rows`` whose states fit into what is free, all rows together. On the CPU only."""
    on_cpu = [ir for ir in irs if ir.device == "CPU"]
    per_token = sum(map(kv_bytes_per_token, on_cpu))
    if not per_token:
        return math.inf
    return (psutil.virtual_memory().available - rows * sum(map(recurrent_bytes, on_cpu))) / per_token


def check_memory(irs: list[CompiledIR], tokens: int) -> None:
    """Raises OvspecError where the states for ``tokens`` more tokens can't fit into what is free. On the CPU only."""
    needed = sum(tokens * kv_bytes_per_token(ir) + recurrent_bytes(ir) for ir in irs if ir.device == "CPU")
    if needed > WORTH_CHECKING and needed > (free := psutil.virtual_memory().available):
        sizes = f"takes about {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB of memory are free"
        advice = "shorten the prompt, lower max_tokens, or take a smaller --kv-precision"
        raise OvspecError(f"The KV cache of {tokens} tokens {sizes}; {advice}.")


def trim_heap() -> None:
    """Have the C library give what is free back to the system; only glibc can be asked."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
