"""Time cells of the matrix (workload, context, temperature, batch, mode, lookahead) in turns; for matrix.py."""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openvino as ov

from ovspec import __version__
from ovspec.comparison import rotated, speedup_of
from ovspec.decoders.sequence import Sequence
from ovspec.drafting.choice import DraftChoice
from ovspec.drafting.costs import Costs
from ovspec.errors import OvspecError
from ovspec.ir.compile import MODEL_FILE
from ovspec.loop.results import Result
from ovspec.model import LanguageModel
from ovspec.options import AcceptRule, GenerateOptions
from ovspec.setup.tuning import TEXT

Mode = Literal["plain", "draft", "lookup", "chain", "auto"]
MODES: tuple[Mode, ...] = ("plain", "draft", "lookup", "chain", "auto")
WORKLOADS = ("completion", "edit", "prose")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@dataclass(frozen=True)
class Task:
    """A prompt and, for an edit, the right answer."""

    prompt: str
    answer: str | None = None


@dataclass(frozen=True)
class Cell:
    """What is timed. ``context`` tokens of other text come before each prompt; ``lookahead`` None is auto.

    ``batch``: texts generated at a time.
    """

    workload: str
    context: int
    temperature: float
    mode: Mode
    lookahead: int | None
    accept: AcceptRule = "compare"
    batch: int = 1


@dataclass
class Line:
    """The figures of one cell, over all prompts.

    ``plain_tpot_ms`` and ``tpot_ms`` are milliseconds per token of each text in the median turn; their ratio is
    ``speedup`` (see ``ovspec.comparison``), None if it would be a gain that drafting can't have caused. ``spread`` is
    the least and the greatest ratio of a turn. ``tokens_per_s`` counts all texts of a batch together. ``equal`` counts
    the texts that are the same as in plain decoding. ``acceptance`` is the conditional one. ``weights_gb_s``: weights
    that the target's inferences read per second. ``predicted``: the speed-up expected from what tokens cost and how
    many were accepted. The other times are medians.
    """

    pair: str
    workload: str
    context: int
    temperature: float
    mode: Mode
    lookahead: int | str
    accept: AcceptRule
    tokens_per_s: float
    plain_tpot_ms: float
    tpot_ms: float
    spread: tuple[float, float]
    p95_gap_ms: float
    ttft_ms: float
    speedup: float | None
    predicted: float | None
    equal: str
    acceptance: float | None
    proposed: int
    accepted: int
    accepted_by_position: list[int]
    tokens_per_round: float
    weights_gb_s: float
    read_gb_s: float
    batch: int = 1
    peer: str = "ovspec"
    versions: dict[str, str] = field(default_factory=dict)


@dataclass
class Run:
    """Texts that were generated together: their results, and the milliseconds between rounds."""

    results: list[Result]
    gaps: list[float]

    @property
    def tokens(self) -> int:
        """Generated tokens after the first of each text."""
        return sum(result.stats.generated_tokens - 1 for result in self.results)

    @property
    def ms(self) -> float:
        """Milliseconds until the last text was finished."""
        return max(r.stats.tpot_ms * (r.stats.generated_tokens - 1) for r in self.results)


def tasks_of(workload: str, count: int) -> list[Task]:
    """Return the first ``count`` prompts of a workload; the demo pair was trained on none of them."""
    if workload == "completion":
        entries = json.loads((ROOT / "models" / "prompts.json").read_text("utf-8"))["prompts"]
        return [Task(entry["text"]) for entry in entries][:count]
    found = json.loads((HERE / "workloads.json").read_text("utf-8"))[workload][:count]
    return [Task(text) for text in found] if workload == "prose" else [edit_of(entry) for entry in found]


def edit_of(entry: dict[str, Any]) -> Task:
    """Return a task: a file, the change to make, and the beginning of the changed file."""
    edited = entry["file"]
    for old, new in entry["replace"].items():
        edited = edited.replace(old, new)
    first, rest = edited.split("\n", 1)
    return Task(f"{entry['file']}\n\n# The same file, {entry['task']}:\n\n{first}\n", rest)


def run_bench(
    lm: LanguageModel,
    cells: Items[Cell],
    tokens: int,
    prompts: int,
    dictate: bool = False,
    repeats: int = 1,
) -> Iterator[tuple[Cell, Line]]:
    """Yield the figures of each cell.

    Args:
        lm: loaded with all drafters that the cells need.
        cells: those of the same workload, context and temperature take turns, prompt by prompt.
        tokens: of each text.
        dictate: say the right answer of an edit instead of what the model would, for models too small to edit.
    """
    versions = {"ovspec": __version__, "openvino": ov.get_version()}
    weights, bandwidth = bytes_a_step(lm.folder), read_bandwidth()
    groups: dict[tuple[str, int, float], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.workload, cell.context, cell.temperature), []).append(cell)
    variants: dict[Mode, LanguageModel] = {"plain": variant(lm, "plain")}
    for cell in cells:
        variants[cell.mode] = variants.get(cell.mode) or variant(lm, cell.mode)
    for (workload, context, temperature), group in groups.items():
        plain = {
            cell.batch: Cell(workload, context, temperature, "plain", 0, cell.accept, cell.batch) for cell in group
        }
        tasks = tasks_of(workload, max(prompts, *plain))
        order = list(dict.fromkeys([*plain.values(), *group]))
        runs: dict[Cell, list[Run]] = {cell: [] for cell in order}
        for repeat in range(repeats):
            for number in range(min(prompts, len(tasks))):
                for cell in rotated(order, repeat * prompts + number):
                    drafted = variants[cell.mode]
                    if not runs[cell] and not repeat:  # kernels are made, and the lookahead learns what is what
                        run(drafted, cell, tasks, len(tasks) - 1, min(tokens, 32), dictate)
                    runs[cell].append(run(drafted, cell, tasks, number, tokens, dictate))
        costs = learned_costs(variants, temperature)
        for cell in group:
            line = summarise(lm.folder.name, cell, runs[cell], runs[plain[cell.batch]], costs)
            line.weights_gb_s = weights * rounds_a_second(runs[cell]) / 1e9
            line.read_gb_s, line.versions = bandwidth / 1e9, versions
            yield cell, line


def variant(lm: LanguageModel, mode: Mode) -> LanguageModel:
    """Return a model with the drafters of ``mode`` and the same compiled models."""
    lookup, model = mode in ("lookup", "chain", "auto"), mode in ("draft", "chain", "auto")
    if mode == "plain":
        return lm.with_drafters(None)
    if model and not lm.draft:
        if mode != "auto":
            raise OvspecError(f"{lm.folder}: it was exported without a draft; leave the modes draft and chain out.")
        model = False
    return lm.with_drafters(DraftChoice(lookup=lookup, model=lm.draft.ir.folder if model and lm.draft else None))


def run(lm: LanguageModel, cell: Cell, tasks: list[Task], number: int, tokens: int, dictate: bool) -> Run:
    """Generate the text of task ``number``, or a batch that begins with it, and time its rounds."""
    picked = [tasks[(number + place) % len(tasks)] for place in range(cell.batch)]
    sequences = [Sequence(with_context(lm, task.prompt, cell.context)) for task in picked]
    rows = [
        lm.workspace.row(
            sequence, lm.workspace.params(run_options(lm, cell, task, len(sequence), number + place, tokens, dictate))
        )
        for place, (task, sequence) in enumerate(zip(picked, sequences, strict=True))
    ]
    together: GenerateOptions = {
        "lookahead": "auto" if cell.lookahead is None else cell.lookahead,
        "batch_size": cell.batch,
        "temperature": cell.temperature,
    }
    gaps, last = list[float](), None
    for pieces in lm.workspace.run(rows, lm.workspace.params(together)):
        now = time.perf_counter()
        if last is not None and pieces:
            gaps.append((now - last) * 1e3)
        last = now
    return Run([row.result() for row in rows], gaps)


def run_options(
    lm: LanguageModel, cell: Cell, task: Task, start: int, seed: int, tokens: int, dictate: bool
) -> GenerateOptions:
    """Return the options of one text that follows a prompt of ``start`` tokens."""
    options: GenerateOptions = {"max_tokens": tokens, "ignore_eos": True}
    if dictate and task.answer is not None:
        return {**options, "sampler": dictation(start, lm.tokenizer.encode_more(task.answer))}
    return {**options, "temperature": cell.temperature, "seed": seed, "accept": cell.accept}


def dictation(start: int, answer: np.ndarray) -> Any:
    """Return a sampler that generates ``answer`` (n,), repeatedly if need be, after a prompt of ``start`` tokens."""

    def dictate(logits: np.ndarray, tokens: np.ndarray) -> int:
        del logits
        return int(answer[(len(tokens) - start) % len(answer)])

    return dictate


def with_context(lm: LanguageModel, prompt: str, context: int) -> list[int]:
    """Return the prompt's ids after those of other text, ``context`` in all."""
    ids = lm.encode(prompt).tolist()
    if len(ids) >= context:
        return ids
    filler = TEXT.read_text(encoding="utf-8") + "\n\n"
    rest = np.resize(lm.tokenizer.encode(filler, special=False), context - len(ids)).tolist()
    return [*rest, *ids]


def learned_costs(variants: dict[Mode, LanguageModel], temperature: float) -> tuple[Costs, Costs] | None:
    """Return the costs of verifying and of drafting that an auto lookahead has learned."""
    order: tuple[Mode, ...] = ("auto", "chain", "draft", "lookup")
    found = (variants[mode].workspace.pool.learned_costs(temperature > 0) for mode in order if mode in variants)
    return next((costs for costs in found if costs), None)


def summarise(pair: str, cell: Cell, runs: list[Run], plain: list[Run], costs: tuple[Costs, Costs] | None) -> Line:
    results = [result for run in runs for result in run.results]
    stats = [result.stats for result in results]
    speedup = speedup_of([run.ms / run.tokens for run in plain], [run.ms / run.tokens for run in runs], stats)
    reached = sum(s.reached for s in stats)
    rounds = sum(s.rounds for s in stats)
    positions = max((len(s.accepted_by_position) for s in stats), default=0)
    by_position = [
        sum(s.accepted_by_position[i] for s in stats if i < len(s.accepted_by_position)) for i in range(positions)
    ]
    plain_results = [result for run in plain for result in run.results]
    equal = sum(a.token_ids == b.token_ids for a, b in zip(results, plain_results, strict=True))
    predicted = None
    if costs and cell.lookahead and cell.mode in ("draft", "lookup") and cell.batch == 1:
        verify, draft = costs
        steps = cell.lookahead * draft(1) if cell.mode == "draft" and draft.known else 0.0
        share = sum(s.proposed > 0 for s in stats) and sum(s.proposed for s in stats) / max(1, rounds)
        width = share + 1
        predicted = (
            verify(1) * (1 + sum(by_position) / rounds) / (steps + float(np.interp(width, range(65), verify.ms)))
        )
    return Line(
        pair,
        cell.workload,
        cell.context,
        cell.temperature,
        cell.mode,
        "auto" if cell.lookahead is None else cell.lookahead,
        cell.accept,
        1e3 / speedup.ms,
        speedup.plain_ms * cell.batch,
        speedup.ms * cell.batch,
        (speedup.ratios[0], speedup.ratios[-1]),
        float(np.percentile([gap for run in runs for gap in run.gaps], 95)),
        statistics.median(s.ttft_ms for s in stats),
        1.0 if cell.mode == "plain" else speedup.claimed,
        predicted,
        f"{equal} of {len(results)}",
        sum(s.accepted for s in stats) / reached if reached else None,
        sum(s.proposed for s in stats),
        sum(s.accepted for s in stats),
        by_position,
        sum(s.generated_tokens for s in stats) / rounds,
        0.0,
        0.0,
        cell.batch,
    )


def as_json(line: Line) -> str:
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(line).items()}
    return json.dumps(rounded)


# ---------------------------------------------------------------- memory


def rounds_a_second(runs: list[Run]) -> float:
    """Return the target's inferences per second of its time, without the first of each text."""
    stats = [max((result.stats for result in run.results), key=lambda stats: stats.rounds) for run in runs]
    spent = sum(s.target_ms - s.ttft_ms for s in stats)
    return 1e3 * sum(s.rounds - 1 for s in stats) / max(spent, 1e-9)


def read_bandwidth(size: int = 1 << 29) -> float:
    """Return the bytes per second that all cores together read from memory, the best of 7 times ``size`` bytes."""
    parts = np.array_split(np.ones(size // 8, dtype=np.int64), os.cpu_count() or 1)

    def read_all() -> float:
        began = time.perf_counter()
        threads = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    return size / min(read_all() for _ in range(7))


def bytes_a_step(folder: Path) -> int:
    """Return the bytes of weights that a step of a model reads: all except the embedding, of which it reads a row."""
    read = 0
    for op in ov.Core().read_model(folder / MODEL_FILE).get_ops():
        if op.get_type_name() == "Constant":
            users = {use.get_node().get_type_name() for use in op.output(0).get_target_inputs()}
            embedding = "embed_tokens" in op.get_friendly_name() or users == {"Gather"}
            read += 0 if embedding else op.get_byte_size()  # type: ignore[attr-defined]
    return read
