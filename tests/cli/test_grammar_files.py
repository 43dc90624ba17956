"""``--grammar`` and ``--gbnf`` take a file, in every command that generates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands_here import Command, commands_here
from conftest import ROOT

DEMO = str(ROOT / "models" / "demo" / "draft")  # which loads sooner than the target
GRAMMARS = {"--grammar": 'start: "yes" | "no"\n', "--gbnf": 'root ::= "yes" | "no"\n'}


@pytest.fixture
def ovspec(cache_dir: Path) -> Iterator[Command]:
    yield from commands_here(cache_dir)


@pytest.mark.slow  # test_every_option.py has quick ones
@pytest.mark.parametrize("option", GRAMMARS)
@pytest.mark.parametrize("command", ["generate", "chat", "batch"])
def test_a_grammar_in_a_file(ovspec: Command, command: str, option: str, tmp_path: Path) -> None:
    grammar, prompts, output = tmp_path / "grammar", tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    grammar.write_text(GRAMMARS[option], encoding="utf-8")
    prompts.write_text("Is it?\n", encoding="utf-8")
    arguments = {
        "generate": [DEMO, "Is it?"],
        "chat": [DEMO],
        "batch": [DEMO, str(prompts), "-o", str(output)],
    }[command]
    done = ovspec(command, *arguments, option, grammar, stdin="Is it?\n")
    assert done.returncode == 0, done.stderr
    text = json.loads(output.read_text(encoding="utf-8"))["text"] if command == "batch" else done.stdout.strip()
    assert text in ("yes", "no")
