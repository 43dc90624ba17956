"""The lookahead: how many tokens to propose, given what a token costs and how likely it is to be accepted.

Times are milliseconds of wall clock. A round of k proposed tokens costs k draft steps and an inference of k + 1 tokens,
and yields 1 + a1 + a1 a2 + ... tokens on average, where ai is the conditional acceptance of the i-th. The rule is that
of a renewal process: propose one more token while its chance of being accepted, times the current cost of a token,
exceeds what it costs. As acceptance is never known for sure, a drafter may also lose only so much: see ``Balance``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ovspec.drafting.costs import WIDEST, Costs
from ovspec.drafting.drafter_stats import FIRST_ACCEPTANCE, RECENT, RECENT_OF_MODELS, DrafterStats
from ovspec.drafting.proposal import NOTHING, Proposal, shorten
from ovspec.sampling.samplers import Guess

MOST = 16  # tokens proposed for a row in a round, at most, unless the lookahead is fixed
# Tokens of prompts that a step of the draft reads while other rows draft; the rows that read them get no proposal.
CATCHING_UP = 64
POOR = 0.3  # with a fixed lookahead, a lookup with a lower acceptance is passed over
AHEAD = 4  # further steps of the draft that are looked at together: the first alone may not be worth its time
# A draft proposes in most rounds, so a new width stays for some: the first has to earn this part of the change's cost.
# Lookup proposes here and there, so it has to earn all of it.
ROUND_SHARE = 0.5
FEW = 4  # rounds or tokens, up to which a mean over them isn't trusted


@dataclass(frozen=True)
class RoundOutcome:
    """What a round proposed, how much of it was accepted, and what it cost."""

    judged: list[tuple[Proposal, int]]  # each row's proposal, and how many of its tokens were accepted
    width: int  # tokens that the inference computed for all rows, including those that filled it up
    forced: int  # how many of these were forced
    prefilled: bool  # whether others, such as a prompt, were also fed: then the times say nothing about proposals
    drafted: float  # seconds spent on drafting
    verified: float  # seconds spent on verifying


class Lookahead:
    """Decides how many tokens a round proposes: before, during and after drafting.

    Args:
        fixed: number of tokens to propose in every round; None for as many as pay.
        target: the cost of verifying.
        draft: the cost of a step of the draft model.
    """

    def __init__(
        self,
        fixed: int | None = None,
        target: Costs | None = None,
        draft: Costs | None = None,
    ) -> None:
        self.fixed = fixed
        self.most = MOST if fixed is None else fixed
        self.target, self.draft = target or Costs(), draft or Costs()
        self.begin()
        self._drafter_stats: dict[str, DrafterStats] = {}
        self._together = DrafterStats()  # of all rounds and drafters, without acceptance
        self._steps_ms: float | None = None  # usual time of the draft's steps in this round
        self._asked: set[str] = set()  # drafters asked in this round: that takes time even if they propose nothing

    def begin(self, most_ms: float = math.inf, paced: bool = False) -> None:
        """Begin a round, to which proposals may add ``most_ms``; ``paced``: no row may wait long while others read."""
        self.most_ms, self.paced = most_ms, paced
        self._decided_tokens = self._decided_rows = 0  # tokens and rows of this round that ``cut`` has decided on

    # ------------------------------------------------------------ asked by drafters

    def affords(self, source: str, rows: int, missed_ms: float = 0.0) -> bool:
        """Return whether a drafter may draft for ``rows``, after ``missed_ms`` of reading, given what it may lose."""
        if self.fixed is not None:
            return True
        if not self.target.known:  # this round will measure plain decoding
            return False
        width, costs = 2 * rows, self.target.next()
        if width > WIDEST:
            return False
        wider = float(costs[width] - costs[rows])
        return self._draft_ms(rows) + missed_ms + wider <= self._allowance(source, rows)

    def starts(self, source: str, unseen: int, remaining: Sequence[int], missed: bool = False) -> bool:
        """Return whether to ask a drafter that must read ``unseen`` tokens; each row has ``remaining`` to generate.

        ``missed``: whether a prompt, or as much, is among the unseen: it is read once, so its time doesn't count.
        """
        if self.fixed is not None:
            return True
        stats, rows = self._stats_of(source), sum(left > 0 for left in remaining)
        catch_up = self._draft_ms(unseen) - self._draft_ms(rows)
        if not self.affords(source, rows, 0.0 if missed else catch_up):
            return False
        # Assume at least the initial acceptance, so that a drafter gets another chance after a while.
        gain = self._expected(max(stats.acceptance.mean, FIRST_ACCEPTANCE), rows)
        # Costs that were measured beside other work may be wrong: a trial that has been saved for corrects them.
        due = self._draft_ms(rows) <= stats.balance.trials * rows * self._plain(rows)
        if gain * max(remaining) <= catch_up and not due:  # reading costs more than the remaining tokens can gain
            return False
        self._asked.add(source)
        return True

    def going_on(self, source: str, rows: list[int], guesses: list[list[Guess]]) -> list[int]:
        """Return those of ``rows`` for which the draft model should take another step."""
        if self.fixed is not None or not rows:
            return rows
        if not self.draft.known:
            return []
        acceptance = self._stats_of(source).acceptance
        width = self._width([len(each) for each in guesses]) + self._decided_tokens
        price, mean = self._price(len(guesses)), acceptance.mean
        step = self._draft_ms(len(rows)) / len(rows)
        most = min(WIDEST - width, AHEAD)
        if most < 1:
            return []
        # For 1, 2, ... further steps: the tokens gained on average if all so far are accepted, and the cost.
        gained = np.cumsum(mean ** np.arange(1, most + 1))
        steps, wider = step * np.arange(1, most + 1), slice(width + 1, width + most + 1)
        costs, now = self.target.next(ROUND_SHARE), self.target.next()
        cost = steps + costs[wider] - costs[width]
        lost = (self._steps_ms or 0.0) + steps * len(rows) + now[wider] - now[self._width([0] * len(guesses))]
        cost[lost > self._allowance(source, len(guesses))] = math.inf
        going = []
        for row in rows:
            chance = math.prod(acceptance.rate(guess.confidence) for guess in guesses[row])
            if bool((chance * price * gained > cost).any()):
                going.append(row)
        return going

    def cut(self, proposal: Proposal, rows: int) -> Proposal:
        """Return as much of ``proposal``, which cost nothing, as is worth verifying; asked once for each row."""
        self._decided_rows += 1
        if not len(proposal.tokens):
            return NOTHING
        if self.fixed is not None:
            return shorten(proposal, self.fixed)
        length, _ = self._worth_verifying(proposal, rows, self._decided_tokens)
        self._decided_tokens += length
        if not length:
            self._stats_of(proposal.source).acceptance.fade(proposal)
            return NOTHING
        return shorten(proposal, length)

    def prefers(self, source: str, proposal: Proposal, rows: int) -> bool:
        """Return whether the drafter ``source`` is likely to do better than ``proposal``, which cost nothing."""
        own = self._stats_of(proposal.source).acceptance
        if self.fixed is not None:
            poor = own.mean < min(POOR, self._stats_of(source).acceptance.mean)
            if poor:
                own.fade(proposal)
            return poor
        if not self.affords(source, rows):
            return False
        others = self._decided_tokens - len(proposal.tokens)
        better = self._plain(rows) - self.gain(source, rows) < self._worth_verifying(proposal, rows, others)[1]
        self._decided_tokens = others if better else self._decided_tokens
        return better

    def gain(self, source: str, rows: int) -> float:
        """Return the milliseconds per token that drafting with ``source`` saves; negative if it loses."""
        stats = self._stats_of(source)
        if stats.rounds > FEW:
            return self._plain(rows) - stats.ms / stats.tokens
        return self._expected(stats.acceptance.mean, rows)

    def prompt_room(self) -> int:
        """Return how many tokens of prompts the draft may read in a step while other rows draft."""
        if math.isinf(self.most_ms) or not self.draft.known:
            return CATCHING_UP
        token_ms = (self.draft(CATCHING_UP) - self.draft(1)) / (CATCHING_UP - 1)
        return min(max(CATCHING_UP // 4, int(self.most_ms / 2 / max(token_ms, 1e-3))), CATCHING_UP)

    # ------------------------------------------------------------ learning from rounds

    def note_draft(self, width: int, seconds: float, missed: bool = False) -> None:
        """Learn from a step of the draft, which also read a prompt if ``missed``, see ``starts``."""
        usual = self.draft.learn(width, seconds * 1e3)
        self.most_ms -= usual if missed else 0.0
        self._steps_ms = (self._steps_ms or 0.0) + (0.0 if missed else usual)

    def learn(self, outcome: RoundOutcome) -> None:
        sources, self._asked = self._asked, set()
        steps_ms, self._steps_ms = self._steps_ms, None
        for proposal, accepted in outcome.judged:
            if len(proposal.tokens):
                sources.add(proposal.source)
                self._stats_of(proposal.source).acceptance.learn(proposal, accepted)
        rows, width, forced = len(outcome.judged), outcome.width, outcome.forced
        if outcome.prefilled or width > WIDEST:
            self.target.skip(width, outcome.prefilled)
            return
        known, plain = self.target.known, self._plain(rows)
        verified = self.target.learn(width, outcome.verified * 1e3, self.draft.known)
        if self.fixed is not None or not known:
            return
        drafted = outcome.drafted * 1e3 if steps_ms is None else steps_ms
        tokens = sum(accepted for _, accepted in outcome.judged) + rows
        self._together.learn(tokens + forced, verified + drafted)
        # Forced tokens count neither as a drafter's gain nor as its cost.
        ms = verified + drafted - (self.target(width) - self.target(width - forced) if forced else 0.0)
        for stats in (self._together, *self._drafter_stats.values()):
            stats.balance.wait((tokens + forced) / rows)
        if sources:
            self._together.balance.add((tokens - ms / plain) / rows)
        for stats in [self._stats_of(source) for source in sources]:
            stats.learn(tokens, ms)
            stats.balance.add((tokens - ms / plain) / rows)

    # ------------------------------------------------------------ internals

    def _stats_of(self, source: str) -> DrafterStats:
        if source not in self._drafter_stats:
            self._drafter_stats[source] = DrafterStats(RECENT if source == "lookup" else RECENT_OF_MODELS)
        return self._drafter_stats[source]

    def _width(self, proposed: list[int]) -> int:
        """Return the tokens that the target computes for rows with this many proposed tokens each."""
        return len(proposed) + sum(proposed)

    def _plain(self, rows: int) -> float:
        """Return plain decoding's milliseconds per token."""
        return self.target(rows) / rows

    def _draft_ms(self, width: int) -> float:
        """Return the milliseconds of a step of the draft, 0.0 if they aren't known."""
        return self.draft(width) if self.draft.known else 0.0

    def _allowance(self, source: str, rows: int) -> float:
        """Return how many milliseconds a round with a proposal of ``source`` may lose."""
        allowance = min(self._stats_of(source).balance.allowance, self._together.balance.allowance)
        return min(allowance * rows * self._plain(rows), self.most_ms)

    def _expected(self, acceptance: float, rows: int) -> float:
        """Return ``gain`` if the conditional acceptance is ``acceptance`` and the best number of tokens is drafted."""
        step, plain = self._draft_ms(rows), self._plain(rows)
        least, won, chance = math.inf, float(rows), 1.0  # with too many rows, even one token each exceeds WIDEST
        for steps in range(1, min(MOST, WIDEST // rows - 1) + 1):
            chance *= acceptance
            won += rows * chance
            least = min(least, (self.target(rows * (steps + 1)) + steps * step) / won)
        return plain - least

    def _price(self, rows: int) -> float:
        """Return the current cost of a token in milliseconds, which is what an accepted token saves."""
        plain, recent = self._plain(rows), self._together
        return min(plain, recent.ms / recent.tokens) if recent.tokens > FEW else plain

    def _worth_verifying(self, proposal: Proposal, rows: int, others: int) -> tuple[int, float]:
        """Return (tokens worth verifying beside ``others`` of other rows, milliseconds that a token then costs)."""
        if not self.target.known:
            return len(proposal.tokens), 0.0
        plain, width = self._plain(rows), rows + others  # the width of the inference without this proposal
        rates = self._stats_of(proposal.source).acceptance.rates(proposal)[: max(0, WIDEST - width)]
        if not len(rates):
            return 0, plain
        wider = slice(width + 1, width + 1 + len(rates))
        # For 1, 2, ... tokens: those gained on average, and what they cost.
        gained, costs = np.cumprod(rates).cumsum(), self.target.next()
        cost = costs[wider] - costs[width]
        saved = gained * self._price(rows) - cost
        # Of what this round may lose, each row not decided on yet gets its part of the rest.
        without = costs[rows]
        spent = float(costs[width] - without)
        part = (self._allowance(proposal.source, rows) - spent) / max(1, rows - self._decided_rows + 1)
        most = max(spent, spent + part, 0.0)  # what is free is always allowed
        saved[costs[wider] - without > most] = -math.inf
        best = int(saved.argmax())
        if saved[best] <= 0:
            return 0, plain
        return best + 1, float((plain + cost[best]) / (1 + gained[best]))
