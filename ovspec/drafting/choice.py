"""What ``draft=`` and ``--draft`` may be: read without numpy, so that the command line can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ovspec.errors import OvspecError

if TYPE_CHECKING:
    from ovspec.drafting.drafter import Drafter

EXPORTED, SELF = "draft", "self"  # the draft exported beside the target, whatever it is, or of the target's own layers


@dataclass(frozen=True)
class DraftChoice:
    """Up to two drafters, asked in the order own (makes a user's drafter for each session or batch) or lookup, model.

    ``model`` is a folder, or ``EXPORTED`` or ``SELF`` until the target's folder is known. Without any it is false.
    """

    lookup: bool = False
    own: Callable[[], Drafter] | None = None
    model: Path | str | None = None

    def __bool__(self) -> bool:
        return self.lookup or self.own is not None or self.model is not None


if TYPE_CHECKING:
    Draft = bool | str | Path | DraftChoice | Drafter | Callable[[], Drafter]


def parse_draft(draft: Draft | Sequence[Draft] | None) -> DraftChoice | None:
    """Up to two of what ``load`` says of drafts; None where nothing shall be proposed.

    A folder of the name "draft", "self" or "lookup" is written with "./".

    Raises:
        OvspecError: it is no draft, or can't be combined.
    """
    if isinstance(draft, DraftChoice):
        return draft or None
    choice, parts = DraftChoice(), split_draft(draft)
    for part in parts:
        if choice and part == "lookup":
            raise OvspecError("lookup costs nothing and is asked first: write 'lookup,DRAFT'.")
        if choice.model:
            raise OvspecError("A draft model always has something to propose, so nothing can follow it in a chain.")
        if part == "lookup":
            choice = replace(choice, lookup=True)
        elif part is True:
            choice = replace(choice, model=EXPORTED)
        elif isinstance(part, (str, Path)) and str(part):
            choice = replace(choice, model=part if part in (EXPORTED, SELF) else Path(part))
        elif hasattr(part, "propose") and not isinstance(part, type):
            choice = replace(choice, own=lambda drafter=part: drafter)
        elif callable(part):
            choice = replace(choice, own=part)
        else:
            raise OvspecError(f"draft {part!r} is no draft: name a folder, lookup, self or none, or give a Drafter.")
    if choice.lookup + (choice.own is not None) + (choice.model is not None) < len(parts) or len(parts) > 2:
        raise OvspecError("A chain has two different drafters at most, such as 'lookup,DRAFT'.")
    return choice or None


def split_draft(draft: Draft | Sequence[Draft] | None) -> list[Draft]:
    """The parts of a chain; none at all for "none"."""
    if draft is None or draft is False or draft == "none":
        return []
    if isinstance(draft, str) and not Path(draft).is_dir():
        return [part.strip() for part in draft.split(",")]
    if isinstance(draft, (list, tuple)):
        return [part for one in draft for part in split_draft(one)]
    return [draft]  # type: ignore[list-item]


def names_drafters(text: str) -> bool:
    """Whether each part of a chain is a name or a folder that is there."""
    parts = [part for part in split_draft(text) if isinstance(part, str)]
    names = ("lookup", EXPORTED, SELF, "none")
    return Path(text).is_dir() or all(part in names or Path(part).is_dir() for part in parts)
