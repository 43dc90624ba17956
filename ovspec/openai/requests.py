"""Reads requests for texts: from a body to prompts and params."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ovspec.base.errors import OvspecError, PromptError, UnavailableError
from ovspec.engine.runtime import Prompt, is_batch
from ovspec.grammars.response_format import WRAPPING
from ovspec.openai.bodies import OF_MESSAGES, OF_PARTS, REQUESTED, Fields, RequestError
from ovspec.params import GRAMMARS, OF_SCHEMAS, TRUNCATING, Params, checked
from ovspec.params.option import hint
from ovspec.text.chat_template import Message
from ovspec.text.infill import Infill

Kind = Literal["own", "completion", "chat", "response", "message", "infill"]
CHATS = ("chat", "response", "message")
# Where requests have their prompts.
PROMPT_FIELDS = {"chat": "messages", "response": "input", "message": "messages", "infill": "input_prefix"}
MOST_CALLS = 1000  # of a message
# What each response format has besides its type; the schema of a json_object is llama.cpp's way to give one.
FORMATS = {"text": set[str](), "json_object": {"schema"}, "json_schema": {"json_schema"}}


@dataclass(frozen=True)
class TextRequest:
    """A request for texts."""

    kind: Kind
    prompts: list[Prompt]
    own: dict[str, Any] = field(default_factory=dict)  # the options that it sets, by our names
    names: dict[str, str] = field(default_factory=dict)  # the client's name for each of these
    model: str | None = None
    echo: bool = False
    only_prompts: bool = False  # no token is generated: the prompts are read into the KV cache, or only repeated
    stream: bool = False
    include_usage: bool = False
    return_record: bool = False
    draft: str | None = None
    body: Any = None  # as it came, where an answer repeats parts of it
    context: int | None = None  # the model's, in tokens, if known
    ignored: tuple[str, ...] = ()  # what is in the body, but left out

    @property
    def prompt_field(self) -> str:
        """The field that has the prompts."""
        return PROMPT_FIELDS.get(self.kind, "prompt")

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a chat."""
        return self.kind in CHATS

    @property
    def infills(self) -> bool:
        """Whether texts are generated between others."""
        return isinstance(self.prompts[0], Infill)

    @property
    def size(self) -> int:
        """The number of characters, and of ids, in all prompts together."""
        if self.is_chat:
            chats: Any = self.prompts
            messages = [message for chat in chats for message in chat]
            return sum(map(message_size, messages)) + written_size(self.own.get("tools"))  # type: ignore[arg-type]
        return sum(map(len, self.prompts))

    def params(self, defaults: Params) -> Params:
        """Return the params of the request; options that it doesn't set are those of ``defaults`` that fit its own."""
        own, nothing = self.own, Params()
        greedy = not own.get("temperature", defaults.temperature)
        if greedy and self.kind != "own":
            # Clients send these to greedy requests, whose text they can't change, and editors ask for several texts.
            idle = (*TRUNCATING, "n") if self.kind == "infill" else TRUNCATING
            own = {name: value for name, value in own.items() if name not in idle}
        grammar = any(name in own for name in GRAMMARS)
        unfit = [*GRAMMARS, "constrain_from"] if grammar else []
        if (own.get("json_schema") if grammar else defaults.json_schema) is None:
            unfit += OF_SCHEMAS
        if own.get("temperature") == 0:
            unfit += TRUNCATING
        lifted = {name: getattr(nothing, name) for name in unfit}
        with self.client_names():
            return checked(replace(defaults, **(lifted | own)))

    @contextmanager
    def client_names(self) -> Iterator[None]:
        """Let errors name options as the client does."""
        try:
            yield
        except (PromptError, UnavailableError):
            raise
        except OvspecError as error:
            message = str(error)
            for ours, name in self.names.items():
                message = message.replace(f"`{ours}`", f"`{name}`")
            raise OvspecError(message) from None


def texts_asked(body: Any) -> int:
    """Return how many texts a body asks for."""
    prompt: Any = getattr(body, "prompt", None)
    n = getattr(body, "n", None) or getattr(body, "n_cmpl", None) or 1
    return n * (len(prompt) if is_batch(prompt) else 1)


def read_texts(body: Any, kind: Kind) -> TextRequest:
    """Return the request in a body; raises RequestError for fields that can't be met together."""
    messages, prompt = getattr(body, "messages", None), getattr(body, "prompt", None)
    if (messages is None) == (prompt is None):
        raise RequestError("A request must have either a prompt or messages.")
    echo = bool(getattr(body, "echo", None))
    if messages is not None:
        if echo:
            raise RequestError("echo can't be combined with messages; leave it out.", "echo")
        prompt = messages if kind == "own" else [template_message(message) for message in messages]
    if suffix := getattr(body, "suffix", None):
        if echo:
            raise RequestError("suffix can't be combined with echo; leave one of them out.", "suffix")
        if not isinstance(prompt, str):
            raise RequestError("suffix needs a prompt that is one string.", "suffix")
        prompt = Infill(prompt, suffix)
    return asked_for(body, kind, prompt if is_batch(prompt) else [prompt], echo)  # type: ignore[arg-type]


def asked_for(body: Any, kind: Kind, prompts: list[Prompt], echo: bool = False) -> TextRequest:
    """Return the request for the texts of prompts, with what ``body`` asks for besides; see ``read_texts``."""
    own, names = options_of(body)
    only_prompts = own.get("max_tokens") == 0
    if body.stream_options and not body.stream:
        raise RequestError("stream_options needs stream to be true.", "stream_options")
    return TextRequest(
        kind,
        prompts,
        own,
        names,
        body.model,
        echo,
        only_prompts,
        bool(body.stream),
        bool(body.stream_options and body.stream_options.include_usage),
        bool(body.return_record),
        body.draft,
    )


def given_options(body: Fields) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options whose fields a body sets by our names, and the client's name for each."""
    options, names = dict[str, Any](), dict[str, str]()
    for name, ours in REQUESTED.items():  # of an option's names ours comes first
        if name not in body.model_fields_set:
            continue
        value = getattr(body, name)
        if options.setdefault(ours, value) != value:
            told = f"`{names[ours]}` and `{name}` are names of the same option, but their values differ; give one."
            raise RequestError(told, names[ours])
        names.setdefault(ours, name)
    return options, names


def options_of(body: Fields) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options that a body sets by our names, and the client's name for each."""
    options, names = given_options(body)
    if (format := getattr(body, "response_format", None)) is not None:
        set_schema(options, names, schema_of(format), "response_format")
    return options | logprobs_of(body), names


def set_schema(options: dict[str, Any], names: dict[str, str], schema: Any, field: str) -> None:
    """Set the schema that a client gives in ``field``, which can't be combined with a grammar."""
    for name in GRAMMARS:
        if name in options:
            raise RequestError(f"`{field}` and `{name}` can't be combined; leave one of them out.", field)
    options["json_schema"], names["json_schema"] = schema, field


def logprobs_of(body: Any) -> dict[str, Any]:
    """Return OpenAI's ``logprobs``, a number, or true or false with ``top_logprobs`` beside it, as an option."""
    wanted, top = getattr(body, "logprobs", None), getattr(body, "top_logprobs", None)
    if top is not None and wanted is not True:
        raise RequestError("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
    if wanted is None:
        return {}
    return {"logprobs": (top or 0 if wanted else None) if isinstance(wanted, bool) else wanted}


def schema_of(format: dict[str, Any]) -> Any:
    """Return the schema that OpenAI's ``response_format`` asks for, or None for any text."""
    given = {name: each for name, each in format.items() if each is not None}
    kind = str(given.get("type"))
    if kind in FORMATS:
        refuse_unknown(given, {"type", *FORMATS[kind]}, "`response_format` has no {name}", "response_format")
    if kind == "text":
        return None
    if kind == "json_object" and given.get("schema", {}) == {}:
        return {"type": "object"}
    inner = given if kind == "json_object" else given.get("json_schema")
    if kind not in FORMATS or not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise RequestError(
            '`response_format` must be {"type": "text"}, {"type": "json_object"} or '
            '{"type": "json_schema", "json_schema": {"schema": …}}.',
            "response_format",
        )
    if kind == "json_schema":
        refuse_unknown(inner, WRAPPING, "`response_format` has no json_schema.{name}", "response_format")
    return {"name": str(inner.get("name")), "schema": inner["schema"]}


def refuse_unknown(given: Iterable[str], known: Collection[str], told: str, param: str) -> None:
    """Raise RequestError for the first field that isn't known; ``told``: the message, with ``{name}`` for its name."""
    for name in given:
        if name not in known:
            raise RequestError(f"{told.format(name=name[:80])}; {hint(name, known) or 'leave it out.'}", param)


# ---------------------------------------------------------------- messages


def template_message(message: Message) -> Message:
    """Return ``message`` as chat templates take it: its content a string, and its role one that they know."""
    # What is null or empty says nothing; OpenAI's clients send it back with the assistant's answers.
    made = {name: value for name, value in message.items() if value not in (None, [])}
    if "function_call" in made:
        raise wrong("function_call can't be read; send the call in tool_calls.")
    if "reasoning" in made:  # vLLM's name
        made.setdefault("reasoning_content", made.pop("reasoning"))
    refuse_unknown(made, OF_MESSAGES, "messages: {name} is not a field of a message", "messages")
    for name in ("name", "tool_call_id", "reasoning_content", "thinking"):
        if not isinstance(made.get(name, ""), str):
            raise wrong(f"{name} must be a string.")
    if not isinstance(made.get("role"), str):
        raise wrong("each needs a role, such as user.")
    if made["role"] == "developer":  # OpenAI's newer name
        made["role"] = "system"
    if "tool_calls" in made:
        made["tool_calls"] = [*map(template_call, listed(made["tool_calls"]))]
        if len(made["tool_calls"]) > MOST_CALLS:
            raise wrong(f"one has {len(made['tool_calls'])} tool_calls; at most {MOST_CALLS} are allowed.")
    # An answer that only calls or thinks has no content.
    silent = made["role"] == "assistant" and "content" not in made and made.keys() - {"role", "name"}
    made["content"] = "" if silent else text_of(made.get("content"))
    return made


def message_size(message: Message) -> int:
    """Return the number of characters in a message that ``template_message`` has made."""
    return len(message["content"]) + written_size(message.get("tool_calls"))


def written_size(values: list[Any] | None) -> int:
    """Return about how many characters values take as JSON; 0 for none."""
    return len(repr(values)) if values else 0


def template_call(call: Any) -> dict[str, Any]:
    """Return a call of a tool in a message; raises RequestError for what isn't one."""
    function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong("each of tool_calls must be of the type function and have a function with a name.")
    if not isinstance(arguments := function.get("arguments") or "{}", (str, dict)):
        raise wrong(f"the arguments of {function['name']:.80} must be a string with a JSON object.")
    if not isinstance(id := call.get("id") or "", str):
        raise wrong(f"the id of a call of {function['name']:.80} must be a string.")
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": id, **made} if id else made


def listed(calls: Any) -> list[Any]:
    if not isinstance(calls, list):
        raise wrong("tool_calls must be a list.")
    return calls


def text_of(content: Any) -> str:
    """Return the content of a message as one string; raises RequestError for what isn't text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise wrong("each needs content, which is a string or a list of parts of the type text.")
    for part in content:
        if (kind := part.get("type")) != "text":
            raise wrong(f"content of the type {kind!s:.40} can't be read; only text can.")
        if not isinstance(part.get("text"), str):
            raise wrong("a part of the type text needs a text, which is a string.")
        given = [name for name in part if part[name] is not None]
        told = "messages: {name} is not a field of a part of the type text"
        refuse_unknown(given, OF_PARTS, told, "messages")
    return "\n".join(part["text"] for part in content)


def wrong(message: str) -> RequestError:
    return RequestError(f"messages: {message}", "messages")
