"""The APIs for generating text, with their requests and replies."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, Field

from ovspec.base.json_types import JsonObject
from ovspec.protocols import parsing
from ovspec.protocols.bodies import TextRequestBody, VerifyRequest
from ovspec.protocols.chat.bodies import ChatRequest, CompletionRequest
from ovspec.protocols.chat.reply import ChatCompletion, ChatReplyMaker, Completion
from ovspec.protocols.chat.request import read_chat_or_completion
from ovspec.protocols.llamacpp.infill import InfillReplies, InfillReplyMaker, InfillRequest, read_infill_request
from ovspec.protocols.messages.body import MessagesRequest
from ovspec.protocols.messages.reply import Message, MessageReplyMaker
from ovspec.protocols.messages.request import read_messages_request
from ovspec.protocols.reply import ReplyMaker, ReplyModel
from ovspec.protocols.requests import TextRequest
from ovspec.protocols.responses.body import ResponsesRequest
from ovspec.protocols.responses.reply import Response, ResponseReplyMaker
from ovspec.protocols.responses.request import read_responses_request


@dataclass(frozen=True)
class TextApi:
    """An API for generating text.

    summary: a sentence about the API.
    body_type: the type of a request's body.
    read_body: returns the request in a body; raises RequestError for an invalid request.
    reply_maker: makes whole replies and the events of streams.
    reply_model: the type of a whole reply.
    id_prefix: the prefix of a reply's id.
    count_fields: further fields of the reply to a request for counting tokens.
    """

    summary: str
    body_type: type[TextRequestBody]
    read_body: Callable[[Any], TextRequest]
    reply_maker: type[ReplyMaker]
    reply_model: type[BaseModel]
    id_prefix: str
    count_fields: JsonObject = field(default_factory=dict)


read_chat = partial(read_chat_or_completion, kind="chat")
read_completion = partial(read_chat_or_completion, kind="completion")
TEXT_APIS = {
    "/v1/chat/completions": TextApi(
        "Answer a chat (OpenAI's Chat Completions API).", ChatRequest, read_chat, ChatReplyMaker,
        ChatCompletion, "chatcmpl-",
    ),
    "/v1/completions": TextApi(
        "Continue texts (OpenAI's Completions API).", CompletionRequest, read_completion, ChatReplyMaker,
        Completion, "cmpl-",
    ),
    "/v1/responses": TextApi(
        "Answer a chat (OpenAI's Responses API).", ResponsesRequest, read_responses_request, ResponseReplyMaker,
        Response, "resp_", {"object": "response.input_tokens"},
    ),
    "/v1/messages": TextApi(
        "Answer a chat (Anthropic's Messages API).", MessagesRequest, read_messages_request, MessageReplyMaker,
        Message, "msg_",
    ),
    "/infill": TextApi(
        "Fill a gap in a text, for llama.cpp's editor plugins.", InfillRequest, read_infill_request,
        InfillReplyMaker, InfillReplies, "infill-",
    ),
}  # fmt: skip
# Paths for counting the tokens of a request's prompt -> the path of the API with these requests.
COUNT_PATHS = {"/v1/responses/input_tokens": "/v1/responses", "/v1/messages/count_tokens": "/v1/messages"}
# Path -> body, for all requests with bodies.
BODY_TYPES: dict[str, type[BaseModel]] = {
    **{path: api.body_type for path, api in TEXT_APIS.items()},
    **{path: TEXT_APIS[api].body_type for path, api in COUNT_PATHS.items()},
    **parsing.BODIES_WITH_FIELDS,
    "/compare": ChatRequest,
    "/verify": VerifyRequest,
}


class TokenCount(ReplyModel):
    """The number of tokens of a prompt."""

    object: Literal["response.input_tokens"] = Field("response.input_tokens", description="OpenAI's.")
    input_tokens: int
