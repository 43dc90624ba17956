"""A row: one text that is being generated, from rounds of tokens to pieces of text."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

from ovspec.cache.sequence import Sequence
from ovspec.drafting.drafter import DraftLimits, RowStep
from ovspec.engine.results import FinishReason, Piece, Provenance, Result, Stats
from ovspec.engine.round import RowOutcome
from ovspec.params import Params
from ovspec.sampling.healing import Healing
from ovspec.sampling.logprobs import TokenLogprob, make_token_logprob
from ovspec.sampling.samplers import Sampler
from ovspec.text.answer import AnswerContent, AnswerReader, ToolCall
from ovspec.text.tokenizer import Detokenizer

NO_DRAFTING = DraftLimits(frozenset(), 0)


class StopStringFilter:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, stops: list[str]) -> None:
        self._stops, self._firsts, self._pending = stops, {stop[0] for stop in stops}, ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add ``text``; return (text that may be shown, the stop string that follows it, if any)."""
        if not self._stops:
            return text, None
        held = self._pending + text
        places = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        end, stop = min(places) if places else (self._unfinished(held), None)
        self._pending = "" if places else held[end:]
        return held[:end], stop

    def flush(self) -> str:
        shown, self._pending = self._pending, ""
        return shown

    def _unfinished(self, text: str) -> int:
        """Return where the first stop string begins that ``text`` ends in the middle of; its length if none does."""
        for at, first in enumerate(text):
            if first in self._firsts and any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)


class IndentationFilter:
    """Holds back the beginning of a line, and ends the text before one that is indented less than ``least``."""

    def __init__(self, least: int) -> None:
        self._least, self._pending = least, ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add ``text``; return (text that may be shown, whether the text ends behind it)."""
        if not self._least:
            return text, False
        held, self._pending = self._pending + text, ""
        for line in re.finditer(r"\n([ \t]*)", held):
            if line.end() == len(held):
                self._pending = line[0]
                return held[: line.start()], False
            if len(line[1]) < self._least:
                return held[: line.start()], True
        return held, False

    def flush(self) -> str:
        shown, self._pending = self._pending, ""
        return shown


class Row:
    """One text that is being generated: its tokens, the text they spell so far, and when it ends.

    Args:
        sequence: the prompt without the tokens that healing took back; rounds commit the generated tokens to it.
        params: those of its call, with a number as ``max_tokens``.
        eos: ids that end the text, besides ``params.stop_ids``.
        context: maximum number of tokens, prompt included.
        record: how the text is made; ``take`` adds to its ``healed_ids``.
        healing: holds the tokens that were taken back, if any; the text must begin with their bytes.
        reader: reads the text of an answer in a chat, whose detokenizer tells tags as it wants them.
    """

    def __init__(
        self,
        sequence: Sequence,
        params: Params,
        sampler: Sampler,
        detokenizer: Detokenizer,
        stats: Stats,
        *,
        eos: frozenset[int] = frozenset(),
        context: float = math.inf,
        record: Provenance | None = None,
        healing: Healing | None = None,
        reader: AnswerReader | None = None,
    ) -> None:
        self.params, self.record = params, record
        self.draft_limits = DraftLimits(None, params.lookahead_limit)  # of what is proposed
        # Whether the text ends before its first token, when its prompt is in the KV cache.
        self.prefill_only = params.max_tokens == 0
        self.error: Exception | None = None  # why the text couldn't go on; its finish reason is then "cancelled"
        self.sequence, self.sampler, self.stats, self.healing = sequence, sampler, stats, healing
        self.text, self.thinking, self._reader = "", "", reader
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None  # that ended the text
        self._schema_errors: list[str] | None = None
        self.prompt_length = len(sequence)
        stats.cached_tokens, self._read_count = self.prompt_length, 0  # corrected as the prompt is read
        # The maximum number of tokens of the text, prompt included; reading alone needs room for one, too.
        self.max_length, self._context = int(min(self.prompt_length + max(params.token_limit, 1), context)), context
        self._min_tokens = params.min_tokens or 0
        self._eos, self._stop_ids = eos, frozenset(params.stop_ids)
        self._detokenizer, self._stop_filter = detokenizer, StopStringFilter(params.stop_strings)
        self._indentation_filter, self._outdented = IndentationFilter(params.min_indent), False
        self._started_at: float | None = None  # when the first token came
        self._may_complete = sampler.constraints.may_complete

    def limit_length(self, max_length: int) -> None:
        """Let the text have at most so many tokens, prompt included, as if its params said so."""
        if max_length < self.max_length:
            self.max_length, self._context = max_length, min(self._context, max_length)
            self._record_max_tokens(max_length - self.prompt_length)

    def row_step(self) -> RowStep:
        """Return the row for the next round. Drafters aren't asked before the first token, which must not wait."""
        budget = self.max_length - len(self.sequence)
        limits = NO_DRAFTING if self.prefill_only else self.draft_limits
        return RowStep(self.sequence, self.sampler, budget, self.stats.rounds > 0, limits)

    def add_outcome(self, outcome: RowOutcome) -> Piece:
        """Turn the tokens that a round committed into a piece of text; roll back those after the end of the text."""
        tokens = outcome.tokens.tolist()
        begin = len(self.sequence) - len(tokens)
        if self.prefill_only and tokens:
            self.finish_reason = "length"
            self._count_outcome(outcome, 0)
            self.sequence.rewind(begin)
            return Piece("", [], "length")
        late = self._is_out_of_time() if tokens else False
        said = AnswerContent()
        first = used = 0  # tokens[first:used] are in the text; those before spell only its prompt
        for used, token in enumerate(tokens, 1):
            length, healed = begin + used, 0
            if self.healing and not self.token_ids and first == used - 1:
                healed = self.healing.count_healed_bytes(self.sequence.tokens[:length])
                if healed is None:
                    first = used
                    if self.record:
                        self.record.healed_ids.append(token)
                    self.max_length = int(min(self.max_length + 1, self._context))
                    if length >= self.max_length:  # the context is full before anything new was generated
                        self.finish_reason = "length"
                        break
                    continue
            if token in self._stop_ids:
                self.finish_reason = "stop"
                break
            text, timed_out = self._detokenizer.push(token, healed), False
            if self._reader and self._reader.phase == "calls":  # a call isn't stopped in its middle
                text = self._indentation_filter.flush() + self._stop_filter.flush() + text
            elif len(self.token_ids) + used - first > self._min_tokens:
                timed_out = late and "\n" in text
                text = self._filter_text(text)
            self.stats.thinking_tokens += bool(self._reader and self._reader.phase == "thinking")
            self._parse_text(text, said)
            if self.stop_string is not None:
                self.finish_reason = "stop"
            elif self._outdented:
                self.finish_reason = "length"
            elif token in self._eos:
                self.finish_reason = "eos"
            elif self._may_complete and self.sampler.constraints.is_complete(self.sequence.tokens[:length]):
                self.finish_reason = "stop"
            elif length >= self.max_length:
                self.finish_reason = "length"
            elif timed_out:
                self.finish_reason = "length"
                self._record_max_tokens(len(self.token_ids) + used - first)  # the same text is made without a clock
            if self.finish_reason:
                break
        self._count_outcome(outcome, used)
        self.sequence.rewind(begin + used)
        if self.finish_reason and self.stop_string is None and not self._outdented:
            self._parse_text(self._flush_text(), said)
        self._append_parts(said)
        self.token_ids += tokens[first:used]
        self.stats.generated_tokens = len(self.token_ids)
        logprobs = None
        if self.logprobs is not None:
            tops = self.params.logprobs or 0
            logprobs = [make_token_logprob(outcome.logits[index], tokens[index], tops) for index in range(first, used)]
            self.logprobs += logprobs
        sources = ["forced"] * outcome.forced_count + [outcome.proposal.source] * outcome.accepted_count
        sources += ["target"] * (len(tokens) - len(sources))
        parts = tokens[first:used], self.finish_reason, logprobs, sources[first:used]
        return Piece(said.text, *parts, said.thinking, said.calls)

    def fail(self, error: Exception) -> Piece:
        """End the text where it is, because of ``error``."""
        self.error = error
        return self.cancel()

    def cancel(self) -> Piece:
        """End the text where it is, unless it has already ended."""
        if self.finish_reason:
            return Piece("", [], self.finish_reason)
        self.finish_reason = "cancelled"
        said = AnswerContent()
        self._parse_text(self._flush_text(), said)
        self._append_parts(said)
        return Piece(said.text, [], "cancelled", thinking=said.thinking, tool_calls=said.calls)

    def result(self) -> Result:
        """Return the result of a text that has ended; its first call judges the text, which may take seconds."""
        assert self.finish_reason
        judge = None if self.prefill_only else self.sampler.constraints.find_errors
        if judge and self._schema_errors is None:
            self._schema_errors = judge(self.text, self.tool_calls)
        said = self.thinking, self.tool_calls, self.stop_string
        parts = self.stats, self.logprobs, self.record, self._schema_errors, *said
        return Result(self.text, self.token_ids, self.finish_reason, *parts)

    @property
    def parses_answer(self) -> bool:
        """Whether the text is read as an answer, which may have parts that aren't text."""
        return self._reader is not None

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls in the text so far."""
        return self._reader.calls if self._reader else []

    def _parse_text(self, text: str, said: AnswerContent) -> None:
        """Add to ``said`` what ``text`` says."""
        if self._reader:
            self._reader.push(text, said)
        else:
            said.text += text

    def _append_parts(self, said: AnswerContent) -> None:
        """Add to the text what was said since the last piece."""
        if self._reader and self.finish_reason:
            self._reader.flush(said)
        self.text += said.text
        self.thinking += said.thinking

    def _count_outcome(self, outcome: RowOutcome, used: int) -> None:
        stats, forced = self.stats, outcome.forced_count
        if not stats.rounds:  # a grammar may force tokens before the prompt has been read
            self._read_count += outcome.read_count - forced
            stats.cached_tokens = min(self.prompt_length, self.prompt_length - self._read_count)
        stats.forced += min(forced, used)
        stats.rounds += len(outcome.tokens) > forced
        if self.finish_reason and not stats.rounds:
            stats.cached_tokens = 0  # the prompt was never needed
        accepted = max(0, min(outcome.accepted_count, used - forced))
        proposed = accepted if used < len(outcome.tokens) else len(outcome.proposal.tokens)
        if proposed:
            stats.count_proposal(outcome.proposal.source, proposed, accepted)

    def _flush_text(self) -> str:
        shown, stop = self._stop_filter.push(self._detokenizer.flush())
        shown, outdented = self._indentation_filter.push(shown if stop else shown + self._stop_filter.flush())
        return shown if outdented else shown + self._indentation_filter.flush()

    def _filter_text(self, text: str) -> str:
        """Return what may be shown once ``text`` has come, and note what has ended the text."""
        shown, self.stop_string = self._stop_filter.push(text)
        shown, self._outdented = self._indentation_filter.push(shown)
        if self._outdented:  # before any stop string
            self.stop_string = None
        elif self.stop_string is not None:
            shown += self._indentation_filter.flush()
        return shown

    def _record_max_tokens(self, count: int) -> None:
        """Record that the text may have so many tokens."""
        if self.record:
            self.record = replace(self.record, params=replace(self.record.params, max_tokens=count))

    def _is_out_of_time(self) -> bool:
        """Return whether the time is over that the text may take; its first call begins to count."""
        if self.params.max_predict_ms <= 0:
            return False
        now = time.monotonic()
        self._started_at = now if self._started_at is None else self._started_at
        return self.params.max_predict_ms < 1e3 * (now - self._started_at)


class TextStream:
    """A text as it is generated; iterate over it once to get a ``Piece`` for each round.

    Ctrl-C during a round ends the text with a piece "cancelled" and then raises KeyboardInterrupt.
    """

    def __init__(self, pieces: Generator[Piece], row: Row, on_end: Callable[[], None] = lambda: None) -> None:
        self._pieces, self._row, self._on_end = pieces, row, on_end

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def cancel(self) -> None:
        """End the text here."""
        self._pieces.close()
        self._row.cancel()
        self._on_end()

    def result(self) -> Result:
        """Return the whole text and its statistics; generate first what is still missing."""
        for _ in self._pieces:
            pass
        self.cancel()  # has no effect unless an exception ended the stream
        return self._row.result()
