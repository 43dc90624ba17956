"""Access to the server: checks of keys and hosts before the API, and the log."""

import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any
from urllib.parse import quote

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ovspec.protocols.bodies import MAX_NAME_LENGTH, MAX_NAMED_FIELDS
from ovspec.server.errors import REQUEST_ID, ApiError, is_anthropic_path, make_error_response
from ovspec.server.page_files import read_page_files

PATHS_WITHOUT_KEY = ("/health", "/ready")  # besides the page, which asks for the key
# The fields of a request's state.
KEY_NUMBER = "key_number"
STREAM_STATUS = "stream_status"
IGNORED_NAMES = "ignored_names"
IGNORED_HEADER = "X-Ovspec-Ignored"
MAX_LOGGED_FIELDS = 100  # ignored fields in the log
ACCESS_LOG = logging.getLogger("ovspec.access")


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine's loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def find_request_key_number(http_request: Request) -> int | None:
    """Return the index of a request's key, or None."""
    return getattr(http_request.state, KEY_NUMBER, None)


def add_ignored_names(http_request: Request, names: Iterable[str]) -> None:
    """Add names of ignored fields, for a response header and the log."""
    setattr(http_request.state, IGNORED_NAMES, [*getattr(http_request.state, IGNORED_NAMES, ()), *names])


def safe_ignored_names(state: dict[str, Any]) -> list[str]:
    """Return the ignored fields of a request, without deceptive characters."""
    ignored_names = state.get(IGNORED_NAMES, ())
    safe_names = (re.sub(r"[^\w.-]", "?", name[:MAX_NAME_LENGTH], flags=re.ASCII) or "?" for name in ignored_names)
    return [*islice(dict.fromkeys(safe_names), MAX_NAMED_FIELDS)]


class AccessMiddleware:
    """Refuses requests without a key or with a foreign host, before reading their bodies, and logs each request.

    It also reports a request's ignored fields: in a response header, and once in the log. FastAPI would read a body
    before checking the key, and Starlette would answer a foreign host in plain text.

    Args:
        keys: the valid keys; empty if no key is needed.
        local_only: serve only clients on this machine, without a key. Then a request's Host header must be this
            machine, as a protection against web pages with DNS names for it.
        on_reply: called with the scope and the status of each request.
    """

    def __init__(self, app: ASGIApp, keys: list[str], local_only: bool, on_reply: Callable[[Scope, int], None]) -> None:
        self._app = app
        self._local_only = local_only
        self._on_reply = on_reply
        self._keys = [key.encode() for key in keys]
        self._logged_fields = set[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_time = time.monotonic()
        status = 0
        state = scope.setdefault("state", {})
        request_id = f"req_{secrets.token_hex(12)}"
        state[REQUEST_ID] = request_id
        id_header = "request-id" if is_anthropic_path(scope["path"]) else "x-request-id"

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[id_header] = request_id
                if ignored_names := safe_ignored_names(state):
                    headers[IGNORED_HEADER] = ", ".join(ignored_names)
            await send(message)

        try:
            app = self._app
            if refusal := self._check_access(scope):
                app = make_error_response(refusal, scope)
            await app(scope, receive, send_with_headers)
        except Exception:
            status = 500  # also for a stream after its status 200
            raise
        finally:
            status = state.get(STREAM_STATUS) or status or 499
            self._log_request(scope, status, 1e3 * (time.monotonic() - start_time))
            self._on_reply(scope, status)

    def _log_request(self, scope: Scope, status: int, duration_ms: float) -> None:
        client = (scope.get("client") or ("-",))[0]
        path = quote(scope["path"][:80])  # without deceptive characters
        ACCESS_LOG.info("%s %s %s %s %.0f ms", client, scope["method"], path, status, duration_ms)
        for field in safe_ignored_names(scope["state"]):  # each field once, and a limited number
            if field not in self._logged_fields and len(self._logged_fields) < MAX_LOGGED_FIELDS:
                self._logged_fields.add(field)
                ACCESS_LOG.info("requests have %s, which is ignored", field)

    def _check_access(self, scope: Scope) -> ApiError | None:
        """Return the error for a refused request; record the index of its key."""
        headers = Headers(scope=scope)
        if self._local_only and not is_loopback(re.sub(r":[0-9]*$", "", headers.get("host", "").lower())):
            refusal = (
                "Without an API key, this server answers only requests to localhost; start the server with "
                "--api-key-file."
            )
            return ApiError(403, refusal)
        scheme, _, bearer_key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            bearer_key = ""
        key_numbers = [self._find_key_number(key) for key in (bearer_key, headers.get("x-api-key", ""))]
        key_number = next((key_number for key_number in key_numbers if key_number is not None), None)
        scope["state"][KEY_NUMBER] = key_number
        needs_key = scope["path"] not in PATHS_WITHOUT_KEY and scope["path"] not in read_page_files()
        if self._keys and needs_key and key_number is None:
            header_advice = "'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            return ApiError(401, f"The API key is missing or wrong; send a valid key as {header_advice}.")
        return None

    def _find_key_number(self, key: str) -> int | None:
        """Return the index of a key, or None, in constant time."""
        key_matches = [secrets.compare_digest(key.strip().encode(), known_key) for known_key in self._keys]
        return key_matches.index(True) if any(key_matches) else None
