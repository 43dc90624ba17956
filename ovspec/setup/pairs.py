"""Short names for public pairs of target and draft, from ``models/pairs.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pair:
    """Hub ids of two models that share their vocabulary."""

    name: str
    target: str
    draft: str
    note: str = ""


def known_pairs() -> dict[str, Pair]:
    """Return the known pairs by short name, in the order of the file."""
    here = Path(__file__).resolve().parent.parent
    files = (here / "pairs.toml", here.parent / "models" / "pairs.toml")  # an installed package, or a clone
    file = next(file for file in files if file.is_file())
    entries = tomllib.loads(file.read_text(encoding="utf-8"))
    return {name: Pair(name, **entry) for name, entry in entries.items()}
