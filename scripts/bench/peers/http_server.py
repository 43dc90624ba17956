"""Starts HTTP servers for the benchmarks."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request

# Connects to this machine directly, whatever proxy the environment names.
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))
START_SECONDS = 120


def start(command: list[str], log: int = 2) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server on a free port, given as ``--port``; return its process and the port when /health answers.

    ``log``: the file descriptor that it writes to.

    Raises:
        RuntimeError: it doesn't start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            with HTTP.open(f"http://127.0.0.1:{port}/health"):
                return process, port
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    process.terminate()
    raise RuntimeError(f"{command[0]} doesn't start, exit code {process.wait()}")
