"""LanguageModel: puts decoders, tokenizer and manifest together. Nothing below imports it."""

from __future__ import annotations

import contextlib
import copy
import math
import secrets
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack, overload

import numpy as np

from ovspec.constraints.maker import ConstraintMaker, grammar_asked
from ovspec.decoders.base import SessionDecoder
from ovspec.decoders.sequence import Sequence
from ovspec.drafting.chain import Chain
from ovspec.drafting.choice import DraftChoice
from ovspec.drafting.costs import Costs
from ovspec.drafting.draft_model import DraftModel
from ovspec.drafting.drafter import Drafter
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.lookup import Lookup, corpus_of
from ovspec.errors import OvspecError
from ovspec.files import read_text
from ovspec.ir.compile import CompiledIR
from ovspec.ir.memory import check_memory, kv_bytes_per_token, recurrent_bytes, token_room
from ovspec.loop.perplexity import DEFAULT_CONTEXT, Perplexity, measure
from ovspec.loop.results import Piece, Result
from ovspec.loop.row import Row
from ovspec.loop.scheduler import Limits, generate_rows
from ovspec.options import GenerateOptions, batch_size, check_lookahead, params_of
from ovspec.sampling.samplers import sampler_of
from ovspec.session import Session, TextStream
from ovspec.setup.engine import CompiledModel
from ovspec.text.chat_template import Message, chat_template, is_chat
from ovspec.text.generation_config import GenerationConfig
from ovspec.text.tokenizer import Tokenizer

# A text, token ids, or chat messages for the model's chat template.
Prompt = str | list[int] | np.ndarray | list[Message]


@dataclass
class Decoders:
    """Of one session or batch. ``lookaheads``: what is known of greedy (False) and of sampled text (True)."""

    target: SessionDecoder
    drafter: Drafter | None
    draft: SessionDecoder | None = None  # the draft model's, which the drafter drives
    lookaheads: dict[bool, Lookahead] = field(default_factory=dict)

    def reset(self, rows: int) -> None:
        self.target.reset(rows)
        if self.drafter:
            self.drafter.reset(rows)


class LanguageModel:
    """A loaded model, ``target``, with or without a ``draft``; made by ``ovspec.load``.

    Threads may share it: calls and sessions that run at the same time have requests of their own, and each
    gives what it gives alone. A session or a stream belongs to one thread at a time.
    """

    def __init__(
        self,
        folder: Path,
        target: CompiledModel,
        draft: CompiledModel | None = None,
        choice: DraftChoice | None = None,
        lookahead: int | None = None,
        corpus: list[Path] | None = None,
    ) -> None:
        self.folder, self.target, self.draft, self.lookahead = folder, target, draft, lookahead
        self.tokenizer = Tokenizer(folder)
        self._choice = choice
        self._corpus = corpus_of(self.tokenizer.encode(read_text(file).rstrip("\0"), False) for file in corpus or [])
        self._constraining = ConstraintMaker(self.tokenizer)
        self._idle: list[Decoders] = []
        self.generation_config = GenerationConfig(folder, target.ir.config, self.tokenizer)

    # ------------------------------------------------------------ generating

    @overload
    def generate(self, prompt: list[str] | list[list[int]], **options: Unpack[GenerateOptions]) -> list[Result]: ...
    @overload
    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Result: ...
    def generate(self, prompt: Any, **options: Unpack[GenerateOptions]) -> Result | list[Result]:
        """Continue ``prompt``, or each of a list of prompts as one batch; see ``GenerateOptions``.

        With ``n`` above 1, ``samples`` gives all of them.

        Raises:
            OvspecError: an empty prompt, one that doesn't fit the model's context, or options out of range.
        """
        if is_batch(prompt):
            return [texts[0] for texts in self._generate_batch(prompt, options, 1)]
        return self.stream(prompt, **options).result()

    @overload
    def samples(
        self, prompt: list[str] | list[list[int]], **options: Unpack[GenerateOptions]
    ) -> list[list[Result]]: ...
    @overload
    def samples(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> list[Result]: ...
    def samples(self, prompt: Any, **options: Unpack[GenerateOptions]) -> list[Result] | list[list[Result]]:
        """``n`` continuations of ``prompt``, or of each of a list of prompts; the prompt is read once.

        Raises:
            OvspecError: as ``generate``; or n is above 1 and nothing is left to chance.
        """
        params = params_of(options)
        texts = self._generate_batch(prompt if is_batch(prompt) else [prompt], options, params.n)
        return texts if is_batch(prompt) else texts[0]

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> TextStream:
        """As ``generate``, piece by piece: ``for piece in lm.stream("def "): print(piece.text)``."""
        session = self.session()
        session.append(prompt)
        inner = session.stream(**{**options, "heal": bool(options.get("heal"))})

        def pieces() -> Generator[Piece]:
            with session:
                yield from inner

        return TextStream(pieces(), inner.row, inner.cancel)

    def session(self, context: int | None = None) -> Session:
        """A text whose KV caches are kept between calls.

        Args:
            context: tokens that it may grow to; by default what the model's own context holds.

        Raises:
            OvspecError: ``context`` is longer than the model's, or its caches don't fit into memory.
        """
        most = self.target.ir.context_length
        if context is not None and (context < 1 or (most and context > most)):
            raise OvspecError(f"context is {context}; it must be at least 1{f' and at most {most}' if most else ''}.")
        if context:
            check_memory(self.irs(), context)
        decoders = self.decoders()
        decoders.reset(1)
        return Session(self, decoders, context)

    def cache_bytes(self, tokens: int) -> float:
        """About how much memory the KV caches of a text of so many tokens take, target and draft together."""
        return sum(tokens * kv_bytes_per_token(ir) + recurrent_bytes(ir) for ir in self.irs())

    def _generate_batch(self, prompts: list[Any], options: GenerateOptions, n: int) -> list[list[Result]]:
        if not prompts:
            return []
        ids = [self.encode(prompt) for prompt in prompts]
        seeds = [secrets.randbits(32) for _ in ids]  # of each prompt, unless one is given for all
        rows = [
            self.row(Sequence(prompt), options, seed=seed, sample=i, n=n, healable=healable_from(given, prompt))
            for given, prompt, seed in zip(prompts, ids, seeds, strict=True)
            for i in range(n)
        ]
        for _ in self.run(rows, options, sampled=rows[0].sampler.sampled):
            pass
        results = [row.result() for row in rows]
        return [results[start : start + n] for start in range(0, len(rows), n)]

    def run(
        self, rows: Iterable[Row], options: GenerateOptions, sampled: bool = False
    ) -> Iterator[list[tuple[int, Piece]]]:
        """Generate ``rows``, made by ``row``, as a batch that they join as others leave it.

        They are taken from the iterable when there is room. Yields (number of the row, piece) for each round.

        Args:
            options: of these, what concerns all rows: ``batch_size`` and ``lookahead``.
            sampled: whether chance has a part in most of them.
        """
        decoders = self.decoders()
        decoders.reset(0)
        try:
            drafter, lookahead = self.drafting(options, decoders, sampled)
            count = batch_size(options)
            limits = Limits(count, token_room(self.irs(drafter is not None), count))
            yield from generate_rows(decoders.target, drafter, rows, lookahead, limits)
        finally:
            self.release(decoders)

    def check_grammar(self, options: GenerateOptions) -> None:
        """Raises OvspecError where a grammar in ``options`` is wrong; ``row`` would say so for each text."""
        self._constraining.check(options)

    def perplexity(self, text: str, context: int | None = None) -> Perplexity:
        """How well the target foresees ``text``, in windows of ``context`` tokens (the model's, at most 1024).

        Raises:
            OvspecError: fewer than two tokens, or a window longer than the model's context.
        """
        most = self.target.ir.context_length
        if context and most and context > most:
            raise OvspecError(f"A window of {context} tokens is longer than the model's context of {most}.")
        context = context or min(DEFAULT_CONTEXT, most or DEFAULT_CONTEXT)
        decoders = self.decoders()
        try:
            return measure(decoders.target, self.tokenizer.encode(text), context)
        finally:
            self.release(decoders)

    def next_logits(self, prompt: Prompt) -> np.ndarray:
        """The target's logits (vocab,) float32 for the token after ``prompt``."""
        decoders = self.decoders()
        decoders.reset(1)
        logits = decoders.target.feed([self.encode(prompt)], [1])[0][0].copy()
        self.release(decoders)
        return logits

    # ------------------------------------------------------------ for measuring

    def with_drafters(self, choice: DraftChoice | None) -> LanguageModel:
        """The same compiled models with other drafters; a draft model among them must be the one that is loaded."""
        draft = self.draft if choice and choice.model else None
        other = LanguageModel(self.folder, self.target, draft, choice, self.lookahead)
        other._corpus, other._constraining = self._corpus, self._constraining
        return other

    def learned_costs(self, sampled: bool) -> tuple[Costs, Costs] | None:
        """What the auto lookahead has learned that verifying and a step of the draft cost."""
        known = [decoders.lookaheads[sampled].costs for decoders in self._idle if decoders.lookaheads]
        return known[0] if known else None

    # ------------------------------------------------------------ for sessions

    def encode(self, prompt: Prompt, begins: bool = True) -> np.ndarray:
        """(n,) int64. ``begins``: the prompt starts a text and gets the model's BOS where it has one."""
        if not isinstance(prompt, (str, list, tuple, np.ndarray)):
            raise OvspecError(f"A prompt is a text, token ids or chat messages, not {prompt!r:.80}.")
        if begins and not len(prompt):
            return self.generation_config.beginning
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt) if begins else self.tokenizer.encode_more(prompt)
        if is_chat(prompt):
            return self.tokenizer.encode(self.render(list(prompt)), special=False)  # type: ignore[arg-type]
        try:
            ids = np.asarray(prompt, dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            raise OvspecError(f"A prompt is a text, token ids or chat messages, not {prompt!r:.80}.") from None
        known = self.tokenizer.known
        unknown = known.first_unknown(ids)
        if unknown is not None:
            upto = f" (0 to {known.size - 1})" if known.size else ""
            raise OvspecError(f"Token id {unknown} is not in the vocabulary{upto}.")
        return ids

    def render(self, messages: list[Message]) -> str:
        """``messages`` as the chat template writes them, with the special tokens spelt out, open for an answer."""
        return chat_template(self.folder).render(messages)

    def row(
        self,
        sequence: Sequence,
        options: GenerateOptions,
        held: int = 0,
        seed: int | None = None,
        sample: int = 0,
        n: int = 1,
        healable: int = 0,
        context: int | None = None,
    ) -> Row:
        """A row that continues ``sequence`` as ``options`` say; raises OvspecError where they can't be met.

        The KV cache of its first ``held`` tokens is there already. Of the ``n`` texts of a prompt it is the one
        numbered ``sample``; ``seed`` is taken where the options give none. Healing may take back its tokens from
        ``healable`` on. The text may grow to ``context`` tokens, where that is less than the model's.
        """
        params = self.generation_config.complete(params_of(options))
        if params.n != n:
            raise OvspecError(f"n is {params.n}: several texts for a prompt are what samples() gives.")
        if n > 1 and not params.temperature and not options.get("sampler"):
            raise OvspecError(f"n is {n}, but greedy texts are all the same; give a temperature.")
        eos = frozenset() if params.ignore_eos else self.generation_config.eos_ids
        prompt_tokens = len(sequence)
        context = context or self.target.ir.context_length
        max_tokens = self.generation_config.max_tokens(max(prompt_tokens, 1), params.max_tokens, context)
        if not len(sequence):
            sequence.commit(self.generation_config.beginning)
        bos = self.generation_config.bos
        constraints, count = self._constraining.make(sequence, params, options, eos, healable, bos)
        drafts = self._choice is not None and options.get("lookahead", self.lookahead) != 0
        check_memory(self.irs(drafts), len(sequence) + max_tokens - held)
        if params.seed is not None or seed is None:
            seed = secrets.randbits(32) if params.seed is None else int(params.seed)
        accept, function = options.get("accept", "compare"), options.get("sampler")
        sampler = sampler_of(params, seed, sample, constraints, accept, function, options.get("sampler_options"))
        taken_back = self._constraining.take_back(sequence, count, bos)  # from here on nothing can go wrong
        row = Row(
            sequence,
            self.tokenizer.detokenizer(),
            sampler,
            params,
            max_tokens,
            eos,
            prompt_tokens,
            taken_back,
            context or math.inf,
        )
        stats, target = row.stats, self.target
        stats.seed = seed if params.temperature else None
        stats.rollback, stats.device = str(target.rollback), target.ir.device
        stats.engine, stats.engine_reason, stats.profile = target.engine, target.reason, target.profile
        if self.draft and drafts:
            stats.draft_device, stats.draft_engine = self.draft.ir.device, self.draft.engine
        return row

    def drafting(self, options: GenerateOptions, decoders: Decoders, sampled: bool) -> tuple[Drafter | None, Lookahead]:
        """What proposes, and how much; raises OvspecError where the options can't be met.

        ``sampled``: the text is left to chance, so what is known of greedy text doesn't count.
        """
        wanted = options.get("lookahead")
        wanted = self.lookahead if wanted is None else wanted
        check_lookahead(wanted)
        if wanted not in (None, 0, "auto") and not decoders.drafter and not grammar_asked(options):
            raise OvspecError("lookahead needs a draft; load the model with draft=True, lookup or a draft's folder.")
        if wanted == 0:
            return None, Lookahead(0)
        if isinstance(wanted, int) or not decoders.drafter:
            return decoders.drafter, Lookahead(wanted if isinstance(wanted, int) else None)
        if not decoders.lookaheads:
            costs = Costs(self.target.verify_ms), Costs(self.draft.verify_ms if self.draft else None)
            decoders.lookaheads = {kind: Lookahead(None, *costs) for kind in (False, True)}
        return decoders.drafter, decoders.lookaheads[sampled]

    def check_room(self, tokens: int, context: int | None) -> None:
        """Raises OvspecError where a text of so many tokens doesn't fit into ``context`` or the model's."""
        context = context or self.target.ir.context_length
        if context and tokens > context:
            raise OvspecError(f"The text would have {tokens} tokens, but the context is {context}; shorten it.")

    def decoders(self) -> Decoders:
        """Some that nobody uses, with whatever their rows hold; ``release`` takes them back."""
        with contextlib.suppress(IndexError):  # one step, so that threads don't take the same one
            return self._idle.pop()
        known = self.tokenizer.known
        draft = self.draft.decoder(known) if self.draft else None
        return Decoders(self.target.decoder(known), self._drafter(draft), draft)

    def irs(self, drafts: bool = True) -> list[CompiledIR]:
        """The target's and, with ``drafts``, the draft model's."""
        return [loaded.ir for loaded in (self.target, self.draft if drafts else None) if loaded]

    def fork(self, decoders: Decoders) -> Decoders:
        """Others that go on from what ``decoders`` hold."""
        draft = decoders.draft.fork() if decoders.draft else None
        return Decoders(decoders.target.fork(), self._drafter(draft), draft, copy.deepcopy(decoders.lookaheads))

    def release(self, decoders: Decoders, again: bool = True) -> None:
        """Empty what a session no longer needs, which gives the memory back, and keep it for ``again``, or don't."""
        decoders.reset(0)
        if again:
            self._idle.append(decoders)

    def _drafter(self, draft: SessionDecoder | None) -> Drafter | None:
        if not self._choice:
            return None
        drafters: list[Drafter] = [Lookup(self._corpus)] if self._choice.lookup else []
        if self._choice.own:
            drafters.append(self._choice.own())
        if draft:
            drafters.append(DraftModel(draft))
        for drafter in drafters:
            drafter.vocabulary = self.tokenizer.known
        return Chain(*drafters) if len(drafters) > 1 else drafters[0]


def healable_from(prompt: Prompt, tokens: np.ndarray) -> int:
    """The first of a prompt's ``tokens`` that healing may take back: none of what a template made."""
    return len(tokens) if is_chat(prompt) else 0


def is_batch(prompt: Any) -> bool:
    """Whether ``prompt`` is a list of prompts."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list, np.ndarray))
