"""Time a pair without and with each drafter, in every requested combination.

    python scripts/bench/matrix.py [DIR] [--workload ...] [--context ...] [--batch ...] [--lookahead ...]

'ovspec bench' is the short form for users; this is the one that the figures of docs/benchmarks.md come from. Workloads
are code to complete, a file to edit and prose, none of which the demo pair was trained on; contexts are tokens of other
text before them. The modes of a workload, context and temperature take turns, each turn beginning with another one. The
mode auto is chain with the lookahead auto. Use an idle machine.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import harness
import numpy as np
import openvino as ov

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.cache.sequence import Sequence
from ovspec.drafting.choice import DraftChoice
from ovspec.drafting.costs import Costs
from ovspec.setup.manifest import DRAFT_FOLDER
from ovspec.setup.model_folders import find_demo_folder

# Mode: the drafters it has, lookup and the draft model; auto does without the draft model if there is none.
MODES = {"plain": (False, False), "draft": (False, True), "lookup": (True, False)}
MODES |= {"chain": (True, True), "auto": (True, True)}
WORKLOADS = ("completion", "edit", "prose")
HEADS = ("workload", "context", "T", "batch", "mode", "k", "tokens/s", "plain ms/token", "ms/token", "speed-up")
HEADS = (*HEADS, "range", "conditional acceptance", "tokens/round", "p95 gap", "first", "GB/s", "equal")


@dataclass(frozen=True)
class Cell:
    """What is timed. ``context`` tokens of other text come before each prompt, ``batch`` texts are made at a time."""

    workload: str
    context: int
    temperature: float
    mode: str
    lookahead: int | str
    accept: str
    batch: int


@dataclass
class Run:
    """Texts that were generated together: their results, and the milliseconds between rounds."""

    results: list[ovspec.Result]
    gaps: list[float]

    @property
    def ms_per_token(self) -> float:
        """Milliseconds until the last text was finished, per token after the first of each text."""
        lengths = [result.stats.generated_tokens - 1 for result in self.results]
        spent = max(r.stats.tpot_ms * n for r, n in zip(self.results, lengths, strict=True))
        return spent * len(lengths) / sum(lengths)


@dataclass(frozen=True)
class Bench:
    """A loaded pair, and how long its texts are. ``dictate``: generate the right answer of an edit."""

    lm: ovspec.LanguageModel
    tokens: int
    prompts: int
    repeats: int
    dictate: bool

    def lines(self, cells: list[Cell]) -> Iterator[dict[str, Any]]:
        """Yield the figures of each cell; plain decoding takes turns with them in any case."""
        weights = harness.bytes_a_step(self.lm.folder)
        models = {mode: self.variant(mode) for mode in dict.fromkeys(["plain", *(cell.mode for cell in cells)])}
        for _, grouped in itertools.groupby(cells, lambda cell: (cell.workload, cell.context, cell.temperature)):
            group = list(grouped)
            plain = {cell: replace(cell, mode="plain", lookahead=0) for cell in group}
            tasks = harness.tasks_of(group[0].workload, max(self.prompts, *(cell.batch for cell in group)))
            count = min(self.prompts, len(tasks))

            def run(cell: Cell, turn: int, tasks: list[harness.Task] = tasks, count: int = count) -> Run:
                return self.run(models[cell.mode], cell, tasks, turn % count if turn >= 0 else -1)

            order = dict.fromkeys([*plain.values(), *group])
            runs = harness.take_turns(order, run, self.repeats * count)
            costs = learned_costs(models, group[0].temperature)
            for cell in group:
                line = figures_of(cell, runs[cell], runs[plain[cell]], costs)
                line["weights_gb_s"] = weights * rounds_a_second(runs[cell]) / 1e9
                yield asdict(cell) | line

    def variant(self, mode: str) -> ovspec.LanguageModel:
        """Return a model with the drafters of ``mode`` and the same compiled models."""
        lookup, drafts = MODES[mode]
        draft = self.lm.draft.ir.folder if drafts and self.lm.draft else None
        if drafts and not draft and mode != "auto":
            raise OvspecError(
                f"{self.lm.folder}: it was exported without a draft; leave the modes draft and chain out."
            )
        return self.lm.with_drafters(DraftChoice(lookup=lookup, model=draft) or None)

    def run(self, lm: ovspec.LanguageModel, cell: Cell, tasks: list[harness.Task], number: int) -> Run:
        """Generate the text of task ``number``, or a batch that begins with it, and time its rounds; -1: a warm-up."""
        rows = []
        for place in range(cell.batch):
            task = tasks[(number + place) % len(tasks)]
            ids = harness.with_context(lm.tokenizer, lm.encode(task.prompt).tolist(), cell.context)
            tokens = self.tokens if number >= 0 else min(self.tokens, 32)
            given: Any = {"max_tokens": tokens, "ignore_eos": True}
            if self.dictate and task.answer is not None:
                given["sampler"] = dictation(len(ids), lm.tokenizer.encode_more(task.answer))
            else:
                given |= {"temperature": cell.temperature, "seed": number % len(tasks) + place, "accept": cell.accept}
            rows.append(lm.runtime.row_maker.make_row(Sequence(ids), lm.runtime.row_maker.make_complete_params(given)))
        together: Any = {"lookahead": cell.lookahead, "batch_size": cell.batch, "temperature": cell.temperature}
        gaps, last = list[float](), None
        for pieces in lm.runtime.decoder_pool.run_batch(rows, lm.runtime.row_maker.make_complete_params(together)):
            now = time.perf_counter()
            if last is not None and pieces:
                gaps.append((now - last) * 1e3)
            last = now
        return Run([row.result() for row in rows], gaps)


def dictation(start: int, answer: np.ndarray) -> Any:
    """Return a sampler that generates ``answer`` (n,), repeatedly if need be, after a prompt of ``start`` tokens."""

    def dictate(logits: np.ndarray, tokens: np.ndarray) -> int:
        del logits
        return int(answer[(len(tokens) - start) % len(answer)])

    return dictate


def learned_costs(models: dict[str, ovspec.LanguageModel], temperature: float) -> tuple[Costs, Costs] | None:
    """Return the costs of verifying and of drafting that an auto lookahead has learned."""
    order = ("auto", "chain", "draft", "lookup")
    found = (models[mode].runtime.decoder_pool.learned_costs(temperature > 0) for mode in order if mode in models)
    return next((costs for costs in found if costs), None)


def rounds_a_second(runs: list[Run]) -> float:
    """Return the target's inferences per second of its time, without the first of each text."""
    stats = [max((result.stats for result in run.results), key=lambda stats: stats.rounds) for run in runs]
    spent = sum(s.target_ms - s.ttft_ms for s in stats)
    return 1e3 * sum(s.rounds - 1 for s in stats) / max(spent, 1e-9)


def figures_of(cell: Cell, runs: list[Run], plain: list[Run], costs: tuple[Costs, Costs] | None) -> dict[str, Any]:
    """Return the figures of a cell, over all its texts: those of ``harness.compared`` and more.

    ``tokens_per_s`` counts all texts of a batch together. ``predicted``: the speed-up expected from what tokens cost
    and how many were accepted. The other times are medians.
    """
    results = [result for run in runs for result in run.results]
    others = results if runs is plain else [result for run in plain for result in run.results]
    times = ([run.ms_per_token for run in plain], [run.ms_per_token for run in runs])
    found, stats = harness.compared(results, others, times), [result.stats for result in results]
    by_position = [sum(each) for each in itertools.zip_longest(*(s.accepted_by_position for s in stats), fillvalue=0)]
    predicted = None
    if costs and cell.lookahead not in (0, "auto") and cell.mode in ("draft", "lookup") and cell.batch == 1:
        verify, draft = costs
        steps = int(cell.lookahead) * draft(1) if cell.mode == "draft" and draft.known else 0.0
        rounds = sum(s.rounds for s in stats)
        gained = verify(1) * (1 + sum(by_position) / rounds)
        predicted = gained / (steps + float(np.interp(1 + found["proposed"] / rounds, range(65), verify.ms)))
    return found | {
        "tokens_per_s": cell.batch * 1e3 / found["tpot_ms"],
        "p95_gap_ms": float(np.percentile([gap for run in runs for gap in run.gaps], 95)),
        "ttft_ms": statistics.median(s.ttft_ms for s in stats),
        "predicted": predicted,
        "accepted_by_position": by_position,
    }


def cells_of(line: dict[str, Any]) -> tuple[Any, ...]:
    plain, acceptance = line["mode"] == "plain", line["acceptance"]
    what = (line["workload"], line["context"], f"{line['temperature']:g}", line["batch"], line["mode"])
    lookahead, speed = None if plain else line["lookahead"], f"{line['tokens_per_s']:.1f}"
    rates = (None if acceptance is None else f"{acceptance:.2f}", f"{line['tokens_per_round']:.2f}")
    times = (f"{line['p95_gap_ms']:.1f}", f"{line['ttft_ms']:.0f}", f"{line['weights_gb_s']:.1f}")
    return (*what, lookahead, speed, *harness.speedup_cells(line, plain), *rates, *times, line["equal"])


def lookahead(text: str) -> int | str:
    return text if text == "auto" else int(text)


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=find_demo_folder(), metavar="DIR")
    parser.add_argument(
        "--draft", metavar="PATH", help="the draft model  [default: the one beside DIR, if there is one]"
    )
    parser.add_argument("--workload", type=harness.several(choices=WORKLOADS), default=",".join(WORKLOADS))
    parser.add_argument("--context", type=harness.several(int), default="0")
    parser.add_argument("--temperature", type=harness.several(float), default="0,1")
    parser.add_argument("--batch", type=harness.several(int), default="1", help="texts at a time")
    parser.add_argument(
        "--mode", type=harness.several(choices=MODES), help="[default: all that there are drafters for]"
    )
    parser.add_argument("--lookahead", type=harness.several(lookahead), default="4", help="of draft, lookup and chain")
    parser.add_argument("-n", "--max-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=3, help="of each workload, at most")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--accept", choices=("compare", "rejection"), default="compare", help="rule for sampled tokens")
    parser.add_argument("--dictate", action="store_true", help="generate the right answers of edits, for small models")
    parser.add_argument("--json", action="store_true", help="print a JSON object a line, as the figures come")
    harness.add_runtime_options(parser)
    args = parser.parse_args()
    if 0 in args.lookahead:
        parser.error("--lookahead 0 is the mode plain")
    has_draft = args.draft is not None or (args.folder / DRAFT_FOLDER).is_dir()
    lm = ovspec.load(
        args.folder,
        f"lookup,{args.draft or 'draft'}" if has_draft else "lookup",
        cache_memory=0,
        **harness.runtime_of(args),
    )
    modes = args.mode or [mode for mode in MODES if has_draft or mode not in ("draft", "chain")]
    cells = [
        Cell(workload, context, temperature, mode, k, args.accept, size)
        for workload, context, temperature, size in itertools.product(
            args.workload, args.context, args.temperature, args.batch
        )
        for mode in modes
        for k in {"plain": [0], "auto": ["auto"]}.get(mode, args.lookahead)
    ]
    bandwidth = harness.read_bandwidth() / 1e9
    if not args.json:
        print(f"{lm.folder} on {harness.machine()}; memory is read at {bandwidth:.1f} GB/s\n")
    table = None if args.json else harness.Table(*HEADS)
    versions = {"ovspec": ovspec.__version__, "openvino": ov.get_version()}
    lines = []
    for line in Bench(lm, args.max_tokens, args.prompts, args.repeats, args.dictate).lines(cells):
        lines.append(line)
        if table:
            table.row(*cells_of(line))
        else:
            print(
                harness.as_json(line | {"pair": lm.folder.name, "read_gb_s": bandwidth, "versions": versions}),
                flush=True,
            )


if __name__ == "__main__":
    try:
        main()
    except (OvspecError, OSError) as error:
        sys.exit(f"Error: {error}")
