"""Decoders of the compiled target and draft: made, lent to a session or batch at a time, and bounded in memory."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass

import numpy as np
import psutil

from ovspec.base.errors import OvspecError
from ovspec.cache.decoder import Decoder
from ovspec.drafting.choice import DraftChoice
from ovspec.drafting.costs import Costs
from ovspec.drafting.drafter import Drafter
from ovspec.drafting.drafter_maker import make_drafter
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.lookup import Index
from ovspec.engine.results import Piece
from ovspec.engine.scheduler import BatchLimits, Schedulable, Scheduler, run_rows
from ovspec.ir.compile import CompiledIR
from ovspec.ir.memory import (
    LEAST_CHECKED_BYTES,
    check_free_memory,
    count_free_tokens,
    kv_bytes_per_token,
    recurrent_row_bytes,
)
from ovspec.params import Params
from ovspec.setup.engine_choice import CompiledModel
from ovspec.text.vocabulary import KnownIds

PLAIN = Lookahead(0)  # proposes nothing, and keeps constraints from forcing tokens
KEPT_IDLE = 60.0  # seconds after which decoders that nobody took are dropped, when others are given back


@dataclass
class Decoders:
    """The decoders of one session or batch. ``lookaheads``: those for greedy (False) and for sampled text (True)."""

    target: Decoder
    drafter: Drafter | None
    draft: Decoder | None  # of the draft model; the drafter drives it
    lookaheads: dict[bool, Lookahead]

    def drafting(self, params: Params) -> tuple[Drafter | None, Lookahead]:
        """Return the drafter and the lookahead of a call; what was learned from greedy text serves no sampled one."""
        if params.lookahead == 0:
            return None, PLAIN
        lookahead = self.lookaheads[params.sampled]
        if params.lookahead is not None:
            lookahead = Lookahead(params.most_proposed, lookahead.target, lookahead.draft)
        return self.drafter, lookahead

    def reset(self, rows: int) -> None:
        self.target.reset(rows)
        if self.drafter:
            self.drafter.reset(rows)


class Models:
    """The compiled target and draft, and the memory of their KV caches. Threads may share them.

    Args:
        choice: the drafters.
        known: the ids of the vocabulary.
        corpora: texts that lookup may propose from.
        cache_bytes: what KV caches may take until those of ended texts give way; with 0, none are kept. By default a
            quarter of the memory that is free, and greedy texts of a model that can't be exact share none, because
            their tokens would depend on what is cached.
    """

    def __init__(
        self,
        target: CompiledModel,
        draft: CompiledModel | None,
        choice: DraftChoice | None,
        known: KnownIds,
        corpora: list[Index],
        cache_bytes: float | None = None,
    ) -> None:
        self.target, self.draft, self.choice, self.corpora = target, draft, choice, corpora
        self._known, self.cache_bytes = known, cache_bytes
        self._token_bytes = sum(kv_bytes_per_token(ir) + recurrent_row_bytes(ir) for ir in self.irs())  # upper bound
        self.shares_greedy = not (cache_bytes is None and target.is_inexact and target.is_reproducible)
        most = psutil.virtual_memory().available / 4 if cache_bytes is None else cache_bytes
        self.loaded = [model for model in (target, draft) if model]  # also a draft that nothing proposes with
        for model in self.loaded if most else ():
            model.share_blocks(most / self._token_bytes)

    def with_drafters(self, choice: DraftChoice | None) -> Models:
        """Return the same models with other drafters; a draft model must be the loaded one."""
        other = copy.copy(self)
        other.choice, other.draft = choice, self.draft if choice and choice.model else None
        return other

    def irs(self, drafts: bool = True) -> list[CompiledIR]:
        """Return the compiled IRs of the target and, with ``drafts``, of the draft model."""
        return [model.ir for model in (self.target, self.draft if drafts else None) if model]

    def decoders(self) -> Decoders:
        """Return new decoders, which know the costs that a profile has measured."""
        target, draft = self._decoder(self.target), self._decoder(self.draft) if self.draft else None
        costs = Costs(self.target.verify_ms, self.target.change_ms, target.fills, target.rule)
        steps = Costs()
        if self.draft and draft:
            steps = Costs(self.draft.verify_ms, self.draft.change_ms, draft.fills, draft.rule)
        lookaheads = {sampled: Lookahead(None, costs, steps) for sampled in (False, True)}
        return Decoders(target, self._drafter(target, draft), draft, lookaheads)

    def fork(self, decoders: Decoders) -> Decoders:
        """Return other decoders that continue from what ``decoders`` hold."""
        target, draft = decoders.target.fork(), decoders.draft.fork() if decoders.draft else None
        return Decoders(target, self._drafter(target, draft), draft, copy.deepcopy(decoders.lookaheads))

    def _decoder(self, model: CompiledModel) -> Decoder:
        known = self._known
        if model.ir.target_ids is not None:
            known = KnownIds(gaps=np.flatnonzero(known.unknown(model.ir.target_ids)))
        return model.decoder(known, shares=True)

    def _drafter(self, target: Decoder, draft: Decoder | None) -> Drafter | None:
        ids = self.draft.ir.target_ids if self.draft else None
        features_of = target if self.draft and self.draft.is_head else None
        width = self.target.ir.logits_width
        return make_drafter(self.choice, draft, features_of, ids, width, self.corpora, self._known)

    def close(self) -> None:
        """Free the models; inferences raise InferenceError from now on."""
        for model in self.loaded:
            model.close()

    # ------------------------------------------------------------ the memory of KV caches

    def bytes_for(self, tokens: int) -> float:
        """Estimate the memory, in bytes, of the KV caches of a text of ``tokens`` tokens."""
        return sum(tokens * kv_bytes_per_token(ir) + recurrent_row_bytes(ir) for ir in self.irs())

    @property
    def spare(self) -> float:
        """The bytes of KV caches that are kept, but that no text needs."""
        return sum(model.spare for model in self.loaded)

    @property
    def keeps_prefixes(self) -> bool:
        """Whether KV caches of ended texts are kept for texts that begin in the same way."""
        return any(model.keeps_prefixes for model in self.loaded)

    def limit_blocks(self, most_tokens: float) -> None:
        """Let kept KV caches give way once ``most_tokens`` are cached."""
        for model in self.loaded:
            model.limit_blocks(most_tokens)

    def give_way(self) -> None:
        """Free the KV caches that no text needs."""
        for model in self.loaded:
            model.give_way()

    def check_memory(self, tokens: int, drafts: bool = True) -> None:
        """Raise OvspecError if the states for ``tokens`` more tokens can't fit into free memory."""
        if tokens * self._token_bytes > LEAST_CHECKED_BYTES:
            check_free_memory(self.irs(drafts), tokens, self.spare)
            if tokens * self._token_bytes > psutil.virtual_memory().available:
                self.give_way()

    def check_room(self, tokens: int, context: int | None = None) -> None:
        """Raise OvspecError if a text of ``tokens`` tokens exceeds ``context``, or the model's if that is None."""
        context = context or self.target.ir.context_length
        if context and tokens > context:
            raise OvspecError(f"The text would have {tokens} tokens, but the context is {context}; shorten it.")


class DecoderPool:
    """Lends sets of decoders, and makes one when none is idle. Threads may share it."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._idle: list[tuple[float, Decoders]] = []  # with the time since when; the longest idle first
        self._closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of idle sets."""
        return len(self._idle)

    def take(self) -> Decoders:
        """Return a set without any rows, if possible the one given back last."""
        with self._lock:
            if self._idle:
                return self._idle.pop()[1]
        decoders = self.models.decoders()
        decoders.reset(0)  # a user's drafter may create its state there
        return decoders

    def give_back(self, decoders: Decoders) -> None:
        """Empty a set, which frees memory, and keep it for reuse."""
        decoders.reset(0)
        now = time.monotonic()
        with self._lock:
            self._idle = [(since, idle) for since, idle in self._idle if now - since < KEPT_IDLE]
            if not self._closed:
                self._idle.append((now, decoders))

    def run(
        self, rows: Iterable[Schedulable], params: Params, count: int | None = None, fail_alone: bool = False
    ) -> Generator[list[tuple[int, Piece]]]:
        """Generate ``rows`` with decoders of the pool; a row joins when there is room, and leaves when its text ends.

        Yields what ``run_rows`` does.

        Args:
            params: those of most rows; ``batch_size`` and ``lookahead`` are for all.
            count: number of rows, if known; a single row needs no room for others.
            fail_alone: whether a row whose constraints fail ends by itself and has an ``error``.
        """
        decoders, models, most = self.take(), self.models, params.batch_size
        try:
            drafter, lookahead = decoders.drafting(params)
            room = math.inf if count == 1 else count_free_tokens(models.irs(drafter is not None), most, models.spare)
            limits = BatchLimits(1 if count == 1 else most, room, fail_alone=(OvspecError,) if fail_alone else ())
            yield from run_rows(Scheduler(decoders.target, drafter, lookahead, rows, limits))
        finally:
            self.give_back(decoders)

    def close(self) -> None:
        """Drop the idle sets, and those that are given back from now on."""
        with self._lock:
            self._closed = True
            self._idle.clear()

    def learned_costs(self, sampled: bool) -> tuple[Costs, Costs] | None:
        """Return the costs of verifying and of a draft step by an idle set's auto lookahead, if any set is idle."""
        with self._lock:
            learned = [decoders.lookaheads[sampled] for _, decoders in self._idle]
        return (learned[0].target, learned[0].draft) if learned else None
