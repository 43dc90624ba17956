"""The page's files: their size, the libraries among them, and how they are sent."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import pytest
from servers import DEMO, StartHere
from starlette.responses import Response

from ovspec.server.page_files import PAGE_FOLDER, find_page_file, read_page_files

MAX_BYTES = 300_000
MAX_LINES = 600
OWN_FILES = sorted(file for file in PAGE_FOLDER.iterdir() if file.is_file())


def test_the_page_is_small() -> None:
    sizes = [len(bytes(file.body)) for file in read_page_files().values()]
    assert 100_000 < sum(sizes) <= MAX_BYTES
    assert max(len(file.read_text(encoding="utf-8").splitlines()) for file in OWN_FILES) <= MAX_LINES


def test_the_libraries_are_those_that_are_listed() -> None:
    """Each has its sum, its version and a licence."""
    vendor = PAGE_FOLDER / "vendor"
    lines = (vendor / "versions.txt").read_text(encoding="utf-8").splitlines()
    listed = {line.split()[0]: line.split()[1:] for line in lines if not line.startswith("#")}
    files = {file.relative_to(vendor).as_posix(): file for file in vendor.rglob("*.js")}
    assert listed.keys() == files.keys()
    for name, (checksum, _, version, _) in listed.items():
        assert sha256(files[name].read_bytes()).hexdigest() == checksum, name
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    licences = {file.stem for file in (vendor / "licences").iterdir()}
    packages = {package for _, package, _, _ in listed.values()}
    assert licences == {"marked", "dompurify", "highlight"} and len(packages) == len(licences)


@pytest.mark.parametrize("file", [file for file in OWN_FILES if file.suffix in (".html", ".js", ".css")], ids=str)
def test_no_file_loads_anything_from_elsewhere(file: Path) -> None:
    """Nor has it scripts or styles in its HTML, or paths that a proxy's sub-path would break."""
    text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text)
    assert not re.search(r"""(?:src|href|from|import|fetch|send|getJson)[=( ]+["'`]/""", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    if file.suffix == ".html":
        assert not re.search(r"<style|\son[a-z]+=|\sstyle=|<script(?![^>]* src=)", text)


def test_how_they_are_sent(start_here: StartHere, tmp_path: Path) -> None:
    """Without a key, which everything else needs; with a strict policy; once, if the browser has it."""
    keys = tmp_path / "keys"
    keys.write_text("secret", "utf-8")
    small = (DEMO / "draft", "--draft", "none", "--precision", "f32", "--arithmetic", "fast")
    server = start_here(*small, "--api-key-file", keys)
    page = server.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert policy["require-trusted-types-for"] == "'script'"
    for path in re.findall(r'(?:src|href)="(page/[^"]+)"', page.text):
        file = server.get(f"/{path}")
        assert file.status_code == 200 and file.headers["x-content-type-options"] == "nosniff"
        again = server.get(f"/{path}", headers={"If-None-Match": file.headers["etag"]})
        assert again.status_code == 304 and not again.content
    assert server.get("/page/app.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert server.get("/page/../server.py").status_code in (401, 404)
    assert server.get("/page/nothing.js").status_code == 401
    assert server.get("/page/nothing.js", headers={"x-api-key": "secret"}).status_code == 404
    assert server.get("/v1/models").status_code == 401


def test_a_file_that_there_is_not() -> None:
    assert find_page_file("/page/server.py", {}) is None
    assert isinstance(find_page_file("/", {"if-none-match": "x"}), Response)
