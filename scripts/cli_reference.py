"""Write docs/cli.md from the commands' own help; with --check, fail where it is out of date."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ovspec.cli import cli

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"


def reference() -> str:
    """The help of the group and of each command."""
    parts = ["# Command line\n\nMade by `scripts/cli_reference.py` from the code; do not edit.\n"]
    settings: dict[str, Any] = {**cli.context_settings, "terminal_width": 100}
    with click.Context(cli, info_name="ovspec", **settings) as group:
        parts.append(f"```text\n{cli.get_help(group)}\n```\n")
        for name in cli.list_commands(group):
            command = cli.get_command(group, name)
            assert command
            with click.Context(command, parent=group, info_name=name, **settings) as context:
                parts.append(f"## ovspec {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


def main() -> None:
    text = reference()
    if "--check" not in sys.argv:
        REFERENCE.write_text(text, encoding="utf-8")
    elif not REFERENCE.is_file() or REFERENCE.read_text(encoding="utf-8") != text:
        sys.exit("docs/cli.md is out of date: run python scripts/cli_reference.py")


if __name__ == "__main__":
    main()
