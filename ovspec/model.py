"""LanguageModel: a loaded model, and what it is asked for."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any, Unpack, overload

import numpy as np

from ovspec.drafting.choice import DraftChoice
from ovspec.errors import OvspecError
from ovspec.ir.memory import kv_bytes_per_token, recurrent_bytes
from ovspec.loop.perplexity import DEFAULT_CONTEXT, Perplexity, measure
from ovspec.loop.results import Piece, Result, TextStream
from ovspec.options import GenerateOptions, params_of
from ovspec.session import Session
from ovspec.setup.engine import CompiledModel
from ovspec.text.generation_config import GenerationConfig
from ovspec.text.tokenizer import Tokenizer
from ovspec.workspace import Prompt, Workspace


class LanguageModel:
    """A loaded model, with or without a draft; made by ``ovspec.load``.

    Threads may share it: calls and sessions that run at the same time have requests of their own, and each
    gives what it gives alone. A session or a stream belongs to one thread at a time.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    @property
    def folder(self) -> Path:
        return self.workspace.folder

    @property
    def tokenizer(self) -> Tokenizer:
        return self.workspace.tokenizer

    @property
    def generation_config(self) -> GenerationConfig:
        return self.workspace.generation_config

    @property
    def target(self) -> CompiledModel:
        return self.workspace.target

    @property
    def draft(self) -> CompiledModel | None:
        return self.workspace.draft

    def encode(self, prompt: Prompt) -> np.ndarray:
        """The token ids of ``prompt``, (n,) int64."""
        return self.workspace.encode(prompt)

    # ------------------------------------------------------------ generating

    @overload
    def generate(self, prompt: list[str] | list[list[int]], **options: Unpack[GenerateOptions]) -> list[Result]: ...
    @overload
    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Result: ...
    def generate(self, prompt: Any, **options: Unpack[GenerateOptions]) -> Result | list[Result]:
        """Continue ``prompt``, or each of a list of prompts as one batch; see ``GenerateOptions``.

        With ``n`` above 1, ``samples`` gives all of them.

        Raises:
            OvspecError: an empty prompt, one that doesn't fit the model's context, or options out of range.
        """
        if is_batch(prompt):
            return [texts[0] for texts in self._generate(prompt, options, 1)]
        return self._generate([prompt], options, 1)[0][0]

    @overload
    def samples(
        self, prompt: list[str] | list[list[int]], **options: Unpack[GenerateOptions]
    ) -> list[list[Result]]: ...
    @overload
    def samples(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> list[Result]: ...
    def samples(self, prompt: Any, **options: Unpack[GenerateOptions]) -> list[Result] | list[list[Result]]:
        """``n`` continuations of ``prompt``, or of each of a list of prompts; the prompt is read once.

        Raises:
            OvspecError: as ``generate``; or n is above 1 and nothing is left to chance.
        """
        n = params_of(options).n
        texts = self._generate(prompt if is_batch(prompt) else [prompt], options, n)
        return texts if is_batch(prompt) else texts[0]

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> TextStream:
        """As ``generate``, piece by piece: ``for piece in lm.stream("def "): print(piece.text)``."""
        [row] = rows = self.workspace.rows(prompt, options)
        run = self.workspace.run(rows, options, row.sampler.sampled, 1)

        def pieces() -> Generator[Piece]:
            with closing(run):
                for round_pieces in run:
                    for _, piece in round_pieces:
                        yield piece

        return TextStream(pieces(), row)

    def _generate(self, prompts: list[Any], options: GenerateOptions, n: int) -> list[list[Result]]:
        rows = [row for prompt in prompts for row in self.workspace.rows(prompt, options, n)]
        if rows:
            for _ in self.workspace.run(rows, options, rows[0].sampler.sampled, len(rows)):
                pass
        results = [row.result() for row in rows]
        return [results[start : start + n] for start in range(0, len(rows), n)]

    # ------------------------------------------------------------ sessions

    def session(self, context: int | None = None) -> Session:
        """A text whose KV caches are kept between calls.

        Args:
            context: tokens that it may grow to; by default what the model's own context holds.

        Raises:
            OvspecError: ``context`` is longer than the model's, or its caches don't fit into memory.
        """
        most = self.target.ir.context_length
        if context is not None and (context < 1 or (most and context > most)):
            raise OvspecError(f"context is {context}; it must be at least 1{f' and at most {most}' if most else ''}.")
        if context:
            self.workspace.check_memory(context)
        decoders = self.workspace.decoders()
        decoders.reset(1)
        return Session(self.workspace, decoders, context)

    def cache_bytes(self, tokens: int) -> float:
        """About how much memory the KV caches of a text of so many tokens take, target and draft together."""
        return sum(tokens * kv_bytes_per_token(ir) + recurrent_bytes(ir) for ir in self.workspace.irs())

    # ------------------------------------------------------------ measuring

    def perplexity(self, text: str, context: int | None = None) -> Perplexity:
        """How well the target foresees ``text``, in windows of ``context`` tokens (the model's, at most 1024).

        Raises:
            OvspecError: fewer than two tokens, or a window longer than the model's context.
        """
        most = self.target.ir.context_length
        if context and most and context > most:
            raise OvspecError(f"A window of {context} tokens is longer than the model's context of {most}.")
        context = context or min(DEFAULT_CONTEXT, most or DEFAULT_CONTEXT)
        decoders = self.workspace.decoders()
        try:
            return measure(decoders.target, self.tokenizer.encode(text), context)
        finally:
            self.workspace.release(decoders)

    def next_logits(self, prompt: Prompt) -> np.ndarray:
        """The target's logits (vocab,) float32 for the token after ``prompt``."""
        decoders = self.workspace.decoders()
        decoders.reset(1)
        logits = decoders.target.feed([self.encode(prompt)], [1])[0][0].copy()
        self.workspace.release(decoders)
        return logits

    def with_drafters(self, choice: DraftChoice | None) -> LanguageModel:
        """The same compiled models with other drafters; a draft model among them must be the one that is loaded."""
        other = copy.copy(self)
        other.workspace = self.workspace.with_drafters(choice)
        return other


def is_batch(prompt: Any) -> bool:
    """Whether ``prompt`` is a list of prompts."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list, np.ndarray))
