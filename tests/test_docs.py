"""Code in README and docs works: Python blocks run, commands parse, and the quickstart runs as it stands."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import check_docs
import click
import pytest
from conftest import DRAFT, ROOT, TARGET

from ovspec.cli import COMMANDS

PAGES = [page.relative_to(ROOT).as_posix() for page in check_docs.pages()]
BLOCK = re.compile(r"^(<!-- not run here.*?-->\n)?```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHELL = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: str, skipped: bool = False) -> list[str]:
    """Return the Python blocks of a page; with ``skipped`` also those that need another environment."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [code for marked, code in BLOCK.findall(text) if skipped or not marked]


def run(page: str, pair: Path, skipped: bool = False) -> dict[str, Any]:
    """Run the Python blocks of a page one after the other, and return the names that they define."""
    code = "\n".join(blocks(page, skipped)).replace('"my-pair"', repr(str(pair)))
    names: dict[str, Any] = {}
    exec("\n".join(line for line in code.splitlines() if "export=True" not in line), names)
    return names


CLUSTER = "docs/how-to/batches-on-a-cluster.md"  # takes long; integrations/test_ray.py runs the same in quick runs


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page == CLUSTER)) for page in PAGES if blocks(page)]
)
def test_python_on_a_page_runs(page: str, pair: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # the repository stays clean
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    names = run(page, pair)
    if check := CHECKS.get(page):
        check(names)


def readme(names: dict[str, Any]) -> None:
    age = int(re.findall(r"\d+", names["person"].text)[0])
    assert names["person"].finish_reason in ("stop", "eos")
    assert age <= 120
    assert names["best"] in ("'red'", "'green'")


def sessions(names: dict[str, Any]) -> None:
    assert names["kind"] in ("server", "client")
    assert names["likely"] < 0
    assert [message["role"] for message in names["chat"].messages] == ["system", *["user", "assistant"] * 2]


def own_drafter(names: dict[str, Any]) -> None:
    generated = names["lm"].generate(names["prompt"], max_tokens=40, lookahead=4)
    assert generated.stats.accepted > 0
    assert names["model"].generate([[5, 6, 7]], 8, 2, among=3).shape == (1, 11)


def constraints(names: dict[str, Any]) -> None:
    assert names["answer"].text in ("yes", "no")


def tools(names: dict[str, Any]) -> None:
    assert names["answer"].tool_calls[0].name == "get_weather"
    assert [message["role"] for message in names["chat"]] == ["user", "assistant", "tool"]


def cluster(names: dict[str, Any]) -> None:
    names["ray"].shutdown()
    assert [row["prompt"] for row in names["rows"]] == ["def fib(", "import os\n"]
    assert all(row["text"] and row["error"] is None for row in names["rows"])


CHECKS = {
    CLUSTER: cluster,
    "docs/how-to/use-tools.md": tools,
    "README.md": readme,
    "docs/how-to/sessions-and-chats.md": sessions,
    "docs/how-to/write-a-drafter.md": own_drafter,
    "docs/how-to/constrain-output.md": constraints,
}


def test_every_check_is_of_a_page() -> None:
    assert {page for page in CHECKS if blocks(page)} == set(CHECKS)


# ---------------------------------------------------------------- commands


def commands(page: str) -> Iterator[list[str]]:
    """Yield the arguments of each ovspec command in the shell blocks of a page."""
    for block in SHELL.findall((ROOT / page).read_text(encoding="utf-8")):
        bare = re.sub(r"(^|\s)#.*$", "", block.replace("\\\n", " "), flags=re.MULTILINE)
        lexer = shlex.shlex(bare, posix=True, punctuation_chars=";|&\n")
        lexer.whitespace, lexer.whitespace_split = " \t", True
        for is_command, words in itertools.groupby(lexer, lambda word: not set(word) <= set(";|&\n")):
            first, *arguments = words
            if is_command and first == "ovspec":
                yield arguments


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md" and list(commands(page))])
def test_commands_on_a_page_have_only_options_that_exist(page: str) -> None:
    for name, *arguments in commands(page):
        assert name in COMMANDS, f"ovspec {name}"
        command: click.Command = getattr(importlib.import_module(f"ovspec.cli.{name}"), name)
        with click.Context(command, info_name=name) as context:
            command.make_parser(context).parse_args(arguments)


NEEDED = {"export": "export", "distill": "export", "serve": "serve", "--ray": "ray"}  # command or option -> extra


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/batches-on-a-cluster.md", "docs/how-to/distill-a-head.md"])
def test_what_the_commands_of_a_page_need_is_installed_there(page: str) -> None:
    blocks = "\n".join(SHELL.findall((ROOT / page).read_text(encoding="utf-8")))
    installed = {
        extra for extras in re.findall(r'pip install "[^\["]*\[([\w,]+)\]"', blocks) for extra in extras.split(",")
    }
    words = {word for command in commands(page) for word in command}
    assert {extra for name, extra in NEEDED.items() if name in words} <= installed


@pytest.mark.slow
def test_the_quickstart_runs(tmp_path: Path, command_environment: dict[str, str]) -> None:
    """With the checkpoints of the tests' pair as TARGET and DRAFT."""
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    own = text.partition("## Use your own model")[2]
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```", own, re.DOTALL | re.MULTILINE))
    script = re.sub(r"^(ovspec .* --compare)$", r"\1 || [ $? = 1 ]", script, flags=re.MULTILINE)  # near-ties
    script = re.sub(r"^ovspec ", f"{sys.executable} -m ovspec ", script, flags=re.MULTILINE)
    script = script.replace("TARGET", str(TARGET)).replace("DRAFT", str(DRAFT))
    environment = {**os.environ, **command_environment}
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert "tokens/s" in done.stderr.decode()


# ---------------------------------------------------------------- lengths and links


def test_lengths_and_links() -> None:
    assert list(check_docs.problems()) == []


def test_wrong_links_and_long_pages_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# A b\n[a](#a-b) [b](#c) [c](docs/x.md)\n" * 60, encoding="utf-8")
    (tmp_path / "ARCHITECTURE.md").write_text("word " * 1001, encoding="utf-8")
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    found = set(check_docs.problems())
    assert found == {
        "README.md: 120 lines, at most 80",
        "ARCHITECTURE.md: 1001 words, at most 1000",
        "README.md: #c: there is no such heading",
        "README.md: docs/x.md is not there",
    }
