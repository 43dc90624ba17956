"""LanguageModel: a loaded model for generation, sessions and measurements."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import field, replace
from typing import Any, Generic, TypeVar, overload

import numpy as np

from ovspec.api.async_texts import AsyncTextStream, RowsToJoin, generate_results
from ovspec.api.session import Session
from ovspec.api.verify import Verification, verify_result
from ovspec.base.errors import InferenceError, OvspecError
from ovspec.drafting.choice import DraftChoice
from ovspec.engine.engine_thread import EngineThread
from ovspec.engine.prompts import Prompt, Prompts, is_nonempty_prompt_list
from ovspec.engine.results import Piece, Result
from ovspec.engine.row import Row, TextStream
from ovspec.engine.runtime import Runtime
from ovspec.engine.scoring import DEFAULT_PERPLEXITY_CONTEXT, Perplexity, measure_perplexity
from ovspec.params import Params
from ovspec.params.checks import refuse_retries_in_stream
from ovspec.params.generation import DEFAULT_PARAMS, GenerateOptions
from ovspec.params.option import OptionValue, method_accepts_options, options_dataclass

PromptT = TypeVar("PromptT")


@options_dataclass
class GenerateArguments(GenerateOptions, Generic[PromptT]):
    """The arguments of calls with a prompt, for editors."""

    prompt: PromptT = field(kw_only=False)


class LanguageModel:
    """A loaded model, with or without a draft; made by ``ovspec.load``.

    Threads may share a model: concurrent calls and sessions don't change each other's texts. Only a single thread at a
    time may use a session or a stream. ``agenerate`` and ``astream`` are for asyncio and use continuous batching.

    ``close``, or the end of a ``with`` statement, frees the model's memory.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.folder = runtime.folder
        self.tokenizer = runtime.prompt_encoder.tokenizer
        self.generation_config = runtime.prompt_encoder.generation_config
        self.target = runtime.models.target
        self.draft = runtime.models.draft
        self._engine: EngineThread | None = None  # for ``agenerate`` and ``astream``
        self._engine_finalizer: weakref.finalize[Any, Any] | None = None  # also ends the engine of a dropped model
        self._engine_lock = threading.Lock()  # held during the engine's start and end

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model's memory. The model, its sessions and models from ``with_drafters`` can't be used any more.

        Running texts in other threads or tasks end with an OvspecError.
        """
        with self._engine_lock:
            if self._engine and self._engine_finalizer:
                self._engine.fail_all_requests(InferenceError(f"{self.folder}: the model was closed; load it again."))
                self._engine_finalizer()
                self._engine = self._engine_finalizer = None
            self.runtime.close()

    def __repr__(self) -> str:
        if self.target.ir.open_model is None:
            return f"LanguageModel({str(self.folder)!r}, closed)"
        return f"LanguageModel({str(self.folder)!r}, {self.runtime.settings_label})"

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Return the token ids of ``prompt``, (n,) int64.

        Args:
            prompt: a text (the model's BOS, if any, is added), chat messages (rendered with the chat template), or
                token ids (left unchanged).

        Raises:
            OvspecError: an empty prompt for a model without a BOS, unknown ids, or an invalid text or message.
        """
        return self.runtime.prompt_encoder.encode(prompt)

    # ------------------------------------------------------------ generating

    @overload
    @method_accepts_options(GenerateArguments[Prompts])
    def generate(self, prompt: Prompts, **options: OptionValue) -> list[Result]: ...
    @overload
    @method_accepts_options(GenerateArguments[Prompt])
    def generate(self, prompt: Prompt, **options: OptionValue) -> Result: ...
    @method_accepts_options(GenerateArguments[Prompt | Prompts])
    def generate(self, prompt: Prompt | Prompts, **options: OptionValue) -> Result | list[Result]:
        """Continue ``prompt``, or a list of prompts in a batch.

        Args:
            prompt: a text, token ids or chat messages; or a list of texts, of lists of ids, or of chats. If the last
                message of a chat is the assistant's, the answer continues it.
            options: see "Options of generating calls". For ``n`` above 1 call ``samples``.

        Raises:
            OvspecError: an empty prompt for a model without a BOS, a prompt longer than the model's context, or an
                option out of range.
            TypeError: an unknown option.
        """
        results = [result for [result] in self._generate_samples(prompt, options, single_text=True)]
        return results if is_prompt_list(prompt) else results[0]

    @overload
    @method_accepts_options(GenerateArguments[Prompts])
    def samples(self, prompt: Prompts, **options: OptionValue) -> list[list[Result]]: ...
    @overload
    @method_accepts_options(GenerateArguments[Prompt])
    def samples(self, prompt: Prompt, **options: OptionValue) -> list[Result]: ...
    @method_accepts_options(GenerateArguments[Prompt | Prompts])
    def samples(self, prompt: Prompt | Prompts, **options: OptionValue) -> list[Result] | list[list[Result]]:
        """Return ``n`` continuations of ``prompt``, or of each prompt in a list. Each prompt is prefilled once.

        Greedy continuations are all the same; with a temperature or a sampler they differ.

        Args:
            prompt, options: as for ``generate``.

        Raises:
            OvspecError: as ``generate``.
            TypeError: an unknown option.
        """
        samples = self._generate_samples(prompt, options)
        return samples if is_prompt_list(prompt) else samples[0]

    @method_accepts_options(GenerateArguments[Prompt])
    def stream(self, prompt: Prompt, **options: OptionValue) -> TextStream:
        """Stream the continuation of a prompt: ``for piece in lm.stream("def "): print(piece.text)``.

        Arguments and errors: as for ``generate``.
        """
        params = self._make_single_text_params(options)
        refuse_retries_in_stream(params)
        [row] = rows = self.runtime.row_maker.make_rows(prompt, params)
        rounds = self.runtime.decoder_pool.run_batch(rows, params, 1)

        def iterate_pieces() -> Generator[Piece]:
            with closing(rounds):
                for round_pieces in rounds:
                    for _, piece in round_pieces:
                        yield piece

        return TextStream(iterate_pieces(), row)

    # ------------------------------------------------------------ for asyncio

    @overload
    @method_accepts_options(GenerateArguments[Prompts])
    async def agenerate(self, prompt: Prompts, **options: OptionValue) -> list[Result]: ...
    @overload
    @method_accepts_options(GenerateArguments[Prompt])
    async def agenerate(self, prompt: Prompt, **options: OptionValue) -> Result: ...
    @method_accepts_options(GenerateArguments[Prompt | Prompts])
    async def agenerate(self, prompt: Prompt | Prompts, **options: OptionValue) -> Result | list[Result]:
        """Continue ``prompt`` like ``generate``, with continuous batching of all such calls in a background thread.

        The texts are the same as from ``generate``. A cancelled call leaves the batch.

        Args:
            prompt, options: as for ``generate``, without ``batch_size``.

        Raises:
            OvspecError: as ``generate``; inference or a function of the caller failed; or the model was closed.
        """
        params = self._make_shared_batch_params(options)
        prompts = as_prompt_list(prompt)
        engine, rows = await asyncio.to_thread(self._make_rows_to_join, prompts, params)
        results = await generate_results(engine, rows)
        for _ in range(params.retries):
            retry_rows = await asyncio.to_thread(make_retry_rows, engine.runtime, prompts, params, results)
            if not retry_rows:
                break
            new_results = await generate_results(engine, [*retry_rows.values()])
            for index, result in zip(retry_rows, new_results, strict=True):
                results[index] = result
        return results if is_prompt_list(prompt) else results[0]

    @method_accepts_options(GenerateArguments[Prompt])
    def astream(self, prompt: Prompt, **options: OptionValue) -> AsyncTextStream:
        """Stream the continuation of a prompt: ``async for piece in lm.astream("def "): print(piece.text)``.

        Arguments and errors: as for ``agenerate``.
        """
        params = self._make_shared_batch_params(options)
        refuse_retries_in_stream(params)
        return AsyncTextStream(functools.partial(self._make_rows_to_join, [prompt], params))

    def _make_shared_batch_params(self, options: dict[str, OptionValue]) -> Params:
        """Return the params of a call in the shared batch."""
        params = self._make_single_text_params(options)
        if params.batch_size != DEFAULT_PARAMS.batch_size:
            raise OvspecError(
                "`batch_size` can't be set in `agenerate` and `astream`, because their calls share a batch; leave "
                "`batch_size` out."
            )
        return params

    def _make_rows_to_join(self, prompts: Sequence[Prompt], params: Params) -> RowsToJoin:
        """Return the engine thread, started by the first call, and a row for each prompt."""
        with self._engine_lock:
            if not (engine := self._engine):
                engine = EngineThread(self.runtime, DEFAULT_PARAMS.batch_size)
                engine.start(warm_up=False)
                self._engine = engine
                self._engine_finalizer = weakref.finalize(self, engine.stop)
        row_maker = engine.runtime.row_maker
        return engine, [row for prompt in prompts for row in row_maker.make_rows(prompt, params, can_wait=True)]

    def _make_single_text_params(self, options: dict[str, OptionValue]) -> Params:
        """Return the params of a call for a single text per prompt."""
        params = self.runtime.row_maker.make_complete_params(options)
        if params.n != 1:
            raise OvspecError(
                f"`n` is {params.n}, but this call returns a single text; call samples() for several texts."
            )
        return params

    def _generate_samples(
        self, prompt: Prompt | Prompts, options: dict[str, OptionValue], single_text: bool = False
    ) -> list[list[Result]]:
        """Return the ``n`` results of each prompt; with ``single_text``, ``n`` must be 1."""
        prompts = as_prompt_list(prompt)
        make_params = self._make_single_text_params if single_text else self.runtime.row_maker.make_complete_params
        params = make_params(options)
        rows = [row for prompt in prompts for row in self.runtime.row_maker.make_rows(prompt, params)]
        for _ in self.runtime.decoder_pool.run_batch(rows, params, len(rows)):
            pass
        results = [row.result() for row in rows]
        retry_invalid_results(self.runtime, prompts, params, results)
        return [results[first_index : first_index + params.n] for first_index in range(0, len(rows), params.n)]

    # ------------------------------------------------------------ sessions

    def session(self, context: int | None = None, chat_template_kwargs: Mapping[str, Any] | None = None) -> Session:
        """Start a session: an empty text, with KV caches kept between calls.

        Args:
            context: maximum length of the text in tokens; by default the model's context length.
            chat_template_kwargs: variables for the chat template, such as ``{"enable_thinking": False}``.

        Raises:
            OvspecError: ``context`` is below 1 or above the model's, or its KV caches don't fit into memory.
        """
        context_length = self.target.ir.context_length
        if context is not None and (context < 1 or (context_length and context > context_length)):
            allowed_range = "at least 1"
            if context_length:
                allowed_range += f" and at most {context_length}"
            raise OvspecError(f"`context` is {context}; it must be {allowed_range}.")
        if context:
            self.runtime.models.ensure_memory(context)
        decoders = self.runtime.decoder_pool.acquire()
        decoders.reset(1)
        return Session(self.runtime, decoders, context, chat_template_kwargs)

    def cache_bytes(self, tokens: int) -> float:
        """Estimate the size, in bytes, of the KV caches of a text of ``tokens`` tokens, target and draft together."""
        return self.runtime.models.estimate_cache_bytes(tokens)

    # ------------------------------------------------------------ checking and measuring

    def verify(self, result: Result) -> Verification:
        """Check each token of ``result`` with a single forward pass over its prompt and text.

        With exact arithmetic every token is the model's own choice, regardless of accelerators. Returns an object with
        ``ok``; ``tokens``, their number; ``exact``, the number of tokens before the first difference; ``difference``,
        the first difference or None; and ``problem``, any other mistake in words or None.

        Args:
            result: made by this model in this process, or read by ``ovspec.result_from_json`` from saved JSON.

        Raises:
            OvspecError: the text was made by another model, or in an unrepeatable way (``accept="rejection"``, a custom
                ``sampler`` or ``logits_processors``).
        """
        return verify_result(self.runtime, result)

    def perplexity(self, text: str, context: int | None = None) -> Perplexity:
        """Measure the target's perplexity on ``text``, in windows overlapping by half.

        Args:
            context: tokens per window; by default the model's context length, but at most 1024.

        Raises:
            OvspecError: ``text`` or the window has fewer than two tokens, or the window exceeds the model's context.
        """
        context_length = self.target.ir.context_length
        if context and context_length and context > context_length:
            raise OvspecError(
                f"`context` is {context}, but the model's context is {context_length} tokens; lower `context`."
            )
        context = context or min(DEFAULT_PERPLEXITY_CONTEXT, context_length or DEFAULT_PERPLEXITY_CONTEXT)
        decoders = self.runtime.decoder_pool.acquire()
        try:
            return measure_perplexity(decoders.target, self.tokenizer.encode(text), context)
        finally:
            self.runtime.decoder_pool.release(decoders)

    def next_logits(self, prompt: Prompt) -> np.ndarray:
        """Return the target's logits (vocab,) float32 for the token after ``prompt``; errors as for ``encode``."""
        tokens = self.encode(prompt)
        decoders = self.runtime.decoder_pool.acquire()
        try:
            decoders.reset(1)
            return decoders.target.feed([tokens], [1])[0][0].copy()
        finally:
            self.runtime.decoder_pool.release(decoders)

    def use_large_pages(self) -> None:
        """Move the weights into large memory pages now (Linux's transparent huge pages), in about two seconds per GB.

        Without this call, the weights are moved after some seconds of inference, while the model is idle.
        """
        for ir in self.runtime.models.compiled_irs():
            ir.large_page_mover.move_weights_for(math.inf)

    def with_drafters(self, choice: DraftChoice | None) -> LanguageModel:
        """Return a model with the same compiled models and other drafters.

        Args:
            choice: the drafters, for example from ``ovspec.drafting.choice.parse_draft("lookup")``; None for plain
                decoding. If they include a draft model, it must be the loaded draft model.
        """
        return LanguageModel(self.runtime.with_drafters(choice))


def as_prompt_list(prompt: Any) -> Sequence[Prompt]:
    """Return ``prompt`` if it is a list of prompts, otherwise a list with this prompt."""
    return prompt if is_prompt_list(prompt) else [prompt]


def is_prompt_list(prompt: Prompt | Prompts) -> bool:
    """Return whether ``prompt`` is a list of prompts, possibly empty."""
    return isinstance(prompt, list) and (not prompt or is_nonempty_prompt_list(prompt))


def retry_invalid_results(runtime: Runtime, prompts: Sequence[Prompt], params: Params, results: list[Result]) -> None:
    """Replace results in violation of their schema: generate them again, with the next seeds.

    Args:
        prompts: each has ``n`` results, in the order of the prompts.
        params: the params of the results; ``retries`` is the maximum number of attempts.
    """
    for _ in range(params.retries):
        retry_rows = make_retry_rows(runtime, prompts, params, results)
        if not retry_rows:
            return
        for _ in runtime.decoder_pool.run_batch(retry_rows.values(), params, len(retry_rows)):
            pass
        for index, row in retry_rows.items():
            results[index] = row.result()


def make_retry_rows(
    runtime: Runtime, prompts: Sequence[Prompt], params: Params, results: list[Result], reserved: bool = False
) -> dict[int, Row]:
    """Return rows with the next seeds for results in violation of their schema, by the results' index."""
    retry_rows = dict[int, Row]()
    for index, result in enumerate(results):
        if result.schema_errors:
            prompt_index, sample_index = divmod(index, params.n)
            seed = ((result.stats.seed or 0) + 1) % 2**63
            rows = runtime.row_maker.make_rows(prompts[prompt_index], replace(params, seed=seed), reserved)
            retry_rows[index] = rows[sample_index]
    return retry_rows
