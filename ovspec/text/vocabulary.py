"""The tokens of a vocabulary, id by id."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class KnownTokenIds:
    """The ids with a token: all below ``size``, except ``missing_ids`` (n,). A ``size`` of None: all ids.

    Logits are often wider, padded to a round number; an id of the padding must never be generated.
    """

    size: int | None = None
    missing_ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def restricts_width(self, logits_width: int) -> bool:
        """Return whether logits of this width include ids without a token."""
        return bool(len(self.missing_ids)) or (self.size is not None and logits_width > self.size)

    def restrict_logits(self, logits: np.ndarray) -> np.ndarray:
        """Cut logits (n, width) float32 to at most ``size`` columns, and set ``missing_ids`` to -inf, in place."""
        logits = logits[:, : self.size]
        if len(self.missing_ids):
            logits[:, self.missing_ids[self.missing_ids < logits.shape[1]]] = -np.inf
        return logits

    def __contains__(self, token: int) -> bool:
        return self.first_unknown(np.array([token])) is None

    def first_unknown(self, ids: np.ndarray) -> int | None:
        """Return the first of ``ids`` (n,), integers of any size, without a token, or None."""
        unknown_ids = ids[self.unknown_mask(ids)]
        return next(iter(unknown_ids[:1].tolist()), None)

    def unknown_mask(self, ids: np.ndarray) -> np.ndarray:
        """Return whether each of ``ids`` lacks a token, (n,) bool."""
        return (ids < 0) | np.isin(ids, self.missing_ids) | (ids >= (self.size or np.iinfo(np.int64).max))


ALL_IDS = KnownTokenIds()


def make_known_token_ids(ids: Iterable[int]) -> KnownTokenIds:
    """Return the KnownTokenIds for ids with a token; without any, nothing is known and every id is allowed."""
    present_ids = np.unique(np.fromiter(ids, dtype=np.int64))
    if not len(present_ids):
        return ALL_IDS
    size = int(present_ids[-1]) + 1
    return KnownTokenIds(size, np.setdiff1d(np.arange(size), present_ids))


def describe_id_differences(first_vocabulary: dict[int, str], second_vocabulary: dict[int, str]) -> str | None:
    """Describe how two vocabularies differ, naming the first differences; None if they are the same."""
    differing_ids = [
        token_id
        for token_id in sorted({*first_vocabulary, *second_vocabulary})
        if first_vocabulary.get(token_id) != second_vocabulary.get(token_id)
    ]
    if not differing_ids:
        return None
    differences = ", ".join(
        f"{token_id} is {first_vocabulary.get(token_id)!r} and {second_vocabulary.get(token_id)!r}"
        for token_id in differing_ids[:3]
    )
    return f"{len(differing_ids)} ids of their vocabularies differ ({differences})"
