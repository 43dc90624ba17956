"""Compare speculative with plain decoding: the speed-up, and the first difference between texts.

The definition of the speed-up: both modes generate the same text in turns, after a warm-up, and each turn begins with
another mode, because a machine's speed drifts. The speed-up is the ratio in the median turn, so the times printed with
it were really measured together. A gain is claimed only if speculation saved enough rounds to cause it; a loss is
always shown.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ovspec.api.model import LanguageModel
from ovspec.engine.prompts import Prompt
from ovspec.engine.results import Result, Stats

Mode = TypeVar("Mode")
ResultPair = tuple[Result, Result]  # (plain, speculative)
MIN_TURNS = 4
MAX_TURNS = 16
TIMING_SECONDS = 5.0
NOISE_FACTOR = 2.0  # a gain above this multiple of the saved rounds comes from the machine, not from speculation


def iterate_turns(seconds: float = TIMING_SECONDS) -> Iterator[int]:
    """Yield 0, 1, ... until the turns have taken ``seconds``; their number is even, to balance the modes' order."""
    start_time = time.perf_counter()
    for turn in range(MAX_TURNS):
        if turn >= MIN_TURNS and turn % 2 == 0 and time.perf_counter() - start_time > seconds:
            return
        yield turn


def rotate_modes(modes: Sequence[Mode], turn: int) -> list[Mode]:
    """Return ``modes``, starting with another mode each turn."""
    first_index = turn % len(modes)
    return [*modes[first_index:], *modes[:first_index]]


@dataclass(frozen=True)
class Speedup:
    """The speed-up of speculative over plain decoding of the same texts.

    plain_ms, speculative_ms: milliseconds per token in the median turn, without and with speculation.
    ratios: plain over speculative time of every turn, ascending.
    tokens_per_round: with speculation, infinite if all tokens were forced; 1 without.
    """

    plain_ms: float
    speculative_ms: float
    ratios: tuple[float, ...]
    tokens_per_round: float

    @property
    def ratio(self) -> float:
        """Plain over speculative time in the median turn."""
        return self.plain_ms / self.speculative_ms

    @property
    def saves_rounds(self) -> bool:
        """Whether rounds were saved: tokens per round are printed as more than 1.00."""
        return round(self.tokens_per_round, 2) > 1

    @property
    def is_explained(self) -> bool:
        """Whether saved rounds explain the gain: t tokens per round save at most a factor of t."""
        return self.saves_rounds and self.ratio - 1 <= NOISE_FACTOR * (self.tokens_per_round - 1)

    @property
    def claimed_ratio(self) -> float | None:
        """The ratio; None for a gain not explained by speculation."""
        return self.ratio if self.is_explained or self.ratio < 1 else None

    @property
    def is_clear(self) -> bool:
        """Whether three quarters of the turns were faster with speculation, and saved rounds explain the gain."""
        return self.is_explained and self.ratios[len(self.ratios) // 4] > 1

    def describe_gain(self, proposed: int, accepted: int, last_proposed: int | None = None) -> str:
        """Return the effect of speculation in a sentence; ``proposed`` and ``accepted`` are its tokens in all turns.

        last_proposed: for turns on a single text, the number of proposed tokens in the last turn.
        """
        turn_count = len(self.ratios)
        ratio_range = f"{self.ratios[0]:.2f} to {self.ratios[-1]:.2f}, {turn_count} turn{'s' * (turn_count > 1)}"
        loss_clause = f"; {self.ratio:.2f} of plain speed ({ratio_range})"
        if self.is_clear:
            return f"speed-up {self.ratio:.2f} ({ratio_range})"
        if self.ratio >= 1 and self.saves_rounds:
            noise_clause = "" if self.is_explained else f", noise at {self.tokens_per_round:.2f} tokens per round"
            return f"no clear speed-up: {self.ratio:.2f} ({ratio_range}){noise_clause}"
        if last_proposed == 0:  # any difference isn't the cost of drafting
            cause = "nothing was proposed" + " in the last turn" * (proposed > 0)
            return f"no speed-up: drafting doesn't pay for this text ({cause})"
        if self.is_explained:
            return f"no speed-up: drafting costs more than it brings here{loss_clause}"
        cause = "nothing was proposed"
        if proposed:
            cause = f"{accepted} of {proposed} proposed tokens accepted in all turns"
        is_slower = self.ratios[-1 - turn_count // 4] < 1
        return f"no speed-up: drafting doesn't pay for this model here ({cause}){loss_clause * is_slower}"


def compute_speedup(plain_ms: Sequence[float], speculative_ms: Sequence[float], stats: Sequence[Stats]) -> Speedup:
    """Return the speed-up from the milliseconds per token of each turn; ``stats``: of all speculative texts."""
    turns = sorted(zip(plain_ms, speculative_ms, strict=True), key=lambda turn: turn[0] / turn[1])
    median_turn = turns[(len(turns) - 1) // 2]
    token_count = sum(text_stats.generated_tokens for text_stats in stats)
    round_count = sum(text_stats.rounds for text_stats in stats)
    tokens_per_round = token_count / round_count if round_count else math.inf
    return Speedup(*median_turn, tuple(plain / speculative for plain, speculative in turns), tokens_per_round)


def compare_result_times(plain_results: Sequence[Result], speculative_results: Sequence[Result]) -> Speedup:
    """Return the speed-up of texts generated in turns.

    If a text took a single round (a single token, or all forced), whole texts are compared, including their prefill.
    """
    has_rounds = all(result.stats.tpot_ms for result in (*plain_results, *speculative_results))

    def ms_per_token(result: Result) -> float:
        stats = result.stats
        if has_rounds:
            return stats.tpot_ms
        token_count = max(stats.generated_tokens, 1)
        return (stats.ttft_ms + stats.tpot_ms * (token_count - 1)) / token_count

    plain_ms = list(map(ms_per_token, plain_results))
    speculative_ms = list(map(ms_per_token, speculative_results))
    return compute_speedup(plain_ms, speculative_ms, [result.stats for result in speculative_results])


# ---------------------------------------------------------------- equality


@dataclass(frozen=True)
class Divergence:
    """The first difference between two texts.

    after: number of common tokens before it.
    plain, other: the next token id of each text; None if the text ends there.
    gap: distance between the target's logits of these two tokens.
    top2_gap: distance between the target's two largest logits. Both gaps are None if they can't be computed.
    """

    after: int
    plain: int | None
    other: int | None
    gap: float | None = None
    top2_gap: float | None = None

    def describe(self, lm: LanguageModel) -> str:
        """Return the difference in a sentence."""

        def describe_token(token: int | None) -> str:
            return "the end" if token is None else f"{lm.tokenizer.decode([token])!r} (id {token})"

        sentence = (
            f"the texts differ after {self.after} token{'s' * (self.after != 1)}: plain decoding continues with "
            f"{describe_token(self.plain)}, speculation with {describe_token(self.other)}"
        )
        if self.gap is not None:
            sentence += f"; their logits are {self.gap:.4f} apart"
        return sentence


def find_divergence(
    lm: LanguageModel, prompt: Prompt, plain_ids: list[int], other_ids: list[int], compute_gaps: bool = True
) -> Divergence | None:
    """Return the first difference between two continuations (token ids) of ``prompt``; None if they are equal.

    ``compute_gaps``: compute the gaps, with a forward pass; impossible for a healed prompt.
    """
    if plain_ids == other_ids:
        return None
    id_pairs = enumerate(zip(plain_ids, other_ids, strict=False))
    shared_count = next((index for index, (a, b) in id_pairs if a != b), min(len(plain_ids), len(other_ids)))
    plain_token, other_token = (
        token_ids[shared_count] if shared_count < len(token_ids) else None for token_ids in (plain_ids, other_ids)
    )
    if not compute_gaps:
        return Divergence(shared_count, plain_token, other_token)
    next_logits = lm.next_logits([*lm.encode(prompt).tolist(), *plain_ids[:shared_count]])
    logit_gap = None
    if plain_token is not None and other_token is not None:
        logit_gap = abs(float(next_logits[plain_token] - next_logits[other_token]))
    second_logit, best_logit = np.partition(next_logits, -2)[-2:]
    return Divergence(shared_count, plain_token, other_token, logit_gap, float(best_logit - second_logit))


# ---------------------------------------------------------------- both


@dataclass(frozen=True)
class Comparison:
    """Plain and speculative decoding of a prompt, over several turns.

    speedup, speedup_sentence: the speed-up, and its sentence.
    divergence, equality_sentence: the first difference between texts, None if all are equal, and its sentence.
    last_pair: the texts of the last turn.
    shown_pair: the first differing texts, or else the texts of the last turn.
    """

    speedup: Speedup
    speedup_sentence: str
    divergence: Divergence | None
    equality_sentence: str
    last_pair: ResultPair
    shown_pair: ResultPair


def compare_turns(
    lm: LanguageModel, prompt: Prompt, first_pair: ResultPair, turns: Sequence[ResultPair], compute_gaps: bool = True
) -> Comparison:
    """Compare the texts of all turns; ``first_pair`` wasn't timed. ``compute_gaps``: as for ``find_divergence``."""
    speedup = compare_result_times(*zip(*turns, strict=True))
    proposed_tokens = sum(speculative.stats.proposed for _, speculative in turns)
    accepted_tokens = sum(speculative.stats.accepted for _, speculative in turns)
    last_pair = turns[-1]
    speedup_sentence = speedup.describe_gain(proposed_tokens, accepted_tokens, last_pair[1].stats.proposed)
    pairs = (first_pair, *turns)
    shown_pair = next((pair for pair in pairs if pair[0].token_ids != pair[1].token_ids), last_pair)
    plain_result, speculative = shown_pair
    divergence = find_divergence(lm, prompt, plain_result.token_ids, speculative.token_ids, compute_gaps)
    token_count = len(plain_result.token_ids)
    equality_sentence = f"both texts are identical: {token_count} token{'s' * (token_count != 1)}"
    if divergence:
        equality_sentence = divergence.describe(lm)
    return Comparison(speedup, speedup_sentence, divergence, equality_sentence, last_pair, shown_pair)
