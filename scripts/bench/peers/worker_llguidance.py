"""llguidance as a worker of ``grammars.py``.

Schemas are compiled and masks applied as ovspec does. The set-up may have ``slices`` of the vocabulary, for faster
masks, and a request ``details``: to time a matcher's other operations, too, and other ways to apply a mask.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance.numpy
import numpy as np
import protocol
from grammar_protocol import Clock, Task, Vocabulary, logits_for, measured
from llguidance import LLMatcher, LLTokenizer
from protocol import Refusal

from ovspec.grammars.json_schema import compile_schema
from ovspec.grammars.sources import PARSER_LIMITS, find_schema_problem
from ovspec.sampling.grammar_constraint import grammar_tokenizer as ovspec_tokenizer
from ovspec.sampling.masks import masked

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
    """The state of a grammar within a text, a ``grammar_protocol.Walk``; raises Refusal if it isn't taken."""

    def __init__(self, tokenizer: LLTokenizer, apply: Apply, kind: str, source: str) -> None:
        if kind == "json":
            grammar = LLMatcher.grammar_from_lark(compile_schema(json.loads(source), find_schema_problem).lark)
        elif kind == "lark":
            grammar = LLMatcher.grammar_from_lark(source)
        else:
            raise Refusal(f"it doesn't read {kind}")
        self.matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=PARSER_LIMITS)
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


def details(tokenizer: LLTokenizer, task: Task) -> dict[str, list[float]]:
    """Return the milliseconds of a matcher's other operations in decoding, and of each way to apply a mask."""
    clock, ways, logits = Clock(), appliers(tokenizer.vocab_size), logits_for(tokenizer.vocab_size)
    for text in task.texts:
        walk = Matcher(tokenizer, ways["ovspec"], task.kind, task.source)
        matcher = walk.matcher
        for token in text[: task.steps]:
            found = clock.timed("mask as bytes", matcher.compute_bitmask)
            mask = np.frombuffer(found, np.uint8)[: walk.bytes.size]
            for name, way in ways.items():
                clock.timed(f"apply, {name}", lambda way=way, mask=mask: way(logits, mask))
            clock.timed("forced tokens", matcher.compute_ff_tokens)
            matcher.consume_token(token)
            clock.timed("rollback of one", lambda matcher=matcher: matcher.rollback(1))
            clock.timed("accept again", lambda matcher=matcher, token=token: matcher.consume_token(token))
        matcher.reset()
        for token in text[: task.steps]:
            clock.timed("mask, a text again", walk.mask)
            matcher.consume_token(token)
    return clock.times


def load(setup: dict[str, Any]) -> protocol.Answer:
    slices = setup.pop("slices", None)
    vocabulary = Vocabulary(**setup)
    tokenizer = grammar_tokenizer(vocabulary, slices)
    apply = appliers(tokenizer.vocab_size)["ovspec"]

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        more = asked.pop("details", False)
        task = Task(**asked)
        found = measured(lambda kind, source: Matcher(tokenizer, apply, kind, source), task, vocabulary)
        return found | {"times": found["times"] | (details(tokenizer, task) if more else {})}

    return answer


if __name__ == "__main__":
    protocol.serve(load, ["llguidance"])
