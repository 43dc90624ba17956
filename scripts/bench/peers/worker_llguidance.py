"""llguidance as a worker: grammars. Schemas are compiled and masks applied as in ovspec."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import protocol
from llguidance import LLMatcher, LLTokenizer

from ovspec.grammars.json_schema import compile_schema
from ovspec.grammars.sources import PARSER_LIMITS, find_schema_problem
from ovspec.sampling.grammar_constraint import make_grammar_tokenizer
from ovspec.sampling.masks import apply_mask


class Matcher:
    """The state of a grammar within a text, a ``protocol.Walk``; raises Refusal if the grammar isn't taken."""

    def __init__(self, tokenizer: LLTokenizer, kind: str, source: str) -> None:
        if kind == "json":
            source = compile_schema(json.loads(source), find_schema_problem).lark
        elif kind != "lark":
            raise protocol.Refusal(f"it doesn't read {kind}")
        self.matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(source), log_level=0, limits=PARSER_LIMITS)
        if self.matcher.is_error():
            raise protocol.Refusal(self._error())
        self.bytes = np.zeros((tokenizer.vocab_size + 31) // 32 * 4, np.uint8)
        self._pointer = self.bytes.ctypes.data

    def prepare(self, logits: np.ndarray) -> None:
        self._logits = logits

    def mask(self) -> bool:
        self.matcher.unsafe_compute_mask_ptr(self._pointer, self.bytes.size)
        return True

    def apply(self) -> None:
        self._row = apply_mask(self._logits, self.bytes)

    def check(self, token: int) -> bool:
        return self.matcher.validate_tokens([token]) == 1

    def allows(self, token: int) -> bool:
        return bool(np.isfinite(self._row[token]))

    def accept(self, token: int) -> bool:
        if not self.matcher.consume_token(token):
            raise protocol.Refusal(self._error())
        return True

    def _error(self) -> str:
        """Return the error without the parser's state after it."""
        return self.matcher.get_error().partition("<state>")[0]


def load_grammars(vocabulary: protocol.Vocabulary) -> protocol.Grammars:
    tokenizer_json = json.loads(Path(vocabulary.file).read_text(encoding="utf-8"))
    _, tokenizer = make_grammar_tokenizer(tokenizer_json, vocabulary.size)

    def grammar(kind: str, source: str) -> Callable[[], Matcher]:
        return lambda: Matcher(tokenizer, kind, source)

    return grammar


if __name__ == "__main__":
    protocol.serve(["llguidance"], grammars=load_grammars)
