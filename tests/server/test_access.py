"""Who is let in: keys in either header, and the names of this machine where no key is needed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from ovspec.server.access import KEY_NUMBER, AccessMiddleware

KEYS = ["first", "second"]


def asked(keys: list[str], headers: dict[str, str], path: str = "/v1/models") -> tuple[int, int | None]:
    """Return the status of a request without a server, and the number of its key."""
    statuses, noted = list[int](), list[int]()
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": path}
    scope["headers"] = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def receive() -> Any:
        raise AssertionError("no body is read")

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    guard = AccessMiddleware(PlainTextResponse("in"), keys, not keys, lambda _, status: noted.append(status))
    asyncio.run(guard(scope, receive, send))
    assert statuses == noted and len(noted) == 1
    return statuses[0], scope["state"].get(KEY_NUMBER)


@pytest.mark.parametrize(
    ("headers", "owner"),
    [
        ({"Authorization": "Bearer first"}, 0),
        ({"Authorization": "bearer  second "}, 1),
        ({"X-API-Key": "second", "Authorization": "Bearer wrong"}, 1),
        ({"X-API-Key": "wrong"}, None),
        ({"Authorization": "Basic first"}, None),
        ({"Authorization": "Bearer firstsecond"}, None),
        ({"Authorization": "Bearer "}, None),
        ({}, None),
    ],
)
def test_each_key_is_an_owner_of_its_own(headers: dict[str, str], owner: int | None) -> None:
    assert asked(KEYS, headers) == (401 if owner is None else 200, owner)
    assert asked(KEYS, headers, "/health") == (200, owner)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:80", 200),
        ("[::1]:80", 200),
        ("localhost.example.com", 403),
        ("example.com:8000", 403),
        ("127.0.0.1.example.com", 403),
        ("192.168.0.1", 403),
        ("", 403),
    ],
)
def test_without_a_key_only_this_machines_names_are_answered(host: str, status: int) -> None:
    """A web page whose own name points here could otherwise use the server."""
    assert asked([], {"Host": host}) == (status, None)
    assert asked(KEYS, {"Host": host, "X-API-Key": "first"}) == (200, 0)
