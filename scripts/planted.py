"""Plant bugs, each in a copy of the sources, and check that the quick tests find them.

    python scripts/planted.py                all bugs of planted.toml, two at a time
    python scripts/planted.py lookup warp    the bugs with any of these words in their name
    python scripts/planted.py --list         the names of the bugs

The sources are copied to .cache/planted. All tests of the bugs must pass in a copy without a bug; then each bug is
planted in a copy, and at least one of its tests must fail. Exits with 1 if a bug is missed, if no test can run with it,
or if it can't be planted because the code has changed: then update its line in planted.toml.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".cache" / "planted"
SOUND = PLACE / "sound"  # the copy without a bug
LIMIT = 600  # seconds for the tests of a bug
QUICK = "not slow and not soak"

Verdict = Literal["found", "MISSED", "BROKEN", "skipped"]
PASSED, FAILED, TOO_LATE = 0, 1, 124  # exit codes of pytest; the last is ours, for a timeout


@dataclass(frozen=True)
class Bug:
    """A change of the product, and the tests to fail with it.

    file: the changed file, from the repository's root.
    old, new: a text occurring there once, and its replacement.
    tests: ids of quick tests.
    """

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def planted_in(self, text: str) -> str:
        """Return the text of the file with the bug in it."""
        if (times := text.count(self.old)) != 1:
            raise ValueError(f"scripts/planted.toml: {self.name}: `old` is {times} times in {self.file}, not once")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    bug: Bug
    verdict: Verdict
    seconds: float
    told: str  # the first failed test, or the end of pytest's output


def known_bugs() -> list[Bug]:
    entries = tomllib.loads((ROOT / "scripts" / "planted.toml").read_text(encoding="utf-8"))
    return [Bug(name, **entry) for name, entry in entries.items()]


def copy_sources(folder: Path) -> None:
    """Make ``folder`` a copy of all tracked and new files; its bytecode and ``.cache`` are kept."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.decode().split("\0")
    names = {Path(name) for name in listed if name and (ROOT / name).is_file()}
    for old in [file.relative_to(folder) for file in folder.rglob("*") if file.is_file()]:
        if old not in names and not {".cache", "__pycache__"}.intersection(old.parts):
            (folder / old).unlink()
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def copy_sound(folder: Path) -> None:
    """Make ``folder`` a copy of the sources without a bug, including bytecode to save seconds of compilation."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SOUND, folder, ignore=shutil.ignore_patterns(".cache"))


def run_tests(folder: Path, tests: list[str], place: str, *options: str) -> tuple[int, str]:
    """Run tests in a copy; return pytest's exit code and output."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder), str(folder / "export"))),
        "PYTHONUTF8": "1",
        "OVSPEC_TESTS_PLACE": place,
        "OVSPEC_TESTS_SOURCES": str(SOUND),  # a bug doesn't make the test models again
    }
    if folder != SOUND:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # leaves no bytecode of a bug
    command = (sys.executable, "-m", "pytest", "-rfE", "-p", "no:cacheprovider", "-m", QUICK, *options, *tests)
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT * (10 if folder == SOUND else 1),
        )
    except subprocess.TimeoutExpired as error:
        return TOO_LATE, (error.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


@contextmanager
def planted(bug: Bug, folder: Path) -> Iterator[None]:
    file, sound = folder / bug.file, SOUND / bug.file
    text = bug.planted_in(sound.read_text(encoding="utf-8"))
    file.write_text(text, encoding="utf-8", newline="\n")
    # Python recognises outdated bytecode by its source's time and size.
    time_of_sound = sound.stat().st_mtime
    os.utime(file, (time_of_sound + 3600, time_of_sound + 3600))
    try:
        yield
    finally:
        shutil.copy2(sound, file)


def tried(bug: Bug, folder: Path, place: str) -> Outcome:
    began = time.monotonic()
    with planted(bug, folder):
        code, said = run_tests(folder, bug.tests, place, "-x")
    verdict: Verdict = "BROKEN"
    if code == PASSED:
        verdict = "MISSED" if " passed" in said else "skipped"
    elif code == FAILED or code < 0:  # below 0: ended by a signal, such as SIGFPE in OpenVINO
        verdict = "found"
    failed = re.search(r"(?m)^(?:FAILED|ERROR) (\S+)", said)
    told = failed[1] if failed and verdict == "found" else "\n".join(said.splitlines()[-25:])
    return Outcome(bug, verdict, time.monotonic() - began, told)


def try_all(bugs: list[Bug], workers: int) -> Iterator[Outcome]:
    """Yield the outcomes as they finish; each worker has its own copy and share of the cores."""
    places = SimpleQueue[int]()
    for number in range(workers):
        copy_sound(PLACE / f"bug-{number}")
        places.put(number)

    def run(bug: Bug) -> Outcome:
        number = places.get()
        try:
            return tried(bug, PLACE / f"bug-{number}", f"{number} of {workers}")
        finally:
            places.put(number)

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(run, bugs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="plant the bugs with one of these words in their name")
    parser.add_argument("--list", action="store_true", help="show the names of the bugs")
    parser.add_argument("--workers", type=int, default=2, help="copies in which bugs are tried at the same time")
    arguments = parser.parse_args()
    bugs = [bug for bug in known_bugs() if any(word in bug.name for word in arguments.words or [""])]
    if arguments.list:
        print(*(bug.name for bug in bugs), sep="\n")
        return 0
    for bug in bugs:
        bug.planted_in((ROOT / bug.file).read_text(encoding="utf-8"))
    copy_sources(SOUND)
    tests = sorted({test for bug in bugs for test in bug.tests})
    workers = ("-n", str(arguments.workers), "--dist", "loadfile") if arguments.workers > 1 else ()
    print(f"{len(tests)} tests without a bug …", flush=True)
    code, said = run_tests(SOUND, tests, "0 of 1", *workers)
    print("\n".join(said.splitlines()[-25:]) if code else said.splitlines()[-1], flush=True)
    if code:
        return 1
    found, wrong = 0, list[str]()
    for outcome in try_all(bugs, arguments.workers):
        found += outcome.verdict == "found"
        wrong += [f"{outcome.verdict} {outcome.bug.name}"] if outcome.verdict in ("MISSED", "BROKEN") else []
        print(f"{outcome.verdict:8}{outcome.bug.name}  ({outcome.seconds:.0f} s)  {outcome.told}", flush=True)
    print(f"{found} of {len(bugs)} bugs are found", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(str(error))
