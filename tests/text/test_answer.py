"""What an answer says is read from its text, however that is cut into pieces."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ovspec.params.tool_formats import TOOL_FORMATS
from ovspec.params.tool_formats.layout import ToolFormat
from ovspec.text.answer import (
    HARMONY_THINKING,
    THINKING_FORMATS,
    AnswerContent,
    AnswerFormat,
    AnswerReader,
    ThinkingFormat,
    ToolCall,
)

TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
SPELT = "\ue000"  # stands for a tag that is spelt out, where tags are tokens
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters=SPELT) | st.sampled_from('<>"\\{}[]/\n é🙂')
TEXTS = st.text(CHARACTERS | st.just(SPELT), max_size=12)
NAMES = st.from_regex(r"[A-Za-z0-9_.-]{1,12}", fullmatch=True)
KEYS = st.text(st.sampled_from("abcXYZ019_-é 漢"), min_size=1, max_size=6)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=5
)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=4)), min_size=1, max_size=3, unique_by=lambda call: call[0]
)


@dataclass
class Answer:
    """An answer, and how it is read. ``raw``: its text, with a character for each tag that is a token."""

    format: AnswerFormat
    strings: dict[str, list[str]]
    raw: str
    thought: str
    text: str
    calls: list[tuple[str, Any]]

    def read(self, pieces: list[str]) -> tuple[AnswerContent, list[ToolCall]]:
        """Return what the pieces say, and the calls, which are also those of the stream."""
        reader, said = AnswerReader(self.format, self.strings), AnswerContent()
        for piece in pieces:
            reader.push(piece, said)
        reader.flush(said)
        streamed = list[ToolCall]()
        for part in said.calls:
            if part.name is not None:
                assert part.index == len(streamed)
                streamed.append(ToolCall(part.index, part.name, "", part.id))
            streamed[part.index].arguments += part.arguments
        assert streamed == reader.calls
        return said, reader.calls


@st.composite
def answers(draw: st.DrawFn, format: ToolFormat) -> Answer:
    as_tokens = draw(st.booleans())
    thinking = HARMONY_THINKING if format.name == "harmony" else draw(st.sampled_from((None, *THINKING_FORMATS[1:])))
    tags = all_tags(format, thinking)
    numbers = {tag: number for number, tag in enumerate(tags)} if as_tokens else {}
    thought = draw(TEXTS).strip() if thinking else ""
    text = draw(TEXTS).strip() if format.calls_within_text or thinking is HARMONY_THINKING else ""
    calls = draw(CALLS)[: None if format.between_calls is not None else 1]
    free = json.dumps([thought, text, calls], ensure_ascii=False)
    assume(not as_tokens or not any(tag in free for tag in tags))  # which would become tokens
    began = thinking is not None and draw(st.booleans())
    answer_format = AnswerFormat(
        format,
        thinking,
        tuple(name for name, _ in calls),
        "thinking" if began else "start",
        added_tokens=numbers,
    )
    written = format.write_calls(calls, draw(st.integers(0, len(format.calls) - 1)))
    raw = in_order(thinking, began, thought, text, written, draw(st.sampled_from(("", "\n", " \n\n"))))
    spelt = draw(st.sampled_from(tags)) if as_tokens else "<"
    thought, text = (each.replace(SPELT, spelt) for each in (thought, text))
    calls = [(name, json.loads(json.dumps(value).replace(json.dumps(SPELT)[1:-1], spelt))) for name, value in calls]
    # Nothing tells a tag that isn't a token from the same text.
    assume(not any(tag.text in each for tag in answer_format.tags for each in (thought, text)))
    if around := format.parameters:
        values = [value for _, arguments in calls for value in arguments.values()]
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        close = answer_format.mark_tokens(around.after_value)
        assume(all((text + close).find(close) == len(text) for text in texts))
    strings = {name: [key for key in arguments if isinstance(arguments[key], str)] for name, arguments in calls}
    return Answer(answer_format, strings, answer_format.mark_tokens(raw).replace(SPELT, spelt), thought, text, calls)


def all_tags(format: ToolFormat, thinking: ThinkingFormat | None) -> list[str]:
    texts = [*format.fixed_texts(), *(tag.text for tag in (thinking.tags if thinking else ()))]
    return sorted({tag for text in texts for tag in TAG.findall(text)}) or ["<|python_tag|>"]


def in_order(thinking: ThinkingFormat | None, began: bool, thought: str, text: str, calls: str, gap: str) -> str:
    """Return the text of an answer."""
    if thinking is None:
        return f"{text}{gap if text else ''}{calls}"
    if thinking is not HARMONY_THINKING:
        return f"{'' if began else thinking.open_tag}{gap}{thought}{gap}{thinking.close_tag}{gap}{text}{gap}{calls}"
    messages = [f"{'' if began else thinking.open_tag}{thought}"] if began or thought else []
    messages += [f"<|channel|>commentary<|message|>{text}"] if text else []
    return "<|end|><|start|>assistant".join([*messages, calls])


def pieces_of(text: str, cuts: list[float]) -> list[str]:
    places = [0, *sorted(int(cut * len(text)) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


UNCHECKED = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@pytest.mark.parametrize("examples", [10, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("format", TOOL_FORMATS, ids=lambda format: format.name)
def test_answers_are_read_as_they_were_written(format: ToolFormat, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=UNCHECKED)
    @given(answer=answers(format), cuts=st.lists(st.floats(0, 1), max_size=8), end=st.floats(0, 1))
    def each(answer: Answer, cuts: list[float], end: float) -> None:
        check(answer, cuts, end)

    each()


def check(answer: Answer, cuts: list[float], end: float) -> None:
    said, calls = answer.read(pieces_of(answer.raw, cuts))
    assert (said.thinking, said.text) == (answer.thought, answer.text)
    assert [(call.name, json.loads(call.arguments)) for call in calls] == answer.calls
    assert answer.read(list(answer.raw))[1] == calls

    cut = answer.raw[: int(end * len(answer.raw))]
    less, begun = answer.read(pieces_of(cut, cuts))
    assert len(begun) <= len(calls)
    for some, whole in zip(begun, calls, strict=False):
        assert (some.name, some.id) == (whole.name, whole.id)
        assert (
            some.arguments == whole.arguments if some is not begun[-1] else whole.arguments.startswith(some.arguments)
        )
    if begun:
        assert (less.thinking, less.text) == (answer.thought, answer.text)
