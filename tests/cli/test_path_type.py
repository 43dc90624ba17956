"""Paths and consoles on Windows, by a stand-in that behaves as it is documented."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands_here import Command, commands_here

from ovspec import cli
from ovspec.base import files

DEMO = Path(__file__).resolve().parent.parent.parent / "models" / "demo"


@pytest.mark.parametrize(
    "command",
    [
        ("generate", DEMO, "a", "--session", "CON"),
        ("chat", DEMO, "--session", "nul.ov"),
        ("inspect", DEMO, "--report", "what?.json"),
        ("verify", "a|b"),
        ("export", DEMO, "-o", "out."),
        ("perplexity", DEMO, "COM1"),
        ("batch", DEMO, __file__, "-o", "aux.jsonl"),
    ],
)
def test_names_that_are_devices_are_neither_read_nor_written(
    command: tuple[str | Path, ...], cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading CON would wait for the keyboard, and what is written to NUL is lost."""
    monkeypatch.setattr(files, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.chdir(tmp_path)
    run: Command = next(commands_here(cache_dir))
    done = run(*command)
    assert done.returncode == 1 and "not a valid file name on Windows; choose another" in done.stderr
    assert not list(tmp_path.iterdir())


def test_output_has_the_same_bytes_and_consoles_erase_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, told = io.BytesIO(), list[str]()
    colorama = SimpleNamespace(just_fix_windows_console=lambda: told.append("fixed"))
    monkeypatch.setitem(sys.modules, "colorama", colorama)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="cp1252", newline="\r\n"))
    cli.prepare_output_streams()
    print("größer 🦊", flush=True)
    assert (raw.getvalue(), told) == ("größer 🦊\n".encode(), ["fixed"])
