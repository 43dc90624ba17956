"""Time a process of the command line, the compile cache warm: until the help, and until a text's first piece.

    python scripts/bench/startup.py [MODEL]

Times are medians in seconds. Use an idle machine.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import CODE, machine, milliseconds, options

from ovspec.setup.model_folders import find_demo_folder

COMMAND = (sys.executable, "-m", "ovspec")


def time_to_help() -> float:
    once = lambda: subprocess.run([*COMMAND, "--help"], capture_output=True, check=True)  # noqa: E731
    return statistics.median(milliseconds(once) for _ in range(10)) / 1e3


def time_to_first_token(model: Path, cache: Path) -> float:
    """Return the seconds from process start to the first byte of text."""
    command = [*COMMAND, "generate", str(model), CODE[0], "-n", "16", "--cache-dir", str(cache)]

    def once() -> float:
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
            assert running.stdout
            if not running.stdout.read(1):
                sys.exit(f"Error: {' '.join(command[2:])} wrote nothing")
            seconds = time.perf_counter() - began
            running.communicate()
        return seconds

    once()  # fills the cache
    return statistics.median(once() for _ in range(5))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=find_demo_folder(), metavar="MODEL")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        print(f"{args.model.name} on {machine()}")
        print(f"ovspec --help: {time_to_help():.3f} s")
        print(f"first token: {time_to_first_token(args.model, Path(cache)):.2f} s")


if __name__ == "__main__":
    main()
