"""The body of a request to check a finished text."""

from pydantic import Field

from ovspec.base.json_types import JsonObject
from ovspec.protocols.bodies import RequestBody


class VerifyRequest(RequestBody):
    """A finished text to be checked."""

    model: str | None = Field(None, description="The model's name.")
    choice: JsonObject = Field(description="A choice of an answer, a response or a message, with its record.")
