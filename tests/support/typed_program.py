"""What type checkers see of ovspec. This is checked against the installed wheel, and never run."""

from typing import Any, assert_type, reveal_type

import numpy as np

import ovspec
from ovspec import LanguageModel, OvspecError, Piece, Result, SamplingParams, Session, Stats


def whole_texts(lm: LanguageModel) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert_type(lm.generate("a", max_tokens=3, temperature=0.5, stop=["b"]), Result)
    assert_type(lm.generate([1, 2], sampling=SamplingParams(top_k=3)), Result)
    assert_type(lm.generate(chat), Result)
    assert_type(lm.generate(parts), Result)
    assert_type(lm.generate(["a", "b"]), list[Result])
    assert_type(lm.generate([[1], [2, 3]]), list[Result])
    assert_type(lm.generate([chat, chat]), list[Result])
    assert_type(lm.samples("a", n=2), list[Result])
    assert_type(lm.samples(["a", "b"], n=2), list[list[Result]])
    lm.generate("a", max_token=3)  # type: ignore[call-overload]


def shown_in_editors(lm: LanguageModel) -> None:
    """With the names, types and defaults of all options; the test reads the types that are revealed here."""
    reveal_type(lm.generate)
    reveal_type(lm.session().stream)
    reveal_type(ovspec.load)


def answers(result: Result) -> tuple[str, list[int], float | None]:
    assert_type(result.stats, Stats)
    assert_type(result.message, dict[str, Any])
    return result.text, result.token_ids, result.stats.acceptance_rate


def streamed(lm: LanguageModel) -> str:
    for piece in lm.stream("a"):
        assert_type(piece, Piece)
    return lm.stream("a").result().text


async def concurrent(lm: LanguageModel) -> Result:
    assert_type(await lm.agenerate("a", max_tokens=3), Result)
    assert_type(await lm.agenerate(["a", "b"]), list[Result])
    stream = lm.astream("a", seed=1)
    async for piece in stream:
        assert_type(piece, Piece)
    await stream.aclose()
    return await stream.result()


def main() -> None:
    try:
        with ovspec.load("folder", draft=["lookup", "draft"], threads=2) as lm:
            assert_type(lm, LanguageModel)
            with lm.session() as session:
                assert_type(session, Session)
                session.append([{"role": "user", "content": "Hi"}])
                assert_type(session.generate(max_tokens=3), Result)
            print(lm.encode("a").shape, np.argmax(lm.next_logits("a")))
    except OvspecError as error:
        print(error)
