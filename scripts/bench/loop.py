"""Compare plain decoding with a bare loop over the same compiled model, in turns.

    python scripts/bench/loop.py DIR [--tokens 96] [--rounds 8]

The bare loop writes a token, its position and the length into arrays that are bound once, calls start_async and wait,
and takes the argmax. It leaves out sampling, stop strings, text, statistics and drafters.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np
from harness import machine, options, ratios, shown, take_turns

import ovspec
from ovspec.cache.paged import PagedDecoder
from ovspec.setup.engine_choice import CompiledModel

PROMPT = "import os\nimport sys\n\n\ndef find_executable(name, path=None):\n    "


def bare_loop(loaded: CompiledModel, ids: np.ndarray, tokens: int) -> tuple[float, list[int]]:
    """Return the median milliseconds per token after the second, and the generated tokens."""
    decoder = PagedDecoder(loaded.ir)
    said = [int(decoder.feed([ids], [1])[0][0].argmax())]
    decoder._tables.extend(0, len(ids), tokens)  # get all blocks now, so that nothing is bound again
    said.append(int(decoder.feed([np.array(said)], [1])[0][0].argmax()))
    request, (token_ids, positions) = decoder._request.openvino_request, decoder._token_arrays[(1,)]
    past, _ = decoder._kept_lengths[1]
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


def streamed(lm: ovspec.LanguageModel, ids: np.ndarray, tokens: int) -> tuple[float, list[int]]:
    """Return the same for ``stream``, which includes the text."""
    came, said = [], []
    for piece in lm.stream(ids, max_tokens=tokens, ignore_eos=True):
        came.append(time.perf_counter())
        said += piece.token_ids
    return statistics.median(np.diff(came[1:])) * 1e3, said


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    lm = ovspec.load(args.folder, "none", arithmetic="fast")  # the bare loop keeps to no rule
    assert lm.target.engine == "paged", "the bare loop needs the paged engine"
    ids = lm.encode(PROMPT)
    ways = {"ovspec": lambda: streamed(lm, ids, args.tokens), "bare": lambda: bare_loop(lm.target, ids, args.tokens)}
    found = take_turns(ways, lambda way, _: ways[way](), args.rounds)
    assert all(a[1] == b[1] for a, b in zip(*found.values(), strict=True)), "both must generate the same text"
    ours, bare = ([ms for ms, _ in each] for each in found.values())
    print(f"{machine()}\nmedian ms per token: ovspec {statistics.median(ours):.3f}, ", end="")
    print(f"bare loop {statistics.median(bare):.3f}; {shown(ratios(bare, ours), 3)} of its speed in {len(ours)} turns")


if __name__ == "__main__":
    main()
