"""Random texts that a grammar allows, drawn token by token from a matcher's masks."""

from __future__ import annotations

import functools
import json
import random

import msgspec
import numpy as np
from conftest import CHECKPOINTS
from llguidance import LLMatcher, LLTokenizer

from ovspec.grammars.sources import PARSER_LIMITS
from ovspec.sampling.grammar_constraint import make_grammar_tokenizer
from ovspec.text.tokenizer import make_byte_vocabulary
from ovspec.text.tokenizer_files import TokenizerFile

TOKENIZER = json.loads((CHECKPOINTS / "target" / "tokenizer.json").read_text(encoding="utf-8"))
CLOSERS = (b'"', b"}", b"]", b'"}', b'"]', b"}}", b",", b":", b")", b";")


@functools.cache
def demo_tokenizer() -> LLTokenizer:
    return make_grammar_tokenizer(TOKENIZER, len(tokens()))[1]


@functools.cache
def tokens() -> list[bytes]:
    """Return the bytes that each id adds to a text."""
    return [token or b"" for token in make_byte_vocabulary(msgspec.convert(TOKENIZER, TokenizerFile)) or []]


def matcher(grammar: str) -> LLMatcher:
    """Return a matcher over the demo's vocabulary, after checking that it has no error."""
    found = LLMatcher(demo_tokenizer(), grammar, log_level=0, limits=PARSER_LIMITS)
    assert not found.is_error(), found.get_error()
    return found


def allowed(each: LLMatcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(each.compute_bitmask(), np.uint8), bitorder="little")
    assert not each.is_error(), each.get_error()
    return [int(i) for i in np.flatnonzero(bits[: demo_tokenizer().vocab_size])]


def random_text(each: LLMatcher, numbers: random.Random, patience: int = 60, limit: int = 1500) -> bytes | None:
    """Return a complete text, or None if ``limit`` tokens did not reach its end.

    Tokens are drawn uniformly, half of the time from the one-byte ones and, after ``patience`` tokens, mostly from
    those that close something, because a uniform walk through nested brackets need not end.
    """
    special, known, text = demo_tokenizer().eos_token, tokens(), b""
    for step in range(limit):
        options = allowed(each)
        assert options, f"nothing may follow {text!r}"
        if special in options and (each.is_stopped() or len(options) == 1 or step > patience or numbers.random() < 0.3):
            return text
        options = [i for i in options if i != special]
        closing = [i for i in options if known[i] in CLOSERS]
        short = [i for i in options if len(known[i]) == 1]
        if step > patience and closing and numbers.random() < 0.8:
            options = [min(closing, key=lambda i: CLOSERS.index(known[i]))] if numbers.random() < 0.7 else closing
        elif short and numbers.random() < 0.5:
            options = short
        token = numbers.choice(options)
        assert each.consume_token(token), f"{known[token]!r} was allowed after {text!r} but is refused"
        text += known[token]
        if each.is_stopped():
            assert each.is_accepting(), each.get_error()
            return text
    return None
