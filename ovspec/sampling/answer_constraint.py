"""Constrains an assistant's answer part by part: thinking and text are free, tool calls and formats are constrained.

A call, once begun, can continue only validly. Before a call, only tokens of an invalid beginning are masked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.cache.sequence import Sequence as TokenSequence
from ovspec.sampling.constraint import Constraint
from ovspec.sampling.grammar_constraint import GrammarConstraint
from ovspec.sampling.masks import pack_mask
from ovspec.sampling.tool_grammar import (
    ANSWER_CALLS,
    ANSWER_CALLS_AFTER_THINKING,
    ANSWER_TEXT,
    ANSWER_TEXT_AFTER_THINKING,
)
from ovspec.sampling.vocabulary_index import VocabularyIndex
from ovspec.text.answer import WHITESPACE, AnswerFormat, AnswerReadingState, PhaseTag, is_token_mark, split_by_phase

# (number of tokens before the grammar, the generated part of its text: bytes, and ids of tags) -> the constraint of the
# rest. The first bytes select the grammar's texts: see tool_grammar.py. Raises OvspecError for a disallowed part.
MakeGrammarConstraint = Callable[[int, list[bytes | int]], GrammarConstraint]


@dataclass(frozen=True, slots=True)
class AnswerPosition:
    """The state of an answer after some tokens.

    thinking_count: number of tokens of thinking so far; after thinking, at most the budget.
    grammar_constraints: the possible constraints of the text from here on; at least one allows the text.
    """

    state: AnswerReadingState
    thinking_count: int = 0
    grammar_constraints: tuple[GrammarConstraint, ...] = ()


class AnswerConstraint(Constraint):
    """Keeps the constrained parts of an answer within a grammar.

    Args:
        prompt_length: number of tokens of the prompt.
        answer_format: the format of answers.
        vocabulary: the tokens by their bytes.
        make_grammar_constraint: makes the constraint of a grammar; None if no call may begin.
        covers_text: whether the grammar covers all text except thinking; otherwise it begins with the tag of a call.
        end_ids: ids to end the text; they are masked in thinking if an answer must follow.
        thinking_budget: maximum number of tokens of thinking; None for no limit.
        thinking_end_ids: the ids of the end of thinking.
    """

    def __init__(
        self,
        prompt_length: int,
        answer_format: AnswerFormat,
        vocabulary: VocabularyIndex,
        make_grammar_constraint: MakeGrammarConstraint | None,
        covers_text: bool,
        end_ids: Collection[int] = (),
        thinking_budget: int | None = None,
        thinking_end_ids: Sequence[int] = (),
    ) -> None:
        self._prompt_length = prompt_length
        self._vocabulary = vocabulary
        self._make_grammar_constraint = make_grammar_constraint
        self._covers_text = covers_text
        self._mark_by_id = answer_format.mark_by_token_id
        self._id_by_mark = {mark: token for token, mark in answer_format.mark_by_token_id.items()}
        self._thinking_budget = thinking_budget
        self._thinking_end_ids = list(thinking_end_ids)
        self._end_ids = [token for token in end_ids if token < vocabulary.size]
        # Bytes as characters, because a token may end inside a character.
        self._tags = [
            PhaseTag(bytes_as_characters(tag.text), tag.from_phases, tag.next_phase) for tag in answer_format.tags
        ]
        self._followed_sequence = TokenSequence()
        state = AnswerReadingState(answer_format.first_phase)
        grammar_constraints: tuple[GrammarConstraint, ...] = ()
        if covers_text and state.phase == "start":
            grammar_constraints = self._make_grammar_constraints(prompt_length, (ANSWER_CALLS, ANSWER_TEXT))
        self._positions = [AnswerPosition(state, 0, grammar_constraints)]  # the start, then after each token
        self._free_masks: dict[AnswerReadingState, np.ndarray | None] = {}

    def token_mask(self, tokens: np.ndarray) -> np.ndarray | None:
        position = self._follow_tokens(tokens)
        if thinking_end_ids := self._due_thinking_end_ids(position):
            return pack_mask(thinking_end_ids[:1], self._vocabulary.size)
        if self._is_in_grammar(position):
            return position.grammar_constraints[0].token_mask(tokens)
        free_mask = self._free_text_mask(position.state)
        if not self._covers_text or position.state.phase == "thinking":
            return free_mask
        mask = pack_mask(self._thinking_start_ids(position.state), self._vocabulary.size)
        for grammar_constraint in position.grammar_constraints:
            mask |= grammar_constraint.token_mask(tokens)
        if free_mask is not None:
            mask &= free_mask
        if not mask.any() and not self.is_complete(tokens):
            raise OvspecError(
                "No token of the model can continue the answer within the tools and the grammar; change the tools or "
                "the grammar."
            )
        return mask

    def allows_token(self, token: int, tokens: np.ndarray) -> bool:
        position = self._follow_tokens(tokens)
        if self._is_in_grammar(position):
            return position.grammar_constraints[0].allows_token(token, tokens)
        return super().allows_token(token, tokens)

    def forced_tokens(self, tokens: np.ndarray) -> list[int]:
        position = self._follow_tokens(tokens)
        if thinking_end_ids := self._due_thinking_end_ids(position):
            return thinking_end_ids
        if self._is_in_grammar(position):
            return position.grammar_constraints[0].forced_tokens(tokens)
        reading_state = position.state
        if len(position.grammar_constraints) != 1 or self._thinking_start_ids(reading_state):
            return []
        forced_ids = position.grammar_constraints[0].forced_tokens(tokens)
        for forced_count, token in enumerate(forced_ids):
            next_state, grammar_kinds, _ = self._follow_token(reading_state, token)
            if grammar_kinds:  # the text continues in another grammar
                return forced_ids[: forced_count + self._may_follow(reading_state, token)]
            reading_state = next_state
        return forced_ids

    def is_complete(self, tokens: np.ndarray) -> bool:
        return any(
            grammar_constraint.is_complete(tokens)
            for grammar_constraint in self._follow_tokens(tokens).grammar_constraints
        )

    # ------------------------------------------------------------ the position in an answer

    def _follow_tokens(self, tokens: np.ndarray) -> AnswerPosition:
        """Follow ``tokens``, and return the position after them."""
        answer_ids = tokens[self._prompt_length :]
        shared_length = self._followed_sequence.common_prefix_length(answer_ids)
        if shared_length < len(answer_ids):
            self._followed_sequence.rewind(shared_length)
            del self._positions[shared_length + 1 :]
            for answer_length in range(shared_length, len(answer_ids)):
                tokens_before = tokens[: self._prompt_length + answer_length]
                position = self._next_position(
                    self._positions[answer_length], tokens_before, int(answer_ids[answer_length])
                )
                self._positions.append(position)
                self._followed_sequence.commit(answer_ids[answer_length : answer_length + 1])
        return self._positions[len(answer_ids)]

    def _next_position(self, position: AnswerPosition, tokens: np.ndarray, token: int) -> AnswerPosition:
        """Return the position after ``tokens`` and then ``token``."""
        if self._is_in_grammar(position):
            return position
        reading_state, grammar_kinds, grammar_text = self._follow_token(position.state, token)
        thinking_count = position.thinking_count + (position.state.phase == "thinking")
        if self._thinking_budget is not None and reading_state.phase != "thinking":
            thinking_count = min(thinking_count, self._thinking_budget)
        if grammar_kinds:
            grammar_constraints = self._make_grammar_constraints(len(tokens) + 1, grammar_kinds, grammar_text)
        else:
            grammar_constraints = tuple(
                grammar_constraint
                for grammar_constraint in position.grammar_constraints
                if grammar_constraint.allows_token(token, tokens)
            )
        if reading_state.phase == "thinking":
            grammar_constraints = ()
        next_position = AnswerPosition(reading_state, thinking_count, grammar_constraints)
        if self._is_in_grammar(next_position) and not grammar_constraints:
            raise OvspecError("The generated text doesn't match the format of the answer; report this bug to ovspec.")
        return next_position

    def _is_in_grammar(self, position: AnswerPosition) -> bool:
        """Return whether the rest of the answer is in its grammar; tags then no longer matter."""
        return position.state.phase == "calls" or (self._covers_text and position.state.phase == "text")

    def _follow_token(
        self, reading_state: AnswerReadingState, token: int
    ) -> tuple[AnswerReadingState, tuple[bytes, ...], str]:
        """Return the state after ``token``; if the token begins grammars, also their kinds, and their text in it."""
        token_text = self._token_text(token)
        state_after = split_by_phase(self._tags, reading_state, token_text)[0]
        if state_after.phase == reading_state.phase:
            return state_after, (), ""
        grammar_kinds: tuple[bytes, ...] = ()
        grammar_text = ""
        for character_index, character in enumerate(token_text):
            phase_before = reading_state.phase
            reading_state, answer_parts = split_by_phase(self._tags, reading_state, character)
            if reading_state.phase == "calls":
                return reading_state, (ANSWER_CALLS,), answer_parts[-1][1] + token_text[character_index + 1 :]
            if self._covers_text and phase_before == "thinking" != reading_state.phase:
                grammar_kinds = (ANSWER_CALLS_AFTER_THINKING, ANSWER_TEXT_AFTER_THINKING)
                grammar_text = token_text[character_index + 1 :]
        return reading_state, grammar_kinds, grammar_text

    def _token_text(self, token: int) -> str:
        """Return the bytes of a token as characters, or the token's placeholder character."""
        return self._mark_by_id.get(token) or self._vocabulary.added_bytes(token).decode("latin-1")

    def _make_grammar_constraints(
        self, grammar_start: int, grammar_kinds: Sequence[bytes], begun_text: str = ""
    ) -> tuple[GrammarConstraint, ...]:
        """Return the constraints of some kinds of grammar after ``grammar_start`` tokens and their ``begun_text``."""
        begun_parts: list[bytes | int] = []
        for are_marks, characters in itertools.groupby(begun_text, is_token_mark):
            if are_marks:
                begun_parts += [self._id_by_mark[mark] for mark in characters]
            else:
                begun_parts.append("".join(characters).encode("latin-1"))
        if not self._make_grammar_constraint:
            raise OvspecError(
                "The generated text begins a tool call, but the options allow no tool calls; report this bug to ovspec."
            )
        grammar_constraints: list[GrammarConstraint] = []
        last_error = None
        for grammar_kind in grammar_kinds:
            try:
                grammar_constraints.append(self._make_grammar_constraint(grammar_start, [grammar_kind, *begun_parts]))
            except OvspecError as error:
                last_error = error
        if last_error and not grammar_constraints:
            raise last_error
        return tuple(grammar_constraints)

    # ------------------------------------------------------------ thinking

    def _due_thinking_end_ids(self, position: AnswerPosition) -> list[int]:
        """Return the ids to force because thinking has used up its budget."""
        thinking_budget = self._thinking_budget
        if thinking_budget is None or position.state.phase != "thinking" or position.thinking_count < thinking_budget:
            return []
        return self._thinking_end_ids[position.thinking_count - thinking_budget :]

    def _thinking_start_ids(self, reading_state: AnswerReadingState) -> list[int]:
        """Return the ids to begin thinking or to continue its tag, outside the grammar."""
        start_ids: list[int] = []
        begun_tag = reading_state.pending.lstrip(WHITESPACE)
        for tag in self._tags:
            if (
                self._covers_text
                and tag.next_phase == "thinking"
                and reading_state.phase in tag.from_phases
                and tag.text.startswith(begun_tag)
            ):
                text_before_mark, mark = split_at_mark(tag.text[len(begun_tag) :])
                if text_before_mark:
                    candidate_ids = self._vocabulary.ids_compatible_with(text_before_mark.encode("latin-1"))
                else:
                    candidate_ids = [self._id_by_mark[mark]]
                start_ids += [
                    token for token in candidate_ids if self._continues_thinking_tag(tag, reading_state, token)
                ]
        return start_ids

    def _continues_thinking_tag(self, tag: PhaseTag, reading_state: AnswerReadingState, token: int) -> bool:
        """Return whether ``token`` ends a tag of thinking, or continues it."""
        state_after = self._follow_token(reading_state, token)[0]
        return state_after.phase == "thinking" or (
            state_after.phase == reading_state.phase and tag.text.startswith(state_after.pending.lstrip(WHITESPACE))
        )

    # ------------------------------------------------------------ free text

    def _free_text_mask(self, reading_state: AnswerReadingState) -> np.ndarray | None:
        """Return a mask of the tokens allowed in free text; None for all.

        It excludes tokens of an invalid beginning of the grammar's text, and the end of the answer if a text must
        follow thinking.
        """
        if reading_state not in self._free_masks:
            forbidden_ids = [
                token for token in self._possible_start_ids(reading_state) if not self._may_follow(reading_state, token)
            ]
            if self._covers_text and reading_state.phase == "thinking":
                forbidden_ids += self._end_ids
            self._free_masks[reading_state] = (
                ~pack_mask(forbidden_ids, self._vocabulary.size) if forbidden_ids else None
            )
        return self._free_masks[reading_state]

    def _may_follow(self, reading_state: AnswerReadingState, token: int) -> bool:
        """Return whether ``token`` begins no grammar, or is allowed by the grammar it begins."""
        try:
            _, grammar_kinds, grammar_text = self._follow_token(reading_state, token)
            if grammar_kinds:
                self._make_grammar_constraints(0, grammar_kinds, grammar_text)
            return True
        except OvspecError:
            return False

    def _possible_start_ids(self, reading_state: AnswerReadingState) -> Iterator[int]:
        """Yield the ids after which the grammar may begin, and some others."""
        for tag in self._tags:
            if tag.next_phase != "calls" and not (self._covers_text and "thinking" in tag.from_phases):
                continue
            for matched_length in range(len(tag.text)):
                text_before_mark, mark = split_at_mark(tag.text[matched_length:])
                if not reading_state.pending.endswith(tag.text[:matched_length]) or (mark and text_before_mark):
                    continue
                if mark:
                    yield self._id_by_mark[mark]
                elif matched_length:
                    yield from self._vocabulary.ids_with_prefix(text_before_mark.encode("latin-1"))
                else:
                    yield from self._vocabulary.ids_containing(text_before_mark.encode("latin-1"))


def bytes_as_characters(text: str) -> str:
    """Return ``text`` with its bytes as characters; placeholders of tokens stay."""
    return "".join(
        character if is_token_mark(character) else character.encode().decode("latin-1") for character in text
    )


def split_at_mark(text: str) -> tuple[str, str]:
    """Return (``text`` before the first placeholder of a token, the placeholder or "")."""
    mark_index = next((index for index, character in enumerate(text) if is_token_mark(character)), len(text))
    return text[:mark_index], text[mark_index : mark_index + 1]
