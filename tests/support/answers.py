"""Random answers that an ``AnswerConstraint`` allows, over the demo's vocabulary and more, and how they are read."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from grammar_walks import CLOSERS, TOKENIZER

from ovspec.params import make_params
from ovspec.params.tool_formats import TOOL_FORMATS_BY_NAME
from ovspec.sampling.answer_constraint import AnswerConstraint
from ovspec.sampling.grammar_constraint import GrammarCompiler
from ovspec.sampling.grammar_options import convert_answer_grammar
from ovspec.sampling.vocabulary_index import VocabularyIndex
from ovspec.text.answer import THINKING_FORMATS, AnswerContent, AnswerFormat, AnswerReader, Phase, ThinkingFormat
from ovspec.text.tokenizer import ByteDetokenizer, make_byte_vocabulary
from ovspec.text.tokenizer_files import TokenizerFile

EOS = 0
THINK = next(each for each in THINKING_FORMATS if each.open_tag == "<think>")
PROMPT = np.array([5, 6, 7], dtype=np.int64)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """Return a tool with parameters, all required."""
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return with_schema(name, schema)


def with_schema(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@dataclass(frozen=True)
class Vocabulary:
    """The demo's tokens, and others: special ones, which add no text, and others."""

    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        return {text: len(TOKENIZER["model"]["vocab"]) + at for at, text in enumerate((*self.special, *self.added))}

    @functools.cached_property
    def json(self) -> dict[str, Any]:
        more = [{"id": i, "content": text, "special": text in self.special} for text, i in self.ids.items()]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return {**TOKENIZER, "added_tokens": [*TOKENIZER["added_tokens"], *({**flags, **each} for each in more)]}

    @functools.cached_property
    def spelt(self) -> list[bytes | None]:
        return make_byte_vocabulary(msgspec.convert(self.json, TokenizerFile)) or []

    @functools.cached_property
    def tokens(self) -> VocabularyIndex:
        return VocabularyIndex(self.spelt)

    @functools.cached_property
    def grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.json, self.spelt)

    def ids_of(self, text: str) -> list[int]:
        """Return ``text`` in the longest tokens, each from the left."""
        found = list[int]()
        names = "|".join(map(re.escape, self.ids))
        for part in filter(None, re.split(f"({names})", text) if names else [text]):
            rest = b"" if part in self.ids else part.encode()
            found += [self.ids[part]] if part in self.ids else []
            while rest:
                length = max(n for n in range(1, min(len(rest), 40) + 1) if rest[:n] in self._by_bytes)
                found.append(self._by_bytes[rest[:length]])
                rest = rest[length:]
        return found

    @functools.cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {token: i for i, token in enumerate(self.spelt[: len(TOKENIZER["model"]["vocab"])]) if token}


PLAIN = Vocabulary()


@dataclass(frozen=True)
class Answers:
    """The answers to a request with tools, in a format."""

    format: AnswerFormat
    options: dict[str, Any]
    vocabulary: Vocabulary = PLAIN
    closing: tuple[int, ...] = ()

    @functools.cached_property
    def _made(self) -> tuple[Callable[..., Any] | None, dict[str, list[str]]]:
        params = make_params(self.options)  # type: ignore[arg-type]
        grammar = convert_answer_grammar(params, self.format)
        if grammar is None:
            return None, {}

        def make(start: int, begun: list[bytes | int]) -> Any:
            return self.vocabulary.grammars.make_constraint(grammar, start, frozenset({EOS}), generated_parts=begun)

        return make, json.loads(grammar)["strings"]

    @property
    def make(self) -> Callable[..., Any] | None:
        """What makes the grammar of calls, if there is one."""
        return self._made[0]

    def constraint(self, budget: int | None = None) -> AnswerConstraint:
        whole = self._made[0] is not None and not self.format.calls_after_text
        tokens, closing = self.vocabulary.tokens, self.closing
        return AnswerConstraint(len(PROMPT), self.format, tokens, self._made[0], whole, {EOS}, budget, closing)

    def read(self, tokens: Sequence[int], pieces: int = 1) -> tuple[AnswerContent, AnswerReader]:
        """Return what an answer says."""
        said, reader = AnswerContent(), AnswerReader(self.format, self._made[1])
        detokenizer = ByteDetokenizer(self.vocabulary.spelt, self.format.mark_by_token_id)
        text = "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
        for at in range(0, len(text), pieces):
            reader.push(text[at : at + pieces], said)
        reader.flush(said)
        return said, reader


def answers(
    tool_format: str,
    tools: Sequence[Any] = (),
    thinking: ThinkingFormat | None = None,
    vocabulary: Vocabulary = PLAIN,
    begins: Phase = "start",
    **options: Any,
) -> Answers:
    """Return the answers to a request with ``tools`` and ``options``."""
    given = {"tools": list(tools), **options} if tools else options
    params = make_params(given)  # type: ignore[arg-type]
    use = params.allowed_calls
    format = AnswerFormat(
        TOOL_FORMATS_BY_NAME[tool_format] if tools else None,
        thinking,
        use.tool_names or tuple(each["function"]["name"] for each in params.tools),
        begins,
        not (use.required or params.grammar_option),
        vocabulary.ids,
    )
    closing = tuple(vocabulary.ids_of(thinking.close_tag)) if thinking else ()
    return Answers(format, given, vocabulary, closing)


def allowed(constraint: AnswerConstraint, tokens: np.ndarray, size: int) -> list[int]:
    """Return the ids that a constraint's mask has."""
    mask = constraint.token_mask(tokens)
    if mask is None:
        return list(range(size))
    return np.flatnonzero(np.unpackbits(mask, count=size, bitorder="little")).tolist()


def random_answer(
    constraint: AnswerConstraint,
    vocabulary: Vocabulary,
    numbers: random.Random,
    begun: Sequence[int] = (),
    patience: int = 60,
    limit: int = 1500,
) -> tuple[list[int], bool]:
    """Return (the tokens of a random answer that begins with ``begun``, whether it has ended).

    Tokens are drawn as in ``grammar_walks.random_text``.
    """
    found, known = list(begun), vocabulary.spelt
    for step in range(limit):
        tokens = np.concatenate((PROMPT, np.array(found, dtype=np.int64)))
        if constraint.is_complete(tokens):
            return found, True
        options = allowed(constraint, tokens, len(known))
        assert options, "nothing may follow"
        if EOS in options and (len(options) == 1 or step > patience or numbers.random() < 0.3):
            return found, True
        options = [each for each in options if each != EOS]
        closing = [each for each in options if known[each] in CLOSERS]
        short = [each for each in options if len(known[each] or b"") == 1]
        if step > patience and closing and numbers.random() < 0.8:
            options = (
                [min(closing, key=lambda i: CLOSERS.index(known[i] or b""))] if numbers.random() < 0.7 else closing
            )
        elif short and numbers.random() < 0.5:
            options = short
        found.append(numbers.choice(options))
    return found, False
