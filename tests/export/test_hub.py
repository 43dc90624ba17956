"""Models from the Hugging Face hub, served by a small server that answers as the hub does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import CHECKPOINTS
from heads import write_head
from ovspec_export.sources import Source

COMMIT = hashlib.sha1(b"a commit").hexdigest()
REQUESTED: list[str] = []
TEMPLATE = "additional_chat_templates/tool_use.jinja"
UNKNOWN = b'{"model_type": "unknowable"}'
SEQ2SEQ = b'{"model_type": "t5", "is_encoder_decoder": true}'
DEEP = b'{"speculators_model_type": "eagle3", "num_hidden_layers": 2}'
IR = {"openvino_model.xml": b"<net/>", "openvino_model.bin": b"weights"}
# By repository, the files that the checkpoint of the draft doesn't have.
REPOSITORIES = {"model": {}, "unknown": {"config.json": UNKNOWN}, "seq2seq": {"config.json": SEQ2SEQ}, "unknown-ir": IR}
REPOSITORIES |= {
    "head": {},
    "deep-head": {"config.json": b'{"speculators_model_type": "eagle3", "num_hidden_layers": 2}'},
}


def files_of(repository: str) -> dict[str, bytes]:
    """Return a repository's files by path."""
    if repository == "unknown-ir":
        return IR | {"config.json": UNKNOWN}
    if repository == "head":
        return HEAD | {"optimizer.bin": b"a pickle", "modeling_x.py": b"raise SystemExit"}
    files = {path.name: path.read_bytes() for path in (CHECKPOINTS / "draft").iterdir()}
    files |= {"pytorch_model.bin": b"a pickle", "modeling_x.py": b"raise SystemExit"}
    files |= {TEMPLATE: b"{{ tools }}", "additional_chat_templates/old/a.jinja": b"", "onnx/config.json": b"{}"}
    return files | REPOSITORIES[repository]


def head_files() -> dict[str, bytes]:
    """Return the files of a head whose weights are pickled."""
    config = json.loads((CHECKPOINTS / "draft" / "config.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        head = write_head(Path(folder) / "head", target=config, pickled=True, shards=2)
        return {path.name: path.read_bytes() for path in head.iterdir()}


HEAD = head_files()


class Hub(BaseHTTPRequestHandler):
    """A hub with ``org/model``, which also has pickled weights, and ``org/gated``, which requires consent.

    The others are of a family that can't be exported: ``org/unknown``, ``org/unknown-ir``, which is an IR, and
    ``org/seq2seq``. ``org/head`` and ``org/deep-head`` are heads for speculation.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, body: bool) -> None:
        REQUESTED.append(self.path)
        parts = self.path.strip("/").split("/")
        files = files_of(next((part for part in parts if part in REPOSITORIES), "model"))
        if "gated" in parts:
            return self.send(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "no"}, body)
        if not {*REPOSITORIES} & {*parts}:
            return self.send(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no"}, body)
        if "nowhen" in parts:
            return self.send(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no"}, body)
        if parts[0] == "api":
            siblings = [{"rfilename": name} for name in files]
            info = {"id": "org/model", "modelId": "org/model", "sha": COMMIT, "siblings": siblings, "tags": []}
            return self.send(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, body)
        content = files[self.path.partition(f"/resolve/{COMMIT}/")[2]]
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return self.send(200, content, headers, body)

    def send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    REQUESTED.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def python(arguments: list[str], endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home)}
    environment |= {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=120)


def export(name: str, output: Path, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    return python(["-m", "ovspec", "export", name, "-o", str(output)], endpoint, home)


EXPORTS = """
import contextlib, io, json, sys
from ovspec.cli import main

names, output, found = json.loads(sys.argv[1]), sys.argv[2], {}
for name in names:
    sys.argv[1:] = ["export", name, "-o", output]
    with contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            main()
        except SystemExit as ended:
            found[name] = ended.code, told.getvalue().strip()
print(json.dumps(found))
"""


def refusals(names: Sequence[str], output: Path, endpoint: str, home: Path) -> dict[str, str]:
    """Export several models in one process and return the last line that each prints; all must fail."""
    done = python(["-c", EXPORTS, json.dumps(names), str(output)], endpoint, home)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    assert {code for code, _ in found.values()} == {1}, found
    assert not [told for _, told in found.values() if "Traceback" in told]
    assert not output.exists()
    return {name: told.splitlines()[-1] for name, (_, told) in found.items()}


FINDS = """
import json, sys
from ovspec_export.source_lookup import find_source

found = map(find_source, sys.argv[1:])
print(json.dumps([[each.name, str(each.path), each.is_ir, each.revision] for each in found]))
"""


def find(names: Sequence[str], endpoint: str, home: Path) -> list[Source]:
    """Return what ``find_source`` finds in a process of its own."""
    done = python(["-c", FINDS, *names], endpoint, home)
    assert done.returncode == 0, done.stderr
    return [Source(name, Path(folder), is_ir, revision) for name, folder, is_ir, revision in json.loads(done.stdout)]


@pytest.mark.slow
def test_export_from_the_hub(hub: str, tmp_path: Path) -> None:
    done = export("org/model", tmp_path / "out", hub, tmp_path / "home")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "ovspec.json").read_text(encoding="utf-8"))
    assert manifest["target"]["source"] == "org/model"
    assert manifest["target"]["revision"] == COMMIT
    assert COMMIT[:12] in done.stderr
    assert any(path.endswith("model.safetensors") for path in REQUESTED)
    assert not [path for path in REQUESTED if path.endswith((".bin", ".py"))], "a file that can run code was fetched"
    assert any(path.endswith("/revision/main") for path in REQUESTED)
    REQUESTED.clear()
    done = export("org/model@v1.0", tmp_path / "tagged", hub, tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert any(path.endswith("/revision/v1.0") for path in REQUESTED)
    # Again without a network: the model is in the hub's cache.
    done = export("org/model", tmp_path / "again", "http://127.0.0.1:9", tmp_path / "home")
    assert done.returncode == 0, done.stderr


CANNOT_BE_HAD = {
    "org/nothing": "no such folder, and no such model on the Hugging Face hub; check the spelling",
    "org/gated": "the model is gated",
    "org/model@nowhen": "the model has no revision nowhen; give a commit, a tag or a branch",
    "org/model@": "no revision after the @",
}


CANNOT_BE_EXPORTED = {
    "org/unknown": "of the family unknowable",
    "org/seq2seq": "encoder-decoder",
    "org/deep-head": "several layers",
}


def test_what_is_refused_before_its_weights_come(hub: str, tmp_path: Path) -> None:
    """The second time without a network: what was fetched suffices to refuse it."""
    told = refusals([*CANNOT_BE_HAD, *CANNOT_BE_EXPORTED], tmp_path / "out", hub, tmp_path / "home")
    for name, message in CANNOT_BE_HAD.items():
        assert told[name].startswith(f"Error: {name}: ")
        assert message in told[name]
    again = refusals(["org/model", *CANNOT_BE_EXPORTED], tmp_path / "out", "http://127.0.0.1:9", tmp_path / "home")
    for found in (told, again):
        assert all(message in found[name] for name, message in CANNOT_BE_EXPORTED.items()), found
    assert again["org/model"].startswith("Error: org/model: no such folder, no complete copy in the hub's cache")
    assert again["org/model"].endswith("check the network, and run the same command to resume the download.")
    for name in CANNOT_BE_EXPORTED:
        asked = [path for path in REQUESTED if f"/{name}/" in path]
        assert any(path.endswith("/config.json") for path in asked)
        assert not [path for path in asked if path.endswith((".safetensors", "/tokenizer.json"))]


def test_what_is_found(hub: str, tmp_path: Path) -> None:
    """The second time without a network, in the hub's cache."""
    names = ("org/model", "org/unknown-ir", "org/head")
    found = find(names, hub, tmp_path / "home")
    check_files_of_one_commit(found[0])
    check_ir_of_an_unknown_family(found[1])
    assert {path.name for path in found[2].path.iterdir()} == set(HEAD), "a head may have pickled weights"
    assert find(names, "http://127.0.0.1:9", tmp_path / "home") == found


def check_files_of_one_commit(source: Source) -> None:
    """What ``main`` named at the beginning is asked for by its commit; of folders only the chat templates come."""
    assert (source.is_ir, source.revision, source.path.name) == (False, COMMIT, COMMIT)
    asked = [path.rpartition("/")[2] for path in REQUESTED if "/model/revision/" in path]
    assert asked == ["main", COMMIT]
    assert (source.path / TEMPLATE).read_bytes() == b"{{ tools }}"
    inside = [path.relative_to(source.path).as_posix() for path in source.path.rglob("*/*") if path.is_file()]
    assert inside == [TEMPLATE]


def check_ir_of_an_unknown_family(source: Source) -> None:
    assert source.is_ir and source.revision == COMMIT
    assert (source.path / "openvino_model.bin").is_file()
