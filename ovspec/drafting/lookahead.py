"""The lookahead: how many tokens to propose, given what a token costs and how likely it is to be accepted.

Times are milliseconds of wall clock. A round of k proposed tokens costs k draft steps and an inference of k + 1 tokens,
and yields 1 + a1 + a1 a2 + ... tokens on average, where ai is the conditional acceptance of the i-th. The rule is that
of a renewal process: propose one more token while its chance of being accepted, times the current cost of a token,
exceeds what it costs. So nothing is proposed if nothing pays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ovspec.drafting.costs import FIRST_LOSS, WIDEST, Costs, Record
from ovspec.drafting.proposal import NOTHING, Proposal, shorten
from ovspec.sampling.samplers import Guess

# Maximum number of tokens proposed for a row in a round, unless the lookahead is fixed.
MOST = 16
MOST_CATCH_UP = 0.5  # rounds that reading text which the draft has missed takes from the allowance
KEPT = 4  # rounds for which a new width is assumed to be kept
SLOWLY = 0.998
PROMISING = 1.5
MISSED = 4  # a step of the draft with more tokens than this reads text that it has missed
POOR = 0.3  # with a fixed lookahead, a lookup with a lower acceptance is passed over


@dataclass(frozen=True)
class RoundOutcome:
    """What a round proposed, how much of it was accepted, and what it cost.

    judged: each row's proposal, and how many of its tokens were accepted.
    width: tokens that the inference computed, summed over all rows.
    forced: how many of these were forced.
    prefilled: whether other tokens were also fed, such as a prompt, so that the times say nothing about proposals.
    drafted, verified: seconds spent on drafting and on verifying.
    """

    judged: list[tuple[Proposal, int]]
    width: int
    forced: int
    prefilled: bool
    drafted: float
    verified: float


class Lookahead:
    """Decides how many tokens a round proposes: before, during and after drafting.

    Args:
        fixed: number of tokens to propose in every round; None for as many as pay.
        target: the cost of verifying.
        draft: the cost of a step of the draft model.
        narrowest: the fewest tokens of a row that the target computes, see ``Decoder``. With 2, one proposed token
            costs nothing.
    """

    def __init__(
        self,
        fixed: int | None = None,
        target: Costs | None = None,
        draft: Costs | None = None,
        narrowest: int = 1,
    ) -> None:
        self.fixed, self._narrowest = fixed, narrowest
        self.most = MOST if fixed is None else fixed
        self._target, self._draft = target or Costs(), draft or Costs()
        self._records: dict[str, Record] = {}
        self._tokens = self._ms = 0.0  # sums over recent rounds
        # Of the draft's time in this round: what was more than expected, and what it spent on text it had missed.
        self._scatter_ms = self._catch_up_ms = 0.0
        self._asked: set[str] = set()  # drafters asked in this round: that takes time even if they propose nothing
        self._before: set[str] = set()  # drafters asked in the round before

    @property
    def costs(self) -> tuple[Costs, Costs]:
        """The costs of the target and of the draft."""
        return self._target, self._draft

    # ------------------------------------------------------------ asked by drafters

    def starts(self, source: str, unseen: int, remaining: Sequence[int]) -> bool:
        """Return whether a drafter that takes time should be asked in this round.

        Args:
            unseen: tokens it has to read first, summed over all rows.
            remaining: tokens left to generate, for each row.
        """
        if self.fixed is not None:
            return True
        if not self._target.settled:  # this round will measure plain decoding
            return False
        rows = sum(left > 0 for left in remaining)
        catch_up = self._draft(unseen) - self._draft(rows) if self._draft.known and unseen > 2 * rows else 0.0
        acceptance = self._record(source).acceptance
        worthwhile = self._expected(acceptance.mean, rows) * max(remaining) > catch_up
        # What reads much must be worth it; otherwise the allowance has to suffice for a trial.
        if self._affordable(source, rows, 0.0 if worthwhile else catch_up):
            self._asked.add(source)
            return True
        if not worthwhile:
            acceptance.doubt(SLOWLY)
        return False

    def going_on(self, source: str, rows: list[int], guesses: list[list[Guess]]) -> list[int]:
        """Return those of ``rows`` for which the draft model should take another step."""
        if self.fixed is not None or not rows:
            return rows
        record = self._record(source)
        acceptance = record.acceptance
        width = self._width([len(each) for each in guesses])
        price, mean = self._price(len(guesses)), acceptance.mean
        step = self._draft(len(rows)) / len(rows)
        most = min(WIDEST - width, 4)
        if most < 1:
            return []
        # For 1, 2, ... further steps: the tokens gained on average if all so far are accepted, and the cost.
        won = np.cumsum(mean ** np.arange(1, most + 1))
        amortised = self._verify_ms(KEPT)
        cost = step * np.arange(1, most + 1) + amortised[width + 1 : width + most + 1] - amortised[width]
        steps = max(len(each) for each in guesses) + np.arange(1, most + 1)
        narrow = self._narrowest * len(guesses)
        worst = steps * self._draft(len(rows)) + self._risk(narrow)[width + 1 : width + most + 1]
        won[worst > record.allowance.left * self._target(narrow)] = 0.0
        going = []
        for row in rows:
            chance = math.prod(acceptance.rate(guess.confidence) for guess in guesses[row])
            if bool((chance * price * won > cost).any()):
                going.append(row)
        return going

    def cut(self, proposal: Proposal, rows: int) -> Proposal:
        """Return as much of ``proposal``, which cost nothing, as is worth verifying."""
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
        """Return whether the drafter ``source`` is likely to do better than ``proposal``, which cost nothing."""
        own = self._record(proposal.source).acceptance
        if self.fixed is not None:
            poor = own.mean < min(POOR, self._record(source).acceptance.mean)
            if poor:
                own.fade(proposal)
            return poor
        if not self._affordable(source, rows, 0.0):
            return False
        return self._plain(rows) - self.gain(source, rows) < self._best_cut(proposal, rows)[1]

    def gain(self, source: str, rows: int) -> float:
        """Return the milliseconds per token that drafting with ``source`` saves; negative if it loses."""
        record = self._record(source)
        if record.rounds > 4:
            return self._plain(rows) - record.ms / record.tokens
        return self._expected(record.acceptance.mean, rows)

    # ------------------------------------------------------------ learning from rounds

    def note_draft(self, width: int, seconds: float) -> None:
        """Learn from a step of the draft model with ``width`` tokens."""
        if self.fixed is not None:
            return
        ms, known = seconds * 1e3, self._draft.known
        expected = self._draft.learn(width, ms)
        if width > MISSED:  # it has read a prompt or text it missed, which happens once
            expected = min(ms, self._draft(1)) if known else 0.0
            self._catch_up_ms += ms - expected
        else:
            self._scatter_ms += ms - expected

    def learn(self, outcome: RoundOutcome) -> None:
        """Learn from a finished round."""
        sources, self._asked = self._asked, set()
        for proposal, accepted in outcome.judged:
            if len(proposal.tokens):
                sources.add(proposal.source)
                self._record(proposal.source).acceptance.learn(proposal, accepted)
        rows, width, forced = len(outcome.judged), outcome.width, outcome.forced
        catch_up, scatter = self._catch_up_ms, self._scatter_ms
        self._catch_up_ms = self._scatter_ms = 0.0
        before, self._before = self._before, sources
        if self.fixed is not None:
            return
        if outcome.prefilled or width > WIDEST:
            self._target.last = 0
            return
        verify_ms, draft_ms = outcome.verified * 1e3, outcome.drafted * 1e3 - catch_up
        expected = self._target.learn(width, verify_ms)
        tokens = sum(accepted for _, accepted in outcome.judged) + rows
        self._tokens, self._ms = self._tokens * 0.95 + tokens + forced, self._ms * 0.95 + verify_ms + draft_ms
        # Forced tokens count neither as a drafter's gain nor as its cost.
        free = self._target(width) - self._target(width - forced)
        plain = self._plain(rows)
        for source in sources:
            self._record(source).learn(tokens, verify_ms + draft_ms - free)
        # Without scatter, which would look like losses and gains. A plain round after a wide one may take longer, too.
        lost = expected + draft_ms - scatter - free - tokens * plain + min(catch_up, MOST_CATCH_UP * rows * plain)
        at_fault = sources or before
        for source, record in self._records.items():
            record.allowance.learn(tokens / rows, lost / (rows * plain) if source in at_fault else 0.0)

    # ------------------------------------------------------------ internals

    def _record(self, source: str) -> Record:
        if source not in self._records:
            self._records[source] = Record()
        return self._records[source]

    def _affordable(self, source: str, rows: int, catch_up: float) -> bool:
        """Return whether the allowance suffices for a round with a step of the draft whose guesses are rejected."""
        width, narrow = max(self._narrowest, 2) * rows, self._narrowest * rows
        lost = float(self._risk(narrow)[width]) if width <= WIDEST else math.inf
        lost += self._draft.next(rows) if self._draft.known else 0.0
        plain = self._target(narrow)
        record = self._record(source)
        enough = min(FIRST_LOSS, lost / plain) + catch_up / plain
        if record.acceptance.mean * plain > PROMISING * lost:  # bad luck is more likely than a bad draft
            enough = catch_up / plain - FIRST_LOSS
        return record.allowance.left >= enough

    def _risk(self, narrow: int) -> np.ndarray:
        """Return the milliseconds that verifying loses by its width if everything is rejected.

        Plain decoding, with width ``narrow``, is what comes instead, or afterwards.
        """
        verify = self._verify_ms()
        return verify - verify[narrow] + self._target.change * (np.arange(WIDEST + 1) != narrow)

    def _verify_ms(self, rounds: int = 1) -> np.ndarray:
        """Return the milliseconds of the next inference of the target by its width, if it's kept for some rounds."""
        return self._target.ms + self._target.change / rounds * (np.arange(WIDEST + 1) != self._target.last)

    def _width(self, proposed: list[int]) -> int:
        """Return the tokens that the target computes for rows with this many proposed tokens each."""
        return sum([max(self._narrowest, 1 + count) for count in proposed])

    def _plain(self, rows: int) -> float:
        """Return the milliseconds per token of plain decoding."""
        return self._target(self._narrowest * rows) / rows

    def _expected(self, acceptance: float, rows: int) -> float:
        """Return ``gain`` if the conditional acceptance is ``acceptance`` and the best number of tokens is drafted."""
        steps = np.arange(1, min(MOST, WIDEST // rows - 1) + 1)
        if not len(steps):  # too many rows: even one proposed token each exceeds WIDEST
            return -math.inf
        cost = self._target.ms[rows * np.maximum(self._narrowest, steps + 1)]
        if self._draft.known:
            cost = cost + steps * self._draft(rows)
        won = rows * (1 + np.cumsum(acceptance**steps))
        return self._plain(rows) - float((cost / won).min())

    def _price(self, rows: int) -> float:
        """Return the current cost of a token in milliseconds, which is what an accepted token saves."""
        plain = self._plain(rows)
        return min(plain, self._ms / self._tokens) if self._tokens > 4 else plain

    def _best_cut(self, proposal: Proposal, rows: int) -> tuple[int, float]:
        """Return (number of tokens worth verifying, milliseconds that a token then costs)."""
        plain = self._plain(rows)
        if not self._target.settled:
            return 0, plain
        rates = self._record(proposal.source).acceptance.rates(proposal)
        others = self._narrowest * (rows - 1)
        most = min(len(rates), WIDEST - others - 1)
        if most < 1:
            return 0, plain
        widths = others + np.maximum(self._narrowest, np.arange(2, most + 2))
        amortised, narrow = self._verify_ms(KEPT), self._narrowest * rows
        cost = amortised[widths] - amortised[narrow]
        won = np.cumprod(rates[:most]).cumsum()
        saved = won * self._price(rows) - cost
        lost = self._risk(narrow)[widths] / self._target(narrow)
        left = self._record(proposal.source).allowance.left
        saved[lost > (max(left, lost[0]) if left >= FIRST_LOSS else left)] = 0.0
        best = int(saved.argmax())
        return (best + 1, float((plain + cost[best]) / (1 + won[best]))) if saved[best] > 0 else (0, plain)
