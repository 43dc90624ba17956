"""The training loop of a student, a head or a draft model, on its target's features. It can end at any time.

The learning rate is constant for a long time and then falls slowly, and the result is a running average of the weights,
over about the last eighth of the steps: so nothing depends on when training ends, and it can always continue.
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
from ovspec_export.distill.work_folder import CHECKPOINT_FOLDER, TRAINING_STATE_FILE

JUDGED_DOCUMENTS = 24  # held-out documents evaluated during training
WARM_UP_STEPS, STEADY_STEPS = 100, 8000  # steps until the highest rate, and until its decay
REPORT_SECONDS, SAVE_SECONDS, JUDGE_SECONDS = 5.0, 120.0, 60.0  # between progress reports, saved states and evaluations
AVERAGE_SPAN = 6  # the larger, the shorter the average; 12 has 0.01 guesses in a row fewer, the last weights 0.08
BETAS = (0.9, 0.95)
M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1  # of glibc's mallopt
BF16_INSTRUCTIONS = "AVX512_CORE_BF16"  # in OpenVINO's names of instruction sets, the lowest with bf16 products
MAX_GRADIENT_NORM = 1.0  # norm of a step's gradient


class Student(Protocol):
    """A model in training. A group has parameters, ``peak_rate``, their highest rate, and the optimizer's options."""

    @property
    def module(self) -> nn.Module: ...

    def parameter_groups(self) -> list[dict[str, Any]]: ...

    def make_batches(self, examples: Sequence[Example]) -> Iterator[Any]: ...

    def compute_loss(self, batch: Any) -> Tensor: ...

    def measure_acceptance(self, examples: Iterable[Example]) -> JsonObject: ...

    def write_checkpoint(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class TrainingLimits:
    """The limits of a training job: ``seconds``, or ``tokens`` over all runs; and torch's device."""

    seconds: float
    tokens: int
    device: str = "cpu"


def train_student(
    student: Student,
    work_folder: Path,
    training_state: dict[str, Any],
    extra_state: dict[str, Any],
    limits: TrainingLimits,
) -> None:
    """Train a student on the documents in the work folder, and write the state and the result.

    Args:
        student: with the weights of ``training_state``, if it isn't empty.
        extra_state: further entries of the state.
    """
    with torch.device(limits.device):
        run_training_loop(student, work_folder, training_state, extra_state, limits)


def run_training_loop(
    student: Student,
    work_folder: Path,
    training_state: dict[str, Any],
    extra_state: dict[str, Any],
    limits: TrainingLimits,
) -> None:
    keep_freed_memory()
    examples, held_out_examples = (read_examples(work_folder, held_out) for held_out in (False, True))
    if not len(examples):
        raise OvspecError("the time was too short to prepare training texts; raise `minutes`")
    judged_examples = Examples(held_out_examples.spans[:: max(1, len(held_out_examples) // JUDGED_DOCUMENTS)])
    trainable_weights = {name: weight for name, weight in student.module.named_parameters() if weight.requires_grad}
    initial_average = training_state.get("averaged") or {
        name: weight.detach() for name, weight in trainable_weights.items()
    }
    averaged_weights = {name: weight.clone().to(limits.device) for name, weight in initial_average.items()}
    optimizer = Optimizer(student.parameter_groups(), betas=BETAS, fused=True)
    for name, moments in training_state.get("optimizer", {}).items():
        optimizer.state[trainable_weights[name]] = {
            moment_name: tensor.to(limits.device) for moment_name, tensor in moments.items()
        }
    step = training_state.get("step", 0)
    seen_tokens = training_state.get("seen", 0)
    torch.manual_seed(step)

    def save_state() -> None:
        optimizer_states = {name: optimizer.state[weight] for name, weight in trainable_weights.items()}
        weights = student.module.state_dict()
        with open_replacement(work_folder / TRAINING_STATE_FILE) as partial_file:
            state_entries = {
                "step": step,
                "seen": seen_tokens,
                "averaged": averaged_weights,
                "optimizer": optimizer_states,
                "weights": weights,
            }
            torch.save(extra_state | state_entries, partial_file)

    def call_with_averaged_weights(action: Any) -> Any:
        """Call ``action`` while the student has the averaged weights."""
        with torch.no_grad():
            current_weights = {name: weight.detach().clone() for name, weight in trainable_weights.items()}
            for name, weight in trainable_weights.items():
                weight.copy_(averaged_weights[name])
            try:
                return action()
            finally:
                for name, weight in trainable_weights.items():
                    weight.copy_(current_weights[name])

    began = last_report_time = last_save_time = time.monotonic()
    tokens_at_report, judgement, closing_seconds = (
        seen_tokens,
        dict[str, Any](),
        0.0,
    )  # the last: seconds for the final evaluation
    last_judgement_time = began - JUDGE_SECONDS + min(JUDGE_SECONDS, limits.seconds / 4)
    for batch in student.make_batches(examples):
        now = time.monotonic()
        if is_stop_requested() or now - began > limits.seconds - closing_seconds or seen_tokens >= limits.tokens:
            break
        rate_factor = min((step + 1) / WARM_UP_STEPS, 1.0, (STEADY_STEPS / (step + 1)) ** 0.5)
        for group in optimizer.param_groups:
            group["lr"] = rate_factor * group["peak_rate"]
        with autocast_bf16(limits.device):
            loss = student.compute_loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(list(trainable_weights.values()), MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step = step + 1
        seen_tokens = seen_tokens + len(batch)
        average_share = (AVERAGE_SPAN + 1) / (step + AVERAGE_SPAN)
        for name, weight in trainable_weights.items():
            averaged_weights[name].lerp_(weight.detach(), average_share)
        if now - last_judgement_time > JUDGE_SECONDS:
            judgement = call_with_averaged_weights(lambda: student.measure_acceptance(judged_examples))
            last_judgement_time = time.monotonic()
            closing_seconds = (last_judgement_time - now) * len(held_out_examples) / max(len(judged_examples), 1)
        if now - last_report_time > REPORT_SECONDS:
            tokens_per_second = (seen_tokens - tokens_at_report) / (now - last_report_time)
            report_progress(tokens=seen_tokens, per_second=tokens_per_second, loss=loss.item(), steps=step, **judgement)
            last_report_time = now
            tokens_at_report = seen_tokens
        if now - last_save_time > SAVE_SECONDS:
            save_state()
            last_save_time = time.monotonic()
    save_state()
    call_with_averaged_weights(lambda: student.write_checkpoint(work_folder / CHECKPOINT_FOLDER))
    judgement = call_with_averaged_weights(lambda: student.measure_acceptance(held_out_examples))
    report_progress(tokens=seen_tokens, steps=step, **judgement)


def autocast_bf16(device: str) -> AbstractContextManager[Any]:
    """Return a context for products in bf16 on devices with bf16 units, and else in f32."""
    lacks_bf16 = device == "cpu" and BF16_INSTRUCTIONS not in list_instruction_sets()
    return nullcontext() if lacks_bf16 else torch.autocast(torch.device(device).type, torch.bfloat16)


def keep_freed_memory() -> None:
    """Make the C library (glibc) keep freed memory: otherwise new pages take as long as a step's arithmetic."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            c_library = ctypes.CDLL(None)
            c_library.mallopt(M_MMAP_MAX, 0)
            c_library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def compute_mean_accepted(guess_is_right: Tensor) -> list[float]:
    """Return the mean number of right guesses before the first wrong guess, among the first 1, 2, … guesses.

    guess_is_right: (n, guesses) bool.
    """
    return [round(mean, 4) for mean in guess_is_right.cumprod(1).mean(0).cumsum(0).tolist()]


def move_vocabulary_rows(
    rows_of_old_ids: Tensor, old_ids: Tensor, new_ids: Tensor, rows_of_unknown_ids: Tensor
) -> Tensor:
    """Return rows for ``new_ids``: the rows of ``old_ids``, or ``rows_of_unknown_ids`` [new, …] for new ids."""
    row_indices = torch.full((int(max(old_ids.max(), new_ids.max())) + 1,), -1).index_put_(
        (old_ids,), torch.arange(len(old_ids))
    )[new_ids]
    is_known = row_indices >= 0
    moved_rows = rows_of_unknown_ids.clone()
    moved_rows[is_known] = rows_of_old_ids[row_indices[is_known]]
    return moved_rows
