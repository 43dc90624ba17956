"""The tokens of a vocabulary, id by id."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class KnownIds:
    """The ids that a tokenizer can spell: those below ``size`` but for ``gaps`` (n,). None knows them all.

    Logits are often wider than that, padded to a round number; no id of the padding may come out.
    """

    size: int | None = None
    gaps: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def restricts(self, width: int) -> bool:
        """Whether logits of this width have places for ids that nobody knows."""
        return bool(len(self.gaps)) or (self.size is not None and width > self.size)

    def restrict(self, logits: np.ndarray) -> np.ndarray:
        """(n, width) float32 -> (n, at most size), the gaps' logits overwritten by -inf."""
        logits = logits[:, : self.size]
        if len(self.gaps):
            logits[:, self.gaps[self.gaps < logits.shape[1]]] = -np.inf
        return logits

    def first_unknown(self, ids: np.ndarray) -> int | None:
        """The first of ``ids`` (n,) that is not known."""
        unknown = ids[(ids < 0) | np.isin(ids, self.gaps) | (ids >= (self.size or np.iinfo(np.int64).max))]
        return int(unknown[0]) if len(unknown) else None


ALL_IDS = KnownIds()


def known_ids(ids: Iterable[int]) -> KnownIds:
    """From the ids that have a token; no id at all means that nothing is known of them."""
    present = np.unique(np.fromiter(ids, dtype=np.int64))
    if not len(present):
        return ALL_IDS
    size = int(present[-1]) + 1
    return KnownIds(size, np.setdiff1d(np.arange(size), present))


def tokens_by_id(tokenizer_json: dict[str, Any]) -> dict[int, str]:
    """Every token of a ``tokenizer.json``, as it is spelt there."""
    vocab = tokenizer_json.get("model", {}).get("vocab", {})
    if isinstance(vocab, dict):
        tokens = {index: piece for piece, index in vocab.items()}
    else:  # Unigram: [piece, score] by id
        tokens = {index: entry[0] for index, entry in enumerate(vocab)}
    added = {token["id"]: token["content"] for token in tokenizer_json.get("added_tokens", [])}
    return tokens | added


def differing_ids(ours: dict[int, str], theirs: dict[int, str]) -> str | None:
    """How two vocabularies differ, naming the first differences; None where they are the same."""
    ids = [index for index in sorted({*ours, *theirs}) if ours.get(index) != theirs.get(index)]
    if not ids:
        return None
    first = ", ".join(f"{index} is {ours.get(index)!r} and {theirs.get(index)!r}" for index in ids[:3])
    return f"{len(ids)} ids of their vocabularies differ ({first})"
