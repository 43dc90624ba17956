"""Record the traces that tests/drafting/test_lookahead.py replays: costs of drafting and verifying, and acceptance.

    python scripts/bench/record_traces.py NAME=DIR [NAME=DIR ...] [-o tests/drafting/traces] [--precision f32]

For each pair in DIR, at temperatures 0 and 1, texts are generated without a draft. At every position of a text, the
draft model and lookup then propose up to 12 tokens; the trace holds the confidence of each and how many of them match
the text. Times are medians at a context of half a text. Use an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import ovspec
from ovspec.constraints.base import Constraints
from ovspec.constraints.processors import processing
from ovspec.decoders.base import Decoder
from ovspec.decoders.sequence import Sequence
from ovspec.drafting.draft_model import DraftModel
from ovspec.drafting.drafter import Drafter, RoundRow
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.lookup import Lookup
from ovspec.options import SamplingParams
from ovspec.sampling.samplers import sampler_of

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPTS = [entry["text"] for entry in json.loads((ROOT / "models" / "prompts.json").read_text("utf-8"))["prompts"]]
MOST = 12
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 13)


def times_by_width(decoder: Decoder, text: np.ndarray) -> dict[int, float]:
    """Return the milliseconds of an inference by its width, at a context of half of ``text``."""
    decoder.reset(1)
    half = len(text) // 2
    decoder.feed([text[:half]], [1])
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for repeat in range(8):
        for width in WIDTHS:
            began = time.perf_counter()
            decoder.feed([text[half : half + width]], [width])
            if repeat:  # the first inference of a width compiles kernels
                times[width].append((time.perf_counter() - began) * 1e3)
            decoder.truncate(0, half)
    return {width: round(statistics.median(found), 4) for width, found in times.items()}


def trace(drafter: Drafter, text: list[int], start: int, params: SamplingParams, seed: int) -> list[Any]:
    """Return [confidence of each proposed token, how many match ``text``] for each position from ``start`` on."""
    drafter.reset(1)
    sampler = sampler_of(params, seed, 0, Constraints(processing(params, lambda _: start, frozenset())))
    found = []
    for place in range(start, len(text)):
        proposal = drafter.propose([RoundRow(Sequence(text[:place]), sampler, MOST + 1)], Lookahead(MOST))[0]
        truth = text[place : place + len(proposal.tokens)]
        same = [int(a) == b for a, b in zip(proposal.tokens, truth, strict=False)]
        right = same.index(False) if False in same else len(same)
        confidence = [] if proposal.confidence is None else np.round(proposal.confidence, 3).tolist()
        found.append([confidence, right])
    return found


def record(folder: Path, temperature: float, options: dict[str, Any], prompts: int, tokens: int) -> dict[str, Any]:
    lm = ovspec.load(folder, True, lookahead=0, **options)
    decoders = lm.workspace.decoders()
    model = decoders.drafter
    assert isinstance(model, DraftModel)
    params = SamplingParams(temperature=temperature)
    texts, whole = [], list[int]()
    for seed, prompt in enumerate(PROMPTS[:prompts]):
        ids = lm.encode(prompt).tolist()
        generated = lm.generate(ids, max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=seed).token_ids
        whole = ids + generated
        texts.append(
            {
                "draft": trace(model, whole, len(ids), params, seed),
                "lookup": trace(Lookup(), whole, len(ids), params, seed),
            }
        )
    text = np.array(whole)
    return {
        "temperature": temperature,
        "verify_ms": times_by_width(decoders.target, text),
        "draft_ms": times_by_width(model.decoder, text),
        "texts": texts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", metavar="NAME=DIR")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "tests" / "drafting" / "traces")
    parser.add_argument("--precision")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for pair in args.pairs:
        name, _, folder = pair.partition("=")
        for temperature in (0.0, 1.0):
            options = {"precision": args.precision} if args.precision else {}
            found = record(Path(folder), temperature, options, args.prompts, args.tokens)
            file = args.output / f"{name}-T{temperature:.0f}.json"
            file.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
            print(f"{file.name}: verify {found['verify_ms']}, draft {found['draft_ms']}", flush=True)


if __name__ == "__main__":
    main()
