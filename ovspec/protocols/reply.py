"""What makes the events of a stream."""

from collections.abc import Sequence
from typing import Protocol

from pydantic import BaseModel

from ovspec.engine.results import Piece
from ovspec.protocols.errors import Failure, openai_error

WAITING = b": waiting\n\n"  # a comment, for proxies that close silent connections
DONE = b"data: [DONE]\n\n"  # OpenAI's last event
Events = Sequence[BaseModel | bytes]


class Writer(Protocol):
    """Makes the events of a stream from the pieces of a request's texts. Events as bytes are complete."""

    def first(self) -> Events:
        """Return the events that come before the texts."""
        return []

    def more(self, index: int, piece: Piece, /) -> Events:
        """Return the events for a piece of the text ``index``; there are none if it has nothing to tell yet."""
        ...

    def last(self) -> Events:
        """Return the events that come after the texts."""
        return []

    def waiting(self) -> Events:
        """Return what tells a client that its stream is alive, while there is nothing to say."""
        return [WAITING]

    def failed(self, failure: Failure) -> Events:
        """Return the events that end the stream where it has failed."""
        return [openai_error(failure)]
