"""The tokens of an answer, with their places in its text and their log-probabilities."""

from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

from ovspec.api.model import LanguageModel
from ovspec.engine.engine_thread import BackgroundTask, EngineThread
from ovspec.engine.prompts import Prompt
from ovspec.engine.results import Piece
from ovspec.engine.scoring import LOGITS_CHUNK, predict_tokens
from ovspec.sampling.logprobs import TokenLogprob, make_token_logprob
from ovspec.text.tokenizer import Tokenizer

T = TypeVar("T")
NARROW = 8  # tokens of a prompt that an inference reads for its log-probabilities while texts wait for it


@dataclass(frozen=True)
class Place:
    """A token in an answer: its position in the text, and its log-probability, which a prompt's first token lacks."""

    token: int
    offset: int
    logprob: TokenLogprob | None


@dataclass(frozen=True)
class Echo:
    """A prompt that is repeated: its text, and its tokens if log-probabilities are wanted."""

    text: str = ""
    places: list[Place] | None = None


SILENT = Echo()


class PlaceStream:
    """The generated tokens of a text, each told with the piece of text that it has added to; so a stop string's aren't.

    ``begin``: characters before the text.
    """

    def __init__(self, tokenizer: Tokenizer, begin: int) -> None:
        self._tokenizer, self._begin, self._length = tokenizer, begin, 0
        self._waiting: list[Place] = []  # their offsets count from the first token, which may be healed
        self._healed: int | None = None  # characters of the prompt that the first token spells again
        self._ids, self._text = list[int](), ""  # all so far, until that is known
        self._detokenizer, self._offset = tokenizer.make_detokenizer(), 0

    def push(self, piece: Piece) -> list[Place]:
        """Return the tokens whose text has now been told, with their log-probabilities."""
        self._length += len(piece.text)
        for token, logprob in zip(piece.token_ids, piece.logprobs or [], strict=True):
            self._waiting.append(Place(token, self._offset, logprob))
            self._offset += len(self._detokenizer.push(token))
        if self._healed is None:
            self._ids, self._text = self._ids + piece.token_ids, self._text + piece.text
            if self._text:
                self._healed = max(0, self._tokenizer.decode(self._ids).find(self._text))
        healed = self._healed or 0
        told = [place for place in self._waiting if place.offset - healed < self._length]
        del self._waiting[: len(told)]
        return [replace(place, offset=self._begin + max(0, place.offset - healed)) for place in told]


def places_of(piece: Piece) -> list[Place]:
    """Return the tokens of a piece of an answer in a chat, where places in the text mean nothing."""
    return [Place(token, 0, each) for token, each in zip(piece.token_ids, piece.logprobs or [], strict=True)]


def echo_of(tokenizer: Tokenizer, prompt: Prompt, ids: list[int], logprobs: list[TokenLogprob | None] | None) -> Echo:
    """Return what is repeated of a prompt with these ``ids``."""
    text = prompt if isinstance(prompt, str) else tokenizer.decode(ids)
    if logprobs is None:
        return Echo(text)
    detokenizer, places = tokenizer.make_detokenizer(), list[Place]()
    offset = len(text) - len(tokenizer.decode(ids))  # -1 for a space that some tokenizers put in front
    for token, logprob in zip(ids, logprobs, strict=True):
        places.append(Place(token, max(0, offset), logprob))
        offset += len(detokenizer.push(token))
    return Echo(text, places)


def prompt_logprobs(
    lm: LanguageModel, ids: list[int], tops: int, chunk: Callable[[], int] = lambda: LOGITS_CHUNK
) -> Generator[None, None, list[TokenLogprob | None]]:
    """Compute the log-probabilities of a prompt's tokens, an inference at a time; return them at the end.

    ``chunk`` is asked before each inference for the most tokens that it may read.
    """
    logprobs: list[TokenLogprob | None] = [None]
    decoders, tokens = lm.runtime.decoder_pool.acquire(), lm.encode(ids)
    try:
        for position, logits in predict_tokens(decoders.target, tokens, len(ids), chunk):
            pairs = zip(logits, ids[position : position + len(logits)], strict=True)
            logprobs += [make_token_logprob(row, token, tops) for row, token in pairs]
            yield
    finally:
        lm.runtime.decoder_pool.release(decoders)
    return logprobs


def between_rounds(
    lm: LanguageModel, engine: EngineThread, ids: list[int], tops: int
) -> Future[list[TokenLogprob | None]]:
    """Let the engine compute the log-probabilities of a prompt's tokens, without holding up texts."""
    steps = prompt_logprobs(lm, ids, tops, lambda: NARROW if engine.running_count else LOGITS_CHUNK)
    return engine.add_task(BackgroundTask(steps, len(ids)))


def at_once(steps: Generator[None, None, T]) -> T:
    """Run a generator to its end, and return what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return ended.value
