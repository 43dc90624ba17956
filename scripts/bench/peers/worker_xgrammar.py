"""xgrammar as a worker: grammars."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import protocol
import torch
import xgrammar  # type: ignore[import-not-found]


@dataclass
class Matcher:
    """The state of a grammar within a text, a ``protocol.Walk``."""

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


def load_grammars(vocabulary: protocol.Vocabulary) -> protocol.Grammars:
    tokenizer = xgrammar.TokenizerInfo(
        vocabulary.spelled(),
        xgrammar.VocabType.BYTE_LEVEL,
        vocab_size=vocabulary.size,
        stop_token_ids=[vocabulary.end],
    )
    # With its own cache, every construction except the first would look free.
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=os.cpu_count() or 1, cache_enabled=False)
    compilers = {"json": compiler.compile_json_schema, "gbnf": compiler.compile_grammar}
    bits = xgrammar.allocate_token_bitmask(1, vocabulary.size)
    row = torch.empty(1, vocabulary.size)

    def grammar(kind: str, source: str) -> Callable[[], Matcher]:
        if kind not in compilers:
            raise protocol.Refusal(f"it doesn't read {kind}")
        return lambda: Matcher(xgrammar.GrammarMatcher(compilers[kind](source)), bits, row)

    return grammar


if __name__ == "__main__":
    protocol.serve(["xgrammar"], grammars=load_grammars)
