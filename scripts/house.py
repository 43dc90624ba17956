"""Count signs of code hard to read: meaningless names, crowded lines, open types.

    python3 scripts/house.py [FOLDER ...]      the table, by folder (by default the folders of ovspec and the exports)
    python3 scripts/house.py --where COLUMN [FOLDER ...]   each place counted in a column
    python3 scripts/house.py --check           exit with 1 if ovspec is above a limit, or a file or folder is too long
    python3 scripts/house.py --draw 40 [--seed 1]          names drawn at random, to guess their meaning blindly

Every figure is per 1,000 lines. `pronouns` counts the uses of ``found`` and ``each`` as names; `vague` the uses of
eight more. `Any` counts its other names, too (``JsonValue``, ``OptionValue``, ``TypeForm``), but not ``JsonObject``.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ovspec", "export/ovspec_export")
PRONOUNS = {"found", "each"}
VAGUE = {"given", "made", "told", "wanted", "held", "take", "beside", "behind"}
ANY = {"Any", "JsonValue", "OptionValue", "TypeForm"}
LIMITS = {"pronouns": 3.0, "unpacking": 6.0, "conditional": 15.0, "Any": 10.0}  # uses per 1,000 lines of ovspec
COLUMNS = (*LIMITS, "vague", "nested", "long")
MAX_FILE_LINES = 600
MAX_FOLDER_LINES = 3_500  # per folder of ovspec
MAX_SCRIPT_LINES = 6_500  # in all scripts together

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def name_of(node: ast.AST) -> str:
    """Return the name used or defined by a node of the syntax tree, or an empty string."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case _:
            return ""


def columns_of(node: ast.AST) -> Iterator[str]:
    """Yield the table's columns for a node."""
    name = name_of(node)
    if name in PRONOUNS:
        yield "pronouns"
    if name in VAGUE:
        yield "vague"
    if name in ANY:
        yield "Any"
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
        yield "unpacking"
    if isinstance(node, ast.IfExp):
        yield "conditional"
        if any(isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node):
            yield "nested"
        if node.end_lineno != node.lineno:
            yield "long"


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]


def nodes(folders: Iterable[Path]) -> Iterator[tuple[Path, ast.AST]]:
    """Yield each node of the syntax trees of the folders' files, with its file."""
    for folder in folders:
        for file in sources(folder):
            yield from ((file, node) for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def places(folder: Path) -> list[tuple[str, Path, int]]:
    """Return column, file and line of everything counted in a folder, file by file."""
    counted = [
        (column, file, getattr(node, "lineno", 0)) for file, node in nodes([folder]) for column in columns_of(node)
    ]
    return sorted(counted, key=lambda place: place[1:])


def lines_of(folder: Path) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in sources(folder))


def rates_of(folder: Path) -> dict[str, float]:
    """Return the uses per 1,000 lines in a folder, by column."""
    counts = dict.fromkeys(COLUMNS, 0)
    for column, _, _ in places(folder):
        counts[column] += 1
    return {column: 1000 * count / max(lines_of(folder), 1) for column, count in counts.items()}


def print_table(folders: list[Path]) -> None:
    print(f"{'per 1,000 lines':28}{'lines':>8}" + "".join(f"{column:>13}" for column in COLUMNS))
    for folder in folders:
        rates = "".join(f"{rate:>13.1f}" for rate in rates_of(folder).values())
        print(f"{folder.relative_to(ROOT).as_posix():28}{lines_of(folder):>8}{rates}")
    print(f"{'limits for ovspec':36}" + "".join(f"{LIMITS.get(column, ''):>13}" for column in COLUMNS))


def check() -> Iterator[str]:
    """Yield a sentence for each exceeded limit."""
    rates = rates_of(ROOT / "ovspec")
    for column, limit in LIMITS.items():
        if rates[column] > limit:
            yield f"ovspec: {column}: {rates[column]:.1f} per 1,000 lines, at most {limit:g}"
    for name in (*PACKAGES, "scripts"):
        for file in sources(ROOT / name):
            if (lines := lines_of(file)) > MAX_FILE_LINES:
                yield f"{file.relative_to(ROOT)}: {lines} lines, at most {MAX_FILE_LINES}"
    folders = [(folder, MAX_FOLDER_LINES) for folder in (ROOT / "ovspec").iterdir() if folder.is_dir()]
    for folder, limit in (*folders, (ROOT / "scripts", MAX_SCRIPT_LINES)):
        if (lines := lines_of(folder)) > limit:
            yield f"{folder.relative_to(ROOT)}: {lines} lines, at most {limit}"


def definitions(folders: list[Path]) -> Iterator[tuple[str, Path]]:
    """Yield each function and class with its file, except for Python's special methods."""
    for file, node in nodes(folders):
        if isinstance(node, Definition) and not node.name.startswith("__"):
            yield node.name, file.relative_to(ROOT)


def variables(folders: list[Path]) -> Iterator[tuple[str, Path]]:
    """Yield each variable, argument and field of two characters or more, once per assignment in a file."""
    for file, node in nodes(folders):
        stored = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)
        if (stored or isinstance(node, ast.arg)) and (name := name_of(node)) not in ("self", "cls") and len(name) > 1:
            yield name, file.relative_to(ROOT)


def print_draw(count: int, seed: int, folders: list[Path]) -> None:
    """Print names with their files: half functions and classes, half variables."""
    draw = random.Random(seed)
    drawn = draw.sample(sorted(set(definitions(folders))), count // 2)
    drawn += draw.sample(sorted(set(variables(folders))), count - count // 2)
    for number, (name, file) in enumerate(drawn, 1):
        print(f"{number:3} {name:32} {file.as_posix()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--where", choices=COLUMNS)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--draw", type=int)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    packages = [ROOT / name for name in PACKAGES]
    folders = [folder.resolve() for folder in args.folders]
    if args.check:
        sys.exit("\n".join(check()) or 0)
    if args.where:
        for column, file, line in [place for folder in folders or packages for place in places(folder)]:
            if column == args.where:
                print(f"{file.relative_to(ROOT).as_posix()}:{line}")
    elif args.draw:
        print_draw(args.draw, args.seed, folders or packages)
    else:
        rooms = [room for package in packages for room in sorted(package.iterdir()) if (room / "__init__.py").exists()]
        print_table(folders or [*rooms, *packages])


if __name__ == "__main__":
    main()
