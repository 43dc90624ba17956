"""The files on the roads of a prompt and a request are those in ARCHITECTURE.md, and no file imports too many."""

from __future__ import annotations

import ast
import asyncio
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from conftest import ROOT

import ovspec
from ovspec.engine.engine_thread import EngineThread
from ovspec.engine.scheduler import Scheduler
from ovspec.params.serving import ServeParams
from ovspec.server.admission import Service
from ovspec.server.app import make_app
from ovspec.server.endpoints import TextEndpoints
from ovspec.server.guard import Guard

HOME = str(ROOT / "ovspec")
PACKAGES = {"ovspec": ROOT / "ovspec", "ovspec_export": ROOT / "export" / "ovspec_export"}


def listed_under(heading: str) -> set[str]:
    """Return the files that ARCHITECTURE.md lists under a heading."""
    road = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition(f"### {heading}\n")[2]
    return set(re.findall(r"\d+\. `([\w/]+\.py)`", road.partition("\n#")[0]))


def file_of(frame: Any) -> str | None:
    """Return the file of ovspec that a frame runs, if it is one."""
    name = frame.f_code.co_filename
    return Path(name).relative_to(HOME).as_posix() if name.startswith(HOME) else None


def test_the_folders_are_the_ones_in_the_docs() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## The folders\n")[2]
    listed = re.findall(r"(?m)^\| `(\w+)(?:/|\.py)` \|", section.partition("\n## ")[0])
    package = ROOT / "ovspec"
    folders = {file.parent.name for file in package.glob("*/__init__.py")}
    beside = {file.stem for file in package.glob("*.py")} - {"__init__", "__main__", "compat", "guidance"}
    assert set(listed) == folders | beside
    assert len(folders) <= 15 and len(beside) <= 1


def test_the_road_of_a_prompt_is_the_one_in_the_docs() -> None:
    lm, passed = ovspec.load(ROOT / "models" / "demo", "none", engine="paged"), set[str | None]()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            passed.add(file_of(frame))

    for _ in range(2):
        lm.generate("def fib(", max_tokens=8)
    sys.setprofile(note)
    try:
        lm.generate("def fib(", max_tokens=8)
    finally:
        sys.setprofile(None)
    passed.discard(None)
    assert passed == listed_under("The road of a prompt")
    assert len(passed) <= 14


def test_the_road_of_a_request_is_the_one_in_the_docs() -> None:
    """From the endpoint to the scheduler, whose own calls aren't followed, and back to the stream."""
    passed, before, inside = set[str | None](), set[str | None](), threading.local()
    scheduling = {each.__code__ for each in (Scheduler.step, Scheduler.remove, Scheduler.reset)}

    def note(frame: Any, event: str, _: Any) -> None:
        if frame.f_code is TextEndpoints.answer.__code__ and not before:
            outer = frame.f_back
            while outer:  # the guard and the route, which wrap the endpoint
                before.add(file_of(outer))
                outer = outer.f_back
        if event == "call" and before and not getattr(inside, "scheduler", False):
            passed.add(file_of(frame))
        if frame.f_code in scheduling and event in ("call", "return"):
            inside.scheduler = event == "call"

    async def ask() -> str:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": True}
        async with client:
            return (await client.post("/v1/chat/completions", json=body)).text

    threading.setprofile(note)
    try:
        lm = ovspec.load(ROOT / "models" / "demo", "none", engine="paged")
        engine = EngineThread(lm.runtime, rows=4)
        engine.start()
        app: Any = Guard(make_app(Service(lm, engine, ["demo"], ServeParams())), [], True, lambda *_: None)
        asyncio.run(ask())
        passed.clear()
        before.clear()
        sys.setprofile(note)
        try:
            assert "[DONE]" in asyncio.run(ask())
        finally:
            sys.setprofile(None)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    engine.end()
    assert passed - before == listed_under("The road of a request")
    assert len(passed - before) <= 15


def test_the_tests_of_each_file_are_where_the_docs_say() -> None:
    """In a file of its name, or in one that its folder's row names; a row names no file that needs it no more."""
    rows = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    listed, tested_in = set[str](), set[str]()
    for folder, cell in re.findall(r"(?m)^\| `(\w+)/` \| (.*) \|$", rows):
        for files, tests in re.findall(r"([^;]+): ([^;]+)", cell):
            listed |= {f"{folder}/{name}" for name in re.findall(r"`([\w/]+)`", files)}
            tested_in |= set(re.findall(r"`([\w/]+)`", tests))
    assert not [name for name in tested_in if not (ROOT / "tests" / f"{name}.py").is_file()]
    others = {file.removesuffix(".py") for file in all_files() if not has_tests_of_its_name(file)}
    folders = {name for name in listed if name.endswith("/")}
    assert {name for name in others if not name.startswith(tuple(folders))} == listed - folders
    assert all(any(name.startswith(folder) for name in others) for folder in folders)


def test_no_file_imports_more_than_15_modules() -> None:
    """Of ovspec and its exporter, also within functions and for types alone."""
    excepted = {ROOT / "ovspec" / "server" / name for name in ("admission.py", "endpoints.py")}  # issue 69
    files = [file for package in PACKAGES.values() for file in package.rglob("*.py")]
    numbers = {file: len(set(modules_in(file))) for file in files}
    assert {file for file, number in numbers.items() if number > 15} <= excepted
    assert max(numbers.values()) > 9, "nothing is counted"


def modules_in(file: Path) -> Iterator[str]:
    """Yield the modules of both packages that a file imports, or imports names from."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in PACKAGES)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in PACKAGES:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                package = PACKAGES[name.partition(".")[0]].parent
                yield name if (package / name.replace(".", "/")).with_suffix(".py").is_file() else node.module


def all_files() -> Iterator[str]:
    """Yield the modules of both packages, such as ``cache/paged.py`` and ``export/sources.py``."""
    for package in PACKAGES.values():
        for file in package.rglob("[!_]*.py"):
            if file.parent != ROOT / "ovspec":  # public names alone
                yield ("" if package.name == "ovspec" else "export/") + file.relative_to(package).as_posix()


def has_tests_of_its_name(file: str) -> bool:
    return any((ROOT / "tests" / file.partition("/")[0]).rglob(f"test_{Path(file).name}"))
