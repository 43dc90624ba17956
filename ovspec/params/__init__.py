"""Declares each option once: Python's keywords, the command line, batch files and the server are made of these classes.

To add an option, add one field ``name: type = option(help, default=..., ...)`` to ``SamplingParams`` or ``Params``.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ovspec.base.errors import OvspecError
from ovspec.params.option import LARGEST, Limits, Option, declared, documentation, hint, option, options_class
from ovspec.params.tools import NO_TOOLS, ToolUse, tool_use, tools_of
from ovspec.params.values import auto_or_number, check, json_object, place_or_text, schema_or_file, token_bias

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
LOOKAHEAD = Limits(0, words="0 or more, or auto")
PATH_OR_TEXT = "A string, or the ``Path`` of a file."


@options_class
class SamplingParams:
    """Sampling options in one immutable object, for the option ``sampling``; checked when it is made."""

    max_tokens: int | None = option(
        "Maximum number of tokens to generate; -1 for as many as the context holds.",
        default=None,
        limits=TOKENS,
        usual="from the model's generation config, or 256",
        more="At the end of the context a text ends anyway. 0 only reads the prompt.",
        flags=("-n", "--max-tokens"),
        metavar="N",
        aliases=("max_completion_tokens", "n_predict"),
    )
    min_tokens: int | None = option(
        "Minimum number of tokens to generate; a grammar may end the text earlier.",
        default=None,
        limits=NOT_NEGATIVE,
        usual="from the model's generation config, or 0",
    )
    stop: str | Collection[str] = option(
        "End the text at this string, which is left out of it.", default_factory=list, metavar="TEXT"
    )
    stop_ids: Collection[int] = option(
        "End the text at this token id; the token adds no text.",
        default_factory=list,
        flags=("--stop-id",),
        metavar="ID",
        aliases=("stop_token_ids",),
    )
    min_indent: int = option(
        "End the text before the first line break that fewer than this many spaces and tabs follow; 0 for never.",
        default=0,
        limits=NOT_NEGATIVE,
        metavar="N",
        aliases=("n_indent",),
    )
    ignore_eos: bool = option("Continue after an end-of-sequence token.", default=False)
    temperature: float = option(
        "Sampling temperature: 0 always takes the most likely token (greedy), 1 samples from the model's own "
        "distribution, and higher values make unlikely tokens more frequent.",
        default=0.0,
        limits=GREEDY_OR_MORE,
        flags=("-t", "--temp", "--temperature"),
    )
    top_k: int = option(
        "Sample only from the K most likely tokens; 0 for all. Needs a temperature.",
        default=0,
        limits=Limits(0, words="0 (all) or more"),
        truncates=True,
    )
    top_p: float = option(
        "Sample only from the most likely tokens that add up to this probability; 1 for all. Needs a temperature.",
        default=1.0,
        limits=PROBABILITY,
        truncates=True,
    )
    min_p: float = option(
        "Sample only from tokens at least this share as likely as the top one; 0 for all. Needs a temperature.",
        default=0.0,
        limits=SHARE,
        truncates=True,
    )
    typical_p: float = option(
        "Like top-p, but over the most typical tokens (arXiv 2202.00666); 1 for all. Needs a temperature.",
        default=1.0,
        limits=PROBABILITY,
        truncates=True,
    )
    repetition_penalty: float | None = option(
        "Divide positive logits of tokens in the prompt and the text by this, and multiply negative ones: 1 is "
        "off, higher values discourage repetition.",
        default=None,
        limits=POSITIVE,
        usual="from the model's generation config, or 1",
    )
    presence_penalty: float = option(
        "Subtract this from the logit of each token generated so far; 0 is off.", default=0.0, limits=FINITE
    )
    frequency_penalty: float = option(
        "Subtract this from a token's logit once for each time it was generated; 0 is off.", default=0.0, limits=FINITE
    )
    logit_bias: Mapping[int, float] = option(
        "Add VALUE to the logit of token ID; -inf bans it.", default_factory=dict, metavar="ID=VALUE", parse=token_bias
    )
    seed: int | None = option(
        "Random seed: the same seed gives the same text, with any draft or none. With the accept rule rejection, "
        "only with the same draft and a fixed lookahead.",
        default=None,
        limits=Limits(0, 2**63 - 1, "from 0 to 2**63 - 1"),
        usual="random",
        more="``Stats.seed`` reports the seed of a sampled text.",
    )
    n: int = option(
        "Number of texts for each prompt; greedy ones are all the same.",
        default=1,
        limits=TEXTS,
        flags=("--samples",),
        commands=("generate", "batch"),
        aliases=("n_cmpl",),
    )
    logprobs: int | None = option(
        "Report the natural log-probability of each token and of this many of the most likely ones, from the "
        "model's own logits: before bias, penalties, grammars and temperature.",
        default=None,
        limits=NOT_NEGATIVE,
        commands=("generate", "batch"),
        request=False,
    )

    def __post_init__(self) -> None:
        """Check the values; raises OvspecError for one of the wrong type or out of range."""
        for name, declaration in SAMPLING.items():
            if (value := getattr(self, name)) is not declaration.default:
                check(value, declaration)
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
        return [name for name in TRUNCATING if getattr(self, name) != SAMPLING[name].default]

    @property
    def penalizes(self) -> bool:
        """Whether a penalty makes the logits depend on the tokens before them."""
        repeats = self.repetition_penalty not in (None, 1.0)
        return repeats or self.presence_penalty != 0 or self.frequency_penalty != 0


SAMPLING = declared(SamplingParams)
TRUNCATING = tuple(name for name, declaration in SAMPLING.items() if declaration.truncates)
SAMPLES_WITH = ("temperature", *TRUNCATING)  # they make the distribution that a token is drawn from
# Their defaults in a chat and on a server, in words.
RECOMMENDED = {
    name: f"as the model's generation config recommends, or {SAMPLING[name].default_in_words}" for name in SAMPLES_WITH
}


@options_class
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
        usual="auto",
        more="In Python the default is what was given to ``load``.",
        metavar="auto|K",
        parse=auto_or_number,
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
        more="A session takes them before its messages: ``lm.session(chat_template_kwargs=...)``.",
        metavar="JSON",
        parse=json_object,
    )
    tools: Sequence[Any] = option(
        "The functions that the model may call: a list of OpenAI's tools. Needs chat messages. Arguments always fit "
        "the schemas.",
        default_factory=tuple,
        more="Also Python functions with type hints and a docstring. The calls are the result's ``tool_calls``.",
        flags=(),
        request_type=list[dict[str, Any]],
    )
    tool_choice: str | Mapping[str, Any] | None = option(
        "What may be called: auto, none, required (an answer that only calls), or OpenAI's objects that name a tool or "
        "allow some.",
        default=None,
        usual="auto",
        flags=(),
    )
    parallel_tool_calls: bool = option(
        "Whether an answer may have several calls, if the model's format allows it.", default=True, flags=()
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = option(
        "How much the model thinks before it answers, if its chat template has a switch for that; none: not at all. "
        "Needs chat messages.",
        default=None,
        usual="up to the template",
        commands=("batch",),
    )
    max_thinking_tokens: int | None = option(
        "Maximum number of tokens of thinking, after which it is closed and the answer begins; -1 for no limit. Needs "
        "chat messages.",
        default=None,
        limits=Limits(0, words="0 or more, or -1 for no limit", special=-1),
        usual="no limit",
        commands=("batch",),
        metavar="N",
        aliases=("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"),
    )
    json_schema: Any = option(
        "The text must be JSON that matches this schema; '{}' allows any JSON. Not with another grammar option.",
        default=None,
        more="A dict, a JSON string, the ``Path`` of a file, a pydantic model or another type that pydantic knows.",
        metavar="FILE|TEXT",
        parse=schema_or_file,
        request_type=dict[str, Any] | bool | str,
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
        usual="yes, but no for pydantic models and response formats",
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
        more=PATH_OR_TEXT,
        metavar="FILE",
        parse=Path,
        request_type=str,
    )
    gbnf: str | Path | None = option(
        "The text must match this grammar in GBNF, llama.cpp's syntax.",
        default=None,
        more=PATH_OR_TEXT,
        metavar="FILE",
        parse=Path,
        request_type=str,
    )
    choice: Sequence[str] | None = option("The text must be one of the given strings.", default=None, metavar="TEXT")
    constrain_from: int | str | None = option(
        "Let the grammar begin inside the prompt, which must match it from there: at the last occurrence of TEXT, "
        "or at character N (0 is the prompt's start, -5 is five characters before its end).",
        default=None,
        usual="after the prompt",
        more="A string is a text, an int a character.",
        metavar="TEXT|@N",
        parse=place_or_text,
    )
    max_predict_ms: float = option(
        "Milliseconds since its first token after which the text ends at its next line break; 0 or -1 for no limit.",
        default=0.0,
        limits=Limits(0, words="0 or more, or -1 for no limit", special=-1),
        flags=(),
        aliases=("t_max_predict_ms",),
    )
    heal: bool | None = option(
        "Token healing: generate the last tokens of the prompt again, so that a token may span the prompt's end.",
        default=None,
        more="Off by default, but on for text that was appended to a session.",
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
    def sampled(self) -> bool:
        """Whether texts are drawn, so that several for one prompt differ."""
        return bool(self.temperature or self.sampler)

    @property
    def most_proposed(self) -> int | None:
        """The maximum number of tokens to propose per round; None for as many as are worth their time."""
        return None if self.lookahead == "auto" else self.lookahead

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
        return {name: v for name, v in values.items() if hasattr(v, "dtype") or v != GENERATE[name].default}


@options_class
class GenerateOptions(Params):
    """The keywords of every generating call: all options, and ``sampling``, which has several of them."""

    sampling: SamplingParams | None = option(
        "Sampling options in one object; options given one by one take precedence.",
        default=None,
        flags=(),
        request=False,
    )


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
UNSET = Params()  # all options at their defaults


for _class, _table in ((SamplingParams, SAMPLING), (GenerateOptions, GENERATE)):
    _class.__doc__ = f"{_class.__doc__}\n\n{documentation(_table)}"


def make_params(options: Mapping[str, Any]) -> Params:
    """Return the params of a call from Python's keywords or the command line's.

    Raises TypeError for an unknown option and OvspecError for an invalid value.
    """
    sampling = options.get("sampling")
    if isinstance(sampling, Params) and len(options) == 1:
        return sampling  # as the command line hands it on
    check_names(options, GENERATE)
    # In Python, None stands for the default of other options.
    values: dict[str, Any] = {name: v for name, v in options.items() if v is not None or name in SAMPLING}
    for name, value in values.items():
        if name not in CHECKED_WHERE_USED:
            check(value, GENERATE[name])
    if values.pop("sampling", None):
        names = GENERATE.keys() - {"sampling"} if isinstance(sampling, Params) else SAMPLING
        values = {name: getattr(sampling, name) for name in names} | values
    return checked(Params(**values))


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
    more = [name for name in OF_SCHEMAS if getattr(params, name) != GENERATE[name].default]
    if more and params.json_schema is None and (more[0] == "retries" or not params.tools):
        raise OvspecError(f"`{more[0]}` is for JSON schemas; give `json_schema` too.")
    if params.retries and params.json_schema_mode != "checked":
        raise OvspecError("`retries` needs `json_schema_mode` checked: in the mode strict no text breaks the schema.")
    if params.retries and not params.temperature:
        raise OvspecError("`retries` needs a `temperature` above 0: a greedy text would be the same again.")


def refuse_retries(params: Params) -> None:
    """Raise OvspecError if ``params`` ask for retries, which a stream can't have."""
    if params.retries:
        raise OvspecError("`retries` can't be combined with a stream, whose text is seen before it ends.")


def check_names(options: Mapping[str, Any], table: Mapping[str, Option]) -> None:
    """Raise TypeError if ``options`` has an unknown name."""
    for name in sorted(options.keys() - table.keys()):
        meant = hint(name, table) or f"the options are {', '.join(table)}"
        raise TypeError(f"unknown option {name!r}; {meant}")
