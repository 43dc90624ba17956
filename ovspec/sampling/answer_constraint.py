"""Constrains an assistant's answer part by part: thinking and text are free, calls of tools and formats are not.

A call that has begun can only go on validly. Until then no token is masked but one that would begin an invalid call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.cache.sequence import Sequence as Tokens
from ovspec.grammars.tools import ANSWER_CALLS, ANSWER_CALLS_AFTER_THINKING, ANSWER_TEXT, ANSWER_TEXT_AFTER_THINKING
from ovspec.sampling.byte_vocabulary import ByteVocabulary
from ovspec.sampling.constraint import Constraint
from ovspec.sampling.grammar_constraint import Grammar
from ovspec.sampling.masks import pack
from ovspec.text.answer import WHITE, AnswerFormat, State, Tag, advance, is_mark

# (tokens before the grammar, what of its text is there already: bytes, and ids of tags) -> the grammar of the rest.
# The first bytes tell which texts of the grammar: see grammars/tools.py. Raises OvspecError if it doesn't allow that.
MakeGrammar = Callable[[int, list[bytes | int]], Grammar]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer is after some tokens.

    thought: tokens of thinking so far; behind it, no more than the budget.
    grammars: of what follows; one of them allows it.
    """

    state: State
    thought: int = 0
    grammars: tuple[Grammar, ...] = ()


class AnswerConstraint(Constraint):
    """Keeps within a grammar what isn't free in an answer.

    Args:
        start: number of tokens of the prompt.
        format: how answers are written.
        vocabulary: the tokens by their bytes.
        make: makes the grammar; None if no call may begin.
        whole: whether all that isn't thinking is in the grammar; otherwise it begins with the tag of a call.
        ends: ids that end the text, which must not end in thinking if it must go on.
        budget: maximum number of tokens of thinking; None for no limit.
        closing: ids that end thinking.
    """

    def __init__(
        self,
        start: int,
        format: AnswerFormat,
        vocabulary: ByteVocabulary,
        make: MakeGrammar | None,
        whole: bool,
        ends: Collection[int] = (),
        budget: int | None = None,
        closing: Sequence[int] = (),
    ) -> None:
        self._start, self._vocabulary, self._make, self._whole = start, vocabulary, make, whole
        self._marks, self._ids = format.marks, {mark: token for token, mark in format.marks.items()}
        self._budget, self._closing = budget, list(closing)
        self._ends = [token for token in ends if token < vocabulary.size]
        # Bytes as characters, because a token may end inside of a character.
        self._tags = [Tag(bytewise(tag.text), tag.at, tag.to) for tag in format.tags]
        self._path = Tokens()
        begins, kinds = State(format.begins), (ANSWER_CALLS, ANSWER_TEXT)
        self._places = [Place(begins, 0, self._grammars(start, kinds) if whole and begins.phase == "start" else ())]
        self._wrong: dict[State, np.ndarray | None] = {}

    def mask(self, tokens: np.ndarray) -> np.ndarray | None:
        place = self._place(tokens)
        if closing := self._closing_at(place):
            return pack(closing[:1], self._vocabulary.size)
        if self._within(place):
            return place.grammars[0].mask(tokens)
        wrong = self._wrong_after(place.state)
        if not self._whole or place.state.phase == "thinking":
            return None if wrong is None else ~wrong
        mask = pack(self._opening(place.state), self._vocabulary.size)
        for grammar in place.grammars:
            mask |= grammar.mask(tokens)
        mask = mask if wrong is None else mask & ~wrong
        if not mask.any() and not self.complete(tokens):
            raise OvspecError("No token of this model can continue the answer within its format.")
        return mask

    def allows(self, token: int, tokens: np.ndarray) -> bool:
        place = self._place(tokens)
        if self._within(place):
            return place.grammars[0].allows(token, tokens)
        return super().allows(token, tokens)

    def forced(self, tokens: np.ndarray) -> list[int]:
        place = self._place(tokens)
        if closing := self._closing_at(place):
            return closing
        found, state = place.grammars[0].forced(tokens) if self._one(place) else [], place.state
        for count, token in enumerate(found if not self._within(place) else ()):
            after, kinds, _ = self._follow(state, token)
            if kinds:  # another grammar goes on
                return found[: count + self._may_follow(state, token)]
            state = after
        return found

    def complete(self, tokens: np.ndarray) -> bool:
        return any(grammar.complete(tokens) for grammar in self._place(tokens).grammars)

    # ------------------------------------------------------------ where an answer is

    def _place(self, tokens: np.ndarray) -> Place:
        """Follow ``tokens``, and return where the answer is."""
        text = tokens[self._start :]
        shared = self._path.common_prefix_length(text)
        if shared < len(text):
            self._path.rewind(shared)
            del self._places[shared + 1 :]
            for at in range(shared, len(text)):
                self._places.append(self._after(self._places[at], tokens[: self._start + at], int(text[at])))
                self._path.commit(text[at : at + 1])
        return self._places[len(text)]

    def _after(self, place: Place, tokens: np.ndarray, token: int) -> Place:
        """Return the place after ``token``, which follows ``tokens``."""
        if self._within(place):
            return place
        before, grammars = place.state.phase, place.grammars
        state, kinds, begun = self._follow(place.state, token)
        thought = place.thought + (before == "thinking")
        if self._budget is not None and state.phase != "thinking":
            thought = min(thought, self._budget)
        if kinds:
            grammars = self._grammars(len(tokens) + 1, kinds, begun)
        else:
            grammars = tuple(each for each in grammars if each.allows(token, tokens))
        after = Place(state, thought, grammars if state.phase != "thinking" else ())
        if self._within(after) and not grammars:
            raise OvspecError("The format of the answer doesn't allow what was generated.")
        return after

    def _within(self, place: Place) -> bool:
        """Return whether the rest of the answer is in its grammar, so that no tag matters any more."""
        return place.state.phase == "calls" or (self._whole and place.state.phase == "text")

    def _one(self, place: Place) -> bool:
        """Return whether all that may follow is in one grammar."""
        return self._within(place) or (len(place.grammars) == 1 and not self._opening(place.state))

    def _follow(self, state: State, token: int) -> tuple[State, tuple[bytes, ...], str]:
        """Return the state after ``token``; if grammars begin with it, also their kinds, and what they have of it."""
        text = self._text(token)
        after = advance(self._tags, state, text)[0]
        if after.phase == state.phase:
            return after, (), ""
        kinds, begun = (), ""
        for at, character in enumerate(text):
            before, (state, parts) = state.phase, advance(self._tags, state, character)
            if state.phase == "calls":
                return state, (ANSWER_CALLS,), parts[-1][1] + text[at + 1 :]
            if self._whole and before == "thinking" != state.phase:
                kinds, begun = (ANSWER_CALLS_AFTER_THINKING, ANSWER_TEXT_AFTER_THINKING), text[at + 1 :]
        return state, kinds, begun

    def _text(self, token: int) -> str:
        """Return the bytes of a token as characters, or the one that stands for it."""
        spelt = self._vocabulary.vocabulary[token] if token < self._vocabulary.size else None
        return self._marks.get(token) or (spelt or b"").decode("latin-1")

    def _grammars(self, start: int, kinds: Sequence[bytes], text: str = "") -> tuple[Grammar, ...]:
        """Return the grammars of some kinds after ``start`` tokens, which already have ``text`` of them."""
        parts, found = list[bytes | int](), list[Grammar]()
        for marks, group in itertools.groupby(text, is_mark):
            characters = "".join(group)
            parts += [self._ids[mark] for mark in characters] if marks else [characters.encode("latin-1")]
        if not self._make:
            raise OvspecError("No tool may be called.")
        why = None
        for kind in kinds:
            try:
                found.append(self._make(start, [kind, *parts]))
            except OvspecError as error:
                why = error
        if why and not found:
            raise why
        return tuple(found)

    # ------------------------------------------------------------ thinking

    def _closing_at(self, place: Place) -> list[int]:
        """Return the ids that must follow because there was enough thinking."""
        if self._budget is None or place.state.phase != "thinking" or place.thought < self._budget:
            return []
        return self._closing[place.thought - self._budget :]

    def _opening(self, state: State) -> list[int]:
        """Return the ids that may begin thinking, or go on with its tag, where the grammar doesn't."""
        found, begun = list[int](), state.held.lstrip(WHITE)
        for tag in self._tags:
            if self._whole and tag.to == "thinking" and state.phase in tag.at and tag.text.startswith(begun):
                text, mark = split_at_mark(tag.text[len(begun) :])
                ids = self._vocabulary.along(text.encode("latin-1")) if text else [self._ids[mark]]
                found += [each for each in ids if self._opens(tag, state, each)]
        return found

    def _opens(self, tag: Tag, state: State, token: int) -> bool:
        after = self._follow(state, token)[0]
        return after.phase == "thinking" or (
            after.phase == state.phase and tag.text.startswith(after.held.lstrip(WHITE))
        )

    # ------------------------------------------------------------ what is free

    def _wrong_after(self, state: State) -> np.ndarray | None:
        """Return the set of tokens that would begin what the grammar doesn't allow, as a mask; None if there are none.

        So would the end of an answer that must go on after thinking.
        """
        if state not in self._wrong:
            wrong = [token for token in self._beginning(state) if not self._may_follow(state, token)]
            wrong += self._ends if self._whole and state.phase == "thinking" else []
            self._wrong[state] = pack(wrong, self._vocabulary.size) if wrong else None
        return self._wrong[state]

    def _may_follow(self, state: State, token: int) -> bool:
        try:
            _, kinds, begun = self._follow(state, token)
            if kinds:
                self._grammars(0, kinds, begun)
            return True
        except OvspecError:
            return False

    def _beginning(self, state: State) -> Iterator[int]:
        """Yield the ids after which the grammar may begin, and some others."""
        for tag in self._tags:
            if tag.to != "calls" and not (self._whole and "thinking" in tag.at):
                continue
            for length in range(len(tag.text)):
                text, mark = split_at_mark(tag.text[length:])
                if not state.held.endswith(tag.text[:length]) or (mark and text):
                    continue
                if mark:
                    yield self._ids[mark]
                elif length:
                    yield from self._vocabulary.beginning(text.encode("latin-1"))
                else:
                    yield from self._vocabulary.containing(text.encode("latin-1"))


def bytewise(text: str) -> str:
    """Return ``text`` with its bytes as characters; characters that stand for tokens stay."""
    return "".join(each if is_mark(each) else each.encode().decode("latin-1") for each in text)


def split_at_mark(text: str) -> tuple[str, str]:
    """Return (``text`` before the first character that stands for a token, that character or "")."""
    at = next((at for at, each in enumerate(text) if is_mark(each)), len(text))
    return text[:at], text[at : at + 1]
