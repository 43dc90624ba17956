"""Plain decoding beside a bare loop on the same compiled model, in turns.

    python scripts/bench_loop.py DIR [--tokens 96] [--rounds 4]

The bare loop writes a token, its position and length into arrays that are bound once, calls start_async and wait, and
takes the argmax: what is left out are sampling, stop strings, text, statistics and everything that could propose.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

import ovspec
from ovspec.engine import LoadedIR
from ovspec.paged import PagedDecoder

PROMPT = "import os\nimport sys\n\n\ndef find_executable(name, path=None):\n    "


def bare_loop(loaded: LoadedIR, ids: np.ndarray, tokens: int) -> tuple[float, list[int]]:
    """(milliseconds a token behind the first, what was said)"""
    decoder = PagedDecoder(loaded.ir)
    logits = decoder.feed([ids], [1])[0]
    said = [int(logits[0].argmax())]
    decoder.feed([np.array(said)], [1])  # binds the arrays of a single token
    decoder._blocks.extend(0, len(ids) + 1, tokens + 1)  # all blocks, so that nothing need be bound again
    if decoder._blocks.needed > decoder._capacity:
        decoder._grow()
    decoder.truncate(0, len(ids))
    blocks = decoder._blocks
    blocks.extend(0, len(ids), tokens + 1)
    decoder._append([np.array(said)], [1], np.zeros(1, dtype=np.int64))
    request, length = decoder._request.raw, len(ids)
    token_ids, positions = decoder._kept_tokens[1]
    past, _ = decoder._kept_lengths[1]
    times = []
    for step in range(tokens - 1):
        began = time.perf_counter()
        token_ids[0], positions[0], past[0] = said[-1], length + step, length + step
        decoder._longest[...] = length + step + 1
        request.start_async()
        request.wait()
        said.append(int(request.get_output_tensor(0).data.reshape(-1).argmax()))
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.mean(times), said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    lm = ovspec.load(args.folder)
    assert lm._target.engine == "paged", "this loop is the paged one"
    ids = lm.encode(PROMPT)
    ratios, ours, bare = [], [], []
    for repeat in range(args.rounds + 1):
        stats = lm.generate(ids, max_tokens=args.tokens, ignore_eos=True)
        ms, said = bare_loop(lm._target, ids, args.tokens)
        assert said == stats.token_ids, "both say the same"
        if repeat:  # the first is warm-up
            ours.append(stats.stats.tpot_ms)
            bare.append(ms)
            ratios.append(ms / stats.stats.tpot_ms)
    print(
        f"ovspec {statistics.median(ours):.3f} ms a token, bare loop {statistics.median(bare):.3f}: "
        f"{statistics.median(ratios):.3f} of its speed ({min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
