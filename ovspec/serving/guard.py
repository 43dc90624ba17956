"""What a request passes before the API sees it: who sends it, and its line in the log."""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Callable
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ovspec.serving.errors import ApiError, error_answer

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


class Keys:
    """The keys that clients may use; none if no key is needed."""

    def __init__(self, *keys: str) -> None:
        self.known = [key.encode() for key in keys]

    def owner_of(self, header: str) -> int | None:
        """Return the number of the key that an Authorization header holds, or None; takes as long for a wrong one."""
        scheme, _, key = header.partition(" ")
        found = [secrets.compare_digest(key.strip().encode(), known) for known in self.known]
        return found.index(True) if scheme.lower() == "bearer" and any(found) else None


class Guard:
    """Refuses requests without a key or with a foreign host, before their bodies are read, and logs each.

    FastAPI reads a body before it asks for a key, and Starlette answers a foreign host in plain text.

    Args:
        keys: the keys that clients may use.
        local: whether only programs on this machine are served, without a key. Then a request must name this machine
            as its host, so that a web page whose name points here reaches nothing.
        note: called with the scope and the status of each request.
    """

    def __init__(self, app: ASGIApp, keys: Keys, local: bool, note: Callable[[Scope, int], None]) -> None:
        self._app, self._keys, self._local, self._note = app, keys, local, note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            path = quote(scope["path"][:80])  # without what could deceive the log's reader
            LOG.info("%s %s %s %s %.0f ms", client, scope["method"], path, status, ms)
            self._note(scope, status)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Return the error that a request is answered with, if it may not pass; note the owner of its key."""
        headers = Headers(scope=scope)
        if scope["state"].get(CROWDED):
            return ApiError(503, "Too many connections are open; try again later.", close=True)
        if self._local and not is_here(re.sub(r":[0-9]*$", "", headers.get("host", "").lower())):
            told = "This server answers to localhost and 127.0.0.1 only; start it with a key to use another name."
            return ApiError(403, told)
        owner = scope["state"][OWNER] = self._keys.owner_of(headers.get("authorization", ""))
        if self._keys.known and scope["path"] not in OPEN and owner is None:
            return ApiError(401, "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.")
        return None
