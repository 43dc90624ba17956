"""A decoder whose logits depend on the last token alone."""

from __future__ import annotations

import numpy as np

from ovspec.cache.decoder import FAST_RULE, Decoder, Features, RollbackMethod
from ovspec.cache.sequence import Sequence


class Bigrams:
    """A decoder whose logits depend on the last token; a head's are those of its ids only, (n,)."""

    rollback = RollbackMethod("mask")
    context_length: int | None = None
    rule = FAST_RULE
    fills_width = False
    block_size, blocks_used = 1, 0
    seconds, inferences = 0.0, 0
    block_size, blocks_used = 1, 0

    def __init__(self, table: np.ndarray, ids: np.ndarray | None = None) -> None:
        self.table = table if ids is None else table[:, ids]
        self.rows = [Sequence()]

    def feed(
        self,
        tokens: list[np.ndarray],
        logits_counts: list[int],
        width: int = 0,  # noqa: ARG002
        features: Features = None,  # noqa: ARG002
    ) -> list[np.ndarray]:
        self.rows[0].commit(tokens[0])
        return [self.table[tokens[0][len(tokens[0]) - logits_counts[0] :]]]

    def features(self, row: int, begin: int, end: int) -> np.ndarray:
        raise NotImplementedError

    @property
    def hidden(self) -> list[np.ndarray]:
        raise NotImplementedError

    def reuse_prefixes(self, sequences: list[Sequence]) -> None:
        pass

    def truncate(self, row: int, length: int) -> None:
        self.rows[row].rewind(length)

    def reset(self, rows: int) -> None:
        self.rows = [Sequence() for _ in range(rows)]

    def reorder(self, rows: list[int]) -> None: ...

    def joining_chunk_tokens(self, counts: list[int]) -> int:  # noqa: ARG002
        return 1

    def fork(self) -> Decoder:
        raise NotImplementedError

    def dump(self) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def restore(self, tokens: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        raise NotImplementedError
