"""Compare speculation with plain decoding: how much faster it is, and where two texts differ.

There is one definition of a speed-up. Both ways generate the same text in turns, warm, and each turn begins with
another one, because a machine's speed drifts while it is measured. The speed-up is that of the median turn, so the
times printed beside it were really measured one after the other. A gain is claimed only if speculation saved enough
rounds to have caused it; a loss is always shown.
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

T = TypeVar("T")
ResultPair = tuple[Result, Result]  # (plain, speculative)
LEAST_TURNS, MOST_TURNS, SECONDS = 4, 16, 5.0
NOISE = 2.0  # a gain of more than this many times the saved rounds is the machine's, not speculation's


def turns_within(seconds: float = SECONDS) -> Iterator[int]:
    """Yield 0, 1, ... until the turns have taken ``seconds``: an even number, so that each way begins as often."""
    began = time.perf_counter()
    for turn in range(MOST_TURNS):
        if turn >= LEAST_TURNS and turn % 2 == 0 and time.perf_counter() - began > seconds:
            return
        yield turn


def rotate_modes(ways: Sequence[T], turn: int) -> list[T]:
    """Return ``ways`` beginning with another one each turn."""
    first = turn % len(ways)
    return [*ways[first:], *ways[:first]]


@dataclass(frozen=True)
class Speedup:
    """How much faster speculation is than plain decoding of the same texts.

    plain_ms, ms: milliseconds per token in the median turn, without and with speculation.
    ratios: plain over speculative time of every turn, ascending.
    tokens_per_round: with speculation, infinite if all tokens were forced; 1 without.
    """

    plain_ms: float
    ms: float
    ratios: tuple[float, ...]
    tokens_per_round: float

    @property
    def ratio(self) -> float:
        """Plain over speculative time in the median turn."""
        return self.plain_ms / self.ms

    @property
    def saves(self) -> bool:
        """Whether rounds were saved: more tokens per round than what is printed as 1.00."""
        return round(self.tokens_per_round, 2) > 1

    @property
    def caused(self) -> bool:
        """Whether saved rounds can have caused the gain: t tokens per round save at most a factor of t."""
        return self.saves and self.ratio - 1 <= NOISE * (self.tokens_per_round - 1)

    @property
    def claimed_ratio(self) -> float | None:
        """The ratio; None if it is a gain that speculation can't have caused."""
        return self.ratio if self.caused or self.ratio < 1 else None

    @property
    def is_clear(self) -> bool:
        """Whether three quarters of the turns were faster with speculation, and saved rounds can be the reason."""
        return self.caused and self.ratios[len(self.ratios) // 4] > 1

    def describe_gain(self, proposed: int, accepted: int, last_proposed: int | None = None) -> str:
        """Return what speculation brings, in a sentence; ``proposed`` and ``accepted`` are its tokens in all turns.

        last_proposed: of one text in turns, the tokens that were proposed in the last turn.
        """
        turns = len(self.ratios)
        spread = f"{self.ratios[0]:.2f} to {self.ratios[-1]:.2f}, {turns} turn{'s' * (turns > 1)}"
        loss = f"; {self.ratio:.2f} of plain speed ({spread})"
        if self.is_clear:
            return f"speed-up {self.ratio:.2f} ({spread})"
        if self.ratio >= 1 and self.saves:
            why = "" if self.caused else f", noise at {self.tokens_per_round:.2f} tokens per round"
            return f"no clear speed-up: {self.ratio:.2f} ({spread}){why}"
        if last_proposed == 0:  # a difference isn't what drafting costs
            why = "nothing was proposed" + " in the last turn" * (proposed > 0)
            return f"no speed-up: drafting doesn't pay for this text ({why})"
        if self.caused:
            return f"no speed-up: drafting costs more than it brings here{loss}"
        why = f"{accepted} of {proposed} proposed tokens accepted in all turns" if proposed else "nothing was proposed"
        slower = self.ratios[-1 - turns // 4] < 1
        return f"no speed-up: drafting doesn't pay for this model here ({why}){loss if slower else ''}"


def compute_speedup(plain_ms: Sequence[float], ms: Sequence[float], stats: Sequence[Stats]) -> Speedup:
    """Return the speed-up of turns from each one's milliseconds per token; ``stats``: of all speculative texts."""
    turns = sorted(zip(plain_ms, ms, strict=True), key=lambda turn: turn[0] / turn[1])
    median = turns[(len(turns) - 1) // 2]
    tokens, rounds = sum(s.generated_tokens for s in stats), sum(s.rounds for s in stats)
    return Speedup(*median, tuple(plain / other for plain, other in turns), tokens / rounds if rounds else math.inf)


def compare_result_times(plain: Sequence[Result], other: Sequence[Result]) -> Speedup:
    """Return the speed-up of texts that were generated in turns.

    If a text came in one round, of one token or all forced, whole texts are compared, with the time of their prompts.
    """

    def ms_per_token(stats: Stats) -> float:
        count = max(stats.generated_tokens, 1)
        return (stats.ttft_ms + stats.tpot_ms * (count - 1)) / count if whole else stats.tpot_ms

    whole = not all(result.stats.tpot_ms for result in (*plain, *other))
    times = [[ms_per_token(result.stats) for result in results] for results in (plain, other)]
    return compute_speedup(times[0], times[1], [result.stats for result in other])


# ---------------------------------------------------------------- equality


@dataclass(frozen=True)
class Divergence:
    """Where two texts differ.

    after: generated tokens that both share.
    plain, other: the next token id of each; None if the text ends there.
    gap: distance between the target's logits of these two tokens.
    top2_gap: distance between its two largest logits. Both gaps are None if they can't be computed.
    """

    after: int
    plain: int | None
    other: int | None
    gap: float | None = None
    top2_gap: float | None = None

    def sentence(self, lm: LanguageModel) -> str:
        """Return this in words."""

        def named(token: int | None) -> str:
            return "the end" if token is None else f"{lm.tokenizer.decode([token])!r} (id {token})"

        gap = "" if self.gap is None else f"; their logits are {self.gap:.4f} apart"
        plural = "s" * (self.after != 1)
        return (
            f"the texts differ after {self.after} token{plural}: plain decoding continues with {named(self.plain)}, "
            f"speculation with {named(self.other)}{gap}"
        )


def find_divergence(
    lm: LanguageModel, prompt: Prompt, plain: list[int], other: list[int], logits: bool = True
) -> Divergence | None:
    """Return where two continuations (token ids) of ``prompt`` differ; None if they are equal.

    ``logits``: compute the gaps, which takes one forward pass; not possible for a healed prompt.
    """
    if plain == other:
        return None
    pairs = enumerate(zip(plain, other, strict=False))
    after = next((place for place, (a, b) in pairs if a != b), min(len(plain), len(other)))
    first, second = (tokens[after] if after < len(tokens) else None for tokens in (plain, other))
    if not logits:
        return Divergence(after, first, second)
    found = lm.next_logits([*lm.encode(prompt).tolist(), *plain[:after]])
    gap = None if first is None or second is None else abs(float(found[first] - found[second]))
    runner_up, best = np.partition(found, -2)[-2:]
    return Divergence(after, first, second, gap, float(best - runner_up))


# ---------------------------------------------------------------- both


@dataclass(frozen=True)
class Comparison:
    """Plain decoding and speculation of one prompt, over several turns.

    speedup, verdict: how much faster speculation is, and that in a sentence.
    parting, equality: where the first texts that differ part, None if all are equal, and that in a sentence.
    last: the texts of the last turn. shown: the texts that differ, or else those of the last turn.
    """

    speedup: Speedup
    verdict: str
    divergence: Divergence | None
    equality: str
    last_pair: ResultPair
    shown_pair: ResultPair


def compare_turns(
    lm: LanguageModel, prompt: Prompt, first: ResultPair, turns: Sequence[ResultPair], logits: bool = True
) -> Comparison:
    """Compare the texts of all turns; those in ``first`` weren't timed. ``logits``: as for ``find_divergence``."""
    speedup = compare_result_times(*zip(*turns, strict=True))
    proposed, accepted = (sum(getattr(turn[1].stats, name) for turn in turns) for name in ("proposed", "accepted"))
    shown = next((pair for pair in (first, *turns) if pair[0].token_ids != pair[1].token_ids), turns[-1])
    where = find_divergence(lm, prompt, shown[0].token_ids, shown[1].token_ids, logits)
    count = len(shown[0].token_ids)
    equality = where.sentence(lm) if where else f"both texts have the same {count} token{'s' * (count != 1)}"
    verdict = speedup.describe_gain(proposed, accepted, turns[-1][1].stats.proposed)
    return Comparison(speedup, verdict, where, equality, turns[-1], shown)
