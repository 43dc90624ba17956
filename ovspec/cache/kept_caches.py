"""The prefix cache of the stateful engine: copies of ended texts' caches, for texts with the same prefix.

The paged engine shares blocks instead, without copies (``block_pool.py``).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ovspec.cache.sequence import UNSHARED, Sequence
from ovspec.ir.compile import CompiledIR
from ovspec.ir.heads import FEATURES_OUTPUT
from ovspec.ir.memory import kv_bytes_per_token, recurrent_row_bytes


@dataclass(eq=False)
class KeptCache:
    """A text and its cache, the arrays from ``Decoder.dump``."""

    text: Sequence
    arrays: dict[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        return sum([array.nbytes for array in self.arrays.values()])


class CacheUser(Protocol):
    """A decoder with rows to count as cached tokens."""

    @property
    def rows(self) -> list[Sequence]: ...


class KeptCaches:
    """Caches of a model's ended texts. A text with recurrent states is usable only as a whole, not a prefix of it.

    The least recently used caches are evicted if they and all decoders' rows exceed ``max_cached_tokens``. A cache
    counts by its memory: as the number of tokens with equally large keys and values.
    """

    def __init__(self, ir: CompiledIR, max_cached_tokens: float) -> None:
        self.evicted_count = 0  # in tokens
        self._kv_bytes = kv_bytes_per_token(ir)
        self._token_bytes = self._kv_bytes or recurrent_row_bytes(ir)
        self._sequence_axes = {state.name: state.sequence_axis or 0 for state in ir.kv_states} | {FEATURES_OUTPUT: 0}
        self._has_recurrent_states = bool(ir.recurrent_states)
        self._rope_switch = ir.config.rope_switch_length or sys.maxsize
        self._max_bytes = max_cached_tokens * self._token_bytes
        self._caches: list[KeptCache] = []  # least recently used first
        self._users = weakref.WeakSet[CacheUser]()
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        return sum([cache.nbytes for cache in list(self._caches)])

    @property
    def idle_count(self) -> int:
        """Size of the kept caches, in tokens."""
        return int(self.idle_bytes / self._token_bytes)

    def limit_cached_tokens(self, max_cached_tokens: float) -> None:
        with self._lock:
            self._max_bytes = max_cached_tokens * self._token_bytes
            self._evict()

    def free_idle(self) -> None:
        with self._lock:
            self._caches.clear()

    def add_user(self, user: CacheUser) -> None:
        """Count the rows of decoder ``user`` from now on."""
        with self._lock:
            self._users.add(user)

    def make_room_for_rows(self) -> None:
        """Evict caches if needed because the decoders' rows have grown."""
        if self._caches:
            with self._lock:
                self._evict()

    def keep(self, text: Sequence, dump: Callable[[], dict[str, np.ndarray]]) -> None:
        """Keep the cache of ``text``, the result of ``dump``, unless a kept cache has ``text`` as a prefix."""
        if text.owner is UNSHARED or len(text) * self._kv_bytes > self._max_bytes:
            return
        with self._lock:
            for cache in self._caches:
                if cache.text.owner == text.owner and self._measure_prefix(cache, text.tokens) == len(text):
                    self._mark_used(cache)
                    return
            if not (arrays := dump()):
                return
            new_cache = KeptCache(text.copy(), arrays)
            self._caches = [
                cache
                for cache in self._caches
                if cache.text.owner != text.owner
                or self._measure_prefix(new_cache, cache.text.tokens) < len(cache.text)
            ]
            self._caches.append(new_cache)
            self._evict(len(text))  # the text's row is about to be emptied, so don't count it

    def find_prefix(self, tokens: np.ndarray, owner: Hashable, min_length: int) -> KeptCache | None:
        """Return the longest kept prefix of ``tokens`` (n,) with its cache, or None below ``min_length`` tokens."""
        if len(tokens) < min_length:
            return None
        with self._lock:
            caches = [cache for cache in self._caches if cache.text.owner == owner]
            lengths = [self._measure_prefix(cache, tokens) for cache in caches]
            length = max(lengths, default=0)
            if length < min_length:
                return None
            cache = caches[lengths.index(length)]
            self._mark_used(cache)
            if length == len(cache.text):
                return cache
            arrays = {
                name: np.ascontiguousarray(np.moveaxis(np.moveaxis(array, axis, 0)[:length], 0, axis))
                for name, array in cache.arrays.items()
                for axis in (self._sequence_axes[name],)
            }
            return KeptCache(Sequence(cache.text.tokens[:length]), arrays)

    def _measure_prefix(self, cache: KeptCache, tokens: np.ndarray) -> int:
        """Return the length of the common prefix of ``cache`` and ``tokens``, or 0 if the cache can't be cut to it."""
        length = cache.text.common_prefix_length(tokens)
        crosses_switch = length <= self._rope_switch < len(cache.text)  # its keys are rotated for a longer text
        if length < len(cache.text) and (self._has_recurrent_states or crosses_switch):
            return 0
        return length

    def _mark_used(self, cache: KeptCache) -> None:
        self._caches.remove(cache)
        self._caches.append(cache)

    def _evict(self, uncounted_tokens: int = 0) -> None:
        """Evict caches until they and the rows fit, without counting ``uncounted_tokens`` of the rows."""
        row_tokens = max(0, sum([len(row) for user in self._users for row in user.rows]) - uncounted_tokens)
        max_idle_bytes = self._max_bytes - row_tokens * self._kv_bytes
        while self._caches and self.idle_bytes > max_idle_bytes:
            cache = self._caches.pop(0)
            self.evicted_count += len(cache.text)
