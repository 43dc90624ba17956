"""``SamplingParams``: the options for choosing the next token and ending a text."""

import math
from collections.abc import Collection, Mapping

from ovspec.base.errors import OvspecError
from ovspec.params.limits import (
    ANY_NUMBER,
    FRACTION,
    LARGEST_NUMBER,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    TEMPERATURE,
    TEXT_COUNT,
    TOKEN_COUNT,
    NumberLimits,
)
from ovspec.params.option import collect_options, format_option_documentation, option, options_dataclass
from ovspec.params.values import check_value, parse_token_bias


@options_dataclass
class SamplingParams:
    """Sampling options in one immutable object, for the option ``sampling``; checked when it is made."""

    max_tokens: int | None = option(
        "Maximum number of tokens to generate; -1 to fill the context.",
        default=None,
        limits=TOKEN_COUNT,
        default_meaning="from the model's generation config, or 256",
        python_extra_help="Generation always stops at the end of the context. 0 only reads the prompt.",
        flags=("-n", "--max-tokens"),
        metavar="N",
        aliases=("max_completion_tokens", "n_predict"),
    )
    min_tokens: int | None = option(
        "Minimum number of tokens to generate; a grammar may still end the text earlier.",
        default=None,
        limits=NOT_NEGATIVE,
        default_meaning="from the model's generation config, or 0",
    )
    stop: str | Collection[str] = option(
        "Stop string: ends the text, and is left out of it.", default_factory=list, metavar="TEXT"
    )
    stop_ids: Collection[int] = option(
        "Stop token id: ends the text; the token itself adds no text.",
        default_factory=list,
        flags=("--stop-id",),
        metavar="ID",
        aliases=("stop_token_ids",),
    )
    min_indent: int = option(
        "Stop before the first line indented by fewer than this many spaces or tabs; 0 is off.",
        default=0,
        limits=NOT_NEGATIVE,
        metavar="N",
        aliases=("n_indent",),
    )
    ignore_eos: bool = option("Continue after an end-of-sequence (EOS) token.", default=False)
    temperature: float = option(
        "Sampling temperature: 0 is greedy decoding, 1 is the model's own distribution, higher is more random.",
        default=0.0,
        limits=TEMPERATURE,
        flags=("-t", "--temp", "--temperature"),
    )
    top_k: int = option(
        "Top-k sampling: keep only this many of the most likely tokens; 0 keeps all. Needs a temperature above 0.",
        default=0,
        limits=NumberLimits(0, description="0 (all) or more"),
        truncates=True,
    )
    top_p: float = option(
        "Nucleus sampling: keep only the most likely tokens, up to this total probability; 1 keeps all. Needs a "
        "temperature above 0.",
        default=1.0,
        limits=PROBABILITY,
        truncates=True,
    )
    min_p: float = option(
        "Min-p sampling: keep only tokens with at least this fraction of the top token's probability; 0 keeps all. "
        "Needs a temperature above 0.",
        default=0.0,
        limits=FRACTION,
        truncates=True,
    )
    typical_p: float = option(
        "Typical sampling (arXiv 2202.00666): like top-p, but keep the most typical tokens first; 1 keeps all. Needs "
        "a temperature above 0.",
        default=1.0,
        limits=PROBABILITY,
        truncates=True,
    )
    repetition_penalty: float | None = option(
        "Penalty for tokens already in the prompt or the text: their positive logits are divided by it, their "
        "negative logits multiplied by it. 1 is off.",
        default=None,
        limits=POSITIVE,
        default_meaning="from the model's generation config, or 1",
    )
    presence_penalty: float = option(
        "Subtracted from the logit of each token already generated; 0 is off.", default=0.0, limits=ANY_NUMBER
    )
    frequency_penalty: float = option(
        "Subtracted from a token's logit once per earlier occurrence in the generated text; 0 is off.",
        default=0.0,
        limits=ANY_NUMBER,
    )
    logit_bias: Mapping[int, float] = option(
        "Number to add to a token's logit, by token id; -inf bans the token.",
        default_factory=dict,
        metavar="ID=VALUE",
        parse=parse_token_bias,
    )
    seed: int | None = option(
        "Random seed. The same seed gives the same text, with or without a draft; with the acceptance rule "
        "rejection, only with the same draft and a fixed lookahead.",
        default=None,
        limits=NumberLimits(0, 2**63 - 1, "from 0 to 2**63 - 1"),
        default_meaning="random",
        python_extra_help="``Stats.seed`` reports the seed of a sampled text.",
    )
    n: int = option(
        "Number of texts per prompt. Greedy texts are identical.",
        default=1,
        limits=TEXT_COUNT,
        flags=("--samples",),
        commands=("generate", "batch"),
        aliases=("n_cmpl",),
    )
    logprobs: int | None = option(
        "Report the log-probability (natural log) of each token and of this many top alternatives, from the "
        "model's raw logits: before biases, penalties, grammars and temperature.",
        default=None,
        limits=NOT_NEGATIVE,
        commands=("generate", "batch"),
        request=False,
    )

    def __post_init__(self) -> None:
        """Check the values; raises OvspecError for a wrong type or a value out of range."""
        for name, declaration in SAMPLING_OPTIONS.items():
            if (value := getattr(self, name)) is not declaration.default:
                check_value(value, declaration)
        if self.conflict_message:
            raise OvspecError(self.conflict_message)

    @property
    def conflict_message(self) -> str | None:
        """The error message for conflicting or invalid values beyond the declared limits; None if all are valid."""
        if not all(bias == -math.inf or abs(bias) <= LARGEST_NUMBER for bias in self.logit_bias.values()):
            return f"`logit_bias` must be numbers up to {LARGEST_NUMBER}, or -inf to ban a token."
        if not all(self.stop_strings):
            return "`stop` has an empty string; leave it out."
        if self.min_tokens and self.min_tokens > self.token_limit:
            return f"`min_tokens` is {self.min_tokens}, which is more than `max_tokens`, {self.max_tokens}."
        return None

    @property
    def token_limit(self) -> float:
        """The requested maximum number of tokens; inf if there is none."""
        if self.max_tokens is None or self.max_tokens == -1:
            return math.inf
        return self.max_tokens

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def truncating_options(self) -> list[str]:
        """The given options that limit sampling to likely tokens."""
        return [name for name in TRUNCATING_OPTIONS if getattr(self, name) != SAMPLING_OPTIONS[name].default]

    @property
    def penalizes(self) -> bool:
        """Whether a penalty makes the logits depend on earlier tokens."""
        penalizes_repetition = self.repetition_penalty not in (None, 1.0)
        return penalizes_repetition or self.presence_penalty != 0 or self.frequency_penalty != 0


SAMPLING_OPTIONS = collect_options(SamplingParams)
TRUNCATING_OPTIONS = tuple(name for name, declaration in SAMPLING_OPTIONS.items() if declaration.truncates)
DISTRIBUTION_OPTIONS = ("temperature", *TRUNCATING_OPTIONS)  # they shape the distribution of the next token
# Their defaults in a chat and on a server, in words.
LONG_DEFAULT_TEXT = "from the model's generation config, or as many as the context holds"  # of max_tokens
RECOMMENDED_DEFAULT_TEXTS = {
    name: f"from the model's generation config, or {SAMPLING_OPTIONS[name].default_text}"
    for name in DISTRIBUTION_OPTIONS
}
# Their defaults, and that of ``max_tokens``, in a request.
REQUEST_DEFAULT_TEXTS = {"max_tokens": LONG_DEFAULT_TEXT, **RECOMMENDED_DEFAULT_TEXTS}

SamplingParams.__doc__ = f"{SamplingParams.__doc__}\n\n{format_option_documentation(SAMPLING_OPTIONS)}"
