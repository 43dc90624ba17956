"""Messages name options as Python does, and as flags on the command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest
from conftest import ROOT

import ovspec
from ovspec.cli import cli, replace_option_names_by_flags

MESSAGES = {
    "`overwrite` or `overwrite=True`": "`overwrite` or `overwrite=True`",  # not an option of this command
    "`draft_device` and `properties`": "--draft-device and --property",
    "`max_tokens`, not `n`": "--max-tokens, not --samples",
    "leave out `tune=False` and `draft='none'`": "leave out --no-tune and --draft none",
    "a `model type` of `Transformers`, `": "a `model type` of `Transformers`, `",
}


def test_options_become_flags() -> None:
    context: Any = None
    command = cli.get_command(context, "generate")
    assert {message: replace_option_names_by_flags(message, command) for message in MESSAGES} == MESSAGES
    assert replace_option_names_by_flags("`draft`") == "`draft`", "no command runs"


def test_no_message_of_the_library_names_a_flag() -> None:
    """Commands may be quoted whole, as in 'ovspec export --draft-layers N'."""
    library = [file for file in (ROOT / "ovspec").rglob("*.py") if "cli" not in file.parts]
    for file in (*library, *(ROOT / "export").rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = getattr(call.func, "id", getattr(call.func, "attr", "")) if isinstance(call, ast.Call) else ""
            if name in ("OvspecError", "InferenceError", "warn", "note", "step", "tell"):
                texts = [part.value for part in ast.walk(call) if isinstance(part, ast.Constant)]
                told = re.sub(r"'ovspec [^']*'", "", "".join(text for text in texts if isinstance(text, str)))
                assert not re.search(r"(^|[\s('])(--[a-z]|-[a-z]\b)", told), f"{file.name}: {told}"


def test_each_caller_is_answered_in_its_language(
    ovspec_command: Callable[..., CompletedProcess[str]],
) -> None:
    with pytest.raises(ovspec.OvspecError, match=r"`min_tokens` is 9, which is more than `max_tokens`, 2\."):
        ovspec.SamplingParams(min_tokens=9, max_tokens=2)
    done = ovspec_command("generate", "hi", "--min-tokens", 9, "-n", 2)
    assert done.stderr.endswith("Error: --min-tokens is 9, which is more than --max-tokens, 2.\n")
