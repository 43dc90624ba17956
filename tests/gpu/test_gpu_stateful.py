"""The stateful engine on a GPU, whose states can't be set at any time, and AUTO, which chooses the GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_texts import MARKS, PROMPT, PROMPTS, after, assert_same_where_decided, continued, on_gpu

import ovspec
from ovspec.cache import stateful
from ovspec.cache.stateful import StatefulDecoder
from ovspec.engine.engine_thread import WARM_UP_TEXT
from ovspec.engine.results import Result

Load = Callable[..., ovspec.LanguageModel]
pytestmark = MARKS
N = 24
WAYS: dict[str, dict[str, Any]] = {"stateful": {"engine": "stateful"}, "AUTO": {"device": "AUTO:GPU,CPU"}}


@pytest.fixture(scope="module", params=WAYS)
def load(request: pytest.FixtureRequest) -> Load:
    return partial(on_gpu, **WAYS[request.param])


@pytest.fixture(scope="module")
def plain(load: Load) -> Result:
    return load().generate(PROMPT, max_tokens=N, logprobs=2)


def test_the_same_text_twice(load: Load, plain: Result) -> None:
    lm = load()
    assert lm.target.engine == "stateful"
    assert plain.stats.arithmetic.startswith("fast, not exact")
    for text in (lm.generate(PROMPT, max_tokens=N), lm.generate(PROMPTS, max_tokens=N)[0]):
        assert_same_where_decided(plain, text)


class Wrong(ovspec.Drafter):
    """Proposes tokens that hardly ever come next."""

    def guess(self, tokens: np.ndarray, budget: int) -> np.ndarray:
        return (tokens[-1] + 7 + np.arange(min(3, budget))) % 4000


def test_rejections_copy_no_state(load: Load, plain: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[str] = []
    for name in ("gather_states", "read_states", "write_states"):
        monkeypatch.setattr(stateful, name, lambda *_, name=name: copies.append(name))
    text = load(Wrong).generate(PROMPT, max_tokens=N, lookahead=3)
    assert text.stats.proposed > text.stats.accepted
    assert not copies
    assert_same_where_decided(plain, text)


def test_requests_in_turn_dont_disturb_each_other(load: Load) -> None:
    """OpenVINO's GPU plugin computes with another request's states where two inferences have the same width."""
    lm = load()
    rng = np.random.default_rng(0)
    texts, junk = rng.integers(3, 4000, (3, 60)), rng.integers(3, 4000, (3, 60, 3))
    junks = rng.integers(0, 4, (3, 60))

    def play(turns: list[int]) -> dict[tuple[int, int], np.ndarray]:
        decoders = {row: lm.target.make_decoder() for row in turns}
        for row, decoder in decoders.items():
            decoder.reset(1)
            decoder.feed([texts[row, :40]], [1])
        found = dict[tuple[int, int], np.ndarray]()
        for row in turns:
            decoder = decoders[row]
            at = len(decoder.rows[0])
            new = np.concatenate((texts[row, at : at + 1], junk[row, at, : junks[row, at]]))
            found[row, at] = decoder.feed([new], [len(new)])[0][0].copy()
            decoder.truncate(0, at + 1)
        return found

    together = play([0, 1, 2] * 15)
    for row in range(3):
        for key, logits in play([row] * 15).items():
            np.testing.assert_allclose(together[key], logits, atol=0.5)


def test_rows_leave_a_batch_one_by_one(load: Load) -> None:
    """Equal prompts are read by one row first, which ends first."""
    lm = load()
    plain = lm.generate(WARM_UP_TEXT, max_tokens=8, ignore_eos=True, logprobs=2)
    for text in lm.generate([WARM_UP_TEXT] * 3, max_tokens=8, ignore_eos=True):
        assert_same_where_decided(plain, text)


def test_compaction_keeps_the_text(load: Load, plain: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, decoders = load("lookup"), list[StatefulDecoder]()

    def make(vocabulary: Any, rule: Any = None, shares_prefixes: bool = False) -> StatefulDecoder:  # noqa: ARG001
        decoders.append(StatefulDecoder(lm.target.ir, lm.target.rollback, vocabulary, compaction_threshold=2))
        return decoders[-1]

    monkeypatch.setattr(lm.target, "make_decoder", make)
    monkeypatch.setattr(lm.runtime.decoder_pool, "_idle_sets", [])
    text = lm.generate(PROMPT, max_tokens=N, lookahead=3)
    assert decoders, "made for this text"
    assert lm.target.rollback.copies is None or sum(decoder.compactions for decoder in decoders)
    assert_same_where_decided(plain, text)
    monkeypatch.setattr(lm.runtime.decoder_pool, "_idle_sets", [])


def test_a_session_forks_and_is_kept_in_a_file(load: Load, plain: Result, tmp_path: Path) -> None:
    for text in continued(load("lookup"), 4, N - 4, tmp_path / "session.bin"):
        assert_same_where_decided(after(plain, 4), text)
