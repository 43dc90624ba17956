"""Prompt lookup: propose what followed the last few tokens where they occurred before.

Based on Saxena's prompt lookup decoding (2023) and Fu et al.'s n-gram pools (arXiv 2402.02057), with an index that
grows with the text instead of a search through all of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import numpy as np

from ovspec.cache.sequence import EMPTY_ROW, Sequence, common_prefix
from ovspec.drafting.drafter import Drafter, RowStep
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.proposal import NOTHING, Proposal

LEAST_MATCH, LONGEST_MATCH = 2, 16  # tokens that must match, and that are compared
MOST_POSITIONS = 32  # earlier occurrences that are compared, latest first
MOST_ROLLED_BACK = 32_768  # tokens in an index, which keeps half of them once it is full
SEPARATOR = -1  # not a token: matches end there


class Index:
    """An index of one or more growing texts: where each pair of adjacent tokens occurs."""

    def __init__(self) -> None:
        self._text = Sequence([SEPARATOR] * LONGEST_MATCH)
        self._positions: dict[int, list[int]] = {}  # pair of tokens -> positions after it
        self._followed = Sequence()

    @property
    def tokens(self) -> np.ndarray:
        """All texts, (n,) int64, with separators."""
        return self._text.tokens

    def add(self, tokens: np.ndarray) -> None:
        start = len(self._text)
        self._text.commit(tokens)
        text = self._text.tokens[start - 2 :].tolist()
        for i in range(len(tokens)):
            self._positions.setdefault(text[i] << 32 | text[i + 1] & 0xFFFFFFFF, []).append(start + i)

    def separate(self) -> None:
        """Separate what is added next from what came before, so that no match spans both."""
        self._text.commit([SEPARATOR] * 2)

    def follow(self, sequence: Sequence) -> None:
        """Catch up with ``sequence``. Tokens that were rolled back stay in the index: they may be generated again."""
        if len(self._text) - len(self._followed) > MOST_ROLLED_BACK:
            self._forget()
        shared = common_prefix(self._followed, sequence)
        if shared < len(self._followed):
            self.separate()
            self._text.commit(sequence.tokens[max(0, shared - LONGEST_MATCH) : shared])
            self._followed.rewind(shared)
        new = sequence.tokens[shared:]
        self.add(new)
        self._followed.commit(new)

    def remember(self, tokens: np.ndarray, most: int) -> None:
        """Add a text, and forget the oldest ones if there are more than ``most`` tokens."""
        self.separate()
        self.add(tokens[-most:])
        if len(self._text) > most:
            self._forget(most // 2)

    def _forget(self, left: int = MOST_ROLLED_BACK // 2) -> None:
        """Start again with the last ``left`` tokens only."""
        recent = self._text.tokens[-left:].copy()
        self.__init__()
        self.add(recent)
        self.separate()

    def matches(self, tail: np.ndarray) -> tuple[int, list[int]]:
        """Return (length of the longest match with ``tail``'s end, positions after each such match, latest first)."""
        positions = self._positions.get(int(tail[-2]) << 32 | int(tail[-1]))
        if not positions:
            return 0, []
        latest = np.array(positions[-MOST_POSITIONS:])
        back = np.arange(1, min(len(tail), LONGEST_MATCH) + 1)
        same = self._text.tokens[latest[:, None] - back] == tail[::-1][: len(back)]
        lengths = np.where(same.all(1), len(back), same.argmin(1))
        longest = int(lengths.max())
        return longest, latest[lengths == longest][::-1].tolist()

    def continuation(self, positions: list[int], length: int) -> tuple[list[int], list[float]]:
        """Return (tokens that most often followed at ``positions``, share of the positions that agree on each).

        A tie goes to the latest position. Past the end of the text, it reads on in the tokens found.
        """
        end, tokens, shares = len(self._text), list[int](), list[float]()
        text = self._text.tokens
        for step in range(length):
            found: dict[int, list[int]] = {}
            for position in positions:
                at = position + step
                found.setdefault(int(text[at]) if at < end else tokens[at - end], []).append(position)
            token = max(found, key=lambda token: len(found[token]))
            if token == SEPARATOR:
                break
            tokens.append(token)
            shares.append(len(found[token]) / len(positions))
            positions = found[token]
        return tokens, shares


class Lookup(Drafter):
    """Proposes tokens from the text so far, from what the session held earlier, and from ``corpora``."""

    name = "lookup"

    def __init__(self, corpora: list[Index] | None = None) -> None:
        self._corpora = corpora or []
        self._rows = [Index()]

    def propose(self, rows: list[RowStep], lookahead: Lookahead) -> list[Proposal]:
        proposals = []
        for row, index in zip(rows, self._rows, strict=True):
            budget, found = min(row.draftable(self.name), lookahead.most), NOTHING
            if budget:
                index.follow(row.sequence)
                found = lookahead.cut(row.permitted(self._find(index, row.sequence, budget)), len(rows))
            proposals.append(found)
        return proposals

    def reset(self, rows: int) -> None:
        self._rows = [Index() for _ in range(rows)]

    def reorder(self, rows: list[int]) -> None:
        old, self._rows = self._rows, []
        for i, row in enumerate(rows):
            if row == EMPTY_ROW:
                self._rows.append(Index())
            else:
                self._rows.append(copy.deepcopy(old[row]) if row in rows[:i] else old[row])

    def _find(self, index: Index, sequence: Sequence, budget: int) -> Proposal:
        tail = sequence.tokens[-LONGEST_MATCH:]
        if len(tail) < LEAST_MATCH:
            return NOTHING
        match, positions = index.matches(tail)
        for corpus in self._corpora:
            if match < len(tail):
                elsewhere, other = corpus.matches(tail)
                if elsewhere > match:
                    index, match, positions = corpus, elsewhere, other
        if match < LEAST_MATCH:
            return NOTHING
        # The more tokens match, the longer the text is likely to continue as it did before.
        tokens, shares = index.continuation(positions, min(budget, 2 * match))
        if not tokens:
            return NOTHING
        confidence = (1 - 1 / match) * np.array(shares)
        return Proposal(np.array(tokens, dtype=np.int64), confidence, source=self.name)


def corpus_of(texts: Iterable[np.ndarray]) -> Index:
    """Return an index of ``texts``, each an array of token ids (n,)."""
    index = Index()
    for tokens in texts:
        index.separate()
        index.add(tokens)
    return index
