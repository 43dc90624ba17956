"""A row: one text that is being generated, made of a prompt, and from rounds of tokens to pieces of text."""

from __future__ import annotations

import functools
import math
import re
import secrets
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ovspec.base.errors import OvspecError, PromptError
from ovspec.cache.sequence import UNSHARED, Sequence
from ovspec.drafting.drafter import ANYTHING, DraftLimits, RowStep
from ovspec.engine.decoders import Models
from ovspec.engine.prompts import Prompt, PromptEncoder
from ovspec.engine.results import FinishReason, Origin, Piece, Provenance, Result, Stats
from ovspec.engine.round import RowOutcome
from ovspec.params import Params, make_params
from ovspec.sampling.constraint import Constraints
from ovspec.sampling.constraint_maker import ConstraintMaker
from ovspec.sampling.healing import Healing
from ovspec.sampling.logprobs import TokenLogprob, token_logprob
from ovspec.sampling.samplers import Sampler, sampler_of
from ovspec.text.answer import AnswerReader, Said, ToolCall
from ovspec.text.generation_config import DEFAULT_MAX_TOKENS
from ovspec.text.tokenizer import Detokenizer

UNDRAFTED = DraftLimits(frozenset(), 0)
UNPLACED = Origin()


class StopStrings:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, stops: list[str]) -> None:
        self._stops, self._firsts, self._held = stops, {stop[0] for stop in stops}, ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add ``text``; return (text that may be shown, the stop string that follows it, if any)."""
        if not self._stops:
            return text, None
        held = self._held + text
        places = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        end, stop = min(places) if places else (self._unfinished(held), None)
        self._held = "" if places else held[end:]
        return held[:end], stop

    def flush(self) -> str:
        shown, self._held = self._held, ""
        return shown

    def _unfinished(self, text: str) -> int:
        """Return where the first stop string begins that ``text`` ends in the middle of; its length if none does."""
        for at, first in enumerate(text):
            if first in self._firsts and any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)


class Indentation:
    """Holds back the beginning of a line, and ends the text before one that is indented less than ``least``."""

    def __init__(self, least: int) -> None:
        self._least, self._held = least, ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add ``text``; return (text that may be shown, whether the text ends behind it)."""
        if not self._least:
            return text, False
        held, self._held = self._held + text, ""
        for line in re.finditer(r"\n([ \t]*)", held):
            if line.end() == len(held):
                self._held = line[0]
                return held[: line.start()], False
            if len(line[1]) < self._least:
                return held[: line.start()], True
        return held, False

    def flush(self) -> str:
        shown, self._held = self._held, ""
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
        self.limits = ANYTHING  # of what is proposed
        # Whether the text ends before its first token, when its prompt is in the KV cache.
        self.only_reads = params.max_tokens == 0
        self.error: Exception | None = None  # why the text couldn't go on; its finish reason is then "cancelled"
        self.sequence, self.sampler, self.stats, self.healing = sequence, sampler, stats, healing
        self.text, self.thinking, self._reader = "", "", reader
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None  # that ended the text
        self._schema_errors: list[str] | None = None
        self.start = len(sequence)
        stats.cached_tokens, self._read = self.start, 0  # corrected as the prompt is read
        # The maximum number of tokens of the text, prompt included; reading alone needs room for one, too.
        self.most, self._context = int(min(self.start + max(params.most_tokens, 1), context)), context
        self._min_tokens = params.min_tokens or 0
        self._eos, self._stop_ids = eos, frozenset(params.stop_ids)
        self._detokenizer, self._stops = detokenizer, StopStrings(params.stop_strings)
        self._indentation, self._outdented = Indentation(params.min_indent), False
        self._began: float | None = None  # when the first token came
        self._may_complete = sampler.constraints.may_complete

    def limit(self, most: int) -> None:
        """Let the text have at most so many tokens, prompt included, as if its params said so."""
        if most < self.most:
            self.most, self._context = most, min(self._context, most)
            self._record_tokens(most - self.start)

    def row_step(self) -> RowStep:
        """Return the row for the next round. Drafters aren't asked before the first token, which must not wait."""
        budget = self.most - len(self.sequence)
        limits = UNDRAFTED if self.only_reads else self.limits
        return RowStep(self.sequence, self.sampler, budget, self.stats.rounds > 0, limits)

    def take(self, outcome: RowOutcome) -> Piece:
        """Turn the tokens that a round committed into a piece of text; roll back those after the end of the text."""
        tokens = outcome.tokens.tolist()
        begin = len(self.sequence) - len(tokens)
        if self.only_reads and tokens:
            self.finish_reason = "length"
            self._count(outcome, 0)
            self.sequence.rewind(begin)
            return Piece("", [], "length")
        late = self._is_late() if tokens else False
        said = Said()
        first = used = 0  # tokens[first:used] are in the text; those before spell only its prompt
        for used, token in enumerate(tokens, 1):
            length, healed = begin + used, 0
            if self.healing and not self.token_ids and first == used - 1:
                healed = self.healing.healed(self.sequence.tokens[:length])
                if healed is None:
                    first = used
                    if self.record:
                        self.record.healed_ids.append(token)
                    self.most = int(min(self.most + 1, self._context))
                    if length >= self.most:  # the context is full before anything new was generated
                        self.finish_reason = "length"
                        break
                    continue
            if token in self._stop_ids:
                self.finish_reason = "stop"
                break
            text, timed_out = self._detokenizer.push(token, healed), False
            if self._reader and self._reader.phase == "calls":  # a call isn't stopped in its middle
                text = self._indentation.flush() + self._stops.flush() + text
            elif len(self.token_ids) + used - first > self._min_tokens:
                timed_out = late and "\n" in text
                text = self._cut(text)
            self.stats.thinking_tokens += bool(self._reader and self._reader.phase == "thinking")
            self._say(text, said)
            if self.stop_string is not None:
                self.finish_reason = "stop"
            elif self._outdented:
                self.finish_reason = "length"
            elif token in self._eos:
                self.finish_reason = "eos"
            elif self._may_complete and self.sampler.constraints.complete(self.sequence.tokens[:length]):
                self.finish_reason = "stop"
            elif length >= self.most:
                self.finish_reason = "length"
            elif timed_out:
                self.finish_reason = "length"
                self._record_tokens(len(self.token_ids) + used - first)  # the same text is made without a clock
            if self.finish_reason:
                break
        self._count(outcome, used)
        self.sequence.rewind(begin + used)
        if self.finish_reason and self.stop_string is None and not self._outdented:
            self._say(self._rest(), said)
        self._add(said)
        self.token_ids += tokens[first:used]
        self.stats.generated_tokens = len(self.token_ids)
        logprobs = None
        if self.logprobs is not None:
            tops = self.params.logprobs or 0
            logprobs = [token_logprob(outcome.logits[index], tokens[index], tops) for index in range(first, used)]
            self.logprobs += logprobs
        sources = ["forced"] * outcome.forced + [outcome.proposal.source] * outcome.accepted
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
        said = Said()
        self._say(self._rest(), said)
        self._add(said)
        return Piece(said.text, [], "cancelled", thinking=said.thinking, tool_calls=said.calls)

    def result(self) -> Result:
        """Return the result of a text that has ended; its first call judges the text, which may take seconds."""
        assert self.finish_reason
        judge = None if self.only_reads else self.sampler.constraints.judge
        if judge and self._schema_errors is None:
            self._schema_errors = judge(self.text, self.tool_calls)
        said = self.thinking, self.tool_calls, self.stop_string
        parts = self.stats, self.logprobs, self.record, self._schema_errors, *said
        return Result(self.text, self.token_ids, self.finish_reason, *parts)

    @property
    def reads(self) -> bool:
        """Whether the text is read as an answer, which may have parts that aren't text."""
        return self._reader is not None

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls in the text so far."""
        return self._reader.calls if self._reader else []

    def _say(self, text: str, said: Said) -> None:
        """Add to ``said`` what ``text`` says."""
        if self._reader:
            self._reader.push(text, said)
        else:
            said.text += text

    def _add(self, said: Said) -> None:
        """Add to the text what was said since the last piece."""
        if self._reader and self.finish_reason:
            self._reader.flush(said)
        self.text += said.text
        self.thinking += said.thinking

    def _count(self, outcome: RowOutcome, used: int) -> None:
        stats, forced = self.stats, outcome.forced
        if not stats.rounds:  # a grammar may force tokens before the prompt has been read
            self._read += outcome.read - forced
            stats.cached_tokens = min(self.start, self.start - self._read)
        stats.forced += min(forced, used)
        stats.rounds += len(outcome.tokens) > forced
        if self.finish_reason and not stats.rounds:
            stats.cached_tokens = 0  # the prompt was never needed
        accepted = max(0, min(outcome.accepted, used - forced))
        proposed = accepted if used < len(outcome.tokens) else len(outcome.proposal.tokens)
        if proposed:
            stats.count_proposal(outcome.proposal.source, proposed, accepted)

    def _rest(self) -> str:
        shown, stop = self._stops.push(self._detokenizer.flush())
        shown, outdented = self._indentation.push(shown if stop else shown + self._stops.flush())
        return shown if outdented else shown + self._indentation.flush()

    def _cut(self, text: str) -> str:
        """Return what may be shown once ``text`` has come, and note what has ended the text."""
        shown, self.stop_string = self._stops.push(text)
        shown, self._outdented = self._indentation.push(shown)
        if self._outdented:  # before any stop string
            self.stop_string = None
        elif self.stop_string is not None:
            shown += self._indentation.flush()
        return shown

    def _record_tokens(self, count: int) -> None:
        """Record that the text may have so many tokens."""
        if self.record:
            self.record = replace(self.record, params=replace(self.record.params, max_tokens=count))

    def _is_late(self) -> bool:
        """Return whether the time is over that the text may take; its first call begins to count."""
        if self.params.max_predict_ms <= 0:
            return False
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        return self.params.max_predict_ms < 1e3 * (now - self._began)


class TextStream:
    """A text as it is generated; iterate over it once to get a ``Piece`` for each round.

    Ctrl-C during a round ends the text with a piece "cancelled" and then raises KeyboardInterrupt.
    """

    def __init__(self, pieces: Generator[Piece], row: Row, ended: Callable[[], None] = lambda: None) -> None:
        self._pieces, self._row, self._ended = pieces, row, ended

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def cancel(self) -> None:
        """End the text here."""
        self._pieces.close()
        self._row.cancel()
        self._ended()

    def result(self) -> Result:
        """Return the whole text and its statistics; generate first what is still missing."""
        for _ in self._pieces:
            pass
        self.cancel()  # has no effect unless an exception ended the stream
        return self._row.result()


@dataclass(frozen=True)
class RowMaker:
    """Completes the params of calls for a model, and makes rows of prompts. Threads may share it.

    lookahead: tokens proposed per round; None to choose automatically.
    identity: returns the target's identity and settings, for records of texts.
    """

    prompts: PromptEncoder
    models: Models
    constraints: ConstraintMaker
    lookahead: int | None
    identity: Callable[[], dict[str, Any]]

    def params(self, options: Mapping[str, Any]) -> Params:
        """Return the params of a call from Python's keywords, complete; see ``complete``."""
        return self.complete(make_params(options))

    def complete(self, params: Params) -> Params:
        """Return ``params`` with the defaults of this model, its generation config and its lookahead.

        Raises:
            OvspecError: token ids are unknown, or a lookahead is given and nothing can propose tokens.
        """
        lookahead = self.lookahead if params.lookahead is None else params.lookahead
        if lookahead not in (None, "auto", 0) and not self.models.choice and not params.grammar_option:
            raise OvspecError("`lookahead` needs something that proposes tokens; name a draft or lookup.")
        known = self.prompts.tokenizer.known
        for name, ids in (("logit_bias", params.logit_bias), ("stop_ids", params.stop_ids)):
            if len(ids) and (unknown := known.first_unknown(np.array(list(ids)))) is not None:
                raise OvspecError(f"`{name}`: token id {str(unknown)[:20]} is not in the vocabulary.")
        config = self.prompts.generation_config.values
        defaults: dict[str, Any] = {"lookahead": None if lookahead == "auto" else lookahead}
        if params.repetition_penalty is None:
            defaults["repetition_penalty"] = config.repetition_penalty
        if params.min_tokens is None and config.min_new_tokens:
            defaults["min_tokens"] = int(min(config.min_new_tokens, params.most_tokens))
        if config.suppress_tokens:
            defaults["logit_bias"] = dict.fromkeys(config.suppress_tokens, -np.inf) | dict(params.logit_bias)
        return replace(params, **defaults)

    def most_tokens(self, params: Params) -> float:
        """Return the maximum number of tokens of a text; inf if only the context limits it."""
        most = self.prompts.generation_config.values.max_new_tokens or DEFAULT_MAX_TOKENS
        return most if params.max_tokens is None else params.most_tokens

    def make(self, prompt: Prompt, params: Params, reserved: bool = False) -> list[Row]:
        """Return a row for each of the ``n`` texts of a prompt.

        ``params`` are complete, but may lack a seed. ``reserved``: the caller has reserved the memory.

        Raises:
            OvspecError: the prompt can't be encoded or doesn't fit, or the grammar is wrong.
        """
        context = self.models.target.ir.context_length or math.inf
        room = context - min(self.most_tokens(params), DEFAULT_MAX_TOKENS)
        ids, chat, healable, ends = self.prompts.encode_prompt(prompt, params, room)
        if ends and not params.ignore_eos:
            params = replace(params, stop_ids=[*params.stop_ids, *ends])
        params = with_seed(params)
        rows = [self.row(Sequence(ids), params, Origin(chat, healable, None, sample)) for sample in range(params.n)]
        for row in rows if not reserved else ():
            self.reserve(row, params)
        return rows

    def row(self, sequence: Sequence, params: Params, origin: Origin = UNPLACED) -> Row:
        """Return a row that continues ``sequence``; ``params`` are complete.

        Raises:
            OvspecError: the text doesn't fit the context, or the grammar doesn't allow it.
        """
        prompts, prompt_tokens = self.prompts, len(sequence)
        config = prompts.generation_config
        context = origin.context or self.models.target.ir.context_length or math.inf
        if (left := context - max(prompt_tokens, 1)) < 1:
            told = f"The prompt has {prompt_tokens} tokens, but the context is {context}; shorten the prompt."
            raise PromptError(told, too_long=True)
        params = replace(params, max_tokens=int(min(self.most_tokens(params), left, sys.maxsize)))
        eos = frozenset() if params.ignore_eos else config.eos_ids
        if prompts.template and not params.ignore_eos:
            params = replace(params, stop_ids=[*params.stop_ids, *prompts.answer_ends])
        if not prompt_tokens:
            sequence.commit(config.beginning)
        if not (self.models.shares_greedy or params.sampled):
            sequence.owner = UNSHARED
        constraints, healing = unconstrained(eos | frozenset(params.stop_ids)), None
        answer = prompts.answer_format(sequence.tokens, params) if origin.chat else None
        if params.constrains:
            made = self.constraints.make(sequence.tokens, params, eos, config.bos, origin.healable, answer)
            constraints, healing = made
        recorded = replace(params, max_predict_ms=0.0)  # a verification takes another time
        record = Provenance(sequence.tokens.copy(), recorded, origin, self.identity)
        sampler = sampler_of(params, origin.sample, constraints)
        if healing:  # nothing can fail from here on
            healing.take_back(sequence)
        reader = None
        if answer:
            answer = replace(answer, tools=answer.tools if params.tool_use.names else None)
            key = sequence.tokens.tobytes() + origin.sample.to_bytes(4)
            reader = AnswerReader(answer, self.constraints.strings(params, answer), key)
        return Row(
            sequence,
            params,
            sampler,
            prompts.tokenizer.detokenizer(answer.marks if answer else None),
            self._stats(params, prompt_tokens),
            eos=eos,
            context=context,
            record=record,
            healing=healing,
            reader=reader,
        )

    def reserve(self, row: Row, params: Params, cached: int = 0) -> None:
        """Raise OvspecError if there is no memory for a row, of which ``cached`` tokens are in the KV cache.

        Where ``params`` don't limit the text, memory for the default number of tokens is enough.
        """
        most = row.most if params.max_tokens == row.params.max_tokens else min(row.most, row.start + DEFAULT_MAX_TOKENS)
        self.models.check_memory(most - cached, drafts=params.lookahead != 0)

    def _stats(self, params: Params, prompt_tokens: int) -> Stats:
        target, draft = self.models.target, None if params.lookahead == 0 else self.models.draft
        return Stats(
            prompt_tokens=prompt_tokens,
            seed=params.seed if params.temperature else None,
            rollback=target.rollback.label,
            device=target.ir.device,
            draft_device=draft.ir.device if draft else None,
            engine=target.engine,
            engine_reason=target.reason,
            draft_engine=draft.engine if draft else None,
            profile=target.profile,
            arithmetic=target.promise,
            rule=target.rule.label if target.promise == "exact" else "",
        )


@functools.lru_cache(64)
def unconstrained(ends: frozenset[int]) -> Constraints:
    """Return the constraints of a text that nothing constrains, and that these ids end."""
    return Constraints((), ends)


def with_seed(params: Params) -> Params:
    """Return ``params`` with a random seed if they draw tokens and have none."""
    return params if params.seed is not None or not params.temperature else replace(params, seed=secrets.randbits(32))
