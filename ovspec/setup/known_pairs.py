"""Short names for public pairs of target and draft, from ``models/pairs.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KnownPair:
    """Hub ids of a target, and of a draft with the same vocabulary or an EAGLE-3 head for it.

    source, date: a public text with the ids, and its date as YYYY-MM-DD.
    """

    name: str
    target: str
    source: str
    date: str
    draft: str | None = None
    eagle3: str | None = None
    note: str = ""

    def __str__(self) -> str:
        head_note = f"EAGLE-3 head {self.eagle3}" * bool(self.eagle3)
        notes = "; ".join(filter(None, (self.note, head_note)))
        return f"{self.name:20} {self.target}" + f"  +  {self.draft}" * bool(self.draft) + f"  ({notes})" * bool(notes)


def read_known_pairs() -> dict[str, KnownPair]:
    """Return the known pairs by short name, in the order of the file."""
    package_folder = Path(__file__).resolve().parent.parent
    files = (
        package_folder / "pairs.toml",
        package_folder.parent / "models" / "pairs.toml",
    )  # an installed package, or a clone
    file = next(file for file in files if file.is_file())
    pair_entries = tomllib.loads(file.read_text(encoding="utf-8"))
    return {name: KnownPair(name, **pair_entry) for name, pair_entry in pair_entries.items()}
