"""A decoder whose logits depend on the last token alone."""

from __future__ import annotations

import numpy as np

from ovspec.cache.decoder import FAST, Decoder, Rollback
from ovspec.cache.sequence import Sequence


class Bigrams:
    """A decoder whose logits depend on the last token."""

    rollback = Rollback("mask")
    context_length: int | None = None
    rule = FAST
    fills = False
    seconds, inferences = 0.0, 0

    def __init__(self, table: np.ndarray) -> None:
        self.table = table
        self.rows = [Sequence()]

    def feed(self, tokens: list[np.ndarray], wanted: list[int], width: int = 0) -> list[np.ndarray]:  # noqa: ARG002
        self.rows[0].commit(tokens[0])
        return [self.table[tokens[0][len(tokens[0]) - wanted[0] :]]]

    def adopt(self, sequences: list[Sequence]) -> None:
        pass

    def truncate(self, row: int, length: int) -> None:
        self.rows[row].rewind(length)

    def reset(self, rows: int) -> None:
        self.rows = [Sequence() for _ in range(rows)]

    def reorder(self, rows: list[int]) -> None: ...

    def joining_chunk(self, counts: list[int]) -> int:  # noqa: ARG002
        return 1

    def fork(self) -> Decoder:
        raise NotImplementedError

    def dump(self) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def restore(self, tokens: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        raise NotImplementedError
