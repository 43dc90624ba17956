"""A sequence with its decoders, kept between calls."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Unpack

from ovspec.batching import generate_rows
from ovspec.chat import is_chat
from ovspec.errors import OvspecError
from ovspec.generate import Piece, Result, Row
from ovspec.sequence import Sequence

if TYPE_CHECKING:
    from ovspec.model import Decoders, LanguageModel, Prompt
    from ovspec.options import GenerateOptions


class TextStream:
    """Pieces of text as rounds produce them; iterate over it once.

    Ctrl-C during a round ends it with a piece "cancelled" and then KeyboardInterrupt.
    """

    def __init__(self, pieces: Generator[Piece], row: Row) -> None:
        self._pieces, self.row = pieces, row

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def cancel(self) -> None:
        """End the text where it is."""
        self._pieces.close()
        self.row.cancel()

    def result(self) -> Result:
        """The whole text and its statistics; runs to the end what is not generated yet."""
        for _ in self._pieces:
            pass
        self.row.cancel()  # has no effect unless an exception ended the stream
        return self.row.result()


class Session:
    """One text that grows by what you append and what the model generates; its KV cache is kept.

    Made by ``LanguageModel.session()``; use it in a ``with`` statement or call ``close``. A stream that
    has not ended is cancelled when the session is used for something else.
    """

    def __init__(self, model: LanguageModel, decoders: Decoders) -> None:
        self.sequence = Sequence()
        self._healable = 0  # tokens before it were generated, or made by a template
        self._heals = False  # unless told otherwise
        self._model = model
        self._decoders: Decoders | None = decoders
        self._stream: TextStream | None = None
        decoders.reset(1)

    @property
    def text(self) -> str:
        """All of it, without special tokens."""
        return self._model.tokenizer.decode(self.sequence.tokens)

    def append(self, prompt: Prompt) -> None:
        """Add a text, token ids or, at the beginning, chat messages; computes nothing yet."""
        self._cancel_stream()
        tokens = self._model.encode(prompt, begins=not len(self.sequence))
        self.sequence.commit(tokens)
        self._heals = isinstance(prompt, str) and self._model.tokenizer.vocabulary is not None
        if is_chat(prompt):
            self._healable = len(self.sequence)

    def stream(self, **options: Unpack[GenerateOptions]) -> TextStream:
        """As ``LanguageModel.stream``, going on from this session's text, whose end is healed unless told otherwise."""
        self._cancel_stream()
        if not self._decoders:
            raise OvspecError("This session is closed; make a new one with session().")
        decoders = self._decoders
        if options.get("heal") is None:
            options["heal"] = self._heals  # token ids are taken as they are
        held = len(decoders.target.rows[0])
        row = self._model.row(self.sequence, options, held=held, healable=self._healable)
        drafter, lookahead = self._model.drafting(options, decoders, row.sampler.sampled)

        def pieces() -> Generator[Piece]:
            try:
                for round_pieces in generate_rows(decoders.target, drafter, [row], lookahead):
                    for _, piece in round_pieces:
                        if piece.finish_reason == "stop":
                            self._end_with_the_text(row)
                        yield piece
            finally:
                self._healable, self._heals = len(self.sequence), False

        self._stream = TextStream(pieces(), row)
        return self._stream

    def generate(self, **options: Unpack[GenerateOptions]) -> Result:
        """As ``LanguageModel.generate``, going on from this session's text."""
        return self.stream(**options).result()

    def close(self) -> None:
        """Hand the decoders back to the model; the session can't generate any more."""
        self._cancel_stream()
        if self._decoders:
            self._model.release(self._decoders)
            self._decoders = None

    def _cancel_stream(self) -> None:
        if self._stream:
            stream, self._stream = self._stream, None
            stream.cancel()

    def _end_with_the_text(self, row: Row) -> None:
        """Take the tokens that spelt the stop string back, so that the session holds what the user saw."""
        decode, generated = self._model.tokenizer.decode, self.sequence.tokens[row.start :]
        text, kept = row.taken_back.decode("utf-8", "replace") + row.text, len(generated)
        while not text.startswith(decode(generated[:kept])):
            kept -= 1
        rest = self._model.tokenizer.encode_more(text[len(decode(generated[:kept])) :])
        self.sequence.rewind(row.start + kept)
        self.sequence.commit(rest)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
