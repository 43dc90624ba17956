"""The tokens of a vocabulary, id by id."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class KnownIds:
    """The ids that have a token: those below ``size``, except ``missing_ids`` (n,). A ``size`` of None: all ids.

    Logits are often wider, padded to a round number; an id of the padding must never be generated.
    """

    size: int | None = None
    missing_ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def restricts(self, width: int) -> bool:
        """Return whether logits of this width include ids without a token."""
        return bool(len(self.missing_ids)) or (self.size is not None and width > self.size)

    def restrict(self, logits: np.ndarray) -> np.ndarray:
        """Cut logits (n, width) float32 to at most ``size`` columns, and set ``missing_ids`` to -inf, in place."""
        logits = logits[:, : self.size]
        if len(self.missing_ids):
            logits[:, self.missing_ids[self.missing_ids < logits.shape[1]]] = -np.inf
        return logits

    def __contains__(self, token: int) -> bool:
        return self.first_unknown(np.array([token])) is None

    def first_unknown(self, ids: np.ndarray) -> int | None:
        """Return the first of ``ids`` (n,), integers of any size, that has no token, or None."""
        unknown = ids[self.unknown_mask(ids)]
        return next(iter(unknown[:1].tolist()), None)

    def unknown_mask(self, ids: np.ndarray) -> np.ndarray:
        """Return for each of ``ids`` (n,) whether it has no token."""
        return (ids < 0) | np.isin(ids, self.missing_ids) | (ids >= (self.size or np.iinfo(np.int64).max))


ALL_IDS = KnownIds()


def make_known_ids(ids: Iterable[int]) -> KnownIds:
    """Return the KnownIds for the ids that have a token; with none given, nothing is known and every id is allowed."""
    present = np.unique(np.fromiter(ids, dtype=np.int64))
    if not len(present):
        return ALL_IDS
    size = int(present[-1]) + 1
    return KnownIds(size, np.setdiff1d(np.arange(size), present))


def describe_id_differences(first: dict[int, str], second: dict[int, str]) -> str | None:
    """Describe how two vocabularies differ, naming the first differences; None if they are the same."""
    ids = [index for index in sorted({*first, *second}) if first.get(index) != second.get(index)]
    if not ids:
        return None
    differences = ", ".join(f"{index} is {first.get(index)!r} and {second.get(index)!r}" for index in ids[:3])
    return f"{len(ids)} ids of their vocabularies differ ({differences})"
