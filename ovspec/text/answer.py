"""Reads an assistant's answer as it grows: its thinking, its text, and its tool calls with their arguments.

Tags are found as tokens where the vocabulary has a token for them, otherwise as text. In the texts here such a token is
a single character outside valid text (a lone surrogate), so a tag spelt out in ordinary tokens stays text.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ovspec.params.tool_formats.layout import SLOT_PATTERNS, ToolFormat

# start: nothing but white space yet; after: the same after thinking; between: the header of a message (harmony).
Phase = Literal["start", "thinking", "after", "text", "between", "calls"]
WHITESPACE = " \t\r\n"  # only ASCII, for the same result in bytes
FIRST_MARK_CODEPOINT = 0xD800
MARK_COUNT = 0x800
TOOL_NAME_IN_CALL = r"(?P<name>[A-Za-z0-9_.-]+)(?=[^A-Za-z0-9_.-])"


@dataclass(frozen=True)
class PhaseTag:
    """A tag between phases: it leads from a phase in ``from_phases`` to ``next_phase``. Calls begin with their tag."""

    text: str
    from_phases: tuple[Phase, ...]
    next_phase: Phase

    def text_after_tag(self, text: str, tag_start: int) -> str:
        """Return the rest of ``text`` after this tag, at ``tag_start``; the tag of calls is included."""
        if self.next_phase != "calls":
            tag_start += len(self.text)
        return text[tag_start:]


@dataclass(frozen=True)
class ThinkingFormat:
    """A model's tags and headers for thinking.

    open_tag, close_tag: the tags around it.
    further_tags: further tags of a format with a header for each part.
    message_header, text_header: the text between thinking and such a header, and the header of the text for the user.
    """

    open_tag: str
    close_tag: str
    further_tags: tuple[PhaseTag, ...] = ()
    message_header: str = ""
    text_header: str = ""

    @property
    def tags(self) -> tuple[PhaseTag, ...]:
        phase_after_thinking: Phase = "between" if self.message_header else "after"
        return (
            PhaseTag(self.open_tag, ("start", "after", "between"), "thinking"),
            PhaseTag(self.close_tag, ("thinking",), phase_after_thinking),
            *self.further_tags,
        )


HEADER_PHASES: tuple[Phase, ...] = ("start", "between")
HARMONY_THINKING = ThinkingFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    (
        PhaseTag("<|channel|>final<|message|>", HEADER_PHASES, "text"),
        PhaseTag("<|channel|>commentary<|message|>", HEADER_PHASES, "text"),
        PhaseTag("<|end|>", ("text",), "between"),
        PhaseTag("<|start|>assistant", ("start",), "between"),
    ),
    message_header="<|start|>assistant",
    text_header="<|channel|>final<|message|>",
)
THINKING_FORMATS = (
    HARMONY_THINKING,
    ThinkingFormat("<think>", "</think>"),
    ThinkingFormat("[THINK]", "[/THINK]"),
    ThinkingFormat("<seed:think>", "</seed:think>"),
    ThinkingFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkingFormat("<|inner_prefix|>", "<|inner_suffix|>"),
    ThinkingFormat("<|channel>thought\n", "<channel|>"),
)


def detect_thinking_format(template_source: str) -> ThinkingFormat | None:
    """Return the tags of thinking in a chat template."""
    unescaped_source = template_source.replace("\\n", "\n")
    return next(
        (
            thinking_format
            for thinking_format in THINKING_FORMATS
            if thinking_format.close_tag in template_source and thinking_format.open_tag in unescaped_source
        ),
        None,
    )


# ---------------------------------------------------------------- phases


class AnswerReadingState(NamedTuple):
    """The position in an answer. ``pending``: its last text, perhaps the start of a tag or white space before a tag."""

    phase: Phase = "start"
    pending: str = ""


def split_by_phase(
    tags: Sequence[PhaseTag], state: AnswerReadingState, text: str
) -> tuple[AnswerReadingState, list[tuple[Phase, str]]]:
    """Return the state after ``text``, and its parts known by now: (phase, text) pairs.

    White space around tags is removed.
    """
    phase = state.phase
    pending = state.pending + text
    phase_parts: list[tuple[Phase, str]] = []
    while pending and phase != "calls":
        possible_tags = [tag for tag in tags if phase in tag.from_phases]
        if phase in ("start", "after"):
            trimmed_text = pending
            if not any(tag.text.startswith(pending) or pending.startswith(tag.text) for tag in possible_tags):
                trimmed_text = pending.lstrip(WHITESPACE)  # only here: some tags begin with white space themselves
            matching_tags = [tag for tag in possible_tags if trimmed_text.startswith(tag.text)]
            if tag := max(matching_tags, key=lambda tag: len(tag.text), default=None):
                pending = tag.text_after_tag(trimmed_text, 0)
                phase = tag.next_phase
            elif not trimmed_text or any(tag.text.startswith(trimmed_text) for tag in possible_tags):
                break
            else:
                if phase == "after":
                    pending = trimmed_text
                phase = "text"
            continue
        tag_matches = [
            (tag_start, -len(tag.text), tag) for tag in possible_tags if (tag_start := pending.find(tag.text)) >= 0
        ]
        if tag_matches:
            tag_start, _, tag = min(tag_matches, key=lambda match: match[:2])
            phase_parts.append((phase, pending[:tag_start].rstrip(WHITESPACE)))
            pending = tag.text_after_tag(pending, tag_start)
            phase = tag.next_phase
            continue
        text_end = find_unfinished_tag(pending, possible_tags)
        phase_parts.append((phase, pending[:text_end]))
        pending = pending[text_end:]
        break
    if phase == "calls":
        phase_parts.append((phase, pending))
        pending = ""
    return AnswerReadingState(phase, pending), [
        phase_part for phase_part in phase_parts if phase_part[1] and phase_part[0] != "between"
    ]


def find_unfinished_tag(text: str, tags: Collection[PhaseTag]) -> int:
    """Return the index of a possible unfinished tag at the end of ``text``, including the white space before it."""
    if not tags:
        return len(text)
    return len(text[: min(find_unfinished_end(text, tag.text) for tag in tags)].rstrip(WHITESPACE))


# ---------------------------------------------------------------- a model's answers


@dataclass(frozen=True)
class AnswerFormat:
    """The format of a model's answers to a request.

    tool_format: the format of calls, if there are tools.
    thinking_format: the tags of thinking, if any.
    tool_names: the tools with calls to detect.
    first_phase: the phase at the start of an answer.
    calls_after_text: whether calls may follow text.
    added_tokens: text -> id of the tokens outside of the model's own vocabulary.
    """

    tool_format: ToolFormat | None = None
    thinking_format: ThinkingFormat | None = None
    tool_names: tuple[str, ...] = ()
    first_phase: Phase = "start"
    calls_after_text: bool = True
    added_tokens: Mapping[str, int] = field(default_factory=dict)

    @functools.cached_property
    def tag_token_ids(self) -> dict[str, int]:
        """The tokens of tags or parts of tags: text -> id."""
        tag_texts: list[str] = []
        if self.thinking_format:
            tag_texts += [self.thinking_format.message_header, *(tag.text for tag in self.thinking_format.tags)]
        if self.tool_format:
            tag_texts += self.tool_format.fixed_texts()
        return {
            token_text: token_id
            for token_text, token_id in self.added_tokens.items()
            if any(token_text in tag_text for tag_text in tag_texts)
        }

    @functools.cached_property
    def mark_by_token_id(self) -> dict[int, str]:
        """The placeholder character of each of these tokens, by id."""
        return {
            token_id: chr(FIRST_MARK_CODEPOINT + index) for index, token_id in enumerate(self.tag_token_ids.values())
        }

    @property
    def tags(self) -> list[PhaseTag]:
        """All tags, with placeholder characters for tokens."""
        tags: list[PhaseTag] = []
        if self.thinking_format:
            tags += self.thinking_format.tags
        if not self.calls_after_text:  # a constrained answer has thinking only before it
            tags = [
                PhaseTag(tag.text, ("start",), tag.next_phase) if tag.next_phase == "thinking" else tag for tag in tags
            ]
        if self.tool_format:
            from_phases: tuple[Phase, ...] = ("start", "after", "between")
            if self.calls_after_text and self.tool_format.calls_within_text:
                from_phases += ("text",)
            for trigger in self.tool_format.triggers:
                for tool_name in self.tool_names if "{NAME}" in trigger else ("",):
                    tags.append(PhaseTag(trigger.replace("{NAME}", tool_name), from_phases, "calls"))
        return [PhaseTag(self.mark_tokens(tag.text), tag.from_phases, tag.next_phase) for tag in tags]

    def mark_tokens(self, text: str) -> str:
        """Return ``text`` with placeholder characters for tokens."""
        for token_text in sorted(self.tag_token_ids, key=len, reverse=True):
            text = text.replace(token_text, self.mark_by_token_id[self.tag_token_ids[token_text]])
        return text

    def spell_marks(self, text: str) -> str:
        """Return ``text`` with tokens spelt out."""
        token_texts = {
            self.mark_by_token_id[token_id]: token_text for token_text, token_id in self.tag_token_ids.items()
        }
        if not any(map(is_token_mark, text)):
            return text
        return "".join(token_texts.get(character, character) for character in text)


def is_token_mark(character: str) -> bool:
    """Return whether a character is a token's placeholder."""
    return FIRST_MARK_CODEPOINT <= ord(character) < FIRST_MARK_CODEPOINT + MARK_COUNT


# ---------------------------------------------------------------- the content of an answer


@dataclass(slots=True)
class ToolCall:
    """A tool call, or its next part in a stream. ``arguments``: JSON, or a part of it.

    ``index``: among the calls of the answer. ``name``, ``id``: in a stream, only with the first part.
    """

    index: int
    name: str | None
    arguments: str = ""
    id: str | None = None


@dataclass(slots=True)
class AnswerContent:
    """The content of an answer, or a part of it."""

    text: str = ""
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class AnswerReader:
    """Reads an answer piece by piece.

    Args:
        string_parameters: for each tool the parameters written as text without quotes.
        id_key: distinguishes the ids of calls from the ids in other answers.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        string_parameters: Mapping[str, Collection[str]] | None = None,
        id_key: bytes = b"",
    ) -> None:
        self._format = answer_format
        self._tags = answer_format.tags
        self._reading_state = AnswerReadingState(answer_format.first_phase)
        self._id_key = id_key
        self._has_thought = False  # whether thinking has begun: white space before it is removed
        self._call_reader = (
            ToolCallReader(answer_format, string_parameters or {}) if answer_format.tool_format else None
        )
        self.calls: list[ToolCall] = []  # complete, or cut off with the text

    @property
    def phase(self) -> Phase:
        return self._reading_state.phase

    def push(self, text: str, content: AnswerContent) -> None:
        """Add the content of ``text`` to ``content``."""
        self._reading_state, phase_parts = split_by_phase(self._tags, self._reading_state, text)
        self._add_phase_texts(phase_parts, content)

    def flush(self, content: AnswerContent) -> None:
        """Add the pending text at the end of the answer, the possible start of a tag, to ``content``."""
        phase, pending = self._reading_state
        self._reading_state = AnswerReadingState(phase)
        if phase == "thinking":
            self._add_phase_texts([(phase, pending.rstrip(WHITESPACE))], content)
        elif phase in ("start", "text"):
            self._add_phase_texts([("text", pending)], content)

    def _add_phase_texts(self, phase_parts: list[tuple[Phase, str]], content: AnswerContent) -> None:
        for phase, phase_text in phase_parts:
            if phase == "thinking":
                if not self._has_thought:
                    phase_text = phase_text.lstrip(WHITESPACE)
                    self._has_thought = bool(phase_text)
                content.thinking += self._format.spell_marks(phase_text)
            elif phase == "calls":
                assert self._call_reader
                for call in self._call_reader.push(phase_text):
                    if call.index == len(self.calls):
                        call.id = self._make_call_id(call.index)
                        self.calls.append(ToolCall(call.index, call.name, "", call.id))
                    self.calls[call.index].arguments += call.arguments
                    content.calls.append(call)
            else:
                content.text += self._format.spell_marks(phase_text)

    def _make_call_id(self, index: int) -> str:
        """Return a call's id: the same each time for the same answer."""
        digest = hashlib.blake2b(self._id_key + index.to_bytes(4), digest_size=12).hexdigest()
        assert self._format.tool_format
        id_length = self._format.tool_format.id_length
        if id_length:
            return digest[:id_length]
        return f"call_{digest}"


class ToolCallReader:
    """Reads calls piece by piece. They follow the grammar of their format, but may be truncated anywhere."""

    def __init__(self, answer_format: AnswerFormat, string_parameters: Mapping[str, Collection[str]]) -> None:
        tool_format = answer_format.tool_format
        assert tool_format
        slot_patterns = {"NAME": TOOL_NAME_IN_CALL, **SLOT_PATTERNS}
        call_starts = (itertools.takewhile("ARGUMENTS".__ne__, call) for call in tool_format.calls)
        start_patterns = [
            "".join(slot_patterns.get(part) or re.escape(answer_format.mark_tokens(part)) for part in call_start)
            for call_start in call_starts
        ]
        self._start_patterns = [re.compile(start_pattern) for start_pattern in start_patterns]
        self._parameter_tags = tool_format.parameters and tuple(map(answer_format.mark_tokens, tool_format.parameters))
        self._string_parameters = string_parameters
        self._spell_marks = answer_format.spell_marks
        self._unread_text = ""  # not read yet
        self._new_parts: list[ToolCall] = []  # read since the last piece
        self._call_reading = self._read_calls()
        next(self._call_reading)

    def push(self, text: str) -> list[ToolCall]:
        """Add ``text``; return the new parts of calls."""
        self._unread_text += text
        next(self._call_reading)
        new_parts = self._new_parts
        self._new_parts = []
        return new_parts

    def _read_calls(self) -> Generator[None]:
        """Read to the end of the text so far, wait for more, and continue."""
        for index in itertools.count():
            while not (
                matches := [match for pattern in self._start_patterns if (match := pattern.search(self._unread_text))]
            ):
                yield
            first_match = min(matches, key=lambda match: match.start())
            self._unread_text = self._unread_text[first_match.end() :]
            self._new_parts.append(ToolCall(index, first_match["name"]))
            if self._parameter_tags:
                yield from self._read_parameters(
                    index, self._string_parameters.get(first_match["name"], ()), *self._parameter_tags
                )
            else:
                yield from self._read_json_arguments(index)

    def _read_json_arguments(self, index: int, closing_tag: str = "") -> Generator[None]:
        """Read a JSON object; or, with ``closing_tag``, any JSON up to the tag, and skip the tag."""
        depth = 0
        in_quotes = False
        is_escaped = False
        while True:
            position = 0
            for position, character in enumerate(self._unread_text):
                if in_quotes:
                    in_quotes, is_escaped = is_escaped or character != '"', character == "\\" and not is_escaped
                elif character == '"':
                    in_quotes = True
                elif closing_tag:
                    if self._unread_text.startswith(closing_tag, position):
                        self._emit_arguments(index, self._consume_text(position))
                        self._consume_text(len(closing_tag))
                        return
                    if closing_tag.startswith(self._unread_text[position:]):
                        break
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                    if not depth:
                        self._emit_arguments(index, self._consume_text(position + 1))
                        return
            else:
                position = len(self._unread_text)
            self._emit_arguments(index, self._consume_text(position))
            yield

    def _read_parameters(
        self, index: int, string_parameters: Collection[str], opening_tag: str, middle_tag: str, closing_tag: str
    ) -> Generator[None]:
        """Read parameters, and emit them as a JSON object."""
        separator = "{"
        while True:
            while opening_tag.startswith(self._unread_text):  # all of it, or the beginning, or nothing yet
                if self._unread_text == opening_tag:
                    break
                yield
            if not self._unread_text.startswith(opening_tag):
                self._emit_arguments(index, "{}" if separator == "{" else "}")
                return
            self._consume_text(len(opening_tag))
            parameter = yield from self._read_until(middle_tag)
            self._emit_arguments(index, f"{separator}{json.dumps(parameter, ensure_ascii=False)}: ")
            separator = ", "
            if parameter not in string_parameters:
                yield from self._read_json_arguments(index, closing_tag)
                continue
            self._emit_arguments(index, '"')
            while (value_end := self._unread_text.find(closing_tag)) < 0:
                self._emit_arguments(
                    index, escape_json_text(self._consume_text(find_unfinished_end(self._unread_text, closing_tag)))
                )
                yield
            self._emit_arguments(index, escape_json_text(self._consume_text(value_end)) + '"')
            self._consume_text(len(closing_tag))

    def _read_until(self, end_tag: str) -> Generator[None, None, str]:
        """Return the text before ``end_tag``, and skip the tag."""
        while (position := self._unread_text.find(end_tag)) < 0:
            yield
        text = self._consume_text(position)
        self._consume_text(len(end_tag))
        return text

    def _consume_text(self, character_count: int) -> str:
        consumed_text = self._unread_text[:character_count]
        self._unread_text = self._unread_text[character_count:]
        return consumed_text

    def _emit_arguments(self, index: int, arguments: str) -> None:
        if arguments:
            self._new_parts.append(ToolCall(index, None, self._spell_marks(arguments)))


def escape_json_text(text: str) -> str:
    """Return ``text`` as written within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def find_unfinished_end(text: str, end: str) -> int:
    """Return the index of a possible unfinished ``end`` at the end of ``text``."""
    for position in range(max(0, len(text) - len(end) + 1), len(text)):
        if end.startswith(text[position:]):
            return position
    return len(text)
