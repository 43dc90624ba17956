"""The tokens of an answer, with their positions in its text and their log-probabilities."""

from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, replace

from ovspec.api.model import LanguageModel
from ovspec.engine.engine_thread import BackgroundTask, EngineThread
from ovspec.engine.prompts import Prompt
from ovspec.engine.results import Piece
from ovspec.engine.scoring import LOGITS_CHUNK_TOKENS, compute_predicting_logits
from ovspec.sampling.logprobs import TokenLogprob, make_token_logprob
from ovspec.text.tokenizer import Tokenizer

SMALL_CHUNK_TOKENS = 8  # prompt tokens per inference for log-probabilities, while texts wait


@dataclass(frozen=True)
class PlacedToken:
    """A token in an answer: its position in the text, and its log-probability, None for a prompt's first token."""

    token_id: int
    offset: int
    logprob: TokenLogprob | None


@dataclass(frozen=True)
class Echo:
    """A prompt repeated in the reply: its text, and its tokens if log-probabilities were requested."""

    text: str = ""
    tokens: list[PlacedToken] | None = None


NO_ECHO = Echo()


class PlacedTokenStream:
    """The generated tokens of a text with their positions, without a stop string's tokens.

    text_begin: number of characters before the text.
    """

    def __init__(self, tokenizer: Tokenizer, text_begin: int) -> None:
        self._tokenizer = tokenizer
        self._text_begin = text_begin
        self._text_length = 0
        self._pending_tokens: list[PlacedToken] = []  # offsets from the first token, possibly healed
        self._healed_length: int | None = None  # characters of the prompt repeated by the first token
        # All tokens and text until the healed length is known.
        self._token_ids: list[int] = []
        self._text = ""
        self._detokenizer = tokenizer.make_detokenizer()
        self._offset = 0

    def push(self, piece: Piece) -> list[PlacedToken]:
        """Return the tokens completed by this piece, with their log-probabilities."""
        self._text_length += len(piece.text)
        for token_id, logprob in zip(piece.token_ids, piece.logprobs or [], strict=True):
            self._pending_tokens.append(PlacedToken(token_id, self._offset, logprob))
            self._offset += len(self._detokenizer.push(token_id))
        if self._healed_length is None:
            self._token_ids += piece.token_ids
            self._text += piece.text
            if self._text:
                self._healed_length = max(0, self._tokenizer.decode(self._token_ids).find(self._text))
        healed_length = self._healed_length or 0
        complete_tokens = [token for token in self._pending_tokens if token.offset - healed_length < self._text_length]
        del self._pending_tokens[: len(complete_tokens)]
        return [
            replace(token, offset=self._text_begin + max(0, token.offset - healed_length)) for token in complete_tokens
        ]


def place_chat_tokens(piece: Piece) -> list[PlacedToken]:
    """Return the tokens of a piece of a chat's reply; offsets have no meaning in chats."""
    tokens = zip(piece.token_ids, piece.logprobs or [], strict=True)
    return [PlacedToken(token_id, 0, logprob) for token_id, logprob in tokens]


def make_echo(
    tokenizer: Tokenizer, prompt: Prompt, token_ids: list[int], logprobs: list[TokenLogprob | None] | None
) -> Echo:
    """Return the echo of a prompt with the tokens ``token_ids``."""
    text = prompt if isinstance(prompt, str) else tokenizer.decode(token_ids)
    if logprobs is None:
        return Echo(text)
    detokenizer = tokenizer.make_detokenizer()
    placed_tokens = list[PlacedToken]()
    offset = len(text) - len(tokenizer.decode(token_ids))  # -1 for some tokenizers' leading space
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        placed_tokens.append(PlacedToken(token_id, max(0, offset), logprob))
        offset += len(detokenizer.push(token_id))
    return Echo(text, placed_tokens)


def compute_prompt_logprobs(
    lm: LanguageModel, prompt_ids: list[int], top_count: int, max_chunk: Callable[[], int] = lambda: LOGITS_CHUNK_TOKENS
) -> Generator[None, None, list[TokenLogprob | None]]:
    """Compute the log-probabilities of a prompt's tokens, a forward pass per step; return them at the end.

    Args:
        top_count: the number of most likely tokens at each position.
        max_chunk: returns the maximum number of tokens for the next forward pass.
    """
    logprobs: list[TokenLogprob | None] = [None]
    decoders = lm.runtime.decoder_pool.acquire()
    tokens = lm.encode(prompt_ids)
    try:
        for position, logits in compute_predicting_logits(decoders.target, tokens, len(prompt_ids), max_chunk):
            next_ids = prompt_ids[position : position + len(logits)]
            logprobs += [
                make_token_logprob(row, token_id, top_count) for row, token_id in zip(logits, next_ids, strict=True)
            ]
            yield
    finally:
        lm.runtime.decoder_pool.release(decoders)
    return logprobs


def compute_logprobs_between_rounds(
    lm: LanguageModel, engine: EngineThread, prompt_ids: list[int], top_count: int
) -> Future[list[TokenLogprob | None]]:
    """Compute the log-probabilities of a prompt's tokens in the engine, without delaying texts."""
    steps = compute_prompt_logprobs(
        lm, prompt_ids, top_count, lambda: SMALL_CHUNK_TOKENS if engine.running_row_count else LOGITS_CHUNK_TOKENS
    )
    return engine.add_task(BackgroundTask(steps, len(prompt_ids)))
