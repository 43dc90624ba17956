"""Everything that a request passes before the API sees it: who sends it, how large it is, and its line in the log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from ovspec.serving.errors import error_body

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

LARGEST_BODY = 8_000_000  # bytes; the longest contexts have a few million characters
BODY_SECONDS = 60.0  # until a body has arrived
OPEN = ("/health", "/ready")  # without a key
# What a request's state holds: the number of its key, how its stream has ended, and whether there are too many others.
OWNER, OUTCOME, CROWDED = "owner", "outcome", "crowded"
LOG = logging.getLogger("ovspec.access")


def is_here(host: str) -> bool:
    """Return whether ``host`` names this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Keys:
    """The keys that clients may use, as digests; none if there is no need for one."""

    digests: tuple[bytes, ...] = ()

    @staticmethod
    def of(keys: list[str]) -> Keys:
        return Keys(tuple(hashlib.sha256(key.encode()).digest() for key in keys))

    def owner_of(self, header: str) -> int | None:
        """Return the number of the key that an Authorization header holds, or None; takes as long for a wrong one."""
        scheme, _, key = header.partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
        found = [hmac.compare_digest(given, digest) for digest in self.digests]
        return found.index(True) if scheme.lower() == "bearer" and any(found) else None


class Guard:
    """Refuses requests without a key, with a foreign host, or that are too many, too large or too slow; logs each.

    Args:
        keys: the keys that clients may use.
        local: whether only programs on this machine are served, without a key. Then a request must name this machine
            as its host, so that a web page whose name points here reaches nothing.
        note: called with the path and the status of each request.
    """

    def __init__(self, app: App, keys: Keys, local: bool, note: Callable[[str, int], None]) -> None:
        self._app, self._keys, self._local, self._note = app, keys, local, note

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, status, state = time.monotonic(), 0, scope.setdefault("state", {})

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._guarded(scope, receive, noted)
        except Exception:
            status = 500  # whatever a stream has begun with
            raise
        finally:
            status = state.get(OUTCOME) or status or 499
            ms = 1e3 * (time.monotonic() - began)
            client = (scope.get("client") or ("-",))[0]
            LOG.info("%s %s %s %s %.0f ms", client, scope["method"], shown_path(scope["path"]), status, ms)
            self._note(scope["path"], status)
        return None

    async def _guarded(self, scope: Any, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}

        async def refuse(status: int, message: str) -> None:
            more = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
            more |= {"Connection": "close"} if status in (408, 413, 503) else {}
            await JSONResponse(error_body(status, message), status, more)(scope, receive, send)

        if scope["state"].get(CROWDED):
            return await refuse(503, "Too many connections are open; try again later.")
        host = re.sub(r":[0-9]*$", "", headers.get("host", "").lower())
        if self._local and not is_here(host):
            return await refuse(
                403, "This server answers to localhost and 127.0.0.1 only; start it with a key to use another name."
            )
        owner = self._keys.owner_of(headers.get("authorization", ""))
        scope["state"][OWNER] = owner
        if self._keys.digests and scope["path"] not in OPEN and owner is None:
            return await refuse(401, "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.")
        if scope["method"] != "POST":
            return await self._app(scope, receive, send)
        if headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            return await refuse(415, "The body must be JSON; send it with 'Content-Type: application/json'.")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await read_body(receive)
        except ClientDisconnect:
            return None
        except TimeoutError:
            return await refuse(408, f"The body did not arrive within {BODY_SECONDS:g} seconds.")
        if body is None:
            return await refuse(413, f"The body is larger than {LARGEST_BODY // 1_000_000} MB.")
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        return await self._app(scope, replay, send)


async def read_body(receive: Receive) -> bytes | None:
    """Return the whole body; None if it is too large. Raises ClientDisconnect if the client leaves first."""
    parts, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > LARGEST_BODY:
            return None
        if not message.get("more_body"):
            return b"".join(parts)


def shown_path(path: str) -> str:
    """Return a path for the log, without what could deceive its reader."""
    return "".join(each if each.isascii() and each.isprintable() and each != " " else "?" for each in path[:80])
