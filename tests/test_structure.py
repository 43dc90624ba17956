"""The files on the roads of a prompt and a request are those in ARCHITECTURE.md, and no file imports too many."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from conftest import ROOT
from roads import Road

import ovspec
from ovspec.cli.generate import generate
from ovspec.engine.engine_thread import EngineThread
from ovspec.ir.large_pages import LargePageMover
from ovspec.params import checks
from ovspec.params.serving import ServeParams
from ovspec.protocols import requests
from ovspec.server.access import AccessMiddleware
from ovspec.server.admission import WorkerThreads
from ovspec.server.app import make_app
from ovspec.server.context import ServerContext
from ovspec.server.endpoints import TextEndpoints

PACKAGES = {"ovspec": ROOT / "ovspec", "ovspec_export": ROOT / "export" / "ovspec_export"}


def test_the_folders_are_the_ones_in_the_docs() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## The folders\n")[2]
    listed = re.findall(r"(?m)^\| `(\w+)(?:/|\.py)` \|", section.partition("\n## ")[0])
    package = ROOT / "ovspec"
    folders = {file.parent.name for file in package.glob("*/__init__.py")}
    beside = {file.stem for file in package.glob("*.py")} - {"__init__", "__main__", "compat", "guidance", "ray"}
    assert set(listed) == folders | beside
    assert len(folders) <= 16 and len(beside) <= 1


def listed_under(heading: str) -> list[str]:
    """Return the files that ARCHITECTURE.md lists under a heading."""
    road = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition(f"### {heading}\n")[2]
    return re.findall(r"`([\w/]+\.py)`", road.partition("\n#")[0])


@pytest.fixture(scope="module")
def demo() -> ovspec.LanguageModel:
    return ovspec.load(ROOT / "models" / "demo", "none", engine="paged")


def test_the_road_of_a_prompt_is_the_one_in_the_docs(demo: ovspec.LanguageModel) -> None:
    road = Road(ovspec.LanguageModel.generate)
    for _ in range(2):
        demo.generate("def fib(", max_tokens=8)
    sys.setprofile(road.note)
    try:
        demo.generate("def fib(", max_tokens=8)
    finally:
        sys.setprofile(None)
    assert road.files == listed_under("The path of a prompt")
    assert len(road.stops) <= 54


def test_the_road_of_a_command_is_the_one_in_the_docs(
    demo: ovspec.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the loading of the model."""
    monkeypatch.setattr(ovspec, "load", lambda *_, **__: demo)
    assert generate.callback
    road = Road(inspect.unwrap(generate.callback))
    arguments = [str(ROOT / "models" / "demo"), "def fib(", "--max-tokens", "8"]
    assert CliRunner().invoke(generate, arguments).exit_code == 0
    made = counted(monkeypatch, checks, "check_param_combinations")
    assert CliRunner().invoke(generate, arguments).exit_code == 0
    assert len(made) == 1, "params are made once"
    sys.setprofile(road.note)
    try:
        CliRunner().invoke(generate, arguments)
    finally:
        sys.setprofile(None)
    assert road.files == listed_under("The path of a command")
    assert len(road.stops) <= 82


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    """Return a list that grows with each call of a function from now on."""
    calls, function = list[None](), getattr(owner, name)

    def counting(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, counting)
    return calls


def test_the_road_of_a_request_is_the_one_in_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the endpoint to the scheduler, whose own calls aren't followed, and back to the stream."""
    # Weights are moved between rounds, of which some may come while the request is on its way.
    monkeypatch.setattr(LargePageMover, "move_in_steps", lambda _: iter(()))
    monkeypatch.setattr(LargePageMover, "start_mover_thread", lambda _: None)
    road = Road(TextEndpoints.answer_request, scheduled=False)

    async def ask() -> str:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": True}
        async with client:
            return (await client.post("/v1/chat/completions", json=body)).text

    threading.setprofile(lambda *event: tracing[0](*event))
    tracing: list[Any] = [lambda *_: None]
    try:
        lm = ovspec.load(ROOT / "models" / "demo", "none", engine="paged")
        engine = EngineThread(lm.runtime, max_rows=4)
        engine.start()
        app: Any = AccessMiddleware(
            make_app(ServerContext(lm, engine, ["demo"], ServeParams())), [], True, lambda *_: None
        )
        asyncio.run(ask())
        with monkeypatch.context() as counting:
            made, hops = (
                counted(counting, requests, "check_param_combinations"),
                counted(counting, WorkerThreads, "run_in_thread"),
            )
            asyncio.run(ask())
        assert len(made) == len(hops) == 1, "params are made once, in one hop to a thread"
        tracing[0] = road.note
        sys.setprofile(road.note)
        try:
            assert "[DONE]" in asyncio.run(ask())
        finally:
            sys.setprofile(None)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    engine.stop()
    assert {*road.files} == {*listed_under("The path of a request")}  # threads take turns as they like
    assert len(road.files) <= 21


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
    files = [file for package in PACKAGES.values() for file in package.rglob("*.py")]
    numbers = {file: len(set(modules_in(file))) for file in files}
    assert not [file for file, number in numbers.items() if number > 15]
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
