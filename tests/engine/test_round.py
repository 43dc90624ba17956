"""``run_round`` alone, with scripted decoders and drafters."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ovspec.cache.decoder import FAST_RULE, RollbackMethod
from ovspec.cache.sequence import Sequence
from ovspec.drafting.drafter import Drafter, RowToDraft
from ovspec.drafting.lookahead import Lookahead
from ovspec.engine.round import RowOutcome, run_round
from ovspec.sampling.constraint import Constraint, Constraints
from ovspec.sampling.samplers import GreedySampler

VOCAB = 11


class Counting:
    """A language model whose next token is a fixed function of all tokens before it."""

    rollback = RollbackMethod("mask")
    context_length: int | None = None
    rule = FAST_RULE
    fills_width = False

    def __init__(self) -> None:
        self.reset(1)
        self.seconds, self.inferences = 0.0, 0

    @staticmethod
    def next_token(tokens: list[int]) -> int:
        return (sum((i + 1) * t for i, t in enumerate(tokens)) + len(tokens)) % VOCAB

    def reset(self, rows: int) -> None:
        self.rows = [Sequence() for _ in range(rows)]

    def reuse_prefixes(self, sequences: list[Sequence]) -> None:
        pass

    def feed(self, tokens: list[np.ndarray], logits_counts: list[int], width: int = 0) -> list[np.ndarray]:  # noqa: ARG002
        self.inferences += 1
        logits = []
        for row, new, want in zip(self.rows, tokens, logits_counts, strict=True):
            row.commit(new)
            held = row.tokens.tolist()
            ends = range(len(held) - want + 1, len(held) + 1)
            choices = [self.next_token(held[:end]) for end in ends]
            logits.append(np.eye(VOCAB, dtype=np.float32)[choices])
        return logits

    def truncate(self, row: int, length: int) -> None:
        self.rows[row].rewind(length)

    def joining_chunk_tokens(self, counts: list[int]) -> int:  # noqa: ARG002
        return 1

    def reorder(self, rows: list[int]) -> None:
        self.rows = [self.rows[row].copy() for row in rows]


class Scripted(Drafter):
    """A drafter that proposes the given tokens, right or wrong."""

    def __init__(self, proposals: list[list[int]]) -> None:
        self.proposals = iter(proposals)

    def guess(self, tokens: np.ndarray, budget: int) -> Iterable[int]:
        assert len(tokens)
        return next(self.proposals, [])[:budget]


def a_round(target: Counting, proposals: list[list[int]], sequence: Sequence, budget: int) -> RowOutcome:
    row = RowToDraft(sequence, GreedySampler(), budget + 1)
    outcomes, _ = run_round(target, Scripted(proposals), Lookahead(budget), [row])  # type: ignore[arg-type]  # it is never forked
    return outcomes[0]


@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=5), min_size=1, max_size=12),
)
def test_any_proposals_give_the_plain_text(prompt: list[int], proposals: list[list[int]]) -> None:
    target, sequence = Counting(), Sequence(prompt)
    for _ in proposals[:]:
        a_round(target, proposals[:1], sequence, 5)
        proposals = proposals[1:]
        assert target.rows[0].tokens.tolist() == sequence.tokens[:-1].tolist(), "rejected tokens left a trace"
    plain = list(prompt)
    while len(plain) < len(sequence):
        plain.append(Counting.next_token(plain))
    assert sequence.tokens.tolist() == plain


class Forcing(Constraint):
    """Lets only threes follow."""

    def forced_tokens(self, tokens: np.ndarray) -> list[int]:  # noqa: ARG002
        return [3] * 4


@given(st.integers(1, 6))
def test_forced_tokens_stay_within_the_budget(budget: int) -> None:
    row = RowToDraft(Sequence([1, 2]), GreedySampler(Constraints([Forcing()])), budget)
    outcome = run_round(Counting(), None, Lookahead(), [row])[0][0]  # type: ignore[arg-type]
    assert outcome.tokens.tolist() == [3] * min(budget, 5)
    assert outcome.ended == (budget <= 4)


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), st.integers(0, 5), st.integers(0, 5))
def test_counts_of_a_round(prompt: list[int], right: int, wrong: int) -> None:
    text = list(prompt)
    for _ in range(right):
        text.append(Counting.next_token(text))
    truth = Counting.next_token(text)
    proposal = text[len(prompt) :] + [(truth + 1) % VOCAB] * wrong
    sequence = Sequence(prompt)
    outcome = a_round(Counting(), [proposal], sequence, 10)
    assert outcome.accepted_count == right
    assert len(outcome.proposal.tokens) == right + wrong
    assert sequence.tokens.tolist() == [*text, truth]
