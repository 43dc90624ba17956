"""Reads requests for texts: from a body to prompts and params."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ovspec.base.errors import OvspecError, PromptError, UnavailableError
from ovspec.engine.prompts import Prompt, is_batch
from ovspec.grammars.response_format import WRAPPER_KEYS
from ovspec.params import Params
from ovspec.params.checks import check_combinations
from ovspec.params.generation import DEFAULT_PARAMS, GRAMMAR_OPTIONS, SCHEMA_OPTIONS
from ovspec.params.option import suggest_name
from ovspec.params.sampling import TRUNCATING_OPTIONS
from ovspec.protocols.bodies import MOST_NAMED, OF_MESSAGES, OF_PARTS, REQUESTED, Continued, Fields, RequestError
from ovspec.text.chat_format import find_begun_answer
from ovspec.text.chat_template import Message
from ovspec.text.infill import Infill

Kind = Literal["own", "completion", "chat", "response", "message", "infill"]
CHATS = ("chat", "response", "message")
# Where requests have their prompts.
PROMPT_FIELDS = {"chat": "messages", "response": "input", "message": "messages", "infill": "input_prefix"}
MOST_CALLS = 1000  # of a message
# What each response format has besides its type; a schema beside the type is llama.cpp's way to give one.
FORMATS = {"text": set[str](), "json_object": {"schema"}, "json_schema": {"json_schema"}}
ROLES = ("system", "developer", "user", "assistant", "tool")
# What other parts hold, in the words in which the model is told that they were left out.
MEDIA = ("image", "audio", "video", "document", "file")
Ignored = dict[str, None]  # the names of what is left out; at most MOST_NAMED


@dataclass
class Overrides:
    """The options that a request sets, by our names, and the client's names for those that it calls otherwise."""

    values: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def set(self, name: str, value: Any, field: str) -> None:
        """Set an option from a field; raises RequestError if another field has set it to something else."""
        if self.values.setdefault(name, value) != value:
            told = f"`{self.names.get(name, name)}` and `{field}` ask for different things; leave one of them out."
            raise RequestError(told, field)
        self.names.setdefault(name, field)

    def set_schema(self, schema: Any, field: str) -> None:
        """Set the schema that a client gives in ``field``, which can't be combined with a grammar."""
        for name in GRAMMAR_OPTIONS:
            if name in self.values and self.names.get(name, name) == name:
                raise RequestError(f"`{field}` and `{name}` can't be combined; leave one of them out.", field)
        self.set("json_schema", schema, field)

    def params(self, defaults: Params, kind: Kind) -> Params:
        """Return the params of a request; options that it doesn't set are those of ``defaults`` that fit its own."""
        values = self.values
        greedy = not values.get("temperature", defaults.temperature)
        if greedy and kind != "own":
            # Clients send these to greedy requests, whose text they can't change, and editors ask for several texts.
            idle = (*TRUNCATING_OPTIONS, "n") if kind == "infill" else TRUNCATING_OPTIONS
            values = {name: value for name, value in values.items() if name not in idle}
        grammar = any(name in values for name in GRAMMAR_OPTIONS)
        unfit = [*GRAMMAR_OPTIONS, "constrain_from"] if grammar else []
        if (values.get("json_schema") if grammar else defaults.json_schema) is None:
            unfit += SCHEMA_OPTIONS
            if values.get("tools") and defaults.json_schema is None:  # the server's mode is for tools, too
                unfit.remove("json_schema_mode")
        if values.get("temperature") == 0:
            unfit += TRUNCATING_OPTIONS
        with self.client_names():
            return check_combinations(
                replace(defaults, **({name: getattr(DEFAULT_PARAMS, name) for name in unfit} | values))
            )

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


@dataclass(frozen=True)
class TextRequest:
    """A request for texts."""

    kind: Kind
    prompts: list[Prompt]
    overrides: Overrides = field(default_factory=Overrides)
    model: str | None = None
    echo: bool = False
    only_prompts: bool = False  # no token is generated: the prompts are read into the KV cache, or only repeated
    stream: bool = False
    include_usage: bool = False
    return_record: bool = False
    draft: str | None = None
    body: Any = None  # as it came, where an answer repeats parts of it
    context: int | None = None  # the model's, in tokens, if known
    ignored: tuple[str, ...] = ()  # names of fields and parts that are left out

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
    def chat_size(self) -> int:
        """The number of characters in a chat, with its tools."""
        chat: Any = self.prompts[0]
        return sum(map(message_size, chat)) + written_size(self.overrides.values.get("tools"))


def texts_asked(body: Any) -> int:
    """Return how many texts a body asks for."""
    prompt: Any = getattr(body, "prompt", None)
    n = getattr(body, "n", None) or getattr(body, "n_cmpl", None) or 1
    return n * (len(prompt) if is_batch(prompt) else 1)


def may_constrain(body: Any) -> bool:
    """Return whether a body has a grammar or tools, which may take long to compile."""
    inner = [(getattr(body, name, None) or {}).get("format") for name in ("text", "output_config")]
    formats = [getattr(body, name, None) for name in ("response_format", "output_format")] + inner
    options = [name for name, ours in REQUESTED.items() if ours in (*GRAMMAR_OPTIONS, "tools")]
    schema = any(format and format.get("type") != "text" for format in formats if isinstance(format, dict))
    return schema or any(getattr(body, name, None) is not None for name in options)


def read_texts(body: Any, kind: Kind) -> TextRequest:
    """Return the request in a body; raises RequestError for fields that can't be met together."""
    messages, prompt = getattr(body, "messages", None), getattr(body, "prompt", None)
    if (messages is None) == (prompt is None):
        raise RequestError("A request must have either a prompt or messages.")
    echo, ignored = bool(getattr(body, "echo", None)), Ignored()
    chat = template_chat(messages or [], ignored, kind == "own")
    if isinstance(body, Continued):
        check_continued(body, chat)
    if messages is not None:
        if echo:
            raise RequestError("echo can't be combined with messages; leave it out.", "echo")
        prompt = chat
    if suffix := getattr(body, "suffix", None):
        if echo:
            raise RequestError("suffix can't be combined with echo; leave one of them out.", "suffix")
        if not isinstance(prompt, str):
            raise RequestError("suffix needs a prompt that is one string.", "suffix")
        prompt = Infill(prompt, suffix)
    asked = asked_for(body, kind, prompt if is_batch(prompt) else [prompt], echo)  # type: ignore[arg-type]
    return replace(asked, ignored=(*ignored,))


def asked_for(body: Any, kind: Kind, prompts: list[Prompt], echo: bool = False) -> TextRequest:
    """Return the request for the texts of prompts, with what ``body`` asks for besides; see ``read_texts``."""
    overrides = overrides_of(body)
    if (format := body.response_format) is not None:
        overrides.set_schema(schema_of(format), "response_format")
    set_logprobs(body, overrides)
    if body.stream_options and not body.stream:
        raise RequestError("stream_options needs stream to be true.", "stream_options")
    return TextRequest(
        kind,
        prompts,
        overrides,
        body.model,
        echo,
        overrides.values.get("max_tokens") == 0,
        bool(body.stream),
        bool(body.stream_options and body.stream_options.include_usage),
        bool(body.return_record),
        body.draft,
    )


def overrides_of(body: Fields) -> Overrides:
    """Return the options whose fields a body sets."""
    overrides = Overrides()
    for name, ours in REQUESTED.items():  # of an option's names ours comes first
        if name not in body.model_fields_set:
            continue
        value = getattr(body, name)
        if overrides.values.setdefault(ours, value) != value:
            first = overrides.names[ours]
            told = f"`{first}` and `{name}` are names of the same option, but their values differ; give one."
            raise RequestError(told, first)
        overrides.names.setdefault(ours, name)
    return overrides


def set_logprobs(body: Any, overrides: Overrides) -> None:
    """Set OpenAI's ``logprobs``, a number, or true or false with ``top_logprobs`` beside it, as an option."""
    logprobs, top = getattr(body, "logprobs", None), getattr(body, "top_logprobs", None)
    if top is not None and logprobs is not True:
        raise RequestError("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
    if logprobs is not None:
        count = (top or 0) if logprobs else None
        overrides.values["logprobs"] = count if isinstance(logprobs, bool) else logprobs


def schema_of(format: dict[str, Any]) -> Any:
    """Return the schema that OpenAI's ``response_format`` asks for, or None for any text."""
    given = {name: each for name, each in format.items() if each is not None}
    kind = str(given.get("type"))
    bare = kind == "json_schema" and "json_schema" not in given
    if kind in FORMATS:
        known = {"type", *FORMATS[kind], *(WRAPPER_KEYS if bare else ())}
        refuse_unknown(given, known, "`response_format` has no {name}", "response_format")
    if kind == "text":
        return None
    if kind == "json_object" and given.get("schema", {}) == {}:
        return {"type": "object"}
    inner = given if bare or kind == "json_object" else given.get("json_schema")
    if kind not in FORMATS or not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise RequestError(
            '`response_format` must be {"type": "text"}, {"type": "json_object"} or '
            '{"type": "json_schema", "json_schema": {"schema": …}}.',
            "response_format",
        )
    if inner is not given:
        refuse_unknown(inner, WRAPPER_KEYS, "`response_format` has no json_schema.{name}", "response_format")
    return {"name": str(inner.get("name")), "schema": inner["schema"]}


def refuse_unknown(given: Iterable[str], known: Collection[str], told: str, param: str) -> None:
    """Raise RequestError for the first field that isn't known; ``told``: the message, with ``{name}`` for its name."""
    for name in given:
        if name not in known:
            raise RequestError(f"{told.format(name=name[:80])}; {suggest_name(name, known) or 'leave it out.'}", param)


# ---------------------------------------------------------------- messages


def check_continued(body: Continued, chat: list[Message]) -> None:
    """Raise RequestError if a body asks that the last message of its chat is continued, or not, and it isn't, or is."""
    wanted, opens, continues = (
        body.continue_final_message,
        body.add_generation_prompt,
        find_begun_answer(chat) is not None,
    )
    if wanted and opens:
        told = "`continue_final_message` and `add_generation_prompt` can't both be true; leave one of them out."
        raise RequestError(told, "continue_final_message")
    if wanted and not continues:
        raise RequestError(
            "`continue_final_message` needs an assistant's message without calls as the last; leave it out.",
            "continue_final_message",
        )
    if wanted is False and continues:
        told = "`continue_final_message` is false, but a last message of the assistant is always continued"
        raise RequestError(f"{told}; leave it out, or end with another message.", "continue_final_message")
    if opens is False and not continues:
        told = "`add_generation_prompt` is false, which needs a last message that is continued, the assistant's"
        raise RequestError(f"{told}; leave it out.", "add_generation_prompt")


def template_chat(messages: Sequence[Message], ignored: Ignored, own: bool = False) -> list[Message]:
    """Return messages as chat templates take them.

    Only the system's and the user's last one must be readable: of others, clients send back whatever was said. What
    can't be read of them is left out, and its names are added to ``ignored``. ``own``: other fields may be there.
    """
    last = max((at for at, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    return [template_message(message, ignored, at == last, own) for at, message in enumerate(messages)]


def template_message(message: Message, ignored: Ignored, strict: bool, own: bool = False) -> Message:
    """Return ``message`` as chat templates take it: its content a string, and its role one that they know."""
    # What is null or empty says nothing; OpenAI's clients send it back with the assistant's answers.
    made = {name: value for name, value in message.items() if value not in (None, [])}
    if "function_call" in made:
        raise wrong("function_call can't be read; send the call in tool_calls.")
    if "reasoning" in made:  # vLLM's name
        made.setdefault("reasoning_content", made.pop("reasoning"))
    if not own:
        refuse_unknown(made, OF_MESSAGES, "messages: {name} is not a field of a message", "messages")
    for name in ("name", "tool_call_id", "reasoning_content", "thinking"):
        if not isinstance(made.get(name, ""), str):
            raise wrong(f"{name} must be a string.")
    if not isinstance(role := made.get("role"), str):
        raise wrong("each needs a role, such as user.")
    if role not in ROLES:
        raise wrong(f"the role of a message is {role!r:.40}; it must be {', '.join(ROLES[:-1])} or {ROLES[-1]}.")
    if role == "developer":  # OpenAI's newer name
        role = made["role"] = "system"
    if "tool_calls" in made:
        made["tool_calls"] = [*map(template_call, listed(made["tool_calls"]))]
        if len(made["tool_calls"]) > MOST_CALLS:
            raise wrong(f"one has {len(made['tool_calls'])} tool_calls; at most {MOST_CALLS} are allowed.")
    made["content"] = text_of(made.get("content"), ignored, strict or role == "system")
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
    if not isinstance(id := call.get("id") or "", str):
        raise wrong(f"the id of a call of {function['name']:.80} must be a string.")
    made = {"type": "function", "function": {"name": function["name"], "arguments": function.get("arguments") or "{}"}}
    return {"id": id, **made} if id else made


def listed(calls: Any) -> list[Any]:
    if not isinstance(calls, list):
        raise wrong("tool_calls must be a list.")
    return calls


def text_of(content: Any, ignored: Ignored, strict: bool) -> str:
    """Return the content of a message as one string; raises RequestError for what isn't text, if ``strict``."""
    if isinstance(content, str):
        return content
    if content is None and not strict:
        return ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise wrong("each needs content, which is a string or a list of parts of the type text.")
    return "\n".join(text_in(part, ignored, strict) for part in content)


def text_in(part: dict[str, Any], ignored: Ignored, strict: bool) -> str:
    """Return the text of a part of a content, or what the model is told instead of it."""
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        if strict:
            raise wrong(f"content of the type {kind!s:.40} can't be read; only text can.")
        return left_out(kind, ignored)
    if not isinstance(text := part.get(kind) if strict else part.get(kind) or "", str):
        raise wrong(f"a part of the type {kind} needs a {kind}, which is a string.")
    given = [name for name in part if part[name] is not None]
    told = f"messages: {{name}} is not a field of a part of the type {kind}"
    refuse_unknown(given, {*OF_PARTS, kind}, told, "messages")
    return text


def ignore(name: str, ignored: Ignored) -> None:
    """Add a name to what is left out, unless there are enough."""
    if len(ignored) < MOST_NAMED:
        ignored[name] = None


def left_out(kind: Any, ignored: Ignored) -> str:
    """Return what the model is told instead of a part that can't be read, whose name is added to ``ignored``."""
    name = f"{kind!s:.40}"
    ignore(f"content.{name}", ignored)
    return f"[{next((each for each in MEDIA if each in name), name)} omitted]"


def wrong(message: str) -> RequestError:
    return RequestError(f"messages: {message}", "messages")
