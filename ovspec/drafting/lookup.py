"""Prompt lookup: propose the continuation of earlier occurrences of the last few tokens.

Based on Saxena's prompt lookup decoding (2023) and Fu et al.'s n-gram pools (arXiv 2402.02057), with an index updated
as the text grows instead of a search through all of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import numpy as np

from ovspec.cache.sequence import EMPTY_ROW, Sequence, measure_common_prefix
from ovspec.drafting.drafter import Drafter, RowToDraft
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.proposal import NO_PROPOSAL, Proposal

MIN_MATCH_TOKENS = 2  # minimum match length
MAX_MATCH_TOKENS = 16  # maximum match length
MAX_COMPARED_POSITIONS = 32  # earlier occurrences compared, latest first
MAX_INDEX_EXCESS_TOKENS = 32_768  # maximum tokens in the index besides the text; a full index is cut to half of this
SEPARATOR = -1  # not a token: matches end there


class NgramIndex:
    """An index of growing texts: the positions of each pair of adjacent tokens."""

    def __init__(self) -> None:
        self._indexed_text = Sequence([SEPARATOR] * MAX_MATCH_TOKENS)
        self._positions_by_pair: dict[int, list[int]] = {}  # pair of tokens -> positions after it
        self._followed_sequence = Sequence()

    @property
    def indexed_tokens(self) -> np.ndarray:
        """All texts, (n,) int64, with separators."""
        return self._indexed_text.tokens

    def add_tokens(self, tokens: np.ndarray) -> None:
        start = len(self._indexed_text)
        self._indexed_text.commit(tokens)
        paired_tokens = self._indexed_text.tokens[start - 2 :].tolist()
        for i in range(len(tokens)):
            pair = paired_tokens[i] << 32 | paired_tokens[i + 1] & 0xFFFFFFFF
            self._positions_by_pair.setdefault(pair, []).append(start + i)

    def add_separator(self) -> None:
        """Separate the next tokens from the earlier tokens: no match spans both."""
        self._indexed_text.commit([SEPARATOR] * 2)

    def follow_sequence(self, sequence: Sequence) -> None:
        """Catch up with ``sequence``. Rolled-back tokens stay in the index: they may be generated again."""
        if len(self._indexed_text) - len(self._followed_sequence) > MAX_INDEX_EXCESS_TOKENS:
            self._keep_last_tokens()
        shared_length = measure_common_prefix(self._followed_sequence, sequence)
        if shared_length < len(self._followed_sequence):
            self.add_separator()
            self._indexed_text.commit(sequence.tokens[max(0, shared_length - MAX_MATCH_TOKENS) : shared_length])
            self._followed_sequence.rewind(shared_length)
        new_tokens = sequence.tokens[shared_length:]
        self.add_tokens(new_tokens)
        self._followed_sequence.commit(new_tokens)

    def remember_text(self, tokens: np.ndarray, max_tokens: int) -> None:
        """Add a text, and forget the oldest texts if there are more than ``max_tokens``."""
        self.add_separator()
        self.add_tokens(tokens[-max_tokens:])
        if len(self._indexed_text) > max_tokens:
            self._keep_last_tokens(max_tokens // 2)

    def _keep_last_tokens(self, count: int = MAX_INDEX_EXCESS_TOKENS // 2) -> None:
        """Start again with the last ``count`` tokens only."""
        last_tokens = self._indexed_text.tokens[-count:].copy()
        self.__init__()
        self.add_tokens(last_tokens)
        self.add_separator()

    def find_matches(self, text_end: np.ndarray) -> tuple[int, list[int]]:
        """Return (length of the longest match with ``text_end``'s end, positions after each match, latest first)."""
        positions = self._positions_by_pair.get(int(text_end[-2]) << 32 | int(text_end[-1]))
        if not positions:
            return 0, []
        latest_positions = np.array(positions[-MAX_COMPARED_POSITIONS:])
        offsets = np.arange(1, min(len(text_end), MAX_MATCH_TOKENS) + 1)
        is_equal = self._indexed_text.tokens[latest_positions[:, None] - offsets] == text_end[::-1][: len(offsets)]
        lengths = np.where(is_equal.all(1), len(offsets), is_equal.argmin(1))
        longest = int(lengths.max())
        return longest, latest_positions[lengths == longest][::-1].tolist()

    def find_continuation(self, positions: list[int], length: int) -> tuple[list[int], list[float]]:
        """Return the most frequent continuation at ``positions``, up to ``length`` tokens, and each token's share.

        A token's share is among the positions with the same tokens before it. A tie goes to the latest position. Beyond
        the end of the text, it continues with the tokens found.
        """
        tokens: list[int] = []
        shares: list[float] = []
        text = self._indexed_text.tokens
        for continuation_index in range(length):
            positions_by_token: dict[int, list[int]] = {}
            for position in positions:
                next_position = position + continuation_index
                token = int(text[next_position]) if next_position < len(text) else tokens[next_position - len(text)]
                positions_by_token.setdefault(token, []).append(position)
            most_frequent = max(positions_by_token, key=lambda token: len(positions_by_token[token]))
            if most_frequent == SEPARATOR:
                break
            tokens.append(most_frequent)
            shares.append(len(positions_by_token[most_frequent]) / len(positions))
            positions = positions_by_token[most_frequent]
        return tokens, shares


class LookupDrafter(Drafter):
    """Proposes tokens from the text so far, from earlier tokens of the session, and from ``corpora``."""

    name = "lookup"

    def __init__(self, corpora: list[NgramIndex] | None = None) -> None:
        self._corpora = corpora or []
        self._row_indexes = [NgramIndex()]

    def propose(self, rows: list[RowToDraft], lookahead: Lookahead) -> list[Proposal]:
        proposals: list[Proposal] = []
        for row, row_index in zip(rows, self._row_indexes, strict=True):
            budget = min(row.draft_budget(self.name), lookahead.max_proposed)
            if budget:
                row_index.follow_sequence(row.sequence)
                proposal = row.cut_to_allowed(self._propose_for_row(row_index, row.sequence, budget))
                proposals.append(lookahead.cut_proposal(proposal, len(rows)))
            else:
                proposals.append(NO_PROPOSAL)
        return proposals

    def reset(self, rows: int) -> None:
        self._row_indexes = [NgramIndex() for _ in range(rows)]

    def reorder(self, rows: list[int]) -> None:
        old_rows = self._row_indexes
        self._row_indexes = []
        for i, row in enumerate(rows):
            if row == EMPTY_ROW:
                self._row_indexes.append(NgramIndex())
            else:
                self._row_indexes.append(copy.deepcopy(old_rows[row]) if row in rows[:i] else old_rows[row])

    def _propose_for_row(self, row_index: NgramIndex, sequence: Sequence, budget: int) -> Proposal:
        text_end = sequence.tokens[-MAX_MATCH_TOKENS:]
        if len(text_end) < MIN_MATCH_TOKENS:
            return NO_PROPOSAL
        match_length, positions = row_index.find_matches(text_end)
        for corpus in self._corpora:
            if match_length < len(text_end):
                corpus_length, corpus_positions = corpus.find_matches(text_end)
                if corpus_length > match_length:
                    row_index, match_length, positions = corpus, corpus_length, corpus_positions
        if match_length < MIN_MATCH_TOKENS:
            return NO_PROPOSAL
        # A longer match makes the same continuation more likely.
        tokens, shares = row_index.find_continuation(positions, min(budget, 2 * match_length))
        if not tokens:
            return NO_PROPOSAL
        confidence = (1 - 1 / match_length) * np.array(shares)
        return Proposal(np.array(tokens, dtype=np.int64), confidence, source=self.name)


def index_texts(texts: Iterable[np.ndarray]) -> NgramIndex:
    """Return an index of ``texts``, each an array of token ids (n,)."""
    index = NgramIndex()
    for tokens in texts:
        index.add_separator()
        index.add_tokens(tokens)
    return index
