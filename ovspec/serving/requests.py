"""Reads requests: from the fields of a body to rows that are ready to be generated."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from ovspec.drafting.drafter import ANYTHING, DraftLimits
from ovspec.integrations.openai_batch import echo_of, options_of, prompt_of
from ovspec.loop.row import Row
from ovspec.model import LanguageModel, Prompt, is_batch
from ovspec.options import GenerateOptions, params_of, refuse_retries
from ovspec.serving.errors import ApiError
from ovspec.serving.models import OF_SERVER
from ovspec.text.chat_template import Message

Kind = Literal["completion", "chat"]
MOST_TEXTS = 128  # of a request
DEEPEST = 100  # levels of JSON
# Fields that aren't options of a text.
APART = ("model", "stream", "stream_options", "draft", "return_record")


@dataclass
class TextRequest:
    """A request for texts.

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
    rows: list[Row] = field(default_factory=list)
    owner: int | None = None

    @property
    def n(self) -> int:
        return len(self.rows) // len(self.prompts)


def read_json(raw: bytes) -> Any:
    """Return the JSON value in ``raw``; raises ApiError for what isn't JSON, is too deep or isn't Unicode."""

    def refuse(name: str) -> None:
        raise ApiError(400, f"{name} is not JSON; leave it out.")

    try:
        found = json.loads(raw, parse_constant=refuse)
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise ApiError(400, f"The body is not JSON: {error.msg} at character {error.pos}.") from None
    except UnicodeError:
        raise ApiError(400, "The body is not valid Unicode.") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "The body is nested too deeply, or a number in it has too many digits.") from None
    if depth(found) > DEEPEST:
        raise ApiError(400, f"The body is nested more than {DEEPEST} levels deep.")
    return found


def depth(value: Any) -> int:
    """Return how many levels of lists and objects ``value`` has."""
    levels, inside = 0, [value]
    while inside := [each for each in inside if isinstance(each, (dict, list))]:
        levels += 1
        inside = [child for each in inside for child in (each.values() if isinstance(each, dict) else each)]
    return levels


def read_request(lm: LanguageModel, kind: Kind, body: dict[str, Any], defaults: GenerateOptions) -> TextRequest:
    """Return the request in ``body``, the fields that a client has set; raises OvspecError for what can't be met."""
    asked = {name: value for name, value in body.items() if name not in APART}
    if kind == "chat" and "messages" in asked:
        asked["messages"] = [plain_message(message) for message in asked["messages"]]
    prompt = prompt_of(asked, kind)
    options = cast(GenerateOptions, {**defaults, **options_of(asked, "a request", OF_SERVER)})
    prompts = prompt if is_batch(prompt) else [prompt]
    texts = params_of(options).n * len(prompts)
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
    )


def plain_message(message: Message) -> Message:
    """Return ``message`` as chat templates take it: its content a string, and its role one that they know.

    Raises ApiError for content that isn't text.
    """
    made = dict(message)
    if made.get("role") == "developer":  # OpenAI's newer name
        made["role"] = "system"
    content = made.get("content")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ApiError(400, f"messages: content of the type {kind} can't be read; only text can.", "messages")
        made["content"] = "\n".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise ApiError(400, "messages: content must be a string, or a list of parts of the type text.", "messages")
    if not isinstance(made.get("role"), str):
        raise ApiError(400, "messages: each needs a role, such as user.", "messages")
    return made


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
        raise ApiError(400, f"draft is {draft!r:.80}; this server has {has}, and takes none.", "draft")
    return DraftLimits(wanted, lookahead)


def make_rows(lm: LanguageModel, request: TextRequest) -> list[Row]:
    """Return rows for all texts of a request, which may take long: grammars are compiled.

    Raises:
        OvspecError: a prompt or an option can't be met.
    """
    n = params_of(request.options).n
    rows = [row for prompt in request.prompts for row in lm.workspace.rows(prompt, request.options, n, reserved=True)]
    for row in rows:
        row.limits = request.limits
    return rows
