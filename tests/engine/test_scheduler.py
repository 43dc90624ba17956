"""Rows that join and leave a batch give the same text as alone, and read a shared prefix only once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import PROMPTS, Reference

import ovspec
from ovspec.cache import stateful as decoder
from ovspec.cache.paged import PagedDecoder
from ovspec.cache.sequence import EMPTY_ROW
from ovspec.engine import decoders
from ovspec.engine.cache_budget import CacheBudget
from ovspec.engine.row import Row
from ovspec.engine.scheduler import RunningRow, Schedulable, WaitingQueue

ENGINES = ("stateful", "paged")
# Short and long prompts; the long ones are read in chunks when they join.
MIXED = [prompt if i % 3 else "\n".join((*PROMPTS[i : i + 3], prompt)) for i, prompt in enumerate(PROMPTS[:8])]

# Without a proposal, the drafter makes no difference.
QUICK = [*((engine, True, 4) for engine in ENGINES), ("paged", True, "auto")]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the prefill chunk of joining rows, so that reading a prompt takes several rounds."""
    monkeypatch.setattr("ovspec.cache.stateful.JOINING_CHUNK_TOKENS", 24)
    monkeypatch.setattr("ovspec.cache.paged.JOINING_CHUNK_TOKENS", 24)


def row_of(lm: ovspec.LanguageModel, prompt: str, options: Any) -> Row:
    return lm.runtime.row_maker.make_rows(prompt, lm.runtime.row_maker.make_complete_params(options))[0]


def waiting_queue(lm: ovspec.LanguageModel, prompts: list[str], max_rows: int) -> WaitingQueue:
    rows = [row_of(lm, prompt, {"max_tokens": 4}) for prompt in prompts]
    return WaitingQueue(rows, max_rows, CacheBudget(lm.runtime.decoder_pool.acquire().target))


def join(admitted: list[tuple[int, Schedulable]]) -> list[RunningRow]:
    return [RunningRow(number, row, EMPTY_ROW, (0.0, 0.0, 0.0)) for number, row in admitted]


def texts(results: list[ovspec.Result]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("engine", "drafter", "lookahead"),
    [
        pytest.param(engine, drafter, k, marks=() if (engine, drafter, k) in QUICK else pytest.mark.slow)
        for engine in ENGINES
        for drafter in (True, "lookup", "lookup,draft")
        for k in (0, 4, "auto")
    ],
)
def test_rows_that_join_give_what_hugging_face_gives(
    load: Callable[..., ovspec.LanguageModel],
    reference: Reference,
    greedy: dict[str, list[int]],
    engine: str,
    drafter: Any,
    lookahead: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del reference
    lm = load(draft=drafter, engine=engine, cache_memory=0)
    # Whether auto proposes anything must not depend on how busy this machine is.
    monkeypatch.setattr(lm.runtime.decoder_pool, "_idle_sets", [])
    monkeypatch.setattr(lm.target, "verify_ms", {1: 10.0, 16: 11.0})
    lengths = [30 + 7 * (i % 4) for i in range(len(MIXED))]  # they end at different times, so others join
    rows = [row_of(lm, p, {"max_tokens": n}) for p, n in zip(MIXED, lengths, strict=True)]
    most, reading_beside = 0, 0
    for pieces in lm.runtime.decoder_pool.run_batch(
        rows, lm.runtime.row_maker.make_complete_params({"batch_size": 3, "lookahead": lookahead})
    ):
        begun = [row for row in rows if row.stats.cached_tokens < row.stats.prompt_tokens and not row.finish_reason]
        most = max(most, len(begun))
        reading_beside += bool(pieces) and any(not row.stats.rounds for row in begun)
    assert most == 3
    assert reading_beside, "a long prompt must be read while other rows generate"
    for prompt, row, length in zip(MIXED, rows, lengths, strict=True):
        assert row.token_ids == greedy[prompt][:length]
        assert row.stats.ttft_ms > 0
    if lookahead:
        assert sum(row.stats.proposed for row in rows) > 0
    if lookahead == 4:
        assert sum(row.stats.accepted for row in rows) > 0


@pytest.fixture(scope="module")
def greedy(reference: Reference) -> dict[str, list[int]]:
    return {prompt: reference.generate(prompt, 51) for prompt in MIXED}


@pytest.mark.parametrize(
    ("engine", "accept"),
    [
        ("stateful", "rejection"),
        ("paged", "compare"),
        pytest.param("stateful", "compare", marks=pytest.mark.slow),
        pytest.param("paged", "rejection", marks=pytest.mark.slow),
    ],
)
def test_sampled_rows_are_what_they_are_alone(
    load: Callable[..., ovspec.LanguageModel], engine: str, accept: Any
) -> None:
    lm, prompts = load(draft=True, engine=engine), MIXED[:5]
    options: Any = {"temperature": 1.0, "seed": 5, "max_tokens": 30, "lookahead": 2, "accept": accept}
    alone = [lm.generate(prompt, **options).token_ids for prompt in prompts]
    together = lm.generate(prompts, batch_size=3, **options)
    assert texts(together) == alone
    assert sum(result.stats.accepted for result in together) > 0
    if accept == "compare":
        options["lookahead"] = 0
        assert texts(lm.generate(prompts, batch_size=4, **options)) == alone


def last_but(logits: np.ndarray, tokens: np.ndarray) -> int:
    """Return the most likely token, but the second most likely if the text's length is a multiple of 3."""
    return int(np.argsort(logits[0])[-2 if len(tokens) % 3 == 0 else -1])


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("engine", [pytest.param("stateful", marks=pytest.mark.slow), "paged"])
def test_rows_that_join_with_what_constrains_them(load: Callable[..., ovspec.LanguageModel], engine: str) -> None:
    """Rows with penalties, a sampler, healing or a grammar, whose forced tokens may come while a prompt is read."""
    lm = load(draft="lookup,draft", engine=engine)
    ways: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "min_tokens": 9},
        {"sampler": last_but},
        {"heal": True},
        {"regex": r"self\.assert(Equal|True)\([a-z]{1,5}\);", "max_tokens": 12},
    ]
    forced = 0
    for way in ways:
        options: Any = {"max_tokens": 20, "lookahead": 3, **way}
        alone = [lm.generate(prompt, **options | {"lookahead": 0}) for prompt in MIXED[:6]]
        together = lm.generate(MIXED[:6], batch_size=4, **options)
        assert texts(together) == texts(alone)
        assert [result.text for result in together] == [result.text for result in alone]
        for result in together:
            assert 0 <= result.stats.cached_tokens <= result.stats.prompt_tokens
            forced += result.stats.forced
    assert forced > 0


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_samples_read_their_prompt_once(
    load: Callable[..., ovspec.LanguageModel], monkeypatch: pytest.MonkeyPatch, engine: str, drafted: bool
) -> None:
    """Samples of a prompt read it only once, in the target and in the draft."""
    lm = load(draft=drafted, engine=engine, cache_memory=0)
    prompt = MIXED[0]
    options: Any = {"n": 4, "temperature": 1.0, "seed": 3, "max_tokens": 12}
    alone = lm.runtime.row_maker.make_rows(prompt, lm.runtime.row_maker.make_complete_params(options))
    for row in alone:
        for _ in lm.runtime.decoder_pool.run_batch([row], lm.runtime.row_maker.make_complete_params({})):
            pass
    fed: dict[int, int] = {}
    for kind in (decoder.StatefulDecoder, ovspec.cache.paged.PagedDecoder):
        inner = kind.feed

        def feed(self: Any, tokens: list[np.ndarray], *rest: Any, inner: Any = inner) -> list[np.ndarray]:
            fed[id(self)] = fed.get(id(self), 0) + sum(map(len, tokens))
            return inner(self, tokens, *rest)

        monkeypatch.setattr(kind, "feed", feed)
    results = lm.samples(prompt, **options, lookahead=2 if drafted else None)
    assert texts(results) == [row.token_ids for row in alone]
    length = len(lm.encode(prompt))
    assert [result.stats.cached_tokens for result in results] == [0, *[length - 1] * 3]
    assert len(fed) == 1 + drafted
    assert length > 4 * 12 * 3
    assert all(count < length + 4 * 12 * 3 for count in fed.values())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_common_beginning_is_read_once(load: Callable[..., ovspec.LanguageModel], engine: str) -> None:
    lm = load(draft=True, engine=engine, cache_memory=0)
    header = "\n".join(PROMPTS[:4])
    prompts = [f"{header}\n{prompt}" for prompt in PROMPTS[4:10]]
    alone = texts([lm.generate(prompt, max_tokens=20) for prompt in prompts])
    together = lm.generate(prompts, max_tokens=20, batch_size=3)
    assert texts(together) == alone
    shared = len(lm.encode(header + "\n"))
    assert together[0].stats.cached_tokens == 0
    assert all(abs(result.stats.cached_tokens - shared) <= 3 for result in together[1:])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_new_batch_reads_all_prompts_at_once(load: Callable[..., ovspec.LanguageModel], engine: str) -> None:
    """All rows begin in the same round, even if a short prompt could begin sooner."""
    lm = load(engine=engine)
    rows = [row_of(lm, prompt, {"max_tokens": 3}) for prompt in ("def", MIXED[0], MIXED[3])]
    first_round = next(lm.runtime.decoder_pool.run_batch(rows, lm.runtime.row_maker.make_complete_params({})))
    assert sorted(number for number, _ in first_round) == [0, 1, 2]


def test_a_batch_waits_for_memory(load: Callable[..., ovspec.LanguageModel], monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load(engine="paged")
    expected = texts(lm.generate(PROMPTS[:5], max_tokens=20))
    longest = max(len(lm.encode(prompt)) for prompt in PROMPTS[:5]) + 20
    for room in (1, longest, 2 * longest):  # a row that doesn't fit runs alone
        monkeypatch.setattr(decoders, "count_free_tokens", lambda *_, room=room: room)
        rows = [row_of(lm, prompt, {"max_tokens": 20}) for prompt in PROMPTS[:5]]
        for _ in lm.runtime.decoder_pool.run_batch(rows, lm.runtime.row_maker.make_complete_params({})):
            held = sum(row.max_length for row in rows if row.stats.rounds and not row.finish_reason)
            assert held <= max(room, longest)
        assert [row.token_ids for row in rows] == expected


def test_rows_are_taken_when_there_is_room(load: Callable[..., ovspec.LanguageModel]) -> None:
    lm, taken = load(engine="paged"), list[int]()

    def rows() -> Any:
        for number, prompt in enumerate(PROMPTS):
            taken.append(number)
            yield row_of(lm, prompt, {"max_tokens": 8})

    run = lm.runtime.decoder_pool.run_batch(rows(), lm.runtime.row_maker.make_complete_params({"batch_size": 2}))
    next(run)
    assert len(taken) == 2
    run.close()  # type: ignore[attr-defined]
    assert texts(lm.generate(PROMPTS[:2], max_tokens=8)) == texts([lm.generate(p, max_tokens=8) for p in PROMPTS[:2]])


def test_a_batch_has_no_more_rows_than_it_may(load: Callable[..., ovspec.LanguageModel]) -> None:
    lm = load(engine="paged")
    waiting = waiting_queue(lm, PROMPTS[:5], 2)
    running = join(waiting.admit_rows([]))
    assert len(running) == 2
    for each in running:
        each.row.stats.rounds = 1
    assert len(waiting.admit_rows(running[:1])) == 1, "one has ended, and several wait"


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_stay_read_nothing_again(
    load: Callable[..., ovspec.LanguageModel], monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    lm, fed = load(engine=engine), list[int]()
    kind = PagedDecoder if engine == "paged" else decoder.StatefulDecoder
    append = kind._append_tokens

    def noting(self: Any, tokens: list[np.ndarray], *more: Any, **named: Any) -> Any:
        fed.append(sum(map(len, tokens)))
        return append(self, tokens, *more, **named)

    monkeypatch.setattr(kind, "_append_tokens", noting)
    lengths = (2, 9, 5, 9)
    rows = [row_of(lm, prompt, {"max_tokens": length}) for prompt, length in zip(PROMPTS, lengths, strict=False)]
    for _ in lm.runtime.decoder_pool.run_batch(rows, lm.runtime.row_maker.make_complete_params({})):
        pass
    unread = sum(row.stats.prompt_tokens - row.stats.cached_tokens for row in rows)
    assert sum(fed) == unread + sum(len(row.token_ids) - 1 for row in rows), "the last token of each is never read"


def test_a_row_that_cannot_wait_overtakes_one_that_does(load: Callable[..., ovspec.LanguageModel]) -> None:
    lm = load(engine="paged")
    prompts = [MIXED[0], MIXED[0] + "#", MIXED[3]]
    waiting = waiting_queue(lm, prompts, 3)
    first = join(waiting.admit_rows([]))
    assert [each.number for each in first] == [0, 2]
    assert waiting.admit_rows(first) == [], "the shared prefix has not been read yet"
    first[0].row.stats.rounds = 1
    assert [number for number, _ in waiting.admit_rows(first)] == [1]


@pytest.mark.parametrize("size", [0, -1, 2.5, "8"])
def test_wrong_batch_sizes(load: Callable[..., ovspec.LanguageModel], size: Any) -> None:
    with pytest.raises(ovspec.OvspecError, match="batch_size"):
        load(engine="paged").generate(PROMPTS[:2], batch_size=size)
