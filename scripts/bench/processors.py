"""Find the rule of exact arithmetic for each instruction set that this processor has, and what it costs.

    python scripts/bench/processors.py DIR [DIR ...] [--isa AVX2,AVX512_CORE] [--engines paged,stateful]
        [--precision f32]

Each instruction set is tried in a process of its own, capped to it. The share is that of the positions that have other
bits in fast arithmetic. The prices are times by the rule, in those of fast arithmetic: of a token after 128 tokens, and
of a prompt of 1024; the two take turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
from harness import Option, Table, arguments, machine, median_and_range, milliseconds, ratios, take_turns

from ovspec.cache.decoder import Decoder
from ovspec.ir.device import DeviceOptions
from ovspec.ir.instruction_set import LEAST_INSTRUCTION_SET, describe_instruction_set, list_instruction_sets
from ovspec.setup.engine_choice import load_compiled_model
from ovspec.setup.exactness import FULL_TRIAL, find_exactness, probe_feed_rule
from ovspec.setup.paging import compile_paged

CONTEXT, PROMPT, STEPS, TURNS = 128, 1024, 12, 5
HEADS = ("instruction set", "model", "engine", "rule", "differ in fast", "differ", "price of a token", "of a prompt")


def main() -> None:
    levels = list_instruction_sets() or [LEAST_INSTRUCTION_SET]
    args = arguments(
        __doc__,
        "folders+",
        isa=Option(levels[levels.index(LEAST_INSTRUCTION_SET) :], "by default those of this processor"),
        engines=Option(["paged"], choices=("paged", "stateful")),
        precision=Option(str, "f32, bf16 or f16; by default the processor's"),
        here=Option(bool, "print the table for this process's instruction set only"),
    )
    if args.here:
        table = Table(*HEADS)
        for folder in args.folders:
            for engine in args.engines:
                table.row(describe_instruction_set(), folder.name, engine, *probe(folder, engine, args.precision))
        return
    for isa in args.isa:
        print(f"{machine(isa)}\n", flush=True)
        capped = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "OV_CPU_MAX_ISA": isa}
        subprocess.run([sys.executable, *sys.argv, "--here"], env=capped, check=True)


def probe(folder: Path, engine: str, precision: str | None) -> list[str]:
    """Probe a model thoroughly; return the cells from the rule on."""
    device = DeviceOptions(precision=precision, properties={"CACHE_DIR": ""})
    loaded = load_compiled_model(folder, device, engine, arithmetic="fast")  # type: ignore[arg-type]
    vocabulary = loaded.ir.logits_width
    fast_exactness = probe_feed_rule(loaded.make_decoder(), vocabulary, FULL_TRIAL)
    fast = loaded.make_decoder()
    if engine == "paged":
        loaded.ir = compile_paged(folder, device)
    exactness = find_exactness(lambda rule: loaded.make_decoder(rule=rule), engine, vocabulary, FULL_TRIAL)
    differ = f"{exactness.differing} of {exactness.positions}"
    cells = [str(exactness.rule or "none"), f"{1 - fast_exactness.invariance:.0%}", differ]
    if not exactness.rule:
        return cells
    decoders = {"exact": loaded.make_decoder(rule=exactness.rule), "fast": fast}
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


if __name__ == "__main__":
    main()
