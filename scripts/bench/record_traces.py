"""Record traces for tests/drafting/test_lookahead.py to replay: costs of drafting and verifying, and acceptance.

    python scripts/bench/record_traces.py NAME=DIR [NAME=DIR ...] [--output tests/drafting/traces] [--texts code,prose]

For each model in DIR, at temperatures 0 and 1, texts are generated without a draft: code, prose, or answers to chats
(not the held-out chats), in turn. At every position of a text, lookup and the draft model or head, if any, then propose
up to --most tokens; the trace has each token's confidence, and the number of tokens equal to the text. Times are
medians at a context of half a text, of forward passes with and without a change of width. Use an idle machine.

The traces "small", "shallow" and "prose" were recorded with --texts prose,code --prompts 4 --tokens 150 --most 8, the
traces "chats" with --texts chats --prompts 24 --tokens 64, "head" the same with a head and --most 6, "avx2" with times
of OpenVINO capped to AVX2.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from figures import milliseconds
from harness import CODE, HERE, ROOT, Option, arguments, chats

import ovspec
from ovspec.cache.decoder import BaseDecoder
from ovspec.cache.sequence import Sequence
from ovspec.drafting.draft_model import ModelDrafter
from ovspec.drafting.drafter import Drafter, RowToDraft
from ovspec.drafting.head import HeadDrafter
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.lookup import LookupDrafter
from ovspec.params import Params
from ovspec.sampling.constraint import Constraints
from ovspec.sampling.processors import make_processors
from ovspec.sampling.samplers import make_sampler
from ovspec.setup.manifest import DRAFT_FOLDER

TEXTS: dict[str, list[Any]] = {
    "code": CODE,
    "prose": json.loads((HERE / "prose.json").read_text("utf-8"))["traces"],
    "chats": [chat.content for chat in chats() if not chat.judge],
}
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 13)


def times_by_width(decoder: BaseDecoder, text: np.ndarray) -> tuple[dict[int, float], dict[int, float]]:
    """Return the milliseconds of a forward pass by width, at a context of half of ``text``.

    The first are for passes of the same width as the pass before; the second for passes after a change of width, with
    the engine's preparation.
    """
    decoder.reset(1)
    decoder.reuse_prefixes([Sequence(text)])
    half = len(text) // 2
    decoder.feed([text[:half]], [1])
    same: dict[int, list[float]] = {width: [] for width in WIDTHS}
    changed: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for repeat in range(8):
        for width in WIDTHS:
            for times in (changed, same, same):
                taken = milliseconds(lambda: decoder.feed([text[half : half + width]], [width]))  # noqa: B023
                if repeat:  # the first pass of a width compiles kernels
                    times[width].append(taken)
                decoder.truncate(0, half)
            decoder.feed([text[half : half + WIDTHS[-1] + 1]], [1])
            decoder.truncate(0, half)
    medians = [{width: round(statistics.median(ms), 4) for width, ms in times.items()} for times in (same, changed)]
    return medians[0], medians[1]


def trace(drafter: Drafter, text: list[int], start: int, params: Params, most: int) -> list[tuple[list[float], int]]:
    """Return (confidence of each proposed token, number of tokens equal to ``text``) by position, from ``start`` on."""
    drafter.reset(1)
    sampler = make_sampler(params, 0, Constraints(make_processors(params, lambda _: start, frozenset())))
    steps = []
    for place in range(start, len(text)):
        proposal = drafter.propose([RowToDraft(Sequence(text[:place]), sampler, most + 1)], Lookahead(most))[0]
        truth = text[place : place + len(proposal.tokens)]
        same = [int(a) == b for a, b in zip(proposal.tokens, truth, strict=False)]
        right = same.index(False) if False in same else len(same)
        confidence = [] if proposal.confidence is None else proposal.confidence.tolist()
        steps.append(([round(share, 3 if share > 0.9 else 2) for share in confidence], right))
    return steps


def record(folder: Path, temperature: float, prompts: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    lm = ovspec.load(folder, args.draft or (folder / DRAFT_FOLDER).is_dir() or "lookup", precision=args.precision)
    decoders = lm.runtime.decoder_pool.acquire()
    drafters: dict[str, Drafter] = {"lookup": LookupDrafter()}
    if isinstance(decoders.drafter, ModelDrafter):
        drafters["draft"] = decoders.drafter
    texts, whole = [], list[int]()
    for seed, prompt in enumerate(prompts):
        params = Params(temperature=temperature, seed=seed)
        ids = lm.encode(prompt).tolist()
        options: dict[str, Any] = {"temperature": temperature, "seed": seed, "top_k": 0, "lookahead": 0}
        options |= {"max_tokens": args.tokens, "ignore_eos": isinstance(prompt, str)}
        whole = ids + lm.generate(ids, **options).token_ids
        decoders.target.reset(1)
        decoders.target.feed([np.array(whole)], [1])  # computes a head's features
        texts.append({name: trace(drafter, whole, len(ids), params, args.most) for name, drafter in drafters.items()})
    text = np.array(whole)
    times = {"verify": times_by_width(decoders.target, text)}
    if isinstance(decoders.drafter, HeadDrafter):
        decoders.target.reset(1)
        decoders.target.feed([text], [1])  # a head reads with the target's features
        times["draft"] = times_by_width(decoders.drafter.decoder, text)
    elif decoders.drafts:
        times["draft"] = times_by_width(decoders.drafts[0], text)
    curves = dict[str, dict[int, float]]()
    for name, (same, changed) in times.items():
        curves |= {f"{name}_ms": same, f"{name}_changed_ms": changed}
    return {"temperature": temperature} | curves | {"texts": texts}


def main() -> None:
    args = arguments(
        __doc__,
        "models+",
        output=Option(ROOT / "tests" / "drafting" / "traces"),
        precision=str,
        draft=Option(str, "proposes besides lookup; by default the draft in DIR"),
        texts=Option(["code"], "kinds of text, which take turns", TEXTS),
        prompts=3,
        tokens=128,
        most=Option(12, "tokens proposed at each position"),
    )
    prompts = [prompt for group in zip(*(TEXTS[kind] for kind in args.texts), strict=False) for prompt in group]
    args.output.mkdir(parents=True, exist_ok=True)
    for pair in args.models:
        name, _, folder = str(pair).partition("=")
        for temperature in (0.0, 1.0):
            recorded = record(Path(folder), temperature, prompts[: args.prompts], args)
            file = args.output / f"{name}-T{temperature:.0f}.json"
            file.write_text(json.dumps(recorded, separators=(",", ":")) + "\n", encoding="utf-8", newline="\n")
            print(f"{file.name}: { ({name: ms for name, ms in recorded.items() if name.endswith('_ms')}) }", flush=True)


if __name__ == "__main__":
    main()
