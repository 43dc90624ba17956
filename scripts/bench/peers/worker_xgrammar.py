"""xgrammar as a worker of ``grammars.py``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import protocol
import torch
import xgrammar  # type: ignore[import-not-found]
from grammar_protocol import Task, Vocabulary, measured


@dataclass
class Matcher:
    """The state of a grammar within a text, a ``grammar_protocol.Walk``."""

    matcher: Any
    bits: torch.Tensor  # (1, 32-bit words)
    row: torch.Tensor  # (1, tokens)

    def prepare(self, logits: np.ndarray) -> None:
        self.row[0].copy_(torch.from_numpy(logits))

    def mask(self) -> bool:
        return self.matcher.fill_next_token_bitmask(self.bits)

    def apply(self) -> None:
        xgrammar.apply_token_bitmask_inplace(self.row, self.bits)

    def check(self, token: int) -> None:  # noqa: ARG002
        return None

    def allows(self, token: int) -> bool:
        return bool(torch.isfinite(self.row[0, token]))

    def accept(self, token: int) -> bool:
        return self.matcher.accept_token(token)


def load(setup: dict[str, Any]) -> protocol.Answer:
    vocabulary = Vocabulary(**setup)
    tokenizer = xgrammar.TokenizerInfo(
        vocabulary.spelled(),
        xgrammar.VocabType.BYTE_LEVEL,
        vocab_size=vocabulary.size,
        stop_token_ids=[vocabulary.end],
    )
    # With its own cache, every construction except the first would look free.
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=os.cpu_count() or 1, cache_enabled=False)
    bits = xgrammar.allocate_token_bitmask(1, vocabulary.size)
    row = torch.empty(1, vocabulary.size)

    def begin(kind: str, source: str) -> Matcher:
        if kind == "json":
            compiled = compiler.compile_json_schema(source)
        elif kind == "gbnf":
            compiled = compiler.compile_grammar(source)
        else:
            raise protocol.Refusal(f"it doesn't read {kind}")
        return Matcher(xgrammar.GrammarMatcher(compiled), bits, row)

    return lambda asked: measured(begin, Task(**asked), vocabulary)


if __name__ == "__main__":
    protocol.serve(load, ["xgrammar"])
