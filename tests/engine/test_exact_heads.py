"""With an EAGLE-3 head, too, no token changes in the default arithmetic: on random targets and on a real model.

``test_head.py`` shows that heads propose what they should; here they are crossed with all else that moves a text. So
are draft models with a trimmed vocabulary, of which ``test_draft_model.py`` shows the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compiling import trust_paged
from conftest import PROMPTS, ROOT
from random_pairs import HEADS, TRIMMED, shared_pair

import ovspec
from ovspec.drafting.choice import DraftChoice

REAL, REAL_HEAD = ROOT / "smollm2", ROOT / "models" / "smollm2-head"
SLOW = pytest.mark.slow
CHATS = [
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "List three fruits.",
    "What is the capital of France?",
]
Ask = Callable[..., list[ovspec.Result]]


class Headed:
    """A target with its head or draft, and prompts that it answers."""

    def __init__(self, folder: Path, head: Path, cache: Path, prompts: list[Any], tokens: int) -> None:
        with pytest.MonkeyPatch.context() as patched:
            trust_paged(patched)
            self.cache, self.lm = cache, ovspec.load(folder, ["lookup", head], cache_dir=cache)
        assert self.lm.target.arithmetic_note == "exact" and self.lm.draft
        self.prompts, self.tokens, self.name = prompts, tokens, self.lm.draft.proposer_name
        self.head = self.lm.with_drafters(DraftChoice(model=head))

    def texts(self, lm: ovspec.LanguageModel, prompts: list[Any], **options: Any) -> list[ovspec.Result]:
        options = {"max_tokens": self.tokens, "ignore_eos": True} | options
        return [lm.generate(prompt, **options) for prompt in prompts]

    def check(self, found: list[ovspec.Result], plain: list[ovspec.Result], sure: bool = True) -> None:
        """Check that the texts are those of plain decoding, that verification agrees, and that the head was in use.

        sure: whether the head must have been right, too.
        """
        assert [result.token_ids for result in found] == [result.token_ids for result in plain]
        for result in found:
            verified = self.lm.verify(result)
            assert verified.ok and verified.tokens, str(verified)
        used = [result.stats.drafters.get(self.name, {"proposed": 0, "accepted": 0}) for result in found]
        assert sum(each["proposed"] for each in used) > 0
        assert not sure or sum(each["accepted"] for each in used) > 0


QUICK = "qwen2-int8-head"


def real(cache: Path) -> Headed:
    if not REAL.is_dir():
        pytest.skip("the real model could not be fetched")
    return Headed(REAL, REAL_HEAD, cache, [[{"role": "user", "content": text}] for text in CHATS], 40)


@pytest.fixture(
    scope="module",
    params=[QUICK, *[pytest.param(name, marks=SLOW) for name in (*HEADS, *TRIMMED, "real") if name != QUICK]],
)
def headed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Headed:
    cache = tmp_path_factory.mktemp("cache")
    if request.param == "real":
        return real(cache)
    folder = shared_pair(request.param, tmp_path_factory)
    return Headed(folder, folder / "draft", cache, [*PROMPTS[:12:4]], 60)


@pytest.fixture(scope="module")
def plain(headed: Headed) -> list[ovspec.Result]:
    return headed.texts(headed.lm, headed.prompts, lookahead=0)


YEARS = {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 9}
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 40}, "years": YEARS},
    "required": ["capital", "years"],
}
WAYS: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0, "seed": 3},
    "warped": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 4, "logprobs": 2},
    "grammar": {"regex": r"([a-z_ ]{1,9}[(),.=\n]{1,3})+"},
    "forced": {"json_schema": SCHEMA},
    "biased": {"logit_bias": {12: -5.0, 300: 2.0}, "presence_penalty": 0.4},
}
CASES = [
    pytest.param(draft, lookahead, marks=() if (draft, lookahead) == ("head", 4) else SLOW)
    for draft in ("head", "lm")
    for lookahead in (1, 4, "auto")
]


@pytest.mark.parametrize(("draft", "lookahead"), CASES)
def test_greedy(headed: Headed, plain: list[ovspec.Result], draft: str, lookahead: Any) -> None:
    """With the head alone, and behind lookup."""
    found = headed.texts(getattr(headed, draft), headed.prompts, lookahead=lookahead)
    headed.check(found, plain, lookahead != "auto")


@pytest.mark.slow
def test_a_real_model(tmp_path: Path) -> None:
    """The other tests run on it in slow runs."""
    headed = real(tmp_path)
    prompts = headed.prompts[:2]
    expected = headed.texts(headed.lm, prompts, lookahead=0)
    headed.check(headed.texts(headed.head, prompts, lookahead=4), expected)


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way == "forced" else SLOW) for way in WAYS])
def test_sampled_and_constrained(headed: Headed, way: str) -> None:
    options = {"ignore_eos": False, **WAYS[way]}  # a grammar may decide where the text ends
    expected = headed.texts(headed.lm, headed.prompts[:2], **options, lookahead=0)
    found = headed.texts(headed.head, headed.prompts[:2], **options, lookahead=3)
    headed.check(found, expected, sure=False)
    assert [result.logprobs for result in found] == [result.logprobs for result in expected], "to the bit"


@SLOW
def test_rejection_keeps_to_its_own_rule(headed: Headed) -> None:
    """Its texts depend on what is proposed; that their distribution doesn't is shown on small vocabularies."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "accept": "rejection", "lookahead": 3}
    found = headed.texts(headed.head, headed.prompts, **options)
    assert sum(result.stats.drafters[headed.name]["accepted"] for result in found) > 0


@SLOW
def test_healed_prompts(headed: Headed) -> None:
    prompts = ["def add(a, b):\n    retu", "The capital of Fra"]
    expected = headed.texts(headed.lm, prompts, heal=True, lookahead=0)
    headed.check(headed.texts(headed.head, prompts, heal=True, lookahead=3), expected, sure=False)


@pytest.mark.parametrize("lookahead", [3, pytest.param("auto", marks=SLOW)])
def test_batches_that_rows_join(headed: Headed, plain: list[ovspec.Result], lookahead: Any) -> None:
    prompts = (headed.prompts * 3)[:9]
    options: dict[str, Any] = {"max_tokens": headed.tokens, "ignore_eos": True, "batch_size": 4}
    found = headed.head.generate(prompts, lookahead=lookahead, **options)
    headed.check(found, (plain * 3)[:9], lookahead != "auto")


def test_sessions_forks_and_files(headed: Headed, plain: list[ovspec.Result], tmp_path: Path) -> None:
    """A text that is generated in pieces, rewound, forked, saved and loaded is the text from scratch."""
    lm, expected, found = headed.head, plain[0], list[ovspec.Result]()
    options: dict[str, Any] = {"ignore_eos": True, "lookahead": 3, "heal": False}
    session = lm.session()
    session.append(headed.prompts[0])
    for number, count in enumerate((1, 9, 2, 17, 11)):
        found.append(session.generate(max_tokens=count, **options))
        mark = session.mark()
        session.append(headed.lm.encode("and so on").tolist())
        session.generate(max_tokens=5, **options)
        session.rewind(mark)
        if number % 2:
            fork = session.fork()
            session.generate(max_tokens=3, **options)
            session.close()
            session = fork
        else:
            session.save(tmp_path / "text.ov")
            session.generate(max_tokens=3, **options)
            session.load(tmp_path / "text.ov")
    session.close()
    tokens = [token for result in found for token in result.token_ids]
    assert tokens == expected.token_ids[: len(tokens)]
    assert sum(result.stats.drafters[headed.name]["accepted"] for result in found if result.stats.drafters) > 0


def test_a_session_goes_on_without_its_head_or_with_one(headed: Headed, tmp_path: Path) -> None:
    """Features in a file are left out without a head; without them in it, the text is read again."""
    if headed.name != "head":
        pytest.skip("a draft model reads no features")
    options: dict[str, Any] = {"ignore_eos": True, "lookahead": 3, "max_tokens": 12}
    plain = ovspec.load(headed.lm.target.ir.folder, "lookup", cache_dir=headed.cache)
    for number, (first, second) in enumerate(((headed.head, plain), (plain, headed.head))):
        found = []
        for lm in (first, second):
            with lm.session() as session:
                if lm is first:
                    session.append(headed.prompts[0])
                else:
                    told = pytest.warns(UserWarning, match="saved without the head; the text is read again")
                    with told if lm is headed.head else contextlib.nullcontext():
                        session.load(tmp_path / f"{number}.ov")
                found.append(session.generate(**options))
                session.save(tmp_path / f"{number}.ov")
        assert (found[1].stats.cached_tokens > 0) == (second is plain)
        expected = headed.texts(plain, headed.prompts[:1], max_tokens=24, lookahead=0)[0].token_ids
        assert [token for result in found for token in result.token_ids] == expected


def test_texts_that_begin_as_others_did(headed: Headed, plain: list[ovspec.Result]) -> None:
    """The prefix cache gives a text what another has read, features included."""
    begin = headed.lm.encode("\n".join(PROMPTS[:2])).tolist()
    prompts = [begin, [*begin, *headed.lm.encode("# more").tolist()], begin]
    expected = headed.texts(headed.lm.with_drafters(None), prompts, lookahead=0)
    found = headed.texts(headed.head, prompts, lookahead=3)
    headed.check(found, expected)
    assert all(result.stats.cached_tokens > len(begin) - 40 for result in found)
    assert plain
