"""What models and sessions are built on: decoders, the encoding of prompts, rows, and running them."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import secrets
import sys
import threading
import time
from collections import abc
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ovspec.base.errors import OvspecError, PromptError
from ovspec.base.files import present
from ovspec.cache.decoder import Decoder
from ovspec.cache.sequence import UNSHARED, Sequence
from ovspec.drafting.choice import DraftChoice
from ovspec.drafting.costs import Costs
from ovspec.drafting.drafter import Drafter
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.lookup import corpus_of
from ovspec.drafting.making import make_drafter
from ovspec.engine.results import Origin, Piece, Provenance, Stats
from ovspec.engine.row import Row
from ovspec.engine.scheduler import BatchLimits, Scheduler, run_rows
from ovspec.ir.compile import MODEL_FILE, CompiledIR
from ovspec.ir.device import may_use_gpu
from ovspec.ir.gpu import free_at_exit
from ovspec.ir.memory import WORTH_CHECKING, check_memory, kv_bytes_per_token, recurrent_bytes, token_room
from ovspec.params import GenerateOptions, Params, make_params, refuse_variables, refuse_without_chat
from ovspec.sampling.constraint import Constraints
from ovspec.sampling.constraint_maker import ConstraintMaker
from ovspec.sampling.samplers import DraftVocabulary, sampler_of
from ovspec.setup.engine_choice import CompiledModel
from ovspec.setup.identity import fingerprint
from ovspec.text.answer import AnswerFormat, AnswerReader
from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import Message, chat_template
from ovspec.text.generation_config import DEFAULT_MAX_TOKENS, GenerationConfig
from ovspec.text.given_template import end_of_answer
from ovspec.text.infill import Infill, InfillTokens, infill_tokens, within
from ovspec.text.tokenizer import Tokenizer
from ovspec.text.tokenizer_files import special_tokens
from ovspec.text.vocabulary import KnownIds

# A text, token ids, chat messages for the model's chat template, or what is around the text.
Prompt = str | list[int] | np.ndarray | list[Message] | Message | Infill
Prompts = list[str] | list[list[int]] | list[np.ndarray] | list[list[Message]]
Variables = Mapping[str, Any]  # of the chat template
PLAIN = Lookahead(0)  # proposes nothing, and keeps constraints from forcing tokens
UNPLACED = Origin()
LONGEST_TAG = 32  # tokens
KEPT_IDLE = 60.0  # seconds after which decoders that nobody took are dropped, when others are given back


@dataclass
class Decoders:
    """The decoders of one session or batch. ``lookaheads``: those for greedy (False) and for sampled text (True)."""

    target: Decoder
    drafter: Drafter | None
    draft: Decoder | None = None  # of the draft model; the drafter drives it
    lookaheads: dict[bool, Lookahead] = field(default_factory=dict)

    def reset(self, rows: int) -> None:
        self.target.reset(rows)
        if self.drafter:
            self.drafter.reset(rows)


class DecoderPool:
    """Lends sets of decoders, and makes one when none is idle. Threads may share it."""

    def __init__(self, make: Callable[[], Decoders]) -> None:
        self._make = make
        self._idle: list[tuple[float, Decoders]] = []  # with the time since when; the longest idle first
        self._closed = False
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
            if not self._closed:
                self._idle.append((now, decoders))

    def close(self) -> None:
        """Drop the idle sets, and those that are given back from now on."""
        with self._lock:
            self._closed = True
            self._idle.clear()

    def learned_costs(self, sampled: bool) -> tuple[Costs, Costs] | None:
        """Return the costs of verifying and of a draft step that an idle set's auto lookahead has learned, if any."""
        with self._lock:
            learned = [decoders.lookaheads[sampled] for _, decoders in self._idle if decoders.lookaheads]
        return (learned[0].target, learned[0].draft) if learned else None


class Runtime:
    """The compiled models and everything that is made from them. Threads may share it.

    Args:
        folder: the exported folder of the target.
        choice: the drafters.
        lookahead: tokens proposed per round; None to choose automatically.
        corpus: texts that lookup may propose from.
        cache_bytes: what KV caches may take until those of ended texts give way; with 0, none are kept. By default a
            quarter of the memory that is free, and greedy texts of a model that can't be exact share none, because
            their tokens would depend on what is cached.
        tool_format: the name of the format in which the model writes tool calls; by default that of its chat template.
        template: the source of a chat template to use in place of the model's.
    """

    def __init__(
        self,
        folder: Path,
        target: CompiledModel,
        draft: CompiledModel | None = None,
        choice: DraftChoice | None = None,
        lookahead: int | None = None,
        corpus: Iterable[str] = (),
        cache_bytes: float | None = None,
        tool_format: str | None = None,
        template: str | None = None,
    ) -> None:
        self.tool_format, self.template = tool_format, template
        self.folder, self.target, self.draft, self.choice, self.lookahead = folder, target, draft, choice, lookahead
        self.tokenizer = Tokenizer(folder)
        self.generation_config = GenerationConfig(folder, target.ir.config, self.tokenizer)
        self.constraints = ConstraintMaker(self.tokenizer)
        self._unconstrained = functools.lru_cache(64)(lambda ends: Constraints((), ends))
        self.corpora = [corpus_of(self.tokenizer.encode(text.rstrip("\0"), False) for text in corpus)]
        self.pool = DecoderPool(self._make_decoders)
        self._token_bytes = sum(kv_bytes_per_token(ir) + recurrent_bytes(ir) for ir in self.irs())  # upper bound
        self.cache_bytes = cache_bytes
        self._shares_sampled_only = cache_bytes is None and target.is_inexact and target.is_reproducible
        most = psutil.virtual_memory().available / 4 if cache_bytes is None else cache_bytes
        self.models = [model for model in (target, draft) if model]  # also a draft that nothing proposes with
        for model in self.models if most else ():
            model.share_blocks(most / self._token_bytes)
        self._free_at_exit()

    def with_drafters(self, choice: DraftChoice | None) -> Runtime:
        """Return a runtime of the same compiled models with other drafters; a draft model must be the loaded one."""
        other = copy.copy(self)
        other.choice, other.draft = choice, self.draft if choice and choice.model else None
        other.pool = DecoderPool(other._make_decoders)
        other._free_at_exit()
        return other

    def _free_at_exit(self) -> None:
        if any(may_use_gpu(ir.device) for ir in self.irs()):
            free_at_exit(self)

    def close(self) -> None:
        """Free the compiled models, for all that share them; inferences raise InferenceError from now on."""
        with contextlib.suppress(OvspecError, OSError):
            _ = self.identity  # which records of texts need later
        self.free()

    def free(self) -> None:
        for model in self.models:
            model.close()
        self.pool.close()

    def fork(self, decoders: Decoders) -> Decoders:
        """Return other decoders that continue from what ``decoders`` hold."""
        target, draft = decoders.target.fork(), decoders.draft.fork() if decoders.draft else None
        return Decoders(target, self._drafter(target, draft), draft, copy.deepcopy(decoders.lookaheads))

    def _make_decoders(self) -> Decoders:
        target, draft = self._decoder(self.target), self._decoder(self.draft) if self.draft else None
        return Decoders(target, self._drafter(target, draft), draft)

    def _decoder(self, model: CompiledModel) -> Decoder:
        known = self.tokenizer.known
        if model.ir.ids is not None:
            known = KnownIds(gaps=np.flatnonzero(known.unknown(model.ir.ids)))
        return model.decoder(known, shares=True)

    def _drafter(self, target: Decoder, draft: Decoder | None) -> Drafter | None:
        ids = self.draft.ir.ids if self.draft else None
        vocabulary = None if ids is None else DraftVocabulary(ids, self.target.ir.logits_width)
        features_of = target if self.draft and self.draft.is_head else None
        return make_drafter(self.choice, draft, features_of, vocabulary, self.corpora, self.tokenizer.known)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """The target's identity and settings, for records of texts."""
        return fingerprint(self.target)

    @functools.cached_property
    def chat_format(self) -> ChatFormat:
        """How the model's chats are written; raises OvspecError if it has no chat template."""
        bos = "".join(map(self.tokenizer.token_text, self.tokenizer.bos))
        return ChatFormat(chat_template(present(self.folder), self.template, bos), self.tool_format)

    @functools.cached_property
    def _answer_ends(self) -> list[int]:
        """The id that a chat template in place of the model's writes after an answer, if it is one token."""
        end, added = end_of_answer(self.chat_format.template), self.tokenizer.added
        names = [name for name in added if end.startswith(name)]
        return [added[max(names, key=len)]] if names else []

    @functools.cached_property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens that have a role, by role."""
        return special_tokens(present(self.folder))

    @functools.cached_property
    def weights_size(self) -> int:
        """The size of the target's weights on disk, in bytes."""
        return present((self.folder / MODEL_FILE).with_suffix(".bin")).stat().st_size

    def read_ahead(self) -> None:
        """Read the small files that are otherwise read when they are needed, so that they may be deleted."""
        for name in ("chat_format", "identity", "special_tokens", "weights_size"):
            with contextlib.suppress(OvspecError):  # for those who ask for it
                getattr(self, name)

    def irs(self, drafts: bool = True) -> list[CompiledIR]:
        """Return the compiled IRs of the target and, with ``drafts``, of the draft model."""
        return [model.ir for model in (self.target, self.draft if drafts else None) if model]

    # ------------------------------------------------------------ text and tokens

    def encode(
        self,
        prompt: Prompt,
        begins: bool = True,
        variables: Variables | None = None,
        tools: abc.Sequence[Any] = (),
        effort: str | None = None,
    ) -> np.ndarray:
        """Return the token ids, (n,) int64. A prompt that ``begins`` a text gets the model's BOS if it has one.

        The last three are for chats; see ``ChatFormat.prompt``.
        """
        if is_chat(prompt):
            messages: Any = [prompt] if isinstance(prompt, dict) else prompt
            return self.tokenizer.encode(self.chat_format.prompt(messages, tools, effort, variables), special=False)
        if not isinstance(prompt, (str, list, tuple, np.ndarray)):
            raise PromptError(f"A prompt must be a string, token ids or chat messages, not {prompt!r:.80}.")
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

    def infill_tokens(self, prompt: Infill, params: Params) -> InfillTokens:
        """Return the tokens of a prompt for infilling, with as many of its chunks as the context has room for.

        Raises PromptError if the vocabulary has no FIM tokens.
        """
        room = (self.target.ir.context_length or math.inf) - min(self.most_tokens(params), DEFAULT_MAX_TOKENS)
        if room < math.inf:  # chunks that can't fit aren't encoded, which would take long
            prompt = within(prompt, self.tokenizer.most_characters(int(room)))
        return infill_tokens(prompt, self.tokenizer.fim, self.tokenizer.encode_spelt, self.tokenizer.bos, room)

    def most_tokens(self, params: Params) -> float:
        """Return the maximum number of tokens of a text; inf if only the context limits it."""
        most = self.generation_config.values.max_new_tokens or DEFAULT_MAX_TOKENS
        return most if params.max_tokens is None else params.most_tokens

    def check_memory(self, tokens: int, drafts: bool = True) -> None:
        """Raise OvspecError if the states for ``tokens`` more tokens can't fit into free memory."""
        if tokens * self._token_bytes > WORTH_CHECKING:
            check_memory(self.irs(drafts), tokens, self.spare)
            if tokens * self._token_bytes > psutil.virtual_memory().available:
                self.give_way()

    @property
    def keeps_prefixes(self) -> bool:
        """Whether KV caches of ended texts are kept for texts that begin in the same way."""
        return any(model.keeps_prefixes for model in self.models)

    @property
    def spare(self) -> float:
        """The bytes of KV caches that are kept, but that no text needs."""
        return sum(model.spare for model in self.models)

    def give_way(self) -> None:
        """Free the KV caches that no text needs."""
        for model in self.models:
            model.give_way()

    def check_room(self, tokens: int, context: int | None = None) -> None:
        """Raise OvspecError if a text of ``tokens`` tokens exceeds ``context``, or the model's if that is None."""
        context = context or self.target.ir.context_length
        if context and tokens > context:
            raise OvspecError(f"The text would have {tokens} tokens, but the context is {context}; shorten it.")

    # ------------------------------------------------------------ params

    def params(self, options: GenerateOptions) -> Params:
        """Return the params of a call from Python's keywords, complete; see ``complete``."""
        return self.complete(make_params(options))

    def complete(self, params: Params) -> Params:
        """Return ``params`` with the defaults of this model, its generation config and its lookahead.

        Raises:
            OvspecError: token ids are unknown, or a lookahead is given and nothing can propose tokens.
        """
        lookahead = self.lookahead if params.lookahead is None else params.lookahead
        if lookahead not in (None, "auto", 0) and not self.choice and not params.grammar_option:
            raise OvspecError("`lookahead` needs something that proposes tokens; name a draft or lookup.")
        for name, ids in (("logit_bias", params.logit_bias), ("stop_ids", params.stop_ids)):
            if len(ids) and (unknown := self.tokenizer.known.first_unknown(np.array(list(ids)))) is not None:
                raise OvspecError(f"`{name}`: token id {str(unknown)[:20]} is not in the vocabulary.")
        config, found = self.generation_config.values, {"lookahead": None if lookahead == "auto" else lookahead}
        if params.repetition_penalty is None:
            found["repetition_penalty"] = config.repetition_penalty
        if params.min_tokens is None and config.min_new_tokens:
            found["min_tokens"] = int(min(config.min_new_tokens, params.most_tokens))
        if config.suppress_tokens:
            found["logit_bias"] = dict.fromkeys(config.suppress_tokens, -np.inf) | dict(params.logit_bias)
        return replace(params, **found)

    # ------------------------------------------------------------ rows

    def encode_for(self, prompt: Prompt, params: Params) -> np.ndarray:
        """Return the token ids of a prompt, (n,) int64, with the options of chats in ``params``."""
        if not is_chat(prompt):
            refuse_without_chat(params)
        return self.encode(
            prompt, variables=params.chat_template_kwargs, tools=params.tools, effort=params.reasoning_effort
        )

    def rows(self, prompt: Prompt, params: Params, reserved: bool = False) -> list[Row]:
        """Return a row for each of the ``n`` texts of a prompt.

        ``params`` are complete, but may lack a seed. ``reserved``: the caller has reserved the memory.

        Raises:
            OvspecError: the prompt can't be encoded or doesn't fit, or the grammar is wrong.
        """
        chat = is_chat(prompt)
        if isinstance(prompt, Infill):
            refuse_without_chat(params)
            tokens, healable = self.infill_tokens(prompt, params)
            ends = self.tokenizer.fim.ends if self.tokenizer.fim and not params.ignore_eos else ()
            params = replace(params, stop_ids=[*params.stop_ids, *ends])
        else:
            tokens = self.encode_for(prompt, params)
            healable = len(tokens) if chat else 0
        params = with_seed(params)
        rows = [self.row(Sequence(tokens), params, Origin(chat, healable, None, sample)) for sample in range(params.n)]
        for row in rows if not reserved else ():
            self.reserve(row, params)
        return rows

    def row(self, sequence: Sequence, params: Params, origin: Origin = UNPLACED) -> Row:
        """Return a row that continues ``sequence``; ``params`` are complete.

        Raises:
            OvspecError: the text doesn't fit the context, or the grammar doesn't allow it.
        """
        config, prompt_tokens = self.generation_config, len(sequence)
        context = origin.context or self.target.ir.context_length or math.inf
        if (left := context - max(prompt_tokens, 1)) < 1:
            told = f"The prompt has {prompt_tokens} tokens, but the context is {context}; shorten the prompt."
            raise PromptError(told, too_long=True)
        params = replace(params, max_tokens=int(min(self.most_tokens(params), left, sys.maxsize)))
        eos = frozenset() if params.ignore_eos else config.eos_ids
        if self.template and not params.ignore_eos:
            params = replace(params, stop_ids=[*params.stop_ids, *self._answer_ends])
        if not prompt_tokens:
            sequence.commit(config.beginning)
        if self._shares_sampled_only and not params.sampled:
            sequence.owner = UNSHARED
        constraints, healing = self._unconstrained(eos | frozenset(params.stop_ids)), None
        answer = self._answer_format(sequence.tokens, params) if origin.chat else None
        if params.constrains:
            made = self.constraints.make(sequence.tokens, params, eos, config.bos, origin.healable, answer)
            constraints, healing = made
        recorded = replace(params, max_predict_ms=0.0)  # a verification takes another time
        record = Provenance(sequence.tokens.copy(), recorded, origin, lambda: self.identity)
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
            self.tokenizer.detokenizer(answer.marks if answer else None),
            self._stats(params, prompt_tokens),
            eos=eos,
            context=context,
            record=record,
            healing=healing,
            reader=reader,
        )

    def _answer_format(self, prompt: np.ndarray, params: Params) -> AnswerFormat | None:
        """Return how the answer to a chat, whose tokens are ``prompt`` (n,), is written; None if it is only text."""
        format, tokenizer, use = self.chat_format, self.tokenizer, params.tool_use
        if not (format.thinking or params.tools):
            return None
        end = (tokenizer.spell(prompt[-LONGEST_TAG:]) or "").rstrip()
        opened = format.thinking is not None and end.endswith(format.thinking.open.rstrip())
        return AnswerFormat(
            format.tools if params.tools else None,
            format.thinking,
            use.names or tuple(tool["function"]["name"] for tool in params.tools),
            "thinking" if opened else "start",
            not (use.required or params.grammar_option),
            tokenizer.added,
        )

    def reserve(self, row: Row, params: Params, cached: int = 0) -> None:
        """Raise OvspecError if there is no memory for a row, of which ``cached`` tokens are in the KV cache.

        Where ``params`` don't limit the text, memory for the default number of tokens is enough.
        """
        most = row.most if params.max_tokens == row.params.max_tokens else min(row.most, row.start + DEFAULT_MAX_TOKENS)
        self.check_memory(most - cached, drafts=params.lookahead != 0)

    def _stats(self, params: Params, prompt_tokens: int) -> Stats:
        target, draft = self.target, None if params.lookahead == 0 else self.draft
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

    # ------------------------------------------------------------ running them

    def drafting(self, params: Params, decoders: Decoders) -> tuple[Drafter | None, Lookahead]:
        """Return the drafter and the lookahead of a call; what was learned from greedy text serves no sampled one."""
        if params.lookahead == 0:
            return None, PLAIN
        target, draft = decoders.target, decoders.draft
        if not decoders.lookaheads:
            costs = Costs(self.target.verify_ms, self.target.change_ms, target.fills, target.rule)
            steps = Costs()
            if self.draft and draft:
                steps = Costs(self.draft.verify_ms, self.draft.change_ms, draft.fills, draft.rule)
            decoders.lookaheads = {kind: Lookahead(None, costs, steps) for kind in (False, True)}
        lookahead = decoders.lookaheads[params.sampled]
        if params.lookahead is not None:
            lookahead = Lookahead(params.lookahead, lookahead.target, lookahead.draft)
        return decoders.drafter, lookahead

    def run(
        self, rows: Iterable[Row], params: Params, count: int | None = None, fail_alone: bool = False
    ) -> Generator[list[tuple[int, Piece]]]:
        """Generate ``rows`` as a batch; a row joins when there is room, and leaves when its text ends.

        Yields a list of (row number, piece) for each round.

        Args:
            params: those of most rows; ``batch_size`` and ``lookahead`` are for all.
            count: number of rows, if known; a single row needs no room for others.
            fail_alone: whether a row whose constraints fail ends by itself and has an ``error``.
        """
        decoders = self.pool.take()
        try:
            drafter, lookahead = self.drafting(params, decoders)
            most = params.batch_size
            room = math.inf if count == 1 else token_room(self.irs(drafter is not None), most, self.spare)
            limits = BatchLimits(1 if count == 1 else most, room, fail_alone=(OvspecError,) if fail_alone else ())
            yield from run_rows(Scheduler(decoders.target, drafter, lookahead, rows, limits))
        finally:
            self.pool.give_back(decoders)


def with_seed(params: Params) -> Params:
    """Return ``params`` with a random seed if they draw tokens and have none."""
    return params if params.seed is not None or not params.temperature else replace(params, seed=secrets.randbits(32))


def is_chat(prompt: Any) -> bool:
    """Return whether ``prompt`` is messages for the chat template."""
    return isinstance(prompt, dict) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict))


def is_batch(prompt: Any) -> bool:
    """Return whether ``prompt`` is a list of prompts."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list, np.ndarray))
