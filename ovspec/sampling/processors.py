"""Constraints that change logits, as Hugging Face's logits processors do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.params import SamplingParams
from ovspec.params.generation import LogitsProcessor
from ovspec.sampling.constraint import Constraint

# tokens so far (n,) int64 -> how many of them were in the prompt
PromptLength = Callable[[np.ndarray], int]


class LogitBias(Constraint):
    """Adds a bias to the logits of some tokens."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._ids = np.array(list(biases), dtype=np.int64)
        self._added = np.array(list(biases.values()), dtype=np.float32)

    def process(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:  # noqa: ARG002
        logits = logits.copy()
        known = self._ids < len(logits)  # a draft's vocabulary may be smaller
        logits[self._ids[known]] += self._added[known]
        return logits


class Penalties(Constraint):
    """Applies the repetition, presence and frequency penalties."""

    def __init__(self, params: SamplingParams, prompt: PromptLength) -> None:
        self._params, self._prompt = params, prompt

    def process(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        params, generated, logits = self._params, tokens[self._prompt(tokens) :], logits.copy()
        penalty = params.repetition_penalty
        if penalty is not None and penalty != 1.0:
            held = logits[tokens]
            logits[tokens] = np.where(held < 0, held * penalty, held / penalty)
        if (params.presence_penalty or params.frequency_penalty) and len(generated):
            ids, counts = np.unique(generated, return_counts=True)
            logits[ids] -= (params.presence_penalty + float(params.frequency_penalty) * counts).astype(np.float32)
        return logits


class UserProcessor(Constraint):
    """Applies a user's own function, or a logits processor of transformers."""

    def __init__(self, function: LogitsProcessor) -> None:
        self._name = getattr(function, "__name__", type(function).__name__)
        self._function = on_arrays(function) if is_of_transformers(function) else function

    def process(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        # Copies, because a user's function may keep or change its arguments.
        given = self._function(tokens.copy(), logits[None].copy())
        try:
            found = np.asarray(given)
        except (TypeError, ValueError):
            found = np.empty(0)
        if found.size != logits.size or found.dtype.kind not in "fiu":
            what, wanted = f"{type(given).__name__} of shape {found.shape}", f"logits of shape (1, {len(logits)})"
            raise OvspecError(f"The logits processor {self._name} returned {what}; it must return {wanted}.")
        found = found.reshape(-1).astype(np.float32)
        if np.isnan(found).any() or found.max() == np.inf:
            raise OvspecError(f"The logits processor {self._name} returned nan or inf; use -inf to exclude a token.")
        return found


def is_of_transformers(function: LogitsProcessor) -> bool:
    """Return whether ``function`` takes tensors, as the logits processors of transformers and lists of them do."""
    bases = inspect.getmro(type(function))
    return any(
        base.__name__ in ("LogitsProcessor", "LogitsProcessorList")
        for base in bases
        if "transformers" in base.__module__
    )


def on_arrays(function: Callable[..., Any]) -> LogitsProcessor:
    """Return a logits processor of transformers as a function of arrays."""
    import torch  # which whoever has such a processor has installed

    def process(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        return function(torch.from_numpy(tokens)[None], torch.from_numpy(logits)).detach().cpu().float().numpy()

    return process


class MinTokens(Constraint):
    """Excludes the ids that end the text until ``count`` tokens are generated."""

    def __init__(self, count: int, prompt: PromptLength, ends: frozenset[int]) -> None:
        self._count, self._prompt = count, prompt
        self._ends = np.array(sorted(ends), dtype=np.int64)

    def process(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        if len(tokens) - self._prompt(tokens) >= self._count:
            return logits
        logits = logits.copy()
        logits[self._ends[self._ends < len(logits)]] = -np.inf
        return logits


def processing(
    params: SamplingParams,
    prompt: PromptLength,
    ends: frozenset[int],
    functions: Iterable[LogitsProcessor] | None = None,
) -> list[Constraint]:
    """Return constraints that apply ``params`` and a user's functions to logits, in Hugging Face's order."""
    if functions is not None and not isinstance(functions, Iterable):
        raise OvspecError("`logits_processors` must be a list of functions; put the function into a list.")
    found: list[Constraint] = []
    if params.logit_bias:
        found.append(LogitBias(params.logit_bias))
    if params.penalizes:
        found.append(Penalties(params, prompt))
    if params.min_tokens:
        found.append(MinTokens(params.min_tokens, prompt, ends))
    for function in functions or []:
        if not callable(function):
            raise OvspecError(f"`logits_processors` has {function!r}, which isn't a function.")
        found.append(UserProcessor(function))
    return found
