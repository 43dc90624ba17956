"""The options of generating calls."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from ovspec.constraints.processors import LogitsProcessor
from ovspec.errors import OvspecError
from ovspec.sampler import AcceptRule, SampleFunction
from ovspec.sampling import SamplingParams


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
