"""Drafters written by users: how they are instantiated, and how their errors are reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.drafting.drafter import Drafter, RowStep
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.proposal import Proposal
from ovspec.text.vocabulary import KnownIds


class UserDrafter(Drafter):
    """Calls a user's drafter ``own``, or what makes it; an exception in it becomes an OvspecError that names it."""

    def __init__(self, own: Drafter | Callable[[], Drafter], known: KnownIds) -> None:
        self.name = getattr(own, "__name__", type(own).__name__)
        self._drafter: Drafter
        if hasattr(own, "propose") and not isinstance(own, type):
            self._drafter = own  # type: ignore[assignment]
        else:
            self._drafter = self._call(own)  # type: ignore[arg-type]
        if not isinstance(self._drafter, Drafter):
            raise OvspecError(f"The drafter {self.name} isn't an `ovspec.Drafter`; make its class a subclass of it.")
        self._drafter.name = self.name = getattr(self._drafter, "name", "") or type(self._drafter).__name__
        self._drafter.vocabulary = known

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self._drafter.seconds

    def propose(self, rows: list[RowStep], lookahead: Lookahead) -> list[Proposal]:
        return self._call(self._drafter.propose, rows, lookahead)

    def reset(self, rows: int) -> None:
        self._call(self._drafter.reset, rows)

    def reorder(self, rows: list[int]) -> None:
        self._call(self._drafter.reorder, rows)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except OvspecError:
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {error}".rstrip(".: ")
            raise OvspecError(f"The drafter {self.name} raised {told}; correct it, or leave it out.") from error
