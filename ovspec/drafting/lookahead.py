"""How many tokens to propose: what a token costs, how likely it is to stand, and what that is worth.

Times are milliseconds of wall clock. A round of k proposed tokens costs k draft steps and an inference of k + 1 tokens,
and brings 1 + a1 + a1 a2 + ... tokens, where ai is the probability that the i-th stands if those before it do. The
rule is that of a renewal process: go on while a token that may be won, at the price that a token has now, is worth more
than what it costs. So nothing is proposed where nothing pays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ovspec.drafting.costs import FIRST_ACCEPTANCE, WIDEST, Costs, Record
from ovspec.drafting.proposal import NOTHING, Proposal, shorten
from ovspec.sampling.samplers import Guess

# Tokens proposed in a round at most, where the lookahead isn't fixed.
MOST = 16
SETTLED = 12  # rounds after which what they have cost tells more than acceptance does
EXPENSIVE = 2.0  # times plain decoding
MISSED = 4  # tokens in a step of the draft from which on it is reading what it has missed
POOR = 0.3  # acceptance with which a lookup is passed over where the lookahead is fixed


@dataclass(frozen=True)
class RoundOutcome:
    """What a round proposed, and what that brought and cost.

    judged: each row's proposal, and how many of its tokens stood.
    width: tokens of the inference, in all rows.
    forced: of these, committed without being chosen.
    prefilled: whether it read other tokens, too, so that its times say nothing about proposals.
    drafted, verified: seconds.
    """

    judged: list[tuple[Proposal, int]]
    width: int
    forced: int
    prefilled: bool
    drafted: float
    verified: float


class Lookahead:
    """Decides before, while and after drafting how many tokens a round proposes.

    Args:
        fixed: so many, always; None for as many as pay.
        target: what verifying costs.
        draft: what a step of the draft model costs.
    """

    def __init__(self, fixed: int | None = None, target: Costs | None = None, draft: Costs | None = None) -> None:
        self.fixed = fixed
        self.most = MOST if fixed is None else fixed
        self._target, self._draft = target or Costs(), draft or Costs()
        self._records: dict[str, Record] = {}
        self._tokens = self._ms = 0.0  # of all recent rounds
        self._catch_up_ms = 0.0  # of this round
        self._asked: set[str] = set()  # in this round; whether or not they had anything to propose, it took its time

    @property
    def costs(self) -> tuple[Costs, Costs]:
        """Of the target and of the draft."""
        return self._target, self._draft

    # ------------------------------------------------------------ asked by drafters

    def starts(self, source: str, unseen: int, remaining: Sequence[int]) -> bool:
        """Whether a drafter that costs something should be asked at all in this round.

        Args:
            unseen: tokens it has to read first, in all rows.
            remaining: tokens that are left to generate, for each row.
        """
        if self.fixed is not None:
            return True
        if not self._target.known:  # this round will tell what plain decoding costs
            return False
        record = self._record(source)
        if record.pause:
            record.pause -= 1
            return False
        rows = sum(left > 0 for left in remaining)
        plain = self._target(rows) / rows
        if record.loses(plain):
            # A few rounds may have been bad luck: unless they were expensive, acceptance has to say the same.
            sure = record.rounds > SETTLED or record.ms > EXPENSIVE * record.tokens * plain
            if sure or self._expected(record.acceptance.mean, rows) <= 0:
                record.take_a_pause()
                return False
        catch_up = self._draft(unseen) - self._draft(rows) if self._draft.known and unseen > 2 * rows else 0.0
        # After a pause it gets the benefit of the doubt that it had at first.
        gain = self._expected(max(record.acceptance.mean, FIRST_ACCEPTANCE), rows)
        if gain <= 0:
            record.take_a_pause()
        elif gain * max(remaining) > catch_up:  # otherwise there is too much to read for what is left to say
            self._asked.add(source)
            return True
        return False

    def going_on(self, source: str, rows: list[int], guesses: list[list[Guess]]) -> list[int]:
        """Those of ``rows`` for which the draft model should take another step."""
        if self.fixed is not None or not rows:
            return rows
        record = self._record(source)
        acceptance = record.acceptance
        width = len(guesses) + sum(map(len, guesses))
        price, mean = self._price(len(guesses)), acceptance.mean
        step = self._draft(len(rows)) / len(rows)
        most = min(WIDEST - width, 4)
        if most < 1:
            return []
        # Of 1, 2, ... further steps: tokens won if all so far stand, and what they cost.
        won = np.cumsum(mean ** np.arange(1, most + 1))
        cost = step * np.arange(1, most + 1) + self._target.ms[width + 1 : width + most + 1] - self._target.ms[width]
        going = []
        for row in rows:
            chance = math.prod(acceptance.rate(guess.confidence) for guess in guesses[row])
            if bool((chance * price * won > cost).any()):
                going.append(row)
        return going

    def cut(self, proposal: Proposal, rows: int) -> Proposal:
        """As much of a proposal that cost nothing as is worth verifying."""
        if not len(proposal.tokens):
            return NOTHING
        if self.fixed is not None:
            return shorten(proposal, self.fixed)
        length, _ = self._best_cut(proposal, rows)
        if not length:
            self._record(proposal.source).acceptance.fade(proposal)
            return NOTHING
        return shorten(proposal, length)

    def prefers(self, source: str, proposal: Proposal, rows: int) -> bool:
        """Whether the model ``source`` is likely to do better than ``proposal``, which cost nothing."""
        own = self._record(proposal.source).acceptance
        if self.fixed is not None:
            poor = own.mean < min(POOR, self._record(source).acceptance.mean)
            if poor:
                own.fade(proposal)
            return poor
        if self._record(source).pause:
            return False
        return self._target(rows) / rows - self.gain(source, rows) < self._best_cut(proposal, rows)[1]

    def gain(self, source: str, rows: int) -> float:
        """Milliseconds that drafting with ``source`` saves for each token; below 0 where it loses."""
        record = self._record(source)
        if record.rounds > 4:
            return self._target(rows) / rows - record.ms / record.tokens
        return self._expected(record.acceptance.mean, rows)

    # ------------------------------------------------------------ told what happened

    def note_draft(self, width: int, seconds: float) -> None:
        """A step of the draft model, of ``width`` tokens."""
        if self.fixed is not None:
            return
        ms = seconds * 1e3
        if width > MISSED and self._draft.known:  # it has read a prompt, or what it missed, once and for all
            self._catch_up_ms += max(0.0, ms - self._draft(1))
        self._draft.learn(width, ms)

    def learn(self, outcome: RoundOutcome) -> None:
        """A round is over."""
        sources, self._asked = self._asked, set()
        for proposal, accepted in outcome.judged:
            if len(proposal.tokens):
                sources.add(proposal.source)
                self._record(proposal.source).acceptance.learn(proposal, accepted)
        rows, width, forced = len(outcome.judged), outcome.width, outcome.forced
        catch_up, self._catch_up_ms = self._catch_up_ms, 0.0
        if self.fixed is not None or outcome.prefilled or width > WIDEST:
            return
        verify_ms, draft_ms = outcome.verified * 1e3, outcome.drafted * 1e3 - catch_up
        self._target.learn(width, verify_ms)
        tokens = sum(accepted for _, accepted in outcome.judged) + rows
        self._tokens, self._ms = self._tokens * 0.95 + tokens + forced, self._ms * 0.95 + verify_ms + draft_ms
        # What was forced is no drafter's gain, nor is its cost a drafter's.
        ms = verify_ms + draft_ms - (self._target(width) - self._target(width - forced))
        for source in sources:
            self._record(source).learn(tokens, ms, self._target(rows) / rows)

    # ------------------------------------------------------------ inside

    def _record(self, source: str) -> Record:
        if source not in self._records:
            self._records[source] = Record()
        return self._records[source]

    def _expected(self, acceptance: float, rows: int) -> float:
        """The same where every token is accepted with the probability ``acceptance``, and the best number drafted."""
        steps = np.arange(1, min(MOST, WIDEST // rows - 1) + 1)
        if not len(steps):  # so many rows that no more is known of wider inferences
            return -math.inf
        cost = self._target.ms[rows * (steps + 1)]
        if self._draft.known:
            cost = cost + steps * self._draft(rows)
        won = rows * (1 + np.cumsum(acceptance**steps))
        return self._target(rows) / rows - float((cost / won).min())

    def _price(self, rows: int) -> float:
        """Milliseconds that a token costs now: what one that is won saves."""
        plain = self._target(rows) / rows
        return min(plain, self._ms / self._tokens) if self._tokens > 4 else plain

    def _best_cut(self, proposal: Proposal, rows: int) -> tuple[int, float]:
        """(tokens worth verifying, milliseconds that a token then costs)"""
        if not self._target.known:
            return len(proposal.tokens), 0.0
        rates = self._record(proposal.source).acceptance.rates(proposal)
        plain = self._target(rows) / rows
        most = min(len(rates), WIDEST - rows)
        if most < 1:
            return 0, plain
        cost = self._target.ms[rows + 1 : rows + most + 1] - self._target.ms[rows]
        won = np.cumprod(rates[:most]).cumsum()
        saved = won * self._price(rows) - cost
        best = int(saved.argmax())
        return (best + 1, float((plain + cost[best]) / (1 + won[best]))) if saved[best] > 0 else (0, plain)
