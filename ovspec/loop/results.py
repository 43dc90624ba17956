"""What generating returns: pieces of a stream, results, statistics."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ovspec.sampling.logprobs import TokenLogprob

FinishReason = Literal["stop", "length", "eos", "cancelled"]


@dataclass(slots=True)
class Piece:
    """What one round added to the text. ``finish_reason`` is None until the last piece.

    ``logprobs`` has one entry for each token where they were asked for. ``sources`` says of each token where it came
    from: "target", the name of the drafter that had proposed it ("draft", "lookup", "own" or what it calls itself), or
    "forced" where constraints left no other.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    sources: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Proposals:
    """Counts of proposed and accepted tokens, and milliseconds of inference."""

    proposed: int = 0
    accepted: int = 0
    reached: int = 0  # proposed tokens that were compared: all before them were accepted
    accepted_by_position: list[int] = field(default_factory=list)
    drafters: dict[str, dict[str, int]] = field(default_factory=dict)
    target_ms: float = 0.0
    draft_ms: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Probability that a proposed token is accepted given that those before it were."""
        return self.accepted / self.reached if self.reached else None

    def count_proposal(self, source: str, proposed: int, accepted: int) -> None:
        """Count a proposal of ``source``, of which the first ``accepted`` tokens were accepted."""
        self.proposed += proposed
        self.reached += min(1, proposed)
        self.drafters.setdefault(source, {"proposed": 0, "accepted": 0})["proposed"] += proposed
        self.count_accepted(source, range(accepted), proposed)

    def count_accepted(self, source: str, positions: range, proposed: int) -> None:
        """Count the tokens at ``positions`` as accepted; their proposal of ``proposed`` tokens was counted before."""
        self.accepted += len(positions)
        self.reached += max(0, min(len(positions), proposed - positions.start - 1))
        self.drafters[source]["accepted"] += len(positions)
        self.accepted_by_position += [0] * (positions.stop - len(self.accepted_by_position))
        for position in positions:
            self.accepted_by_position[position] += 1


@dataclass(kw_only=True)
class Stats(Proposals):
    """Counts are tokens, times milliseconds of wall clock.

    ``ttft_ms`` runs from the prompt's token ids to the first token, ``tpot_ms`` is the mean time of each
    later one. ``target_ms`` and ``draft_ms`` are spent in inference; ``other_ms`` is all the rest, with
    what the caller does between two pieces of a stream. In a batch, times are those of the whole batch
    from when the row joined until it was finished. ``forced``: tokens that came without being chosen, because
    constraints left no other. ``drafters`` has proposed and accepted tokens by the drafter's name.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    rounds: int = 0
    forced: int = 0
    seed: int | None = None  # of a sampled text
    other_ms: float = 0.0
    rollback: str = ""
    device: str = ""
    draft_device: str | None = None
    engine: str = ""
    engine_reason: str = ""
    draft_engine: str | None = None
    profile: str | None = None  # what was chosen for this machine


@dataclass(frozen=True)
class Result:
    """A finished text.

    ``token_ids`` holds what was generated, with the EOS or stop id that ended it; ``text`` leaves out what stopped it.
    ``logprobs`` has one entry for each of ``token_ids`` where they were asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    logprobs: list[TokenLogprob] | None = None


class Finishing(Protocol):
    """A row, as far as a stream ends it."""

    def cancel(self) -> Piece: ...

    def result(self) -> Result: ...


class TextStream:
    """Pieces of text as rounds produce them; iterate over it once.

    Ctrl-C during a round ends it with a piece "cancelled" and then KeyboardInterrupt. ``ended`` is called in the end.
    """

    def __init__(self, pieces: Generator[Piece], row: Finishing, ended: Callable[[], None] = lambda: None) -> None:
        self._pieces, self._row, self._ended = pieces, row, ended

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def cancel(self) -> None:
        """End the text where it is."""
        self._pieces.close()
        self._row.cancel()
        self._ended()

    def result(self) -> Result:
        """The whole text and its statistics; runs to the end what is not generated yet."""
        for _ in self._pieces:
            pass
        self.cancel()  # has no effect unless an exception ended the stream
        return self._row.result()
