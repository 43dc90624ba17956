"""Reads bodies, in bounded time and memory: from bytes to the body of a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ovspec.openai.bodies import ChatBody, CompletionBody, DetokenizeRequest, TokenizeRequest
from ovspec.openai.errors import RequestError
from ovspec.openai.wording import read_body
from ovspec.serving.errors import ApiError

B = TypeVar("B", bound=BaseModel)

LARGEST_BODY = 8_000_000  # bytes; the longest contexts have a few million characters
BODY_SECONDS = 60.0  # until a body has arrived
DEEPEST = 100  # levels of JSON
MOST_COMMAS = 1_000_000  # so many values at most; parsing holds Python's lock and so stops everything else
LARGE = 100_000  # bytes of a body
# Reads large bodies, one at a time, so that they don't take much memory at once.
READER = ThreadPoolExecutor(1, "ovspec bodies")
BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


class BoundedRequest(Request):
    """A request with limits on its body, because Starlette has none on time, and answers 413 in plain text."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            self._body = await self._read()
        return self._body

    async def json(self) -> Any:
        """Return the body, already as the model that FastAPI would make of it with an error for each wrong item."""
        raw, model = await self.body(), BODIES[self.url.path]
        if len(raw) <= LARGE:
            return parse(raw, model)
        return await asyncio.get_running_loop().run_in_executor(READER, parse, raw, model)

    async def _read(self) -> bytes:
        if self.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "The body must be JSON; send it with 'Content-Type: application/json'.")
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in self.stream():
                    parts.append(part)
                    size += len(part)
                    if size > LARGEST_BODY:
                        raise ApiError(413, f"The body is larger than {LARGEST_BODY // 1_000_000} MB.", close=True)
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {BODY_SECONDS:g} seconds.", close=True) from None
        except ClientDisconnect:
            raise ApiError(499, "The client has closed the connection.") from None
        return b"".join(parts)


class BoundedRoute(APIRoute):
    """A route whose requests are bounded."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(BoundedRequest(request.scope, request.receive))

        return handle


def parse(raw: bytes, model: type[B]) -> B:
    """Return the body in ``raw``; raises ApiError for what isn't JSON, and for the first field that is wrong."""
    try:
        return read_body(read_json(raw), model)
    except RequestError as error:
        raise ApiError(400, str(error), error.param) from None


def read_json(raw: bytes) -> Any:
    """Return the JSON value in ``raw``; raises ApiError if it isn't JSON, is too large or too deep, or not Unicode."""

    def refuse(name: str) -> None:
        raise ApiError(400, f"{name} is not JSON; leave it out.")

    if raw.count(b",") > MOST_COMMAS:
        raise ApiError(413, f"The body has more than {MOST_COMMAS} commas; send fewer values.")
    try:
        found = json.loads(raw.decode("utf-8-sig"), parse_constant=refuse)
        if b"\\u" in raw:  # only an escape can still be half of a character
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise ApiError(400, f"The body is not JSON: {error.msg} at character {error.pos}.") from None
    except UnicodeError:
        raise ApiError(400, "The body is not valid Unicode.") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "The body is nested too deeply, or a number in it has too many digits.") from None
    if depth(found) > DEEPEST:
        raise ApiError(400, f"The body is nested more than {DEEPEST} levels deep.")
    return found


def depth(value: Any) -> int:
    """Return how many levels of lists and objects ``value`` has."""
    levels, inside = 0, [value]
    while inside := [each for each in inside if isinstance(each, (dict, list))]:
        levels += 1
        inside = [child for each in inside for child in (each.values() if isinstance(each, dict) else each)]
    return levels
