"""Logits for a caller that chooses the tokens itself, position by position, in several texts at a time.

Each text has its own KV cache. Tokens that a drafter proposes are verified together with those that have to be read
anyway, so a caller that chooses them, as the target itself would, finds the next logits already computed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ovspec.api.model import LanguageModel
from ovspec.base.errors import OvspecError
from ovspec.cache.prefill import PREFILL_THRESHOLD
from ovspec.cache.sequence import Sequence, common_prefix
from ovspec.drafting.drafter import RowStep
from ovspec.drafting.lookahead import Lookahead, RoundOutcome
from ovspec.drafting.proposal import NO_TOKENS, Proposal, shorten_proposal
from ovspec.engine.decoders import DecoderSet
from ovspec.engine.results import FinishReason, Piece, ProposalStats, Stats
from ovspec.engine.round import RowOutcome
from ovspec.engine.scheduler import Scheduler
from ovspec.sampling.samplers import GreedySampler

MOST_BRANCHES = 8
# A branch is reused if this many tokens at its end or fewer are lost; otherwise the text gets a branch of its own.
SPARE = 4
# A fork may copy this many cached tokens for each token that it needn't read again; a paged cache copies none.
MOST_COPIED = 32
# The caller doesn't say how many tokens are still to come; this many are assumed.
TO_COME = 64
# Maximum number of positions whose logits are computed at once, when all are requested.
MOST_POSITIONS = 512


@dataclass(kw_only=True)
class RequestCounts(ProposalStats):
    """Counts of the requests for logits, and of the work they took."""

    requests: int = 0
    answered: int = 0  # requests that needed no inference
    inferences: int = 0  # of the target
    read: int = 0  # tokens of texts that the target read, without proposed tokens
    forks: int = 0  # branches that started as a copy of another one


class Observer(GreedySampler):
    """A sampler that chooses nothing, because the caller does. A draft proposes its most likely tokens."""

    def verify_proposal(self, *_: Any, **__: Any) -> np.ndarray:
        return NO_TOKENS


class Branch:
    """A text with its own decoders, which is the only row of its batch.

    sequence: the text as last requested; the target may hold proposed tokens after it.
    known: n -> the logits (vocab,) that follow the first n tokens that the target holds.
    """

    finish_reason: FinishReason | None = None
    max_length = 0

    def __init__(self, decoders: DecoderSet, drafts: bool, lookahead: Lookahead, sequence: Sequence) -> None:
        self.decoders, self.sequence = decoders, sequence
        self.known: dict[int, np.ndarray] = {}
        self.stats, self.step = Stats(), RowStep(sequence, Observer(), 1)  # of the next round
        self.outcome = RowOutcome()  # of the last round
        drafter = decoders.drafter if drafts else None
        # The lookahead learns from a round when the text has gone on.
        self.scheduler = Scheduler(decoders.target, drafter, lookahead, [self], learn=lambda _: None)

    @property
    def held(self) -> Sequence:
        return self.decoders.target.rows[0]

    def row_step(self) -> RowStep:
        return self.step

    def add_outcome(self, outcome: RowOutcome) -> Piece:
        self.outcome = outcome
        return Piece("", [])

    def fail(self, error: Exception) -> Piece:
        raise error

    def cancel(self) -> Piece:
        return Piece("", [])


@dataclass
class Guess:
    """A proposal that was verified after ``start`` tokens of ``branch``, in the round of ``outcome``.

    stood: proposed tokens that the text has continued with since.
    """

    branch: Branch
    proposal: Proposal
    start: int
    outcome: RoundOutcome
    stood: int = 0


class Branches:
    """Up to ``MOST_BRANCHES`` branches of one model. Threads may share it."""

    def __init__(self, model: LanguageModel) -> None:
        self.counts, self._runtime = RequestCounts(), model.runtime
        first = self._runtime.decoder_pool.acquire()
        drafter, self._lookahead = first.select_drafting(self._runtime.row_maker.make_complete_params({}))
        self._drafts = drafter is not None
        self._branches: list[Branch] = []  # the least recently used one first
        self._add(first)
        self._guess: Guess | None = None  # of the last round, until the lookahead learns from it
        self._lock = threading.Lock()

    def logits(self, tokens: list[int], all_new: bool = False) -> tuple[np.ndarray, int]:
        """Return (logits (positions, vocab) float32, how many of ``tokens`` needn't be read for them).

        The last position is the one after ``tokens``; without ``all_new`` it is the only one. With ``all_new``, there
        is also a position after each token that is new since the last request for this text, and one before the first
        of these, as far back as they are known.

        Raises:
            OvspecError: ``tokens`` is empty, has an unknown id, or exceeds the context or the free memory.
        """
        if not tokens:
            raise OvspecError("The text is empty, and this model has no BOS token to start from.")
        self._runtime.models.check_context(len(tokens))
        text = Sequence(tokens)
        with self._lock:
            branch = self._branch(text)
            since = common_prefix(branch.sequence, text)
            if self._guess and self._guess.branch is branch:
                self._compare(self._guess, text)
            cached = len(text)
            if common_prefix(branch.held, text) < len(text) or len(text) not in branch.known:
                cached = self._read(branch, text, since, all_new)
            self.counts.requests += 1
            self.counts.answered += cached == len(text)
            branch.sequence = text
            first = len(text)
            while all_new and first > since and first - 1 in branch.known:
                first -= 1
            return np.stack([branch.known[length] for length in range(first, len(text) + 1)]), cached

    # ------------------------------------------------------------ branches

    def _branch(self, text: Sequence) -> Branch:
        """Return the branch that holds most of ``text``, or another one where that branch would lose too much."""

        def fit(branch: Branch) -> tuple[int, int]:
            return common_prefix(branch.held, text), -len(branch.sequence)

        source = max(reversed(self._branches), key=fit)
        shared = fit(source)[0]
        self._branches.remove(source)
        self._branches.append(source)
        if len(source.sequence) - common_prefix(source.sequence, text) <= SPARE:
            return source
        if len(self._branches) == MOST_BRANCHES:
            self._drop(self._branches[0])
        if shared * MOST_COPIED < len(source.held) or not shared:
            return self._add(self._runtime.decoder_pool.acquire())
        branch = self._add(self._runtime.models.fork_decoders(source.decoders), source.sequence.copy())
        branch.known = {length: row for length, row in source.known.items() if length <= shared}
        self.counts.forks += 1
        return branch

    def _add(self, decoders: DecoderSet, sequence: Sequence | None = None) -> Branch:
        """Add a branch with the text that ``decoders`` hold, or with an empty one."""
        if sequence is None:
            decoders.reset(1)
        branch = Branch(decoders, self._drafts, self._lookahead, sequence or Sequence())
        self._branches.append(branch)
        return branch

    def _make_room(self, tokens: int) -> None:
        """Drop the least recently used branches until ``tokens`` more tokens fit into memory."""
        while True:
            try:
                return self._runtime.models.ensure_memory(tokens, self._drafts)
            except OvspecError:
                if len(self._branches) == 1:
                    raise
                self._drop(self._branches[0])

    def _drop(self, branch: Branch) -> None:
        self._branches.remove(branch)
        branch.decoders.reset(0)  # frees its memory; others may share its cache, so it is not given back

    # ------------------------------------------------------------ reading and guessing

    def _read(self, branch: Branch, text: Sequence, since: int, all_new: bool) -> int:
        """Compute the logits after ``text`` in one round; return how many of its tokens needn't be read."""
        unread = text.tokens[min(common_prefix(branch.held, text), len(text) - 1) :]
        unknown = self._runtime.prompts.tokenizer.known.first_unknown(unread)
        if unknown is not None:
            raise OvspecError(f"Token id {unknown} is not in the vocabulary.")
        branch.sequence = text
        if guess := self._guess:
            reached = max(guess.stood, len(guess.branch.sequence) - guess.start)
            judged = shorten_proposal(guess.proposal, reached), guess.stood
            self._lookahead.learn_round(replace(guess.outcome, proposals=[judged]))
            self._guess = None
        long = len(unread) > PREFILL_THRESHOLD  # no drafter is asked while a prompt is read
        if long:
            self._make_room(len(unread) + TO_COME)
        context = self._runtime.models.target.ir.context_length
        budget = 1 + min(TO_COME, context - len(text) if context else TO_COME)
        # With all logits requested, a decoder feeds any number of tokens in the same way: proposals change no bit.
        positions = MOST_POSITIONS if all_new or not long else 1
        branch.step = RowStep(text, Observer(), budget, not long, logits_rows=positions)
        self._round(branch)
        outcome, proposal = branch.outcome, branch.outcome.proposal
        cached, end = len(text) - outcome.read_count, len(text) + len(proposal.tokens)
        branch.known = {length: row for length, row in branch.known.items() if since <= length <= cached}
        branch.known |= dict(enumerate(outcome.logits.copy(), end - len(outcome.logits) + 1))
        if proposal.tokens.size:
            self.counts.count_proposal(proposal.source, len(proposal.tokens), 0)
        if learnable := branch.scheduler.last_outcome:
            learnable = replace(learnable, forced_tokens=0 if long else outcome.read_count - 1, prefilled=long)
            self._guess = Guess(branch, proposal, len(text), learnable)
        return cached

    def _round(self, branch: Branch) -> None:
        served, target, drafter = self.counts, branch.decoders.target, branch.decoders.drafter
        on_target, on_draft = target.seconds, drafter.seconds if drafter else 0.0
        branch.scheduler.step()
        served.inferences += 1
        served.read += branch.outcome.read_count
        served.target_ms += 1e3 * (target.seconds - on_target)
        served.draft_ms += 1e3 * (drafter.seconds - on_draft) if drafter else 0.0

    def _compare(self, guess: Guess, text: Sequence) -> None:
        agreed = common_prefix(guess.branch.held, text) - guess.start
        if agreed > guess.stood:
            self.counts.count_accepted(guess.proposal.source, range(guess.stood, agreed), len(guess.proposal.tokens))
            guess.stood = agreed
