"""A stand-in for the Hugging Face hub: a server on this machine that speaks its protocol to huggingface_hub."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = "hf_stand_in"
PIECE_BYTES = 1 << 16


@dataclass
class Repository:
    """A repository with its files by path, which a test may replace: that makes a new commit.

    gated: its files need a token, as the whole of one that is private does.
    lost_after: bytes of each answer after which the connection breaks; None for never.
    bytes_per_second: how fast a file comes; None for as fast as it can.
    """

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    lost_after: int | None = None
    bytes_per_second: float | None = None

    @property
    def commit(self) -> str:
        contents = [(path, hashlib.sha1(content).hexdigest()) for path, content in sorted(self.files.items())]
        return hashlib.sha1(repr(contents).encode()).hexdigest()


@dataclass
class StandInHub:
    """``requested`` are the paths of all requests so far, with their methods."""

    url: str
    repositories: dict[str, Repository]
    requested: list[str] = field(default_factory=list)
    commits: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """Return the variables that lead a process here, with its hub's cache in ``home``."""
        variables = {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
        return variables | {"HF_HUB_DISABLE_TELEMETRY": "1"} | ({"HF_TOKEN": token} if token else {})

    def fetched(self, ending: str) -> int:
        """Return how many files whose paths end so were fetched."""
        return sum(line.startswith("GET") and line.endswith(ending) for line in self.requested)


def folder_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder as those of a repository."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def stand_in_hub(**repositories: Repository) -> Iterator[StandInHub]:
    """Serve repositories as ``org/NAME``."""
    hub = StandInHub("", {f"org/{name.replace('_', '-')}": repository for name, repository in repositories.items()})

    class Handler(HubHandler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: StandInHub

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.served.requested.append(f"{self.command} {path}")
        name, is_api, rest = self.parse(path)
        repository = self.served.repositories.get(name)
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.private and not has_token):
            return self.send(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no"})
        self.served.commits[name, repository.commit] = dict(repository.files)
        if is_api:
            return self.describe(name, repository, rest, with_body)
        if repository.gated and not has_token:
            return self.send(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "no"})
        revision, _, file = rest.partition("/")
        content = self.served.commits.get((name, revision), {}).get(file)
        if content is None:
            return self.send(404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "no"})
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": revision,
            "Accept-Ranges": "bytes",
        }
        start = 0
        if match := re.match(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            start = int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self.send(206 if start else 200, headers, content[start:], with_body, repository)

    def parse(self, path: str) -> tuple[str, bool, str]:
        """Return a request's repository, whether it is about the repository, and the revision with the file."""
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return match[1], True, match[2] or "main"
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/(.+)", path)
        return (match[1], False, match[2]) if match else ("", False, "")

    def describe(self, name: str, repository: Repository, revision: str, with_body: bool) -> None:
        commit = repository.commit if revision == "main" else revision
        files = self.served.commits.get((name, commit))
        if files is None:
            return self.send(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no"})
        siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
        answer = {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []}
        return self.send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode(), with_body)

    def send(
        self,
        status: int,
        headers: dict[str, str],
        content: bytes = b"",
        with_body: bool = False,
        repository: Repository | None = None,
    ) -> None:
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(header, value)
        self.end_headers()
        if not with_body:
            return None
        lost_after = repository.lost_after if repository else None
        for start in range(0, len(content), PIECE_BYTES):
            if lost_after is not None and start >= lost_after:
                self.close_connection = True
                return self.connection.close()
            piece = content[start : start + PIECE_BYTES]
            try:
                self.wfile.write(piece)
            except OSError:  # the client was killed
                return None
            if repository and repository.bytes_per_second:
                time.sleep(len(piece) / repository.bytes_per_second)
        return None

    def log_message(self, format: str, *args: object) -> None: ...
