"""A row: a text during its generation, from rounds of tokens to pieces of text."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

from ovspec.cache.sequence import Sequence
from ovspec.drafting.drafter import DraftLimits, RowToDraft
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
    """Holds back a possible beginning of a stop string."""

    def __init__(self, stop_strings: list[str]) -> None:
        self._stop_strings = stop_strings
        self._first_characters = {stop_string[0] for stop_string in stop_strings}
        self._pending_text = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add ``text``; return (text to show, the stop string after it, if any)."""
        if not self._stop_strings:
            return text, None
        text = self._pending_text + text
        stop_matches = [
            (begin, stop_string) for stop_string in self._stop_strings if (begin := text.find(stop_string)) >= 0
        ]
        if stop_matches:
            end, stop_string = min(stop_matches)
            self._pending_text = ""
            return text[:end], stop_string
        end = self._find_unfinished_stop_string(text)
        self._pending_text = text[end:]
        return text[:end], None

    def flush(self) -> str:
        text, self._pending_text = self._pending_text, ""
        return text

    def _find_unfinished_stop_string(self, text: str) -> int:
        """Return the index of an unfinished stop string at the end of ``text``, or the text's length."""
        for start_index, character in enumerate(text):
            if character in self._first_characters and any(
                stop_string.startswith(text[start_index:]) for stop_string in self._stop_strings
            ):
                return start_index
        return len(text)


class IndentationFilter:
    """Holds back the indentation of a line, and ends the text before a line indented by less than ``min_indent``."""

    def __init__(self, min_indent: int) -> None:
        self._min_indent = min_indent
        self._pending_text = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add ``text``; return (text to show, whether the text ends there)."""
        if not self._min_indent:
            return text, False
        text, self._pending_text = self._pending_text + text, ""
        for line_start in re.finditer(r"\n([ \t]*)", text):
            if line_start.end() == len(text):
                self._pending_text = line_start[0]
                return text[: line_start.start()], False
            if len(line_start[1]) < self._min_indent:
                return text[: line_start.start()], True
        return text, False

    def flush(self) -> str:
        text, self._pending_text = self._pending_text, ""
        return text


class Row:
    """A text during its generation: its tokens, its characters so far, and its end.

    Args:
        sequence: the prompt without the tokens removed by healing; rounds commit the generated tokens to it.
        params: the call's params, with a number as ``max_tokens``.
        eos_ids: ids at the end of a text, in addition to ``params.stop_ids``.
        context_length: maximum number of tokens, including the prompt.
        record: the provenance of the text; ``add_outcome`` adds to its ``healed_ids``.
        healing: has the removed tokens, if any; the text must begin with their bytes.
        reader: parses the text of an answer in a chat; the detokenizer then marks tags for it.
    """

    def __init__(
        self,
        sequence: Sequence,
        params: Params,
        sampler: Sampler,
        detokenizer: Detokenizer,
        stats: Stats,
        *,
        eos_ids: frozenset[int] = frozenset(),
        context_length: float = math.inf,
        record: Provenance | None = None,
        healing: Healing | None = None,
        reader: AnswerReader | None = None,
    ) -> None:
        self.params = params
        self.record = record
        self.draft_limits = DraftLimits(None, params.lookahead_limit)
        # Whether the text ends before its first token, once the prompt is in the KV cache.
        self.prefill_only = params.max_tokens == 0
        self.waits_for_memory = False  # that other texts hold
        self.error: Exception | None = None  # the cause of a failed text; its finish reason is then "cancelled"
        self.sequence = sequence
        self.sampler = sampler
        self.stats = stats
        self.healing = healing
        self.text = ""
        self.thinking = ""
        self._answer_reader = reader
        self.token_ids: list[int] = []
        self.sources: list[str] = []  # of each of these tokens
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None  # at the end of the text
        self._schema_errors: list[str] | None = None
        self.prompt_length = len(sequence)
        stats.cached_tokens = self.prompt_length  # corrected during prefill
        self._read_token_count = 0
        # The maximum number of tokens of the text, including the prompt; prefill alone needs room for one token, too.
        self.max_length = int(min(self.prompt_length + max(params.token_limit, 1), context_length))
        self._context_length = context_length
        self._min_tokens = params.min_tokens or 0
        self._eos_ids = eos_ids
        self._stop_ids = frozenset(params.stop_ids)
        self._detokenizer = detokenizer
        self._stop_filter = StopStringFilter(params.stop_strings)
        self._indentation_filter = IndentationFilter(params.min_indent)
        self._ends_by_indentation = False
        self._started_at: float | None = None  # time of the first token
        self._constraints_may_complete = sampler.constraints.may_complete

    def limit_length(self, max_length: int) -> None:
        """Limit the text to ``max_length`` tokens, including the prompt, as if set in its params."""
        if max_length < self.max_length:
            self.max_length = max_length
            self._context_length = min(self._context_length, max_length)
            self._record_max_tokens(max_length - self.prompt_length)

    def make_row_to_draft(self) -> RowToDraft:
        """Return this row for the next round. Nothing is drafted before the first token, to keep its latency low."""
        budget = self.max_length - len(self.sequence)
        draft_limits = NO_DRAFTING if self.prefill_only else self.draft_limits
        return RowToDraft(self.sequence, self.sampler, budget, self.stats.rounds > 0, draft_limits)

    def add_outcome(self, outcome: RowOutcome) -> Piece:
        """Turn a round's committed tokens into a piece of text; roll back tokens after the end of the text."""
        tokens = outcome.tokens.tolist()
        length_before = len(self.sequence) - len(tokens)
        if self.prefill_only and tokens:
            self.finish_reason = "length"
            self._count_outcome(outcome, 0)
            self.sequence.rewind(length_before)
            return Piece("", [], "length")
        is_out_of_time = bool(tokens) and self._is_out_of_time()
        answer_parts = AnswerContent()
        visible_start = used_count = 0  # tokens[visible:used] are in the text; earlier tokens only spell its prompt
        for used_count, token in enumerate(tokens, 1):
            text_length = length_before + used_count
            healed_bytes = 0
            if self.healing and not self.token_ids and visible_start == used_count - 1:
                healed_bytes = self.healing.count_healed_bytes(self.sequence.tokens[:text_length])
                if healed_bytes is None:
                    visible_start = used_count
                    if self.record:
                        self.record.healed_ids.append(token)
                    self.max_length = int(min(self.max_length + 1, self._context_length))
                    if text_length >= self.max_length:  # the context is full without any new text
                        self.finish_reason = "length"
                        break
                    continue
            if token in self._stop_ids:
                self.finish_reason = "stop"
                break
            text = self._detokenizer.push(token, healed_bytes)
            ends_for_time = False
            if self._answer_reader and self._answer_reader.phase == "calls":  # never stop in the middle of a call
                text = self._indentation_filter.flush() + self._stop_filter.flush() + text
            elif len(self.token_ids) + used_count - visible_start > self._min_tokens:
                ends_for_time = is_out_of_time and "\n" in text
                text = self._filter_text(text)
            self.stats.thinking_tokens += bool(self._answer_reader and self._answer_reader.phase == "thinking")
            self._parse_text(text, answer_parts)
            if self.stop_string is not None:
                self.finish_reason = "stop"
            elif self._ends_by_indentation:
                self.finish_reason = "length"
            elif token in self._eos_ids:
                self.finish_reason = "eos"
            elif self._constraints_may_complete and self.sampler.constraints.is_complete(
                self.sequence.tokens[:text_length]
            ):
                self.finish_reason = "stop"
            elif text_length >= self.max_length:
                self.finish_reason = "length"
            elif ends_for_time:
                self.finish_reason = "length"
                self._record_max_tokens(
                    len(self.token_ids) + used_count - visible_start
                )  # the same text is made without a clock
            if self.finish_reason:
                break
        self._count_outcome(outcome, used_count)
        self.sequence.rewind(length_before + used_count)
        if self.finish_reason and self.stop_string is None and not self._ends_by_indentation:
            self._parse_text(self._flush_text(), answer_parts)
        self._append_answer_parts(answer_parts)
        self.token_ids += tokens[visible_start:used_count]
        self.stats.generated_tokens = len(self.token_ids)
        logprobs = None
        if self.logprobs is not None:
            top_count = self.params.logprobs or 0
            logprobs = [
                make_token_logprob(outcome.logits[index], tokens[index], top_count)
                for index in range(visible_start, used_count)
            ]
            self.logprobs += logprobs
        sources = ["forced"] * outcome.forced_count + [outcome.proposal.source] * outcome.accepted_count
        sources += ["target"] * (len(tokens) - len(sources))
        sources = sources[visible_start:used_count]
        self.sources += sources
        piece_fields = tokens[visible_start:used_count], self.finish_reason, logprobs, sources
        return Piece(answer_parts.text, *piece_fields, answer_parts.thinking, answer_parts.calls)

    def fail(self, error: Exception) -> Piece:
        """End the text where it is, because of ``error``."""
        self.error = error
        return self.cancel()

    def cancel(self) -> Piece:
        """End the text where it is, unless it has already ended."""
        if self.finish_reason:
            return Piece("", [], self.finish_reason)
        self.finish_reason = "cancelled"
        answer_parts = AnswerContent()
        self._parse_text(self._flush_text(), answer_parts)
        self._append_answer_parts(answer_parts)
        return Piece(answer_parts.text, [], "cancelled", thinking=answer_parts.thinking, tool_calls=answer_parts.calls)

    def result(self) -> Result:
        """Return the result of a finished text; the first call may check its schema for seconds."""
        assert self.finish_reason
        find_schema_errors = self.sampler.constraints.find_errors
        if find_schema_errors and not self.prefill_only and self._schema_errors is None:
            self._schema_errors = find_schema_errors(self.text, self.tool_calls)
        record_fields = self.stats, self.logprobs, self.record, self._schema_errors
        answer_fields = self.thinking, self.tool_calls, self.stop_string
        return Result(self.text, self.token_ids, self.finish_reason, *record_fields, *answer_fields, self.sources)

    @property
    def parses_answer(self) -> bool:
        """Whether the text is parsed as an answer, with parts other than text."""
        return self._answer_reader is not None

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls in the text so far."""
        return self._answer_reader.calls if self._answer_reader else []

    def _parse_text(self, text: str, answer_parts: AnswerContent) -> None:
        """Add ``text`` to the ``answer_parts`` of an answer: text, thinking and tool calls."""
        if self._answer_reader:
            self._answer_reader.push(text, answer_parts)
        else:
            answer_parts.text += text

    def _append_answer_parts(self, answer_parts: AnswerContent) -> None:
        """Append the new ``answer_parts`` to the row's text and thinking."""
        if self._answer_reader and self.finish_reason:
            self._answer_reader.flush(answer_parts)
        self.text += answer_parts.text
        self.thinking += answer_parts.thinking

    def _count_outcome(self, outcome: RowOutcome, used_count: int) -> None:
        stats = self.stats
        forced_count = outcome.forced_count
        if not stats.rounds:  # a grammar may force tokens before prefill
            self._read_token_count += outcome.read_count - forced_count
            # Tokens count as read as often as they were: again if the row was set back meanwhile.
            stats.cached_tokens = max(0, min(self.prompt_length, self.prompt_length - self._read_token_count))
        stats.forced += min(forced_count, used_count)
        stats.rounds += len(outcome.tokens) > forced_count
        if self.finish_reason and not stats.rounds:
            stats.cached_tokens = 0  # the prompt was never needed
        accepted_count = max(0, min(outcome.accepted_count, used_count - forced_count))
        proposed_count = accepted_count if used_count < len(outcome.tokens) else len(outcome.proposal.tokens)
        if proposed_count:
            stats.count_proposal(outcome.proposal.source, proposed_count, accepted_count)

    def _flush_text(self) -> str:
        """Return the end of the text, held back by the detokenizer and the filters."""
        text, stop_string = self._stop_filter.push(self._detokenizer.flush())
        if not stop_string:
            text += self._stop_filter.flush()
        text, ends_by_indentation = self._indentation_filter.push(text)
        if not ends_by_indentation:
            text += self._indentation_filter.flush()
        return text

    def _filter_text(self, text: str) -> str:
        """Return the text to show after the new ``text``; note an end by a stop string or indentation."""
        text, self.stop_string = self._stop_filter.push(text)
        text, self._ends_by_indentation = self._indentation_filter.push(text)
        if self._ends_by_indentation:  # before any stop string
            self.stop_string = None
        elif self.stop_string is not None:
            text += self._indentation_filter.flush()
        return text

    def _record_max_tokens(self, max_tokens: int) -> None:
        """Record a limit of ``max_tokens`` tokens."""
        if self.record:
            self.record = replace(self.record, params=replace(self.record.params, max_tokens=max_tokens))

    def _is_out_of_time(self) -> bool:
        """Return whether the text has taken longer than ``max_predict_ms`` since the first call."""
        if self.params.max_predict_ms <= 0:
            return False
        current_time = time.monotonic()
        if self._started_at is None:
            self._started_at = current_time
        return self.params.max_predict_ms < 1e3 * (current_time - self._started_at)


class TextStream:
    """A text during its generation; iterate over it once for a ``Piece`` per round.

    Ctrl-C during a round ends the text with a piece "cancelled" and then raises KeyboardInterrupt.
    """

    def __init__(self, pieces: Generator[Piece], row: Row, on_end: Callable[[], None] = lambda: None) -> None:
        self._pieces = pieces
        self._row = row
        self._on_end = on_end

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def cancel(self) -> None:
        """End the text here."""
        self._pieces.close()
        self._row.cancel()
        self._on_end()

    def result(self) -> Result:
        """Finish the text, and return it with its statistics."""
        for _ in self._pieces:
            pass
        self.cancel()  # has no effect unless an exception ended the stream
        return self._row.result()
