"""The loop that teaches a student, a head or a draft model, what its target computes. It can end at any time.

The rate stays the same for long and then falls slowly, and the result is a running average of the weights, over about
the last eighth of the steps: so nothing depends on when the training ends, and it can always go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ovspec.base.errors import OvspecError
from ovspec.base.files import open_replacement
from ovspec.base.json_types import JsonObject
from ovspec.ir.instruction_set import list_instruction_sets
from ovspec_export.channel import is_stop_requested, report_progress
from ovspec_export.distill.features import Example, Examples, read_examples
from ovspec_export.distill.optimizer import Optimizer
from ovspec_export.distill.work_folder import CHECKPOINT_FOLDER, STATE_FILE

JUDGED_DOCUMENTS = 24  # held-out documents that are judged while it trains
WARM_UP_STEPS, STEADY_STEPS = 100, 8000  # steps until the rate is the highest, and until it falls
REPORT_SECONDS, SAVE_SECONDS, JUDGE_SECONDS = 5.0, 120.0, 60.0  # seconds between progress, states and judgements
AVERAGE_SPAN = 6  # the larger, the shorter the average; 12 has 0.01 guesses in a row fewer, the last weights 0.08
BETAS = (0.9, 0.95)
M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1  # of glibc's mallopt
BF16_INSTRUCTIONS = "AVX512_CORE_BF16"  # of OpenVINO's names of instruction sets, the least that multiplies in bf16
MAX_GRADIENT_NORM = 1.0  # norm of a step's gradient


class Student(Protocol):
    """What is taught. A group has parameters and ``most``, their highest rate, and the optimizer's options."""

    @property
    def module(self) -> nn.Module: ...

    def parameter_groups(self) -> list[dict[str, Any]]: ...

    def make_batches(self, examples: Sequence[Example]) -> Iterator[Any]: ...

    def compute_loss(self, batch: Any) -> Tensor: ...

    def measure_acceptance(self, examples: Iterable[Example]) -> JsonObject: ...

    def write_checkpoint(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class TrainingLimits:
    """How long a job trains: for ``seconds``, or until ``tokens`` were seen over all runs; and where torch does it."""

    seconds: float
    tokens: int
    device: str = "cpu"


def train_student(
    student: Student, work: Path, state: dict[str, Any], kept: dict[str, Any], limits: TrainingLimits
) -> None:
    """Train a student on the documents in the work folder, and write the state and the result.

    Args:
        student: with the weights of ``state``, if that isn't empty.
        kept: what else the state is to hold.
    """
    with torch.device(limits.device):
        run_training_loop(student, work, state, kept, limits)


def run_training_loop(
    student: Student, work: Path, state: dict[str, Any], kept: dict[str, Any], limits: TrainingLimits
) -> None:
    keep_freed_memory()
    examples, held_out = (read_examples(work, held_out) for held_out in (False, True))
    if not len(examples):
        raise OvspecError("there is no text to learn from yet; give more `minutes`")
    judged = Examples(held_out.spans[:: max(1, len(held_out) // JUDGED_DOCUMENTS)])
    named = {name: weight for name, weight in student.module.named_parameters() if weight.requires_grad}
    initial = state.get("averaged") or {name: weight.detach() for name, weight in named.items()}
    averaged = {name: weight.clone().to(limits.device) for name, weight in initial.items()}
    optimizer = Optimizer(student.parameter_groups(), betas=BETAS, fused=True)
    for name, moments in state.get("optimizer", {}).items():
        optimizer.state[named[name]] = {moment: tensor.to(limits.device) for moment, tensor in moments.items()}
    step = state.get("step", 0)
    seen = state.get("seen", 0)
    torch.manual_seed(step)

    def save() -> None:
        optimized = {name: optimizer.state[weight] for name, weight in named.items()}
        weights = student.module.state_dict()
        with open_replacement(work / STATE_FILE) as partial:
            figures = {"step": step, "seen": seen, "averaged": averaged, "optimizer": optimized, "weights": weights}
            torch.save(kept | figures, partial)

    def with_average(use: Any) -> Any:
        """Call ``use`` while the student has the averaged weights."""
        with torch.no_grad():
            own = {name: weight.detach().clone() for name, weight in named.items()}
            for name, weight in named.items():
                weight.copy_(averaged[name])
            try:
                return use()
            finally:
                for name, weight in named.items():
                    weight.copy_(own[name])

    began = reported = saved = time.monotonic()
    at_report, shown, closing = seen, dict[str, Any](), 0.0  # the last: seconds that judging in the end will take
    judged_at = began - JUDGE_SECONDS + min(JUDGE_SECONDS, limits.seconds / 4)
    for batch in student.make_batches(examples):
        now = time.monotonic()
        if is_stop_requested() or now - began > limits.seconds - closing or seen >= limits.tokens:
            break
        rate = min((step + 1) / WARM_UP_STEPS, 1.0, (STEADY_STEPS / (step + 1)) ** 0.5)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["peak_rate"]
        with autocast_bf16(limits.device):
            loss = student.compute_loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(list(named.values()), MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step = step + 1
        seen = seen + len(batch)
        share = (AVERAGE_SPAN + 1) / (step + AVERAGE_SPAN)
        for name, weight in named.items():
            averaged[name].lerp_(weight.detach(), share)
        if now - judged_at > JUDGE_SECONDS:
            shown = with_average(lambda: student.measure_acceptance(judged))
            judged_at = time.monotonic()
            closing = (judged_at - now) * len(held_out) / max(len(judged), 1)
        if now - reported > REPORT_SECONDS:
            speed = (seen - at_report) / (now - reported)
            report_progress(tokens=seen, per_second=speed, loss=loss.item(), steps=step, **shown)
            reported = now
            at_report = seen
        if now - saved > SAVE_SECONDS:
            save()
            saved = time.monotonic()
    save()
    with_average(lambda: student.write_checkpoint(work / CHECKPOINT_FOLDER))
    shown = with_average(lambda: student.measure_acceptance(held_out))
    report_progress(tokens=seen, steps=step, **shown)


def autocast_bf16(device: str) -> AbstractContextManager[Any]:
    """Return a context in which products are computed in bf16 where the device is made for it, and else in f32."""
    slow = device == "cpu" and BF16_INSTRUCTIONS not in list_instruction_sets()
    return nullcontext() if slow else torch.autocast(torch.device(device).type, torch.bfloat16)


def keep_freed_memory() -> None:
    """Let the C library (glibc) keep what is freed: else the new pages of each step take as long as its arithmetic."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            library.mallopt(M_MMAP_MAX, 0)
            library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def compute_accepted(right: Tensor) -> list[float]:
    """Return how many of the first 1, 2, … guesses come before the first wrong one, on average: right (n, guesses)."""
    return [round(mean, 4) for mean in right.cumprod(1).mean(0).cumsum(0).tolist()]


def move_rows(rows: Tensor, old: Tensor, new: Tensor, fresh: Tensor) -> Tensor:
    """Return rows for the ids ``new`` from those for the ids ``old``, and from ``fresh`` [len(new), …] for others."""
    place = torch.full((int(max(old.max(), new.max())) + 1,), -1).index_put_((old,), torch.arange(len(old)))[new]
    known = place >= 0
    result = fresh.clone()
    result[known] = rows[place[known]]
    return result
