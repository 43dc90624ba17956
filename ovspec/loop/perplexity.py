"""Perplexity: how well a model predicts a text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ovspec.decoders.base import Decoder
from ovspec.errors import OvspecError
from ovspec.sampling.logprobs import log_softmax

DEFAULT_CONTEXT = 1024
CHUNK = 128  # positions whose logits are held at a time


@dataclass(frozen=True)
class Perplexity:
    """How well a text was predicted: exp of ``nats``, the mean negative log-probability of ``scored`` tokens."""

    perplexity: float
    nats: float
    scored: int
    context: int
    seconds: float


def windows(length: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, first scored position) of windows that overlap by half.

    Every token except the first is scored once, after at least ``context // 2`` tokens unless in the first window.
    """
    start, end = 0, min(context, length)
    yield start, end, 1
    while end < length:
        start, scored = start + max(context // 2, 1), end
        end = min(start + context, length)
        yield start, end, scored


def predictions(
    decoder: Decoder, tokens: np.ndarray, context: int, chunk: Callable[[], int] = lambda: CHUNK
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (position of a token, logits (n, vocab) that predict it and the n - 1 tokens after it), in order.

    ``chunk`` is asked before each inference for the most of them.
    """
    for start, end, scored in windows(len(tokens), context):
        decoder.reset(1)
        if scored - 1 > start:
            decoder.feed([tokens[start : scored - 1]], [0])
        while scored < end:
            fed = tokens[scored - 1 : min(scored - 1 + chunk(), end - 1)]
            yield scored, decoder.feed([fed], [len(fed)])[0]
            scored += len(fed)


def check_length(tokens: np.ndarray, context: int) -> None:
    if context < 2:
        raise OvspecError(f"A context of {context} tokens is too short to predict anything; take at least 2.")
    if len(tokens) < 2:
        raise OvspecError("The text has fewer than two tokens, so there is nothing to predict.")


def measure(decoder: Decoder, tokens: np.ndarray, context: int) -> Perplexity:
    """Measure the perplexity of ``tokens`` (n,) int64, read in windows of ``context`` tokens.

    Raises:
        OvspecError: ``context`` or the number of tokens is less than two.
    """
    check_length(tokens, context)
    began = time.perf_counter()
    total, scored = 0.0, 0
    for position, logits in predictions(decoder, tokens, context):
        wanted = tokens[position : position + len(logits)]
        total -= float(log_softmax(logits)[np.arange(len(wanted)), wanted].sum())
        scored += len(wanted)
    nats = total / scored
    return Perplexity(math.exp(min(nats, 700.0)), nats, scored, context, time.perf_counter() - began)
