"""Perplexity of texts, and scores: the log-probabilities of continuations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.cache.decoder import Decoder
from ovspec.cache.prefill import PREFILL_THRESHOLD
from ovspec.cache.sequence import Sequence, catch_up
from ovspec.sampling.logprobs import log_softmax

DEFAULT_PERPLEXITY_CONTEXT = 1024
LOGITS_CHUNK_TOKENS = 128  # positions with logits in memory at a time
# Maximum texts and logits per forward pass: a stateful cache is copied per text; logits are as wide as the vocabulary.
MAX_TEXTS_PER_INFERENCE = 32
MAX_LOGITS_PER_INFERENCE = 256


@dataclass(frozen=True)
class Score:
    """A text's score: ``logprob`` is the sum of ``logprobs``, its tokens' log-probabilities, in nats."""

    logprob: float
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Selection:
    """The selected option, its index among the options, and the total log-probability of each option."""

    text: str
    index: int
    logprobs: list[float]


def check_select_options(options: object, terminator: object) -> None:
    """Raise OvspecError if a session can't select among ``options``."""
    if not isinstance(options, (list, tuple)) or not options or not all(isinstance(text, str) for text in options):
        raise OvspecError("`select` needs a non-empty list of strings.")
    if len(set(options)) < len(options):
        repeated_option = next(text for text in options if options.count(text) > 1)
        raise OvspecError(f"`select` has the option {repeated_option!r:.80} twice; leave one out.")
    if terminator is not None and not isinstance(terminator, str):
        raise OvspecError(f"`terminator` must be a string, not {type(terminator).__name__}.")
    if "" in options and not terminator:
        raise OvspecError(
            "`select` has the empty option '', sure to win without a terminator; set `terminator` to the "
            "text after each option."
        )


def score_texts(decoder: Decoder, texts: list[np.ndarray], scoring_start: int) -> list[Score]:
    """Score each of ``texts`` (n,) int64 from position ``scoring_start`` on, after at least one shared token.

    The shared tokens are prefilled once, then all texts in a single forward pass, or in several for many texts.
    ``decoder`` has a single row before and after; after a single pass, this row has the best text.
    """
    scores: list[Score] = []
    try:
        for text_group in group_texts_by_inference(texts, scoring_start):
            unseen_tokens = catch_up(decoder, 0, Sequence(texts[0][:scoring_start]))
            if len(unseen_tokens) > PREFILL_THRESHOLD:
                decoder.feed([unseen_tokens[:-1]], [0])
                unseen_tokens = unseen_tokens[-1:]
            if len(text_group) > 1:
                decoder.reorder([0] * len(text_group))
            fed_tokens = [np.concatenate((unseen_tokens, text[scoring_start:-1])) for text in text_group]
            logits = decoder.feed(fed_tokens, [len(text) - scoring_start for text in text_group])
            group_scores = [
                score_tokens(row_logits, text[scoring_start:])
                for row_logits, text in zip(logits, text_group, strict=True)
            ]
            best_row = max(range(len(text_group)), key=lambda text_row: group_scores[text_row].logprob)
            scores += group_scores
            decoder.reorder([best_row])
    finally:
        if len(decoder.rows) > 1:
            decoder.reorder([0])
    return scores


def score_tokens(logits: np.ndarray, tokens: np.ndarray) -> Score:
    """Score ``tokens`` (n,), predicted by ``logits`` (n, vocab)."""
    logprobs = [float(log_softmax(token_logits)[token]) for token_logits, token in zip(logits, tokens, strict=True)]
    return Score(math.fsum(logprobs), tokens.tolist(), logprobs)


def group_texts_by_inference(texts: list[np.ndarray], scoring_start: int) -> Iterator[list[np.ndarray]]:
    """Yield groups of ``texts``, each for a single forward pass, with logits from ``scoring_start`` on."""
    text_group: list[np.ndarray] = []
    for text in texts:
        if text_group and (
            len(text_group) == MAX_TEXTS_PER_INFERENCE
            or sum(map(len, [*text_group, text])) - scoring_start * (len(text_group) + 1) > MAX_LOGITS_PER_INFERENCE
        ):
            yield text_group
            text_group = []
        text_group.append(text)
    yield text_group


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a text: exp of ``nats``, the mean negative log-probability of ``scored`` tokens.

    ``context``: tokens per window. ``seconds``: duration of the measurement.
    """

    perplexity: float
    nats: float
    scored: int
    context: int
    seconds: float


def overlapping_windows(token_count: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, first scored position) of windows overlapping by half.

    Every token except the first is scored once, after at least ``context // 2`` tokens unless in the first window.
    """
    window_start = 0
    window_end = min(context, token_count)
    yield window_start, window_end, 1
    while window_end < token_count:
        window_start += max(context // 2, 1)
        first_scored = window_end
        window_end = min(window_start + context, token_count)
        yield window_start, window_end, first_scored


def compute_predicting_logits(
    decoder: Decoder,
    tokens: np.ndarray,
    context: int,
    max_chunk_tokens: Callable[[], int] = lambda: LOGITS_CHUNK_TOKENS,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (position of a token, logits (n, vocab) for predicting this and the following tokens).

    ``max_chunk_tokens``: returns the maximum of n.
    """
    for window_start, window_end, position in overlapping_windows(len(tokens), context):
        decoder.reset(1)
        if position - 1 > window_start:
            decoder.feed([tokens[window_start : position - 1]], [0])
        while position < window_end:
            token_chunk = tokens[position - 1 : min(position - 1 + max_chunk_tokens(), window_end - 1)]
            yield position, decoder.feed([token_chunk], [len(token_chunk)])[0]
            position += len(token_chunk)


def check_perplexity_length(tokens: np.ndarray, context: int) -> None:
    if context < 2:
        raise OvspecError(f"`context` is {context}; it must be at least 2 to predict a token.")
    if len(tokens) < 2:
        raise OvspecError("The text has fewer than two tokens; perplexity needs at least two.")


def measure_perplexity(decoder: Decoder, tokens: np.ndarray, context: int) -> Perplexity:
    """Measure the perplexity of ``tokens`` (n,) int64 in windows of ``context`` tokens; both at least two."""
    check_perplexity_length(tokens, context)
    start_time = time.perf_counter()
    total_nats = 0.0
    scored_count = 0
    for position, logits in compute_predicting_logits(decoder, tokens, context):
        next_tokens = tokens[position : position + len(logits)]
        total_nats -= float(log_softmax(logits)[np.arange(len(next_tokens)), next_tokens].sum())
        scored_count += len(next_tokens)
    mean_nats = total_nats / scored_count
    return Perplexity(
        math.exp(min(mean_nats, 700.0)), mean_nats, scored_count, context, time.perf_counter() - start_time
    )
