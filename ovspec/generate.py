"""The text level: from rounds of tokens to pieces of text, stop strings, results and statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ovspec.sampler import Sampler
from ovspec.sampling import SamplingParams, TokenLogprob, logprobs_of
from ovspec.sequence import Sequence
from ovspec.speculation import Verdict
from ovspec.tokenizer import Detokenizer

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

    def count(self, verdict: Verdict, used: int) -> None:
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
        sequence: prompt, without what was taken back of it, and, as rounds commit to it, what follows.
        max_tokens: tokens to generate at most.
        eos: ids that end the text, besides those of ``params``.
        prompt_tokens: in the whole prompt.
        taken_back: bytes at its end that token healing has taken back; the text must begin with them.
        longest: tokens that the model's context holds.
    """

    def __init__(
        self,
        sequence: Sequence,
        detokenizer: Detokenizer,
        sampler: Sampler,
        params: SamplingParams,
        max_tokens: int,
        eos: frozenset[int],
        prompt_tokens: int,
        taken_back: bytes = b"",
        longest: float = math.inf,
    ) -> None:
        self.sequence, self.sampler = sequence, sampler
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.stats = Stats(prompt_tokens=prompt_tokens, cached_tokens=len(sequence))  # until it is read
        self._end, self._longest = min(len(sequence) + max_tokens, longest), longest
        self._params, self._min_tokens = params, params.min_tokens or 0
        self._detokenizer, self._stops, self._eos = detokenizer, StopStrings(params.stop_strings), eos
        self._stop_ids = frozenset(params.stop_ids)
        self.start, self.taken_back = len(sequence), taken_back
        self._to_say_again = len(taken_back)  # bytes
        self._may_complete = sampler.constraints.may_complete

    @property
    def most(self) -> int:
        """Tokens that the text may have in the end, with its prompt."""
        return int(self._end)

    @property
    def room(self) -> int:
        """Tokens that may be committed before the text is as long as it may become."""
        return self.most - len(self.sequence)

    def remaining(self) -> int:
        """Tokens that may be proposed. None before the first token: it must not wait for the drafter."""
        return self.room - 1 if self.stats.rounds else 0

    def take(self, verdict: Verdict) -> Piece:
        """Read what a round committed, if anything, up to where the text ends; later tokens are taken back."""
        tokens = verdict.tokens.tolist()
        begin = len(self.sequence) - len(tokens)
        shown, used, stopped, counted = "", 0, False, list[int]()  # places of tokens that are in the text
        for used, token in enumerate(tokens, 1):
            again = self._said_again(token) if self._to_say_again else 0
            if again is None:
                if begin + used >= self._end:  # the context is full before anything new was said
                    self.finish_reason = "length"
                    break
                continue
            counted.append(used - 1)
            if token in self._stop_ids:
                self.finish_reason = "stop"
                break
            text = self._detokenizer.push(token, again)
            early = len(self.token_ids) + len(counted) <= self._min_tokens
            text, stopped = (text, False) if early else self._stops.push(text)
            shown += text
            if stopped:
                self.finish_reason = "stop"
            elif token in self._eos:
                self.finish_reason = "eos"
            elif self._may_complete and self.sampler.constraints.complete(self.sequence.tokens[: begin + used]):
                self.finish_reason = "stop"
            elif begin + used >= self._end:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        self.stats.count(verdict, used)
        self.sequence.rewind(begin + used)
        if self.finish_reason and not stopped:
            shown += self._rest()
        self.text += shown
        ids, logprobs = [tokens[place] for place in counted], None
        if self.logprobs is not None and self._params.logprobs is not None:
            count = self._params.logprobs
            logprobs = [logprobs_of(verdict.logits[place], tokens[place], count) for place in counted]
            self.logprobs += logprobs
        self.token_ids += ids
        self.stats.generated_tokens = len(self.token_ids)
        sources = verdict.sources()
        return Piece(shown, ids, self.finish_reason, logprobs, [sources[place] for place in counted])

    def _said_again(self, token: int) -> int | None:
        """How many bytes of ``token`` were taken back from the prompt; None where it has no other."""
        again, length = self._to_say_again, self._detokenizer.length(token)
        self._to_say_again = max(0, again - length)
        if length > again:
            return again
        self._end = min(self._end + 1, self._longest)  # it isn't counted
        return None

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
