"""Texts that a matcher's masks lead to, chosen at random."""

from __future__ import annotations

import functools
import json
import random
import re
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ovspec.constraints.checking import LIMITS

TOKENIZER = Path(__file__).resolve().parent.parent / "models" / "demo-hf" / "target" / "tokenizer.json"
CLOSERS = (b'"', b"}", b"]", b'"}', b'"]', b"}}", b",", b":", b")", b";")


class Vocabulary:
    """The demo's tokens for llguidance, where text that spells a special token stays text.

    Given the tokenizer.json, llguidance encodes forced text such as ``<|im_end|>`` as the special token, which the
    grammar then refuses.
    """

    eos_token_id, bos_token_id, is_tokenizer_wrapper = 2, None, True

    def __init__(self) -> None:
        text = TOKENIZER.read_text(encoding="utf-8")
        self.inner = LLTokenizer(text)
        special = {token["id"]: token["content"] for token in json.loads(text)["added_tokens"]}
        plain = (self.inner.decode_bytes([i]) for i in range(self.inner.vocab_size))
        self.tokens = [special[i].encode() if i in special else token for i, token in enumerate(plain)]
        self.special_token_ids = sorted(special)
        self.spelled = re.compile(
            "|".join(f"(?<={re.escape(each[0])})(?={re.escape(each[1:])})" for each in special.values())
        )

    def __call__(self, text: bytes | str) -> list[int]:
        whole = text.decode(errors="surrogateescape") if isinstance(text, bytes) else text
        return [token for part in self.spelled.split(whole) for token in self.inner.tokenize_str(part)]


@functools.cache
def demo_tokenizer() -> LLTokenizer:
    return LLTokenizer(Vocabulary())  # type: ignore[arg-type]


@functools.cache
def tokens() -> list[bytes]:
    return Vocabulary().tokens


def matcher(grammar: str) -> LLMatcher:
    """A matcher over the demo's vocabulary that is in no error."""
    found = LLMatcher(demo_tokenizer(), grammar, log_level=0, limits=LIMITS)
    assert not found.is_error(), found.get_error()
    return found


def allowed(each: LLMatcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(each.compute_bitmask(), np.uint8), bitorder="little")
    assert not each.is_error(), each.get_error()
    return [int(i) for i in np.flatnonzero(bits[: demo_tokenizer().vocab_size])]


def random_text(each: LLMatcher, numbers: random.Random, patience: int = 60, limit: int = 1500) -> bytes | None:
    """A whole text, or None where ``limit`` tokens didn't reach its end.

    Tokens are drawn uniformly, every other time from the short ones, and after ``patience`` tokens from those that
    end something, because a uniform walk through nested brackets need not end.
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
        assert each.consume_token(token), f"{known[token]!r} was allowed after {text!r}, but is refused"
        text += known[token]
        if each.is_stopped():
            assert each.is_accepting(), each.get_error()
            return text
    return None
