"""Declares each option once: Python's keywords, the command line, batch file and server are made from these tables.

To add an option, add one entry ``name: Annotated[type, help, Option(...)]``. It becomes a field of ``Params``, and one
in ``SamplingOptions`` also a field of ``SamplingParams``.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Number, Real
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Union, Unpack, get_args, get_origin

from ovspec.base.errors import OvspecError
from ovspec.params.option import (
    LARGEST,
    Limits,
    Option,
    auto_or_number,
    choices_of,
    declared,
    documentation,
    fields_of,
    hint,
    json_object,
    place_or_text,
    schema_or_file,
    token_bias,
)
from ovspec.params.tools import NO_TOOLS, ToolUse, tool_use, tools_of
from ovspec.params.type_words import type_in_words

AcceptRule = Literal["compare", "rejection"]
# (logits (1, vocab) float32, all tokens so far (n,) int64, **keywords) -> token id
SampleFunction = Callable[..., Any]
# (all tokens so far (n,) int64, logits (1, vocab) float32) -> logits of the same shape
LogitsProcessor = Callable[[Any, Any], Any]

AT_LEAST_1 = Limits(1, words="at least 1")
TOKENS = Limits(0, words="0 or more, or -1 for as many as the context holds", special=-1)
TEXTS = Limits(1, 10_000, "at least 1 and at most 10,000")
NOT_NEGATIVE = Limits(0, words="0 or more")
PROBABILITY = Limits(0, 1, "above 0 and at most 1", above=True)
SHARE = Limits(0, 1, "from 0 to 1")
FINITE = Limits()
GREEDY_OR_MORE = Limits(0, words="0 (greedy) or more")
POSITIVE = Limits(0, words="above 0", above=True)
LOOKAHEAD = Option(
    limits=Limits(0, words="0 or more, or auto"),
    usual="auto",
    more="In Python the default is what was given to ``load``.",
    metavar="auto|K",
    parse=auto_or_number,
    request=False,
)
PYTHON_ONLY = Option(flags=(), request=False)
FILE_OR_TEXT = Option(more="A string, or the ``Path`` of a file.", metavar="FILE", parse=Path, request_type=str)


class SamplingOptions(TypedDict, total=False):
    """The options that decide which text a model generates for a prompt."""

    max_tokens: Annotated[
        int | None,
        "Maximum number of tokens to generate; -1 for as many as the context holds.",
        Option(
            limits=TOKENS,
            usual="from the model's generation config, or 256",
            more="At the end of the context a text ends anyway. 0 only reads the prompt.",
            flags=("-n", "--max-tokens"),
            metavar="N",
            aliases=("max_completion_tokens", "n_predict"),
        ),
    ]
    min_tokens: Annotated[
        int | None,
        "Minimum number of tokens to generate; a grammar may end the text earlier.",
        Option(limits=NOT_NEGATIVE, usual="from the model's generation config, or 0"),
    ]
    stop: Annotated[
        str | Collection[str], "End the text at this string, which is left out of it.", Option(list, metavar="TEXT")
    ]
    stop_ids: Annotated[
        Collection[int],
        "End the text at this token id; the token adds no text.",
        Option(list, flags=("--stop-id",), metavar="ID", aliases=("stop_token_ids",)),
    ]
    min_indent: Annotated[
        int,
        "End the text before the first line break that fewer than this many spaces and tabs follow; 0 for never.",
        Option(0, NOT_NEGATIVE, metavar="N", aliases=("n_indent",)),
    ]
    ignore_eos: Annotated[bool, "Continue after an end-of-sequence token.", Option(False)]
    temperature: Annotated[
        float,
        "Sampling temperature: 0 always takes the most likely token (greedy), 1 samples from the model's own "
        "distribution, and higher values make unlikely tokens more frequent.",
        Option(0.0, GREEDY_OR_MORE, flags=("-t", "--temp", "--temperature")),
    ]
    top_k: Annotated[
        int,
        "Sample only from the K most likely tokens; 0 for all. Needs a temperature.",
        Option(0, Limits(0, words="0 (all) or more"), truncates=True),
    ]
    top_p: Annotated[
        float,
        "Sample only from the most likely tokens that add up to this probability; 1 for all. Needs a temperature.",
        Option(1.0, PROBABILITY, truncates=True),
    ]
    min_p: Annotated[
        float,
        "Sample only from tokens at least this share as likely as the top one; 0 for all. Needs a temperature.",
        Option(0.0, SHARE, truncates=True),
    ]
    typical_p: Annotated[
        float,
        "Like top-p, but over the most typical tokens (arXiv 2202.00666); 1 for all. Needs a temperature.",
        Option(1.0, PROBABILITY, truncates=True),
    ]
    repetition_penalty: Annotated[
        float | None,
        "Divide positive logits of tokens in the prompt and the text by this, and multiply negative ones: 1 is "
        "off, higher values discourage repetition.",
        Option(limits=POSITIVE, usual="from the model's generation config, or 1"),
    ]
    presence_penalty: Annotated[
        float, "Subtract this from the logit of each token generated so far; 0 is off.", Option(0.0, FINITE)
    ]
    frequency_penalty: Annotated[
        float, "Subtract this from a token's logit once for each time it was generated; 0 is off.", Option(0.0, FINITE)
    ]
    logit_bias: Annotated[
        Mapping[int, float],
        "Add VALUE to the logit of token ID; -inf bans it.",
        Option(dict, metavar="ID=VALUE", parse=token_bias),
    ]
    seed: Annotated[
        int | None,
        "Random seed: the same seed gives the same text, with any draft or none. With the accept rule rejection, "
        "only with the same draft and a fixed lookahead.",
        Option(
            limits=Limits(0, 2**63 - 1, "from 0 to 2**63 - 1"),
            usual="random",
            more="``Stats.seed`` reports the seed of a sampled text.",
        ),
    ]
    n: Annotated[
        int,
        "Number of texts for each prompt; greedy ones are all the same.",
        Option(1, TEXTS, flags=("--samples",), commands=("generate", "batch"), aliases=("n_cmpl",)),
    ]
    logprobs: Annotated[
        int | None,
        "Report the natural log-probability of each token and of this many of the most likely ones, from the "
        "model's own logits: before bias, penalties, grammars and temperature.",
        Option(limits=NOT_NEGATIVE, commands=("generate", "batch"), request=False),
    ]


SAMPLING = declared(SamplingOptions)
TRUNCATING = tuple(name for name, (_, option) in SAMPLING.items() if option.truncates)
SAMPLES_WITH = ("temperature", *TRUNCATING)  # what makes the distribution that a token is drawn from
# Their defaults in a chat and on a server, in words.
RECOMMENDED = {
    name: f"as the model's generation config recommends, or {SAMPLING[name][1].initially}" for name in SAMPLES_WITH
}
_SamplingFields = fields_of(SAMPLING)


@dataclass(frozen=True)
class SamplingParams(_SamplingFields):
    """Sampling options in one immutable object, for the option ``sampling``; checked when it is made."""

    if TYPE_CHECKING:

        def __init__(self, **fields: Unpack[SamplingOptions]) -> None: ...

    def __post_init__(self) -> None:
        """Check the values; raises OvspecError for one of the wrong type or out of range."""
        for name, (kind, option) in SAMPLING.items():
            if (value := getattr(self, name)) is not option.default:
                check(name, value, kind, option)
        check_sampling(self)

    @property
    def most_tokens(self) -> float:
        """The requested maximum number of tokens; inf if there is none."""
        return math.inf if self.max_tokens in (None, -1) else self.max_tokens

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def truncates(self) -> list[str]:
        """The given options that limit sampling to likely tokens."""
        return [name for name in TRUNCATING if getattr(self, name) != SAMPLING[name][1].default]

    @property
    def penalizes(self) -> bool:
        """Whether a penalty makes the logits depend on the tokens before them."""
        repeats = self.repetition_penalty not in (None, 1.0)
        return repeats or self.presence_penalty != 0 or self.frequency_penalty != 0


class GenerateOptions(SamplingOptions, total=False):
    """The options of every generating call."""

    sampling: Annotated[
        SamplingParams, "Sampling options in one object; options given one by one take precedence.", PYTHON_ONLY
    ]
    sampler: Annotated[
        SampleFunction | None,
        "Your own function that chooses each token: ``sampler(logits (1, vocab), tokens so far (n,), "
        "**sampler_options) -> id``, called once for each token, in order, with or without a draft. The logits "
        "come after penalties and grammars. Not with a temperature.",
        PYTHON_ONLY,
    ]
    sampler_options: Annotated[Mapping[str, Any] | None, "Keyword arguments for ``sampler``.", PYTHON_ONLY]
    accept: Annotated[
        AcceptRule,
        "How proposed tokens are accepted when sampling: compare gives the same text with any draft or none; "
        "rejection accepts more, but keeps only the distribution of the texts.",
        Option("compare", request=False),
    ]
    lookahead: Annotated[
        int | Literal["auto"] | None,
        "Maximum number of tokens to propose per round: 0 for plain decoding; auto: as many as are worth their time.",
        LOOKAHEAD,
    ]
    batch_size: Annotated[
        int,
        "Maximum number of texts generated at a time; the others wait.",
        # Up to about this many a step mostly reads weights; beyond, arithmetic dominates and more gain little.
        Option(32, AT_LEAST_1, commands=("batch",), request=False),
    ]
    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None,
        "Variables for the model's chat template, as in '{\"enable_thinking\": false}'; needs chat messages. Which "
        "variables there are depends on the model. On the command line also a file with them.",
        Option(
            more="A session takes them before its messages: ``lm.session(chat_template_kwargs=...)``.",
            metavar="JSON",
            parse=json_object,
        ),
    ]
    tools: Annotated[
        Sequence[Any],
        "The functions that the model may call: a list of OpenAI's tools. Needs chat messages. Arguments always fit "
        "the schemas.",
        Option(
            tuple,
            more="Also Python functions with type hints and a docstring. The calls are the result's ``tool_calls``.",
            flags=(),
            request_type=list[dict[str, Any]],
        ),
    ]
    tool_choice: Annotated[
        str | Mapping[str, Any] | None,
        "What may be called: auto, none, required (an answer that only calls), or OpenAI's objects that name a tool or "
        "allow some.",
        Option(usual="auto", flags=()),
    ]
    parallel_tool_calls: Annotated[
        bool, "Whether an answer may have several calls, if the model's format allows it.", Option(True, flags=())
    ]
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None,
        "How much the model thinks before it answers, if its chat template has a switch for that; none: not at all. "
        "Needs chat messages.",
        Option(usual="up to the template", commands=("batch",)),
    ]
    max_thinking_tokens: Annotated[
        int | None,
        "Maximum number of tokens of thinking, after which it is closed and the answer begins; -1 for no limit. Needs "
        "chat messages.",
        Option(
            limits=Limits(0, words="0 or more, or -1 for no limit", special=-1),
            usual="no limit",
            commands=("batch",),
            metavar="N",
            aliases=("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"),
        ),
    ]
    json_schema: Annotated[
        Any,
        "The text must be JSON that matches this schema; '{}' allows any JSON. Not with another grammar option.",
        Option(
            more="A dict, a JSON string, the ``Path`` of a file, a pydantic model or another type that pydantic knows.",
            metavar="FILE|TEXT",
            parse=schema_or_file,
            request_type=dict[str, Any] | bool | str,
        ),
    ]
    json_schema_mode: Annotated[
        Literal["strict", "checked"],
        "strict: refuse a schema that can't be enforced while the text is generated; checked: enforce what can be, "
        "and then report how the finished text breaks the schema.",
        Option("strict"),
    ]
    retries: Annotated[
        int,
        "Generate a text again with the next seed, at most this many times, while it breaks its schema; for "
        "schemas in the mode checked and a temperature above 0.",
        Option(0, NOT_NEGATIVE),
    ]
    additional_properties: Annotated[
        bool | None,
        "Whether objects may have properties beside those that the schema lists, where it doesn't say.",
        Option(
            usual="yes, but no for pydantic models and response formats",
            flags=("--additional-properties/--no-additional-properties",),
        ),
    ]
    compact_json: Annotated[
        bool, "Generate JSON without white space between its tokens, which takes fewer tokens.", Option(False)
    ]
    regex: Annotated[
        str | None, "The whole text must match this regular expression (Rust's syntax).", Option(metavar="PATTERN")
    ]
    grammar: Annotated[
        str | Path | None, "The text must match the rule start of this grammar in Lark's syntax.", FILE_OR_TEXT
    ]
    gbnf: Annotated[str | Path | None, "The text must match this grammar in GBNF, llama.cpp's syntax.", FILE_OR_TEXT]
    choice: Annotated[Sequence[str] | None, "The text must be one of the given strings.", Option(metavar="TEXT")]
    constrain_from: Annotated[
        int | str | None,
        "Let the grammar begin inside the prompt, which must match it from there: at the last occurrence of TEXT, "
        "or at character N (0 is the prompt's start, -5 is five characters before its end).",
        Option(
            usual="after the prompt",
            more="A string is a text, an int a character.",
            metavar="TEXT|@N",
            parse=place_or_text,
        ),
    ]
    max_predict_ms: Annotated[
        float,
        "Milliseconds since its first token after which the text ends at its next line break; 0 or -1 for no limit.",
        Option(
            0.0, Limits(0, words="0 or more, or -1 for no limit", special=-1), flags=(), aliases=("t_max_predict_ms",)
        ),
    ]
    heal: Annotated[
        bool | None,
        "Token healing: generate the last tokens of the prompt again, so that a token may span the prompt's end.",
        Option(more="Off by default, but on for text that was appended to a session.", commands=("generate", "batch")),
    ]
    logits_processors: Annotated[
        Sequence[LogitsProcessor] | None,
        "Your own functions that change the logits before a token is chosen: ``processor(tokens so far (n,), "
        "logits (1, vocab)) -> logits``, or logits processors of transformers. They also run for proposed tokens, "
        "so their result must depend on their arguments alone.",
        PYTHON_ONLY,
    ]


# ---------------------------------------------------------------- what is made from them

GENERATE = declared(GenerateOptions)
# The options that set a grammar; only one of them may be given.
GRAMMARS = ("json_schema", "regex", "grammar", "gbnf", "choice")
OF_SCHEMAS = ("json_schema_mode", "retries", "additional_properties", "compact_json")  # they need a schema
# They need chat messages.
OF_CHATS = (
    "chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "max_thinking_tokens",
)  # fmt: skip
ONLY_SPEED = ("lookahead", "batch_size")
# They don't change the text that a seed gives; where time ends it, its number of tokens is recorded.
UNRECORDED = (*ONLY_SPEED, "retries", "max_predict_ms")
CHECKED_WHERE_USED = {*GRAMMARS, "constrain_from", "logits_processors"}
_OtherFields = fields_of({name: entry for name, entry in GENERATE.items() if name not in {*SAMPLING, "sampling"}})


@dataclass(frozen=True)
class Params(SamplingParams, _OtherFields):
    """All options of one generating call. The front doors check what they make it from, so it isn't checked again."""

    if TYPE_CHECKING:

        def __init__(self, **fields: Unpack[GenerateOptions]) -> None: ...

    def __post_init__(self) -> None: ...

    @property
    def sampled(self) -> bool:
        """Whether texts are drawn, so that several for one prompt differ."""
        return bool(self.temperature or self.sampler)

    @property
    def thinking_budget(self) -> int | None:
        """The maximum number of tokens of thinking; None if there is none."""
        if self.max_thinking_tokens is None:
            return 0 if self.reasoning_effort == "none" else None
        return None if self.max_thinking_tokens < 0 else self.max_thinking_tokens

    @property
    def tool_use(self) -> ToolUse:
        """What may be called."""
        return tool_use(self.tools, self.tool_choice) if self.tools else NO_TOOLS

    @property
    def grammar_option(self) -> str | None:
        """The name of the option that sets the grammar, if one does."""
        return next((name for name in GRAMMARS if getattr(self, name) is not None), None)

    @property
    def constrains(self) -> bool:
        """Whether an option changes the logits or limits the tokens that may come next."""
        changes = self.logit_bias or self.min_tokens or self.penalizes or self.logits_processors
        return bool(self.grammar_option or self.heal or changes or self.tools or self.thinking_budget is not None)

    def recorded(self) -> dict[str, Any]:
        """Return what decides the text: the options that change it and aren't at their defaults."""
        return self.changed(but=UNRECORDED)

    def changed(self, but: Collection[str]) -> dict[str, Any]:
        """Return the options that aren't at their defaults, without those named in ``but``."""
        values = {name: getattr(self, name) for name in GENERATE if name not in ("sampling", *but)}
        return {name: v for name, v in values.items() if hasattr(v, "dtype") or v != GENERATE[name][1].initial}


UNSET = Params()  # all options at their defaults


for _made, _table in ((SamplingParams, SamplingOptions), (GenerateOptions, GenerateOptions)):
    _made.__doc__ = f"{_made.__doc__}\n\n{documentation(_table)}"


def make_params(options: GenerateOptions) -> Params:
    """Return the params of a call from Python's keywords or the command line's.

    Raises TypeError for an unknown option and OvspecError for an invalid value.
    """
    check_names(options, GENERATE)
    found: dict[str, Any] = {}
    for name, value in options.items():
        if value is None and name not in SAMPLING:
            continue  # stands for the default
        if name not in CHECKED_WHERE_USED:
            check(name, value, *GENERATE[name])
        found[name] = value
    if sampling := found.pop("sampling", None):
        found = {name: getattr(sampling, name) for name in SAMPLING} | found
    return checked(Params(**found))


def checked(params: Params) -> Params:
    """Return ``params``, whose values are valid one by one; raises OvspecError for those that exclude each other."""
    check_sampling(params)
    check_grammar(params)
    params = check_tools(params)
    if params.sampler and (params.temperature or params.truncates):
        others = ", ".join(f"`{name}`" for name in SAMPLES_WITH)
        raise OvspecError(f"The sampler draws the tokens; leave out {others}.")
    if params.sampler and params.accept == "rejection":
        raise OvspecError("Leave out `accept='rejection'`: it needs probabilities, which a sampler does not return.")
    if params.truncates and not params.temperature:
        names = " and ".join(f"`{name}`" for name in params.truncates)
        raise OvspecError(f"{names} {'needs' if len(params.truncates) == 1 else 'need'} a `temperature` above 0.")
    return params


def check_sampling(params: SamplingParams) -> None:
    """Raise OvspecError for values of ``SamplingParams`` that no declaration can refuse."""
    if not all(bias == -math.inf or abs(bias) <= LARGEST for bias in params.logit_bias.values()):
        raise OvspecError(f"`logit_bias` must be numbers up to {LARGEST}, or -inf to ban a token.")
    if not all(params.stop_strings):
        raise OvspecError("`stop` has an empty string; leave it out.")
    if params.min_tokens and params.min_tokens > params.most_tokens:
        more = f"`min_tokens` is {params.min_tokens}, which is more than `max_tokens`, {params.max_tokens}."
        raise OvspecError(more)


def check_tools(params: Params) -> Params:
    """Return ``params`` with the tools as OpenAI's; raises OvspecError for what can't be called."""
    if "tools" in (params.chat_template_kwargs or {}) and params.tools:
        raise OvspecError("`tools` and `chat_template_kwargs` both have tools; give them once.")
    if not params.tools:
        if params.tool_choice is not None:
            tool_use((), params.tool_choice)
        return params
    if params.ignore_eos:
        raise OvspecError("`tools` can't be combined with `ignore_eos`: a call decides where the text ends.")
    params = replace(params, tools=tools_of(params.tools))
    tool_use(params.tools, params.tool_choice)
    return params


def check_grammar(params: Params) -> None:
    """Raise OvspecError for options of grammars that exclude or need each other."""
    given = [name for name in GRAMMARS if getattr(params, name) is not None]
    if len(given) > 1:
        both = " and ".join(f"`{name}`" for name in given)
        raise OvspecError(f"{both} can't be combined; give one grammar that covers both.")
    if given and params.ignore_eos:
        raise OvspecError(f"`{given[0]}` decides where the text ends, so `ignore_eos` can't be combined with it.")
    if not given and params.constrain_from is not None:
        raise OvspecError("`constrain_from` sets where a grammar begins; give a grammar too.")
    more = [name for name in OF_SCHEMAS if getattr(params, name) != GENERATE[name][1].default]
    if more and params.json_schema is None and (more[0] == "retries" or not params.tools):
        raise OvspecError(f"`{more[0]}` is for JSON schemas; give `json_schema` too.")
    if params.retries and params.json_schema_mode != "checked":
        raise OvspecError("`retries` needs `json_schema_mode` checked: in the mode strict no text breaks the schema.")
    if params.retries and not params.temperature:
        raise OvspecError("`retries` needs a `temperature` above 0: a greedy text would be the same again.")


def check_option(name: str, value: Any) -> None:
    """Raise OvspecError if ``value`` is invalid for an option of a generating call; None stands for the default."""
    if value is not None:
        check(name, value, *GENERATE[name])


def refuse_retries(params: Params, what: str) -> None:
    """Raise OvspecError if ``params`` ask for retries, which ``what`` can't have."""
    if params.retries:
        raise OvspecError(f"`retries` can't be combined with {what}.")


def refuse_variables(variables: Mapping[str, Any] | None) -> None:
    """Raise OvspecError for variables of a chat template if there are any, because the prompt isn't a chat."""
    if variables:
        raise OvspecError("`chat_template_kwargs` needs chat messages, and the prompt is a text or ids; leave it out.")


def refuse_without_chat(params: Params) -> None:
    """Raise OvspecError if ``params`` have an option that only chats can meet, for a prompt that isn't one."""
    for name in OF_CHATS:
        if getattr(params, name) != getattr(UNSET, name):
            raise OvspecError(f"`{name}` needs chat messages, and the prompt is a text or ids; leave it out.")


def refuse_in_session(params: Params) -> None:
    """Raise OvspecError if ``params`` have an option that comes too late in a session."""
    refuse_retries(params, "a session, which continues from its text")
    for name in OF_CHATS:
        if getattr(params, name) != getattr(UNSET, name):
            instead = "set `chat_template_kwargs` of the session before you append them"
            instead = instead if name == OF_CHATS[0] else "call `generate` of the model with the messages"
            raise OvspecError(
                f"`{name}` can't be given when a session generates: the messages are in the text already; {instead}."
            )


# ---------------------------------------------------------------- checking values


def check_names(given: Any, table: dict[str, tuple[Any, Option]]) -> None:
    """Raise TypeError if ``given`` names an unknown option."""
    for name in sorted(given.keys() - table.keys()):
        meant = hint(name, table) or f"the options are {', '.join(table)}"
        raise TypeError(f"unknown option {name!r}; {meant}")


def check(name: str, value: Any, kind: Any, option: Option) -> None:
    """Raise OvspecError if ``value`` is not of type ``kind`` or is out of range."""
    shown = in_words(value)
    if not fits(value, kind):
        choices = choices_of(kind)
        if choices and not option.limits:
            raise OvspecError(f"`{name}` is {shown}; it must be one of {', '.join(choices)}.")
        raise OvspecError(f"`{name}` is {shown}, which has the wrong type; it must be {type_in_words(kind)}.")
    if option.limits and isinstance(value, Number) and not within(option.limits, value):
        raise OvspecError(f"`{name}` is {shown}; it must be {option.limits.words}.")


def within(limits: Limits, number: Any) -> bool:
    """Return whether a number is in range."""
    inside = limits.least <= number <= limits.most and not (limits.above and number == limits.least)
    return inside or number == limits.special


def fits(value: Any, kind: Any) -> bool:
    """Return whether ``value`` is of the type ``kind``, written as in annotations."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return any(value is each or (type(value) is type(each) and value == each) for each in inner)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if origin and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if origin and issubclass(origin, Collection):
        listed = isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))
        return listed and all(fits(each, inner[0]) for each in value)
    return isinstance(value, origin or kind)


def in_words(value: Any) -> str:
    """Return ``value`` as error messages show it."""
    if isinstance(value, (int, float)) and LARGEST < abs(value) < float("inf"):
        return f"beyond {LARGEST}, the limit of any option"  # Python may refuse to print so many digits
    return str(value) if isinstance(value, Number) else repr(value)[:80]
