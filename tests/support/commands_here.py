"""Run the command line in this process, where each model is loaded once, with the interface of a process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ovspec
from ovspec.cli import main

Command = Callable[..., "subprocess.CompletedProcess[str]"]
LOADED: dict[str, Any] = {}


def commands_here(cache_dir: Path) -> Iterator[Command]:
    """Yield a function that does what ``ovspec_command`` does, without the seconds that a process takes to start."""
    load = ovspec.load

    def load_once(*arguments: Any, **options: Any) -> Any:
        key = repr((arguments, sorted(options.items())))
        if key not in LOADED:
            LOADED[key] = load(*arguments, **options)
        return LOADED[key]

    def run(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command, code = [str(argument) for argument in arguments], 0
        with (
            pytest.MonkeyPatch.context() as patched,
            CliRunner().isolation(stdin) as (out, err, _),
        ):
            patched.setenv("XDG_CACHE_HOME", str(cache_dir))
            patched.setattr(ovspec, "load", load_once)
            patched.setattr(sys, "argv", ["ovspec", *command])
            try:
                main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            sys.stdout.flush()
            sys.stderr.flush()
            printed, told = (stream.getvalue().decode() for stream in (out, err))
        told = re.sub(r"(?m)^.* …\n", "", told)  # what took long on a busy machine
        return subprocess.CompletedProcess(command, code, printed, told)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
