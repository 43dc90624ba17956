"""The options of generating calls."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from ovspec.errors import OvspecError

AcceptRule = Literal["compare", "rejection"]
ACCEPT_RULES = get_args(AcceptRule)
# (logits (1, vocab) float32, all tokens so far (n,) int64, **keywords) -> token id
SampleFunction = Callable[..., Any]
# (all tokens so far (n,) int64, logits (1, vocab) float32) -> logits of the same shape
LogitsProcessor = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class SamplingParams:
    """What a text depends on, besides prompt and model.

    max_tokens: tokens to generate at most; by default the generation config's ``max_new_tokens`` or 256, and never
        past the model's context. Asking for more than fits is an error.
    min_tokens: before so many tokens, nothing ends the text.
    stop: one string or several; the text ends in front of the first that appears.
    stop_ids: ids that end the text, as an end-of-sequence token does.
    ignore_eos: go on after an end-of-sequence token.
    temperature: 0 is greedy; 1 the model's own distribution.
    top_k: only the so many most likely tokens; 0 for all.
    top_p: only the most likely tokens that together have this probability.
    min_p: only tokens with at least this share of the most likely one's probability.
    typical_p: only the most typical tokens that together have this probability (arXiv 2202.00666).
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or text; by default the
        generation config's, or 1.
    presence_penalty: taken off the logits of tokens that the generated text has.
    frequency_penalty: taken off them once for each time.
    logit_bias: token id -> added to its logit; -inf bans it.
    seed: the same seed gives the same text, with any draft or none, alone or in a batch; by default a random one,
        which ``Stats.seed`` tells.
    n: texts to generate for each prompt.
    logprobs: for each token its log-probability, and those of the so many most likely, in the model's own
        distribution, before anything above.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] = field(default_factory=list)
    stop_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raises OvspecError where a value is out of range."""
        rules = {
            "max_tokens": (self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            "min_tokens": (self.min_tokens is None or self.min_tokens >= 0, "0 or more"),
            "temperature": (0 <= self.temperature < math.inf, "0 (greedy) or more"),
            "top_k": (self.top_k >= 0, "0 (all) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "typical_p": (0 < self.typical_p <= 1, "above 0 and at most 1"),
            "repetition_penalty": (
                self.repetition_penalty is None or 0 < self.repetition_penalty < math.inf,
                "above 0",
            ),
            "presence_penalty": (math.isfinite(self.presence_penalty), "a finite number"),
            "frequency_penalty": (math.isfinite(self.frequency_penalty), "a finite number"),
            "seed": (self.seed is None or 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
            "n": (self.n >= 1, "at least 1"),
            "logprobs": (self.logprobs is None or self.logprobs >= 0, "0 or more"),
        }
        for name, (right, range_) in rules.items():
            if not right:
                raise OvspecError(f"{name} is {getattr(self, name)}; it must be {range_}.")
        if any(math.isnan(bias) or bias == math.inf for bias in self.logit_bias.values()):
            raise OvspecError("logit_bias must be numbers, or -inf to ban a token.")
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


class GenerateOptions(TypedDict, total=False):
    """What every generating call takes: the fields of ``SamplingParams``, which win over ``sampling``, and these.

    sampling: all of those in one.
    sampler: a function of your own that chooses each token, ``sampler(logits (1, vocab), tokens so far (n,), **options)
        -> id``; it is called once for each token, in order, with or without a draft.
    sampler_options: keywords for it.
    accept: how sampled text is held against what is proposed: "compare" for the same text with any draft or none,
        "rejection" for one that depends on the draft, not its distribution, and accepts somewhat more.
    lookahead: tokens proposed each round, 0 for plain decoding, "auto" for as many as pay; by default the model's.
    batch_size: texts generated at a time where there are several, 32 by default; the others wait for a place.
    json_schema: the text must be JSON of this schema, given as a dict, as a text, as the ``Path`` of a file or as a
        pydantic model.
    regex: the whole text must match.
    grammar: the text must follow this grammar in Lark's syntax, a text or the ``Path`` of a file.
    gbnf: the same in llama.cpp's syntax.
    choice: the text must be one of these.
    constrain_from: where in the prompt the grammar begins, if not behind it: a number of characters, negative from
        its end, or a text, where that stands last.
    heal: take the last tokens of the prompt back and say their text anew, so that a token may reach over its end; off
        by default, but on in sessions for what was appended.
    logits_processors: functions of your own that change the logits of each token, ``processor(tokens so far (n,),
        logits (1, vocab)) -> logits``; they are called for guesses, too, and must depend on their arguments alone.
    """

    sampling: SamplingParams
    sampler: SampleFunction | None
    sampler_options: Mapping[str, Any] | None
    accept: AcceptRule
    lookahead: int | Literal["auto"] | None
    batch_size: int | None
    json_schema: Any
    regex: str | None
    grammar: str | Path | None
    gbnf: str | Path | None
    choice: Sequence[str] | None
    constrain_from: int | str | None
    heal: bool | None
    logits_processors: Sequence[LogitsProcessor] | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | list[str]
    stop_ids: list[int]
    ignore_eos: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    n: int
    logprobs: int | None


# A step is mostly reading weights; from about here on it is arithmetic, and more rows gain little.
BATCH_SIZE = 32
PARAMS = {each.name for each in fields(SamplingParams)}


def params_of(options: GenerateOptions) -> SamplingParams:
    """``sampling`` with the fields that are given one by one.

    Raises:
        TypeError: an option that there isn't.
        OvspecError: a value out of range.
    """
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        name, known = sorted(unknown)[0], GenerateOptions.__annotations__
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        raise TypeError(f"unknown option {name!r}; {hint}")
    given: dict[str, Any] = {name: value for name, value in options.items() if name in PARAMS}
    return replace(options.get("sampling") or SamplingParams(), **given)


def check_lookahead(lookahead: Any) -> None:
    """Raises OvspecError unless it is a number of tokens, None or "auto"."""
    if lookahead is None or lookahead == "auto" or (isinstance(lookahead, int) and lookahead >= 0):
        return
    raise OvspecError(f"lookahead is {lookahead}; it must be 0 or more, or auto.")


def batch_size(options: GenerateOptions) -> int:
    """Raises OvspecError unless it is a number of texts."""
    size = options.get("batch_size")
    if size is None:
        return BATCH_SIZE
    if not isinstance(size, int) or size < 1:
        raise OvspecError(f"batch_size is {size}; it must be at least 1.")
    return size


# Options that change or limit what may come next, besides ``heal`` and those of ``SamplingParams``.
CONSTRAINTS = ("json_schema", "regex", "grammar", "gbnf", "choice", "constrain_from", "logits_processors")


def constrains(options: GenerateOptions, params: SamplingParams) -> bool:
    """Whether anything is asked for that changes or limits what may come next."""
    given = any(options.get(name) is not None for name in CONSTRAINTS) or options.get("heal")
    return bool(given or params.logit_bias or params.min_tokens or params.penalizes)
