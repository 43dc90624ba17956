"""Whatever a caller passes, other threads go on: no call holds Python's lock for half a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ovspec
from ovspec.sampling.grammar_conversion import request_conversion

LINE = "def f(x): return x\n"
MEGABYTES = LINE * 100_000  # two
PROMPTS: dict[str, Any] = {
    "a text": MEGABYTES,
    "spaces": " " * 500_000,
    "emoji": "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}" * 100_000,
    "ids": [5] * 1_000_000,
    "a chat": [{"role": "user", "content": MEGABYTES}],
    "many messages": [{"role": "user", "content": "x"}] * 50_000,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "many stop strings": {"stop": [str(number) for number in range(50_000)]},
    "a long stop string": {"stop": MEGABYTES[:400_000]},
    "a very long stop string": {"stop": MEGABYTES},
    "a bias for everything": {"logit_bias": dict.fromkeys(range(100_000), 1.0)},
    "many stop ids": {"stop_ids": list(range(200_000))},
    "many choices": {"choice": [f"choice {number}" for number in range(50_000)]},
    "a large schema": {"json_schema": {"enum": [f"choice {number}" for number in range(50_000)]}},
    "a schema that says much": {"json_schema": {"description": MEGABYTES}},
    "a long expression": {"regex": "a" * 500_000},
    "a long GBNF": {"gbnf": 'root ::= "a"\n' * 10_000},
    "a long grammar": {"grammar": 'start: "a"\n' + 'x: "a"\n' * 50_000},
}


@pytest.fixture
def longest_wait() -> Iterator[Callable[[], float]]:
    """Return a function that returns how long another thread has had to wait, in seconds, since it was last called."""
    waits, stop = [0.0], threading.Event()

    def beat() -> None:
        while not stop.is_set():
            began = time.monotonic()
            time.sleep(0.01)
            waits.append(time.monotonic() - began)

    def longest() -> float:
        found = max(waits)
        del waits[1:]
        return found

    heart = threading.Thread(target=beat)
    heart.start()
    yield longest
    stop.set()
    heart.join()


# The schema has the choices of "many choices"; the expression goes the way of "a long GBNF" and "a long grammar".
SLOW = ("a very long stop string", "a large schema", "a long expression")


@pytest.mark.parametrize(
    "given", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in (*PROMPTS, *OPTIONS)]
)
def test_other_threads_go_on(
    given: str, load: Callable[..., ovspec.LanguageModel], longest_wait: Callable[[], float]
) -> None:
    lm = load()
    lm.generate("a", max_tokens=2, regex="[ab]+")
    waits = list[float]()
    while not waits or (len(waits) < 3 and min(waits) >= 0.5):  # other processes may delay one
        request_conversion.cache_clear()
        longest_wait()
        try:
            if given in PROMPTS:
                lm.generate(PROMPTS[given], max_tokens=2)
            else:
                lm.generate("a", max_tokens=2, **OPTIONS[given])
        except ovspec.OvspecError as error:
            assert len(str(error)) < 1000
        waits.append(longest_wait())
    assert min(waits) < 0.5


def test_a_session_that_is_too_long_takes_no_more(
    load: Callable[..., ovspec.LanguageModel], longest_wait: Callable[[], float]
) -> None:
    with load().session() as session:
        session.append(MEGABYTES)
        for call in (
            lambda: session.select([str(number) for number in range(3000)]),
            lambda: session.score("a"),
            lambda: session.generate(),
        ):
            with pytest.raises(ovspec.OvspecError, match="context"):
                call()
    assert longest_wait() < 0.5
