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
from harness import Table, machine, milliseconds, options, ratios, several, shown, take_turns

from ovspec.cache.decoder import FAST_RULE, Decoder
from ovspec.ir.device import DeviceOptions
from ovspec.ir.instruction_set import LEAST_INSTRUCTION_SET, instruction_set, list_instruction_sets
from ovspec.setup.engine_choice import load_compiled_model
from ovspec.setup.exactness import FULL_TRIAL, find_exactness, probe_feed_rule
from ovspec.setup.paging import compile_paged

CONTEXT, PROMPT, STEPS, TURNS = 128, 1024, 12, 5
HEADS = ("instruction set", "model", "engine", "rule", "differ in fast", "differ", "price of a token", "of a prompt")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    levels = list_instruction_sets()
    usual = ",".join(levels[levels.index(LEAST_INSTRUCTION_SET) :] if levels else ())
    parser.add_argument("--isa", type=several(), default=usual, help="[default: those of this processor]")
    parser.add_argument("--engines", type=several(choices=("paged", "stateful")), default="paged")
    parser.add_argument("--precision", choices=("f32", "bf16", "f16"), help="[default: the processor's]")
    parser.add_argument("--here", action="store_true", help="print the table for this process's instruction set only")
    args = parser.parse_args()
    if args.here:
        table = Table(*HEADS)
        for folder in args.folders:
            for engine in args.engines:
                table.row(instruction_set(), folder.name, engine, *found_of(folder, engine, args.precision))
        return
    for name in args.isa:
        print(f"{machine()}, {name}\n", flush=True)
        capped = {**os.environ, "ONEDNN_MAX_CPU_ISA": name, "OV_CPU_MAX_ISA": name}
        subprocess.run([sys.executable, *sys.argv, "--here"], env=capped, check=True)


def found_of(folder: Path, engine: str, precision: str | None) -> list[str]:
    """Probe a model thoroughly; return the cells from the rule on."""
    device = DeviceOptions(precision=precision, properties={"CACHE_DIR": ""})
    loaded = load_compiled_model(folder, device, engine, arithmetic="fast")  # type: ignore[arg-type]
    vocabulary = loaded.ir.logits_width
    share = probe_feed_rule(loaded.decoder(), vocabulary, FULL_TRIAL)
    fast = loaded.decoder()
    if engine == "paged":
        loaded.ir = compile_paged(folder, device)
    found = find_exactness(lambda rule: loaded.decoder(rule=rule), engine, vocabulary, FULL_TRIAL)
    cells = [str(found.rule or "none"), f"{1 - share.share:.0%}", f"{found.differing} of {found.positions}"]
    if not found.rule:
        return cells
    decoders = {"exact": loaded.decoder(rule=found.rule or FAST_RULE), "fast": fast}
    text = np.random.default_rng(1).integers(0, vocabulary, PROMPT)
    for decoder in decoders.values():
        decoder.reset(1)
        decoder.feed([text[:CONTEXT]], [1])
    tokens = take_turns(decoders, lambda name, _: token_ms(decoders[name], text), 2 * TURNS, warm_up=0)
    prompts = take_turns(decoders, lambda name, _: prompt_ms(decoders[name], text), TURNS, warm_up=0)
    return [*cells, *(shown(ratios(times["exact"], times["fast"])) for times in (tokens, prompts))]


def token_ms(decoder: Decoder, text: np.ndarray) -> float:
    decoder.truncate(0, CONTEXT)
    begin = len(decoder.rows[0])
    return statistics.median(
        milliseconds(lambda i=i: decoder.feed([text[i : i + 1]], [1])) for i in range(begin, CONTEXT + STEPS)
    )


def prompt_ms(decoder: Decoder, text: np.ndarray) -> float:
    decoder.reset(1)
    return milliseconds(lambda: decoder.feed([text], [1]))


if __name__ == "__main__":
    main()
