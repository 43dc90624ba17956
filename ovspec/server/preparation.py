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
from ovspec.protocols.reply import Generation
from ovspec.protocols.requests import IgnoredNames, TextRequest
from ovspec.server.access import add_ignored_names, key_number
from ovspec.server.admission import MAX_TEXTS
from ovspec.server.errors import ApiError, prompt_error
from ovspec.text.infill import NO_FIM_ERROR, Infill

# Limits of a request.
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4_000  # of all stop strings together
MAX_LOGPROBS = 300_000  # tokens, and the most likely tokens at each position


@dataclass
class PreparedRequest:
    """A request that is ready for the engine; ``began``: the time of its arrival."""

    api: TextApi
    params: Params
    began: float
    generation: Generation


class RequestPreparer:
    """Makes rows of requests; ``defaults``: the params that requests don't set."""

    def __init__(
        self, lm: LanguageModel, engine: EngineThread, model_name: str, defaults: Params, options: ServeParams
    ) -> None:
        self._lm = lm
        self._engine = engine
        self._model_name = model_name
        self._defaults = defaults
        self._options = options

    def prepare_request(self, api: TextApi, body: BaseModel, http: Request, began: float) -> PreparedRequest:
        """Return a request with its rows. May take long: grammars are compiled."""
        request = self.read_request(api, body, http)
        params = self.make_request_params(request)
        if request.stream:
            refuse_retries_in_stream(params)
        draft_limits = make_draft_limits(self._lm, request, params)
        rows = self._make_rows(request, params)
        for row in rows:
            row.draft_limits = draft_limits
            if row.sequence.owner is None and not self._options.share_prefixes:
                row.sequence.owner = key_number(http)
            if request.echo and request.only_prompts:
                row.finish_reason = "length"
                row.stats.cached_tokens = 0
        limit_rows(self._lm, self._engine.max_cache_tokens, request, rows)
        identity = new_reply_identity(api.id_prefix, self._model_name)
        return PreparedRequest(api, params, began, Generation(self._lm.tokenizer, identity, request, rows))

    def count_tokens(self, api: TextApi, body: BaseModel, http: Request) -> int:
        """Return the number of tokens of a request's prompt."""
        request = self.read_request(api, body, http)
        params = self.make_request_params(request)
        try:
            return sum(
                len(self._lm.runtime.prompt_encoder.encode_prompt(prompt, params).ids) for prompt in request.prompts
            )
        except PromptError as error:
            raise prompt_error(error, self._lm, request.prompt_field) from None

    def read_request(self, api: TextApi, body: BaseModel, http: Request) -> TextRequest:
        """Return the request in a body; reports the fields that it ignores."""
        request = replace(api.read_body(body), context=self._lm.target.ir.context_length)
        options = request.overrides.values
        ignored = dict.fromkeys(request.ignored)
        variables = options.get("chat_template_kwargs")
        if request.is_chat and variables:
            options["chat_template_kwargs"] = self.select_variables(variables, bool(options.get("tools")), ignored)
        self.report_ignored(ignored, http)
        return replace(request, ignored=(*ignored,))

    def select_variables(self, variables: dict[str, Any], has_tools: bool, ignored: IgnoredNames) -> dict[str, Any]:
        """Return the variables that the chat template reads; names of the others are added to ``ignored``."""
        template = self._lm.runtime.prompt_encoder.chat_format.template
        unread = template.unread_variables(variables, has_tools or "tools" in variables)
        ignored |= {f"chat_template_kwargs.{name}": None for name in unread}
        return {name: value for name, value in variables.items() if name not in unread}

    def report_ignored(self, ignored: Iterable[str], http: Request) -> None:
        """Report ignored fields in the reply's head and the log; raises ApiError if the server is strict."""
        name = next(iter(ignored), None)
        if name is None:
            return
        if self._options.strict_fields:
            raise ApiError(400, f"{name} is not supported; leave it out.", name)
        add_ignored_names(http, ignored)

    def make_request_params(self, request: TextRequest) -> Params:
        """Return the complete params of a request; raises OvspecError for wrong options and beyond limits."""
        if request.is_infill and not self._lm.tokenizer.fim_tokens:
            raise ApiError(501, NO_FIM_ERROR, "suffix" if request.kind == "completion" else None)
        params = request.overrides.apply_to(self._defaults, request.kind)
        with request.overrides.errors_with_client_names():
            params = self._lm.runtime.row_maker.complete_params(params)
        check_stops(request, params)
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
            raise prompt_error(error, self._lm, request.prompt_field) from None
        return rows


def check_stops(request: TextRequest, params: Params) -> None:
    """Raise ApiError for too many or too long stop strings."""
    stops = len(params.stop_strings)
    characters = sum(map(len, params.stop_strings))
    if stops > MAX_STOPS or characters > MAX_STOP_CHARACTERS:
        limit = f"at most {MAX_STOPS} with {MAX_STOP_CHARACTERS:,} are allowed"
        name = request.overrides.client_names.get("stop", "stop")
        raise ApiError(400, f"{name} has {stops} strings with {characters} characters in all; {limit}.", name)


def check_text_count(request: TextRequest, params: Params) -> None:
    """Raise ApiError for too many texts."""
    texts = params.n * len(request.prompts)
    if texts > MAX_TEXTS:
        raise ApiError(400, f"The request asks for {texts} texts; at most {MAX_TEXTS} are allowed.", "n")


def check_prompt_sizes(lm: LanguageModel, request: TextRequest) -> None:
    """Raise ApiError for a prompt that the context can't hold, before it is encoded, which would take long."""
    context = lm.target.ir.context_length
    if not context:
        return
    max_characters = lm.tokenizer.max_characters(context)
    for prompt in request.prompts:
        characters = count_required_characters(prompt, request)
        if characters > max_characters:
            message = (
                f"The prompt has {characters} characters, but the context is {context} tokens; shorten the prompt."
            )
            raise prompt_error(PromptError(message, too_long=True), lm, request.prompt_field)


def count_required_characters(prompt: Any, request: TextRequest) -> int:
    """Return the number of characters of a prompt that can't be left out; 0 for token ids."""
    match prompt:
        case str():
            return len(prompt)
        case Infill():
            return prompt.needed_characters
        case _:
            return request.chat_size if request.is_chat else 0


def make_draft_limits(lm: LanguageModel, request: TextRequest, params: Params) -> DraftLimits:
    """Return the limits of a request's proposals; raises ApiError for drafters that the server doesn't have."""
    if request.draft is None:
        return DraftLimits(None, params.lookahead_limit)
    choice = lm.runtime.models.draft_choice
    loaded_drafters = list[str]()
    if choice and choice.lookup:
        loaded_drafters.append("lookup")
    if lm.draft:
        loaded_drafters.append(lm.draft.proposer_name)
    requested_drafters = frozenset[str]()
    if request.draft != "none":
        requested_drafters = frozenset(request.draft.split(","))
    if not requested_drafters <= {*loaded_drafters}:
        drafters = " and ".join(loaded_drafters) or "no drafters"
        message = f'draft is {request.draft!r:.80}; this server has {drafters}, and "none" proposes nothing.'
        raise ApiError(400, message, "draft")
    return DraftLimits(requested_drafters, params.lookahead_limit)


def limit_rows(lm: LanguageModel, max_tokens: int, request: TextRequest, rows: list[Row]) -> None:
    """Let texts end where memory ends, as they do where the context ends: agents ask for the most of any model.

    Raises:
        ApiError: a prompt doesn't fit into memory, or the log-probabilities exceed their limit.
    """
    for row in rows:
        if row.prompt_length >= max_tokens:
            sizes = f"The prompt has {row.prompt_length} tokens, but this server has room for {max_tokens}"
            message = f"{sizes}; shorten the prompt."
            raise prompt_error(PromptError(message, too_long=True), lm, request.prompt_field)
        row.limit_length(max_tokens)
    top_logprobs = rows[0].params.logprobs
    if top_logprobs is None:
        return
    tokens = sum(row.max_length for row in rows)
    if not request.echo:
        tokens -= sum(row.prompt_length for row in rows)
    count = tokens * (1 + top_logprobs)
    if count > MAX_LOGPROBS:
        message = f"The answer could have {count:,} log-probabilities; at most {MAX_LOGPROBS:,} are allowed"
        name = "top_logprobs" if request.is_chat else "logprobs"
        raise ApiError(400, f"{message}: lower max_tokens, n or {name}.", name)
