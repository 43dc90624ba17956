"""Logits for somebody else who chooses the tokens: asked for place by place, of several texts in turn.

Each text has its own KV cache, and what a drafter guesses about it is verified beside what has to be read anyway. Who
goes on as the target itself would finds the next logits there already.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ovspec.decoders.base import catch_up
from ovspec.decoders.prefill import LONG
from ovspec.decoders.sequence import Sequence, common_prefix
from ovspec.drafting.drafter import Round
from ovspec.drafting.proposal import NOTHING, Proposal
from ovspec.errors import OvspecError
from ovspec.ir.memory import check_memory
from ovspec.sampling.samplers import Greedy

if TYPE_CHECKING:
    from ovspec.model import Decoders, LanguageModel

MOST_BRANCHES = 8
# Tokens at the end of a text that may be taken back; where more would be lost, the branch is forked.
SPARE = 4
# Tokens in the cache that may be copied for each that needn't be read; a paged cache copies none.
MOST_COPIED = 32
# Nobody tells how many tokens are still to come.
TO_COME = 64
# Places whose logits are computed at once, where all are asked for.
MOST_PLACES = 512


@dataclass
class Served:
    """What was asked for, and what it took.

    requests: for the logits at one place.
    answered: of these, without an inference.
    inferences: of the target.
    read: tokens of texts that the target was fed, its own guesses not counted.
    proposed, accepted: guesses that were verified, and those that the text went on with.
    drafters: the same by the drafter's name.
    forks: branches that began as copies of another one.
    """

    requests: int = 0
    answered: int = 0
    inferences: int = 0
    read: int = 0
    proposed: int = 0
    accepted: int = 0
    drafters: dict[str, dict[str, int]] = field(default_factory=dict)
    forks: int = 0


@dataclass(eq=False)
class Branch:
    """A text with its decoders.

    text: as it was last asked for; the target may hold guesses behind it.
    known: number of tokens -> the logits (vocab,) that follow so many tokens of what the target holds.
    """

    decoders: Decoders
    text: Sequence = field(default_factory=Sequence)
    known: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def held(self) -> Sequence:
        return self.decoders.target.rows[0]


@dataclass
class Guessed:
    """A proposal that was verified behind ``start`` tokens of ``branch``, and what has become of it so far.

    asked: lengths of the text at which a token was chosen from these logits; elsewhere it came without being chosen.
    stood: guesses that the text has gone on with; ``parted``: and then it went another way.
    """

    branch: Branch
    proposal: Proposal
    start: int
    asked: set[int]
    stood: int = 0
    parted: bool = False

    def outcome(self) -> tuple[Proposal, int]:
        """(the guesses of which is known what was chosen in their place, how many of them that was)"""
        judged = [i for i in range(self.stood + self.parted) if self.start + i in self.asked]
        if not judged:
            return NOTHING, 0
        confidence = None if self.proposal.confidence is None else self.proposal.confidence[judged]
        proposal = Proposal(self.proposal.tokens[judged], confidence, source=self.proposal.source)
        return proposal, sum(i < self.stood for i in judged)


@dataclass
class Cost:
    """Of one inference, as ``Lookahead.learn`` has it."""

    width: int
    drafted: float
    verified: float
    read_a_prompt: bool
    forced: int


class Branches:
    """The branches of one model, at most ``most`` of them; threads may share it."""

    def __init__(self, model: LanguageModel, most: int = MOST_BRANCHES) -> None:
        self.served = Served()
        self._model, self._most = model, most
        first = model.decoders()
        drafter, self._lookahead = model.drafting({}, first, sampled=False)
        self._drafts = drafter is not None
        first.reset(1)
        self._branches = [Branch(first)]  # the last one used at the end
        self._pending: tuple[Guessed, Cost] | None = None
        self._lock = threading.Lock()

    def logits(self, tokens: list[int], all_new: bool = False) -> tuple[np.ndarray, int]:
        """(logits (places, vocab) float32 up to the one behind ``tokens``, tokens that needn't be read for it)

        One place, or with ``all_new`` those behind all tokens that this text didn't have when it was last asked for,
        and the one before: as many as are known.

        Raises:
            OvspecError: no tokens, unknown ones, or more than the context or the memory holds.
        """
        if not tokens:
            raise OvspecError("The text is empty, and this model has no token to begin a text with.")
        self._model.check_room(len(tokens), None)
        text = Sequence(tokens)
        with self._lock:
            branch = self._branch(text)
            since = common_prefix(branch.text, text)
            self._watch(branch, text)
            cached = len(text)
            if common_prefix(branch.held, text) < len(text) or len(text) not in branch.known:
                cached = self._read(branch, text, since, all_new)
            self.served.requests += 1
            self.served.answered += cached == len(text)
            branch.text = text
            first = len(text)
            while all_new and first > since and first - 1 in branch.known:
                first -= 1
            return np.stack([branch.known[length] for length in range(first, len(text) + 1)]), cached

    # ------------------------------------------------------------ branches

    def _branch(self, text: Sequence) -> Branch:
        """The one that goes on with ``text``: that which has most of it, or a fork that leaves that one as it is."""

        def fit(branch: Branch) -> tuple[int, int]:
            return common_prefix(branch.held, text), -len(branch.text)

        source = max(reversed(self._branches), key=fit)
        shared = fit(source)[0]
        self._branches.remove(source)
        self._branches.append(source)
        if len(source.text) - common_prefix(source.text, text) <= SPARE:
            return source
        while len(self._branches) >= self._most:
            self._drop(self._branches[0])
        if shared * MOST_COPIED < len(source.held) or not shared:
            branch = Branch(self._model.decoders())
            branch.decoders.reset(1)
        else:
            known = {length: row for length, row in source.known.items() if length <= shared}
            branch = Branch(self._model.fork(source.decoders), source.text.copy(), known)
            self.served.forks += 1
        self._branches.append(branch)
        return branch

    def _make_room(self, tokens: int) -> None:
        """Drop what was used longest ago until so many tokens fit into memory."""
        while True:
            try:
                return check_memory(self._model.irs(self._drafts), tokens)
            except OvspecError:
                if len(self._branches) == 1:
                    raise
                self._drop(self._branches[0])

    def _drop(self, branch: Branch) -> None:
        self._branches.remove(branch)
        self._model.release(branch.decoders, again=False)

    # ------------------------------------------------------------ reading and guessing

    def _read(self, branch: Branch, text: Sequence, since: int, all_new: bool) -> int:
        """Learn what follows ``text``, in one inference; returns how many of its tokens needn't be read."""
        self._settle()
        target = branch.decoders.target
        unread = text.tokens[min(common_prefix(target.rows[0], text), len(text) - 1) :]
        unknown = self._model.tokenizer.known.first_unknown(unread)
        if unknown is not None:
            raise OvspecError(f"Token id {unknown} is not in the vocabulary.")
        began = time.perf_counter()
        proposal = NOTHING
        if len(unread) > LONG:  # reading a prompt waits for no drafter
            self._make_room(len(unread) + TO_COME)
        elif self._drafts:
            proposal = self._propose(branch, text)
        drafted = time.perf_counter()
        unseen = catch_up(target, 0, text)
        cached = len(target.rows[0])
        fed = np.concatenate((unseen, proposal.tokens))
        # Asked for all logits, a decoder feeds tokens one way, however many they are: guesses change no bit.
        all_places = all_new or len(unseen) <= LONG
        wanted = min(len(fed), MOST_PLACES) if all_places else len(proposal.tokens) + 1
        logits = target.feed([fed], [wanted])[0].copy()
        verified = time.perf_counter()
        branch.known = {length: row for length, row in branch.known.items() if since <= length <= cached}
        branch.known |= dict(enumerate(logits, len(target.rows[0]) - wanted + 1))
        self._count(proposal, len(unseen))
        if self._drafts:
            guessed = Guessed(branch, proposal, len(text), {len(text)})
            long = len(unseen) > LONG
            cost = Cost(len(fed), drafted - began, verified - drafted, long, 0 if long else len(unseen) - 1)
            self._pending = guessed, cost
        return cached

    def _propose(self, branch: Branch, text: Sequence) -> Proposal:
        drafter, context = branch.decoders.drafter, self._model.target.ir.context_length
        room = min(TO_COME, context - len(text)) if context else TO_COME
        if not drafter or room < 1:
            return NOTHING
        return drafter.propose(Round([text], [room], [Greedy()], self._lookahead))[0]

    def _count(self, proposal: Proposal, read: int) -> None:
        served, proposed = self.served, len(proposal.tokens)
        served.inferences += 1
        served.read += read
        served.proposed += proposed
        if proposed:
            counts = served.drafters.setdefault(proposal.source, {"proposed": 0, "accepted": 0})
            counts["proposed"] += proposed

    def _watch(self, branch: Branch, text: Sequence) -> None:
        """See how far ``text`` goes along with what was guessed last."""
        if not self._pending or self._pending[0].branch is not branch:
            return
        guessed = self._pending[0]
        agreed = common_prefix(branch.held, text) - guessed.start
        if agreed < 0:
            return
        more = max(0, agreed - guessed.stood)
        if more:
            guessed.stood += more
            self.served.accepted += more
            self.served.drafters[guessed.proposal.source]["accepted"] += more
        guessed.asked.add(len(text))
        if len(text) > guessed.start + agreed and agreed == guessed.stood < len(guessed.proposal.tokens):
            guessed.parted = True

    def _settle(self) -> None:
        """Tell the lookahead what the last round has brought: it learns before the next one begins."""
        if not self._pending:
            return
        (guessed, cost), self._pending = self._pending, None
        proposal, accepted = guessed.outcome()
        self._lookahead.learn(
            [proposal], [accepted], cost.width, cost.drafted, cost.verified, cost.read_a_prompt, cost.forced
        )
