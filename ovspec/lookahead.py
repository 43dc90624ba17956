"""How many tokens to propose: what a token costs, how likely it is to stand, and what that is worth.

Times are milliseconds of wall clock. A round of k proposed tokens costs k draft steps and an inference of k + 1 tokens,
and brings 1 + a1 + a1 a2 + ... tokens, where ai is the probability that the i-th stands if those before it do. The
rule is that of a renewal process: go on while a token that may be won, at the price that a token has now, is worth more
than what it costs. So nothing is proposed where nothing pays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ovspec.drafting import NOTHING, Proposal, shorten

if TYPE_CHECKING:
    from ovspec.sampler import Guess

# Tokens proposed in a round at most, where the lookahead isn't fixed.
MOST = 16
# Widths whose cost is learned; wider inferences go on in a straight line.
WIDEST = 64
# Confidences are put into these bins. Sure guesses are common, so the upper ones are narrow.
EDGES = np.array([0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])
PRIOR = (np.concatenate(([0.0], EDGES)) + np.concatenate((EDGES, [1.0]))) / 2
PRIOR_WEIGHT = 2.0
# What is assumed of a drafter before it has proposed anything.
FIRST_ACCEPTANCE = 0.75
FORGET = 0.95  # of what is known about acceptance, at each new observation
# Rounds of a drafter that loses are judged more surely the more there are; then it pauses, each time twice as long.
FIRST_TRIAL, LATER_TRIAL = 4.5, 1.5
FIRST_DOUBT, LATER_DOUBT = 1.0, 0.2
SETTLED = 12  # rounds after which what they have cost tells more than acceptance does
DEAR = 2.0  # times plain decoding
FIRST_PAUSE, LONGEST_PAUSE = 8, 128
MISSED = 4  # tokens in a step of the draft from which on it is reading what it has missed
POOR = 0.3  # acceptance with which a lookup is passed over where the lookahead is fixed


class Costs:
    """Milliseconds of an inference by its width in tokens, learned as it runs.

    Args:
        measured: from a profile; without one, the first inference tells.
    """

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        widths = np.arange(WIDEST + 1)
        if measured and len(measured) > 1:
            known = sorted(measured)
            times = [measured[width] for width in known]
            slope = max(0.0, (times[-1] - times[-2]) / (known[-1] - known[-2]))
            costs = np.interp(widths, known, times) + slope * np.maximum(0, widths - known[-1])
        else:
            costs = 1 + 0.05 * np.maximum(0, widths - 1.0)
        self.known = bool(measured)
        self.ms = costs
        self._beyond = float(costs[WIDEST] - costs[WIDEST // 2]) / (WIDEST // 2)  # of each token of a wider one
        self._observed = 0
        self._widths_seen: set[int] = set()

    def __call__(self, width: int) -> float:
        if width <= WIDEST:
            return float(self.ms[width])
        return float(self.ms[WIDEST]) + self._beyond * (width - WIDEST)

    def learn(self, width: int, ms: float) -> None:
        """An inference of ``width`` tokens took ``ms``: moves the cost of that width and, less, of all others.

        One that is wider than ``WIDEST`` was reading, and says only what that costs.
        """
        if width > WIDEST:
            if self.known:
                self._beyond = max(0.0, (ms - float(self.ms[WIDEST])) / (width - WIDEST))
            return
        self._observed += 1
        first_of_width = width not in self._widths_seen
        self._widths_seen.add(width)
        if not self.known:
            self.known = True
            self.ms = self.ms * (ms / self.ms[width])
            return
        ratio = min(max(ms / self.ms[width], 0.5), 2.0)
        if first_of_width:  # it may have had kernels to make
            ratio = min(ratio, 1.1)
        everywhere = max(0.03, 0.5 / self._observed)
        self.ms *= ratio**everywhere
        near = slice(max(1, width - 1), width + 2)
        self.ms[near] *= ratio**0.06
        self.ms[width] *= ratio**0.06


class Acceptance:
    """How often a drafter's tokens stand, given that those before them did: by confidence, and altogether."""

    def __init__(self) -> None:
        self._accepted, self._reached = PRIOR_WEIGHT * PRIOR, np.full(len(PRIOR), PRIOR_WEIGHT)
        self._all = [FIRST_ACCEPTANCE * PRIOR_WEIGHT, PRIOR_WEIGHT]

    @property
    def mean(self) -> float:
        return self._all[0] / self._all[1]

    def rates(self, proposal: Proposal) -> np.ndarray:
        """(n,) the probability that each token stands if those before it do."""
        if proposal.confidence is None:
            return np.full(len(proposal.tokens), self.mean)
        bins = np.searchsorted(EDGES, proposal.confidence, side="right")
        return self._accepted[bins] / self._reached[bins]

    def rate(self, confidence: float) -> float:
        place = int(np.searchsorted(EDGES, confidence, side="right"))
        return float(self._accepted[place] / self._reached[place])

    def learn(self, proposal: Proposal, accepted: int) -> None:
        reached = min(accepted + 1, len(proposal.tokens))
        for place in range(reached):
            stood = place < accepted
            self._all = [self._all[0] * FORGET + stood, self._all[1] * FORGET + 1]
            if proposal.confidence is not None:
                at = int(np.searchsorted(EDGES, proposal.confidence[place], side="right"))
                self._fade(at, FORGET)
                self._accepted[at] += stood
                self._reached[at] += 1

    def fade(self, proposal: Proposal) -> None:
        """Trust what is known a little less, because it keeps ``proposal`` from being tried."""
        self._all = [
            self._all[0] * FORGET + (1 - FORGET) * PRIOR_WEIGHT * FIRST_ACCEPTANCE,
            self._all[1] * FORGET + (1 - FORGET) * PRIOR_WEIGHT,
        ]
        if proposal.confidence is not None:
            self._fade(int(np.searchsorted(EDGES, proposal.confidence[0], side="right")), FORGET)

    def _fade(self, place: int, by: float) -> None:
        """Never below the prior's weight, which is what is left when all is forgotten."""
        self._accepted[place] = self._accepted[place] * by + (1 - by) * PRIOR_WEIGHT * PRIOR[place]
        self._reached[place] = self._reached[place] * by + (1 - by) * PRIOR_WEIGHT


class Record:
    """What a drafter's rounds have brought lately, and its pauses."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.tokens = self.ms = self.rounds = 0.0
        self.pause = 0  # rounds left
        self._trial, self._doubt, self._next_pause = FIRST_TRIAL, FIRST_DOUBT, FIRST_PAUSE

    def learn(self, tokens: int, ms: float, plain_ms: float) -> None:
        """A round brought ``tokens`` in ``ms``, when a plain one took ``plain_ms``."""
        keep = 0.95
        self.tokens, self.ms = self.tokens * keep + tokens, self.ms * keep + ms
        self.rounds = self.rounds * keep + 1
        if self.rounds > 4 and self.ms < self.tokens * plain_ms:
            self._next_pause = FIRST_PAUSE

    def loses(self, plain_ms: float) -> bool:
        """Whether its tokens have been dearer than plain ones, for all that can be told."""
        if self.rounds < self._trial:
            return False
        return self.ms > self.tokens * plain_ms * (1 + self._doubt / self.rounds)

    def take_a_pause(self) -> None:
        self.pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
        self._trial, self._doubt = LATER_TRIAL, LATER_DOUBT
        self.tokens = self.ms = self.rounds = 0.0


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
            # A few rounds may have been bad luck: unless they were dear, acceptance has to say the same.
            sure = record.rounds > SETTLED or record.ms > DEAR * record.tokens * plain
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

    def learn(
        self,
        proposals: list[Proposal],
        accepted: list[int],
        width: int,
        drafted: float,
        verified: float,
        read_a_prompt: bool = False,
        forced: int = 0,
    ) -> None:
        """A round is over: drafting took ``drafted`` seconds, verifying ``width`` tokens ``verified``.

        ``forced`` of these had been committed without being chosen. ``read_a_prompt``: other tokens were among them,
        so the times say nothing about proposals.
        """
        sources, self._asked = self._asked, set()
        for proposal, count in zip(proposals, accepted, strict=True):
            if len(proposal.tokens):
                sources.add(proposal.source)
                self._record(proposal.source).acceptance.learn(proposal, count)
        rows = len(proposals)
        catch_up, self._catch_up_ms = self._catch_up_ms, 0.0
        if self.fixed is not None or read_a_prompt or width > WIDEST:
            return
        verify_ms, draft_ms = verified * 1e3, drafted * 1e3 - catch_up
        self._target.learn(width, verify_ms)
        tokens = sum(accepted) + rows
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
