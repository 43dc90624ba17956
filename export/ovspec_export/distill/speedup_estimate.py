"""An estimate of the speedup on this machine, from acceptance and the times of forward passes, without a benchmark."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

import ovspec
from ovspec.ir.compile import MODEL_FILE
from ovspec_export.channel import report_progress

MAX_PROPOSED = 3  # proposed tokens
CONTEXT_TOKENS, TIMED_INFERENCES = 128, 7  # tokens of context, and forward passes per width


def measure_costs(model: str) -> None:
    """Report the time of a forward pass over 1, 2, … tokens, in seconds; a job."""
    lm = ovspec.load(model, "none", cache_memory=0)
    decoders = lm.runtime.decoder_pool.acquire()
    text_ids = np.random.default_rng(0).integers(0, lm.target.ir.logits_width, CONTEXT_TOKENS)
    decoders.reset(1)
    decoders.target.feed([text_ids], [1])
    timing_rounds = list[list[float]]()
    for _ in range(TIMED_INFERENCES + 1):  # in turns, because a machine's speed drifts
        moments = [time.perf_counter()]
        for width in range(1, MAX_PROPOSED + 2):
            decoders.target.truncate(0, CONTEXT_TOKENS)
            decoders.target.feed([text_ids[:width]], [width])
            moments.append(time.perf_counter())
        timing_rounds.append([end - begin for begin, end in pairwise(moments)])
    timing_rounds = timing_rounds[1:]  # the first pass of a width takes longer
    plain_seconds = median(round_seconds[0] for round_seconds in timing_rounds)
    report_progress(
        costs=[plain_seconds * median(turn[k] / turn[0] for turn in timing_rounds) for k in range(MAX_PROPOSED + 1)]
    )


def estimate_speedup(mean_accepted: Sequence[float], costs: Sequence[float], step_share: float) -> float:
    """Return the speedup of a draft over plain decoding, with the best fixed lookahead.

    A wider forward pass counts as at least as slow, so only accepted tokens can gain.

    Args:
        mean_accepted: mean number of accepted tokens if 1, 2, … are proposed.
        costs: seconds of a forward pass of the target over 1, 2, … tokens.
        step_share: time of a draft step, as a share of the first.
    """
    plain_seconds = costs[0]
    accepted_and_costs = zip(mean_accepted, np.maximum.accumulate(costs).tolist()[1:], strict=False)
    return max(
        [
            1.0,
            *(
                (1 + a) * plain_seconds / (cost + k * step_share * plain_seconds)
                for k, (a, cost) in enumerate(accepted_and_costs, 1)
            ),
        ]
    )


def estimate_step_share(target_folder: Path, weight_count: float) -> float:
    """Return the time of a draft step, relative to a forward pass of the target, for ``weight_count`` int8 weights.

    For both, reading the weights takes most of the time.
    """
    return weight_count / (target_folder / MODEL_FILE).with_suffix(".bin").stat().st_size
