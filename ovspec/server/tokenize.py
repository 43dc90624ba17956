"""/tokenize and /detokenize: the tokens of a text or a chat, and the text of tokens."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fastapi import FastAPI, Request
from pydantic import Field

from ovspec.api.model import LanguageModel
from ovspec.base.errors import PromptError
from ovspec.engine.prompts import refuse_template_variables
from ovspec.params.tools import parse_tools
from ovspec.protocols.bodies import RequestError
from ovspec.protocols.chat.request import check_chat_ending, to_template_messages
from ovspec.protocols.reply import ReplyModel
from ovspec.protocols.requests import IgnoredNames
from ovspec.protocols.tokenize import DetokenizeRequest, TokenizeRequest
from ovspec.server.context import ServerContext
from ovspec.server.errors import make_prompt_error

T = TypeVar("T")
B = TypeVar("B", TokenizeRequest, DetokenizeRequest)
ADD_SPECIAL_FIELDS = ("add_special_tokens", "add_special")  # vLLM's and llama.cpp's names of the same field


class TokenPiece(ReplyModel):
    id: int
    piece: str | list[int] = Field(description="The token's text, or its bytes for a part of a character.")


class TokenizeReply(ReplyModel):
    count: int
    max_model_len: int | None
    tokens: list[int] | list[TokenPiece]


class DetokenizeReply(ReplyModel):
    prompt: str
    content: str


def add_token_endpoints(app: FastAPI, context: ServerContext) -> None:
    """Add the endpoints that encode texts and chats, and decode tokens."""

    async def run_token_request(function: Callable[[B], T], body: B, http: Request) -> T:
        context.admission.check_requested_model(body.model)
        with context.admission.admit():
            return await context.threads.run_in_thread_for_body(http, function, body)

    @app.post("/tokenize", tags=["tokens"], summary="Return the tokens of a text or a chat.")
    async def tokenize(body: TokenizeRequest, http: Request) -> TokenizeReply:
        ignored = IgnoredNames()
        reply = await run_token_request(partial(tokenize_body, context, ignored), body, http)
        context.preparer.report_ignored(ignored, http)
        return reply

    @app.post("/detokenize", tags=["tokens"], summary="Return the text of tokens.")
    async def detokenize(body: DetokenizeRequest, http: Request) -> DetokenizeReply:
        text = await run_token_request(partial(detokenize_body, context.lm), body, http)
        return DetokenizeReply(prompt=text, content=text)


def tokenize_body(context: ServerContext, ignored_names: IgnoredNames, body: TokenizeRequest) -> TokenizeReply:
    """Return the tokens of a text or a chat; names of ignored fields are added to ``ignored_names``."""
    token_ids = encode_prompt_of_body(context, ignored_names, body)
    tokenizer = context.lm.tokenizer
    max_model_len = context.lm.target.ir.context_length
    if not body.with_pieces:
        return TokenizeReply(count=len(token_ids), max_model_len=max_model_len, tokens=token_ids)
    pieces = [TokenPiece(id=id, piece=decode_token_piece(tokenizer.token_bytes(id))) for id in token_ids]
    return TokenizeReply(count=len(token_ids), max_model_len=max_model_len, tokens=pieces)


def decode_token_piece(token_bytes: bytes) -> str | list[int]:
    """Return the text of a token, or its bytes, if they are part of a character."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return list(token_bytes)


def encode_prompt_of_body(context: ServerContext, ignored_names: IgnoredNames, body: TokenizeRequest) -> list[int]:
    """Return the tokens of the text or chat in ``body``; raises OvspecError for fields that can't be combined."""
    lm = context.lm
    texts = [text for text in (body.prompt, body.content) if text is not None]
    special_fields = {field: getattr(body, field) for field in ADD_SPECIAL_FIELDS if getattr(body, field) is not None}
    if len(texts) + (body.messages is not None) != 1:
        raise RequestError("The request needs exactly one of the fields prompt, content and messages.")
    if body.messages is None:
        check_chat_ending(body, [])
        refuse_template_variables(body.chat_template_kwargs)
        if body.tools:
            raise RequestError("`tools` needs `messages`; leave `tools` out.", "tools")
        return lm.tokenizer.encode(texts[0], False not in special_fields.values()).tolist()
    if field := next(iter(special_fields), None):
        raise RequestError(f"{field} can't be combined with messages; leave {field} out.", field)
    messages = to_template_messages(body.messages, ignored_names)
    tools = parse_tools(body.tools or ())
    check_chat_ending(body, messages)
    template_variables = context.preparer.select_template_variables(
        body.chat_template_kwargs or {}, bool(tools), ignored_names
    )
    try:
        return lm.runtime.prompt_encoder.encode(messages, template_variables=template_variables, tools=tools).tolist()
    except PromptError as error:
        raise make_prompt_error(error, lm, "messages") from None


def detokenize_body(lm: LanguageModel, body: DetokenizeRequest) -> str:
    """Return the text of tokens; raises ApiError for ids that aren't in the vocabulary."""
    try:
        token_ids = lm.runtime.prompt_encoder.encode(body.tokens, at_start=False)
    except PromptError as error:
        raise make_prompt_error(error, lm, "tokens") from None
    return lm.tokenizer.decode_with_special(token_ids) or lm.tokenizer.decode(token_ids)
