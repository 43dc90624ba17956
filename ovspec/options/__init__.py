"""Declares each option once. Python's keywords, the command line and the batch file are made from these tables.

To add an option, add one entry here or in ``sampling.py``; an entry there also becomes a field of ``SamplingParams``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from ovspec.errors import OvspecError
from ovspec.options.option import LARGEST, Limits, Option, check, check_names, declared, documentation
from ovspec.options.reading import auto_or_number, json_object, place_or_text, schema_or_file
from ovspec.options.sampling import AT_LEAST_1, NOT_NEGATIVE, SamplingOptions

AcceptRule = Literal["compare", "rejection"]
# (logits (1, vocab) float32, all tokens so far (n,) int64, **keywords) -> token id
SampleFunction = Callable[..., Any]
# (all tokens so far (n,) int64, logits (1, vocab) float32) -> logits of the same shape
LogitsProcessor = Callable[[Any, Any], Any]

LOOKAHEAD = Limits(0, words="0 or more, or auto")


def python_only(help: str) -> Option:
    return Option(help, flags=(), request=False)


def file_or_text(help: str) -> Option:
    """Return an option that is a file on the command line, a string in a request, and either of them in Python."""
    return Option(help, more="A string, or the ``Path`` of a file.", metavar="FILE", parse=Path, request=str)


def _fields(table: Any) -> Any:
    """Return a frozen dataclass with a field for each entry of ``table``."""
    entries = []
    for name, (kind, option) in declared(table).items():
        made = callable(option.default)
        default = field(default_factory=option.default) if made else field(default=option.default)
        entries.append((name, kind, default))
    return make_dataclass("Fields", entries, frozen=True)


_SamplingFields: Any = _fields(SamplingOptions)


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
        if not all(bias == -math.inf or abs(bias) <= LARGEST for bias in self.logit_bias.values()):
            raise OvspecError(f"`logit_bias` must be numbers up to {LARGEST}, or -inf to ban a token.")
        if not all(self.stop_strings):
            raise OvspecError("`stop` has an empty string; leave it out.")
        if self.min_tokens and self.min_tokens > self.most_tokens:
            raise OvspecError(f"`min_tokens` is {self.min_tokens}, which is more than `max_tokens`, {self.max_tokens}.")

    @property
    def most_tokens(self) -> float:
        """The requested maximum number of tokens; inf if there is none."""
        return math.inf if self.max_tokens in (None, -1) else self.max_tokens

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def penalizes(self) -> bool:
        """Whether a penalty makes the logits depend on the tokens before them."""
        repeats = self.repetition_penalty not in (None, 1.0)
        return repeats or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1


class GenerateOptions(SamplingOptions, total=False):
    """The options of every generating call."""

    sampling: Annotated[
        SamplingParams, python_only("Sampling options in one object; options given one by one take precedence.")
    ]
    sampler: Annotated[
        SampleFunction | None,
        python_only(
            "Your own function that chooses each token: ``sampler(logits (1, vocab), tokens so far (n,), "
            "**sampler_options) -> id``, called once for each token, in order, with or without a draft. The logits "
            "come after penalties and grammars. Not with a temperature."
        ),
    ]
    sampler_options: Annotated[Mapping[str, Any] | None, python_only("Keyword arguments for ``sampler``.")]
    accept: Annotated[
        AcceptRule,
        Option(
            "How proposed tokens are accepted when sampling: compare gives the same text with any draft or none; "
            "rejection accepts more, but keeps only the distribution of the texts.",
            "compare",
            request=False,
        ),
    ]
    lookahead: Annotated[
        int | Literal["auto"] | None,
        Option(
            "Maximum number of tokens to propose per round: 0 for plain decoding, auto for as many as pay.",
            limits=LOOKAHEAD,
            usual="auto",
            more="In Python the default is what was given to ``load``.",
            metavar="auto|K",
            parse=auto_or_number,
            request=False,
        ),
    ]
    batch_size: Annotated[
        int | None,
        Option(
            "Maximum number of texts generated at a time; the others wait.",
            None,
            AT_LEAST_1,
            "32",
            commands=("batch",),
            request=False,
        ),
    ]
    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None,
        Option(
            "Variables for the model's chat template, as in '{\"enable_thinking\": false}'; needs chat messages. Which "
            "variables there are depends on the model.",
            more="A session takes them before its messages: ``lm.session(chat_template_kwargs=...)``.",
            metavar="JSON",
            parse=json_object,
        ),
    ]
    json_schema: Annotated[
        Any,
        Option(
            "The text must be JSON that matches this schema; '{}' allows any JSON. Not with another grammar option.",
            more="A dict, a JSON string, the ``Path`` of a file, a pydantic model or another type that pydantic knows.",
            metavar="FILE|TEXT",
            parse=schema_or_file,
            request=dict[str, Any] | bool | str,
        ),
    ]
    json_schema_mode: Annotated[
        Literal["strict", "checked"],
        Option(
            "strict: refuse a schema that can't be enforced while the text is generated; checked: enforce what can be, "
            "and then report how the finished text breaks the schema.",
            "strict",
        ),
    ]
    retries: Annotated[
        int,
        Option(
            "Generate a text again with the next seed, at most this many times, while it breaks its schema; for "
            "schemas in the mode checked and a temperature above 0.",
            0,
            NOT_NEGATIVE,
        ),
    ]
    additional_properties: Annotated[
        bool | None,
        Option(
            "Whether objects may have properties beside those that the schema lists, where it doesn't say.",
            usual="yes, but no for pydantic models and response formats",
            flags=("--additional-properties/--no-additional-properties",),
        ),
    ]
    compact_json: Annotated[
        bool, Option("Generate JSON without white space between its tokens, which takes fewer tokens.", False)
    ]
    regex: Annotated[
        str | None, Option("The whole text must match this regular expression (Rust's syntax).", metavar="PATTERN")
    ]
    grammar: Annotated[
        str | Path | None, file_or_text("The text must match the rule start of this grammar in Lark's syntax.")
    ]
    gbnf: Annotated[str | Path | None, file_or_text("The text must match this grammar in GBNF, llama.cpp's syntax.")]
    choice: Annotated[Sequence[str] | None, Option("The text must be one of the given strings.", metavar="TEXT")]
    constrain_from: Annotated[
        int | str | None,
        Option(
            "Let the grammar begin inside the prompt, which must match it from there: at the last occurrence of TEXT, "
            "or at character N (0 is the prompt's start, -5 is five characters before its end).",
            usual="after the prompt",
            more="A string is a text, an int a character.",
            metavar="TEXT|@N",
            parse=place_or_text,
        ),
    ]
    heal: Annotated[
        bool | None,
        Option(
            "Token healing: generate the last tokens of the prompt again, so that a token may span the prompt's end.",
            more="Off by default, but on for text that was appended to a session.",
        ),
    ]
    logits_processors: Annotated[
        Sequence[LogitsProcessor] | None,
        python_only(
            "Your own functions that change the logits before a token is chosen: ``processor(tokens so far (n,), "
            "logits (1, vocab)) -> logits``, or logits processors of transformers. They also run for proposed tokens, "
            "so their result must depend on their arguments alone."
        ),
    ]


# ---------------------------------------------------------------- what is made from them

SAMPLING, GENERATE = declared(SamplingOptions), declared(GenerateOptions)
# The options that set a grammar; only one of them may be given.
GRAMMARS = ("json_schema", "regex", "grammar", "gbnf", "choice")
OF_SCHEMAS = ("json_schema_mode", "retries", "additional_properties", "compact_json")  # they need a schema
CHECKED_WHERE_USED = {*GRAMMARS, "constrain_from", "logits_processors"}
# Up to about this many rows a step mostly reads weights; beyond, arithmetic dominates and more rows gain little.
BATCH_SIZE = 32
for _made, _table in ((SamplingParams, SamplingOptions), (GenerateOptions, GenerateOptions)):
    _made.__doc__ = f"{_made.__doc__}\n\n{documentation(_table)}"


def params_of(options: GenerateOptions) -> SamplingParams:
    """Return ``sampling`` with the fields that are given one by one.

    Raises TypeError for an unknown option and OvspecError for an invalid value.
    """
    check_names(options, GENERATE)
    for name in options.keys() - SAMPLING.keys() - CHECKED_WHERE_USED:
        check_option(name, options.get(name))
    given = {name: value for name, value in options.items() if name in SAMPLING}
    return replace(options.get("sampling") or SamplingParams(), **given)


def check_option(name: str, value: Any) -> None:
    """Raise OvspecError if ``value`` is invalid for an option of a generating call; None stands for the default."""
    if value is not None:
        check(name, value, *GENERATE[name])


def refuse_retries(options: GenerateOptions, what: str) -> None:
    """Raise OvspecError if ``options`` ask for retries, which ``what`` can't have."""
    if options.get("retries"):
        raise OvspecError(f"`retries` can't be combined with {what}.")


def refuse_variables(variables: Mapping[str, Any] | None) -> None:
    """Raise OvspecError for variables of a chat template if there are any, because the prompt isn't a chat."""
    if variables:
        raise OvspecError("`chat_template_kwargs` needs chat messages, and the prompt is a text or ids; leave it out.")


def refuse_in_session(options: GenerateOptions) -> None:
    """Raise OvspecError if ``options`` have one that comes too late in a session."""
    refuse_retries(options, "a session, which continues from its text")
    if options.get("chat_template_kwargs"):
        what = "the messages are in the text already; set `chat_template_kwargs` of the session before you append them"
        raise OvspecError(f"`chat_template_kwargs` can't be given when a session generates: {what}.")


def batch_size(options: GenerateOptions) -> int:
    """Return the batch size or its default; raises OvspecError for an invalid one."""
    size = options.get("batch_size")
    check_option("batch_size", size)
    return BATCH_SIZE if size is None else size


def constrains(options: GenerateOptions, params: SamplingParams) -> bool:
    """Return whether an option changes the logits or limits the tokens that may come next."""
    given = any(
        options.get(name) is not None for name in (*GRAMMARS, *OF_SCHEMAS, "constrain_from", "logits_processors")
    )
    return bool(given or options.get("heal") or params.logit_bias or params.min_tokens or params.penalizes)
