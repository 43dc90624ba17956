from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovspec.cache.sequence import Sequence, measure_common_prefix

TOKENS = st.lists(st.integers(0, 5), max_size=60)


@given(st.lists(st.tuples(TOKENS, st.integers(0, 100)), max_size=8))
def test_commits_and_rewinds_like_a_list(steps: list[tuple[list[int], int]]) -> None:
    sequence, model = Sequence(), []
    for tokens, length in steps:
        sequence.commit(tokens)
        model += tokens
        length = min(length, len(model))
        sequence.rewind(length)
        model = model[:length]
        assert sequence.tokens.tolist() == model
        assert len(sequence) == len(model)


@given(TOKENS, TOKENS, TOKENS)
def test_common_prefix(shared: list[int], a: list[int], b: list[int]) -> None:
    x, y = shared + a, shared + b
    expected = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
    assert measure_common_prefix(Sequence(x), Sequence(y)) == expected


def test_rewinding_forward_is_refused() -> None:
    with pytest.raises(ValueError, match="can't be rewound"):
        Sequence([1, 2]).rewind(3)


def test_a_copy_lives_on_its_own() -> None:
    a = Sequence([1, 2, 3])
    b = a.copy()
    b.rewind(1)
    b.commit([9])
    assert a.tokens.tolist() == [1, 2, 3]
