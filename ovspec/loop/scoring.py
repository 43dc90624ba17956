"""Scoring: how likely the model finds given continuations of a text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ovspec.decoders.base import Decoder
from ovspec.decoders.prefill import LONG
from ovspec.decoders.sequence import Sequence, catch_up
from ovspec.errors import OvspecError
from ovspec.sampling.logprobs import log_softmax

# Maximum texts and logits per inference: a stateful cache is copied for each text; logits are as wide as a vocabulary.
MOST_TEXTS, MOST_LOGITS = 32, 256


@dataclass(frozen=True)
class Score:
    """A text's score: ``logprob`` is the sum of ``logprobs``, its tokens' log-probabilities in the model, in nats."""

    logprob: float
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Selection:
    """The selected option, its index among the options, and the total log-probability of each option."""

    text: str
    index: int
    logprobs: list[float]


def check_choices(options: Any, terminator: Any) -> None:
    """Raise OvspecError for ``options`` among which a session can't select."""
    if not isinstance(options, (list, tuple)) or not options or not all(isinstance(o, str) for o in options):
        raise OvspecError("select needs a list of at least one string.")
    if len(set(options)) < len(options):
        raise OvspecError("select needs options that are all different.")
    if terminator is not None and not isinstance(terminator, str):
        raise OvspecError(f"terminator must be a string, not {type(terminator).__name__}.")
    if "" in options and not terminator:
        raise OvspecError("An empty option always wins; give a terminator, the text that follows it.")


def score_texts(decoder: Decoder, texts: list[np.ndarray], begin: int) -> list[Score]:
    """Score each of ``texts`` (n,) int64 from position ``begin`` on; they share all tokens before it (at least one).

    The shared tokens are read once, then all texts in one inference, or in several if there are many. ``decoder`` has a
    single row before and after. If one inference was enough, that row then holds the text with the highest score.
    """
    scores: list[Score] = []
    best = 0
    try:
        for group in groups(texts, begin):
            unseen = catch_up(decoder, 0, Sequence(texts[0][:begin]))
            if len(unseen) > LONG:
                decoder.feed([unseen[:-1]], [0])
                unseen = unseen[-1:]
            if len(group) > 1:
                decoder.reorder([0] * len(group))
            fed = [np.concatenate((unseen, text[begin:-1])) for text in group]
            logits = decoder.feed(fed, [len(text) - begin for text in group])
            found = [score(*each) for each in zip(logits, (text[begin:] for text in group), strict=True)]
            best = max(range(len(group)), key=lambda row: found[row].logprob)
            scores += found
            decoder.reorder([best])
    finally:
        if len(decoder.rows) > 1:
            decoder.reorder([0])
    return scores


def score(logits: np.ndarray, tokens: np.ndarray) -> Score:
    """Return the score of ``tokens`` (n,), each of which is predicted by its row of ``logits`` (n, vocab)."""
    logprobs = [float(log_softmax(row)[token]) for row, token in zip(logits, tokens, strict=True)]
    return Score(math.fsum(logprobs), tokens.tolist(), logprobs)


def groups(texts: list[np.ndarray], begin: int) -> Iterator[list[np.ndarray]]:
    """Yield groups of texts, each to be scored in one inference."""
    group: list[np.ndarray] = []
    for text in texts:
        if group and (
            len(group) == MOST_TEXTS or sum(map(len, [*group, text])) - begin * (len(group) + 1) > MOST_LOGITS
        ):
            yield group
            group = []
        group.append(text)
    yield group
