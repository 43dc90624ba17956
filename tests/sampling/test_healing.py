"""Token healing: which tokens are taken back and which may replace them; the text continues the prompt's bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import CHECKPOINTS, PROMPTS, Reference
from hypothesis import given, settings
from hypothesis import strategies as st

import ovspec
from ovspec.base.files import read_dataclass
from ovspec.cache.sequence import Sequence
from ovspec.engine.results import Stats
from ovspec.engine.round import RowOutcome
from ovspec.engine.row import Row
from ovspec.params import Params
from ovspec.sampling.healing import Healing, count_healable_tokens
from ovspec.sampling.samplers import GreedySampler
from ovspec.sampling.vocabulary_index import VocabularyIndex
from ovspec.text.tokenizer import ByteDetokenizer, make_byte_vocabulary
from ovspec.text.tokenizer_files import TokenizerFile

VOCABULARY = make_byte_vocabulary(read_dataclass(TokenizerFile, CHECKPOINTS / "target" / "tokenizer.json"))
assert VOCABULARY
DEMO = VocabularyIndex(VOCABULARY)
# Prompts that end in a word, a colon, a space, an open call, a prefix of hundreds of tokens, half a keyword, an emoji.
ENDS = [
    "import os.pa",
    "http:",
    "    self.na",
    "x = ",
    "def __in",
    "raise Val",
    "    ret",
    "print('caf\u00e9 \U0001f600",
]
ENDS += ["a", " "]


@pytest.fixture(scope="module")
def lm(load: Callable[..., ovspec.LanguageModel]) -> ovspec.LanguageModel:
    return load(draft="lookup,draft")  # type: ignore[arg-type]


def naive(tokens: list[int], first: int, vocabulary: list[bytes | None]) -> int:
    """Return what ``count_healable_tokens`` returns, computed from its definition."""
    found = 0
    for count in range(1, len(tokens) - first + 1):
        spelt = [vocabulary[token] for token in tokens[len(tokens) - count :]]
        if not all(spelt):
            break
        said = b"".join(part or b"" for part in spelt)
        if any(other and len(other) > len(said) and other.startswith(said) for other in vocabulary):
            found = count
    return found


small = st.lists(st.one_of(st.none(), st.binary(max_size=4).map(lambda b: bytes(x % 3 + 97 for x in b))), min_size=1)


@given(small, st.data())
@settings(deadline=None)
def test_what_is_taken_back(vocabulary: list[bytes | None], data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=6))
    first = data.draw(st.integers(0, len(tokens)))
    ordered = VocabularyIndex(vocabulary)
    assert count_healable_tokens(np.array(tokens, np.int64), first, ordered) == naive(tokens, first, vocabulary)


def test_what_no_token_continues_stays() -> None:
    ordered = VocabularyIndex([b"a", b"b", b"bc"])
    assert [count_healable_tokens(np.array(tokens), 0, ordered) for tokens in ([0], [1], [1, 0], [0, 1])] == [
        0,
        1,
        0,
        1,
    ]


def test_a_character_is_taken_back_whole_or_not_at_all() -> None:
    first, second = "é".encode()[:1], "é".encode()[1:]
    vocabulary: list[bytes | None] = [b"x", first, second, second + b"!", first + second + b"!"]
    prompt, ordered = np.array([0, 1, 2]), VocabularyIndex(vocabulary)
    assert count_healable_tokens(prompt, 0, ordered) == 2
    assert count_healable_tokens(prompt, 0, ordered, whole_characters=True) == 2
    without = VocabularyIndex(vocabulary[:4])
    assert count_healable_tokens(prompt, 0, without) == 1
    assert count_healable_tokens(prompt, 0, without, whole_characters=True) == 0


@given(small, st.binary(min_size=1, max_size=4).map(lambda b: bytes(x % 3 + 97 for x in b)))
def test_what_may_be_said_instead(vocabulary: list[bytes | None], said: bytes) -> None:
    expected = {i for i, t in enumerate(vocabulary) if t and (t.startswith(said) or said.startswith(t))}
    found = VocabularyIndex(vocabulary).ids_compatible_with(said)
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_examples() -> None:
    vocabulary: list[bytes | None] = [
        b"http",
        b":",
        b"://",
        b" ",
        b" a",
        b"",
        b"a",
        b"\xe2\x82",
        b"\xe2\x82\xac",
        b"tp:x",
    ]
    ordered = VocabularyIndex(vocabulary)
    cases = [([0, 1], 1), ([3], 1), ([6, 3], 1), ([0], 0), ([5, 1], 1), ([1, 5], 0), ([0, 7], 1), ([0, 8], 0), ([], 0)]
    for tokens, count in cases:
        assert count_healable_tokens(np.array(tokens, np.int64), 0, ordered) == count, tokens
    assert count_healable_tokens(np.array([0, 1], np.int64), 2, ordered) == 0, "tokens before ``first`` stay"
    assert count_healable_tokens(np.array([0, 1], np.int64), 0, ordered, 0) == 0
    healing = Healing(np.array([6, 0, 1]), 2, VocabularyIndex([*vocabulary, b"h", b"ttp", b"http:/"]), np.array([]))
    prompt = [6]
    for said, over in (([], 1), ([10], 2), ([10, 11], 3), ([10, 11, 1], 4), ([12], 1), ([10, 11, 2], 3)):
        assert healing.count_prompt_tokens(np.array([*prompt, *said])) == over
    for said, likely in (([], [0, 1]), ([0], [1]), ([0, 1], None), ([10], None), ([12], None)):
        found = healing.likely_tokens(np.array([*prompt, *said], np.int64))
        assert (found if found is None else found.tolist()) == likely
    assert healing.token_mask(np.array([6, 12])) is None


@pytest.mark.parametrize("prompt", ENDS)
def test_the_text_goes_on_from_the_prompts_bytes(lm: ovspec.LanguageModel, prompt: str) -> None:
    """Whichever tokens are generated, the session holds prompt + text; healed bytes are not returned with the text."""
    plain = lm.generate(prompt, max_tokens=12, ignore_eos=True, heal=True, lookahead=0)
    assert len(plain.token_ids) == 12
    for options in ({}, {"lookahead": 3}, {"lookahead": "auto"}):
        drafted = lm.generate(prompt, max_tokens=12, ignore_eos=True, heal=True, **options)  # type: ignore[arg-type]
        assert (drafted.text, drafted.token_ids) == (plain.text, plain.token_ids)
    assert plain.stats.prompt_tokens == len(lm.tokenizer.encode(prompt))
    with lm.session() as session:
        session.append(prompt)
        result = session.generate(max_tokens=12, ignore_eos=True)
        assert result.token_ids == plain.token_ids, "sessions heal what was appended"
        assert session.text == prompt + result.text


def test_a_token_reaches_over_the_end(lm: ovspec.LanguageModel) -> None:
    """``path`` and ``://`` are tokens of the demo model, which never saw their halves alone."""
    assert lm.generate("import os.pa", max_tokens=4, heal=True).text.startswith("th\n")
    assert lm.generate("http:", max_tokens=6, heal=True).text.startswith("//")
    assert not lm.generate("http:", max_tokens=6).text.startswith("//")


def test_healing_costs_no_inference(lm: ovspec.LanguageModel) -> None:
    """The tokens taken back are verified in the inference that reads the prompt."""
    for prompt in ("def f(x):\n    return", "import os.pa"):
        rounds = []
        for heal in (False, True):
            result = lm.generate(prompt, max_tokens=5, ignore_eos=True, heal=heal, lookahead=0)
            rounds.append(result.stats.rounds)
            assert (result.stats.proposed, result.stats.drafters) == (0, {})
        assert rounds == [5, 5]
    assert lm.tokenizer.encode("def f(x):\n    return").tolist()[-1] != lm.tokenizer.encode("return").tolist()[-1]


def test_nothing_is_said_where_nothing_may_be_taken_back(lm: ovspec.LanguageModel) -> None:
    chat: Any = [{"role": "user", "content": "Write a loop in Pyth"}]
    assert lm.generate(chat, max_tokens=8, heal=True).token_ids == lm.generate(chat, max_tokens=8).token_ids
    special: Any = [*lm.tokenizer.encode("import os.pa").tolist(), 1]
    assert lm.generate(special, max_tokens=4, heal=True).token_ids == lm.generate(special, max_tokens=4).token_ids
    ids = lm.tokenizer.encode("import os.pa")
    healed = lm.generate("import os.pa", max_tokens=4, heal=True)
    assert lm.generate(ids, max_tokens=4, heal=True).token_ids == healed.token_ids
    with lm.session() as session:
        session.append(ids)
        assert session.generate(max_tokens=4).token_ids == lm.generate(ids, max_tokens=4).token_ids, "ids aren't healed"


def test_sessions_heal_only_what_was_appended(lm: ovspec.LanguageModel) -> None:
    with lm.session() as session:
        session.append("import o")
        first = session.generate(max_tokens=5)
        held = session.sequence.tokens.tolist()
        session.generate(max_tokens=3)
        assert session.sequence.tokens[: len(held)].tolist() == held, "generated tokens stay"
        before = session.sequence.tokens.tolist()
        session.append("\nimport os.")
        session.append("pa")
        assert session.generate(max_tokens=2).text.startswith("th")
        assert session.sequence.tokens[: len(before)].tolist() == before
    assert first.token_ids


def test_an_error_leaves_the_prompt_whole(lm: ovspec.LanguageModel) -> None:
    with lm.session() as session:
        session.append("import os.pa")
        held = session.sequence.tokens.tolist()
        for wrong in (
            {"max_tokens": -2},
            {"top_k": 3},
            {"regex": "("},
            {"regex": "a", "choice": ["b"]},
            {"lookahead": -1},
        ):
            with pytest.raises(ovspec.OvspecError):
                session.generate(**wrong)  # type: ignore[arg-type]
            assert session.sequence.tokens.tolist() == held
        assert session.generate(max_tokens=3).text.startswith("th")


def test_a_batch_heals_each_row(lm: ovspec.LanguageModel) -> None:
    prompts = [*ENDS[:6], *PROMPTS[:3]]
    together = lm.generate(prompts, max_tokens=10, heal=True)
    for prompt, result in zip(prompts, together, strict=True):
        alone = lm.generate(prompt, max_tokens=10, heal=True)
        assert (result.token_ids, result.text) == (alone.token_ids, alone.text)
    several = lm.samples("import os.pa", n=3, temperature=1.0, seed=5, max_tokens=6, heal=True)
    assert len({result.text for result in several}) > 1
    alone = lm.generate("import os.pa", temperature=1.0, seed=5, max_tokens=6, heal=True)
    assert several[0].token_ids == alone.token_ids


def test_stop_strings_and_limits_count_what_is_new(lm: ovspec.LanguageModel) -> None:
    prompt = "        raise ValueErr"
    whole = lm.generate(prompt, max_tokens=20, heal=True)
    at = whole.text.index("\n")
    stopped = lm.generate(prompt, max_tokens=20, heal=True, stop=["\n", "raise"])  # the prompt has "raise"
    assert (stopped.text, stopped.finish_reason) == (whole.text[:at], "stop")
    for count in (1, 2, 3):
        short = lm.generate(prompt, max_tokens=count, heal=True, lookahead=4)
        assert short.token_ids == whole.token_ids[:count]
        assert short.stats.generated_tokens == count
        early = lm.generate(prompt, max_tokens=20, min_tokens=count, heal=True, stop=[whole.text[:2]])
        assert len(early.token_ids) >= count


def test_tokens_that_say_only_what_was_there_are_not_counted(lm: ovspec.LanguageModel) -> None:
    """If a bias excludes all tokens that extend past the prompt, the prompt's own are generated again, uncounted."""
    over = {i: -np.inf for i, t in enumerate(DEMO.vocabulary) if t and t.startswith((b"p", b".p")) and t != b"pa"}
    again = lm.generate("import os.pa", max_tokens=5, heal=True, logit_bias=over)
    plain = lm.generate("import os.pa", max_tokens=5, logit_bias=over)
    assert (again.text, again.token_ids) == (plain.text, plain.token_ids)
    drafted = lm.generate("import os.pa", max_tokens=5, heal=True, logit_bias=over, lookahead=4, min_tokens=3)
    assert drafted.token_ids == plain.token_ids


def test_a_context_that_is_full_while_the_prompt_is_said_again() -> None:
    letters = [next(i for i, t in enumerate(VOCABULARY or []) if t == letter) for letter in (b"p", b"a")]
    taken = next(i for i, t in enumerate(VOCABULARY or []) if t == b"path")
    healing = Healing(np.array([5, 6, taken]), 1, DEMO, np.array([]))
    sequence = Sequence([5, 6])
    detokenizer = ByteDetokenizer(list(VOCABULARY or []))
    stats = Stats(prompt_tokens=3)
    row = Row(sequence, Params(max_tokens=1), GreedySampler(), detokenizer, stats, context_length=4, healing=healing)
    for letter in letters:
        assert row.finish_reason is None
        sequence.commit([letter])
        row.add_outcome(RowOutcome(np.array([letter])))
    assert (row.finish_reason, row.token_ids, row.text) == ("length", [], "")


def test_half_a_character(lm: ovspec.LanguageModel) -> None:
    """A prompt of ids may end inside a character; the bytes of its last tokens are generated again, byte for byte."""
    emoji = "\U0001f600".encode()
    ids = [next(i for i, t in enumerate(DEMO.vocabulary) if t == emoji[at : at + 1]) for at in range(4)]
    for count in (1, 2, 3, 4):
        prompt = [*lm.tokenizer.encode("x = '").tolist(), *ids[:count]]
        with lm.session() as session:
            session.append(prompt)
            session.generate(max_tokens=6, ignore_eos=True, heal=True)
            said = DEMO.join_bytes(session.sequence.tokens)
        assert said.startswith(b"x = '" + emoji[:count])


def test_with_grammars(lm: ovspec.LanguageModel) -> None:
    """The bytes taken back are prefixed to the grammar, unless it begins in the prompt and already covers them."""
    options: Any = {"max_tokens": 24, "heal": True}
    for regex, prompt in (
        (r"[a-z]{1,6} in [a-z]{1,5}:", "for na"),
        (r"th\.(join|exists)\(", "import os.pa"),
        ("[0-9]{1,4};", "x = "),
    ):
        plain = lm.generate(prompt, regex=regex, lookahead=0, **options)
        assert plain.finish_reason == "stop"
        assert re.fullmatch(regex, plain.text)
        for lookahead in (3, "auto"):
            drafted = lm.generate(prompt, regex=regex, lookahead=lookahead, **options)
            assert (drafted.text, drafted.token_ids) == (plain.text, plain.token_ids)
    inside = lm.generate("x = os.pa", regex=r"os\.path\.[a-z]{1,4}\(\)", constrain_from="os", **options)
    assert inside.text.startswith("th.")
    assert inside.finish_reason == "stop"
    assert DEMO.vocabulary[inside.token_ids[0]] == b".path"


def test_hugging_face_heals_alike(lm: ovspec.LanguageModel, reference: Reference) -> None:
    """Hugging Face takes one token back and favours it by a bias: we agree if we take back one and another wins."""
    from transformers import AutoTokenizer

    special = {"pad_token": "<|endoftext|>", "bos_token": "<|im_start|>"}
    tokenizer: Any = AutoTokenizer.from_pretrained(CHECKPOINTS / "target", **special)
    same = 0
    for prompt in ("import os.pa", "http:", "x = self.na", "def __in", "raise Val", "class Test(unittest.Test"):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        healed = reference.model.heal_tokens(ids, tokenizer=tokenizer)[0].tolist()
        if count_healable_tokens(ids[0].numpy(), 0, DEMO) == 1 and healed[-1] != int(ids[0, -1]):
            assert lm.generate(prompt, max_tokens=1, heal=True).token_ids[0] == healed[-1]
            same += 1
    assert same >= 2
