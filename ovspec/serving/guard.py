"""What a request passes before the API sees it: who sends it, and its line in the log."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from ovspec.serving.errors import ApiError, error_answer

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

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
    """Refuses requests without a key or with a foreign host, before their bodies are read, and logs each.

    FastAPI reads a body before it asks for a key, and Starlette answers a foreign host in plain text.

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
            refused = self._refusal(scope)
            await (error_answer(refused) if refused else self._app)(scope, receive, noted)
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

    def _refusal(self, scope: Any) -> ApiError | None:
        """Return the error that a request is answered with, if it may not pass."""
        headers = Headers(scope=scope)
        if scope["state"].get(CROWDED):
            return ApiError(503, "Too many connections are open; try again later.", close=True)
        if self._local and not is_here(re.sub(r":[0-9]*$", "", headers.get("host", "").lower())):
            told = "This server answers to localhost and 127.0.0.1 only; start it with a key to use another name."
            return ApiError(403, told)
        owner = self._keys.owner_of(headers.get("authorization", ""))
        scope["state"][OWNER] = owner
        if self._keys.digests and scope["path"] not in OPEN and owner is None:
            return ApiError(401, "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.")
        return None


def shown_path(path: str) -> str:
    """Return a path for the log, without what could deceive its reader."""
    return "".join(each if each.isascii() and each.isprintable() and each != " " else "?" for each in path[:80])
