"""The text level: from rounds of tokens to pieces of text, stop strings, results and statistics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ovspec.decoder import Decoder, catch_up
from ovspec.drafting import Drafter, Round
from ovspec.interrupts import HeldInterrupts
from ovspec.lookahead import Lookahead
from ovspec.sampler import Sampler
from ovspec.sampling import SamplingParams, TokenLogprob, logprobs_of
from ovspec.sequence import Sequence
from ovspec.speculation import Verdict, speculate
from ovspec.tokenizer import Detokenizer

FinishReason = Literal["stop", "length", "eos", "cancelled"]


@dataclass(slots=True)
class Piece:
    """What one round added to the text. ``finish_reason`` is None until the last piece.

    ``logprobs`` has one entry for each token where they were asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass
class Stats:
    """Counts are tokens, times milliseconds of wall clock.

    ``ttft_ms`` runs from the prompt's token ids to the first token, ``tpot_ms`` is the mean time of each
    later one. ``target_ms`` and ``draft_ms`` are spent in inference; ``other_ms`` is all the rest, with
    what the caller does between two pieces of a stream. In a batch, times are those of the whole batch
    until the row was finished. ``drafters`` has proposed and accepted tokens by the drafter's name.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    rounds: int = 0
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

    def count(self, verdict: Verdict) -> None:
        self.rounds += 1
        self.proposed += verdict.proposed
        self.accepted += verdict.accepted
        self.reached += min(verdict.accepted + 1, verdict.proposed)
        if verdict.proposed:
            counts = self.drafters.setdefault(verdict.source, {"proposed": 0, "accepted": 0})
            counts["proposed"] += verdict.proposed
            counts["accepted"] += verdict.accepted
        for position in range(verdict.accepted):
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


class StopStrings:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string was found right behind it)"""
        if not self._stops:
            return text, False
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        end = len(self._held) - keep
        shown, self._held = self._held[:end], self._held[end:]
        return shown, False

    def flush(self) -> str:
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that ``stop`` begins with."""
        most = min(len(stop) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if stop.startswith(self._held[-n:])), 0)


class Row:
    """One text in the making: its tokens, what they say so far, and when it ends.

    Args:
        sequence: prompt and, as rounds commit to it, what follows.
        max_tokens: tokens to generate at most.
        eos: ids that end the text, besides those of ``params``.
    """

    def __init__(
        self,
        sequence: Sequence,
        detokenizer: Detokenizer,
        sampler: Sampler,
        params: SamplingParams,
        max_tokens: int,
        eos: frozenset[int],
    ) -> None:
        self.sequence, self.sampler = sequence, sampler
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.stats = Stats(prompt_tokens=len(sequence))
        self._start, self._end = len(sequence), len(sequence) + max_tokens
        self._params, self._min_tokens = params, params.min_tokens or 0
        self._detokenizer, self._stops, self._eos = detokenizer, StopStrings(params.stop_strings), eos
        self._stop_ids = frozenset(params.stop_ids)

    def remaining(self) -> int:
        """Tokens that may be proposed. None before the first token: it must not wait for the drafter."""
        length = len(self.sequence)
        return self._end - length - 1 if length > self._start else 0

    def take(self, verdict: Verdict) -> Piece:
        """Read what a round committed, up to where the text ends; later tokens are taken back."""
        self.stats.count(verdict)
        tokens = verdict.tokens.tolist()
        begin = len(self.sequence) - len(tokens)
        shown, used, stopped = "", 0, False
        for used, token in enumerate(tokens, 1):
            if token in self._stop_ids:
                self.finish_reason = "stop"
                break
            text = self._detokenizer.push(token)
            early = len(self.token_ids) + used <= self._min_tokens
            text, stopped = (text, False) if early else self._stops.push(text)
            shown += text
            if stopped:
                self.finish_reason = "stop"
            elif token in self._eos:
                self.finish_reason = "eos"
            elif begin + used >= self._end:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        self.sequence.rewind(begin + used)
        if self.finish_reason and not stopped:
            shown += self._rest()
        self.text += shown
        logprobs = None
        if self.logprobs is not None and self._params.logprobs is not None:
            count = self._params.logprobs
            logprobs = [logprobs_of(verdict.logits[i], token, count) for i, token in enumerate(tokens[:used])]
            self.logprobs += logprobs
        self.token_ids += tokens[:used]
        self.stats.generated_tokens = len(self.token_ids)
        return Piece(shown, tokens[:used], self.finish_reason, logprobs)

    def cancel(self) -> Piece:
        """End the text where it is, unless it has ended already."""
        if self.finish_reason:
            return Piece("", [], self.finish_reason)
        self.finish_reason = "cancelled"
        rest = self._rest()
        self.text += rest
        return Piece(rest, [], "cancelled")

    def result(self) -> Result:
        """Of a text that has ended."""
        assert self.finish_reason
        return Result(self.text, self.token_ids, self.finish_reason, self.stats, self.logprobs)

    def _rest(self) -> str:
        shown, stopped = self._stops.push(self._detokenizer.flush())
        return shown if stopped else shown + self._stops.flush()


def read_once(target: Decoder, prompts: list[Sequence], shared: int) -> None:
    """Read all but the last token of each prompt, and fork ``shared`` rows from each."""
    target.reset(len(prompts))
    if any(len(prompt) > 1 for prompt in prompts):
        target.feed([prompt.tokens[:-1] for prompt in prompts], [0] * len(prompts))
    target.reorder([prompt for prompt in range(len(prompts)) for _ in range(shared)])


def generate_rows(
    target: Decoder, drafter: Drafter | None, rows: list[Row], lookahead: Lookahead, shared: int = 1
) -> Iterator[list[tuple[int, Piece]]]:
    """Run rounds until every row is finished; yields (row, piece) for the rows of each round.

    ``target`` and ``drafter`` hold one row for each of ``rows``. Finished rows leave the batch.
    Each ``shared`` rows that follow each other have the same prompt, which is read once.
    On Ctrl-C the round is finished, its pieces and then a last one "cancelled" are yielded, and
    KeyboardInterrupt is raised.
    """
    began = time.perf_counter()
    target_before, draft_before = target.seconds, drafter.seconds if drafter else 0.0
    for i, row in enumerate(rows):
        row.stats.cached_tokens = len(row.sequence) - len(catch_up(target, i, row.sequence))
    if shared > 1:
        read_once(target, [row.sequence for row in rows[::shared]], shared)

    def note_times(stats: Stats) -> None:
        elapsed = (time.perf_counter() - began) * 1e3
        if stats.rounds == 1:  # it commits one token: nothing is proposed before the first
            stats.ttft_ms = elapsed
        if stats.generated_tokens > 1:
            stats.tpot_ms = (elapsed - stats.ttft_ms) / (stats.generated_tokens - 1)
        stats.target_ms = (target.seconds - target_before) * 1e3
        stats.draft_ms = (drafter.seconds - draft_before) * 1e3 if drafter else 0.0
        stats.other_ms = elapsed - stats.target_ms - stats.draft_ms

    active = list(range(len(rows)))
    interrupts = HeldInterrupts()
    try:
        while active:
            interrupts.holding = True
            going = [rows[i] for i in active]
            round = Round(
                [row.sequence for row in going],
                [row.remaining() for row in going],
                [row.sampler for row in going],
                lookahead,
            )
            verdicts = speculate(target, drafter, round)
            pieces = [(i, rows[i].take(verdict)) for i, verdict in zip(active, verdicts, strict=True)]
            left = [place for place, i in enumerate(active) if not rows[i].finish_reason]
            for i in active:
                if rows[i].finish_reason or rows[i].stats.rounds == 1:
                    note_times(rows[i].stats)
            if left and len(left) < len(active):
                target.reorder(left)
                if drafter:
                    drafter.reorder(left)
            active = [active[place] for place in left]
            interrupts.holding = False
            yield pieces
            if interrupts.pressed:
                yield [(i, rows[i].cancel()) for i in active]
                raise KeyboardInterrupt
    finally:
        interrupts.stop()
        for i in active:
            note_times(rows[i].stats)
