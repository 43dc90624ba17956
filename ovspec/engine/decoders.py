"""Decoders of the compiled target and draft, the pool to borrow them from, and limits of their memory."""

from __future__ import annotations

import copy
import math
import threading
import time
import weakref
from collections.abc import Generator, Iterable
from dataclasses import dataclass

import numpy as np
import psutil

from ovspec.base.errors import OvspecError
from ovspec.cache.decoder import Decoder, PrefixCache
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
    check_memory_for_tokens,
    count_free_tokens,
    count_tokens_in_bytes,
    kv_bytes_per_token,
    recurrent_row_bytes,
)
from ovspec.params import Params
from ovspec.setup.engine_choice import CompiledModel
from ovspec.text.vocabulary import KnownTokenIds

NO_LOOKAHEAD = Lookahead(0)  # no proposals, and no forced tokens
MAX_IDLE_SECONDS = 60.0  # each release drops decoders idle for longer


@dataclass
class DecoderSet:
    """The decoders of a session or batch, and their lookaheads, for greedy (False) and for sampled text (True)."""

    target: Decoder
    drafter: Drafter | None
    drafts: list[Decoder]  # of the draft model, or of a head's layers, for the drafter
    lookaheads: dict[bool, Lookahead]

    def select_drafter_and_lookahead(self, params: Params) -> tuple[Drafter | None, Lookahead]:
        """Return the drafter and the lookahead for a call; greedy and sampled texts have separate lookaheads."""
        if params.lookahead == 0:
            return None, NO_LOOKAHEAD
        lookahead = self.lookaheads[params.is_sampled]
        if params.lookahead is not None:
            lookahead = Lookahead(params.lookahead_limit, lookahead.target_costs, lookahead.draft_costs)
        return self.drafter, lookahead

    def reset(self, row_count: int) -> None:
        self.target.reset(row_count)
        if self.drafter:
            self.drafter.reset(row_count)


class ModelPair:
    """The compiled target and draft, and the memory of their KV caches. Thread-safe.

    Args:
        target, draft: the compiled models; the draft may be a draft model or a head.
        draft_choice: the drafters.
        known_ids: the ids of the vocabulary.
        corpora: texts for lookup's proposals.
        cache_bytes: memory of KV caches above which caches of ended texts are evicted; 0 keeps no caches. None: a
            quarter of the free memory; but if exact arithmetic is requested and not possible here, greedy texts share
            no prefix, because their tokens would depend on the cache's contents.
        cache_limit_bytes: memory limit of all KV caches together; None for the free memory.
    """

    def __init__(
        self,
        target: CompiledModel,
        draft: CompiledModel | None,
        draft_choice: DraftChoice | None,
        known_ids: KnownTokenIds,
        corpora: list[NgramIndex],
        cache_bytes: float | None = None,
        cache_limit_bytes: float | None = None,
    ) -> None:
        self.target = target
        self.draft = draft
        self.draft_choice = draft_choice
        self.corpora = corpora
        self.cache_bytes = cache_bytes
        self.cache_limit_bytes = cache_limit_bytes
        self._target_decoders = weakref.WeakSet[Decoder]()
        self._lock = threading.Lock()
        self._known_ids = known_ids
        self._max_token_bytes = sum(kv_bytes_per_token(ir) + recurrent_row_bytes(ir) for ir in self.compiled_irs())
        self.shares_greedy_prefixes = not (
            cache_bytes is None and target.lacks_requested_exactness and target.is_reproducible
        )
        self.loaded_models = [target, *self._list_draft_layers()]  # includes a draft without a drafter
        max_cache_bytes = psutil.virtual_memory().available / 4 if cache_bytes is None else cache_bytes
        max_cache_bytes = min(max_cache_bytes, math.inf if cache_limit_bytes is None else cache_limit_bytes)
        if max_cache_bytes:
            for loaded_model in self.loaded_models:
                loaded_model.share_prefixes(self._count_kept_tokens(max_cache_bytes))

    @property
    def rows_grow(self) -> bool:
        """Whether rows reserve memory as they grow and may be set back: with exact arithmetic, this changes no text."""
        return self.target.arithmetic == "exact"

    def with_drafters(self, draft_choice: DraftChoice | None) -> ModelPair:
        """Return the same models with other drafters; only the loaded draft model is possible."""
        copied_pair = copy.copy(self)
        copied_pair.draft_choice = draft_choice
        if not (draft_choice and draft_choice.model):
            copied_pair.draft = None
        return copied_pair

    def compiled_irs(self, include_draft: bool = True) -> list[CompiledIR]:
        """Return the compiled IRs of the target and, with ``include_draft``, of the draft model."""
        draft_layers = self._list_draft_layers() if include_draft else []
        return [model.ir for model in (self.target, *draft_layers)]

    def make_decoders(self) -> DecoderSet:
        """Return new decoders, with the costs from the profile."""
        target = self._count_texts_of(self._make_decoder(self.target))
        target_costs = InferenceCosts(self.target.verify_ms, self.target.change_ms, target.fills_width, target.rule)
        drafts = [self._make_decoder(model) for model in self._list_draft_layers()]
        draft_costs = InferenceCosts()
        if self.draft:
            draft_costs = InferenceCosts(
                self.draft.verify_ms, self.draft.change_ms, drafts[0].fills_width, drafts[0].rule
            )
        lookaheads = {is_sampled: Lookahead(None, target_costs, draft_costs) for is_sampled in (False, True)}
        return DecoderSet(target, self._make_drafter(target, drafts), drafts, lookaheads)

    def fork_decoders(self, decoders: DecoderSet) -> DecoderSet:
        """Return copies of ``decoders``, with the same texts in their KV caches."""
        target = self._count_texts_of(decoders.target.fork())
        drafts = [draft.fork() for draft in decoders.drafts]
        return DecoderSet(target, self._make_drafter(target, drafts), drafts, copy.deepcopy(decoders.lookaheads))

    def _list_draft_layers(self) -> list[CompiledModel]:
        """Return the draft model, or a head's layers; [] without a draft."""
        return self.draft.list_layers() if self.draft else []

    def _make_decoder(self, model: CompiledModel) -> Decoder:
        known_ids = self._known_ids
        if model.ir.target_ids is not None:
            known_ids = KnownTokenIds(missing_ids=np.flatnonzero(known_ids.unknown_mask(model.ir.target_ids)))
        return model.make_decoder(known_ids, shares_prefixes=True)

    def _make_drafter(self, target: Decoder, drafts: list[Decoder]) -> Drafter | None:
        target_ids = self.draft and self.draft.ir.target_ids
        feature_decoder = target if self.draft and self.draft.is_head else None
        return make_drafter(
            self.draft_choice,
            drafts,
            feature_decoder,
            target_ids,
            self.target.ir.logits_width,
            self.corpora,
            self._known_ids,
            self.draft.proposer_name if self.draft else "",
        )

    def close(self) -> None:
        """Free the models; later forward passes raise InferenceError."""
        for model in self.loaded_models:
            model.close()

    # ------------------------------------------------------------ the memory of KV caches

    def estimate_cache_bytes(self, token_count: int) -> float:
        """Estimate the memory, in bytes, of the KV caches of a text of ``token_count`` tokens."""
        return sum(token_count * kv_bytes_per_token(ir) + recurrent_row_bytes(ir) for ir in self.compiled_irs())

    def count_cached_tokens(self) -> int:
        """Return the number of tokens in the KV caches of all unfinished texts."""
        with self._lock:
            counts = [decoder.blocks_used * decoder.block_size for decoder in self._target_decoders]
        shares_blocks = self.target.prefix_cache and self.target.rollback.kv == "blocks"
        return max(counts, default=0) if shares_blocks else sum(counts)

    def count_batch_tokens(self, target: Decoder, max_rows: int, include_draft: bool = True) -> float:
        """Return how many tokens fit into the memory of a batch of ``max_rows`` in ``target``, an empty decoder.

        They include other texts' tokens in blocks that ``target`` shares, because a batch's budget counts these, too.
        """
        free_tokens = count_free_tokens(self.compiled_irs(include_draft), max_rows, self.idle_cache_bytes)
        free_tokens = min(free_tokens, self.count_tokens_below_limit(include_draft, row_count=max_rows))
        return free_tokens + target.blocks_used * target.block_size

    def count_tokens_below_limit(self, include_draft: bool = True, can_wait: bool = False, row_count: int = 1) -> float:
        """Return the number of tokens, summed over ``row_count`` rows, for which `cache_size` has room; inf without it.

        can_wait: count the room after the end of all running texts.
        """
        if self.cache_limit_bytes is None:
            return math.inf
        max_tokens = count_tokens_in_bytes(self.compiled_irs(include_draft), row_count, self.cache_limit_bytes)
        return max_tokens - (0 if can_wait else self.count_cached_tokens())

    def _count_texts_of(self, target: Decoder) -> Decoder:
        """Let ``count_cached_tokens`` count the texts of ``target``; return it."""
        with self._lock:
            self._target_decoders.add(target)
        return target

    @property
    def prefix_caches(self) -> list[PrefixCache]:
        """The prefix caches of all loaded models."""
        return [model.prefix_cache for model in self.loaded_models if model.prefix_cache]

    @property
    def idle_cache_bytes(self) -> float:
        """Size of the prefix caches' idle entries, in bytes."""
        return sum(cache.idle_bytes for cache in self.prefix_caches)

    def limit_cached_tokens(self, max_tokens: float) -> None:
        """Evict from the prefix caches above ``max_tokens`` cached tokens, or above ``cache_bytes`` if this is less."""
        if self.cache_bytes is not None:
            max_tokens = min(max_tokens, self._count_kept_tokens(self.cache_bytes))
        for cache in self.prefix_caches:
            cache.limit_cached_tokens(max_tokens)

    def _count_kept_tokens(self, kept_bytes: float) -> float:
        # The prefix cache counts recurrent states in tokens of keys and values, except in models without any.
        return kept_bytes / (sum(map(kv_bytes_per_token, self.compiled_irs())) or self._max_token_bytes)

    def free_idle_caches(self) -> None:
        """Free the prefix caches' idle entries."""
        for cache in self.prefix_caches:
            cache.free_idle()

    def ensure_memory(self, token_count: int, include_draft: bool = True, can_wait: bool = False) -> None:
        """Raise OvspecError if the KV caches for ``token_count`` more tokens exceed the free memory or `cache_size`.

        Frees idle entries of the prefix caches if they only fit without these.

        can_wait: whether the text may wait for the end of others, as in a batch.
        """
        if token_count > (free_tokens := self.count_tokens_below_limit(include_draft, can_wait)):
            raise OvspecError(
                f"The text needs a KV cache of {token_count} tokens, but `cache_size` has room for "
                f"{max(0, int(free_tokens))}; shorten the prompt, lower `max_tokens`, or raise `cache_size`."
            )
        if token_count * self._max_token_bytes > LEAST_CHECKED_BYTES:
            check_memory_for_tokens(self.compiled_irs(include_draft), token_count, self.idle_cache_bytes)
            if token_count * self._max_token_bytes > psutil.virtual_memory().available:
                self.free_idle_caches()

    def check_context_length(self, token_count: int, context_length: int | None = None) -> None:
        """Raise OvspecError if a text of ``token_count`` tokens exceeds ``context_length``, by default the model's."""
        context_length = context_length or self.target.ir.context_length
        if context_length and token_count > context_length:
            raise OvspecError(
                f"The text would have {token_count} tokens, but the context is {context_length} tokens; "
                "shorten the text."
            )


class DecoderPool:
    """Lends sets of decoders, and makes a new set if no set is idle. Thread-safe."""

    def __init__(self, models: ModelPair) -> None:
        self.models = models
        self._idle_sets: list[tuple[float, DecoderSet]] = []  # (time of release, set), longest idle first
        self._closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of idle sets."""
        return len(self._idle_sets)

    def acquire(self) -> DecoderSet:
        """Return a set without rows, if possible the last released set."""
        with self._lock:
            if self._idle_sets:
                return self._idle_sets.pop()[1]
        decoders = self.models.make_decoders()
        decoders.reset(0)  # a user's drafter may create its state there
        return decoders

    def release(self, decoders: DecoderSet) -> None:
        """Empty a set to free its memory, and keep it for reuse."""
        decoders.reset(0)
        current_time = time.monotonic()
        with self._lock:
            self._idle_sets = [
                (released_at, idle_set)
                for released_at, idle_set in self._idle_sets
                if current_time - released_at < MAX_IDLE_SECONDS
            ]
            if not self._closed:
                self._idle_sets.append((current_time, decoders))

    def run_batch(
        self, rows: Iterable[Schedulable], params: Params, row_count: int | None = None, isolate_errors: bool = False
    ) -> Generator[list[tuple[int, Piece]]]:
        """Generate ``rows`` by continuous batching, with decoders of the pool.

        Yields the same lists as ``run_rows``.

        Args:
            rows: consumed when the batch has room.
            params: ``batch_size`` and ``lookahead`` apply to all rows; the rows have params of their own.
            row_count: number of rows, if known; for a single row, memory isn't budgeted.
            isolate_errors: if the constraints of a row fail, end only this row, and set its ``error``.
        """
        decoders = self.acquire()
        try:
            drafter, lookahead = decoders.select_drafter_and_lookahead(params)
            max_rows = 1
            max_tokens = math.inf
            if row_count != 1:
                max_rows = params.batch_size
                max_tokens = self.models.count_batch_tokens(decoders.target, max_rows, drafter is not None)
            isolated_errors = (OvspecError,) if isolate_errors else ()
            batch_limits = BatchLimits(max_rows, max_tokens, self.models.rows_grow, isolated_errors=isolated_errors)
            yield from run_rows(Scheduler(decoders.target, drafter, lookahead, rows, batch_limits))
        finally:
            self.release(decoders)

    def close(self) -> None:
        """Drop the idle sets, and all sets at their release from now on."""
        with self._lock:
            self._closed = True
            self._idle_sets.clear()

    def learned_costs(self, is_sampled: bool) -> tuple[InferenceCosts, InferenceCosts] | None:
        """Return an idle set's learned costs, of verifying and of a draft step; None if no set is idle."""
        with self._lock:
            for _, decoders in self._idle_sets:
                lookahead = decoders.lookaheads[is_sampled]
                return lookahead.target_costs, lookahead.draft_costs
        return None
