"""Answers are free until they call a tool or leave thinking; from there on they are valid, whatever the tokens are."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from answers import (
    EOS,
    PLAIN,
    PROMPT,
    THINK,
    Answers,
    Vocabulary,
    allowed,
    answers,
    random_answer,
    tool,
    with_schema,
)

from ovspec.base.errors import OvspecError
from ovspec.params import make_params
from ovspec.params.tool_formats import TOOL_FORMATS
from ovspec.sampling.answer_constraint import AnswerConstraint
from ovspec.sampling.masks import mask_contains
from ovspec.text.answer import HARMONY_THINKING, AnswerContent

GET = tool("get", x={"type": "integer", "minimum": 0, "maximum": 99})
GETS = tool("gets", y={"enum": ["a", "<tool_call>", "é"]})
SET = tool("set", ids={"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 4})
TOOLS = [GET, GETS, SET]
CALL = '<tool_call>\n{"name": "get", "arguments": {"x": 5}}\n</tool_call>'
TAGS = Vocabulary(("<tool_call>", "</tool_call>", "<think>", "</think>"))
ADDED = Vocabulary((), TAGS.special)
CHANNELS = Vocabulary(("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>"))
SLOW = pytest.mark.slow
NUMBER = re.compile(r"\s*[0-9]{1,3}")


def after(answer: Answers, text: str) -> np.ndarray:
    return np.concatenate((PROMPT, np.array(answer.vocabulary.ids_of(text), dtype=np.int64)))


def allows_text(answer: Answers, text: str, begun: str = "", ends: bool = False) -> bool:
    """Return whether ``text`` may follow ``begun``, in some tokens, and ``ends`` the answer."""
    limits, tokens = answer.constraint(), followed(answer, text, after(answer, begun))
    return tokens is not None and (not ends or limits.is_complete(tokens) or limits.allows_token(EOS, tokens))


def followed(answer: Answers, text: str, tokens: np.ndarray = PROMPT) -> np.ndarray | None:
    """Return ``tokens`` and those of ``text`` that may follow; None if there are none."""
    limits, vocabulary = answer.constraint(), answer.vocabulary
    names = sorted(vocabulary.ids, key=len, reverse=True)
    while text:
        name = next((name for name in names if text.startswith(name)), None)
        if name:
            token, text = vocabulary.ids[name], text[len(name) :]
            if not limits.allows_token(token, tokens):
                return None
            tokens = np.append(tokens, token)
            continue
        end = min([text.find(name) for name in names if name in text], default=len(text))
        rest, text = text[:end].encode(), text[end:]
        while rest:
            forced = limits.forced_tokens(tokens)[:1]
            options = [i for i, spelt in enumerate(PLAIN.spelt) if spelt and rest.startswith(spelt)]
            options = forced or sorted(options, key=lambda i: -len(PLAIN.spelt[i] or b""))
            token = next((token for token in options if limits.allows_token(token, tokens)), None)
            spelt = vocabulary.spelt[token] if token is not None else None
            if token is None or not spelt or not rest.startswith(spelt):
                return None
            tokens, rest = np.append(tokens, token), rest[len(spelt) :]
    return tokens


def free(answer: Answers, text: str) -> bool:
    return answer.constraint().token_mask(after(answer, text)) is None


def check_calls(said: AnswerContent, tools: Iterable[Any] = TOOLS, ended: bool = True) -> None:
    import jsonschema

    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    texts = dict[int, tuple[str, str]]()
    for part in said.calls:
        name, before = texts.get(part.index, (part.name or "", ""))
        texts[part.index] = name, before + part.arguments
    for at, (name, arguments) in texts.items():
        if ended or at < len(texts) - 1:
            jsonschema.validate(json.loads(arguments), schemas[name])


# ---------------------------------------------------------------- where calls begin


def test_text_is_free() -> None:
    answer = answers("hermes", TOOLS)
    for text in ("", "Hello", " <", "a <tool", "<tool_", "<tools>{", "</tool_call>", '{"name": "get"', "<think>"):
        assert free(answer, text), text
    assert answer.constraint().forced_tokens(after(answer, "Hello <tool")) == []


@pytest.mark.parametrize("begun", ["<tool_call", "Well,\n\n<tool_call", "<tool_<tool_call", "<tool_c"])
def test_a_tag_that_ends_within_a_token_is_only_masked_where_its_rest_is_wrong(begun: str) -> None:
    answer, tail = answers("hermes", TOOLS), "<tool_call>".removeprefix(begun[begun.rindex("<") :])
    rest = CALL.removeprefix("<tool_call>")
    mask = answer.constraint().token_mask(after(answer, begun))
    masked = 0
    for token, spelt in enumerate(PLAIN.spelt):
        text = (spelt or b"").decode("latin-1")
        wrong = text.startswith(tail) and not rest.startswith(text[len(tail) :])
        assert (mask is None or mask_contains(mask, token)) is not wrong, text
        masked += wrong
    assert masked > 5 if tail == ">" else not masked


def test_a_tag_that_is_a_token_begins_a_call_alone() -> None:
    for vocabulary in (TAGS, ADDED):
        answer = answers("hermes", TOOLS, vocabulary=vocabulary)
        assert free(answer, "Well <tool")
        begun = after(answer, "Well <tool_call>")
        limits = answer.constraint()
        assert limits.token_mask(begun) is not None
        start = PLAIN.ids_of('\n{"name": "')
        assert limits.forced_tokens(begun)[: len(start) - 1] == start[:-1]
        spelt = np.concatenate((PROMPT, np.array(PLAIN.ids_of(f"Well {CALL}"), dtype=np.int64)))
        assert limits.token_mask(spelt) is None, "what was spelt out is text"
        said, _ = answer.read(spelt[len(PROMPT) :].tolist())
        assert (said.text, said.calls) == (f"Well {CALL}", [])


@pytest.mark.parametrize("vocabulary", [PLAIN, *[pytest.param(each, marks=SLOW) for each in (TAGS, ADDED)]])
def test_what_may_be_called(vocabulary: Vocabulary) -> None:
    def made(**options: Any) -> Answers:
        return answers("hermes", TOOLS, vocabulary=vocabulary, **options)

    other = CALL.replace('get", "arguments": {"x": 5}', 'gets", "arguments": {"y": "é"}')
    auto, required = made(), made(tool_choice="required")
    named = made(tool_choice={"type": "function", "function": {"name": "get"}})
    chosen = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get"}]}
    listed, forced = made(tool_choice=chosen), made(tool_choice={**chosen, "mode": "required"})
    once, never = made(parallel_tool_calls=False), made(tool_choice="none")
    both = f"{CALL}\n{other}"
    for answer, text, may in [
        *((auto, text, True) for text in ("", "Hi", CALL, f"Hi {CALL}", f"Hi\n{both}")),
        (auto, f"{CALL}Hi", False),
        (auto, f"{CALL}\n\n{CALL}", False),
        (auto, CALL.replace("get", "got"), False),
        (auto, CALL.replace("5", "500"), False),
        *((required, text, False) for text in ("", "Hi", f"Hi {CALL}", "\n")),
        *((required, text, True) for text in (CALL, both)),
        *((each, text, False) for each in (named, forced) for text in ("", "Hi", other)),
        *((each, CALL, True) for each in (named, forced)),
        (named, f"{CALL}\n{CALL}", False),
        (forced, f"{CALL}\n{CALL}", True),
        *((listed, text, True) for text in ("", "Hi", f"Hi {CALL}")),
        (listed, f"Hi {other}", False),
        (once, f"Hi {CALL}", True),
        (once, both, False),
        *((never, text, True) for text in ("", "Hi", "<tool_call", "<tool_cal>")),
        (never, CALL, False),
    ]:
        assert allows_text(answer, text, ends=True) is may, (answer.options, text)


def test_names_that_begin_alike_and_calls_that_begin_with_their_names() -> None:
    llama = answers("llama3", [GET, GETS])
    for text, may in [
        ('{"name": "get", "parameters": {"x": 5}}', True),
        ('{"name": "gets", "parameters": {"y": "é"}}', True),
        ('\n{"name": "get", "parameters": {"x": 5}}', True),
        ('<|python_tag|>{"name": "gets", "parameters": {"y": "a"}}', True),
        ('{"name": "gets", "parameters": {"x": 5}}', False),
        ('{"name": "get", "age": 7}', False),
        ('{"name": "getter", "age": 7}', True),  # what the user asked for
        ('Here: {"name": "get", "age": 7}', True),
    ]:
        assert allows_text(llama, text, ends=True) is may, text
        said, reader = llama.read(PLAIN.ids_of(text))
        assert not may or len(reader.calls) == ("parameters" in text)
        assert not may or bool(said.text) is ("age" in text)
    for format in ("mistral", "kimi", "harmony", "qwen-xml", "deepseek"):
        answer = answers(format, [GET, GETS], tool_choice="required")
        for tools in ([("get", {"x": 5})], [("gets", {"y": "a"})]):
            text = answer.format.tool_format.write_calls(tools) if answer.format.tool_format else ""
            assert allows_text(answer, text, ends=True), text
            said, reader = answer.read(PLAIN.ids_of(text))
            assert [(call.name, json.loads(call.arguments)) for call in reader.calls] == tools


def test_white_space_that_only_looks_so_begins_no_call() -> None:
    llama = answers("llama3", [GET])
    for space in ("\u3000", "\xa0", "\x85", "\x1c"):
        text = f'{space}{{"name": "get", "age": 7}}'
        assert allows_text(llama, text)
        said, reader = llama.read(PLAIN.ids_of(text))
        assert (said.text, reader.calls) == (text, [])


# ---------------------------------------------------------------- thinking


@pytest.mark.parametrize(
    ("vocabulary", "opened"),
    [
        *((PLAIN, True), (TAGS, False), (ADDED, True)),
        *(pytest.param(*case, marks=SLOW) for case in ((PLAIN, False), (TAGS, True), (ADDED, False))),
    ],
)
def test_calls_after_thinking(vocabulary: Vocabulary, opened: bool) -> None:
    def made(**options: Any) -> Answers:
        begins = "thinking" if opened else "start"
        return answers("hermes", TOOLS, THINK, vocabulary, begins, **options)

    begun = "" if opened else "<think>"
    auto, required = made(), made(tool_choice="required")
    thought = f"{begun}I <tool_call> think.\n</think>"
    assert free(auto, thought)
    for gap in ("", "\n", "\n\n", "\n\n\n\n"):
        assert allows_text(auto, CALL, f"{thought}{gap}", ends=True)
        assert allows_text(required, f"{gap}{CALL}", thought, ends=True), gap
        said, reader = required.read(vocabulary.ids_of(f"{thought}{gap}{CALL}"), pieces=3)
        assert (said.text, len(reader.calls)) == ("", 1)
        assert said.thinking == "I <tool_call> think."
    assert allows_text(auto, "Hi", thought, ends=True)
    assert not allows_text(required, "Hi", thought)
    assert not allows_text(required, "<think>", thought), "thinking comes once"
    assert not allows_text(required, "", thought, ends=True)
    assert not allows_text(required, "", f"{begun}I think", ends=True), "the answer must not end before its call"
    assert allows_text(auto, "", f"{begun}I think", ends=True)
    if not opened:
        assert allows_text(required, f"<think>Well</think>{CALL}", ends=True)
        assert allows_text(required, CALL, ends=True)
        assert not allows_text(required, "<thought>")


def test_the_end_of_thinking_within_a_token() -> None:
    answer = answers("hermes", TOOLS, THINK, begins="thinking", tool_choice="required")
    limits, begun = answer.constraint(), after(answer, "Well.</think")
    for token, spelt in enumerate(PLAIN.spelt):
        if spelt and spelt.startswith(b">"):
            rest = spelt[1:].decode("latin-1")
            assert limits.allows_token(token, begun) is bool(re.fullmatch(r"[ \t\n]{0,4}(<t?o?)?", rest)), spelt
        elif token != EOS:
            assert limits.allows_token(token, begun)


@pytest.mark.parametrize("options", [{}, {"tool_choice": "required"}, {"regex": "[0-9]{3}"}])
@pytest.mark.parametrize("vocabulary", [PLAIN, TAGS])
def test_budgets_of_thinking(vocabulary: Vocabulary, options: dict[str, Any]) -> None:
    numbers, close = random.Random(4), vocabulary.ids_of("</think>")
    assert (len(close) == 1) is (vocabulary is TAGS)
    for opened in (True, False):
        answer = answers("hermes", TOOLS, THINK, vocabulary, "thinking" if opened else "start", **options)
        for budget in (0, 1, 3, 20):
            limits, begun = answer.constraint(budget), [] if opened else vocabulary.ids_of("<think>")
            found = list(begun)
            for count in range(budget):
                tokens = np.concatenate((PROMPT, np.array(found, dtype=np.int64)))
                assert limits.forced_tokens(tokens) == [], count
                found.append(numbers.choice(PLAIN.ids_of("I am thinking of it")))
            tokens = np.concatenate((PROMPT, np.array(found, dtype=np.int64)))
            assert limits.forced_tokens(tokens) == close
            for token in close:
                assert allowed(limits, tokens, len(vocabulary.spelt)) == [token]
                tokens = np.append(tokens, token)
            assert limits.forced_tokens(tokens) != close
            said, _ = answer.read(tokens[len(PROMPT) :].tolist())
            assert said.text == ""
            if not options:  # it may think again, but not longer
                again = np.concatenate((tokens, np.array(vocabulary.ids_of("<think>"), dtype=np.int64)))
                assert limits.forced_tokens(again) == close
    unlimited = answers("hermes", TOOLS, THINK, vocabulary, "thinking").constraint()
    assert unlimited.token_mask(after(answer, "I am thinking of it" * 20)) is None


def test_budgets_of_params() -> None:
    for options, budget in [
        ({}, None),
        ({"max_thinking_tokens": -1}, None),
        ({"max_thinking_tokens": 3}, 3),
        ({"reasoning_effort": "none"}, 0),
    ]:
        assert make_params(options).thinking_budget == budget  # type: ignore[arg-type]


def test_thinking_that_closes_by_itself_before_its_budget() -> None:
    answer = answers("hermes", TOOLS, THINK, begins="thinking", tool_choice="required")
    limits = answer.constraint(12)
    tokens = after(answer, "Hm.</think>")
    assert len(tokens) - len(PROMPT) < 12
    assert limits.forced_tokens(tokens) == []
    assert not limits.allows_token(PLAIN.ids_of("x")[0], tokens)


# ---------------------------------------------------------------- Harmony


@pytest.mark.parametrize("vocabulary", [pytest.param(PLAIN, marks=SLOW), CHANNELS])
def test_harmony(vocabulary: Vocabulary) -> None:
    def made(**options: Any) -> Answers:
        return answers("harmony", TOOLS, HARMONY_THINKING, vocabulary, **options)

    auto, required, format = made(), made(tool_choice="required"), made(regex="[0-9]{3}")
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    ways = [
        '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"x": 5}',
        ' to=functions.get<|channel|>commentary json<|message|>{"x": 5}',
        ' to=functions.get<|channel|>commentary <|constrain|>json<|message|>{"x": 5}',
    ]
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    for way in ways:
        for answer, before, text in [
            (auto, "", ""),
            (auto, f"{thought}<|start|>assistant", ""),
            (auto, preamble, "I look."),
            (auto, f"{thought}<|start|>assistant{preamble}", "I look."),
            (required, "", ""),
            (required, f"{thought}<|start|>assistant", ""),
        ]:
            assert allows_text(answer, f"{before}{way}", ends=True), before + way
            said, reader = answer.read(vocabulary.ids_of(before + way), pieces=2)
            assert (said.text, len(reader.calls)) == (text, 1)
            assert said.thinking == ("Hm." if thought in before else "")
            check_calls(said)
    for answer, text in [
        (auto, "<|channel|>commentary to=functions.got "),
        (required, final),
        (required, f"<|start|>assistant{ways[0]}"),  # the prompt has that already
        (required, preamble),
        (format, f"{final}12x"),
        (format, f"<|start|>assistant{final}"),
    ]:
        assert not allows_text(answer, text), text
    for before in ("", f"{thought}<|start|>assistant"):
        assert allows_text(format, f"{before}{final}123", ends=True)
        assert format.read(vocabulary.ids_of(f"{before}{final}123"))[0].text == "123"
    plain = f"{final}Write to=functions.get to call it."
    assert allows_text(auto, plain, ends=True)
    assert auto.read(vocabulary.ids_of(plain))[0].text == "Write to=functions.get to call it."


# ---------------------------------------------------------------- formats of answers beside tools and thinking

OBJECT = {
    "type": "object",
    "properties": {"name": {"enum": ["get", "x"]}},
    "required": ["name"],
    "additionalProperties": False,
}
RESPONSES: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": "[0-9]{2}(a|<)?"}, "[0-9]{2}[a<]?"),
    "any": ({"regex": "(?s).{1,12}"}, "(?s).{1,12}"),
    "choice": ({"choice": ["yes", "no", "<tool_call>"]}, "yes|no|<tool_call>"),
    "schema": ({"json_schema": OBJECT}, r'\s*\{\s*"name"\s*:\s*"(get|x)"[^{]*\}'),
    "gbnf": ({"gbnf": 'root ::= "ab" [c-e]+ "."'}, r"ab[c-e]+\."),
    "lark": ({"grammar": 'start: "(" /[a-z]{1,4}/ ")"'}, r"\([a-z]{1,4}\)"),
}


# Quick runs combine two of them with each format.
PAIRED = {
    "regex": "hermes",
    "any": "llama3",
    "choice": "qwen-xml",
    "schema": "llama3",
    "gbnf": "hermes",
    "lark": "qwen-xml",
}


@pytest.mark.parametrize(
    ("format", "response"),
    [
        pytest.param(format, response, marks=() if PAIRED[response] == format else SLOW)
        for format in ("hermes", "llama3", "qwen-xml")
        for response in RESPONSES
    ],
)
def test_an_answer_is_a_call_or_as_its_format_says(response: str, format: str) -> None:
    options, pattern = RESPONSES[response]
    numbers, trigger = random.Random(3), '{"name": "get", ' if format == "llama3" else "<tool_call>\n"
    for thinking, begins, begun in ((None, "start", ""), (THINK, "thinking", "x</think>"), (THINK, "start", "")):
        answer = answers(format, [GET, GETS], thinking, begins=begins, **options)  # type: ignore[arg-type]
        limits, calls, texts = answer.constraint(), 0, 0
        for attempt in range(60):
            start = PLAIN.ids_of(begun + trigger * (attempt % 2))
            found, ended = random_answer(limits, PLAIN, numbers, start, patience=20, limit=150)
            said, reader = answer.read(found, numbers.choice((1, 2, 1000)))
            if not ended:
                continue
            if reader.calls:
                check_calls(said)
                assert not said.text
                calls += 1
            else:
                assert re.fullmatch(pattern, said.text), said.text
                texts += 1
            if calls > 1 and texts > 1:
                break
        assert calls, "not a tool call"
        assert texts, "no text"


def test_a_format_that_begins_like_a_call() -> None:
    answer = answers("hermes", TOOLS, choice=["<tool_call>", "<table>"])
    assert allows_text(answer, "<table>", ends=True)
    assert allows_text(answer, CALL, ends=True)
    assert not allows_text(answer, "<tool_call>", ends=True), "that would be a call without a name"
    llama = answers("llama3", [GET], json_schema=OBJECT)
    assert allows_text(llama, '{"name": "x"}', ends=True)
    assert allows_text(llama, '{"name": "get", "parameters": {"x": 5}}', ends=True)
    assert not allows_text(llama, '{"name": "get"}')


# ---------------------------------------------------------------- items that must differ


# Formats differ in what stands around the arguments: quick runs take one with names in JSON and one with names before
# it.
QUICK = ("hermes", "mistral")


@pytest.mark.parametrize(
    "format",
    [pytest.param(each.name, marks=() if each.name in QUICK else SLOW) for each in TOOL_FORMATS if not each.parameters],
)
def test_items_that_must_differ(format: str) -> None:
    answer = answers(format, [SET, GET], tool_choice="required")
    layout = answer.format.tool_format
    assert layout
    for ids, may in (([1, 2, 3], True), ([1, 2, 1], False), ([12, 12], False), ([1, 12, 2, 21], True)):
        calls = [("set", {"ids": ids})]
        for each in [calls, [("get", {"x": 1}), *calls]] if layout.between_calls is not None else [calls]:
            assert allows_text(answer, layout.write_calls(each), ends=True) is may, each


# ---------------------------------------------------------------- states depend on tokens alone

SETUPS: dict[str, tuple[Answers, list[str], int | None]] = {
    "auto": (answers("hermes", TOOLS), ["Hi ", "<tool_call", CALL[: CALL.index("5")], f"Hi {CALL}\n"], None),
    "tokens": (answers("hermes", TOOLS, THINK, TAGS), ["Hi <tool_call>", "<think>a</think>", CALL], None),
    "required": (answers("hermes", TOOLS, THINK, tool_choice="required"), ["", "<th", "<think>x", "<tool"], 9),
    "opened": (answers("hermes", TOOLS, THINK, TAGS, "thinking", tool_choice="required"), ["", "x</think>"], 4),
    "harmony": (
        answers("harmony", TOOLS, HARMONY_THINKING, CHANNELS, tool_choice="required"),
        ["", "<|channel|>", " to"],
        5,
    ),
    "format": (
        answers("llama3", [GET, GETS], THINK, json_schema=OBJECT),
        ["", '{"name": "get"', "<think>a</thi"],
        None,
    ),
    "unique": (answers("mistral", [SET]), ['[TOOL_CALLS]set[ARGS]{"ids": [1, 12,'], None),
    "xml": (answers("qwen-xml", [GET, GETS]), ["<tool_call>\n<function=gets>\n", "Hi <tool_call"], None),
}


def steps(limits: AnswerConstraint, answer: Answers, numbers: random.Random, begun: str) -> list[np.ndarray]:
    """Return the texts of a random answer, one token longer each."""
    tokens = followed(answer, begun)
    assert tokens is not None
    begin = tokens[len(PROMPT) :].tolist()
    found, _ = random_answer(limits, answer.vocabulary, numbers, begin, patience=20, limit=60)
    return [np.concatenate((PROMPT, np.array(found[:at], dtype=np.int64))) for at in range(len(found) + 1)]


def same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is other if one is None or other is None else bool((one == other).all())


# Quick runs ask each of the two questions of every other setup.
ASKED_TWICE, ASKED_EACH = (
    [pytest.param(setup, marks=() if number % 2 == odd else SLOW) for number, setup in enumerate(SETUPS)]
    for odd in (0, 1)
)


@pytest.mark.parametrize("setup", ASKED_TWICE)
def test_what_is_said_depends_on_the_tokens_alone(setup: str) -> None:
    answer, begun, budget = SETUPS[setup]
    numbers, used = random.Random(setup), answer.constraint(budget)
    texts = [text for each in begun * 2 for text in steps(used, answer, numbers, each)]
    numbers.shuffle(texts)
    for text in texts[:40]:
        fresh = answer.constraint(budget)
        ended, token = fresh.is_complete(text), numbers.choice(answer.vocabulary.ids_of(CALL))
        for ask in numbers.sample(("forced_tokens", "is_complete", "allows_token"), 3):
            if not (ask == "allows_token" and ended):
                arguments = (token, text) if ask == "allows_token" else (text,)
                assert getattr(used, ask)(*arguments) == getattr(fresh, ask)(*arguments)
        if not ended:
            assert same(used.token_mask(text), fresh.token_mask(text))


@pytest.mark.parametrize("setup", ASKED_EACH)
def test_single_tokens_and_forced_ones_agree_with_masks(setup: str) -> None:
    answer, begun, budget = SETUPS[setup]
    numbers, size = random.Random(setup), len(answer.vocabulary.spelt)
    texts = [text for each in begun for text in steps(answer.constraint(budget), answer, numbers, each)]
    for text in numbers.sample(texts, 4):
        fresh, masking = answer.constraint(budget), answer.constraint(budget)
        if fresh.is_complete(text):
            continue
        right = set(allowed(masking, text, size))
        for token in numbers.sample(range(size), 200) + numbers.sample(sorted(right), min(len(right), 50)):
            assert fresh.allows_token(token, text) is (token in right), token  # before it has a mask
        for token in range(size):
            assert masking.allows_token(token, text) is (token in right), token
        for token in fresh.forced_tokens(text):
            assert allowed(masking, text, size) == [token]
            text = np.append(text, token)


def test_a_constraint_that_fails_can_be_asked_again() -> None:
    answer = answers("hermes", TOOLS)
    limits, wrong = answer.constraint(), after(answer, "<tool_call>x")
    for _ in range(2):
        with pytest.raises(OvspecError):
            limits.token_mask(wrong)
    assert limits.token_mask(after(answer, "Hi")) is None
    assert limits.forced_tokens(after(answer, "<tool_call>"))


# ---------------------------------------------------------------- all formats


# Tags are spelt, special tokens, or other tokens: quick runs try one of these with each format.
TAGS_ARE = ("spelt", "special", "added")
CASES = [
    pytest.param(format, tags, marks=() if number % 3 == place else SLOW, id=f"{format.name}-{tags}")
    for number, format in enumerate(TOOL_FORMATS)
    for place, tags in enumerate(TAGS_ARE)
]


@pytest.mark.parametrize(("format", "tags_are"), CASES)
def test_random_answers_are_valid_calls(format: Any, tags_are: str) -> None:
    tags = {tag for text in format.fixed_texts() for tag in re.findall(r"<[^<>\s=]+>|\[[A-Z_]+\]", text)}
    tools = [GET, GETS, with_schema("free", {"type": "object", "properties": {}})]
    names = tuple(sorted(tags))
    vocabulary = {"spelt": PLAIN, "special": Vocabulary(names), "added": Vocabulary((), names)}[tags_are]
    numbers, calls = random.Random(format.name), 0
    answer = answers(format.name, tools, vocabulary=vocabulary, tool_choice="required")
    auto = answers(format.name, tools, vocabulary=vocabulary)
    trigger = format.triggers[0].replace("{NAME}", "get")
    for each, begun in [(answer, ""), (answer, ""), (auto, trigger), (auto, f"Hi {trigger}")]:
        start = vocabulary.ids_of(begun)
        found, ended = random_answer(each.constraint(), vocabulary, numbers, start, patience=20, limit=200)
        cut = numbers.randint(0, len(found))
        for tokens, whole in ((found, ended), (found[:cut], False)):
            said, reader = each.read(tokens, numbers.choice((1, 2, 1000)))
            check_calls(said, tools, whole)
            calls += whole and len(reader.calls)
            if not format.calls_within_text and begun.startswith("Hi"):
                assert not reader.calls
    assert calls >= 2
