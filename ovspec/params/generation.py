"""``Params``: all options of one generating call, in the object that is made of them at the front door."""

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
    """All options of one generating call. The front doors check what they make it from, so it isn't checked again."""

    sampler: SampleFunction | None = option(
        "Your own function that chooses each token: ``sampler(logits (1, vocab), tokens so far (n,), "
        "**sampler_options) -> id``, called once for each token, in order, with or without a draft. The logits "
        "come after penalties and grammars. Not with a temperature.",
        default=None,
        flags=(),
        request=False,
    )
    sampler_options: Mapping[str, Any] | None = option(
        "Keyword arguments for ``sampler``.", default=None, flags=(), request=False
    )
    accept: AcceptRule = option(
        "How proposed tokens are accepted when sampling: compare gives the same text with any draft or none; "
        "rejection accepts more, but keeps only the distribution of the texts.",
        default="compare",
        request=False,
    )
    lookahead: int | Literal["auto"] | None = option(
        "Maximum number of tokens to propose per round: 0 for plain decoding; auto: as many as are worth their time.",
        default=None,
        limits=LOOKAHEAD,
        default_meaning="auto",
        python_extra_help="In Python the default is what was given to ``load``.",
        metavar="auto|K",
        parse=parse_lookahead,
        request=False,
    )
    batch_size: int = option(
        "Maximum number of texts generated at a time; the others wait.",
        # Up to about this many a step mostly reads weights; beyond, arithmetic dominates and more gain little.
        default=32,
        limits=AT_LEAST_1,
        commands=("batch",),
        request=False,
    )
    chat_template_kwargs: Mapping[str, Any] | None = option(
        "Variables for the model's chat template, as in '{\"enable_thinking\": false}'; needs chat messages. Which "
        "variables there are depends on the model. On the command line also a file with them.",
        default=None,
        python_extra_help="A session takes them before its messages: ``lm.session(chat_template_kwargs=...)``.",
        metavar="JSON",
        parse=parse_json_object,
    )
    tools: Sequence[JsonValue] = option(
        "The functions that the model may call: a list of OpenAI's tools. Needs chat messages. Arguments always fit "
        "the schemas.",
        default_factory=tuple,
        python_extra_help="Also Python functions with type hints and a docstring. The calls are the result's "
        "``tool_calls``.",
        flags=(),
        request_type=list[JsonObject],
    )
    tool_choice: str | Mapping[str, Any] | None = option(
        "What may be called: auto, none, required (an answer that only calls), or OpenAI's objects that name a tool or "
        "allow some.",
        default=None,
        default_meaning="auto",
        flags=(),
    )
    parallel_tool_calls: bool = option(
        "Whether an answer may have several calls, if the model's format allows it.", default=True, flags=()
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = option(
        "How much the model thinks before it answers, if its chat template has a switch for that; none: not at all. "
        "Needs chat messages.",
        default=None,
        default_meaning="up to the template",
        commands=("batch",),
    )
    max_thinking_tokens: int | None = option(
        "Maximum number of tokens of thinking, after which it is closed and the answer begins; -1 for no limit. Needs "
        "chat messages.",
        default=None,
        limits=NumberLimits(0, description="0 or more, or -1 for no limit", special_value=-1),
        default_meaning="no limit",
        commands=("batch",),
        metavar="N",
        aliases=("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"),
    )
    json_schema: Any = option(
        "The text must be JSON that matches this schema; '{}' allows any JSON. Not with another grammar option.",
        default=None,
        python_extra_help="A dict, a JSON string, the ``Path`` of a file, a pydantic model or another type that "
        "pydantic knows.",
        metavar="FILE|TEXT",
        parse=parse_schema_or_file,
        request_type=JsonObject | bool | str,
    )
    json_schema_mode: Literal["strict", "checked"] = option(
        "strict: refuse a schema that can't be enforced while the text is generated; checked: enforce what can be, "
        "and then report how the finished text breaks the schema.",
        default="strict",
    )
    retries: int = option(
        "Generate a text again with the next seed, at most this many times, while it breaks its schema; for "
        "schemas in the mode checked and a temperature above 0.",
        default=0,
        limits=NOT_NEGATIVE,
    )
    additional_properties: bool | None = option(
        "Whether objects may have properties beside those that the schema lists, where it doesn't say.",
        default=None,
        default_meaning="yes, but no for pydantic models and response formats",
        flags=("--additional-properties/--no-additional-properties",),
    )
    compact_json: bool = option(
        "Generate JSON without white space between its tokens, which takes fewer tokens.", default=False
    )
    regex: str | None = option(
        "The whole text must match this regular expression (Rust's syntax).", default=None, metavar="PATTERN"
    )
    grammar: str | Path | None = option(
        "The text must match the rule start of this grammar in Lark's syntax.",
        default=None,
        python_extra_help=PATH_OR_TEXT_HELP,
        metavar="FILE",
        parse=Path,
        request_type=str,
    )
    gbnf: str | Path | None = option(
        "The text must match this grammar in GBNF, llama.cpp's syntax.",
        default=None,
        python_extra_help=PATH_OR_TEXT_HELP,
        metavar="FILE",
        parse=Path,
        request_type=str,
    )
    choice: Sequence[str] | None = option("The text must be one of the given strings.", default=None, metavar="TEXT")
    constrain_from: int | str | None = option(
        "Let the grammar begin inside the prompt, which must match it from there: at the last occurrence of TEXT, "
        "or at character N (0 is the prompt's start, -5 is five characters before its end).",
        default=None,
        default_meaning="after the prompt",
        python_extra_help="A string is a text, an int a character.",
        metavar="TEXT|@N",
        parse=parse_position_or_text,
    )
    max_predict_ms: float = option(
        "Milliseconds since its first token after which the text ends at its next line break; 0 or -1 for no limit.",
        default=0.0,
        limits=NumberLimits(0, description="0 or more, or -1 for no limit", special_value=-1),
        flags=(),
        aliases=("t_max_predict_ms",),
    )
    heal: bool | None = option(
        "Token healing: generate the last tokens of the prompt again, so that a token may span the prompt's end.",
        default=None,
        python_extra_help="Off by default, but on for text that was appended to a session.",
        commands=("generate", "batch"),
    )
    logits_processors: Sequence[LogitsProcessor] | None = option(
        "Your own functions that change the logits before a token is chosen: ``processor(tokens so far (n,), "
        "logits (1, vocab)) -> logits``, or logits processors of transformers. They also run for proposed tokens, "
        "so their result must depend on their arguments alone.",
        default=None,
        flags=(),
        request=False,
    )

    def __post_init__(self) -> None: ...

    @property
    def is_sampled(self) -> bool:
        """Whether texts are drawn, so that several for one prompt differ."""
        return bool(self.temperature or self.sampler)

    @property
    def lookahead_limit(self) -> int | None:
        """The maximum number of tokens to propose per round; None for as many as are worth their time."""
        return None if self.lookahead == "auto" else self.lookahead

    @property
    def thinking_budget(self) -> int | None:
        """The maximum number of tokens of thinking; None if there is none."""
        if self.max_thinking_tokens is None and self.reasoning_effort == "none":
            return 0
        if self.max_thinking_tokens is None or self.max_thinking_tokens < 0:
            return None
        return self.max_thinking_tokens

    @property
    def allowed_calls(self) -> AllowedCalls:
        """What may be called."""
        if not self.tools:
            return NO_TOOLS
        return parse_tool_choice(self.tools, self.tool_choice)

    @property
    def grammar_option(self) -> str | None:
        """The name of the option that sets the grammar, if one does."""
        return next((name for name in GRAMMAR_OPTIONS if getattr(self, name) is not None), None)

    @property
    def constrains(self) -> bool:
        """Whether an option changes the logits or limits the tokens that may come next."""
        changes_logits = self.logit_bias or self.min_tokens or self.penalizes or self.logits_processors
        return bool(
            self.grammar_option or self.heal or changes_logits or self.tools or self.thinking_budget is not None
        )

    def recorded_options(self) -> dict[str, OptionValue]:
        """Return what decides the text: the options that change it and aren't at their defaults."""
        return self.changed_options(excluded=UNRECORDED_OPTIONS)

    def changed_options(self, excluded: Collection[str]) -> dict[str, OptionValue]:
        """Return the options that aren't at their defaults, without those named in ``excluded``."""
        option_values = {name: getattr(self, name) for name in GENERATE_OPTIONS if name not in ("sampling", *excluded)}
        return {
            name: value
            for name, value in option_values.items()
            if hasattr(value, "dtype") or value != GENERATE_OPTIONS[name].default
        }


@options_dataclass
class GenerateOptions(Params):
    """The keywords of every generating call: all options, and ``sampling``, which has several of them."""

    sampling: SamplingParams | None = option(
        "Sampling options in one object; options given one by one take precedence.",
        default=None,
        flags=(),
        request=False,
    )


GENERATE_OPTIONS = collect_options(GenerateOptions)
# The options that set a grammar; only one of them may be given.
GRAMMAR_OPTIONS = ("json_schema", "regex", "grammar", "gbnf", "choice")
SCHEMA_OPTIONS = ("json_schema_mode", "retries", "additional_properties", "compact_json")  # they need a schema
# They need chat messages.
CHAT_OPTIONS = (
    "chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "max_thinking_tokens",
)  # fmt: skip
SPEED_OPTIONS = ("lookahead", "batch_size")
# They don't change the text that a seed gives; where time ends it, its number of tokens is recorded.
UNRECORDED_OPTIONS = (*SPEED_OPTIONS, "retries", "max_predict_ms")
DEFAULT_PARAMS = Params()  # all options at their defaults
GenerateOptions.__doc__ = f"{GenerateOptions.__doc__}\n\n{format_option_documentation(GENERATE_OPTIONS)}"
