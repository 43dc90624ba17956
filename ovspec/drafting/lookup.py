"""Prompt lookup: propose the tokens that followed earlier occurrences of the last few tokens.

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
from ovspec.drafting.proposal import NO_PROPOSAL, Proposal

MIN_MATCH = 2  # tokens that must match
MAX_MATCH = 16  # tokens that are compared
MAX_POSITIONS = 32  # earlier occurrences that are compared, latest first
MAX_ROLLED_BACK = 32_768  # tokens in an index, which keeps half of them once it is full
SEPARATOR = -1  # not a token: matches end there


class NgramIndex:
    """An index of one or more growing texts: where each pair of adjacent tokens occurs."""

    def __init__(self) -> None:
        self._text = Sequence([SEPARATOR] * MAX_MATCH)
        self._positions: dict[int, list[int]] = {}  # pair of tokens -> positions after it
        self._followed = Sequence()

    @property
    def indexed_tokens(self) -> np.ndarray:
        """All texts, (n,) int64, with separators."""
        return self._text.tokens

    def add_tokens(self, tokens: np.ndarray) -> None:
        start = len(self._text)
        self._text.commit(tokens)
        text = self._text.tokens[start - 2 :].tolist()
        for i in range(len(tokens)):
            self._positions.setdefault(text[i] << 32 | text[i + 1] & 0xFFFFFFFF, []).append(start + i)

    def add_separator(self) -> None:
        """Separate the tokens added next from the earlier ones, so that no match spans both."""
        self._text.commit([SEPARATOR] * 2)

    def follow_sequence(self, sequence: Sequence) -> None:
        """Catch up with ``sequence``. Tokens that were rolled back stay in the index: they may be generated again."""
        if len(self._text) - len(self._followed) > MAX_ROLLED_BACK:
            self._keep_last_tokens()
        shared_length = common_prefix(self._followed, sequence)
        if shared_length < len(self._followed):
            self.add_separator()
            self._text.commit(sequence.tokens[max(0, shared_length - MAX_MATCH) : shared_length])
            self._followed.rewind(shared_length)
        new_tokens = sequence.tokens[shared_length:]
        self.add_tokens(new_tokens)
        self._followed.commit(new_tokens)

    def remember_text(self, tokens: np.ndarray, max_tokens: int) -> None:
        """Add a text, and forget the oldest ones if there are more than ``max_tokens``."""
        self.add_separator()
        self.add_tokens(tokens[-max_tokens:])
        if len(self._text) > max_tokens:
            self._keep_last_tokens(max_tokens // 2)

    def _keep_last_tokens(self, count: int = MAX_ROLLED_BACK // 2) -> None:
        """Start again with the last ``count`` tokens only."""
        recent = self._text.tokens[-count:].copy()
        self.__init__()
        self.add_tokens(recent)
        self.add_separator()

    def find_matches(self, tail: np.ndarray) -> tuple[int, list[int]]:
        """Return (length of the longest match with ``tail``'s end, positions after each such match, latest first)."""
        positions = self._positions.get(int(tail[-2]) << 32 | int(tail[-1]))
        if not positions:
            return 0, []
        latest_positions = np.array(positions[-MAX_POSITIONS:])
        offsets = np.arange(1, min(len(tail), MAX_MATCH) + 1)
        equal = self._text.tokens[latest_positions[:, None] - offsets] == tail[::-1][: len(offsets)]
        lengths = np.where(equal.all(1), len(offsets), equal.argmin(1))
        longest = int(lengths.max())
        return longest, latest_positions[lengths == longest][::-1].tolist()

    def find_continuation(self, positions: list[int], length: int) -> tuple[list[int], list[float]]:
        """Return (tokens that most often followed at ``positions``, share of the positions that agree on each).

        A tie goes to the latest position. Past the end of the text, it reads on in the tokens found.
        """
        tokens: list[int] = []
        shares: list[float] = []
        text = self._text.tokens
        for step in range(length):
            positions_by_token: dict[int, list[int]] = {}
            for position in positions:
                index = position + step
                token = int(text[index]) if index < len(text) else tokens[index - len(text)]
                positions_by_token.setdefault(token, []).append(position)
            most_frequent = max(positions_by_token, key=lambda token: len(positions_by_token[token]))
            if most_frequent == SEPARATOR:
                break
            tokens.append(most_frequent)
            shares.append(len(positions_by_token[most_frequent]) / len(positions))
            positions = positions_by_token[most_frequent]
        return tokens, shares


class Lookup(Drafter):
    """Proposes tokens from the text so far, from earlier tokens of the session, and from ``corpora``."""

    name = "lookup"

    def __init__(self, corpora: list[NgramIndex] | None = None) -> None:
        self._corpora = corpora or []
        self._rows = [NgramIndex()]

    def propose(self, rows: list[RowStep], lookahead: Lookahead) -> list[Proposal]:
        proposals: list[Proposal] = []
        for row, index in zip(rows, self._rows, strict=True):
            budget = min(row.draft_budget(self.name), lookahead.max_proposed)
            if budget:
                index.follow_sequence(row.sequence)
                proposal = row.cut_to_allowed(self._look_up(index, row.sequence, budget))
                proposals.append(lookahead.cut_proposal(proposal, len(rows)))
            else:
                proposals.append(NO_PROPOSAL)
        return proposals

    def reset(self, rows: int) -> None:
        self._rows = [NgramIndex() for _ in range(rows)]

    def reorder(self, rows: list[int]) -> None:
        old_rows = self._rows
        self._rows = []
        for i, row in enumerate(rows):
            if row == EMPTY_ROW:
                self._rows.append(NgramIndex())
            else:
                self._rows.append(copy.deepcopy(old_rows[row]) if row in rows[:i] else old_rows[row])

    def _look_up(self, index: NgramIndex, sequence: Sequence, budget: int) -> Proposal:
        tail = sequence.tokens[-MAX_MATCH:]
        if len(tail) < MIN_MATCH:
            return NO_PROPOSAL
        length, positions = index.find_matches(tail)
        for corpus in self._corpora:
            if length < len(tail):
                corpus_length, corpus_positions = corpus.find_matches(tail)
                if corpus_length > length:
                    index, length, positions = corpus, corpus_length, corpus_positions
        if length < MIN_MATCH:
            return NO_PROPOSAL
        # The more tokens match, the longer the text is likely to continue as it did before.
        tokens, shares = index.find_continuation(positions, min(budget, 2 * length))
        if not tokens:
            return NO_PROPOSAL
        confidence = (1 - 1 / length) * np.array(shares)
        return Proposal(np.array(tokens, dtype=np.int64), confidence, source=self.name)


def index_texts(texts: Iterable[np.ndarray]) -> NgramIndex:
    """Return an index of ``texts``, each an array of token ids (n,)."""
    index = NgramIndex()
    for tokens in texts:
        index.add_separator()
        index.add_tokens(tokens)
    return index
