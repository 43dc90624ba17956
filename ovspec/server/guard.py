"""What a request passes before the API sees it: who sends it, and its line in the log."""

import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Callable
from itertools import islice
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ovspec.protocols.bodies import LONGEST, MOST_NAMED
from ovspec.server.errors import REQUEST_ID, ApiError, error_answer, is_anthropics

OPEN = ("/health", "/ready")  # without a key
# What a request's state holds: the number of its key, how its stream has ended, and the fields that are ignored.
OWNER, OUTCOME, IGNORED = "owner", "outcome", "ignored"
HEADER = "X-Ovspec-Ignored"
MOST_TOLD = 100  # ignored fields that the log names
LOG = logging.getLogger("ovspec.access")


def is_here(host: str) -> bool:
    """Return whether ``host`` names this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def ignored_in(state: dict[str, Any]) -> list[str]:
    """Return what was ignored of a request, without what could deceive who reads it."""
    safe = (re.sub(r"[^\w.-]", "?", name[:LONGEST], flags=re.ASCII) or "?" for name in state.get(IGNORED, ()))
    return [*islice(dict.fromkeys(safe), MOST_NAMED)]


class Guard:
    """Refuses requests without a key or with a foreign host, before their bodies are read, and logs each.

    It also names the fields of a request that are ignored: in a header of the answer, and once in the log.
    FastAPI reads a body before it asks for a key, and Starlette answers a foreign host in plain text.

    Args:
        keys: the keys that clients may use; none if no key is needed.
        local: whether only programs on this machine are served, without a key. Then a request must name this machine
            as its host, so that a web page whose name points here reaches nothing.
        note: called with the scope and the status of each request.
    """

    def __init__(self, app: ASGIApp, keys: list[str], local: bool, note: Callable[[Scope, int], None]) -> None:
        self._app, self._local, self._note = app, local, note
        self._keys = [key.encode() for key in keys]
        self._told = set[str]()  # ignored fields that the log has named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status, state = time.monotonic(), 0, scope.setdefault("state", {})

        id = state[REQUEST_ID] = f"req_{secrets.token_hex(12)}"
        id_header = "request-id" if is_anthropics(scope["path"]) else "x-request-id"

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                headers[id_header] = id
                if ignored := ignored_in(state):
                    headers[HEADER] = ", ".join(ignored)
            await send(message)

        try:
            refused = self._refusal(scope)
            await (error_answer(refused, scope) if refused else self._app)(scope, receive, noted)
        except Exception:
            status = 500  # whatever a stream has begun with
            raise
        finally:
            status = state.get(OUTCOME) or status or 499
            ms = 1e3 * (time.monotonic() - began)
            client = (scope.get("client") or ("-",))[0]
            path = quote(scope["path"][:80])  # without what could deceive the log's reader
            LOG.info("%s %s %s %s %.0f ms", client, scope["method"], path, status, ms)
            self._tell(ignored_in(state))
            self._note(scope, status)

    def _tell(self, ignored: list[str]) -> None:
        """Name ignored fields in the log, each once, and not more than strangers may fill it with."""
        for name in ignored:
            if name not in self._told and len(self._told) < MOST_TOLD:
                self._told.add(name)
                LOG.info("requests have %s, which is ignored", name)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Return the error that a request is answered with, if it may not pass; note the owner of its key."""
        headers = Headers(scope=scope)
        if self._local and not is_here(re.sub(r":[0-9]*$", "", headers.get("host", "").lower())):
            told = "This server answers to localhost and 127.0.0.1 only; start it with a key to use another name."
            return ApiError(403, told)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        sent = (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
        owners = [self._owner_of(key) for key in sent]
        owner = scope["state"][OWNER] = next((each for each in owners if each is not None), None)
        if self._keys and scope["path"] not in OPEN and owner is None:
            how = "'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            return ApiError(401, f"The API key is missing or wrong; send it as {how}.")
        return None

    def _owner_of(self, key: str) -> int | None:
        """Return the number of a key, or None; takes as long for a wrong one."""
        found = [secrets.compare_digest(key.strip().encode(), known) for known in self._keys]
        return found.index(True) if any(found) else None
