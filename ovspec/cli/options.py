"""Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

PRECISIONS = ("f32", "bf16", "f16")
ENGINES = ("auto", "stateful", "paged")  # as engine.ENGINES, which would import openvino
KV_PRECISIONS = ("f32", "bf16", "f16", "u8")
GRAMMARS = ("json_schema", "regex", "grammar", "gbnf", "choice")  # as constraints.maker.GRAMMARS
JSON_BOOLEANS = ("true", "false")  # schemas, too
DRAFT_OF_THE_EXPORT = "the draft of the export"  # what a bare --draft stands for


def parse_properties(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    properties = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE, as in --property NUM_STREAMS=1.")
        properties[key.strip()] = text.strip()
    return properties


class LookaheadType(click.ParamType):
    """A number of tokens, or auto."""

    name = "auto|K"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto" or isinstance(value, int):
            return value
        if not str(value).isdigit():
            self.fail(f"{value!r} is neither auto nor a number of tokens.", param, ctx)
        return int(value)


def parse_logit_bias(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    biases = {}
    for value in values:
        token, equals, bias = value.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            equals = ""
        if not equals:
            raise click.BadParameter(f"{value!r} is not ID=VALUE, as in --logit-bias 50=-2.5.")
    return biases


def text_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What proposes, and when a text ends."""
    options = [
        click.option(
            "--draft",
            is_flag=False,
            flag_value=DRAFT_OF_THE_EXPORT,
            metavar="[DRAFT]",
            help="Speculate with the draft that was exported beside DIR, or with DRAFT: a folder, self (the target's "
            "own first layers), lookup (what followed the same words before), lookup,FOLDER or lookup,draft (both), "
            "or none.",
        ),
        click.option(
            "--lookahead",
            type=LookaheadType(),
            help="Tokens proposed a round; auto for as many as pay.  [default: auto]",
        ),
        click.option(
            "--lookup-corpus",
            multiple=True,
            type=click.Path(),
            metavar="FILE",
            help="A text for lookup; may be repeated.",
        ),
        click.option(
            "--accept",
            type=click.Choice(("compare", "rejection")),
            default="compare",
            show_default=True,
            help="How sampled text is held against the draft's: compare gives the same text with any draft or none.",
        ),
        click.option(
            "-n",
            "--max-tokens",
            type=click.IntRange(min=1),
            help="Tokens to generate.  [default: the model's, or 256]",
        ),
        click.option(
            "--min-tokens", type=click.IntRange(min=0), help="Nothing ends the text before so many, but a grammar."
        ),
        click.option("--stop", multiple=True, metavar="TEXT", help="End in front of this text; may be repeated."),
        click.option("--stop-id", multiple=True, type=int, metavar="ID", help="End at this token; may be repeated."),
        click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token."),
        click.option("--verify", is_flag=True, help="Compare the checksums of DIR with those of the export first."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def session_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What is kept from one call to the next."""
    options = [
        click.option(
            "--session",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Go on with the text in FILE, if there is one, and write it back at the end, with its KV cache.",
        ),
        click.option(
            "--context",
            type=click.IntRange(min=1),
            metavar="N",
            help="Tokens that the text may grow to; says what memory its KV cache takes.  [default: the model's]",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def constraint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What the text must be."""
    options = [
        click.option(
            "--json-schema", metavar="FILE|TEXT", help="The text must be JSON of this schema; '{}' for any JSON."
        ),
        click.option("--regex", metavar="PATTERN", help="The whole text must match."),
        click.option("--grammar", metavar="FILE", help="The text must follow a grammar in Lark's syntax."),
        click.option("--gbnf", metavar="FILE", help="The text must follow a grammar in llama.cpp's syntax."),
        click.option("--choice", multiple=True, metavar="TEXT", help="The text must be one of these; repeat it."),
        click.option(
            "--constrain-from",
            metavar="TEXT|@N",
            help="Where in the prompt the grammar begins: at the last TEXT, or at character N (@0 for all of it, @-5 "
            "for the last five).  [default: behind the prompt]",
        ),
        click.option("--heal", is_flag=True, help="Let the first token reach over the end of the prompt."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def given_constraints(values: dict[str, Any]) -> dict[str, Any]:
    """Those of the constraint options that were given, as keywords for ``generate``; takes them out of ``values``."""
    taken = {name: values.pop(name) for name in GRAMMARS}
    given = {name: value for name, value in taken.items() if value not in (None, ())}
    where = values.pop("constrain_from")
    if len(given) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in list(given)[:2])
        raise click.UsageError(f"{first} and {second} can't be combined; give one grammar that says both.")
    if where is not None and not given:
        raise click.UsageError("--constrain-from needs --json-schema, --regex, --grammar, --gbnf or --choice.")
    if given and values["ignore_eos"]:
        raise click.UsageError("--ignore-eos can't be combined with a grammar, which says where the text ends.")
    if "choice" in given:
        given["choice"] = list(given["choice"])
    for name in ("grammar", "gbnf"):
        if name in given:
            given[name] = Path(given[name])
    for name in given:
        if name != "choice" and not given[name].strip():
            raise click.UsageError(f"--{name.replace('_', '-')} is empty.")
    if "json_schema" in given and not given["json_schema"].lstrip().startswith(("{", *JSON_BOOLEANS)):
        given["json_schema"] = Path(given["json_schema"])
    if where is not None:
        given["constrain_from"] = int(where[1:]) if re.fullmatch(r"@-?[0-9]+", where) else where
    if values.pop("heal"):
        given["heal"] = True
    return given


def split_options(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the decorators of this module take, as keywords (for ``load``, for ``generate``).

    Raises:
        click.UsageError: options that exclude each other.
    """
    values = dict(values)
    draft, lookahead, accept = values.pop("draft"), values.pop("lookahead"), values.pop("accept")
    corpus = values.pop("lookup_corpus")
    constraints = given_constraints(values)
    if lookahead is not None and draft in (None, "none") and not constraints.keys() & {*GRAMMARS}:
        raise click.UsageError("--lookahead needs --draft, or a grammar, which proposes what it forces.")
    if values["draft_device"] and draft in (None, "none"):
        raise click.UsageError("--draft-device needs --draft.")
    if corpus and "lookup" not in str(draft).split(","):
        raise click.UsageError("--lookup-corpus needs --draft lookup, or a chain with it.")
    options = given_sampling(values)
    if accept == "rejection" and not options.get("temperature"):
        raise click.UsageError("--accept rejection needs a --temperature above 0.")
    options |= {name: values.pop(name) for name in ("max_tokens", "min_tokens", "ignore_eos")}
    options |= {"stop": list(values.pop("stop")), "stop_ids": list(values.pop("stop_id"))}
    options |= {"lookahead": lookahead, "accept": accept, **constraints}
    drafts: dict[str | None, Any] = {None: None, "none": None, DRAFT_OF_THE_EXPORT: True}
    return {"draft": drafts.get(draft, draft), "lookup_corpus": corpus, **values}, options


def is_draft(text: str) -> bool:
    """Whether each part of a chain is a name or a folder."""
    names = ("none", "lookup", "self", "draft")  # as drafting.choice.NAMES, which would import numpy
    return Path(text).is_dir() or all(part.strip() in names or Path(part.strip()).is_dir() for part in text.split(","))


def looks_like_path(text: str) -> bool:
    return not any(c.isspace() for c in text) and ("/" in text or "\\" in text)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How tokens are chosen; passed on as fields of ``SamplingParams``."""
    options = [
        click.option("-t", "--temperature", type=click.FloatRange(min=0), help="0 is greedy.  [default: 0]"),
        click.option("--top-k", type=click.IntRange(min=0), help="Only the K most likely tokens."),
        click.option("--top-p", type=float, help="Only the most likely tokens that together have this probability."),
        click.option("--min-p", type=float, help="Only tokens with this share of the most likely one's probability."),
        click.option("--typical-p", type=float, help="Only the most typical tokens with this probability together."),
        click.option(
            "--repetition-penalty", type=float, help="Divides logits of what the text has.  [default: model's]"
        ),
        click.option("--presence-penalty", type=float, help="Off the logits of tokens that were generated before."),
        click.option("--frequency-penalty", type=float, help="The same, once for each time."),
        click.option(
            "--logit-bias",
            multiple=True,
            metavar="ID=VALUE",
            callback=parse_logit_bias,
            help="Add to a token's logit; -inf bans it; may be repeated.",
        ),
        click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="The same text again.  [default: random]"),
        click.option("--samples", "n", type=click.IntRange(min=1), help="Texts to generate.  [default: 1]"),
        click.option("--logprobs", type=click.IntRange(min=0), help="With --json: log-probabilities, and the N best."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def given_sampling(values: dict[str, Any]) -> dict[str, Any]:
    """Those of the sampling options that were given; takes them out of ``values``."""
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty")
    names = (*names, "frequency_penalty", "logit_bias", "seed", "n", "logprobs")
    taken = {name: values.pop(name) for name in names}
    given = {name: value for name, value in taken.items() if value is not None and value != {}}
    drawing = [name for name in ("top_k", "top_p", "min_p", "typical_p") if name in given]
    if drawing and not given.get("temperature"):
        raise click.UsageError(f"--{drawing[0].replace('_', '-')} needs a --temperature above 0.")
    if given.get("n", 1) > 1 and not given.get("temperature"):
        raise click.UsageError("--samples needs a --temperature above 0: greedy texts are all the same.")
    return given


def runtime_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where and how models are compiled."""
    options = [
        click.option("--device", default="CPU", show_default=True, help="CPU, GPU, GPU.N, AUTO or AUTO:X,Y."),
        click.option("--draft-device", help="Device of the draft model.  [default: that of --device]"),
        click.option("--precision", type=click.Choice(PRECISIONS), help="Arithmetic.  [default: the device's own]"),
        click.option(
            "--kv-precision",
            type=click.Choice(KV_PRECISIONS),
            help="KV cache.  [default: as the arithmetic on the CPU]",
        ),
        click.option(
            "--engine",
            type=click.Choice(ENGINES),
            default="auto",
            show_default=True,
            help="What drives the model: OpenVINO's own KV cache (stateful), or ours in blocks (paged), "
            "which auto takes where it gives the same logits.",
        ),
        click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: OpenVINO's choice]"),
        click.option(
            "--property",
            "properties",
            multiple=True,
            metavar="KEY=VALUE",
            callback=parse_properties,
            help="OpenVINO property for the target and the draft; wins over the options above; may be repeated.",
        ),
        click.option(
            "--no-tune",
            "tune",
            flag_value=False,
            type=bool,
            default=None,
            help="Take OpenVINO's own settings, not those that 'ovspec tune' or the first load found fastest here.",
        ),
        click.option(
            "--cache-dir", type=click.Path(file_okay=False), help="Compiled models.  [default: the user's cache]"
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command
