"""What ``draft=`` and ``--draft`` may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ovspec.drafting.drafter import Drafter
from ovspec.errors import OvspecError
from ovspec.setup.manifest import DRAFT_FOLDER, Manifest

NAMES = ("none", "lookup", "self", "draft")
Draft = bool | str | Path | Drafter | Callable[[], Drafter]


@dataclass(frozen=True)
class DraftChoice:
    """Up to two drafters, asked in the order own or lookup, model.

    ``model`` is a folder. ``own`` makes a user's drafter, one for each text that is generated at a time.
    """

    lookup: bool = False
    own: Callable[[], Drafter] | None = None
    model: Path | None = None


def parse_draft(
    draft: Draft | Sequence[Draft] | None, folder: Path, manifest: Manifest | None = None
) -> DraftChoice | None:
    """None where nothing shall be proposed.

    Args:
        draft: True or "draft" for the draft exported beside the target in ``folder``, "self" for the same where it
            is made of the target's first layers, "lookup", a draft's folder, a ``Drafter`` or what makes one; or two
            of these, in a list or as a text with a comma. A folder of such a name is written with "./".

    Raises:
        OvspecError: what is named isn't there, or can't be combined.
    """
    parts = split_draft(draft)
    if not parts:
        return None
    choice = DraftChoice()
    for place, part in enumerate(parts):
        if place and part == "lookup":
            raise OvspecError("lookup costs nothing and is asked first: write 'lookup,DRAFT'.")
        if choice.model:
            raise OvspecError("A draft model always has something to propose, so nothing can follow it in a chain.")
        if part == "lookup":
            choice = replace(choice, lookup=True)
        elif isinstance(part, Drafter):
            choice = replace(choice, own=lambda drafter=part: drafter)
        elif callable(part):
            choice = replace(choice, own=part)
        else:
            choice = replace(choice, model=draft_folder(part, folder, manifest))
    if choice.lookup + (choice.own is not None) + (choice.model is not None) < len(parts) or len(parts) > 2:
        raise OvspecError("A chain has two different drafters at most, such as 'lookup,DRAFT'.")
    return choice


def split_draft(draft: Draft | Sequence[Draft] | None) -> list[Draft]:
    """The parts of a chain; none at all for "none"."""
    if draft is None or draft is False or draft == "none":
        return []
    if isinstance(draft, str) and not Path(draft).is_dir():
        return [part.strip() for part in draft.split(",")]
    if isinstance(draft, (list, tuple)):
        return [part for one in draft for part in split_draft(one)]
    return [draft]  # type: ignore[list-item]


def draft_folder(part: Draft, folder: Path, manifest: Manifest | None) -> Path:
    if part is True or part in ("draft", "self"):
        exported = folder / DRAFT_FOLDER
        if not exported.is_dir():
            raise OvspecError(f"{folder}: it was exported without a draft; name one, or export with --draft.")
        source = manifest.draft.source if manifest and manifest.draft else ""
        if part == "self" and not re.fullmatch(r".*, first \d+ layers", source):
            raise OvspecError(
                f"{exported}: not made of the target's own layers; export with --draft-layers for 'self'."
            )
        return exported
    if not isinstance(part, (str, Path)) or not str(part):
        raise OvspecError(f"draft {part!r} is no draft: name a folder, lookup, self or none, or give a Drafter.")
    return Path(part)
