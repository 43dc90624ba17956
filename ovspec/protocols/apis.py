"""The APIs that generate text, each with its requests, answers and streams."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, Field

from ovspec.protocols import bodies
from ovspec.protocols.bodies import ChatRequest, CompletionRequest
from ovspec.protocols.chat.reply import Answer, ChatCompletion, ChunkWriter, Completion, head_of, whole
from ovspec.protocols.llamacpp.infill import InfillAnswers, InfillRequest, InfillWriter, read_infill, whole_infill
from ovspec.protocols.messages.body import MessageRequest
from ovspec.protocols.messages.reply import Message, MessageWriter, whole_message
from ovspec.protocols.messages.request import read_messages
from ovspec.protocols.reply import Writer
from ovspec.protocols.requests import TextRequest, read_texts
from ovspec.protocols.responses.body import ResponseRequest
from ovspec.protocols.responses.reply import Response, ResponseWriter, whole_response
from ovspec.protocols.responses.request import read_response


@dataclass(frozen=True)
class TextApi:
    """An API that generates text.

    summary: what it does, in a sentence.
    body: a request.
    answer: a whole answer.
    prefix: of an answer's id.
    read: returns the request in a body; raises RequestError for what can't be met.
    whole: returns a whole answer, from a tokenizer, the answer's head, the request, its results and echoes.
    writer: returns what makes the events of a stream, from the same, but with rows.
    counts: fields of an answer that counts tokens.
    """

    summary: str
    body: type[bodies.TextBody]
    answer: type[BaseModel]
    prefix: str
    read: Callable[[Any], TextRequest]
    whole: Callable[..., BaseModel]
    writer: Callable[..., Writer]
    counts: dict[str, Any] = field(default_factory=dict)

    def head(self, model: str) -> dict[str, Any]:
        """Return the head of an answer by a model of this name."""
        return head_of(self.prefix, model)


APIS = {
    "/v1/chat/completions": TextApi(
        "Answer a chat.", ChatRequest, ChatCompletion, "chatcmpl-", partial(read_texts, kind="chat"), whole, ChunkWriter
    ),
    "/v1/completions": TextApi(
        "Continue texts.", CompletionRequest, Completion, "cmpl-", partial(read_texts, kind="completion"), whole,
        ChunkWriter,
    ),
    "/v1/responses": TextApi(
        "Answer a chat that is given as items.", ResponseRequest, Response, "resp_", read_response, whole_response,
        ResponseWriter, {"object": "response.input_tokens"},
    ),
    "/v1/messages": TextApi(
        "Answer a conversation, as Anthropic's API does.", MessageRequest, Message, "msg_", read_messages,
        whole_message, MessageWriter,
    ),
    "/infill": TextApi(
        "Fill a place in a text, as llama.cpp's editors ask for it.", InfillRequest, InfillAnswers, "infill-",
        read_infill, whole_infill, InfillWriter,
    ),
}  # fmt: skip
# Where the tokens of a request's prompt are counted, and the API that takes the request.
COUNTS = {"/v1/responses/input_tokens": "/v1/responses", "/v1/messages/count_tokens": "/v1/messages"}
# The bodies of all requests that have one.
BODIES: dict[str, type[BaseModel]] = {
    **{path: api.body for path, api in APIS.items()},
    **{path: APIS[api].body for path, api in COUNTS.items()},
    **bodies.BODIES,
}


class TokenCount(Answer):
    """How many tokens a prompt has."""

    object: Literal["response.input_tokens"] = Field("response.input_tokens", description="OpenAI's.")
    input_tokens: int
