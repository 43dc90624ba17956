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
from ovspec.drafting.costs import InferenceCosts
from ovspec.drafting.drafter import Drafter
from ovspec.drafting.drafter_maker import make_drafter
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.lookup import NgramIndex
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

NO_LOOKAHEAD = Lookahead(0)  # proposes nothing, and keeps constraints from forcing tokens
MAX_IDLE_SECONDS = 60.0  # seconds after which decoders that nobody took are dropped, when others are given back


@dataclass
class DecoderSet:
    """The decoders of one session or batch. ``lookaheads``: those for greedy (False) and for sampled text (True)."""

    target: Decoder
    drafter: Drafter | None
    draft: Decoder | None  # of the draft model; the drafter drives it
    lookaheads: dict[bool, Lookahead]

    def select_drafting(self, params: Params) -> tuple[Drafter | None, Lookahead]:
        """Return the drafter and the lookahead of a call; what was learned from greedy text serves no sampled one."""
        if params.lookahead == 0:
            return None, NO_LOOKAHEAD
        lookahead = self.lookaheads[params.is_sampled]
        if params.lookahead is not None:
            lookahead = Lookahead(params.lookahead_limit, lookahead.target_costs, lookahead.draft_costs)
        return self.drafter, lookahead

    def reset(self, rows: int) -> None:
        self.target.reset(rows)
        if self.drafter:
            self.drafter.reset(rows)


class ModelPair:
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
        known_ids: KnownIds,
        corpora: list[NgramIndex],
        cache_bytes: float | None = None,
    ) -> None:
        self.target, self.draft, self.choice, self.corpora = target, draft, choice, corpora
        self._known_ids, self.cache_bytes = known_ids, cache_bytes
        self._token_bytes = sum(
            kv_bytes_per_token(ir) + recurrent_row_bytes(ir) for ir in self.compiled_irs()
        )  # upper bound
        self.shares_greedy_prefixes = not (cache_bytes is None and target.is_inexact and target.is_reproducible)
        most = psutil.virtual_memory().available / 4 if cache_bytes is None else cache_bytes
        self.loaded_models = [model for model in (target, draft) if model]  # also a draft that nothing proposes with
        for model in self.loaded_models if most else ():
            model.share_blocks(most / self._token_bytes)

    def with_drafters(self, choice: DraftChoice | None) -> ModelPair:
        """Return the same models with other drafters; a draft model must be the loaded one."""
        other = copy.copy(self)
        other.choice, other.draft = choice, self.draft if choice and choice.model else None
        return other

    def compiled_irs(self, drafts: bool = True) -> list[CompiledIR]:
        """Return the compiled IRs of the target and, with ``drafts``, of the draft model."""
        return [model.ir for model in (self.target, self.draft if drafts else None) if model]

    def make_decoders(self) -> DecoderSet:
        """Return new decoders, which know the costs that a profile has measured."""
        target, draft = self._make_decoder(self.target), self._make_decoder(self.draft) if self.draft else None
        costs = InferenceCosts(self.target.verify_ms, self.target.change_ms, target.fills_width, target.rule)
        steps = InferenceCosts()
        if self.draft and draft:
            steps = InferenceCosts(self.draft.verify_ms, self.draft.change_ms, draft.fills_width, draft.rule)
        lookaheads = {sampled: Lookahead(None, costs, steps) for sampled in (False, True)}
        return DecoderSet(target, self._make_drafter(target, draft), draft, lookaheads)

    def fork_decoders(self, decoders: DecoderSet) -> DecoderSet:
        """Return other decoders that continue from what ``decoders`` hold."""
        target, draft = decoders.target.fork(), decoders.draft.fork() if decoders.draft else None
        return DecoderSet(target, self._make_drafter(target, draft), draft, copy.deepcopy(decoders.lookaheads))

    def _make_decoder(self, model: CompiledModel) -> Decoder:
        known = self._known_ids
        if model.ir.target_ids is not None:
            known = KnownIds(missing_ids=np.flatnonzero(known.unknown_mask(model.ir.target_ids)))
        return model.make_decoder(known, shares_blocks=True)

    def _make_drafter(self, target: Decoder, draft: Decoder | None) -> Drafter | None:
        ids = self.draft.ir.target_ids if self.draft else None
        features_of = target if self.draft and self.draft.is_head else None
        width = self.target.ir.logits_width
        return make_drafter(self.choice, draft, features_of, ids, width, self.corpora, self._known_ids)

    def close(self) -> None:
        """Free the models; inferences raise InferenceError from now on."""
        for model in self.loaded_models:
            model.close()

    # ------------------------------------------------------------ the memory of KV caches

    def estimate_cache_bytes(self, tokens: int) -> float:
        """Estimate the memory, in bytes, of the KV caches of a text of ``tokens`` tokens."""
        return sum(tokens * kv_bytes_per_token(ir) + recurrent_row_bytes(ir) for ir in self.compiled_irs())

    @property
    def idle_bytes(self) -> float:
        """The bytes of KV caches that are kept, but that no text needs."""
        return sum(model.idle_bytes for model in self.loaded_models)

    @property
    def keeps_prefixes(self) -> bool:
        """Whether KV caches of ended texts are kept for texts that begin in the same way."""
        return any(model.keeps_prefixes for model in self.loaded_models)

    def limit_cached_tokens(self, max_tokens: float) -> None:
        """Let kept KV caches give way once ``most_tokens`` are cached."""
        for model in self.loaded_models:
            model.limit_cached_tokens(max_tokens)

    def free_idle_blocks(self) -> None:
        """Free the KV caches that no text needs."""
        for model in self.loaded_models:
            model.free_idle_blocks()

    def ensure_memory(self, tokens: int, drafts: bool = True) -> None:
        """Raise OvspecError if the states for ``tokens`` more tokens can't fit into free memory."""
        if tokens * self._token_bytes > LEAST_CHECKED_BYTES:
            check_free_memory(self.compiled_irs(drafts), tokens, self.idle_bytes)
            if tokens * self._token_bytes > psutil.virtual_memory().available:
                self.free_idle_blocks()

    def check_context(self, tokens: int, context: int | None = None) -> None:
        """Raise OvspecError if a text of ``tokens`` tokens exceeds ``context``, or the model's if that is None."""
        context = context or self.target.ir.context_length
        if context and tokens > context:
            raise OvspecError(f"The text would have {tokens} tokens, but the context is {context}; shorten it.")


class DecoderPool:
    """Lends sets of decoders, and makes one when none is idle. Threads may share it."""

    def __init__(self, models: ModelPair) -> None:
        self.models = models
        self._idle_sets: list[tuple[float, DecoderSet]] = []  # with the time since when; the longest idle first
        self._closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of idle sets."""
        return len(self._idle_sets)

    def acquire(self) -> DecoderSet:
        """Return a set without any rows, if possible the one given back last."""
        with self._lock:
            if self._idle_sets:
                return self._idle_sets.pop()[1]
        decoders = self.models.make_decoders()
        decoders.reset(0)  # a user's drafter may create its state there
        return decoders

    def release(self, decoders: DecoderSet) -> None:
        """Empty a set, which frees memory, and keep it for reuse."""
        decoders.reset(0)
        now = time.monotonic()
        with self._lock:
            self._idle_sets = [(since, idle) for since, idle in self._idle_sets if now - since < MAX_IDLE_SECONDS]
            if not self._closed:
                self._idle_sets.append((now, decoders))

    def run_batch(
        self, rows: Iterable[Schedulable], params: Params, count: int | None = None, isolate_errors: bool = False
    ) -> Generator[list[tuple[int, Piece]]]:
        """Generate ``rows`` with decoders of the pool; a row joins when there is room, and leaves when its text ends.

        Yields what ``run_rows`` does.

        Args:
            params: those of most rows; ``batch_size`` and ``lookahead`` are for all.
            count: number of rows, if known; a single row needs no room for others.
            fail_alone: whether a row whose constraints fail ends by itself and has an ``error``.
        """
        decoders, models, most = self.acquire(), self.models, params.batch_size
        try:
            drafter, lookahead = decoders.select_drafting(params)
            room = (
                math.inf
                if count == 1
                else count_free_tokens(models.compiled_irs(drafter is not None), most, models.idle_bytes)
            )
            limits = BatchLimits(
                1 if count == 1 else most, room, isolated_errors=(OvspecError,) if isolate_errors else ()
            )
            yield from run_rows(Scheduler(decoders.target, drafter, lookahead, rows, limits))
        finally:
            self.release(decoders)

    def close(self) -> None:
        """Drop the idle sets, and those that are given back from now on."""
        with self._lock:
            self._closed = True
            self._idle_sets.clear()

    def learned_costs(self, sampled: bool) -> tuple[InferenceCosts, InferenceCosts] | None:
        """Return the costs of verifying and of a draft step by an idle set's auto lookahead, if any set is idle."""
        with self._lock:
            learned = [decoders.lookaheads[sampled] for _, decoders in self._idle_sets]
        return (learned[0].target_costs, learned[0].draft_costs) if learned else None
