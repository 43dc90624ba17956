"""Reads requests: from the fields of a body to rows that are ready to be generated."""

from __future__ import annotations

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
from ovspec.serving.errors import ApiError, about_prompt
from ovspec.serving.models import OF_SERVER, TokenizeRequest
from ovspec.text.chat_template import Message, chat_template

Kind = Literal["completion", "chat"]
MOST_TEXTS = 128  # of a request
# Fields that aren't options of a text.
APART = ("model", "stream", "stream_options", "draft", "return_record")
CALLS = ("tool_calls", "function_call")  # of a message


@dataclass
class TextRequest:
    """A request for texts.

    fields: the names of its fields.
    rows: those of the first prompt first, ``n`` for each prompt.
    owner: the number of the client's key, if there are keys.
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

    @property
    def n(self) -> int:
        return len(self.rows) // len(self.prompts)


def read_request(lm: LanguageModel, kind: Kind, body: dict[str, Any], defaults: GenerateOptions) -> TextRequest:
    """Return the request in ``body``, the fields that a client has set; raises OvspecError for what can't be met."""
    asked = {name: value for name, value in body.items() if name not in APART}
    if kind == "chat" and "messages" in asked:
        asked["messages"] = [plain_message(message) for message in asked["messages"]]
    prompt = prompt_of(asked, kind)
    with client_names(asked):
        options = cast(GenerateOptions, {**defaults, **options_of(asked, "a request", OF_SERVER)})
        n = params_of(options).n
    prompts = prompt if is_batch(prompt) else [prompt]
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
    )


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

    Raises ApiError for content that isn't text.
    """
    made = dict(message)
    for name in CALLS:
        if made.pop(name, None):
            raise ApiError(400, f"messages: {name} can't be read, as there are no tools yet; leave it out.", "messages")
    if not isinstance(made.get("role"), str):
        raise ApiError(400, "messages: each needs a role, such as user.", "messages")
    if made["role"] == "developer":  # OpenAI's newer name
        made["role"] = "system"
    made["content"] = text_of(made.get("content"))
    return made


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
