"""Reads bodies, in bounded time and memory: from bytes to the body of a request."""

import asyncio
from codecs import BOM_UTF8
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ovspec.base.surrogates import replace_half_surrogates
from ovspec.protocols.apis import BODIES
from ovspec.protocols.bodies import RequestError, read_body, without_unknown
from ovspec.server.errors import ApiError
from ovspec.server.guard import IGNORED

B = TypeVar("B", bound=BaseModel)

LARGEST_BODY = 8_000_000  # bytes; the longest contexts have a few million characters
BODY_SECONDS = 60.0  # until a body has arrived
MOST_COMMAS = 1_000_000  # so many values at most; parsing holds Python's lock and so stops everything else
LARGE = 100_000  # bytes of a body
# Reads large bodies, one at a time, so that they don't take much memory at once.
READER = ThreadPoolExecutor(1, "ovspec bodies")


class BoundedRequest(Request):
    """A request with limits on its body, because Starlette has none on time, and answers 413 in plain text."""

    async def json(self) -> Any:
        """Return the body as a model; FastAPI would collect an error for each wrong item."""
        raw, model = await self.body(), BODIES[self.url.path]
        note = None if self.app.state.strict_fields else self._note
        if len(raw) <= LARGE:
            return parse(raw, model, note)
        return await asyncio.get_running_loop().run_in_executor(READER, parse, raw, model, note)

    def _note(self, names: list[str]) -> None:
        """Note the names of ignored fields for the guard."""
        setattr(self.state, IGNORED, names)

    async def body(self) -> bytes:
        if hasattr(self, "_body"):
            return self._body
        if self.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "The body must be JSON; send it with 'Content-Type: application/json'.")
        too_large = ApiError(413, f"The body is larger than {LARGEST_BODY // 1_000_000} MB.", close=True)
        if int(self.headers.get("content-length", 0)) > LARGEST_BODY:
            raise too_large
        raw = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in self.stream():
                    raw += part
                    if len(raw) > LARGEST_BODY:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {BODY_SECONDS:g} seconds.", close=True) from None
        except ClientDisconnect:
            raise ApiError(499, "The client has closed the connection.") from None
        self._body = bytes(raw)
        return self._body


class BoundedRoute(APIRoute):
    """A route whose requests are bounded."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(BoundedRequest(request.scope, request.receive))

        return handle


def json_in(raw: bytes) -> Any:
    """Return the JSON value in ``raw``; raises ValueError."""
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError:
        whole = replace_half_surrogates(raw.decode("latin-1")).encode(
            "latin-1"
        )  # which leaves all other bytes as they are
        if whole == raw:
            raise
        return from_json(whole, allow_inf_nan=False)


def parse(raw: bytes, model: type[B], note: Callable[[list[str]], None] | None = None) -> B:
    """Return the body in ``raw``; raises ApiError for what isn't JSON, and for the first field that is wrong.

    Fields that no request has are left out, and ``note`` is called with their names. Without ``note`` they are wrong.
    """
    if raw.count(b",") > MOST_COMMAS:
        raise ApiError(413, f"The body has more than {MOST_COMMAS} commas; send fewer values.")
    try:
        value = json_in(raw.removeprefix(BOM_UTF8))
        if note:
            value, ignored = without_unknown(value, model)
            note(ignored)
        return read_body(value, model)
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}.") from None
    except RequestError as error:
        raise ApiError(400, str(error), error.param) from None
