"""The decoders that sessions and batches borrow: made when all are in use, kept for reuse, dropped when long idle."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import dataclass, field

from ovspec.decoders.base import SessionDecoder
from ovspec.drafting.chain import Chain
from ovspec.drafting.choice import DraftChoice
from ovspec.drafting.costs import Costs
from ovspec.drafting.draft_model import DraftModel
from ovspec.drafting.drafter import Drafter
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.lookup import Index, Lookup
from ovspec.setup.engine import CompiledModel
from ovspec.text.vocabulary import KnownIds

# Seconds after which decoders that nobody borrowed are dropped, when others are given back.
KEPT_IDLE = 60.0


@dataclass
class Decoders:
    """The decoders of one session or batch. ``lookaheads``: those for greedy (False) and for sampled text (True)."""

    target: SessionDecoder
    drafter: Drafter | None
    draft: SessionDecoder | None = None  # of the draft model; the drafter drives it
    lookaheads: dict[bool, Lookahead] = field(default_factory=dict)

    def reset(self, rows: int) -> None:
        self.target.reset(rows)
        if self.drafter:
            self.drafter.reset(rows)


class DecoderPool:
    """Makes, lends and takes back sets of decoders. Threads may share it.

    Args:
        target: the model that decides the text.
        draft: the draft model, if ``choice`` has one.
        choice: the drafters; None for plain decoding.
        known: the ids that have a token.
        corpus: the texts that lookup may propose from.
    """

    def __init__(
        self,
        target: CompiledModel,
        draft: CompiledModel | None,
        choice: DraftChoice | None,
        known: KnownIds,
        corpus: Index | None,
    ) -> None:
        self._target, self._draft, self._choice, self._known, self._corpus = target, draft, choice, known, corpus
        self._idle: list[tuple[float, Decoders]] = []  # with the time since when; the longest idle first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of idle sets."""
        return len(self._idle)

    def take(self) -> Decoders:
        """Return a set without any rows: the one used last if any is idle, else a new one."""
        with self._lock:
            if self._idle:
                return self._idle.pop()[1]
        draft = self._draft.decoder(self._known) if self._draft else None
        decoders = Decoders(self._target.decoder(self._known), self._drafter(draft), draft)
        decoders.reset(0)  # a user's drafter may create its state there
        return decoders

    def fork(self, decoders: Decoders) -> Decoders:
        """Return other decoders that continue from what ``decoders`` hold."""
        draft = decoders.draft.fork() if decoders.draft else None
        return Decoders(decoders.target.fork(), self._drafter(draft), draft, copy.deepcopy(decoders.lookaheads))

    def give_back(self, decoders: Decoders) -> None:
        """Empty a set that is no longer needed, which frees memory, and keep it for reuse."""
        decoders.reset(0)
        now = time.monotonic()
        with self._lock:
            self._idle = [(since, idle) for since, idle in self._idle if now - since < KEPT_IDLE]
            self._idle.append((now, decoders))

    def learned_costs(self, sampled: bool) -> tuple[Costs, Costs] | None:
        """Return the costs of verifying and of a draft step that an idle set's auto lookahead has learned, if any."""
        with self._lock:
            learned = [decoders.lookaheads[sampled] for _, decoders in self._idle if decoders.lookaheads]
        return (learned[0].target, learned[0].draft) if learned else None

    def _drafter(self, draft: SessionDecoder | None) -> Drafter | None:
        if not self._choice:
            return None
        drafters: list[Drafter] = [Lookup(self._corpus)] if self._choice.lookup else []
        if self._choice.own:
            drafters.append(self._choice.own())
        if draft:
            drafters.append(DraftModel(draft))
        for drafter in drafters:
            drafter.vocabulary = self._known
        return Chain(*drafters) if len(drafters) > 1 else drafters[0]
