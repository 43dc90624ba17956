"""Preparation of requests: from a body to rows, within their limits."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request
from pydantic import BaseModel

from ovspec.api.model import LanguageModel
from ovspec.base.errors import PromptError
from ovspec.drafting.drafter import DraftLimits
from ovspec.engine.engine_thread import EngineThread
from ovspec.engine.row import Row
from ovspec.params import Params, refuse_retries_in_stream
from ovspec.params.serving import ServeParams
from ovspec.protocols.apis import TextApi
from ovspec.protocols.chat.reply import new_reply_identity
from ovspec.protocols.reply import ReplyInputs
from ovspec.protocols.requests import IgnoredNames, TextRequest
from ovspec.server.access import add_ignored_names, find_request_key_number
from ovspec.server.admission import MAX_TEXTS
from ovspec.server.errors import ApiError, make_prompt_error
from ovspec.text.infill import NO_FIM_ERROR, InfillPrompt

# Limits of a request.
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4_000  # of all stop strings together
MAX_LOGPROBS = 300_000  # tokens and top alternatives


@dataclass
class PreparedRequest:
    """A request ready for the engine, with its arrival time."""

    api: TextApi
    params: Params
    arrival_time: float
    reply_inputs: ReplyInputs


class RequestPreparer:
    """Makes rows from requests; ``defaults``: the default params."""

    def __init__(
        self, lm: LanguageModel, engine: EngineThread, model_name: str, defaults: Params, options: ServeParams
    ) -> None:
        self._lm = lm
        self._engine = engine
        self._model_name = model_name
        self._defaults = defaults
        self._options = options

    def prepare_request(
        self, api: TextApi, body: BaseModel, http_request: Request, arrival_time: float
    ) -> PreparedRequest:
        """Return a request with its rows. May take long: grammars are compiled."""
        request = self.read_request(api, body, http_request)
        params = self.make_request_params(request)
        if request.stream:
            refuse_retries_in_stream(params)
        draft_limits = make_draft_limits(self._lm, request, params)
        rows = self._make_rows(request, params)
        for row in rows:
            row.draft_limits = draft_limits
            if row.sequence.owner is None and not self._options.share_prefixes:
                row.sequence.owner = find_request_key_number(http_request)
            if request.echo and request.only_prompts:
                row.finish_reason = "length"
                row.stats.cached_tokens = 0
        enforce_row_limits(self._lm, self._engine.max_cache_tokens, request, rows)
        reply_identity = new_reply_identity(api.id_prefix, self._model_name)
        return PreparedRequest(
            api, params, arrival_time, ReplyInputs(self._lm.tokenizer, reply_identity, request, rows)
        )

    def count_tokens(self, api: TextApi, body: BaseModel, http_request: Request) -> int:
        """Return the number of tokens of a request's prompt."""
        request = self.read_request(api, body, http_request)
        params = self.make_request_params(request)
        try:
            return sum(
                len(self._lm.runtime.prompt_encoder.encode_prompt(prompt, params).ids) for prompt in request.prompts
            )
        except PromptError as error:
            raise make_prompt_error(error, self._lm, request.prompt_field) from None

    def read_request(self, api: TextApi, body: BaseModel, http_request: Request) -> TextRequest:
        """Return the request in a body; reports ignored fields."""
        request = replace(api.read_body(body), model_context_length=self._lm.target.ir.context_length)
        options = request.overrides.values
        ignored_names = dict.fromkeys(request.ignored)
        template_variables = options.get("chat_template_kwargs")
        if request.is_chat and template_variables:
            options["chat_template_kwargs"] = self.select_template_variables(
                template_variables, bool(options.get("tools")), ignored_names
            )
        self.report_ignored(ignored_names, http_request)
        return replace(request, ignored=(*ignored_names,))

    def select_template_variables(
        self, template_variables: dict[str, Any], has_tools: bool, ignored_names: IgnoredNames
    ) -> dict[str, Any]:
        """Return the chat template's variables; names of unknown variables are added to ``ignored_names``."""
        chat_template = self._lm.runtime.prompt_encoder.chat_format.template
        unread_names = chat_template.unread_variables(template_variables, has_tools or "tools" in template_variables)
        ignored_names |= {f"chat_template_kwargs.{name}": None for name in unread_names}
        return {name: value for name, value in template_variables.items() if name not in unread_names}

    def report_ignored(self, ignored_names: Iterable[str], http_request: Request) -> None:
        """Report ignored fields in a response header and the log; raises ApiError if the server is strict."""
        ignored_field = next(iter(ignored_names), None)
        if ignored_field is None:
            return
        if self._options.strict_fields:
            raise ApiError(400, f"{ignored_field} is not supported; leave it out.", ignored_field)
        add_ignored_names(http_request, ignored_names)

    def make_request_params(self, request: TextRequest) -> Params:
        """Return the complete params of a request; raises OvspecError for wrong options or exceeded limits."""
        if request.is_infill and not self._lm.tokenizer.fim_tokens:
            raise ApiError(501, NO_FIM_ERROR, "suffix" if request.kind == "completion" else None)
        params = request.overrides.apply_to(self._defaults, request.kind)
        with request.overrides.errors_with_client_names():
            params = self._lm.runtime.row_maker.complete_params(params)
        check_stop_strings(request, params)
        check_text_count(request, params)
        check_prompt_sizes(self._lm, request)
        return params

    def _make_rows(self, request: TextRequest, params: Params) -> list[Row]:
        """Return the rows of all prompts, in the order of the prompts."""
        rows = list[Row]()
        try:
            with request.overrides.errors_with_client_names():
                for prompt in request.prompts:
                    rows += self._lm.runtime.row_maker.make_rows(prompt, params, memory_reserved=True)
        except PromptError as error:
            raise make_prompt_error(error, self._lm, request.prompt_field) from None
        return rows


def check_stop_strings(request: TextRequest, params: Params) -> None:
    """Raise ApiError for too many or too long stop strings."""
    stop_count = len(params.stop_strings)
    character_count = sum(map(len, params.stop_strings))
    if stop_count > MAX_STOPS or character_count > MAX_STOP_CHARACTERS:
        limit_clause = f"at most {MAX_STOPS} strings with {MAX_STOP_CHARACTERS:,} characters are allowed"
        field = request.overrides.client_names.get("stop", "stop")
        raise ApiError(
            400, f"{field} has {stop_count} strings with {character_count} characters in total; {limit_clause}.", field
        )


def check_text_count(request: TextRequest, params: Params) -> None:
    """Raise ApiError for too many texts."""
    text_count = params.n * len(request.prompts)
    if text_count > MAX_TEXTS:
        raise ApiError(400, f"The request asks for {text_count} texts; at most {MAX_TEXTS} are allowed.", "n")


def check_prompt_sizes(lm: LanguageModel, request: TextRequest) -> None:
    """Raise ApiError for a prompt too long for the context, before encoding it at length."""
    context_length = lm.target.ir.context_length
    if not context_length:
        return
    max_characters = lm.tokenizer.max_characters(context_length)
    for prompt in request.prompts:
        character_count = count_required_characters(prompt, request)
        if character_count > max_characters:
            sizes_clause = f"{character_count} characters, but the context length is {context_length} tokens"
            message = f"The prompt has {sizes_clause}; shorten the prompt."
            raise make_prompt_error(PromptError(message, too_long=True), lm, request.prompt_field)


def count_required_characters(prompt: Any, request: TextRequest) -> int:
    """Return the number of required characters in a prompt; 0 for token ids."""
    match prompt:
        case str():
            return len(prompt)
        case InfillPrompt():
            return prompt.needed_characters
        case _:
            return request.chat_character_count if request.is_chat else 0


def make_draft_limits(lm: LanguageModel, request: TextRequest, params: Params) -> DraftLimits:
    """Return the limits of a request's proposals; raises ApiError for unknown drafters."""
    if request.draft is None:
        return DraftLimits(None, params.lookahead_limit)
    loaded_drafters = list_loaded_drafters(lm)
    requested_drafters = frozenset[str]()
    if request.draft != "none":
        requested_drafters = frozenset(request.draft.split(","))
    if not requested_drafters <= {*loaded_drafters}:
        drafters_clause = "has no drafters"
        if loaded_drafters:
            drafters_clause = f"drafts only with {' and '.join(loaded_drafters)}"
        remedy = 'set draft to "none" for plain decoding'
        message = f"draft is {request.draft!r:.80}, but this server {drafters_clause}; {remedy}."
        raise ApiError(400, message, "draft")
    return DraftLimits(requested_drafters, params.lookahead_limit)


def list_loaded_drafters(lm: LanguageModel) -> list[str]:
    """Return the names of the drafters that requests may name."""
    draft_choice = lm.runtime.models.draft_choice
    loaded_drafters = list[str]()
    if draft_choice and draft_choice.lookup:
        loaded_drafters.append("lookup")
    if lm.draft:
        loaded_drafters.append(lm.draft.proposer_name)
    return loaded_drafters


def enforce_row_limits(lm: LanguageModel, memory_tokens: int, request: TextRequest, rows: list[Row]) -> None:
    """Limit texts to the memory, like the context: agents request the maximum length of any model.

    Where a request sets no ``max_tokens``, they also end where its log-probabilities would be too many.

    Raises:
        ApiError: a prompt doesn't fit into memory, or the log-probabilities exceed their limit.
    """
    for row in rows:
        if row.prompt_length >= memory_tokens:
            sizes_sentence = (
                f"The prompt has {row.prompt_length} tokens, but this server's KV cache holds only {memory_tokens}"
            )
            message = f"{sizes_sentence}; shorten the prompt."
            raise make_prompt_error(PromptError(message, too_long=True), lm, request.prompt_field)
        row.limit_length(memory_tokens)
    top_logprobs = rows[0].params.logprobs
    if top_logprobs is None:
        return
    if "max_tokens" not in request.overrides.values:
        max_new_tokens = MAX_LOGPROBS // (1 + top_logprobs) // len(rows)
        for row in rows:
            new_tokens = max_new_tokens - row.prompt_length * request.echo
            row.limit_length(row.prompt_length + max(new_tokens, 1))
    token_count = sum(row.max_length for row in rows)
    if not request.echo:
        token_count -= sum(row.prompt_length for row in rows)
    logprob_count = token_count * (1 + top_logprobs)
    if logprob_count > MAX_LOGPROBS:
        limit_sentence = f"The answer could have {logprob_count:,} log-probabilities, but the limit is {MAX_LOGPROBS:,}"
        field = "top_logprobs" if request.is_chat else "logprobs"
        raise ApiError(400, f"{limit_sentence}; lower max_tokens, n or {field}.", field)
