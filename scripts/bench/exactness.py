"""Measure the effect and the price of exact arithmetic: on texts, the KV cache, and processors.

    python scripts/bench/exactness.py texts DIR [DIR ...] [--prompts 20] [--tokens 200] [--lookahead 4]
    python scripts/bench/exactness.py cache DIR [DIR ...]
    python scripts/bench/exactness.py processors DIR [DIR ...] [--isa AVX2,AVX512_CORE] [--engines paged,stateful]

texts: counts the greedy texts changed by lookup and a draft, with fast and with exact arithmetic. Then ``verify``
    checks every token of these texts and of plain texts by one forward pass.
cache: how far logits move after a rollback on the stateful engine, where dead slots stay until compaction, for each
    arithmetic and KV cache precision: the largest change of a logit, in standard deviations of the logits. The last 4
    of 204 tokens are fed again unchanged, the same after compaction, and the last 100 and 4 first fed as 200 and 4.
    DIR should have f32 weights.
processors: finds the rule for each instruction set of this processor, each in its own, capped process. "Differ in
    fast" is the share of positions with other bits in fast arithmetic. The prices of the rule, for a token after 128
    tokens and for a prompt of 1024, are multiples of fast arithmetic's time; the two take turns.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from figures import Table, machine, median_and_range, milliseconds, ratios, take_turns, totals
from harness import CODE, Option, arguments, run_capped

import ovspec
from ovspec.cache.decoder import Decoder, RollbackMethod
from ovspec.cache.stateful import StatefulDecoder
from ovspec.ir.compile import compile_ir
from ovspec.ir.device import DeviceOptions
from ovspec.ir.instruction_set import LEAST_INSTRUCTION_SET, describe_instruction_set, list_instruction_sets
from ovspec.setup.engine_choice import load_compiled_model
from ovspec.setup.exactness import FULL_TRIAL, find_exactness, probe_feed_rule
from ovspec.setup.paging import compile_paged
from ovspec.text.tokenizer import Tokenizer

CONTEXT, PROMPT, STEPS, TURNS = 128, 1024, 12, 5


def compare_texts(args: Namespace) -> None:
    print(f"{machine()}\n")
    table = Table("model", "arithmetic", "texts that differ", "tokens that one pass would not choose", "accepted")
    prompts = CODE[: args.prompts]
    for folder, arithmetic in itertools.product(args.folders, ("fast", "exact")):
        lm = ovspec.load(folder, "lookup,draft", arithmetic=arithmetic)
        options: dict[str, Any] = {"max_tokens": args.tokens, "ignore_eos": True}
        plain = [lm.generate(prompt, lookahead=0, **options) for prompt in prompts]
        drafted = [lm.generate(prompt, lookahead=args.lookahead, **options) for prompt in prompts]
        differ = sum(a.token_ids != b.token_ids for a, b in zip(plain, drafted, strict=True))
        checks = [lm.verify(result) for result in plain + drafted]
        wrong = sum(not check.ok for check in checks)
        tokens = wrong + sum(check.exact for check in checks)
        proposed, accepted = totals(drafted, "proposed", "accepted")
        counts = (f"{differ} of {len(prompts)}", f"{wrong} of {tokens}", f"{accepted} of {proposed}")
        table.row(folder.name, arithmetic, *counts)


def compare_caches(args: Namespace) -> None:
    table = Table("model", "arithmetic", "KV cache", "rolled back", "and compacted", "and fed in other groups")
    for folder in args.folders:
        for precision, kv_precision in itertools.product(("f32", "bf16"), ("f32", "f16", "bf16", "u8")):
            changes = (f"{drift:.0e}" for drift in drifts(folder, precision, kv_precision))
            table.row(folder.name, precision, kv_precision, *changes)


def drifts(model: Path, precision: str, kv_precision: str) -> Iterator[float]:
    """Yield the changes after a rollback, after a compaction, and after feeding in other pieces."""
    text = Tokenizer(model).encode("".join(CODE))[:204]
    ir = compile_ir(model, DeviceOptions(precision=precision, kv_precision=kv_precision))
    decoder = StatefulDecoder(ir, RollbackMethod("mask"))
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


def compare_processors(args: Namespace) -> None:
    if not args.here:
        for isa in args.isa:
            print(f"{machine(isa)}\n", flush=True)
            if code := run_capped(isa, "--here"):
                sys.exit(code)
        return
    heads = ("instruction set", "model", "engine", "rule", "differ in fast", "differ")
    table = Table(*heads, "price of a token", "of a prompt")
    for folder, engine in itertools.product(args.folders, args.engines):
        table.row(describe_instruction_set(), folder.name, engine, *probe_exactness(folder, engine, args.precision))


def probe_exactness(folder: Path, engine: str, precision: str | None) -> list[str]:
    """Probe a model thoroughly; return the cells from the rule on."""
    device = DeviceOptions(precision=precision, properties={"CACHE_DIR": ""})
    loaded = load_compiled_model(folder, device, engine, arithmetic="fast")  # type: ignore[arg-type]
    vocabulary = loaded.ir.logits_width
    fast_exactness = probe_feed_rule(loaded.make_decoder(), vocabulary, FULL_TRIAL)
    fast = loaded.make_decoder()
    if engine == "paged":
        loaded.ir = compile_paged(folder, device)
    exactness = find_exactness(lambda rule: loaded.make_decoder(feed_rule=rule), engine, vocabulary, FULL_TRIAL)
    differ = f"{exactness.differing} of {exactness.positions}"
    cells = [str(exactness.rule or "none"), f"{1 - fast_exactness.invariance:.0%}", differ]
    if not exactness.rule:
        return cells
    decoders = {"exact": loaded.make_decoder(feed_rule=exactness.rule), "fast": fast}
    text = np.random.default_rng(1).integers(0, vocabulary, PROMPT)
    for decoder in decoders.values():
        decoder.reset(1)
        decoder.feed([text[:CONTEXT]], [1])
    token_ms = take_turns(decoders, lambda name, _: time_token(decoders[name], text), 2 * TURNS, warm_up=0)
    prompt_ms = take_turns(decoders, lambda name, _: time_prompt(decoders[name], text), TURNS, warm_up=0)
    return [*cells, *(median_and_range(ratios(ms["exact"], ms["fast"])) for ms in (token_ms, prompt_ms))]


def time_token(decoder: Decoder, text: np.ndarray) -> float:
    decoder.truncate(0, CONTEXT)
    places = range(len(decoder.rows[0]), CONTEXT + STEPS)
    return statistics.median(milliseconds(lambda i=i: decoder.feed([text[i : i + 1]], [1])) for i in places)


def time_prompt(decoder: Decoder, text: np.ndarray) -> float:
    decoder.reset(1)
    return milliseconds(lambda: decoder.feed([text], [1]))


def main() -> None:
    levels = list_instruction_sets() or [LEAST_INSTRUCTION_SET]
    compare = {"texts": compare_texts, "cache": compare_caches, "processors": compare_processors}
    args = arguments(
        __doc__,
        tuple(compare),
        "folders+",
        prompts=len(CODE),
        tokens=200,
        lookahead=4,
        isa=Option(levels[levels.index(LEAST_INSTRUCTION_SET) :], "by default those of this processor"),
        engines=Option(["paged"], choices=("paged", "stateful")),
        precision=Option(str, "f32, bf16 or f16; by default the processor's"),
        here=Option(bool, "probe for this process's instruction set only"),
    )
    compare[args.what](args)


if __name__ == "__main__":
    main()
