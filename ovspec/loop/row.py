"""The text level: from rounds of tokens to pieces of text, stop strings, results and statistics."""

from __future__ import annotations

import math

from ovspec.decoders.sequence import Sequence
from ovspec.loop.results import FinishReason, Piece, Result, Stats
from ovspec.loop.round import RoundResult
from ovspec.options import SamplingParams
from ovspec.sampling.logprobs import TokenLogprob, logprobs_of
from ovspec.sampling.samplers import Sampler
from ovspec.text.tokenizer import Detokenizer


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

    def take(self, verdict: RoundResult) -> Piece:
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
