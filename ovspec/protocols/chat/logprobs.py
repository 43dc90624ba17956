"""Log-probabilities in the forms of OpenAI's API."""

from ovspec.base.json_types import JsonObject
from ovspec.engine.results import Result
from ovspec.protocols.logprobs import PlacedToken
from ovspec.protocols.reply import ReplyModel
from ovspec.sampling.logprobs import TokenLogprob
from ovspec.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # OpenAI's number in place of -inf, which JSON lacks


class LikelyToken(ReplyModel):
    token: str
    bytes: list[int]
    logprob: float


class ChatToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(ReplyModel):
    content: list[ChatToken]
    refusal: None


class CompletionLogprobs(ReplyModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


def requested_top_count(result: Result) -> int:
    """Return the requested number of top alternatives per position."""
    return (result.record and result.record.params.logprobs) or 0


def make_chat_logprobs(tokenizer: Tokenizer, placed_tokens: list[PlacedToken]) -> ChatLogprobs:
    """Return the log-probabilities of a chat's tokens."""

    def make_token_fields(token_id: int, logprob: float) -> JsonObject:
        token_bytes = list(tokenizer.token_bytes(token_id))
        return {
            "token": tokenizer.token_text(token_id),
            "bytes": token_bytes,
            "logprob": max(logprob, LOWEST_LOGPROB),
        }

    logprobs = [placed_token.logprob for placed_token in placed_tokens if placed_token.logprob]
    content = [
        ChatToken(
            **make_token_fields(token.token_id, token.logprob),
            top_logprobs=[LikelyToken(**make_token_fields(*top_token)) for top_token in token.top],
        )
        for token in logprobs
    ]
    return ChatLogprobs(content=content, refusal=None)


def make_completion_logprobs(
    tokenizer: Tokenizer, placed_tokens: list[PlacedToken], with_top_logprobs: bool
) -> CompletionLogprobs:
    """Return the log-probabilities of a completion's tokens; ``with_top_logprobs``: also of the most likely tokens."""

    def make_top_logprobs(token: TokenLogprob) -> dict[str, float]:
        likely_tokens = [*token.top, (token.token_id, token.logprob)]
        return {tokenizer.token_text(token_id): max(logprob, LOWEST_LOGPROB) for token_id, logprob in likely_tokens}

    logprobs = [placed_token.logprob for placed_token in placed_tokens]  # None for a prompt's first token
    return CompletionLogprobs(
        tokens=[tokenizer.token_text(placed_token.token_id) for placed_token in placed_tokens],
        token_logprobs=[token and max(token.logprob, LOWEST_LOGPROB) for token in logprobs],
        top_logprobs=[token and make_top_logprobs(token) for token in logprobs] if with_top_logprobs else None,
        text_offset=[placed_token.offset for placed_token in placed_tokens],
    )
