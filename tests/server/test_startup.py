"""The server answers while its model is exported: with status 503, and how far that is."""

from __future__ import annotations

import threading

import httpx
import pytest

from ovspec.base.progress import show_step
from ovspec.server.server import open_socket
from ovspec.server.startup import answer_while_preparing


def test_requests_meanwhile(capsys: pytest.CaptureFixture[str]) -> None:
    """Afterwards the socket is still open, and nobody answers until the server does."""
    listener = open_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with listener, answer_while_preparing(listener, [], insecure=False):
        starting = httpx.get(f"{url}/ready").json()
        with show_step("org/model: fetching") as step:
            step.text = "org/model: fetching 1.0 MB of 2.0 MB"
            ready = httpx.get(f"{url}/ready")
            text = httpx.post(f"{url}/v1/chat/completions", json={})
            message = httpx.post(f"{url}/v1/messages", json={})
        assert starting == {"status": "preparing", "progress": "starting"}
        assert (ready.status_code, ready.json()["status"]) == (503, "preparing")
        assert ready.json()["progress"] == "org/model: fetching 1.0 MB of 2.0 MB, 0 s"
        assert (text.status_code, text.headers["Retry-After"]) == (503, "10")
        assert "isn't ready yet (org/model: fetching 1.0 MB of 2.0 MB, 0 s)" in text.json()["error"]["message"]
        assert message.json()["type"] == "error"
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        assert httpx.get(f"{url}/ready", headers={"Host": "example.com"}).status_code == 403
    assert "answers with status 503 until the model is ready" in capsys.readouterr().err


def test_keys_and_the_wait_afterwards() -> None:
    listener = open_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with answer_while_preparing(listener, ["a-key"], insecure=False):
        assert httpx.get(f"{url}/ready").status_code == 503
        page = httpx.get(f"{url}/")  # which shows the progress
        assert page.status_code == 200 and "<!doctype html>" in page.text
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer a-key"}).status_code == 503
    with listener:
        statuses: list[int] = []
        client = threading.Thread(target=lambda: statuses.append(httpx.get(f"{url}/ready", timeout=20).status_code))
        client.start()
        listener.setblocking(True)  # uvicorn has changed it
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        client.join(20)
        assert statuses == [200]
