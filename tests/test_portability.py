"""Windows and macOS lack parts of the standard library, and write texts otherwise: nothing relies on that."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = {"fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "readline"}
NAMES = {
    "os": {"fork", "killpg", "getpgid", "setsid", "getuid", "geteuid", "mkfifo", "nice", "statvfs", "O_DIRECTORY"},
    "signal": {"SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGQUIT", "setitimer", "alarm", "pause"},
    "socket": {"AF_UNIX"},
}
GUARDS = ("hasattr", "platform", "os.name", "ImportError", "suppress")


def unguarded(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each use of what not all systems have, outside of a condition or a try that asks for it."""
    tree = ast.parse(source)
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}

    def is_guarded(node: ast.AST) -> bool:
        at: ast.AST | None = node
        while at := parents.get(at):
            asked = ""
            if isinstance(at, (ast.If, ast.IfExp)):
                asked = ast.unparse(at.test)
            elif isinstance(at, ast.With):
                asked = " ".join(ast.unparse(item) for item in at.items)
            elif isinstance(at, ast.Try):
                asked = " ".join(ast.unparse(handler.type) for handler in at.handlers if handler.type)
            if any(guard in asked for guard in GUARDS):
                return True
        return False

    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [name.name for name in node.names if name.name in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found = [node.module] if node.module in MODULES else []
            found += [name.name for name in node.names if name.name in NAMES.get(node.module or "", ())]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            given, name = node.value.id, node.attr
            if name in NAMES.get(given, ()) or (given == "os" and name.startswith("sched_")):
                found = [f"{given}.{name}"]
        if found and not is_guarded(node):
            line = getattr(node, "lineno", 0)
            yield from ((line, name) for name in found)


def other_bytes(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, call) of each that writes a text with other line ends on Windows, or reads one in its code page."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            texts = [value.value for value in (*node.args, given.get("mode")) if isinstance(value, ast.Constant)]
            writes = name == "open" and any(mode in ("w", "a", "x") for mode in texts)
            if (name in ("write_text", "fdopen") or writes) and "newline" not in given:
                yield node.lineno, name
            if "text" in given and name in ("run", "Popen", "check_output") and "encoding" not in given:
                yield node.lineno, name


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('path.write_text("a", encoding="utf-8")', ["write_text"]),
        ('path.write_text("a", encoding="utf-8", newline="\\n")', []),
        ('path.open("w", encoding="utf-8")', ["open"]),
        ('path.open("wb")', []),
        ("subprocess.run(command, text=True)", ["run"]),
        ('subprocess.run(command, encoding="utf-8")', []),
    ],
)
def test_the_check_finds_texts(source: str, found: list[str]) -> None:
    assert [name for _, name in other_bytes(source)] == found


def test_texts_have_the_same_bytes_on_all_systems() -> None:
    wrong = [
        f"{file.relative_to(ROOT).as_posix()}:{line}: {call}"
        for folder in ("ovspec", "export", "scripts")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not {"bench", "train"}.intersection(file.parts)
        for line, call in other_bytes(file.read_text(encoding="utf-8"))
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import fcntl", ["fcntl"]),
        ("from signal import SIGHUP", ["SIGHUP"]),
        ("os.killpg(1, 2)", ["os.killpg"]),
        ("os.sched_getaffinity(0)", ["os.sched_getaffinity"]),
        ("if hasattr(os, 'killpg'):\n    os.killpg(1, 2)", []),
        ("with suppress(ImportError):\n    import resource", []),
        ("try:\n    import resource\nexcept ImportError:\n    pass", []),
        ("try:\n    import resource\nexcept OSError:\n    pass", ["resource"]),
        ("os.kill(1, 2)", []),
    ],
)
def test_the_check_finds_them(source: str, found: list[str]) -> None:
    assert [name for _, name in unguarded(source)] == found


def test_nothing_is_used_that_some_systems_lack() -> None:
    wrong = [
        f"{file.relative_to(ROOT).as_posix()}:{line}: {used}"
        for folder in ("ovspec", "export", "scripts", "demos")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, used in unguarded(file.read_text(encoding="utf-8"))
    ]
    assert not wrong
