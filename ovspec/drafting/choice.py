"""Parsing of ``draft=`` and ``--draft``, without importing numpy, to start the command line quickly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ovspec.base.errors import OvspecError
from ovspec.base.hub_names import parse_hub_name

if TYPE_CHECKING:
    from ovspec.drafting.drafter import Drafter

# The draft exported with the target: of any kind, made from the target's layers, an EAGLE-3 head, or its MTP layer.
EXPORTED_DRAFT, SELF_DRAFT, HEAD_DRAFT, MTP_DRAFT = "draft", "self", "head", "mtp"
EXPORTED_DRAFTS = (EXPORTED_DRAFT, SELF_DRAFT, HEAD_DRAFT, MTP_DRAFT)
NO_DRAFT = "none"


@dataclass(frozen=True)
class DraftChoice:
    """Up to two drafters, asked in the order lookup, user's drafter, model. A choice without any is false.

    user_drafter: a user's drafter, or a function to make a drafter for each session or batch.
    model: the folder of the draft model or head; an entry of ``EXPORTED_DRAFTS`` until the target's folder is known.
    """

    lookup: bool = False
    user_drafter: Drafter | Callable[[], Drafter] | None = None
    model: Path | str | None = None

    def __str__(self) -> str:
        drafter_names: list[str] = []
        if self.lookup:
            drafter_names.append("lookup")
        if self.user_drafter is not None:
            drafter_names.append(getattr(self.user_drafter, "__name__", type(self.user_drafter).__name__))
        if self.model is not None:
            drafter_names.append(str(self.model))
        return ",".join(drafter_names)

    def __bool__(self) -> bool:
        return self.lookup or self.user_drafter is not None or self.model is not None


def parse_draft(draft: Any) -> DraftChoice | None:
    """Return the drafters named by ``draft``, as described at ``load``; None for no drafter.

    Raises:
        OvspecError: a part of ``draft`` is not a draft, or the parts can't be combined.
    """
    if isinstance(draft, DraftChoice):
        return draft or None
    choice = DraftChoice()
    chain_parts = split_draft_chain(draft)
    for chain_part in chain_parts:
        if choice and chain_part == "lookup":
            raise OvspecError(
                "`draft`: lookup must come first in a chain, because lookup costs nothing; write 'lookup,DRAFT'."
            )
        if choice.model:
            raise OvspecError(
                "`draft`: a draft model or head must come last in a chain, because no drafter after it would ever run."
            )
        if chain_part == "lookup":
            choice = replace(choice, lookup=True)
        elif chain_part is True:
            choice = replace(choice, model=EXPORTED_DRAFT)
        elif isinstance(chain_part, (str, Path)) and str(chain_part):
            choice = replace(choice, model=chain_part if chain_part in EXPORTED_DRAFTS else Path(chain_part))
        elif hasattr(chain_part, "propose") or callable(chain_part):
            choice = replace(choice, user_drafter=chain_part)
        else:
            raise OvspecError(
                f"`draft={chain_part!r}` is not a draft; give the folder of a draft model or head, "
                "or lookup, mtp, head, self or none, or a Drafter."
            )
    if (
        choice.lookup + (choice.user_drafter is not None) + (choice.model is not None) < len(chain_parts)
        or len(chain_parts) > 2
    ):
        raise OvspecError("`draft`: a chain must be two different drafters, such as 'lookup,DRAFT'.")
    return choice or None


def split_draft_chain(draft: Any) -> list[Any]:
    """Return the parts of a chain; an empty list for "none"."""
    if draft is None or draft is False or draft == NO_DRAFT:
        return []
    if isinstance(draft, str) and not Path(draft).is_dir():
        return [part.strip() for part in draft.split(",")]
    if isinstance(draft, (list, tuple)):
        return [part for drafter in draft for part in split_draft_chain(drafter)]
    return [draft]  # type: ignore[list-item]


def is_chain_of_known_drafters(draft: str) -> bool:
    """Return whether each part of a chain is the name of a drafter, an existing folder or file, or a hub id."""
    chain_parts = [chain_part for chain_part in split_draft_chain(draft) if isinstance(chain_part, str)]
    known_names = ("lookup", *EXPORTED_DRAFTS, NO_DRAFT)
    return Path(draft).is_dir() or all(
        chain_part in known_names or Path(chain_part).exists() or parse_hub_name(chain_part)
        for chain_part in chain_parts
    )
