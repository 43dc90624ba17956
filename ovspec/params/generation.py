"""``Params``: all options of a generating call in a single object, made by the front doors."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.params.limits import AT_LEAST_1, LOOKAHEAD, NOT_NEGATIVE, NumberLimits
from ovspec.params.option import OptionValue, collect_options, format_option_documentation, option, options_dataclass
from ovspec.params.sampling import SamplingParams
from ovspec.params.tools import NO_TOOLS, AllowedCalls, parse_tool_choice
from ovspec.params.values import parse_json_object, parse_lookahead, parse_position_or_text, parse_schema_or_file

AcceptRule = Literal["compare", "rejection"]
# (logits (1, vocab) float32, all tokens so far (n,) int64, **keywords) -> token id
SampleFunction = Callable[..., Any]
# (all tokens so far (n,) int64, logits (1, vocab) float32) -> logits of the same shape
LogitsProcessor = Callable[[Any, Any], Any]

PATH_OR_TEXT_HELP = "A string, or the ``Path`` of a file."


@options_dataclass
class Params(SamplingParams):
    """All options of a generating call. The front doors check the values, so nothing is checked again."""

    sampler: SampleFunction | None = option(
        "Custom sampling function, called once per token, in order, with or without a draft: ``sampler(logits (1, "
        "vocab), tokens so far (n,), **sampler_options) -> id``. The logits already include penalties and grammars. "
        "Can't be combined with a temperature.",
        default=None,
        flags=(),
        request=False,
    )
    sampler_options: Mapping[str, Any] | None = option(
        "Keyword arguments for ``sampler``.", default=None, flags=(), request=False
    )
    accept: AcceptRule = option(
        "Acceptance rule for proposed tokens when sampling. compare: accept a token equal to the target's own sample; "
        "the text is the same with or without a draft. rejection: accept more tokens; only the distribution of texts "
        "stays the same.",
        default="compare",
        request=False,
    )
    lookahead: int | Literal["auto"] | None = option(
        "Maximum number of tokens proposed per forward pass of the target; 0 is plain decoding, auto adapts it for the "
        "best speed.",
        default=None,
        limits=LOOKAHEAD,
        default_meaning="auto",
        python_extra_help="In Python the default is the value given to ``load``.",
        metavar="auto|K",
        parse=parse_lookahead,
        request=False,
    )
    batch_size: int = option(
        "Maximum number of texts generated at the same time; further texts wait.",
        # Up to about this many texts a step mostly reads weights; beyond, arithmetic dominates, and more gain little.
        default=32,
        limits=AT_LEAST_1,
        commands=("batch",),
        request=False,
    )
    chat_template_kwargs: Mapping[str, Any] | None = option(
        "Variables for the model's chat template, such as '{\"enable_thinking\": false}'; their names depend on the "
        "model. Only for chats.",
        default=None,
        python_extra_help="In a session, set them at the start: ``lm.session(chat_template_kwargs=...)``.",
        metavar="JSON|FILE",
        parse=parse_json_object,
    )
    tools: Sequence[JsonValue] = option(
        "Functions for the model to call, in OpenAI's tool format. The arguments of a call always match the tool's "
        "schema. Only for chats.",
        default_factory=tuple,
        python_extra_help="Python functions with type hints and a docstring work, too. The calls are in the result's "
        "``tool_calls``.",
        flags=(),
        request_type=list[JsonObject],
    )
    tool_choice: str | Mapping[str, Any] | None = option(
        "Allowed tool calls: auto (text or calls), none, required (only calls), or OpenAI's object for a single tool "
        "or a list of allowed tools.",
        default=None,
        default_meaning="auto",
        flags=(),
    )
    parallel_tool_calls: bool = option(
        "Allow several tool calls per answer, if the model's format supports them.", default=True, flags=()
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = option(
        "Reasoning effort, for chat templates with such a setting; none turns thinking off. Only for chats.",
        default=None,
        default_meaning="the template's",
        commands=("batch",),
    )
    max_thinking_tokens: int | None = option(
        "Thinking budget in tokens: at the limit, thinking ends and the answer begins; -1 for no limit. Only for "
        "chats.",
        default=None,
        limits=NumberLimits(0, description="0 or more, or -1 for no limit", special_value=-1),
        default_meaning="no limit",
        commands=("batch",),
        metavar="N",
        aliases=("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"),
    )
    json_schema: Any = option(
        "The text must be JSON and match this schema; '{}' allows any JSON. Not with regex, grammar, gbnf or choice.",
        default=None,
        python_extra_help="A dict, a JSON string, the ``Path`` of a file, a pydantic model or any other type known "
        "to pydantic.",
        metavar="FILE|TEXT",
        parse=parse_schema_or_file,
        request_type=JsonObject | bool | str,
    )
    json_schema_mode: Literal["strict", "checked"] = option(
        "strict: refuse a schema if any part of it can't be enforced during generation. checked: enforce as much as "
        "possible, then validate the finished text and report violations.",
        default="strict",
    )
    retries: int = option(
        "If a text violates its schema, generate it again with the next seed, at most this many times. Needs the "
        "JSON schema mode checked and a temperature above 0.",
        default=0,
        limits=NOT_NEGATIVE,
    )
    additional_properties: bool | None = option(
        "Allow unlisted properties in objects without additionalProperties in the schema.",
        default=None,
        default_meaning="yes, but no for pydantic models and response formats",
        flags=("--additional-properties/--no-additional-properties",),
    )
    compact_json: bool = option("Generate JSON without optional whitespace, to save tokens.", default=False)
    regex: str | None = option(
        "The whole text must match this regular expression (Rust's syntax).", default=None, metavar="PATTERN"
    )
    grammar: str | Path | None = option(
        "The text must match this Lark grammar, from its rule start.",
        default=None,
        python_extra_help=PATH_OR_TEXT_HELP,
        metavar="FILE",
        parse=Path,
        request_type=str,
    )
    gbnf: str | Path | None = option(
        "The text must match this GBNF grammar (llama.cpp's syntax).",
        default=None,
        python_extra_help=PATH_OR_TEXT_HELP,
        metavar="FILE",
        parse=Path,
        request_type=str,
    )
    choice: Sequence[str] | None = option("The text must be one of the given strings.", default=None, metavar="TEXT")
    constrain_from: int | str | None = option(
        "Start the grammar inside the prompt: at the last occurrence of a string, or at a character position (0 is "
        "the prompt's start, -5 is five characters before its end). From there on, the prompt must match too.",
        default=None,
        default_meaning="after the prompt",
        python_extra_help="A str is a string to find, an int a position.",
        metavar="TEXT|@N",
        parse=parse_position_or_text,
    )
    max_predict_ms: float = option(
        "Time limit (ms), counted from the first token; the text then ends at the next line break. 0 or -1 for no "
        "limit.",
        default=0.0,
        limits=NumberLimits(0, description="0 or more, or -1 for no limit", special_value=-1),
        flags=(),
        aliases=("t_max_predict_ms",),
    )
    heal: bool | None = option(
        "Token healing: regenerate the prompt's last tokens, so a token may span the prompt's end.",
        default=None,
        python_extra_help="Off by default, except for text appended to a session.",
        commands=("generate", "batch"),
    )
    logits_processors: Sequence[LogitsProcessor] | None = option(
        "Custom functions to change the logits before sampling: ``processor(tokens so far (n,), logits (1, vocab)) "
        "-> logits``, or logits processors of transformers. They also run for proposed tokens, so their result must "
        "depend on the arguments alone.",
        default=None,
        flags=(),
        request=False,
    )

    def __post_init__(self) -> None: ...

    @property
    def is_sampled(self) -> bool:
        """Whether texts are sampled, so several texts for the same prompt differ."""
        return bool(self.temperature or self.sampler)

    @property
    def lookahead_limit(self) -> int | None:
        """The maximum number of proposed tokens per round; None if the lookahead chooses it."""
        return None if self.lookahead == "auto" else self.lookahead

    @property
    def thinking_budget(self) -> int | None:
        """The maximum number of thinking tokens; None for no limit."""
        if self.max_thinking_tokens is None and self.reasoning_effort == "none":
            return 0
        if self.max_thinking_tokens is None or self.max_thinking_tokens < 0:
            return None
        return self.max_thinking_tokens

    @property
    def allowed_calls(self) -> AllowedCalls:
        """The allowed tool calls."""
        if not self.tools:
            return NO_TOOLS
        return parse_tool_choice(self.tools, self.tool_choice)

    @property
    def grammar_option(self) -> str | None:
        """The name of the option with the grammar, if any."""
        return next((name for name in GRAMMAR_OPTIONS if getattr(self, name) is not None), None)

    @property
    def constrains(self) -> bool:
        """Whether an option changes the logits or restricts the next token."""
        changes_logits = self.logit_bias or self.min_tokens or self.penalizes or self.logits_processors
        return bool(
            self.grammar_option or self.heal or changes_logits or self.tools or self.thinking_budget is not None
        )

    def recorded_options(self) -> dict[str, OptionValue]:
        """Return the options with an effect on the text, except default values."""
        return self.changed_options(excluded=UNRECORDED_OPTIONS)

    def changed_options(self, excluded: Collection[str]) -> dict[str, OptionValue]:
        """Return the options with non-default values, except the names in ``excluded``."""
        option_values = {name: getattr(self, name) for name in GENERATE_OPTIONS if name not in ("sampling", *excluded)}
        return {
            name: value
            for name, value in option_values.items()
            if hasattr(value, "dtype") or value != GENERATE_OPTIONS[name].default
        }


@options_dataclass
class GenerateOptions(Params):
    """The keywords of every generating call: all options, and ``sampling`` for several of them at once."""

    sampling: SamplingParams | None = option(
        "Sampling options in a single object; individual options take precedence.",
        default=None,
        flags=(),
        request=False,
    )


GENERATE_OPTIONS = collect_options(GenerateOptions)
# The grammar options; a call may set only a single one.
GRAMMAR_OPTIONS = ("json_schema", "regex", "grammar", "gbnf", "choice")
SCHEMA_OPTIONS = ("json_schema_mode", "retries", "additional_properties", "compact_json")  # they need a schema
# They need chat messages.
CHAT_OPTIONS = (
    "chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "max_thinking_tokens",
)  # fmt: skip
SPEED_OPTIONS = ("lookahead", "batch_size")
# They don't change the text for a seed; if the time limit ends a text, its number of tokens is recorded.
UNRECORDED_OPTIONS = (*SPEED_OPTIONS, "retries", "max_predict_ms")
DEFAULT_PARAMS = Params()  # all options at their defaults
GenerateOptions.__doc__ = f"{GenerateOptions.__doc__}\n\n{format_option_documentation(GENERATE_OPTIONS)}"
