"""Reads requests: from the fields of a body to rows that are ready to be generated."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from ovspec.drafting.drafter import ANYTHING, DraftLimits
from ovspec.errors import OvspecError, PromptError
from ovspec.integrations.openai_batch import REQUESTED, echo_of, options_of, prompt_of
from ovspec.loop.row import Row
from ovspec.model import LanguageModel, Prompt, is_batch
from ovspec.options import GenerateOptions, params_of, refuse_retries, refuse_variables
from ovspec.options.option import hint
from ovspec.serving.errors import ApiError, about_prompt
from ovspec.serving.models import OF_SERVER, TokenizeRequest
from ovspec.text.chat_template import Message, chat_template

Kind = Literal["completion", "chat"]
MOST_TEXTS = 128  # of a request
MOST_STOPS, MOST_STOP_CHARACTERS = 64, 4_000  # of a request, the characters of all of them together
MOST_LOGPROBS = 300_000  # of a request: tokens, and most likely tokens beside each
# Fields that aren't options of a text.
APART = ("model", "stream", "stream_options", "draft", "return_record")
CALLS = ("tool_calls", "function_call")  # of a message
# Fields of a message: OpenAI's, and what chat templates read.
OF_MESSAGES = ("role", "content", "name", "tool_call_id", "reasoning_content", "thinking")


@dataclass
class TextRequest:
    """A request for texts.

    fields: the names of its fields.
    rows: those of the first prompt first, ``n`` for each prompt.
    owner: the number of the client's key, if there are keys.
    only_prompts: whether no token is generated, because the prompts' log-probabilities are all that is wanted.
    """

    kind: Kind
    prompts: list[Prompt]
    options: GenerateOptions
    limits: DraftLimits = ANYTHING
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    return_record: bool = False
    fields: Collection[str] = ()
    rows: list[Row] = field(default_factory=list)
    owner: int | None = None
    only_prompts: bool = False

    @property
    def n(self) -> int:
        return len(self.rows) // len(self.prompts)


def texts_asked(fields: dict[str, Any]) -> int:
    """Return how many texts a request asks for, before it is read."""
    prompt: Any = fields.get("prompt")
    return min((fields.get("n") or 1) * (len(prompt) if is_batch(prompt) else 1), MOST_TEXTS)


def read_request(lm: LanguageModel, kind: Kind, body: dict[str, Any], defaults: GenerateOptions) -> TextRequest:
    """Return the request in ``body``, the fields that a client has set; raises OvspecError for what can't be met."""
    asked = {name: value for name, value in body.items() if name not in APART}
    if kind == "chat" and "messages" in asked:
        asked["messages"] = [plain_message(message) for message in asked["messages"]]
    prompt = prompt_of(asked, kind)
    prompts = prompt if is_batch(prompt) else [prompt]
    check_lengths(lm, prompts)
    only_prompts = echo_of(asked) and asked.get("max_tokens") == 0
    if only_prompts:  # a row needs room for a token, although none is generated
        asked["max_tokens"] = 1
    with client_names(asked):
        options = cast(GenerateOptions, {**defaults, **options_of(asked, "a request", OF_SERVER)})
        params = params_of(options)
    check_stops(params.stop_strings)
    n = params.n
    texts = n * len(prompts)
    if texts > MOST_TEXTS:
        raise ApiError(400, f"The request asks for {texts} texts; at most {MOST_TEXTS} are allowed.", "n")
    if body.get("stream"):
        refuse_retries(options, "a stream, whose text is seen before it ends")
    wanted = body.get("stream_options") or {}
    if wanted and not body.get("stream"):
        raise ApiError(400, "stream_options needs stream to be true.", "stream_options")
    return TextRequest(
        kind,
        prompts,
        options,
        limits_of(lm, body, options),
        echo_of(asked),
        bool(body.get("stream")),
        bool(wanted.get("include_usage")),
        bool(body.get("return_record")),
        asked.keys(),
        only_prompts=only_prompts,
    )


def check_lengths(lm: LanguageModel, prompts: list[Prompt]) -> None:
    """Raise ApiError for a text that the context can't hold, before it is encoded, which would take long."""
    most = lm.tokenizer.most_characters(context) if (context := lm.target.ir.context_length) else math.inf
    for prompt in prompts:
        texts = [prompt] if isinstance(prompt, str) else [each["content"] for each in prompt if isinstance(each, dict)]
        if (size := sum(map(len, texts))) > most:
            told = f"The prompt has {size} characters, but the context is {context} tokens; shorten the prompt."
            raise about_prompt(PromptError(told, too_long=True), lm, "prompt" if prompt in texts else "messages")


def check_stops(stops: list[str]) -> None:
    """Raise ApiError for more stop strings than can be looked for beside other texts."""
    characters = sum(map(len, stops))
    if len(stops) > MOST_STOPS or characters > MOST_STOP_CHARACTERS:
        told = f"stop has {len(stops)} strings with {characters} characters in all"
        limit = f"at most {MOST_STOPS} with {MOST_STOP_CHARACTERS:,} are allowed"
        raise ApiError(400, f"{told}; {limit}.", "stop")


def check_logprobs(request: TextRequest) -> None:
    """Raise ApiError for more log-probabilities than an answer can hold."""
    if (tops := request.options.get("logprobs")) is None:
        return
    tokens = sum(row.most - row.start for row in request.rows)
    if request.echo:
        tokens += sum(row.start for row in request.rows)
    if (count := tokens * (1 + tops)) > MOST_LOGPROBS:
        told = f"The answer could have {count:,} log-probabilities; at most {MOST_LOGPROBS:,} are allowed"
        name = "top_logprobs" if request.kind == "chat" else "logprobs"
        raise ApiError(400, f"{told}: lower max_tokens, n or {name}.", name)


@contextmanager
def client_names(fields: Collection[str]) -> Iterator[None]:
    """Let errors name options as the client does, whose ``fields`` these are."""
    try:
        yield
    except PromptError:
        raise
    except OvspecError as error:
        message = str(error)
        for name in fields:
            ours = "json_schema" if name == "response_format" else REQUESTED.get(name, name)
            if ours not in fields:
                message = message.replace(f"`{ours}`", f"`{name}`")
        raise OvspecError(message) from None


def plain_message(message: Message) -> Message:
    """Return ``message`` as chat templates take it: its content a string, and its role one that they know.

    Raises ApiError for content that isn't text, and for fields that aren't known.
    """
    # What is null or empty says nothing; OpenAI's clients send it back with the assistant's answers.
    made = {name: value for name, value in message.items() if value not in (None, [])}
    for name in CALLS:
        if name in made:
            raise ApiError(400, f"messages: {name} can't be read, as there are no tools yet; leave it out.", "messages")
    refuse_others(made, OF_MESSAGES, "a message")
    if not isinstance(made.get("role"), str):
        raise ApiError(400, "messages: each needs a role, such as user.", "messages")
    if made["role"] == "developer":  # OpenAI's newer name
        made["role"] = "system"
    made["content"] = text_of(made.get("content"))
    return made


def refuse_others(given: Collection[str], known: Collection[str], where: str) -> None:
    """Raise ApiError for a field that isn't known."""
    for name in given:
        if name not in known:
            what = hint(name, known) or "leave it out."
            raise ApiError(400, f"messages: {name:.80} is not a field of {where}; {what}", "messages")


def text_of(content: Any) -> str:
    """Return the content of a message as one string; raises ApiError for what isn't text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        message = "messages: each needs content, which is a string or a list of parts of the type text."
        raise ApiError(400, message, "messages")
    for part in content:
        if (kind := part.get("type")) != "text":
            message = f"messages: content of the type {kind!s:.40} can't be read; only text can."
            raise ApiError(400, message, "messages")
        if not isinstance(part.get("text"), str):
            raise ApiError(400, "messages: a part of the type text needs a text, which is a string.", "messages")
        refuse_others([name for name in part if part[name] is not None], ("type", "text"), "a part of the type text")
    return "\n".join(part["text"] for part in content)


def limits_of(lm: LanguageModel, body: dict[str, Any], options: GenerateOptions) -> DraftLimits:
    """Return what may be proposed for a request; raises ApiError for drafters that the server doesn't have."""
    lookahead = lm.workspace.wanted_lookahead(options)
    if (draft := body.get("draft")) is None:
        return DraftLimits(None, lookahead)
    choice = lm.workspace.choice
    loaded = ("lookup",) * bool(choice and choice.lookup) + ("draft",) * bool(choice and choice.model)
    wanted = frozenset() if draft == "none" else frozenset(str(draft).split(","))
    if not wanted <= {*loaded}:
        has = " and ".join(loaded) or "no drafters"
        raise ApiError(400, f'draft is {draft!r:.80}; this server has {has}, and "none" proposes nothing.', "draft")
    return DraftLimits(wanted, lookahead)


def make_rows(lm: LanguageModel, request: TextRequest) -> list[Row]:
    """Return rows for all texts of a request, which may take long: grammars are compiled.

    Raises:
        OvspecError: a prompt or an option can't be met.
    """
    n = params_of(request.options).n
    try:
        with client_names(request.fields):
            found = [lm.workspace.rows(prompt, request.options, n, reserved=True) for prompt in request.prompts]
    except PromptError as error:
        raise about_prompt(error, lm, "messages" if request.kind == "chat" else "prompt") from None
    rows = [row for each in found for row in each]
    for row in rows:
        row.limits = request.limits
    return rows


def encode(lm: LanguageModel, body: TokenizeRequest) -> list[int]:
    """Return the tokens of the text or chat in ``body``; raises OvspecError for fields that can't be met together."""
    texts = [text for text in (body.prompt, body.content) if text is not None]
    if len(texts) + (body.messages is not None) != 1:
        raise ApiError(400, "Give one of prompt, content and messages.")
    if body.messages is None:
        refuse_variables(body.chat_template_kwargs)
        return lm.tokenizer.encode(texts[0], body.add_special_tokens is not False).tolist()
    if body.add_special_tokens is not None:
        raise ApiError(400, "add_special_tokens can't be combined with messages; leave it out.", "add_special_tokens")
    chat_template(lm.folder)
    messages = [plain_message(message) for message in body.messages]
    return lm.workspace.encode(messages, variables=body.chat_template_kwargs).tolist()


def decode(lm: LanguageModel, tokens: list[int]) -> str:
    """Return the text of tokens; raises ApiError for ids that aren't in the vocabulary."""
    try:
        ids = lm.workspace.encode(tokens, begins=False)
    except PromptError as error:
        raise about_prompt(error, lm, "tokens") from None
    return lm.tokenizer.spell(ids) or lm.tokenizer.decode(ids)
