"""Texts that cross LongRoPE's switch: where they were fed, forked, cut or restored never changes the logits.

The reference is Hugging Face's model without a cache: what follows a text is computed with the rotary frequencies of
that text's length.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES
from family_models import export
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kept import kept_model
from transformers import AutoModelForCausalLM

import ovspec
from ovspec.cache.decoder import FeedRule, RollbackMethod
from ovspec.cache.decoder_maker import make_decoder
from ovspec.cache.sequence import EMPTY_ROW, Sequence, catch_up
from ovspec.cache.stateful import RowByRowDecoder
from ovspec.ir.compile import CompiledIR, compile_ir
from ovspec.ir.device import DeviceOptions

pytestmark = pytest.mark.filterwarnings("ignore")  # from tracing
SWITCH = 16  # of the model below: the last length with the short factors
TEXT = np.random.default_rng(5).integers(3, 4096, 3 * SWITCH)
NEAR = (SWITCH - 1, SWITCH, SWITCH + 1)


@dataclasses.dataclass(frozen=True, eq=False)
class LongRope:
    """A random phi3 whose frequencies change after ``SWITCH`` tokens, and its IR."""

    model: Any
    folder: Path
    ir: CompiledIR

    def logits(self, text: np.ndarray, last: int = 1) -> np.ndarray:
        """Return the logits after each of the ``last`` tokens, each from a pass over the text up to there."""
        return np.stack([self.after(tuple(text[:end])) for end in range(len(text) - last + 1, len(text) + 1)])

    @functools.lru_cache(maxsize=4096)  # noqa: B019  (there is one)
    def after(self, text: tuple[int, ...]) -> np.ndarray:
        """Return the logits after ``text``."""
        with torch.no_grad():
            return self.model(torch.tensor([text]), use_cache=False).logits[0, -1].numpy()

    def check(self, logits: np.ndarray, text: np.ndarray) -> None:
        """Check the logits after the last tokens of ``text``."""
        expected = self.logits(text, len(logits))
        np.testing.assert_allclose(logits, expected, atol=2e-3 * expected.std())


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> LongRope:
    family = FAMILIES["phi3, longrope"]
    short = family.arguments | {"original_max_position_embeddings": SWITCH}
    folder = kept_model(
        tmp_path_factory, "longrope", lambda place: export(dataclasses.replace(family, arguments=short), place)
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", attn_implementation="eager").eval()
    ir = compile_ir(folder / "ir", DeviceOptions(precision="f32", cache_dir=cache_dir))
    assert ir.config.rope_switch_length == SWITCH
    return LongRope(model, folder / "ir", ir)


@pytest.fixture(params=["exact", pytest.param("fast", marks=pytest.mark.slow)])
def make(request: pytest.FixtureRequest, longrope: LongRope) -> Callable[[], RowByRowDecoder]:
    """Return what makes an empty decoder, in either arithmetic."""

    def make_exact_or_fast() -> RowByRowDecoder:
        exact = request.param == "exact"
        decoder = make_decoder(longrope.ir, RollbackMethod("mask"), rule=FeedRule(first_apart=exact, rows_apart=exact))
        assert isinstance(decoder, RowByRowDecoder)  # a long row would change the frequencies of the others
        return decoder

    return make_exact_or_fast


def test_the_switch_is_seen(longrope: LongRope) -> None:
    """The other factors change the logits a hundred times more than ``LongRope.check`` allows."""
    text = torch.tensor(TEXT[None, : SWITCH + 1])
    with torch.no_grad():
        at_once = longrope.model(text, use_cache=False).logits[0, SWITCH - 1].numpy()  # with the longer text's factors
    expected = longrope.logits(TEXT[:SWITCH])[0]
    assert np.abs(at_once - expected).max() > 0.2 * expected.std()


@pytest.mark.parametrize("end", NEAR)
def test_a_prompt_that_ends_at_the_switch(longrope: LongRope, make: Callable[[], RowByRowDecoder], end: int) -> None:
    """Token by token from there, and several at once."""
    alone, together = make(), make()
    for decoder in (alone, together):
        longrope.check(decoder.feed([TEXT[:end]], [1])[0], TEXT[:end])
    for length in range(end, SWITCH + 4):
        longrope.check(alone.feed([TEXT[length : length + 1]], [1])[0], TEXT[: length + 1])
    longrope.check(together.feed([TEXT[end : SWITCH + 4]], [SWITCH + 4 - end])[0], TEXT[: SWITCH + 4])


@pytest.mark.parametrize("wanted", [0, 1, SWITCH, 2 * SWITCH])
def test_one_feed_across_the_switch(longrope: LongRope, make: Callable[[], RowByRowDecoder], wanted: int) -> None:
    decoder = make()
    logits = decoder.feed([TEXT[: 2 * SWITCH]], [wanted])[0]
    assert len(logits) == wanted
    if wanted:
        longrope.check(logits, TEXT[: 2 * SWITCH])
    longrope.check(decoder.feed([TEXT[2 * SWITCH :][:1]], [1])[0], TEXT[: 2 * SWITCH + 1])


@pytest.mark.parametrize("end", [SWITCH - 3, *NEAR, SWITCH + 5])
@pytest.mark.parametrize("how", ["reorder", "fork"])
def test_a_row_is_forked_and_both_go_on(
    longrope: LongRope, make: Callable[[], RowByRowDecoder], how: str, end: int
) -> None:
    """One with the text, at once, and one with other tokens, one by one."""
    decoder = make()
    decoder.feed([TEXT[:end]], [0])
    other, row = decoder, 1
    if how == "reorder":
        decoder.reorder([0, 0])
    else:
        other, row = decoder.fork(), 0
    texts = [TEXT[:end], TEXT[:end]]
    nothing = [TEXT[:0]] * len(decoder.rows)
    for new in np.split(TEXT[::-1][:6], 6):
        texts[1] = np.concatenate((texts[1], new))
        longrope.check(other.feed([*nothing[:row], new], [0] * row + [1])[row], texts[1])
    texts[0] = TEXT[: end + 6]
    fed = decoder.feed([TEXT[end : end + 6], *nothing[1:]], [6, *[0] * len(nothing[1:])])
    longrope.check(fed[0], texts[0])
    assert other.rows[row].tokens.tolist() == texts[1].tolist()


@pytest.mark.parametrize("end", [SWITCH - 3, *NEAR, SWITCH + 5])
def test_a_cache_is_restored_in_another_decoder(
    longrope: LongRope, make: Callable[[], RowByRowDecoder], end: int
) -> None:
    decoder, other = make(), make()
    other.feed([TEXT[::-1][: SWITCH + 2]], [0])  # what it held, on either side, is forgotten
    decoder.feed([TEXT[: end + 2]], [2])
    decoder.truncate(0, end)
    if len(decoder.rows[0]) < end:  # it crossed back
        decoder.feed([TEXT[:end]], [0])
    arrays = decoder.dump()
    assert arrays
    other.restore(TEXT[:end], arrays)
    for driven in (other, decoder):
        longrope.check(driven.feed([TEXT[end : end + 6]], [6])[0], TEXT[: end + 6])
    other.restore(TEXT[:end], arrays)
    other.truncate(0, end - 1)
    longrope.check(other.feed([TEXT[len(other.rows[0]) : end]], [1])[0], TEXT[:end])


@pytest.mark.parametrize("length", [0, 1, SWITCH - 3, *NEAR])
def test_a_text_is_cut_after_it_crossed(longrope: LongRope, make: Callable[[], RowByRowDecoder], length: int) -> None:
    """The next text is another one, and crosses again."""
    decoder = make()
    decoder.feed([TEXT[: SWITCH + 6]], [1])
    text = np.concatenate((TEXT[:length], TEXT[::-1][: SWITCH + 4 - length]))
    for end in range(length + 1, len(text) + 1):
        unseen = catch_up(decoder, 0, Sequence(text[:end]))
        longrope.check(decoder.feed([unseen], [1])[0], text[:end])


def test_a_session_file_on_either_side_of_the_switch(longrope: LongRope, tmp_path: Path, cache_dir: Path) -> None:
    """Continuing a loaded session gives the text of the one that went on."""
    lm = ovspec.load(longrope.folder, "lookup", engine="stateful", precision="f32", cache_dir=cache_dir)
    for end in (SWITCH - 3, *NEAR, SWITCH + 5):
        session, loaded = lm.session(), lm.session()
        session.append(TEXT[: end - 2].tolist())
        session.generate(max_tokens=2, ignore_eos=True)
        session.save(tmp_path / str(end))
        loaded.load(tmp_path / str(end))
        for one in (session, loaded):
            one.append([5, 6])
            one.generate(max_tokens=8, ignore_eos=True)
        assert loaded.tokens == session.tokens
        text = np.array(session.tokens)
        for length in range(end + 2, len(text)):
            assert longrope.logits(text[:length])[0].argmax() == text[length]
        session.close()
        loaded.close()


def test_kept_caches_on_either_side_of_the_switch(
    longrope: LongRope, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that start from the caches of shorter and longer ones are those of a forward pass."""
    monkeypatch.setattr("ovspec.cache.stateful.MIN_SHARED_TOKENS", 4)
    lm = ovspec.load(longrope.folder, "none", engine="stateful", precision="f32", cache_dir=cache_dir, cache_memory=0.1)
    lm.target.rollback = RollbackMethod("mask")  # the probe's text crosses this switch, so that it finds copies wrong
    cached_tokens = {}
    for end in (SWITCH + 20, SWITCH - 3, SWITCH + 1, SWITCH - 3, SWITCH + 5):
        result = lm.generate(TEXT[:end].tolist(), max_tokens=4, ignore_eos=True)
        cached_tokens[end] = result.stats.cached_tokens
        text = np.concatenate((TEXT[:end], result.token_ids))
        for length in range(end, len(text)):
            assert longrope.logits(text[:length])[0].argmax() == text[length]
    assert cached_tokens[SWITCH - 3] == SWITCH - 4
    assert cached_tokens[SWITCH + 5] >= SWITCH + 1


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.lists(st.integers(0, SWITCH + 2), min_size=3, max_size=3)),
        st.tuples(st.just("truncate"), st.tuples(st.integers(0, 2), st.integers(0, 9))),
        st.tuples(st.just("reorder"), st.lists(st.integers(EMPTY_ROW, 2), min_size=1, max_size=3)),
        st.tuples(st.just("restore"), st.none()),
    ),
    min_size=2,
    max_size=10,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_random_use(longrope: LongRope, make: Callable[[], RowByRowDecoder], operations: list[tuple[str, Any]]) -> None:
    decoder, tokens = make(), np.random.default_rng(1)
    for kind, argument in operations:
        held = [row.tokens.copy() for row in decoder.rows]
        if kind == "feed":
            room = [max(0, len(TEXT) - len(text)) for text in held]
            counts = [min(count, most) for count, most in zip(argument, room, strict=False)]
            if not any(counts):
                continue
            new = [tokens.integers(3, 4096, count) for count in counts]
            wanted = [count if row % 2 else min(count, 1) for row, count in enumerate(counts)]
            logits = decoder.feed(new, wanted)
            held = [np.concatenate(pair) for pair in zip(held, new, strict=True)]
            for row, want in enumerate(wanted):
                if want:
                    longrope.check(logits[row], held[row])
        elif kind == "truncate":
            row = argument[0] % len(held)
            length = max(0, len(held[row]) - argument[1])
            decoder.truncate(row, length)
            left = len(decoder.rows[row])
            assert left in (0, length)  # all of a text that crossed back
            held[row] = held[row][:left]
        elif kind == "reorder":
            picks = [pick if pick == EMPTY_ROW else pick % len(held) for pick in argument]
            decoder.reorder(picks)
            held = [TEXT[:0] if pick == EMPTY_ROW else held[pick] for pick in picks]
        elif arrays := decoder.dump():
            decoder.restore(held[0], arrays)
            held = held[:1]
        assert [row.tokens.tolist() for row in decoder.rows] == [text.tolist() for text in held]
