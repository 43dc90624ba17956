"""Test models that are kept between runs, for as long as all that they are made of stays the same."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, made_once
from filelock import FileLock

# What models are made of. In a copy with a bug in it (scripts/planted.py), these are the sources without the bug.
SOURCES = Path(os.environ.get("OVSPEC_TESTS_SOURCES", ROOT))
PLACE = SOURCES / ".cache" / "test-models"
# Plugins in tests/support, which make no model.
PLUGINS = ("compiling", "durations", "guardian", "limits", "places", "scheduling", "servers")
UNUSED = ("cli", "integrations", "protocols", "batch", "server")  # folders of ovspec that no export imports
Make = Callable[[Path], Any]


def kept_model(tmp_path_factory: pytest.TempPathFactory, name: str, make: Make) -> Path:
    """Return a copy of a kept folder, which is this run's own and which all its workers share."""
    maker = SOURCES / Path(make.__code__.co_filename).relative_to(ROOT)
    key = digest([maker], ingredients())
    return made_once(tmp_path_factory, name, lambda folder: copy_kept(PLACE, name, key, make, folder))


def copy_kept(place: Path, name: str, key: str, make: Make, folder: Path) -> None:
    """Copy what is kept under a name to ``folder``; make it if nothing with this key is kept."""
    versions = place / name
    with FileLock(place.parent / f"{place.name}.{name}.lock"):
        if not (versions / key).exists():
            shutil.rmtree(versions, ignore_errors=True)
            versions.mkdir(parents=True)
            make(versions / "part")
            (versions / "part").rename(versions / key)
        shutil.copytree(versions / key, folder)


@functools.cache
def ingredients() -> str:
    """Return a digest of the sources, the embedded models and the packages that test models are made with."""
    ours = [
        file for folder in (SOURCES / "ovspec").iterdir() if folder.name not in UNUSED for file in python_files(folder)
    ]
    others = [file for name in ("export", "tests/support") for file in python_files(SOURCES / name)]
    others = [file for file in others if file.stem not in PLUGINS]
    single = [SOURCES / "tests" / "conftest.py", SOURCES / "scripts" / "fetch.py"]
    models = [file for file in (SOURCES / "models").rglob("*") if file.is_file()]
    packages = distributions(path=[sysconfig.get_path("purelib")])  # Ray adds some of its own to sys.path
    versions = sorted(f"{package.name} {package.version}" for package in packages)
    return digest([*ours, *others, *single, *models], *versions)


def python_files(place: Path) -> list[Path]:
    return [place] if place.suffix == ".py" else list(place.rglob("*.py"))


def digest(files: Iterable[Path], *more: str) -> str:
    """Return a digest of the names and the contents of files, and of texts."""
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(f"{os.path.relpath(file, SOURCES)}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\0".encode())
    for text in more:
        found.update(f"{text}\0".encode())
    return found.hexdigest()[:16]
