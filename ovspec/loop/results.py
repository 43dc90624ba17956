"""What generating returns: pieces, results and statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ovspec.loop.round import RoundResult
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


@dataclass
class Stats:
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
    proposed: int = 0
    accepted: int = 0
    reached: int = 0  # proposed tokens that were compared: all before them were accepted
    accepted_by_position: list[int] = field(default_factory=list)
    drafters: dict[str, dict[str, int]] = field(default_factory=dict)
    seed: int | None = None  # of a sampled text
    target_ms: float = 0.0
    draft_ms: float = 0.0
    other_ms: float = 0.0
    rollback: str = ""
    device: str = ""
    draft_device: str | None = None
    engine: str = ""
    engine_reason: str = ""
    draft_engine: str | None = None
    profile: str | None = None  # what was chosen for this machine

    @property
    def acceptance_rate(self) -> float | None:
        """Probability that a proposed token is accepted given that those before it were."""
        return self.accepted / self.reached if self.reached else None

    def count(self, verdict: RoundResult, used: int) -> None:
        """A round, of whose tokens the first ``used`` are in the text."""
        if not self.rounds and verdict.read:
            self.cached_tokens -= verdict.read - verdict.forced
        cut = used < len(verdict.tokens)
        self.forced += min(verdict.forced, used)
        accepted = max(0, min(verdict.accepted, used - verdict.forced))
        proposed = accepted if cut else verdict.proposed
        self.rounds += len(verdict.tokens) > verdict.forced
        self.proposed += proposed
        self.accepted += accepted
        self.reached += min(accepted + 1, proposed)
        if proposed:
            counts = self.drafters.setdefault(verdict.source, {"proposed": 0, "accepted": 0})
            counts["proposed"] += proposed
            counts["accepted"] += accepted
        for position in range(accepted):
            if position == len(self.accepted_by_position):
                self.accepted_by_position.append(0)
            self.accepted_by_position[position] += 1


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
