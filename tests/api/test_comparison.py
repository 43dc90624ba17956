"""One definition of a speed-up, and where two texts differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from conftest import PROMPTS
from hypothesis import given
from hypothesis import strategies as st

import ovspec
from ovspec.api import comparison
from ovspec.api.comparison import (
    compare_result_times,
    compare_turns,
    compute_speedup,
    find_divergence,
    iterate_turns,
    rotate_modes,
)
from ovspec.engine.results import Result, Stats

times = st.floats(0.01, 1000)


def stats(tokens: int = 100, rounds: int = 50) -> Stats:
    return Stats(generated_tokens=tokens, rounds=rounds)


@given(st.lists(st.tuples(times, times), min_size=1, max_size=20))
def test_the_speedup_is_that_of_a_turn_that_happened(turns: list[tuple[float, float]]) -> None:
    plain, other = zip(*turns, strict=True)
    found = compute_speedup(plain, other, [stats()])
    ratios = sorted(a / b for a, b in turns)
    assert (found.plain_ms, found.speculative_ms) in turns
    assert found.ratio == found.plain_ms / found.speculative_ms
    assert found.ratios == tuple(ratios)
    assert sum(ratio < found.ratio for ratio in ratios) < max(1, len(ratios) / 2)
    assert sum(ratio > found.ratio for ratio in ratios) <= len(ratios) / 2
    assert found.claimed_ratio == (found.ratio if found.ratio <= 3 else None), "half of the rounds were saved"


@pytest.mark.parametrize(
    ("ratio", "rounds", "claims"),
    [(1.01, 1000, False), (1.25, 980, False), (1.03, 980, True), (1.5, 750, True), (2.0, 400, True), (3.0, 600, False)],
)
def test_a_gain_needs_saved_rounds(ratio: float, rounds: int, claims: bool) -> None:
    """A thousand tokens in 980 rounds can't be a quarter faster: that is the machine's noise."""
    found = compute_speedup([ratio], [1.0], [stats(1000, rounds)])
    assert (found.claimed_ratio is not None) is claims
    assert found.is_clear is claims
    assert compute_speedup([1.0], [ratio], [stats(1000, rounds)]).claimed_ratio == pytest.approx(1 / ratio), (
        "a loss is shown"
    )


@pytest.mark.parametrize(
    ("ratios", "rounds", "proposed", "accepted", "sentence"),
    [
        ((2.0, 2.2, 2.4, 1.9), 50, 80, 50, "speed-up 2.00 (1.90 to 2.40, 4 turns)"),
        ((2.0, 0.9, 2.4, 1.9, 2.0), 50, 80, 50, "speed-up 2.00 (0.90 to 2.40, 5 turns)"),
        ((1.1, 0.9, 1.2, 0.8), 50, 80, 50, "no speed-up: drafting costs more than it brings here; 0.90 of plain speed"),
        ((1.1, 0.9, 1.2, 0.8, 1.3), 50, 80, 50, "no clear speed-up: 1.10 (0.80 to 1.30, 5 turns)"),
        ((1.25,), 98, 9, 2, "no clear speed-up: 1.25 (1.25 to 1.25, 1 turn), noise at 1.02 tokens per round"),
        ((0.8, 0.9, 0.95, 1.1), 100, 0, 0, "(nothing was proposed); 0.90 of plain speed (0.80 to 1.10, 4 turns)"),
        ((0.8, 0.9), 99.9, 9, 1, "(1 of 9 proposed tokens accepted in all turns); 0.80 of plain speed"),
        ((1.4,), 100, 0, 0, "no speed-up: drafting doesn't pay for this model here (nothing was proposed)"),
        ((1.4,), 100, 9, 0, "doesn't pay for this model here (0 of 9 proposed tokens accepted in all turns)"),
        (
            (0.4,),
            100,
            9,
            0,
            "(0 of 9 proposed tokens accepted in all turns); 0.40 of plain speed (0.40 to 0.40, 1 turn)",
        ),
    ],
)
def test_verdicts(ratios: tuple[float, ...], rounds: float, proposed: int, accepted: int, sentence: str) -> None:
    found = compute_speedup(ratios, [1.0] * len(ratios), [stats(1000, int(10 * rounds))])
    assert sentence in found.describe_gain(proposed, accepted)


@pytest.mark.parametrize("rounds", [900, 1000])
@pytest.mark.parametrize(
    ("proposed", "told"), [(0, "nothing was proposed"), (50, "nothing was proposed in the last turn")]
)
def test_a_text_for_which_nothing_is_proposed(rounds: int, proposed: int, told: str) -> None:
    """The difference is then the machine's noise, or what the turns before the last one have lost."""
    found = compute_speedup([0.8, 0.9, 0.95], [1.0] * 3, [stats(1000, rounds)])
    assert (
        found.describe_gain(proposed, 5, last_proposed=0) == f"no speed-up: drafting doesn't pay for this text ({told})"
    )


def test_a_text_of_one_token_counts_its_first() -> None:
    one = Result("", [1], "length", Stats(ttft_ms=8.0, generated_tokens=1, rounds=1))
    two = dataclasses.replace(one, stats=Stats(ttft_ms=4.0, generated_tokens=1, rounds=1))
    assert compare_result_times([one], [two]).ratio == 2
    assert compare_result_times([one], [two]).claimed_ratio is None


def test_a_text_that_came_in_one_round_is_compared_as_a_whole() -> None:
    """What a grammar forces takes no inference, so there is no time per later token to hold against the other's."""
    plain = Result("", [1] * 8, "stop", Stats(ttft_ms=4.0, tpot_ms=2.0, generated_tokens=8, rounds=8))
    forced = Result("", [1] * 8, "stop", Stats(ttft_ms=0.9, tpot_ms=0.0, generated_tokens=8, rounds=0, forced=8))
    found = compare_result_times([plain], [forced])
    assert (found.plain_ms, found.speculative_ms) == (18 / 8, 0.9 / 8)
    assert found.claimed_ratio == pytest.approx(20)
    both = compare_result_times([plain, plain], [forced, plain])
    assert both.ratios == pytest.approx((1.0, 20.0)), "every turn in the same way"


@given(st.integers(1, 6), st.integers(0, 40))
def test_every_way_begins_as_often(count: int, turns: int) -> None:
    ways = list(range(count))
    orders = [rotate_modes(ways, turn) for turn in range(turns * count)]
    assert all(sorted(order) == ways for order in orders)
    assert [sum(order[0] == way for order in orders) for way in ways] == [turns] * count


def test_turns_end_in_time_and_are_even(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(comparison.time, "perf_counter", lambda: now)
    counts = []
    for seconds in (0.1, 1.0, 3.0, 1000.0):  # that a turn takes
        now = 0.0
        turns = iterate_turns(5.0)
        count = 0
        for turn in turns:
            assert turn == count
            count, now = count + 1, now + 1 / seconds
        counts.append(count)
    assert counts == [4, 6, 16, 16]


# ---------------------------------------------------------------- where texts differ


def test_where_texts_part(load: Callable[..., ovspec.LanguageModel]) -> None:
    """The gaps are those of the model's own logits at that place."""
    lm, plain = load(), load().generate(PROMPTS[0], max_tokens=12).token_ids
    logits = lm.next_logits([*lm.encode(PROMPTS[0]).tolist(), *plain[:5]])
    second = int(np.argsort(logits)[-2])
    found = find_divergence(lm, PROMPTS[0], plain, [*plain[:5], second, 9])
    assert found
    assert (found.after, found.plain, found.other) == (5, plain[5], second)
    assert found.gap == pytest.approx(float(logits[plain[5]] - logits[second]))
    assert found.top2_gap == pytest.approx(found.gap)
    sentence = found.describe(lm)
    assert sentence.startswith(
        f"the texts differ after 5 tokens: plain decoding continues with {named(lm, plain[5])}, "
    )
    assert sentence.endswith(f"speculation with {named(lm, second)}; their logits are {found.gap:.4f} apart")


def named(lm: ovspec.LanguageModel, token: int) -> str:
    return f"{lm.tokenizer.decode([token])!r} (id {token})"


def test_texts_of_different_length_and_equal_ones(load: Callable[..., ovspec.LanguageModel]) -> None:
    lm = load()
    assert find_divergence(lm, PROMPTS[0], [5, 6], [5, 6]) is None
    found = find_divergence(lm, PROMPTS[0], [5, 6], [5])
    assert found
    assert (found.after, found.plain, found.other, found.gap) == (1, 6, None, None)
    assert "after 1 token: " in found.describe(lm)
    assert "speculation with the end" in found.describe(lm)
    without = find_divergence(lm, PROMPTS[0], [5, 6], [5, 7], compute_gaps=False)
    assert without
    assert (without.gap, without.top2_gap) == (None, None)


@pytest.mark.parametrize("turn", [None, 0, 1])
def test_one_turn_that_differs_is_shown(load: Callable[..., ovspec.LanguageModel], turn: int | None) -> None:
    """Be it in the texts before the turns (None) or in any turn."""
    lm = load(draft=True)
    result = lm.generate(PROMPTS[0], max_tokens=8)
    other = dataclasses.replace(result, token_ids=[*result.token_ids[:3], 7, *result.token_ids[4:]])
    pairs = {place: (result, other if place == turn else result) for place in (None, 0, 1)}
    found = compare_turns(lm, PROMPTS[0], pairs[None], [pairs[0], pairs[1]])
    assert found.divergence
    assert (found.divergence.after, found.shown_pair[1].token_ids[3]) == (3, 7)
    assert found.equality_sentence.startswith("the texts differ after 3 tokens: plain decoding continues with ")
    assert found.last_pair == pairs[1]
    equal = compare_turns(lm, PROMPTS[0], (result, result), [(result, result)])
    assert (equal.divergence, equal.equality_sentence) == (None, "both texts are identical: 8 tokens")
