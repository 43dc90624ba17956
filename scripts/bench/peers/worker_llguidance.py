"""llguidance as a worker of ``grammars.py``, by ``grammar_protocol.py``.

Schemas are compiled and masks applied as ovspec does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import llguidance.numpy
import numpy as np
from grammar_protocol import Begin, Vocabulary, serve
from llguidance import LLMatcher, LLTokenizer
from protocol import Refusal

from ovspec.constraints.grammar import grammar_tokenizer as ovspec_tokenizer
from ovspec.constraints.masks import masked
from ovspec.grammars.json_schema import compiled
from ovspec.grammars.limits import LIMITS
from ovspec.grammars.sources import schema_problem

Apply = Callable[[np.ndarray, np.ndarray], np.ndarray]


def grammar_tokenizer(vocabulary: Vocabulary, slices: list[str] | None = None) -> LLTokenizer:
    """Return the tokenizer as ovspec makes it, with other ``slices`` if given."""
    tokenizer_json = json.loads(Path(vocabulary.file).read_text(encoding="utf-8"))
    _, tokenizer = ovspec_tokenizer(tokenizer_json, vocabulary.size)
    return tokenizer if slices is None else tokenizer.with_slices(slices)


def appliers(width: int) -> dict[str, Apply]:
    """Return ways to set logits to -inf where a mask's bit is 0.

    Each takes the logits and the mask's bytes and returns a row, which the next call may overwrite.
    """
    out, forbidden = np.empty(width, np.float32), np.float32(-np.inf)

    def bits(mask: np.ndarray) -> np.ndarray:
        return np.unpackbits(mask, count=width, bitorder="little").view(bool)

    def where(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.where(bits(mask), logits, forbidden)

    def putmask(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
        np.copyto(out, logits)
        np.putmask(out, ~bits(mask), forbidden)
        return out

    def chosen(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
        ids = np.flatnonzero(bits(mask))
        out.fill(forbidden)
        out[ids] = logits[ids]
        return out

    def theirs(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
        np.copyto(out, logits)
        llguidance.numpy.apply_token_bitmask_inplace(out, mask.view(np.int32))
        return out

    return {"ovspec": masked, "where": where, "putmask": putmask, "chosen": chosen, "llguidance.numpy": theirs}


class Matcher:
    """The state of a grammar within a text, a ``grammar_protocol.Walk``.

    Raises:
        Refusal: llguidance doesn't take the grammar.
    """

    def __init__(self, tokenizer: LLTokenizer, apply: Apply, kind: str, source: str) -> None:
        if kind == "json":
            grammar = LLMatcher.grammar_from_lark(compiled(json.loads(source), schema_problem).lark)
        elif kind == "lark":
            grammar = LLMatcher.grammar_from_lark(source)
        else:
            raise Refusal(f"it doesn't read {kind}")
        self.matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if self.matcher.is_error():
            raise Refusal(self._error())
        self.bytes = np.zeros((tokenizer.vocab_size + 31) // 32 * 4, np.uint8)
        self._pointer, self._apply = self.bytes.ctypes.data, apply

    def prepare(self, logits: np.ndarray) -> None:
        self._logits = logits

    def mask(self) -> bool:
        self.matcher.unsafe_compute_mask_ptr(self._pointer, self.bytes.size)
        return True

    def apply(self) -> None:
        self._row = self._apply(self._logits, self.bytes)

    def check(self, token: int) -> bool:
        return self.matcher.validate_tokens([token]) == 1

    def allows(self, token: int) -> bool:
        return bool(np.isfinite(self._row[token]))

    def accept(self, token: int) -> bool:
        if not self.matcher.consume_token(token):
            raise Refusal(self._error())
        return True

    def _error(self) -> str:
        """Return the error without the parser's state, which follows it."""
        return self.matcher.get_error().partition("<state>")[0]


def load(vocabulary: Vocabulary) -> Begin:
    return begin_of(grammar_tokenizer(vocabulary))


def begin_of(tokenizer: LLTokenizer) -> Begin:
    apply = appliers(tokenizer.vocab_size)["ovspec"]
    return lambda kind, source: Matcher(tokenizer, apply, kind, source)


if __name__ == "__main__":
    serve(load, ["llguidance"])
