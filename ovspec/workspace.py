"""What models and sessions are built on: decoders, the encoding of prompts, rows, and running them."""

from __future__ import annotations

import copy
import functools
import math
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ovspec.constraints.base import Constraints
from ovspec.constraints.maker import ConstraintMaker, PromptTokens, grammar_asked
from ovspec.decoders.base import SessionDecoder
from ovspec.decoders.sequence import Sequence
from ovspec.drafting.choice import DraftChoice
from ovspec.drafting.costs import Costs
from ovspec.drafting.drafter import Drafter
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.lookup import corpus_of
from ovspec.drafting.making import make_drafter
from ovspec.errors import OvspecError, PromptError
from ovspec.ir.compile import CompiledIR
from ovspec.ir.memory import WORTH_CHECKING, check_memory, kv_bytes_per_token, recurrent_bytes, token_room
from ovspec.loop.results import Piece, Record, Stats
from ovspec.loop.row import Ending, Row
from ovspec.loop.scheduler import BatchLimits, Scheduler, run_rows
from ovspec.options import (
    GENERATE,
    SAMPLING,
    GenerateOptions,
    SamplingParams,
    batch_size,
    check_option,
    constrains,
    params_of,
    refuse_variables,
)
from ovspec.sampling.samplers import sampler_of
from ovspec.setup.engine import CompiledModel
from ovspec.setup.identity import described
from ovspec.text.chat_template import Message, chat_template
from ovspec.text.generation_config import DEFAULT_MAX_TOKENS, GenerationConfig
from ovspec.text.tokenizer import Tokenizer

# A text, token ids, or chat messages for the model's chat template.
Prompt = str | list[int] | np.ndarray | list[Message] | Message
Variables = Mapping[str, Any]  # of the chat template
PLAIN = Lookahead(0)  # proposes nothing, and keeps constraints from forcing tokens
KEPT_IDLE = 60.0  # seconds after which decoders that nobody took are dropped, when others are given back


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
    """Lends sets of decoders, which ``make`` makes when none is idle. Threads may share it."""

    def __init__(self, make: Callable[[], Decoders]) -> None:
        self._make = make
        self._idle: list[tuple[float, Decoders]] = []  # with the time since when; the longest idle first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of idle sets."""
        return len(self._idle)

    def take(self) -> Decoders:
        """Return a set without any rows, if possible the one given back last."""
        with self._lock:
            if self._idle:
                return self._idle.pop()[1]
        decoders = self._make()
        decoders.reset(0)  # a user's drafter may create its state there
        return decoders

    def give_back(self, decoders: Decoders) -> None:
        """Empty a set, which frees memory, and keep it for reuse."""
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


@dataclass(frozen=True)
class RowStart:
    """What a row starts with, besides its prompt and the options.

    cached: number of prompt tokens that are already in the KV cache.
    healable: position of the first token that healing may take back.
    context: maximum length of the text in tokens, if less than the model's context.
    seed: used if the options give none.
    sample, n: this is text number ``sample`` (from 0) of the ``n`` texts for its prompt.
    reserved: whether the caller sees to it that there is memory for the text.
    """

    cached: int = 0
    healable: int = 0
    context: int | None = None
    seed: int | None = None
    sample: int = 0
    n: int = 1
    reserved: bool = False


class Workspace:
    """The compiled models and everything that is made from them. Threads may share it.

    Args:
        folder: the exported folder of the target.
        choice: the drafters.
        lookahead: tokens proposed per round; None to choose automatically.
        corpus: texts that lookup may propose from.
    """

    def __init__(
        self,
        folder: Path,
        target: CompiledModel,
        draft: CompiledModel | None = None,
        choice: DraftChoice | None = None,
        lookahead: int | None = None,
        corpus: Iterable[str] = (),
    ) -> None:
        self.folder, self.target, self.draft, self.choice, self.lookahead = folder, target, draft, choice, lookahead
        self.tokenizer = Tokenizer(folder)
        self.generation_config = GenerationConfig(folder, target.ir.config, self.tokenizer)
        self._constraints = ConstraintMaker(self.tokenizer)
        self._unconstrained = functools.lru_cache(64)(lambda ends: Constraints((), ends))
        self.corpora = [corpus_of(self.tokenizer.encode(text.rstrip("\0"), False) for text in corpus)]
        self.pool = DecoderPool(self._make_decoders)
        self._token_bytes = sum(kv_bytes_per_token(ir) + recurrent_bytes(ir) for ir in self.irs())  # upper bound

    def with_drafters(self, choice: DraftChoice | None) -> Workspace:
        """Return a workspace of the same compiled models with other drafters; a draft model must be the loaded one."""
        other = copy.copy(self)
        other.choice, other.draft = choice, self.draft if choice and choice.model else None
        other.pool = DecoderPool(other._make_decoders)
        return other

    def fork(self, decoders: Decoders) -> Decoders:
        """Return other decoders that continue from what ``decoders`` hold."""
        draft = decoders.draft.fork() if decoders.draft else None
        return Decoders(decoders.target.fork(), self._drafter(draft), draft, copy.deepcopy(decoders.lookaheads))

    def _make_decoders(self) -> Decoders:
        draft = self.draft.decoder(self.tokenizer.known) if self.draft else None
        return Decoders(self.target.decoder(self.tokenizer.known), self._drafter(draft), draft)

    def _drafter(self, draft: SessionDecoder | None) -> Drafter | None:
        return make_drafter(self.choice, draft, self.corpora, self.tokenizer.known)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """The target's identity and settings, for records of texts."""
        return described(self.target)

    def irs(self, drafts: bool = True) -> list[CompiledIR]:
        """Return the compiled IRs of the target and, with ``drafts``, of the draft model."""
        return [model.ir for model in (self.target, self.draft if drafts else None) if model]

    # ------------------------------------------------------------ text and tokens

    def encode(self, prompt: Prompt, begins: bool = True, variables: Variables | None = None) -> np.ndarray:
        """Return the ids, (n,) int64. ``begins``: the prompt starts a text and gets the model's BOS if it has one."""
        prompt = [prompt] if isinstance(prompt, dict) else prompt  # a single message
        if not isinstance(prompt, (str, list, tuple, np.ndarray)):
            raise PromptError(f"A prompt must be a string, token ids or chat messages, not {prompt!r:.80}.")
        if is_chat(prompt):
            text = self.render(list(prompt), variables)  # type: ignore[arg-type]
            return self.tokenizer.encode(text, special=False)
        refuse_variables(variables)
        if begins and not len(prompt):
            return self.generation_config.beginning
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt) if begins else self.tokenizer.encode_more(prompt)
        try:
            ids = np.asarray(prompt, dtype=np.int64)
        except OverflowError:
            raise PromptError("A token id is too large to be in the vocabulary.") from None
        except (TypeError, ValueError):
            raise PromptError(f"A prompt must be a string, token ids or chat messages, not {prompt!r:.80}.") from None
        known = self.tokenizer.known
        if (unknown := known.first_unknown(ids)) is not None:
            upto = f" (0 to {known.size - 1})" if known.size else ""
            raise PromptError(f"Token id {unknown} is not in the vocabulary{upto}.")
        return ids

    def render(self, messages: list[Message], variables: Variables | None = None) -> str:
        """Return ``messages`` as the chat template writes them, special tokens spelt out, ready for an answer."""
        check_option("chat_template_kwargs", variables)
        return chat_template(self.folder).render(messages, variables=variables)

    def check_memory(self, tokens: int, drafts: bool = True) -> None:
        """Raise OvspecError if the states for ``tokens`` more tokens can't fit into free memory."""
        if tokens * self._token_bytes > WORTH_CHECKING:
            check_memory(self.irs(drafts), tokens)

    def check_room(self, tokens: int, context: int | None = None) -> None:
        """Raise OvspecError if a text of ``tokens`` tokens exceeds ``context``, or the model's if that is None."""
        context = context or self.target.ir.context_length
        if context and tokens > context:
            raise OvspecError(f"The text would have {tokens} tokens, but the context is {context}; shorten it.")

    # ------------------------------------------------------------ rows

    def rows(self, prompt: Prompt, options: GenerateOptions, n: int = 1, reserved: bool = False) -> list[Row]:
        """Return rows for the ``n`` texts of a prompt; raises OvspecError if prompt or options are invalid."""
        tokens = self.encode(prompt, variables=options.get("chat_template_kwargs"))
        start = RowStart(0, len(tokens) if is_chat(prompt) else 0, seed=secrets.randbits(32), n=n, reserved=reserved)
        return [self.row(Sequence(tokens), options, replace(start, sample=sample)) for sample in range(n)]

    def row(self, sequence: Sequence, options: GenerateOptions, start: RowStart = RowStart()) -> Row:
        """Return a row that continues ``sequence`` with ``options``; raises OvspecError if they can't be met."""
        config, target = self.generation_config, self.target
        params = config.complete(params_of(options))
        if params.n != start.n:
            raise OvspecError(f"`n` is {params.n}; call samples() for several texts of a prompt.")
        if start.n > 1 and not params.temperature and not options.get("sampler"):
            raise OvspecError(f"`n` is {start.n}, but greedy texts are all the same; give a `temperature`.")
        eos = frozenset() if params.ignore_eos else config.eos_ids
        prompt_tokens = len(sequence)
        context = start.context or target.ir.context_length
        max_tokens = config.max_tokens(max(prompt_tokens, 1), params, context)
        if not prompt_tokens:
            sequence.commit(config.beginning)
        constraints, healing = self._unconstrained(eos | frozenset(params.stop_ids)), None
        if constrains(options, params):
            prompt = PromptTokens(sequence.tokens, eos, config.bos, start.healable)
            constraints, healing = self._constraints.make(prompt, params, options)
        draft = None if self.wanted_lookahead(options) == 0 else self.draft
        # Memory need not hold a whole context that nobody asked for by a number.
        sure = max_tokens if max_tokens == params.max_tokens else min(max_tokens, DEFAULT_MAX_TOKENS)
        self.check_memory(0 if start.reserved else len(sequence) + sure - start.cached, draft is not None)
        seed = next(seed for seed in (params.seed, start.seed, secrets.randbits(32)) if seed is not None)
        drawn = {"seed": seed} if params.temperature else {}
        used = complete_options(params, options) | {"max_tokens": max_tokens} | drawn
        origin = start.healable, start.context, start.sample, start.n
        record = Record(sequence.tokens.copy(), used, *origin, lambda: self.identity)
        sampler = sampler_of(params, seed, start.sample, constraints, options)
        if healing:  # nothing can fail from here on
            healing.take_back(sequence)
        stats = Stats(
            prompt_tokens=prompt_tokens,
            seed=seed if params.temperature else None,
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
        ending = Ending(max_tokens, eos, params, context or math.inf)
        row = Row(sequence, sampler, self.tokenizer.detokenizer(), ending, stats, healing)
        row.record = record
        return row

    def wanted_lookahead(self, options: GenerateOptions) -> int | None:
        """Return the tokens to propose per round, None for auto; raises OvspecError if nothing can propose any."""
        wanted = self.lookahead if options.get("lookahead") is None else options.get("lookahead")
        check_option("lookahead", wanted)
        if wanted not in (None, "auto", 0) and not self.choice and not grammar_asked(options):
            raise OvspecError("`lookahead` needs something that proposes tokens; name a draft or lookup.")
        return None if wanted in (None, "auto") else int(wanted)

    def drafting(self, options: GenerateOptions, decoders: Decoders, sampled: bool) -> tuple[Drafter | None, Lookahead]:
        """Return the drafter and the lookahead of a generating call.

        ``sampled``: the text is sampled, so what was learned from greedy text doesn't count.
        """
        wanted = self.wanted_lookahead(options)
        if wanted == 0:
            return None, PLAIN
        target, draft = decoders.target, decoders.draft
        if not decoders.lookaheads:
            measured = {width: ms for width, ms in (self.target.verify_ms or {}).items() if width >= target.rule.fewest}
            costs = Costs(measured, self.target.change_ms, target.fills, target.rule.most)
            steps = Costs(self.draft.verify_ms, self.draft.change_ms, draft.fills) if self.draft and draft else Costs()
            decoders.lookaheads = {kind: Lookahead(None, costs, steps, target.rule.fewest) for kind in (False, True)}
        lookahead = decoders.lookaheads[sampled]
        if wanted is not None:
            lookahead = Lookahead(wanted, lookahead.target, lookahead.draft, target.rule.fewest)
        return decoders.drafter, lookahead

    def run(
        self, rows: Iterable[Row], options: GenerateOptions, sampled: bool = False, count: int | None = None
    ) -> Generator[list[tuple[int, Piece]]]:
        """Generate ``rows`` as a batch; a row joins when there is room, and leaves when its text ends.

        Yields a list of (row number, piece) for each round.

        Args:
            options: only those that concern all rows are used: ``batch_size`` and ``lookahead``.
            sampled: whether most rows are sampled.
            count: number of rows, if known; a single row needs no room for others.
        """
        decoders = self.pool.take()
        try:
            drafter, lookahead = self.drafting(options, decoders, sampled)
            most = batch_size(options)
            tokens = math.inf if count == 1 else token_room(self.irs(drafter is not None), most)
            limits = BatchLimits(1 if count == 1 else most, tokens)
            yield from run_rows(Scheduler(decoders.target, drafter, lookahead, rows, limits))
        finally:
            self.pool.give_back(decoders)

    def check_grammar(self, options: GenerateOptions) -> None:
        """Raise OvspecError once if a grammar in ``options`` is wrong; ``row`` would raise it for each text."""
        self._constraints.check(options)


def complete_options(params: SamplingParams, options: GenerateOptions) -> dict[str, Any]:
    """Return all options that change a text and aren't at their defaults: ``params`` and the others in ``options``."""
    ours = {name: getattr(params, name) for name in SAMPLING}
    ours = {name: v for name, v in ours.items() if isinstance(v, np.ndarray) or v != SAMPLING[name][1].initial}
    others = GENERATE.keys() - SAMPLING.keys() - {"sampling", "lookahead", "batch_size", "retries"}
    return ours | {name: options[name] for name in others & options.keys() if options[name] is not None}


def is_chat(prompt: Any) -> bool:
    """Return whether ``prompt`` is messages for the chat template."""
    return isinstance(prompt, dict) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict))
