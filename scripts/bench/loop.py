"""Compare plain decoding with a bare loop over the same compiled model, in turns.

    python scripts/bench/loop.py DIR [--tokens 96] [--rounds 8]

The bare loop writes a token, its position and the length into arrays that are bound once, calls start_async and wait,
and takes the argmax. It leaves out sampling, stop strings, text, statistics and drafters.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
from harness import arguments, machine, median, median_and_range, milliseconds, ratios, take_turns

import ovspec
from ovspec.cache.paged import PagedDecoder
from ovspec.setup.engine_choice import CompiledModel

PROMPT = "import os\nimport sys\n\n\ndef find_executable(name, path=None):\n    "


def bare_loop(loaded: CompiledModel, ids: np.ndarray, tokens: int) -> tuple[float, list[int]]:
    """Return the median milliseconds per token after the second, and the generated tokens."""
    decoder = PagedDecoder(loaded.ir)
    text = [int(decoder.feed([ids], [1])[0][0].argmax())]
    decoder._tables.extend(0, len(ids), tokens)  # get all blocks now, so that nothing is bound again
    text.append(int(decoder.feed([np.array(text)], [1])[0][0].argmax()))
    request, (token_ids, positions) = decoder._request.openvino_request, decoder._token_arrays[(1,)]
    past, _ = decoder._kept_lengths[1]

    def infer_next(length: int) -> None:
        token_ids[0], positions[0], past[0] = text[-1], length, length
        decoder._longest[...] = length + 1
        request.start_async()
        request.wait()
        text.append(int(request.get_output_tensor(0).data.reshape(-1).argmax()))

    lengths = range(len(ids) + 1, len(ids) + tokens - 1)
    return statistics.median(milliseconds(lambda length=length: infer_next(length)) for length in lengths), text


def stream_loop(lm: ovspec.LanguageModel, ids: np.ndarray, tokens: int) -> tuple[float, list[int]]:
    """Return the same for ``stream``, which includes the text."""
    moments = list[float]()
    text = list[int]()
    for piece in lm.stream(ids, max_tokens=tokens, ignore_eos=True):
        moments.append(time.perf_counter())
        text += piece.token_ids
    return statistics.median(np.diff(moments[1:])) * 1e3, text


def main() -> None:
    args = arguments(__doc__, "folder", tokens=96, rounds=8)
    lm = ovspec.load(args.folder, "none", arithmetic="fast")  # the bare loop keeps to no rule
    assert lm.target.engine == "paged", "the bare loop needs the paged engine"
    ids = lm.encode(PROMPT)
    ways = {"ovspec": lambda: stream_loop(lm, ids, args.tokens), "bare": lambda: bare_loop(lm.target, ids, args.tokens)}
    by_way = take_turns(ways, lambda way, _: ways[way](), args.rounds)
    assert all(a[1] == b[1] for a, b in zip(*by_way.values(), strict=True)), "both must generate the same text"
    ours, bare = ([ms for ms, _ in turns] for turns in by_way.values())
    print(f"{machine()}\nmedian ms per token: ovspec {median(ours, 3)}, bare loop {median(bare, 3)}; ", end="")
    print(f"{median_and_range(ratios(bare, ours), 3)} of its speed in {len(ours)} turns")


if __name__ == "__main__":
    main()
