"""A request for texts in any API: prompts and options."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ovspec.base.errors import OvspecError, PromptError, UnavailableError
from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.engine.prompts import Prompt, is_nonempty_prompt_list
from ovspec.params import Params
from ovspec.params.checks import check_param_combinations
from ovspec.params.generation import DEFAULT_PARAMS, GRAMMAR_OPTIONS, SCHEMA_OPTIONS
from ovspec.params.option import make_did_you_mean
from ovspec.params.sampling import TRUNCATING_OPTIONS
from ovspec.protocols.bodies import MAX_NAMED_FIELDS, OPTION_OF_FIELD, RequestBody, RequestError, TextRequestBody
from ovspec.text.chat_template import Message
from ovspec.text.infill import InfillPrompt

RequestKind = Literal["batch_line", "completion", "chat", "response", "message", "infill"]
CHAT_KINDS = ("chat", "response", "message")
# Kind of request -> the field with its prompts.
PROMPT_FIELDS = {"chat": "messages", "response": "input", "message": "messages", "infill": "input_prefix"}

IgnoredNames = dict[str, None]  # names of ignored fields and parts; at most MAX_NAMED_FIELDS


@dataclass
class Overrides:
    """The options set by a request.

    values: the options' values, by our names.
    client_names: the client's names for options set by other names.
    """

    values: JsonObject = field(default_factory=dict)
    client_names: dict[str, str] = field(default_factory=dict)

    def set_option(self, option: str, value: JsonValue, client_name: str) -> None:
        """Set an option from a field; raises RequestError if another field has set another value."""
        if self.values.setdefault(option, value) != value:
            other_name = self.client_names.get(option, option)
            raise RequestError(f"`{other_name}` and `{client_name}` contradict each other; leave one out.", client_name)
        self.client_names.setdefault(option, client_name)

    def set_schema(self, schema: JsonValue, client_name: str) -> None:
        """Set the schema from a field; raises RequestError for a grammar next to it."""
        for grammar in GRAMMAR_OPTIONS:
            if grammar in self.values and self.client_names.get(grammar, grammar) == grammar:
                message = f"`{client_name}` and `{grammar}` can't be combined; leave one out."
                raise RequestError(message, client_name)
        self.set_option("json_schema", schema, client_name)

    def apply_to(self, defaults: Params, kind: RequestKind) -> Params:
        """Return the params of a request: its own options, and compatible defaults."""
        values = self.values
        is_greedy = not values.get("temperature", defaults.temperature)
        if is_greedy and kind != "batch_line":
            # Clients send these options without effect with greedy requests, and editors request several texts.
            options_without_effect = {*TRUNCATING_OPTIONS}
            if kind == "infill":
                options_without_effect.add("n")
            values = {option: value for option, value in values.items() if option not in options_without_effect}
        has_grammar = any(option in values for option in GRAMMAR_OPTIONS)
        unset_options = [*GRAMMAR_OPTIONS, "constrain_from"] if has_grammar else []
        if (values.get("json_schema") if has_grammar else defaults.json_schema) is None:
            unset_options += SCHEMA_OPTIONS
            if values.get("tools") and defaults.json_schema is None:  # the server's mode applies to tools, too
                unset_options.remove("json_schema_mode")
        if values.get("temperature") == 0:
            unset_options += TRUNCATING_OPTIONS
        with self.errors_with_client_names():
            return check_param_combinations(
                replace(defaults, **({option: getattr(DEFAULT_PARAMS, option) for option in unset_options} | values))
            )

    @contextmanager
    def errors_with_client_names(self) -> Iterator[None]:
        """Use the client's names of options in errors."""
        try:
            yield
        except (PromptError, UnavailableError):
            raise
        except OvspecError as error:
            message = str(error)
            for option, client_name in self.client_names.items():
                message = message.replace(f"`{option}`", f"`{client_name}`")
            raise OvspecError(message) from None


@dataclass(frozen=True)
class TextRequest:
    """A request for texts."""

    kind: RequestKind
    prompts: list[Prompt]
    overrides: Overrides = field(default_factory=Overrides)
    model: str | None = None
    echo: bool = False
    only_prompts: bool = False  # without generated tokens: only prefill, or only an echo
    stream: bool = False
    include_usage: bool = False
    return_record: bool = False
    return_token_sources: bool = False
    with_timings: bool = False
    draft: str | None = None
    body: Any = None  # unchanged, for replies with parts of it
    model_context_length: int | None = None  # in tokens, if known
    ignored: tuple[str, ...] = ()  # names of ignored fields and parts

    @property
    def prompt_field(self) -> str:
        """The name of the field with the prompts."""
        return PROMPT_FIELDS.get(self.kind, "prompt")

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a chat."""
        return self.kind in CHAT_KINDS

    @property
    def is_infill(self) -> bool:
        """Whether the request is for filling gaps."""
        return isinstance(self.prompts[0], InfillPrompt)

    @property
    def chat_character_count(self) -> int:
        """The number of characters in a chat, with its tools."""
        messages: Any = self.prompts[0]
        return sum(map(count_message_characters, messages)) + count_json_characters(self.overrides.values.get("tools"))


def count_texts(body: TextRequestBody) -> int:
    """Return the number of texts requested by a body."""
    prompt: Any = getattr(body, "prompt", None)
    n = getattr(body, "n", None) or getattr(body, "n_cmpl", None) or 1
    return n * len(prompt) if is_nonempty_prompt_list(prompt) else n


def may_compile_grammar(body: TextRequestBody) -> bool:
    """Return whether a body has a grammar or tools, with possibly long compilation."""
    answer_formats = [(getattr(body, name, None) or {}).get("format") for name in ("text", "output_config")]
    answer_formats += [getattr(body, name, None) for name in ("response_format", "output_format")]
    if any(format and format.get("type") != "text" for format in answer_formats if isinstance(format, dict)):
        return True
    fields = [field for field, option in OPTION_OF_FIELD.items() if option in (*GRAMMAR_OPTIONS, "tools")]
    return any(getattr(body, field, None) is not None for field in fields)


def read_overrides(body: RequestBody) -> Overrides:
    """Return the options set in a body."""
    overrides = Overrides()
    for field_name, option in OPTION_OF_FIELD.items():  # an option's own name comes before its aliases
        if field_name not in body.model_fields_set:
            continue
        value = getattr(body, field_name)
        if overrides.values.setdefault(option, value) != value:
            other_name = overrides.client_names[option]
            message = f"`{other_name}` and `{field_name}` name the same option, but their values differ; leave one out."
            raise RequestError(message, other_name)
        overrides.client_names.setdefault(option, field_name)
    return overrides


def refuse_unknown_fields(fields: Iterable[str], known_fields: Collection[str], message: str, param: str) -> None:
    """Raise RequestError for the first unknown field; ``message`` has ``{name}`` for its name."""
    for field_name in fields:
        if field_name not in known_fields:
            remedy = make_did_you_mean(field_name, known_fields) or "leave it out."
            raise RequestError(f"{message.format(name=field_name[:80])}; {remedy}", param)


def count_message_characters(message: Message) -> int:
    """Return the number of characters in a message made by ``to_template_message``."""
    return len(message["content"]) + count_json_characters(message.get("tool_calls"))


def count_json_characters(values: list[JsonObject] | None) -> int:
    """Return the approximate length of values as JSON; 0 for none."""
    return len(repr(values)) if values else 0


def add_ignored(name: str, ignored: IgnoredNames) -> None:
    """Add a name to ``ignored``, up to its limit."""
    if len(ignored) < MAX_NAMED_FIELDS:
        ignored[name] = None
