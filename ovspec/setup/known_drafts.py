"""The known drafts of a model: made by 'ovspec distill' on this machine, or listed in the known pairs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ovspec.base.files import read_cached, write_cached
from ovspec.ir.device import default_cache_dir
from ovspec.setup.known_pairs import read_known_pairs


@dataclass(frozen=True)
class DistilledDraft:
    """A result of 'ovspec distill'.

    source: of its target, as in the store. folder: the result's. is_head: whether it is an EAGLE-3 head.
    """

    source: str
    folder: str
    is_head: bool


def remember_distilled_draft(source: str, folder: Path, is_head: bool) -> None:
    """Record a head or draft for a source; ``find_known_draft`` returns a source's latest."""
    write_cached(note_path(source), DistilledDraft(source, str(folder.resolve()), is_head))


def find_known_draft(source: str, only_head: bool = False) -> str | None:
    """Return the known draft of a source: the folder of a distilled draft, or a hub id; None if there is none.

    ``only_head``: accept only an EAGLE-3 head.
    """
    distilled = read_cached(DistilledDraft, note_path(source))
    if distilled and (distilled.is_head or not only_head) and (Path(distilled.folder) / "config.json").is_file():
        return distilled.folder
    pairs = [pair for pair in read_known_pairs().values() if pair.target == source]
    names = [pair.eagle3 if only_head else pair.draft or pair.eagle3 for pair in pairs]
    return next(filter(None, names), None)


def note_path(source: str) -> Path:
    return default_cache_dir() / "distilled" / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.json"
