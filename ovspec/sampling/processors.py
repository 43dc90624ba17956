"""Constraints on logits, like Hugging Face's logits processors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.params import SamplingParams
from ovspec.params.generation import LogitsProcessor
from ovspec.sampling.constraint import Constraint

if TYPE_CHECKING:
    import torch

# tokens so far (n,) int64 -> number of prompt tokens among them
PromptTokenCounter = Callable[[np.ndarray], int]


class LogitBiasProcessor(Constraint):
    """Adds a bias to the logits of some tokens."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._ids = np.array(list(biases), dtype=np.int64)
        self._biases = np.array(list(biases.values()), dtype=np.float32)

    def process_logits(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:  # noqa: ARG002
        logits = logits.copy()
        is_in_vocabulary = self._ids < len(logits)  # a draft's vocabulary may be smaller
        logits[self._ids[is_in_vocabulary]] += self._biases[is_in_vocabulary]
        return logits


class PenaltyProcessor(Constraint):
    """Applies the repetition, presence and frequency penalties."""

    def __init__(self, params: SamplingParams, count_prompt_tokens: PromptTokenCounter) -> None:
        self._params = params
        self._count_prompt_tokens = count_prompt_tokens

    def process_logits(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        params = self._params
        generated_ids = tokens[self._count_prompt_tokens(tokens) :]
        logits = logits.copy()
        penalty = params.repetition_penalty
        if penalty is not None and penalty != 1.0:
            token_logits = logits[tokens]
            logits[tokens] = np.where(token_logits < 0, token_logits * penalty, token_logits / penalty)
        if (params.presence_penalty or params.frequency_penalty) and len(generated_ids):
            unique_ids, counts = np.unique(generated_ids, return_counts=True)
            logits[unique_ids] -= (params.presence_penalty + float(params.frequency_penalty) * counts).astype(
                np.float32
            )
        return logits


class UserProcessor(Constraint):
    """Applies a user's own function, or a logits processor of transformers."""

    def __init__(self, function: LogitsProcessor) -> None:
        self._function_name = getattr(function, "__name__", type(function).__name__)
        self._function = adapt_torch_processor(function) if takes_torch_tensors(function) else function

    def process_logits(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        # Copies, because a user's function may keep or change its arguments.
        returned_logits = self._function(tokens.copy(), logits[None].copy())
        try:
            processed_logits = np.asarray(returned_logits)
        except (TypeError, ValueError):
            processed_logits = np.empty(0)
        if processed_logits.size != logits.size or processed_logits.dtype.kind not in "fiu":
            raise OvspecError(
                f"The logits processor {self._function_name} returned {type(returned_logits).__name__} "
                f"of shape {processed_logits.shape}; it must return logits of shape (1, {len(logits)})."
            )
        processed_logits = processed_logits.reshape(-1).astype(np.float32)
        if np.isnan(processed_logits).any() or processed_logits.max() == np.inf:
            raise OvspecError(
                f"The logits processor {self._function_name} returned nan or inf; use -inf to exclude a token."
            )
        return processed_logits


def takes_torch_tensors(function: LogitsProcessor) -> bool:
    """Return whether ``function`` takes tensors, as the logits processors of transformers and lists of them do."""
    base_classes = inspect.getmro(type(function))
    return any(
        base_class.__name__ in ("LogitsProcessor", "LogitsProcessorList")
        for base_class in base_classes
        if "transformers" in base_class.__module__
    )


def adapt_torch_processor(function: Callable[..., torch.Tensor]) -> LogitsProcessor:
    """Return a logits processor of transformers as a function of arrays."""
    import torch  # installed, because the processor takes tensors

    def process_arrays(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        return function(torch.from_numpy(tokens)[None], torch.from_numpy(logits)).detach().cpu().float().numpy()

    return process_arrays


class MinTokensProcessor(Constraint):
    """Excludes the end ids until ``min_count`` tokens are generated."""

    def __init__(self, min_count: int, count_prompt_tokens: PromptTokenCounter, end_ids: frozenset[int]) -> None:
        self._min_count = min_count
        self._count_prompt_tokens = count_prompt_tokens
        self._end_ids = np.array(sorted(end_ids), dtype=np.int64)

    def process_logits(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        if len(tokens) - self._count_prompt_tokens(tokens) >= self._min_count:
            return logits
        logits = logits.copy()
        logits[self._end_ids[self._end_ids < len(logits)]] = -np.inf
        return logits


def make_processors(
    params: SamplingParams,
    count_prompt_tokens: PromptTokenCounter,
    end_ids: frozenset[int],
    user_functions: Iterable[LogitsProcessor] | None = None,
) -> list[Constraint]:
    """Return constraints that apply ``params`` and a user's functions to logits, in Hugging Face's order."""
    if user_functions is not None and not isinstance(user_functions, Iterable):
        raise OvspecError("`logits_processors` must be a list of functions; put the function into a list.")
    processors: list[Constraint] = []
    if params.logit_bias:
        processors.append(LogitBiasProcessor(params.logit_bias))
    if params.penalizes:
        processors.append(PenaltyProcessor(params, count_prompt_tokens))
    if params.min_tokens:
        processors.append(MinTokensProcessor(params.min_tokens, count_prompt_tokens, end_ids))
    for user_function in user_functions or []:
        if not callable(user_function):
            raise OvspecError(f"`logits_processors` has {user_function!r}; each entry must be a function.")
        processors.append(UserProcessor(user_function))
    return processors
