"""A proxy between an agent and a server that makes a small model call a tool: once, with given arguments.

It changes two things of a request: the tool's schema, which then allows these arguments alone, and the tool choice,
which asks for the call first and for none after its result has come. All else passes as it is, streams too.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding", "accept-encoding"}


@dataclass
class Steering:
    """What a tool is called with, and the requests and answers that have passed: (path, body, status, answer)."""

    upstream: str
    tool: str
    arguments: dict[str, Any]
    passed: list[tuple[str, dict[str, Any], int, str]] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> Steering:
        steering = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None: ...

            def pass_on(self) -> None:
                raw = self.rfile.read(int(self.headers.get("content-length") or 0))
                body = json.loads(raw) if raw else {}
                headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
                asked = json.dumps(steering.steered(body)).encode() if body else b""
                parts = list[bytes]()
                with httpx.stream(
                    self.command, steering.upstream + self.path, content=asked, headers=headers, timeout=300
                ) as answer:
                    self.send_response(answer.status_code)
                    for name, value in answer.headers.items():
                        if name.lower() not in HOP:
                            self.send_header(name, value)
                    self.send_header("Connection", "close")
                    self.end_headers()
                    for part in answer.iter_raw():
                        parts.append(part)
                        self.wfile.write(part)
                        self.wfile.flush()
                self.close_connection = True
                steering.passed.append((self.path, body, answer.status_code, b"".join(parts).decode()))

            do_GET = do_POST = do_HEAD = pass_on

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def steered(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request with the tool choice that asks for the call, or for none."""
        if not any(name_of(tool) == self.tool for tool in body.get("tools") or ()):
            return body
        anthropics = any("input_schema" in tool for tool in body["tools"])
        body = {**body, "tools": [self._narrowed(tool) for tool in body["tools"]]}
        if (
            '"tool_result"' in (chat := json.dumps(body))
            or '"function_call_output"' in chat
            or '"role": "tool"' in chat
        ):
            return {**body, "tool_choice": {"type": "none"} if anthropics else "none"}
        named: dict[str, Any] = {"type": "tool" if anthropics else "function", "name": self.tool}
        if "messages" in body and not anthropics:
            named = {"type": "function", "function": {"name": self.tool}}
        return {**body, "tool_choice": named}

    def _narrowed(self, tool: dict[str, Any]) -> dict[str, Any]:
        """Return a tool; that which is to be called takes its arguments alone."""
        if name_of(tool) != self.tool:
            return tool
        schema = {
            "type": "object",
            "properties": {name: {"const": value} for name, value in self.arguments.items()},
            "required": [*self.arguments],
            "additionalProperties": False,
        }
        if "input_schema" in tool:
            return {**tool, "input_schema": schema}
        if "function" in tool:
            return {**tool, "function": {**tool["function"], "parameters": schema}}
        return {**tool, "parameters": schema}


def name_of(tool: dict[str, Any]) -> Any:
    return tool.get("function", tool).get("name")
