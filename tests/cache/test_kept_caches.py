"""The prefix cache of the stateful engine: copies that are found by their beginning, and change no bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hybrid
import numpy as np
import pytest
from conftest import ROOT
from test_prefix_cache import PROMPT, TEXT, converse

import ovspec
from ovspec.cache.kept_caches import KeptCaches
from ovspec.cache.sequence import UNSHARED, Sequence
from ovspec.ir.compile import StateVariable
from ovspec.ir.memory import kv_bytes_per_token

Load = Callable[..., ovspec.LanguageModel]
KEY = StateVariable("key", 0, 2, 4)
CONVOLUTION = StateVariable("convolution", 0, None, 6)


def kept_caches(
    max_tokens: float = 1000, states: tuple[StateVariable, ...] = (KEY,), switch: int | None = None
) -> KeptCaches:
    ir: Any = SimpleNamespace(
        kv_states=[state for state in states if state.sequence_axis is not None],
        recurrent_states=[state for state in states if state.sequence_axis is None],
        kv_precision="f32",
        config=SimpleNamespace(rope_switch_length=switch),
        output_width=lambda name: 0,  # noqa: ARG005
    )
    return KeptCaches(ir, max_tokens)


def keep(caches: KeptCaches, tokens: range, owner: Any = None) -> None:
    """Keep a cache whose keys are the tokens themselves, in all of their four values."""
    text = Sequence(tokens)
    text.owner = owner
    keys = np.broadcast_to(np.array(tokens, dtype=np.float32)[None, None, :, None], (1, 2, len(tokens), 2))
    caches.keep(text, lambda: {"key": np.ascontiguousarray(keys)})


def found_length(caches: KeptCaches, tokens: range, owner: Any = None) -> int:
    prefix = caches.find_prefix(np.array(tokens), owner, 1)
    if prefix is None:
        return 0
    keys = prefix.arrays["key"]
    assert keys.shape == (1, 2, len(prefix.text), 2) and keys.flags.c_contiguous
    assert (keys == prefix.text.tokens[:, None]).all()
    assert prefix.text.tokens.tolist() == list(tokens[: len(prefix.text)])
    return len(prefix.text)


def test_the_longest_prefix_is_found_and_cut() -> None:
    caches = kept_caches()
    keep(caches, range(50))
    keep(caches, range(100, 180))
    assert found_length(caches, range(40)) == 40
    assert found_length(caches, range(60)) == 50
    assert found_length(caches, range(100, 300)) == 80
    assert found_length(caches, range(7, 60)) == 0
    assert caches.find_prefix(np.arange(40), None, 41) is None
    keep(caches, range(120))
    assert found_length(caches, range(130)) == 120
    assert caches.idle_count == 200, "the shorter text is contained in the longer one"
    keep(caches, range(30))
    assert caches.idle_count == 200


def test_owners_share_nothing() -> None:
    caches = kept_caches()
    keep(caches, range(50), "one")
    keep(caches, range(60), UNSHARED)
    assert found_length(caches, range(50), "one") == 50
    assert not any(found_length(caches, range(50), owner) for owner in (None, "other", UNSHARED))
    keep(caches, range(70), "other")
    assert found_length(caches, range(80), "one") == 50


def test_the_longest_unused_is_evicted() -> None:
    caches = kept_caches(120)
    keep(caches, range(50))
    keep(caches, range(100, 150))
    assert found_length(caches, range(50)) == 50
    keep(caches, range(200, 240))
    assert found_length(caches, range(100, 150)) == 0
    assert found_length(caches, range(50)) == 50
    assert caches.evicted_count == 50 and caches.idle_bytes == 90 * 4 * 4
    keep(caches, range(1000, 1200))
    assert found_length(caches, range(50)) == 50, "what never fits evicts nothing"
    caches.limit_cached_tokens(60)
    assert caches.idle_count == 50
    caches.free_idle()
    assert not caches.idle_bytes


def test_recurrent_states_are_found_as_they_are() -> None:
    caches = kept_caches(states=(KEY, CONVOLUTION))
    keep(caches, range(50))
    keep(caches, range(60))
    assert [found_length(caches, range(end)) for end in (49, 50, 55, 90)] == [0, 50, 50, 60]


def test_keys_of_a_text_beyond_the_switch_serve_no_shorter_one() -> None:
    caches = kept_caches(switch=40)
    keep(caches, range(30))
    keep(caches, range(60))
    assert [found_length(caches, range(end)) for end in (25, 35, 40, 41, 80)] == [25, 30, 30, 41, 60]


@pytest.fixture(params=["demo", "recurrent"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Load:
    folder = ROOT / "models" / "demo"
    if request.param == "recurrent":
        folder = hybrid.shared_export(tmp_path_factory)

    def load(draft: str = "lookup", **options: Any) -> ovspec.LanguageModel:
        lm = ovspec.load(folder, draft, engine="stateful", precision="f32", cache_dir=cache_dir, **options)
        assert lm.target.engine == "stateful"
        return lm

    return load


def test_a_chat_reads_only_what_is_new(make: Load) -> None:
    lm, cold = make(cache_memory=0.1), make(cache_memory=0)
    assert isinstance(lm.target.prefix_cache, KeptCaches) and not cold.target.prefix_cache
    first, again = (lm.generate(PROMPT, max_tokens=20, ignore_eos=True) for _ in range(2))
    assert again.stats.cached_tokens == again.stats.prompt_tokens - 1, "the last one is fed for its logits"
    assert first.token_ids == again.token_ids == cold.generate(PROMPT, max_tokens=20, ignore_eos=True).token_ids
    turn: list[int] = [*lm.encode(PROMPT).tolist(), *first.token_ids, *lm.encode(TEXT).tolist()]
    second, expected = (model.generate(turn, max_tokens=20) for model in (lm, cold))
    assert second.stats.cached_tokens >= first.stats.prompt_tokens + 19, "the answer is known, too"
    assert second.token_ids == expected.token_ids
    assert lm.verify(second).ok
    assert not cold.generate(PROMPT, max_tokens=4).stats.cached_tokens
    lm.runtime.models.free_idle_caches()
    assert not lm.generate(PROMPT, max_tokens=4).stats.cached_tokens


@pytest.mark.parametrize("memory", [pytest.param(0.1, marks=pytest.mark.slow), 1e-3])
def test_conversations(make: Load, memory: float) -> None:
    lm, cold = make(cache_memory=memory), make("none", cache_memory=0)
    assert sum(converse(lm, cold, seed) for seed in range(3)) > 100
    assert lm.target.prefix_cache and lm.target.prefix_cache.idle_bytes <= memory * 1e9


def test_rows_and_kept_caches_share_a_budget(make: Load) -> None:
    lm = make("none", cache_memory=1e-3)
    cache, kv_bytes = lm.target.prefix_cache, kv_bytes_per_token(lm.target.ir)
    if not (isinstance(cache, KeptCaches) and kv_bytes):
        pytest.skip("its caches don't grow")
    cache.limit_cached_tokens(400)
    texts = [f"{number}{TEXT}{TEXT}" for number in range(4)]
    for text in texts:
        lm.generate(text, max_tokens=4)
    assert cache.idle_count > 150
    with lm.session() as session:
        session.append(PROMPT)
        session.generate(max_tokens=160, ignore_eos=True)
        assert len(session) > 200 and 0 < cache.idle_count <= 400 - len(session)
    assert len(session) < cache.idle_count <= 400, "its own cache is kept, too"


@pytest.mark.slow
def test_many_conversations(make: Load) -> None:
    lm, cold = make(cache_memory=0.1), make("none", cache_memory=0)
    assert sum(converse(lm, cold, seed, 3) for seed in range(25)) > 1000
