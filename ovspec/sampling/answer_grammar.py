"""Constrains an assistant's answer part by part: thinking and text are free, calls of tools and formats are not.

A call that has begun can only go on validly. Until then no token is masked but one that would begin an invalid call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.cache.sequence import Sequence as Tokens
from ovspec.sampling.constraint import Constraint
from ovspec.sampling.grammar_constraint import Grammar
from ovspec.sampling.healing import ByteTokens
from ovspec.sampling.masks import holds, pack
from ovspec.text.answer import AnswerFormat, State, Tag, advance, is_mark

# (tokens before the grammar, what of its text is there already: bytes, and ids of tags) -> the grammar of the rest.
# Raises OvspecError if the grammar doesn't allow it.
MakeGrammar = Callable[[int, list[bytes | int]], Grammar]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer is after some tokens.

    thought: tokens of thinking so far. closing: those of them that have to end it. grammar: of what follows.
    """

    state: State
    thought: int = 0
    closing: int = 0
    grammar: Grammar | None = None


class AnswerGrammar(Constraint):
    """Keeps within a grammar what isn't free in an answer.

    Args:
        start: number of tokens of the prompt.
        format: how answers are written.
        vocabulary: the tokens by their bytes.
        make: makes the grammar; None if no call may begin.
        whole: whether all that isn't thinking is in the grammar; otherwise it begins with the tag of a call.
        budget: maximum number of tokens of thinking; None for no limit.
        closing: ids that end thinking.
    """

    def __init__(
        self,
        start: int,
        format: AnswerFormat,
        vocabulary: ByteTokens,
        make: MakeGrammar | None,
        whole: bool,
        budget: int | None = None,
        closing: Sequence[int] = (),
    ) -> None:
        self._start, self._marks, self._vocabulary, self._make, self._whole = (
            start,
            format.marks,
            vocabulary,
            make,
            whole,
        )
        self._ids = {mark: token for token, mark in format.marks.items()}
        self._budget, self._closing = budget, list(closing)
        # Bytes as characters, because a token may end inside of a character.
        self._tags = [Tag(bytewise(tag.text), tag.at, tag.to) for tag in format.tags]
        self._path = Tokens()
        begins = State(format.begins)
        grammar = self._grammar(start, "") if whole and begins.phase == "start" else None
        self._places = [Place(begins, grammar=grammar)]
        self._free_masks: dict[State, np.ndarray | None] = {}

    def mask(self, tokens: np.ndarray) -> np.ndarray | None:
        place = self._place(tokens)
        if closing := self._closing_at(place):
            return pack(closing[:1], self._vocabulary.size)
        if not self._whole or place.state.phase != "start":
            return place.grammar.mask(tokens) if place.grammar else self._free_mask(place.state)
        opening = pack(self._opening(place.state), self._vocabulary.size)
        return opening | place.grammar.mask(tokens) if place.grammar else opening

    def allows(self, token: int, tokens: np.ndarray) -> bool:
        place = self._place(tokens)
        if place.grammar and not self._closing_at(place) and place.grammar.allows(token, tokens):
            return True
        mask = self.mask(tokens)
        return mask is None or holds(mask, token)

    def forced(self, tokens: np.ndarray) -> list[int]:
        place = self._place(tokens)
        if closing := self._closing_at(place):
            return closing
        may_open = self._whole and place.state.phase == "start" and len(self._opening(place.state))
        return place.grammar.forced(tokens) if place.grammar and not may_open else []

    def complete(self, tokens: np.ndarray) -> bool:
        grammar = self._place(tokens).grammar
        return grammar is not None and grammar.complete(tokens)

    def _place(self, tokens: np.ndarray) -> Place:
        """Follow ``tokens``, and return where the answer is."""
        text, path = tokens[self._start :], self._path.tokens
        shared = min(len(text), len(path))
        differ = text[:shared] != path[:shared]
        if differ.any():
            shared = int(differ.argmax())
        if shared < len(text):
            self._path.rewind(shared)
            self._path.commit(text[shared:])
            del self._places[shared + 1 :]
            for at in range(shared, len(text)):
                self._places.append(self._after(self._places[at], tokens[: self._start + at], int(text[at])))
        return self._places[len(text)]

    def _after(self, place: Place, tokens: np.ndarray, token: int) -> Place:
        """Return the place after ``token``, which follows ``tokens``."""
        before, grammar = place.state, place.grammar
        if grammar and before.phase != "start":
            return place
        state, rest = self._follow(before, token)
        thought = place.thought + (before.phase == "thinking")
        closing = place.closing + 1 if state.phase == "thinking" and self._closing_at(place) else 0
        if grammar:  # unless thinking begins after all
            kept = grammar.allows(token, tokens) and state.phase != "thinking"
            return Place(state, thought, closing, grammar if kept else None)
        return Place(state, thought, closing, None if rest is None else self._grammar(len(tokens) + 1, rest))

    def _follow(self, state: State, token: int) -> tuple[State, str | None]:
        """Return the state after ``token``, and what it has of the grammar's text if that begins with it."""
        text = self._text(token)
        after = advance(self._tags, state, text)[0]
        if after.phase == state.phase or state.phase == "calls":
            return after, None
        for at, character in enumerate(text):
            before, state = state, advance(self._tags, state, character)[0]
            if self._whole and before.phase == "thinking" != state.phase:
                return after, text[at + 1 :]
            if state.phase == "calls" != before.phase and not self._whole:
                tag = next(tag.text for tag in self._tags if tag.to == "calls" and self._ends(before, character, tag))
                return after, tag + text[at + 1 :]
        return after, None

    def _ends(self, state: State, character: str, tag: Tag) -> bool:
        return state.phase in tag.at and (state.held + character).endswith(tag.text)

    def _text(self, token: int) -> str:
        """Return the bytes of a token as characters, or the one that stands for it."""
        spelt = self._vocabulary.vocabulary[token] if token < self._vocabulary.size else None
        return self._marks.get(token) or (spelt or b"").decode("latin-1")

    def _grammar(self, start: int, text: str) -> Grammar:
        """Return the grammar after ``start`` tokens, which already have ``text`` of it."""
        if not self._make:
            raise OvspecError("No tool may be called.")
        parts: list[bytes | int] = []
        for marks, group in itertools.groupby(text, is_mark):
            characters = "".join(group)
            parts += [self._ids[mark] for mark in characters] if marks else [characters.encode("latin-1")]
        return self._make(start, parts)

    # ------------------------------------------------------------ thinking

    def _closing_at(self, place: Place) -> list[int]:
        """Return the ids that must follow because there was enough thinking."""
        if self._budget is None or place.state.phase != "thinking" or place.thought < self._budget:
            return []
        return self._closing[place.closing :]

    def _opening(self, state: State) -> list[int]:
        """Return the ids that may begin thinking, or go on with its tag."""
        found, begun = list[int](), state.held.lstrip()
        for tag in self._tags:
            if tag.to == "thinking" and state.phase in tag.at and tag.text.startswith(begun):
                text, mark = split_at_mark(tag.text[len(begun) :])
                if not text:
                    found.append(self._ids[mark])
                    continue
                ids = self._vocabulary.along(text.encode("latin-1"))
                found += [each for each in ids if not mark or len(self._text(each)) <= len(text)]
        return found

    # ------------------------------------------------------------ what is free

    def _free_mask(self, state: State) -> np.ndarray | None:
        """Return the mask of all tokens but those that would begin what the grammar doesn't allow; None for all."""
        if state not in self._free_masks:
            wrong = [token for token in self._beginning(state) if not self._may_begin(state, token)]
            self._free_masks[state] = ~pack(wrong, self._vocabulary.size) if wrong else None
        return self._free_masks[state]

    def _may_begin(self, state: State, token: int) -> bool:
        try:
            _, rest = self._follow(state, token)
            if rest is not None:
                self._grammar(0, rest)
            return True
        except OvspecError:
            return False

    def _beginning(self, state: State) -> Iterator[int]:
        """Yield the ids after which the grammar may begin, and some others."""
        for tag in self._tags:
            if state.phase not in tag.at or (tag.to != "calls" if not self._whole else state.phase != "thinking"):
                continue
            for length in range(min(len(state.held), len(tag.text) - 1) + 1):
                if not state.held.endswith(tag.text[:length]):
                    continue
                text, mark = split_at_mark(tag.text[length:])
                if mark and not text:
                    yield self._ids[mark]
                elif not mark:
                    yield from (
                        each for each in self._vocabulary.along(text.encode("latin-1")) if text in self._text(each)
                    )
            if not split_at_mark(tag.text)[1]:
                yield from self._vocabulary.containing(tag.text.encode("latin-1"))


def bytewise(text: str) -> str:
    """Return ``text`` with its bytes as characters; characters that stand for tokens stay."""
    return "".join(each if is_mark(each) else each.encode().decode("latin-1") for each in text)


def split_at_mark(text: str) -> tuple[str, str]:
    """Return (``text`` before the first character that stands for a token, that character or "")."""
    at = next((at for at, each in enumerate(text) if is_mark(each)), len(text))
    return text[:at], text[at : at + 1]
