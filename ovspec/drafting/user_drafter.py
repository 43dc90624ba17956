"""Users' drafters: their instantiation, and the reporting of their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ovspec.base.errors import OvspecError
from ovspec.drafting.drafter import Drafter, RowToDraft
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.proposal import Proposal
from ovspec.text.vocabulary import KnownTokenIds

P = ParamSpec("P")
T = TypeVar("T")


class UserDrafter(Drafter):
    """Calls a user's drafter, given or made by a user's function; its errors become OvspecErrors."""

    def __init__(self, drafter_or_maker: Drafter | Callable[[], Drafter], known_ids: KnownTokenIds) -> None:
        self.name = getattr(drafter_or_maker, "__name__", type(drafter_or_maker).__name__)
        self._drafter: Drafter
        if hasattr(drafter_or_maker, "propose") and not isinstance(drafter_or_maker, type):
            self._drafter = drafter_or_maker  # type: ignore[assignment]
        else:
            self._drafter = self._call_user_code(drafter_or_maker)  # type: ignore[arg-type]
        if not isinstance(self._drafter, Drafter):
            raise OvspecError(
                f"The drafter {self.name} is not an `ovspec.Drafter`; derive its class from ovspec.Drafter."
            )
        self._drafter.name = self.name = getattr(self._drafter, "name", "") or type(self._drafter).__name__
        self._drafter.vocabulary = known_ids

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self._drafter.seconds

    def propose(self, rows: list[RowToDraft], lookahead: Lookahead) -> list[Proposal]:
        return self._call_user_code(self._drafter.propose, rows, lookahead)

    def reset(self, rows: int) -> None:
        self._call_user_code(self._drafter.reset, rows)

    def reorder(self, rows: list[int]) -> None:
        self._call_user_code(self._drafter.reorder, rows)

    def _call_user_code(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a user's function; raises OvspecError if it fails."""
        try:
            return function(*args, **kwargs)
        except OvspecError:
            raise
        except Exception as error:
            message = f"{type(error).__name__}: {error}".rstrip(".: ")
            raise OvspecError(f"The drafter {self.name} raised {message}; fix the drafter, or leave it out.") from error
