"""The common parts of all APIs' replies, and their protocol: whole, or as the events of a stream."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from ovspec.base.json_types import JsonObject
from ovspec.engine.results import Piece, Result
from ovspec.engine.row import Row
from ovspec.protocols.errors import RequestFailure, make_openai_error
from ovspec.protocols.logprobs import NO_ECHO, Echo
from ovspec.protocols.requests import TextRequest
from ovspec.text.tokenizer import Tokenizer

KEEP_ALIVE_EVENT = b": waiting\n\n"  # a comment, for proxies that close silent connections
DONE_EVENT = b"data: [DONE]\n\n"  # OpenAI's last event
Events = Sequence[BaseModel | bytes]  # bytes are a complete event


class ReplyModel(BaseModel):
    """A part of a reply; unset fields aren't sent."""

    model_config = ConfigDict(extra="forbid")


@dataclass
class ReplyInputs:
    """A request and its texts, for making its reply.

    identity: the fields that the reply begins with; see ``new_reply_identity``.
    rows: ``n`` for each prompt, in the order of the prompts.
    echoes: for each prompt, its part that the reply repeats; by default nothing.
    """

    tokenizer: Tokenizer
    identity: JsonObject
    request: TextRequest
    rows: list[Row]
    echoes: list[Echo] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.echoes = self.echoes or [NO_ECHO] * len(self.request.prompts)

    @property
    def texts_per_prompt(self) -> int:
        """The number of texts per prompt."""
        return len(self.rows) // len(self.request.prompts)


class ReplyMaker(Protocol):
    """The reply to a request in an API's form: whole, or as the events of a stream."""

    def __init__(self, reply_inputs: ReplyInputs) -> None: ...

    def whole_reply(self, results: list[Result]) -> BaseModel:
        """Return the whole reply from the results of all rows."""
        ...

    def first_events(self) -> Events:
        """Return the events before the texts."""
        return []

    def piece_events(self, index: int, piece: Piece, /) -> Events:
        """Return the events for a piece of the row ``index``; possibly none."""
        ...

    def last_events(self) -> Events:
        """Return the events after the texts."""
        return []

    def keep_alive_events(self) -> Events:
        """Return the keep-alive events of a silent stream."""
        return [KEEP_ALIVE_EVENT]

    def failure_events(self, failure: RequestFailure) -> Events:
        """Return the final events after a failure."""
        return [make_openai_error(failure)]
