"""Every option, declared once: Python's keywords, the command line and the batch file are made from these tables.

A new option is one entry. One of ``SamplingOptions`` becomes a field of ``SamplingParams``, too.
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
    """A file on the command line, a text in a request, either in Python."""
    return Option(help, more="A text or the ``Path`` of a file.", metavar="FILE", parse=Path, request=str)


class SamplingOptions(TypedDict, total=False):
    """What a text depends on, besides prompt and model."""

    max_tokens: Annotated[
        int | None,
        Option(
            "Maximum number of tokens to generate.",
            limits=AT_LEAST_1,
            usual="the model's, or 256",
            more="More than the context holds is an error.",
            flags=("-n", "--max-tokens"),
            aliases=("max_completion_tokens",),
        ),
    ]
    min_tokens: Annotated[
        int | None, Option("Minimum number of tokens; a grammar may end the text earlier.", limits=NOT_NEGATIVE)
    ]
    stop: Annotated[str | Collection[str], Option("End the text before this string.", list, metavar="TEXT")]
    stop_ids: Annotated[
        Collection[int],
        Option("End the text at this token.", list, flags=("--stop-id",), metavar="ID", aliases=("stop_token_ids",)),
    ]
    ignore_eos: Annotated[bool, Option("Go on after an end-of-sequence token.", False)]
    temperature: Annotated[
        float,
        Option(
            "Sampling temperature: 0 is greedy, 1 the model's own.", 0.0, GREEDY_OR_MORE, flags=("-t", "--temperature")
        ),
    ]
    top_k: Annotated[
        int, Option("Sample from the K most likely tokens; 0 for all.", 0, Limits(0, words="0 (all) or more"))
    ]
    top_p: Annotated[
        float, Option("Sample from the most likely tokens that together have this probability.", 1.0, PROBABILITY)
    ]
    min_p: Annotated[
        float,
        Option("Sample from tokens with at least this share of the highest probability.", 0.0, SHARE),
    ]
    typical_p: Annotated[float, Option("As top_p with the most typical tokens (arXiv 2202.00666).", 1.0, PROBABILITY)]
    repetition_penalty: Annotated[
        float | None,
        Option("Divide positive, multiply negative logits of earlier tokens.", None, POSITIVE, "the model's, or 1"),
    ]
    presence_penalty: Annotated[float, Option("Subtract from the logits of generated tokens.", 0.0, FINITE)]
    frequency_penalty: Annotated[float, Option("Subtract from a generated token's logit for each time.", 0.0, FINITE)]
    logit_bias: Annotated[
        Mapping[int, float],
        Option("Add to a token's logit; -inf bans the token.", dict, metavar="ID=VALUE", parse=token_bias),
    ]
    seed: Annotated[
        int | None,
        Option(
            "Random seed: the same seed gives the same text, with any draft or none.",
            limits=Limits(0, 2**63 - 1, "from 0 to 2**63 - 1"),
            usual="random",
            more="``Stats.seed`` tells a random one.",
        ),
    ]
    n: Annotated[int, Option("Number of texts to generate for each prompt.", 1, AT_LEAST_1, flags=("--samples",))]
    logprobs: Annotated[
        int | None,
        Option(
            "The model's own log-probabilities of each token and of the N likeliest, before temperature and penalties.",
            limits=NOT_NEGATIVE,
            request=False,
        ),
    ]


def _fields(table: Any) -> Any:
    """A frozen dataclass with a field for each entry of a table."""
    entries = []
    for name, (kind, option) in declared(table).items():
        made = callable(option.default)
        default = field(default_factory=option.default) if made else field(default=option.default)
        entries.append((name, kind, default))
    return make_dataclass("Fields", entries, frozen=True)


_SamplingFields: Any = _fields(SamplingOptions)


@dataclass(frozen=True)
class SamplingParams(_SamplingFields):
    """What a text depends on, besides prompt and model."""

    if TYPE_CHECKING:

        def __init__(self, **fields: Unpack[SamplingOptions]) -> None: ...

    def __post_init__(self) -> None:
        """Raises OvspecError where a value is of a wrong type or out of range."""
        for name, (kind, option) in SAMPLING.items():
            if (value := getattr(self, name)) is not option.default:
                check(name, value, kind, option)
        if not all(bias == -math.inf or abs(bias) <= LARGEST for bias in self.logit_bias.values()):
            raise OvspecError(f"logit_bias must be numbers up to {LARGEST}, or -inf to ban a token.")
        if not all(self.stop_strings):
            raise OvspecError("A stop string is empty; leave it out.")
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise OvspecError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}.")

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on the tokens before them."""
        repeats = self.repetition_penalty not in (None, 1.0)
        return repeats or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1


class GenerateOptions(SamplingOptions, total=False):
    """What every generating call takes."""

    sampling: Annotated[
        SamplingParams, python_only("All ``SamplingParams`` in one; options given one by one win over it.")
    ]
    sampler: Annotated[
        SampleFunction | None,
        python_only(
            "Your own function that chooses each token: ``sampler(logits (1, vocab), tokens so far (n,), "
            "**sampler_options) -> id``, called once for each token, in order, with or without a draft."
        ),
    ]
    sampler_options: Annotated[Mapping[str, Any] | None, python_only("Keywords for the sampler.")]
    accept: Annotated[
        AcceptRule,
        Option(
            "How sampled tokens are compared with proposed ones: compare gives the same text with any draft or none, "
            "rejection accepts more.",
            "compare",
            request=False,
        ),
    ]
    lookahead: Annotated[
        int | Literal["auto"] | None,
        Option(
            "Tokens to propose each round, 0 for plain decoding; auto for as many as pay.",
            limits=LOOKAHEAD,
            usual="auto",
            metavar="auto|K",
            parse=auto_or_number,
            request=False,
        ),
    ]
    batch_size: Annotated[
        int | None,
        Option(
            "Texts to generate at a time; the others wait.", None, AT_LEAST_1, "32", commands=("batch",), request=False
        ),
    ]
    json_schema: Annotated[
        Any,
        Option(
            "The text must be JSON of this schema; '{}' for any JSON.",
            more="A dict, a text, the ``Path`` of a file or a pydantic model.",
            metavar="FILE|TEXT",
            parse=schema_or_file,
            request=dict[str, Any] | bool | str,
        ),
    ]
    regex: Annotated[str | None, Option("The whole text must match this regular expression.", metavar="PATTERN")]
    grammar: Annotated[str | Path | None, file_or_text("The text must follow this grammar in Lark's syntax.")]
    gbnf: Annotated[str | Path | None, file_or_text("The text must follow this grammar in llama.cpp's syntax.")]
    choice: Annotated[Sequence[str] | None, Option("The text must be one of these.", metavar="TEXT")]
    constrain_from: Annotated[
        int | str | None,
        Option(
            "Where in the prompt the grammar begins: at the last TEXT, or at character N (@0: at its start, @-5: five "
            "from its end).",
            usual="after the prompt",
            more="In Python, a number without the @.",
            metavar="TEXT|@N",
            parse=place_or_text,
        ),
    ]
    heal: Annotated[
        bool | None,
        Option(
            "Let the first token begin inside the prompt: its last tokens are generated anew.",
            more="Sessions do so for appended text unless told otherwise.",
        ),
    ]
    logits_processors: Annotated[
        Sequence[LogitsProcessor] | None,
        python_only(
            "Your own functions that change the logits of each token: ``processor(tokens so far (n,), "
            "logits (1, vocab)) -> logits``, called for guesses, too; they must depend on their arguments alone."
        ),
    ]


# ---------------------------------------------------------------- what is made from them

SAMPLING, GENERATE = declared(SamplingOptions), declared(GenerateOptions)
# Options of which each is a grammar.
GRAMMARS = ("json_schema", "regex", "grammar", "gbnf", "choice")
# A step is mostly reading weights; from about here on it is arithmetic, and more rows gain little.
BATCH_SIZE = 32
for _made, _table in ((SamplingParams, SamplingOptions), (GenerateOptions, GenerateOptions)):
    _made.__doc__ = f"{_made.__doc__}\n\n{documentation(_table)}"


def params_of(options: GenerateOptions) -> SamplingParams:
    """``sampling`` with the fields given one by one; raises TypeError (no such option) or OvspecError (a value)."""
    check_names(options, GENERATE)
    for name in options.keys() - SAMPLING.keys():
        kind, option = GENERATE[name]
        if option.limits or choices_of(kind):  # the others are checked where they are used
            check_option(name, options.get(name))
    given = {name: value for name, value in options.items() if name in SAMPLING}
    return replace(options.get("sampling") or SamplingParams(), **given)


def check_option(name: str, value: Any) -> None:
    """Raises OvspecError where an option of a generating call can't be ``value``; None stands for the default."""
    if value is not None:
        check(name, value, *GENERATE[name])


def batch_size(options: GenerateOptions) -> int:
    """Raises OvspecError unless it is a number of texts."""
    size = options.get("batch_size")
    check_option("batch_size", size)
    return BATCH_SIZE if size is None else size


def constrains(options: GenerateOptions, params: SamplingParams) -> bool:
    """Whether anything is asked for that changes or limits what may come next."""
    given = any(options.get(name) is not None for name in (*GRAMMARS, "constrain_from", "logits_processors"))
    return bool(given or options.get("heal") or params.logit_bias or params.min_tokens or params.penalizes)
