"""Reads an assistant's answer as it grows: what is thinking, what is text, and which tools it calls with what.

Tags are found as tokens where the vocabulary has a token for them, otherwise as text. In the texts here such a token is
a single character that no text can have (a lone surrogate), so that a tag that was only spelt out stays text.
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

# start: nothing but white space yet; after: the same behind thinking; between: the header of a message (harmony).
Phase = Literal["start", "thinking", "after", "text", "between", "calls"]
WHITESPACE = " \t\r\n"  # only ASCII, so that it is the same in bytes
FIRST_MARK = 0xD800
MARK_COUNT = 0x800
TOOL_NAME_IN_CALL = r"(?P<name>[A-Za-z0-9_.-]+)(?=[^A-Za-z0-9_.-])"


@dataclass(frozen=True)
class Tag:
    """A text that leads from one of the phases ``from_phases`` to ``next_phase``. Calls begin with their tag."""

    text: str
    from_phases: tuple[Phase, ...]
    next_phase: Phase

    def rest_of_text(self, text: str, start: int) -> str:
        """Return the rest of ``text`` after this tag, which begins at ``start``; a tag of calls belongs to the rest."""
        if self.next_phase != "calls":
            start += len(self.text)
        return text[start:]


@dataclass(frozen=True)
class ThinkingFormat:
    """How a model marks its thinking.

    open, close: the tags around it.
    further_tags: further tags of a format that has a header for each part.
    message_header, text_header: what is between thinking and such a header, and the header of the text for the user.
    """

    open: str
    close: str
    further_tags: tuple[Tag, ...] = ()
    message_header: str = ""
    text_header: str = ""

    @property
    def tags(self) -> tuple[Tag, ...]:
        after: Phase = "between" if self.message_header else "after"
        return (
            Tag(self.open, ("start", "after", "between"), "thinking"),
            Tag(self.close, ("thinking",), after),
            *self.further_tags,
        )


HEADER_PHASES: tuple[Phase, ...] = ("start", "between")
HARMONY_THINKING = ThinkingFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    (
        Tag("<|channel|>final<|message|>", HEADER_PHASES, "text"),
        Tag("<|channel|>commentary<|message|>", HEADER_PHASES, "text"),
        Tag("<|end|>", ("text",), "between"),
        Tag("<|start|>assistant", ("start",), "between"),
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


def detect_thinking_format(source: str) -> ThinkingFormat | None:
    """Return the tags of thinking in a chat template."""
    unescaped = source.replace("\\n", "\n")
    return next((tags for tags in THINKING_FORMATS if tags.close in source and tags.open in unescaped), None)


# ---------------------------------------------------------------- phases


class ReadingState(NamedTuple):
    """Where an answer is. ``pending``: its last text, which may begin a tag or be white space before one."""

    phase: Phase = "start"
    pending: str = ""


def split_by_phase(tags: Sequence[Tag], state: ReadingState, text: str) -> tuple[ReadingState, list[tuple[Phase, str]]]:
    """Return the state after ``text``, and what is now known of it: (phase, text) pairs.

    White space around tags is gone.
    """
    phase = state.phase
    pending = state.pending + text
    parts: list[tuple[Phase, str]] = []
    while pending and phase != "calls":
        usable = [tag for tag in tags if phase in tag.from_phases]
        if phase in ("start", "after"):
            begun = pending
            if not any(tag.text.startswith(pending) or pending.startswith(tag.text) for tag in usable):
                begun = pending.lstrip(WHITESPACE)  # only here: some tags begin with white space themselves
            matching = [tag for tag in usable if begun.startswith(tag.text)]
            if tag := max(matching, key=lambda tag: len(tag.text), default=None):
                pending = tag.rest_of_text(begun, 0)
                phase = tag.next_phase
            elif not begun or any(tag.text.startswith(begun) for tag in usable):
                break
            else:
                if phase == "after":
                    pending = begun
                phase = "text"
            continue
        matches = [(start, -len(tag.text), tag) for tag in usable if (start := pending.find(tag.text)) >= 0]
        if matches:
            start, _, tag = min(matches, key=lambda match: match[:2])
            parts.append((phase, pending[:start].rstrip(WHITESPACE)))
            pending = tag.rest_of_text(pending, start)
            phase = tag.next_phase
            continue
        end = find_unfinished_tag(pending, usable)
        parts.append((phase, pending[:end]))
        pending = pending[end:]
        break
    if phase == "calls":
        parts.append((phase, pending))
        pending = ""
    return ReadingState(phase, pending), [part for part in parts if part[1] and part[0] != "between"]


def find_unfinished_tag(text: str, tags: Collection[Tag]) -> int:
    """Return where the end of ``text`` begins that may turn out to be a tag with white space before it."""
    if not tags:
        return len(text)
    return len(text[: min(find_unfinished_end(text, tag.text) for tag in tags)].rstrip(WHITESPACE))


# ---------------------------------------------------------------- a model's answers


@dataclass(frozen=True)
class AnswerFormat:
    """How a model's answers to a request are written.

    tools: the tool format, if there are tools.
    thinking: the tags of thinking, if there are any.
    tool_names: the tools whose calls are looked for.
    first_phase: the phase in which an answer begins.
    calls_after_text: whether calls may follow text.
    added_tokens: text -> id of the tokens outside of the model's own vocabulary.
    """

    tools: ToolFormat | None = None
    thinking: ThinkingFormat | None = None
    tool_names: tuple[str, ...] = ()
    first_phase: Phase = "start"
    calls_after_text: bool = True
    added_tokens: Mapping[str, int] = field(default_factory=dict)

    @functools.cached_property
    def tag_ids(self) -> dict[str, int]:
        """The tokens that are tags or parts of them: text -> id."""
        texts: list[str] = []
        if self.thinking:
            texts += [self.thinking.message_header, *(tag.text for tag in self.thinking.tags)]
        if self.tools:
            texts += self.tools.fixed_texts()
        return {name: token for name, token in self.added_tokens.items() if any(name in text for text in texts)}

    @functools.cached_property
    def tag_marks(self) -> dict[int, str]:
        """The character that stands for each of these tokens, by id."""
        return {token: chr(FIRST_MARK + index) for index, token in enumerate(self.tag_ids.values())}

    @property
    def tags(self) -> list[Tag]:
        """All tags, with characters for tokens."""
        tags: list[Tag] = []
        if self.thinking:
            tags += self.thinking.tags
        if not self.calls_after_text:  # an answer that isn't free has thinking only before it
            tags = [Tag(tag.text, ("start",), tag.next_phase) if tag.next_phase == "thinking" else tag for tag in tags]
        if self.tools:
            from_phases: tuple[Phase, ...] = ("start", "after", "between")
            if self.calls_after_text and self.tools.calls_within_text:
                from_phases += ("text",)
            for trigger in self.tools.triggers:
                for name in self.tool_names if "{NAME}" in trigger else ("",):
                    tags.append(Tag(trigger.replace("{NAME}", name), from_phases, "calls"))
        return [Tag(self.mark_tokens(tag.text), tag.from_phases, tag.next_phase) for tag in tags]

    def mark_tokens(self, text: str) -> str:
        """Return ``text`` with characters for tokens."""
        for name in sorted(self.tag_ids, key=len, reverse=True):
            text = text.replace(name, self.tag_marks[self.tag_ids[name]])
        return text

    def spell_marks(self, text: str) -> str:
        """Return ``text`` with tokens spelt out."""
        names = {self.tag_marks[token]: name for name, token in self.tag_ids.items()}
        if not any(map(is_mark, text)):
            return text
        return "".join(names.get(character, character) for character in text)


def is_mark(character: str) -> bool:
    """Return whether a character stands for a token."""
    return FIRST_MARK <= ord(character) < FIRST_MARK + MARK_COUNT


# ---------------------------------------------------------------- what an answer says


@dataclass(slots=True)
class ToolCall:
    """A call of a tool, or what a stream adds to one. ``arguments``: JSON, or a part of it.

    ``index``: among the calls of the answer. ``name``, ``id``: in a stream, only with the first part.
    """

    index: int
    name: str | None
    arguments: str = ""
    id: str | None = None


@dataclass(slots=True)
class AnswerContent:
    """What an answer says, or a part of it."""

    text: str = ""
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class AnswerReader:
    """Reads an answer piece by piece.

    Args:
        strings: for each tool the parameters that are written as text without quotes.
        key: makes ids of calls differ from those of other answers.
    """

    def __init__(
        self, format: AnswerFormat, strings: Mapping[str, Collection[str]] | None = None, key: bytes = b""
    ) -> None:
        self._format = format
        self._tags = format.tags
        self._state = ReadingState(format.first_phase)
        self._key = key
        self._has_thought = False  # whether thinking has begun: white space before it is gone
        self._calls = CallReader(format, strings or {}) if format.tools else None
        self.calls: list[ToolCall] = []  # whole ones, or cut off where the text was

    @property
    def phase(self) -> Phase:
        return self._state.phase

    def push(self, text: str, content: AnswerContent) -> None:
        """Add the content of ``text`` to ``content``."""
        self._state, parts = split_by_phase(self._tags, self._state, text)
        self._add_parts(parts, content)

    def flush(self, content: AnswerContent) -> None:
        """Add the pending text at the end of the answer, where a tag might have come, to ``content``."""
        phase, pending = self._state
        self._state = ReadingState(phase)
        if phase == "thinking":
            self._add_parts([(phase, pending.rstrip(WHITESPACE))], content)
        elif phase in ("start", "text"):
            self._add_parts([("text", pending)], content)

    def _add_parts(self, parts: list[tuple[Phase, str]], content: AnswerContent) -> None:
        for phase, part in parts:
            if phase == "thinking":
                if not self._has_thought:
                    part = part.lstrip(WHITESPACE)
                    self._has_thought = bool(part)
                content.thinking += self._format.spell_marks(part)
            elif phase == "calls":
                assert self._calls
                for call in self._calls.push(part):
                    if call.index == len(self.calls):
                        call.id = self._make_call_id(call.index)
                        self.calls.append(ToolCall(call.index, call.name, "", call.id))
                    self.calls[call.index].arguments += call.arguments
                    content.calls.append(call)
            else:
                content.text += self._format.spell_marks(part)

    def _make_call_id(self, index: int) -> str:
        """Return a call's id: the same for the same answer, so that it doesn't depend on how often it is asked for."""
        digest = hashlib.blake2b(self._key + index.to_bytes(4), digest_size=12).hexdigest()
        assert self._format.tools
        length = self._format.tools.id_length
        if length:
            return digest[:length]
        return f"call_{digest}"


class CallReader:
    """Reads calls piece by piece. They follow the grammar of their format, but may be cut off anywhere."""

    def __init__(self, format: AnswerFormat, strings: Mapping[str, Collection[str]]) -> None:
        layout = format.tools
        assert layout
        slots = {"NAME": TOOL_NAME_IN_CALL, **SLOT_PATTERNS}
        starts = (itertools.takewhile("ARGUMENTS".__ne__, call) for call in layout.calls)
        texts = ["".join(slots.get(part) or re.escape(format.mark_tokens(part)) for part in start) for start in starts]
        self._starts = [re.compile(text) for text in texts]
        self._parameter_tags = layout.parameters and tuple(map(format.mark_tokens, layout.parameters))
        self._strings = strings
        self._spell_marks = format.spell_marks
        self._unread = ""  # not read yet
        self._parts: list[ToolCall] = []  # read since the last piece
        self._reading = self._read_calls()
        next(self._reading)

    def push(self, text: str) -> list[ToolCall]:
        """Add ``text``; return the parts of calls that it has brought."""
        self._unread += text
        next(self._reading)
        parts = self._parts
        self._parts = []
        return parts

    def _read_calls(self) -> Generator[None]:
        """Read as far as the text goes, wait for more, and go on."""
        for index in itertools.count():
            while not (matches := [match for start in self._starts if (match := start.search(self._unread))]):
                yield
            start = min(matches, key=lambda match: match.start())
            self._unread = self._unread[start.end() :]
            self._parts.append(ToolCall(index, start["name"]))
            if self._parameter_tags:
                yield from self._read_parameters(index, self._strings.get(start["name"], ()), *self._parameter_tags)
            else:
                yield from self._read_json_arguments(index)

    def _read_json_arguments(self, index: int, close: str = "") -> Generator[None]:
        """Read a JSON object; or, if given, any JSON up to ``close``, and go past that."""
        depth = 0
        quoted = False
        escaped = False
        while True:
            position = 0
            for position, character in enumerate(self._unread):
                if quoted:
                    quoted, escaped = escaped or character != '"', character == "\\" and not escaped
                elif character == '"':
                    quoted = True
                elif close:
                    if self._unread.startswith(close, position):
                        self._emit_arguments(index, self._consume(position))
                        self._consume(len(close))
                        return
                    if close.startswith(self._unread[position:]):
                        break
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                    if not depth:
                        self._emit_arguments(index, self._consume(position + 1))
                        return
            else:
                position = len(self._unread)
            self._emit_arguments(index, self._consume(position))
            yield

    def _read_parameters(
        self, index: int, strings: Collection[str], open: str, middle: str, close: str
    ) -> Generator[None]:
        """Read parameters, and emit them as a JSON object."""
        separator = "{"
        while True:
            while open.startswith(self._unread):  # all of it, or the beginning, or nothing yet
                if self._unread == open:
                    break
                yield
            if not self._unread.startswith(open):
                self._emit_arguments(index, "{}" if separator == "{" else "}")
                return
            self._consume(len(open))
            name = yield from self._read_until(middle)
            self._emit_arguments(index, f"{separator}{json.dumps(name, ensure_ascii=False)}: ")
            separator = ", "
            if name not in strings:
                yield from self._read_json_arguments(index, close)
                continue
            self._emit_arguments(index, '"')
            while (end := self._unread.find(close)) < 0:
                self._emit_arguments(index, escape_json_text(self._consume(find_unfinished_end(self._unread, close))))
                yield
            self._emit_arguments(index, escape_json_text(self._consume(end)) + '"')
            self._consume(len(close))

    def _read_until(self, end: str) -> Generator[None, None, str]:
        """Return the text before ``end``, and go past it."""
        while (position := self._unread.find(end)) < 0:
            yield
        text = self._consume(position)
        self._consume(len(end))
        return text

    def _consume(self, count: int) -> str:
        consumed = self._unread[:count]
        self._unread = self._unread[count:]
        return consumed

    def _emit_arguments(self, index: int, arguments: str) -> None:
        if arguments:
            self._parts.append(ToolCall(index, None, self._spell_marks(arguments)))


def escape_json_text(text: str) -> str:
    """Return ``text`` as it is written within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def find_unfinished_end(text: str, end: str) -> int:
    """Return where the end of ``text`` begins that may turn out to be ``end``."""
    for position in range(max(0, len(text) - len(end) + 1), len(text)):
        if end.startswith(text[position:]):
            return position
    return len(text)
