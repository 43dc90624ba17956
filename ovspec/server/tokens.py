"""What /tokenize and /detokenize answer: the tokens of a text or a chat, and the text of tokens."""

from pydantic import Field

from ovspec.api.model import LanguageModel
from ovspec.base.errors import PromptError
from ovspec.engine.prompts import refuse_template_variables
from ovspec.params.tools import parse_tools
from ovspec.protocols.bodies import DetokenizeRequest, RequestError, TokenizeRequest
from ovspec.protocols.chat.reply import Answer
from ovspec.protocols.requests import Ignored, check_continued, template_chat
from ovspec.server.admission import Service
from ovspec.server.errors import about_prompt

ADDS = ("add_special_tokens", "add_special")  # vLLM's and llama.cpp's names of the same field


class TokenPiece(Answer):
    id: int
    piece: str | list[int] = Field(description="The token's text, or its bytes where it is part of a character.")


class Tokens(Answer):
    count: int
    max_model_len: int | None
    tokens: list[int] | list[TokenPiece]


class Text(Answer):
    prompt: str
    content: str


def tokens_of(service: Service, ignored: Ignored, body: TokenizeRequest) -> Tokens:
    """Return the tokens of a text or a chat; names of what is left out are added to ``ignored``."""
    ids, lm = encode(service, ignored, body), service.lm
    pieces = [TokenPiece(id=id, piece=piece_of(lm.tokenizer.token_bytes(id))) for id in ids if body.with_pieces]
    return Tokens(count=len(ids), max_model_len=lm.target.ir.context_length, tokens=pieces or ids)


def piece_of(token: bytes) -> str | list[int]:
    """Return the text of a token, or its bytes, if they are part of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return list(token)


def encode(service: Service, ignored: Ignored, body: TokenizeRequest) -> list[int]:
    """Return the tokens of the text or chat in ``body``; raises OvspecError for fields that can't be met together."""
    lm = service.lm
    texts = [text for text in (body.prompt, body.content) if text is not None]
    given = {name: getattr(body, name) for name in ADDS if getattr(body, name) is not None}
    if len(texts) + (body.messages is not None) != 1:
        raise RequestError("Give one of prompt, content and messages.")
    if body.messages is None:
        check_continued(body, [])
        refuse_template_variables(body.chat_template_kwargs)
        if body.tools:
            raise RequestError("tools need messages; leave them out.", "tools")
        return lm.tokenizer.encode(texts[0], False not in given.values()).tolist()
    if name := next(iter(given), None):
        raise RequestError(f"{name} can't be combined with messages; leave it out.", name)
    messages, tools = template_chat(body.messages, ignored), parse_tools(body.tools or ())
    check_continued(body, messages)
    variables = service.read_variables(body.chat_template_kwargs or {}, bool(tools), ignored)
    try:
        return lm.runtime.prompts.encode(messages, variables=variables, tools=tools).tolist()
    except PromptError as error:
        raise about_prompt(error, lm, "messages") from None


def decode(lm: LanguageModel, body: DetokenizeRequest) -> str:
    """Return the text of tokens; raises ApiError for ids that aren't in the vocabulary."""
    try:
        ids = lm.runtime.prompts.encode(body.tokens, at_start=False)
    except PromptError as error:
        raise about_prompt(error, lm, "tokens") from None
    return lm.tokenizer.decode_with_special(ids) or lm.tokenizer.decode(ids)
