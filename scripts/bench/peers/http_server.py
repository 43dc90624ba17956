"""HTTP servers of the benchmarks."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

# Connects to this machine directly, regardless of proxies in the environment.
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))
START_SECONDS = 120


class Server:
    """A server on a free port, added to its command as ``--port``; it ends with this process.

    Raises:
        RuntimeError: /health doesn't answer in time.
    """

    def __init__(self, command: list[str], quiet: bool = False) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        with Path(os.devnull).open("w") as nowhere:
            log = nowhere if quiet else 2
            command = [*command, "--port", str(self.port)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        atexit.register(self.stop)
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            try:
                with HTTP.open(f"http://127.0.0.1:{self.port}/health"):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"{command[0]} doesn't start, exit code {self._process.returncode}")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the response to a request."""
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}{path}"
        return HTTP.open(urllib.request.Request(url, json.dumps(body).encode(), headers))

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
