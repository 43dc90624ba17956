"""Compare plain decoding with a bare loop over the same compiled model, in turns.

    python scripts/bench/loop.py DIR [--tokens 96] [--rounds 8]

The bare loop writes a token, its position and the length into arrays that are bound once, calls start_async and wait,
and takes the argmax. It leaves out sampling, stop strings, text, statistics and drafters.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

import ovspec
from ovspec.decoders.paged import PagedDecoder
from ovspec.setup.engine import CompiledModel

PROMPT = "import os\nimport sys\n\n\ndef find_executable(name, path=None):\n    "


def bare_loop(loaded: CompiledModel, ids: np.ndarray, tokens: int) -> tuple[float, list[int]]:
    """Return the median milliseconds per token after the second, and the generated tokens."""
    decoder = PagedDecoder(loaded.ir)
    said = [int(decoder.feed([ids], [1])[0][0].argmax())]
    decoder._blocks.extend(0, len(ids), tokens)  # get all blocks now, so that nothing is bound again
    said.append(int(decoder.feed([np.array(said)], [1])[0][0].argmax()))
    request, (token_ids, positions), (past, _) = (
        decoder._request.raw,
        decoder._token_arrays[(1,)],
        decoder._kept_lengths[1],
    )
    times = []
    for length in range(len(ids) + 1, len(ids) + tokens - 1):
        began = time.perf_counter()
        token_ids[0], positions[0], past[0] = said[-1], length, length
        decoder._longest[...] = length + 1
        request.start_async()
        request.wait()
        said.append(int(request.get_output_tensor(0).data.reshape(-1).argmax()))
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times), said


def ours(lm: ovspec.LanguageModel, ids: np.ndarray, tokens: int) -> tuple[float, list[int]]:
    """Return the same for ``stream``, which includes the text."""
    times, said, last = [], [], None
    for piece in lm.stream(ids, max_tokens=tokens, ignore_eos=True):
        now = time.perf_counter()
        if len(said) > 1 and last is not None:
            times.append((now - last) * 1e3)
        last = now
        said += piece.token_ids
    return statistics.median(times), said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    lm = ovspec.load(args.folder, "none")
    assert lm.target.engine == "paged", "the bare loop needs the paged engine"
    ids = lm.encode(PROMPT)
    pairs = []
    for repeat in range(args.rounds + 1):
        a, b = ours(lm, ids, args.tokens), bare_loop(lm.target, ids, args.tokens)
        assert a[1] == b[1], "both must generate the same text"
        if repeat:  # the first is warm-up
            pairs.append((a[0], b[0]))
    ratios = [bare / mine for mine, bare in pairs]
    mine, bare = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(
        f"median ms per token: ovspec {mine:.3f}, bare loop {bare:.3f}; {statistics.median(ratios):.3f} of its speed "
        f"({min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} turns)"
    )


if __name__ == "__main__":
    main()
