"""A sequence with its decoders, kept between calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Unpack

from ovspec.generate import Piece, Result, Row, generate_rows
from ovspec.sequence import Sequence

if TYPE_CHECKING:
    from ovspec.model import Engine, GenerateOptions, LanguageModel, Prompt


class TextStream:
    """Pieces of text as rounds produce them; iterate over it once.

    On Ctrl-C the piece with the finish reason "cancelled" comes last, and then KeyboardInterrupt.
    """

    def __init__(self, pieces: Iterator[Piece], row: Row) -> None:
        self._pieces, self.row = pieces, row

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def result(self) -> Result:
        """The whole text and its statistics; runs to the end what is not generated yet."""
        for _ in self._pieces:
            pass
        return self.row.result()


class Session:
    """One text that grows by what you append and what the model generates; its KV cache is kept.

    Made by ``LanguageModel.session()``; use it in a ``with`` statement or call ``close``.
    """

    def __init__(self, model: LanguageModel, engine: Engine) -> None:
        self.sequence = Sequence()
        self._model = model
        self._engine: Engine | None = engine
        engine.reset(1)

    @property
    def text(self) -> str:
        """All of it, without special tokens."""
        return self._model.tokenizer.decode(self.sequence.tokens)

    def append(self, prompt: Prompt) -> None:
        """Add a text, token ids or chat messages; nothing is computed before the next ``generate``."""
        self.sequence.commit(self._model.encode(prompt, begins=not len(self.sequence)))

    def stream(self, **options: Unpack[GenerateOptions]) -> TextStream:
        """As ``LanguageModel.stream``, going on from this session's text."""
        if not self._engine:
            raise ValueError("this session is closed")
        engine, lookahead = self._engine, self._model.lookahead_of(options)
        row = self._model.row(self.sequence, options)

        def pieces() -> Iterator[Piece]:
            drafter = engine.drafter if lookahead else None
            for round_pieces in generate_rows(engine.target, drafter, [row], lookahead):
                for _, piece in round_pieces:
                    if piece.finish_reason == "stop":
                        self._end_with_the_text(row)
                    yield piece

        return TextStream(pieces(), row)

    def generate(self, **options: Unpack[GenerateOptions]) -> Result:
        """As ``LanguageModel.generate``, going on from this session's text."""
        return self.stream(**options).result()

    def close(self) -> None:
        """Hand the decoders back to the model; the session can't generate any more."""
        if self._engine:
            self._model.release(self._engine)
            self._engine = None

    def _end_with_the_text(self, row: Row) -> None:
        """Take the tokens that spelt the stop string back, so that the session holds what the user saw."""
        decode, kept = self._model.tokenizer.decode, len(row.token_ids)
        while not row.text.startswith(decode(row.token_ids[:kept])):
            kept -= 1
        rest = row.text[len(decode(row.token_ids[:kept])) :]
        self.sequence.rewind(len(self.sequence) - len(row.token_ids) + kept)
        self.sequence.commit(self._model.tokenizer.encode(rest, special=False))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
