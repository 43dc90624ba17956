"""Declares each option once. Python's keywords, the command line and the batch file are made from these tables.

To add an option, add one entry. An entry of ``SamplingOptions`` also becomes a field of ``SamplingParams``.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

from ovspec.errors import OvspecError
from ovspec.options.option import LARGEST, Limits, Option, check, check_names, choices_of, declared, documentation
from ovspec.options.reading import auto_or_number, place_or_text, schema_or_file, token_bias

AcceptRule = Literal["compare", "rejection"]
# (logits (1, vocab) float32, all tokens so far (n,) int64, **keywords) -> token id
SampleFunction = Callable[..., Any]
# (all tokens so far (n,) int64, logits (1, vocab) float32) -> logits of the same shape
LogitsProcessor = Callable[[Any, Any], Any]

AT_LEAST_1 = Limits(1, words="at least 1")
TEXTS = Limits(1, 10_000, "at least 1 and at most 10,000")
NOT_NEGATIVE = Limits(0, words="0 or more")
PROBABILITY = Limits(0, 1, "above 0 and at most 1", above=True)
LOOKAHEAD = Limits(0, words="0 or more, or auto")
SHARE = Limits(0, 1, "from 0 to 1")
FINITE = Limits()
GREEDY_OR_MORE = Limits(0, words="0 (greedy) or more")
POSITIVE = Limits(0, words="above 0", above=True)


def python_only(help: str) -> Option:
    return Option(help, flags=(), request=False)


def file_or_text(help: str) -> Option:
    """Return an option that is a file on the command line, a string in a request, and either of them in Python."""
    return Option(help, more="A string, or the ``Path`` of a file.", metavar="FILE", parse=Path, request=str)


class SamplingOptions(TypedDict, total=False):
    """The options that decide which text a model generates for a prompt."""

    max_tokens: Annotated[
        int | None,
        Option(
            "Maximum number of tokens to generate.",
            limits=AT_LEAST_1,
            usual="from the model's generation config, or 256",
            more="It is an error if prompt and this many tokens exceed the context; the default is shortened to fit.",
            flags=("-n", "--max-tokens"),
            aliases=("max_completion_tokens",),
        ),
    ]
    min_tokens: Annotated[
        int | None,
        Option(
            "Minimum number of tokens to generate; a grammar may end the text earlier.",
            limits=NOT_NEGATIVE,
            usual="from the model's generation config, or 0",
        ),
    ]
    stop: Annotated[
        str | Collection[str], Option("End the text at this string, which is left out of it.", list, metavar="TEXT")
    ]
    stop_ids: Annotated[
        Collection[int],
        Option(
            "End the text at this token id; the token adds no text.",
            list,
            flags=("--stop-id",),
            metavar="ID",
            aliases=("stop_token_ids",),
        ),
    ]
    ignore_eos: Annotated[bool, Option("Continue after an end-of-sequence token.", False)]
    temperature: Annotated[
        float,
        Option(
            "Sampling temperature: 0 always takes the most likely token (greedy), 1 samples from the model's own "
            "distribution, and higher values make unlikely tokens more frequent.",
            0.0,
            GREEDY_OR_MORE,
            flags=("-t", "--temperature"),
        ),
    ]
    top_k: Annotated[
        int,
        Option(
            "Sample only from the K most likely tokens; 0 for all. Needs a temperature.",
            0,
            Limits(0, words="0 (all) or more"),
        ),
    ]
    top_p: Annotated[
        float,
        Option(
            "Sample only from the most likely tokens that add up to this probability; 1 for all. Needs a temperature.",
            1.0,
            PROBABILITY,
        ),
    ]
    min_p: Annotated[
        float,
        Option(
            "Sample only from tokens at least this share as likely as the top one; 0 for all. Needs a temperature.",
            0.0,
            SHARE,
        ),
    ]
    typical_p: Annotated[
        float,
        Option(
            "Like top-p, but over the most typical tokens (arXiv 2202.00666); 1 for all. Needs a temperature.",
            1.0,
            PROBABILITY,
        ),
    ]
    repetition_penalty: Annotated[
        float | None,
        Option(
            "Divide positive logits of tokens in the prompt and the text by this, and multiply negative ones: 1 is "
            "off, higher values discourage repetition.",
            None,
            POSITIVE,
            "from the model's generation config, or 1",
        ),
    ]
    presence_penalty: Annotated[
        float, Option("Subtract this from the logit of each token generated so far; 0 is off.", 0.0, FINITE)
    ]
    frequency_penalty: Annotated[
        float,
        Option("Subtract this from a token's logit once for each time it was generated; 0 is off.", 0.0, FINITE),
    ]
    logit_bias: Annotated[
        Mapping[int, float],
        Option("Add VALUE to the logit of token ID; -inf bans it.", dict, metavar="ID=VALUE", parse=token_bias),
    ]
    seed: Annotated[
        int | None,
        Option(
            "Random seed: the same seed gives the same text, with any draft or none. With the accept rule rejection, "
            "only with the same draft and a fixed lookahead.",
            limits=Limits(0, 2**63 - 1, "from 0 to 2**63 - 1"),
            usual="random",
            more="``Stats.seed`` reports the seed of a sampled text.",
        ),
    ]
    n: Annotated[
        int,
        Option("Number of texts for each prompt; above 1 needs a temperature.", 1, TEXTS, flags=("--samples",)),
    ]
    logprobs: Annotated[
        int | None,
        Option(
            "Report the natural log-probability of each token and of this many of the most likely ones, from the "
            "model's own logits: before bias, penalties, grammars and temperature.",
            limits=NOT_NEGATIVE,
            request=False,
        ),
    ]


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
            raise OvspecError(f"logit_bias must be numbers up to {LARGEST}, or -inf to ban a token.")
        if not all(self.stop_strings):
            raise OvspecError("A stop string is empty; leave it out.")
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise OvspecError(f"min_tokens is {self.min_tokens}, which is more than max_tokens, {self.max_tokens}.")

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
    json_schema: Annotated[
        Any,
        Option(
            "The text must be JSON that matches this schema; '{}' allows any JSON. Not with another grammar option.",
            more="A dict, a JSON string, the ``Path`` of a file or a pydantic model.",
            metavar="FILE|TEXT",
            parse=schema_or_file,
            request=dict[str, Any] | bool | str,
        ),
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
            "or at character N (@0 is the prompt's start, @-5 five characters before its end).",
            usual="after the prompt",
            more="In Python, give the character as an int, without the @.",
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
            "logits (1, vocab)) -> logits``. They also run for proposed tokens, so their result must depend on their "
            "arguments alone."
        ),
    ]


# ---------------------------------------------------------------- what is made from them

SAMPLING, GENERATE = declared(SamplingOptions), declared(GenerateOptions)
# The options that set a grammar; only one of them may be given.
GRAMMARS = ("json_schema", "regex", "grammar", "gbnf", "choice")
# Up to about this many rows a step mostly reads weights; beyond, arithmetic dominates and more rows gain little.
BATCH_SIZE = 32
for _made, _table in ((SamplingParams, SamplingOptions), (GenerateOptions, GenerateOptions)):
    _made.__doc__ = f"{_made.__doc__}\n\n{documentation(_table)}"


def params_of(options: GenerateOptions) -> SamplingParams:
    """Return ``sampling`` with the fields that are given one by one.

    Raises TypeError for an unknown option and OvspecError for an invalid value.
    """
    check_names(options, GENERATE)
    for name in options.keys() - SAMPLING.keys():
        kind, option = GENERATE[name]
        if option.limits or choices_of(kind):  # the others are checked where they are used
            check_option(name, options.get(name))
    given = {name: value for name, value in options.items() if name in SAMPLING}
    return replace(options.get("sampling") or SamplingParams(), **given)


def check_option(name: str, value: Any) -> None:
    """Raise OvspecError if ``value`` is invalid for an option of a generating call; None stands for the default."""
    if value is not None:
        check(name, value, *GENERATE[name])


def batch_size(options: GenerateOptions) -> int:
    """Return the batch size or its default; raises OvspecError for an invalid one."""
    size = options.get("batch_size")
    check_option("batch_size", size)
    return BATCH_SIZE if size is None else size


def constrains(options: GenerateOptions, params: SamplingParams) -> bool:
    """Return whether an option changes the logits or limits the tokens that may come next."""
    given = any(options.get(name) is not None for name in (*GRAMMARS, "constrain_from", "logits_processors"))
    return bool(given or options.get("heal") or params.logit_bias or params.min_tokens or params.penalizes)
