"""Reads bodies, in bounded time and memory: from bytes to the body of a request."""

import asyncio
from codecs import BOM_UTF8
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ovspec.base.json_types import JsonValue
from ovspec.base.surrogates import replace_half_surrogates
from ovspec.protocols.apis import BODY_TYPES
from ovspec.protocols.bodies import RequestError
from ovspec.protocols.parsing import drop_unknown_fields, validate_body
from ovspec.server.access import add_ignored_names
from ovspec.server.errors import ApiError

B = TypeVar("B", bound=BaseModel)

MAX_BODY_BYTES = 8_000_000  # bytes; the longest contexts have a few million characters
BODY_SECONDS = 60.0  # until a body has arrived
MAX_COMMAS = 1_000_000  # limit on values; parsing holds Python's lock and so blocks everything else
LARGE_BODY_BYTES = 100_000  # bytes of a body
# Parses large bodies one at a time, to limit memory.
LARGE_BODY_READER = ThreadPoolExecutor(1, "ovspec bodies")


class BoundedRequest(Request):
    """A request with limits on its body: Starlette has no time limit, and answers 413 in plain text."""

    async def json(self) -> Any:
        """Return the body as a model; FastAPI would collect an error per wrong item."""
        raw_body = await self.body()
        body_type = BODY_TYPES[self.url.path]
        report_ignored = None if self.app.state.strict_fields else partial(add_ignored_names, self)
        if len(raw_body) <= LARGE_BODY_BYTES:
            return parse_body(raw_body, body_type, report_ignored)
        event_loop = asyncio.get_running_loop()
        return await event_loop.run_in_executor(LARGE_BODY_READER, parse_body, raw_body, body_type, report_ignored)

    async def body(self) -> bytes:
        if hasattr(self, "_body"):
            return self._body
        if self.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "The request's body must be JSON; send it with 'Content-Type: application/json'.")
        too_large_error = ApiError(
            413,
            f"The request's body is larger than {MAX_BODY_BYTES // 1_000_000} MB; send a smaller body.",
            close_connection=True,
        )
        if int(self.headers.get("content-length", 0)) > MAX_BODY_BYTES:
            raise too_large_error
        raw_body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for body_part in self.stream():
                    raw_body += body_part
                    if len(raw_body) > MAX_BODY_BYTES:
                        raise too_large_error
        except TimeoutError:
            raise ApiError(
                408,
                f"The request's body did not arrive within {BODY_SECONDS:g} seconds; send it again.",
                close_connection=True,
            ) from None
        except ClientDisconnect:
            raise ApiError(499, "The client has closed the connection.") from None
        self._body = bytes(raw_body)
        return self._body


class BoundedRoute(APIRoute):
    """A route with bounded requests."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def handle_bounded(request: Request) -> Response:
            return await handler(BoundedRequest(request.scope, request.receive))

        return handle_bounded


def parse_json_bytes(raw_body: bytes) -> JsonValue:
    """Return the JSON value in ``raw_body``; raises ValueError."""
    try:
        return from_json(raw_body, allow_inf_nan=False)
    except ValueError:
        # Latin-1 leaves all other bytes as they are.
        repaired_body = replace_half_surrogates(raw_body.decode("latin-1")).encode("latin-1")
        if repaired_body == raw_body:
            raise
        return from_json(repaired_body, allow_inf_nan=False)


def parse_body(raw_body: bytes, body_type: type[B], report_ignored: Callable[[list[str]], None] | None = None) -> B:
    """Return the body in ``raw_body``; raises ApiError if it isn't JSON, and for the first invalid field.

    Fields unknown to all requests are left out, and ``report_ignored`` is called with their names; without it they are
    invalid.
    """
    if raw_body.count(b",") > MAX_COMMAS:
        raise ApiError(413, f"The request's body has more than {MAX_COMMAS} commas; send fewer values.")
    try:
        json_value = parse_json_bytes(raw_body.removeprefix(BOM_UTF8))
        if report_ignored:
            json_value, ignored_names = drop_unknown_fields(json_value, body_type)
            report_ignored(ignored_names)
        return validate_body(json_value, body_type)
    except ValueError as error:
        raise ApiError(400, f"The request's body is not JSON: {error}.") from None
    except RequestError as error:
        raise ApiError(400, str(error), error.param) from None
