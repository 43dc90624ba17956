"""Makes rows of calls: completes their params for the model, and encodes their prompts."""

from __future__ import annotations

import functools
import math
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ovspec.base.errors import OvspecError, PromptError
from ovspec.base.json_types import JsonObject
from ovspec.cache.sequence import UNSHARED, Sequence
from ovspec.engine.decoders import ModelPair
from ovspec.engine.prompts import Prompt, PromptEncoder
from ovspec.engine.results import Origin, Provenance, Stats
from ovspec.engine.row import Row
from ovspec.params import Params, make_params
from ovspec.sampling.constraint import Constraints
from ovspec.sampling.constraint_maker import ConstraintMaker
from ovspec.sampling.samplers import make_sampler
from ovspec.text.answer import AnswerReader
from ovspec.text.generation_config import DEFAULT_MAX_TOKENS

DEFAULT_ORIGIN = Origin()


@dataclass(frozen=True)
class RowMaker:
    """Completes the params of calls for a model, and makes rows of prompts. Threads may share it.

    lookahead: tokens proposed per round; None to choose automatically.
    identity: returns the target's identity and settings, for records of texts.
    """

    prompt_encoder: PromptEncoder
    models: ModelPair
    constraint_maker: ConstraintMaker
    lookahead: int | None
    identity: Callable[[], JsonObject]

    def make_complete_params(self, options: Mapping[str, Any]) -> Params:
        """Return the params of a call from Python's keywords, completed by ``complete_params``."""
        return self.complete_params(make_params(options))

    def complete_params(self, params: Params) -> Params:
        """Return ``params`` with the defaults of this model, its generation config and its lookahead.

        Raises:
            OvspecError: token ids are unknown, or there is a lookahead and no drafter.
        """
        lookahead = self.lookahead if params.lookahead is None else params.lookahead
        if lookahead not in (None, "auto", 0) and not self.models.draft_choice and not params.grammar_option:
            raise OvspecError("`lookahead` needs a source of proposals; set `draft` to a draft model or lookup.")
        known_ids = self.prompt_encoder.tokenizer.known_ids
        for option_name, option_ids in (("logit_bias", params.logit_bias), ("stop_ids", params.stop_ids)):
            if len(option_ids) and (unknown_id := known_ids.first_unknown(np.array(list(option_ids)))) is not None:
                raise OvspecError(f"`{option_name}`: token id {str(unknown_id)[:20]} is not in the vocabulary.")
        generation_settings = self.prompt_encoder.generation_config.settings
        model_defaults: dict[str, Any] = {"lookahead": None if lookahead == "auto" else lookahead}
        if params.repetition_penalty is None:
            model_defaults["repetition_penalty"] = generation_settings.repetition_penalty
        if params.min_tokens is None and generation_settings.min_new_tokens:
            model_defaults["min_tokens"] = int(min(generation_settings.min_new_tokens, params.token_limit))
        if generation_settings.suppress_tokens:
            model_defaults["logit_bias"] = dict.fromkeys(generation_settings.suppress_tokens, -np.inf) | dict(
                params.logit_bias
            )
        return replace(params, **model_defaults)

    def with_long_texts(self, params: Params) -> Params:
        """Return the ``params`` of a request; without ``max_tokens``, generation config or context limit the text."""
        if params.max_tokens is not None:
            return params
        return replace(params, max_tokens=self.prompt_encoder.generation_config.settings.max_new_tokens or -1)

    def text_token_limit(self, params: Params) -> float:
        """Return the maximum number of tokens of a text; inf if only the context limits it."""
        if params.max_tokens is None:
            return self.prompt_encoder.generation_config.settings.max_new_tokens or DEFAULT_MAX_TOKENS
        return params.token_limit

    def make_rows(
        self, prompt: Prompt, params: Params, memory_reserved: bool = False, can_wait: bool = False
    ) -> list[Row]:
        """Return a row for each of the ``n`` texts of a prompt.

        ``params`` are complete, but may lack a seed. ``memory_reserved``: by the caller.
        ``can_wait``: see ``ModelPair.ensure_memory``.

        Raises:
            OvspecError: the prompt can't be encoded or doesn't fit, or the grammar is wrong.
        """
        context_length = self.models.target.ir.context_length or math.inf
        max_prompt_tokens = context_length - min(self.text_token_limit(params), DEFAULT_MAX_TOKENS)
        prompt_ids, is_chat, first_healable, end_ids = self.prompt_encoder.encode_prompt(
            prompt, params, max_prompt_tokens
        )
        if end_ids and not params.ignore_eos:
            params = replace(params, stop_ids=[*params.stop_ids, *end_ids])
        params = with_random_seed(params)  # the same seed for all texts
        origins = [Origin(is_chat, first_healable, None, sample) for sample in range(params.n)]
        rows = [self.make_row(Sequence(prompt_ids), params, origin) for origin in origins]
        if not memory_reserved:
            for row in rows:
                self.check_row_memory(row, params, can_wait=can_wait)
        return rows

    def make_row(self, sequence: Sequence, params: Params, origin: Origin = DEFAULT_ORIGIN) -> Row:
        """Return a row that continues ``sequence``; ``params`` are complete, but may lack a seed.

        Raises:
            OvspecError: the text doesn't fit the context, or the grammar doesn't allow it.
        """
        prompt_encoder = self.prompt_encoder
        prompt_tokens = len(sequence)
        generation_config = prompt_encoder.generation_config
        context_length = origin.context_length or self.models.target.ir.context_length or math.inf
        if (free_tokens := context_length - max(prompt_tokens, 1)) < 1:
            error_message = (
                f"The prompt has {prompt_tokens} tokens, but the context is {context_length} tokens; "
                "shorten the prompt."
            )
            raise PromptError(error_message, too_long=True)
        params = replace(
            with_random_seed(params), max_tokens=int(min(self.text_token_limit(params), free_tokens, sys.maxsize))
        )
        eos_ids: frozenset[int] = frozenset()
        if not params.ignore_eos:
            eos_ids = generation_config.eos_ids
            if prompt_encoder.custom_template:
                params = replace(params, stop_ids=[*params.stop_ids, *prompt_encoder.template_answer_end_ids])
        if not prompt_tokens:
            sequence.commit(generation_config.empty_prompt_ids)
        if not (self.models.shares_greedy_prefixes or params.is_sampled):
            sequence.owner = UNSHARED
        answer_format = prompt_encoder.answer_format(sequence.tokens, params) if origin.chat else None
        if params.constrains:
            constraints, healing = self.constraint_maker.make_constraints(
                sequence.tokens, params, eos_ids, generation_config.bos_ids, origin.healable, answer_format
            )
        else:
            constraints, healing = make_empty_constraints(eos_ids | frozenset(params.stop_ids)), None
        recorded_params = replace(params, max_predict_ms=0.0)  # a verification takes another time
        record = Provenance(sequence.tokens.copy(), recorded_params, origin, self.identity)
        sampler = make_sampler(params, origin.sample, constraints)
        if healing:  # nothing can fail from here on
            healing.take_back_tokens(sequence)
        answer_reader = mark_by_token_id = None
        if answer_format:
            if not params.allowed_calls.tool_names:
                answer_format = replace(answer_format, tool_format=None)
            mark_by_token_id = answer_format.mark_by_token_id
            call_id_key = sequence.tokens.tobytes() + origin.sample.to_bytes(4)
            answer_reader = AnswerReader(
                answer_format, self.constraint_maker.unquoted_arguments(params, answer_format), call_id_key
            )
        return Row(
            sequence,
            params,
            sampler,
            prompt_encoder.tokenizer.make_detokenizer(mark_by_token_id),
            self._make_stats(params, prompt_tokens),
            eos_ids=eos_ids,
            context_length=context_length,
            record=record,
            healing=healing,
            reader=answer_reader,
        )

    def check_row_memory(self, row: Row, params: Params, cached_tokens: int = 0, can_wait: bool = False) -> None:
        """Raise OvspecError if there is no memory for a row, of which ``cached_tokens`` are in the KV cache.

        Where ``params`` don't limit the text, memory for the default number of tokens is enough, and the text ends
        where it would exceed `cache_size`. ``can_wait``: see ``ModelPair.ensure_memory``.
        """
        token_count = row.max_length
        if params.max_tokens != row.params.max_tokens:
            token_count = min(token_count, row.prompt_length + DEFAULT_MAX_TOKENS)
        include_draft = params.lookahead != 0
        self.models.ensure_memory(token_count - cached_tokens, include_draft, can_wait)
        if token_count < row.max_length and self.models.cache_limit_bytes is not None:
            free_tokens = self.models.count_tokens_below_limit(include_draft, can_wait)
            row.limit_length(cached_tokens + int(min(free_tokens, row.max_length)))

    def _make_stats(self, params: Params, prompt_tokens: int) -> Stats:
        target = self.models.target
        stats = Stats(
            prompt_tokens=prompt_tokens,
            seed=params.seed if params.temperature else None,
            rollback=target.rollback.label,
            device=target.ir.device,
            engine=target.engine,
            engine_reason=target.engine_reason,
            profile=target.profile,
            arithmetic=target.arithmetic_note,
        )
        if target.arithmetic_note == "exact":
            stats.rule = target.feed_rule.label
        draft = self.models.draft
        if draft and params.lookahead != 0:
            stats.draft_device = draft.ir.device
            stats.draft_engine = draft.engine
        return stats


@functools.lru_cache(64)
def make_empty_constraints(end_ids: frozenset[int]) -> Constraints:
    """Return the constraints of an unconstrained text that ``end_ids`` end."""
    return Constraints((), end_ids)


def with_random_seed(params: Params) -> Params:
    """Return ``params`` with a random seed if they draw tokens and have none."""
    if params.temperature and params.seed is None:
        return replace(params, seed=secrets.randbits(32))
    return params
