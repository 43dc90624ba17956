"""Time workloads in several modes, in turns: the work behind ``ovspec bench``."""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openvino as ov

from ovspec import __version__
from ovspec.drafting.choice import DraftChoice
from ovspec.errors import OvspecError
from ovspec.generate import Result
from ovspec.ir import MODEL_FILE
from ovspec.lookahead import Costs
from ovspec.model import LanguageModel
from ovspec.sampler import AcceptRule

Mode = Literal["plain", "draft", "lookup", "chain", "auto"]
MODES: tuple[Mode, ...] = ("plain", "draft", "lookup", "chain", "auto")
WORKLOADS = ("completion", "edit", "prose")
HOME = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Task:
    """A prompt and, for an edit, the text that would be right."""

    prompt: str
    answer: str | None = None


@dataclass(frozen=True)
class Cell:
    """What is timed: ``context`` tokens of other text stand before each prompt; ``lookahead`` None is auto."""

    workload: str
    context: int
    temperature: float
    mode: Mode
    lookahead: int | None
    accept: AcceptRule = "compare"


@dataclass
class Line:
    """The figures of one cell, over all prompts. Times are medians; ``spread`` is that of tpot_ms, half its quartiles'
    distance as a share of it. ``speedup`` compares the summed times with plain decoding of the same texts, of which
    ``equal`` tells how many were the same. ``weights_gb_s``: weights that the target's inferences read a second.
    ``predicted``: the speed-up by what tokens cost and how many were accepted.
    """

    pair: str
    workload: str
    context: int
    temperature: float
    mode: Mode
    lookahead: int | str
    accept: AcceptRule
    tokens_per_s: float
    tpot_ms: float
    spread: float
    p95_gap_ms: float
    ttft_ms: float
    speedup: float
    predicted: float | None
    equal: str
    acceptance: float | None
    accepted_by_position: list[int]
    tokens_per_round: float
    weights_gb_s: float
    read_gb_s: float
    peer: str = "ovspec"
    versions: dict[str, str] = field(default_factory=dict)


@dataclass
class Run:
    """One text: its result, and the milliseconds between rounds."""

    result: Result
    gaps: list[float]


def tasks_of(workload: str, count: int) -> list[Task]:
    """The first ``count`` prompts of a workload, none of which the demo pair was trained on."""
    if workload == "completion":
        places = (HOME / "prompts.json", HOME.parent / "models" / "prompts.json")  # a wheel's, or a checkout's
        file = next(place for place in places if place.is_file())
        return [Task(entry["text"]) for entry in json.loads(file.read_text("utf-8"))["prompts"]][:count]
    found = json.loads((HOME / "workloads.json").read_text("utf-8"))[workload][:count]
    return [Task(text) for text in found] if workload == "prose" else [edit_of(entry) for entry in found]


def edit_of(entry: dict[str, Any]) -> Task:
    """A file, what is to be done to it, and the beginning of the file that is asked for."""
    edited = entry["file"]
    for old, new in entry["replace"].items():
        edited = edited.replace(old, new)
    first, rest = edited.split("\n", 1)
    return Task(f"{entry['file']}\n\n# The same file, {entry['task']}:\n\n{first}\n", rest)


def run_bench(
    lm: LanguageModel,
    cells: Sequence[Cell],
    tokens: int,
    prompts: int,
    dictate: bool = False,
    repeats: int = 1,
) -> Iterator[tuple[Cell, Line]]:
    """Figures of each cell as they come.

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
        tasks = tasks_of(workload, prompts)
        plain = Cell(workload, context, temperature, "plain", 0, group[0].accept)
        order = list(dict.fromkeys([plain, *group]))
        runs: dict[Cell, list[Run]] = {cell: [] for cell in order}
        for repeat in range(repeats):
            for number, task in enumerate(tasks):
                for cell in order:
                    if not runs[cell] and not repeat:  # kernels are made, and the lookahead learns what is what
                        run(variants[cell.mode], cell, tasks[-1], len(tasks) - 1, min(tokens, 32), dictate)
                    runs[cell].append(run(variants[cell.mode], cell, task, number, tokens, dictate))
        costs = learned_costs(variants, temperature)
        for cell in group:
            line = summarise(lm.folder.name, cell, runs[cell], runs[plain], costs)
            line.weights_gb_s = weights * rounds_a_second(runs[cell]) / 1e9
            line.read_gb_s, line.versions = bandwidth / 1e9, versions
            yield cell, line


def variant(lm: LanguageModel, mode: Mode) -> LanguageModel:
    """The same compiled models with the drafters of ``mode``."""
    lookup, model = mode in ("lookup", "chain", "auto"), mode in ("draft", "chain", "auto")
    loaded, folder = lm.draft_model
    if mode == "plain":
        return lm.with_drafters(None)
    if model and not loaded:
        if mode != "auto":
            raise OvspecError(f"{lm.folder}: it was exported without a draft; leave the modes draft and chain out.")
        model = False
    return lm.with_drafters(DraftChoice(lookup=lookup, model=folder if model else None))


def run(lm: LanguageModel, cell: Cell, task: Task, seed: int, tokens: int, dictate: bool) -> Run:
    """One text, and when its tokens came."""
    ids = with_context(lm, task.prompt, cell.context)
    options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    options["lookahead"] = "auto" if cell.lookahead is None else cell.lookahead
    if dictate and task.answer is not None:
        options["sampler"] = dictation(len(ids), lm.tokenizer.encode_more(task.answer))
    else:
        options |= {"temperature": cell.temperature, "seed": seed, "accept": cell.accept}
    stream, gaps, last = lm.stream(ids, **options), list[float](), None
    for piece in stream:
        now = time.perf_counter()
        if last is not None and piece.token_ids:
            gaps.append((now - last) * 1e3)
        last = now
    return Run(stream.result(), gaps)


def dictation(start: int, answer: np.ndarray) -> Any:
    """A sampler that says ``answer`` (n,), over and over if need be, behind a prompt of ``start`` tokens."""

    def dictate(logits: np.ndarray, tokens: np.ndarray) -> int:
        del logits
        return int(answer[(len(tokens) - start) % len(answer)])

    return dictate


def with_context(lm: LanguageModel, prompt: str, context: int) -> list[int]:
    """The prompt's ids, and before them those of other texts until there are ``context``."""
    ids = lm.encode(prompt).tolist()
    if len(ids) >= context:
        return ids
    filler = (HOME / "tuning_text.txt").read_text(encoding="utf-8") + "\n\n"
    rest = np.resize(lm.tokenizer.encode(filler, special=False), context - len(ids)).tolist()
    return [*rest, *ids]


def learned_costs(variants: dict[Mode, LanguageModel], temperature: float) -> tuple[Costs, Costs] | None:
    """What an auto lookahead has learned that verifying and drafting cost."""
    order: tuple[Mode, ...] = ("auto", "chain", "draft", "lookup")
    found = (variants[mode].learned_costs(temperature > 0) for mode in order if mode in variants)
    return next((costs for costs in found if costs), None)


def summarise(pair: str, cell: Cell, runs: list[Run], plain: list[Run], costs: tuple[Costs, Costs] | None) -> Line:
    stats = [run.result.stats for run in runs]
    times = [s.tpot_ms for s in stats]
    tpot = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [tpot, tpot, tpot]
    reached = sum(s.reached for s in stats)
    rounds = sum(s.rounds for s in stats)
    positions = max((len(s.accepted_by_position) for s in stats), default=0)
    by_position = [
        sum(s.accepted_by_position[i] for s in stats if i < len(s.accepted_by_position)) for i in range(positions)
    ]
    total = sum(s.tpot_ms * (s.generated_tokens - 1) for s in stats)
    alone = sum(run.result.stats.tpot_ms * (run.result.stats.generated_tokens - 1) for run in plain)
    equal = sum(a.result.token_ids == b.result.token_ids for a, b in zip(runs, plain, strict=True))
    predicted = None
    if costs and cell.lookahead and cell.mode in ("draft", "lookup"):
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
        1e3 / tpot,
        tpot,
        (quartiles[2] - quartiles[0]) / 2 / tpot,
        float(np.percentile([gap for run in runs for gap in run.gaps], 95)),
        statistics.median(s.ttft_ms for s in stats),
        alone / total,
        predicted,
        f"{equal} of {len(runs)}",
        sum(s.accepted for s in stats) / reached if reached else None,
        by_position,
        sum(s.generated_tokens for s in stats) / rounds,
        0.0,
        0.0,
    )


def as_json(line: Line) -> str:
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(line).items()}
    return json.dumps(rounded)


# ---------------------------------------------------------------- memory


def rounds_a_second(runs: list[Run]) -> float:
    """The target's inferences in a second of its time, behind the first of each text."""
    spent = sum(run.result.stats.target_ms - run.result.stats.ttft_ms for run in runs)
    return 1e3 * sum(run.result.stats.rounds - 1 for run in runs) / max(spent, 1e-9)


def read_bandwidth(size: int = 1 << 29) -> float:
    """Bytes a second that all cores together read from memory, the best of 7 readings of ``size`` bytes."""
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
    """Bytes of weights that a step of the model in ``folder`` reads: all but the embedding, of which it reads a row."""
    read = 0
    for op in ov.Core().read_model(folder / MODEL_FILE).get_ops():
        if op.get_type_name() == "Constant":
            users = {use.get_node().get_type_name() for use in op.output(0).get_target_inputs()}
            embedding = "embed_tokens" in op.get_friendly_name() or users == {"Gather"}
            read += 0 if embedding else op.get_byte_size()  # type: ignore[attr-defined]
    return read
