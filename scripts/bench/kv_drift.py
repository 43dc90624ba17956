"""Measure how far logits move when tokens are rolled back and fed again, for each arithmetic and type of KV cache.

    python scripts/bench/kv_drift.py MODEL

MODEL should have f32 weights. On the stateful engine, whose dead slots stay where they are until they are compacted:
the last 4 of 204 tokens are fed again as before, the same after the cache was compacted, and the last 100 and 4 that
were first fed as 200 and 4. The figures are the largest change of a logit in standard deviations of the logits; the
machine's speed doesn't matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from harness import CODE, Table, arguments

from ovspec.cache.decoder import Rollback
from ovspec.cache.stateful import StatefulDecoder
from ovspec.ir.compile import compile_ir
from ovspec.ir.device import DeviceOptions
from ovspec.text.tokenizer import Tokenizer


def drifts(model: Path, precision: str, kv_precision: str) -> Iterator[float]:
    """Yield the changes after rolling back, after compacting too, and after feeding in other groups."""
    text = Tokenizer(model).encode("".join(CODE))[:204]
    ir = compile_ir(model, DeviceOptions(precision=precision, kv_precision=kv_precision))
    decoder = StatefulDecoder(ir, Rollback("mask"))
    decoder.feed([text[:200]], [0])
    first = decoder.feed([text[200:]], [4])[0].copy()
    for way in ("again", "compacted", "regrouped"):
        decoder.truncate(0, 200)
        if way == "compacted":
            decoder.compact()
        elif way == "regrouped":
            decoder.truncate(0, 100)
            decoder.feed([text[100:200]], [0])
        yield float(np.abs(decoder.feed([text[200:]], [4])[0] - first).max() / first.std())


def main() -> None:
    args = arguments(__doc__, "model")
    table = Table("arithmetic", "KV cache", "rolled back", "and compacted", "and fed in other groups")
    for precision, kv_precision in itertools.product(("f32", "bf16"), ("f32", "f16", "bf16", "u8")):
        table.row(precision, kv_precision, *(f"{drift:.0e}" for drift in drifts(args.model, precision, kv_precision)))


if __name__ == "__main__":
    main()
