"""What generating commands print: text on stdout, everything else on stderr."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from ovspec.api.model import LanguageModel
from ovspec.api.session import TextStream
from ovspec.api.verify import record_as_json
from ovspec.base.interrupts import DelayedInterrupts
from ovspec.base.progress import show_step
from ovspec.engine.results import Piece, Result, answer_extras_json
from ovspec.params import Params


def generate(lm: LanguageModel, stream: TextStream, stats: str | None, as_json: bool) -> bool:
    """Print a text as it comes, and its statistics; return whether Ctrl-C ended it."""
    with show_step("generating") if as_json else contextlib.nullcontext():
        result, interrupted = run(stream, show=not as_json)
    click.echo(json.dumps(as_dict(lm, result), ensure_ascii=False) if as_json else "")
    show_stats(result, stats)
    return interrupted


def show_context(lm: LanguageModel, context: int) -> None:
    """Print the memory that the KV cache of the requested context takes."""
    click.echo(f"context: {context} tokens, about {lm.cache_bytes(context) / 1e6:.0f} MB of KV cache", err=True)


def samples(lm: LanguageModel, prompt: Any, params: Params, stats: str | None, as_json: bool) -> None:
    """Print whole texts for one prompt, if there are several each under a heading."""
    with show_step("generating"):
        results = lm.samples(prompt, sampling=params)
    several = len(results) > 1
    if as_json:
        found = [as_dict(lm, result) for result in results]
        click.echo(json.dumps({"samples": found} if several else found[0], ensure_ascii=False))
    for number, result in enumerate(results, 1):
        if several and not as_json:
            heading(f"sample {number}")
        if not as_json:
            click.echo(result.text)
        if several and stats:
            click.echo(f"sample {number}: ", nl=stats == "full", err=True)
        show_stats(result, stats)


def heading(text: str) -> None:
    """Print a heading that tells texts apart, on a pipe too."""
    click.secho(f"==> {text} <==", bold=True)


def run(stream: TextStream, show: bool) -> tuple[Result, bool]:
    """Run a stream to its end and return (result, whether Ctrl-C ended it); print the text if ``show``."""
    printed, interrupted = 0, False
    interrupts = DelayedInterrupts()  # so that no Ctrl-C comes between printing and counting
    try:
        try:
            for piece in waited_for(stream) if show else stream:
                if show:
                    interrupts.holding = True
                    click.echo(piece.text, nl=False)
                    printed += len(piece.text)
                    interrupts.holding = False
                    if interrupts.pressed:
                        raise KeyboardInterrupt
        except KeyboardInterrupt:
            interrupts.holding = interrupted = True
            stream.cancel()
        result = stream.result()
        if show:
            click.echo(result.text[printed:], nl=False)
    finally:
        interrupts.stop()
    return result, interrupted


def waited_for(stream: TextStream) -> Iterator[Piece]:
    """Yield the pieces of a stream, and say so while the first one takes long."""
    pieces = iter(stream)
    with show_step("reading the prompt"):
        first = next(pieces, None)
    if first:
        yield first
    yield from pieces


def as_dict(lm: LanguageModel, result: Result) -> dict[str, Any]:
    """Return what ``--json`` prints of a text."""
    rates = {name: getattr(result.stats, name) for name in ("acceptance_rate", "conditional_acceptance")}
    stats = {name: round(v, 4) if isinstance(v, float) else v for name, v in (asdict(result.stats) | rates).items()}
    found = {"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason}
    found |= answer_extras_json(result)
    if result.logprobs is not None:
        found["logprobs"] = [logprob.as_json(lm.tokenizer.token_text) for logprob in result.logprobs]
    if result.schema_errors is not None:
        found["schema_errors"] = result.schema_errors
    return found | {"stats": stats, "record": record_as_json(result)}


# ---------------------------------------------------------------- statistics


def show_stats(result: Result, level: str | None) -> None:
    """Print how a text breaks its schema, and its statistics, "short" or "full"; None for no statistics."""
    for error in result.schema_errors or ():
        click.echo(f"Warning: the text breaks its schema at {error}", err=True)
    if level:
        click.echo(full(result) if level == "full" else short(result), err=True)


def short(result: Result) -> str:
    """Return tokens, speed and acceptance in a line."""
    stats = result.stats
    cached = f" ({stats.cached_tokens} cached)" if stats.cached_tokens else ""
    prompt = f"prompt {stats.prompt_tokens} tokens{cached} in {stats.ttft_ms / 1e3:.2f} s"
    drafted = f"; {acceptance(result)}" if stats.proposed or stats.draft_engine else ""
    return f"{prompt}; text {stats.generated_tokens} tokens{speed(result)}{drafted}"


def speed(result: Result) -> str:
    return f" at {1e3 / result.stats.tpot_ms:.1f} tokens/s" if result.stats.tpot_ms else ""


def acceptance(result: Result) -> str:
    stats = result.stats
    if not stats.proposed:
        return "nothing proposed"
    return f"accepted {stats.accepted} of {stats.proposed} proposed ({100 * stats.accepted / stats.proposed:.0f} %)"


def full(result: Result) -> str:
    """Return all statistics, a line for each kind."""
    stats = result.stats
    ms = f", {stats.tpot_ms:.2f} ms each" if stats.tpot_ms else ""
    cached = f"{stats.cached_tokens} of them cached"
    if stats.cached_tokens and stats.arithmetic != "exact":
        cached += " (without exact arithmetic that may change bits)"
    lines = [
        f"prompt: {stats.prompt_tokens} tokens, {cached}; first token after {stats.ttft_ms:.0f} ms",
        f"text: {stats.generated_tokens} tokens{speed(result)}{ms}; ended by {result.finish_reason}",
        f"rounds: {stats.rounds}, {stats.tokens_per_round:.2f} tokens per round",
    ]
    if stats.proposed:
        by_drafter = ", ".join(f"{name} {c['accepted']} of {c['proposed']}" for name, c in stats.drafters.items())
        lines.append(f"speculation: {acceptance(result)}; by drafter: {by_drafter}")
        positions = " ".join(map(str, stats.accepted_by_position))
        conditional = f"{stats.conditional_acceptance or 0:.2f}, given that the proposed tokens before it were accepted"
        lines.append(f"  accepted by position in the proposal: {positions or 'none'}")
        lines.append(f"  conditional acceptance: {conditional}")
    if stats.forced:
        lines.append(f"grammar: {stats.forced} forced tokens")
    if stats.seed is not None:
        lines.append(f"seed: {stats.seed}")
    lines += [
        f"time: target {stats.target_ms:.0f} ms, draft {stats.draft_ms:.0f} ms, other {stats.other_ms:.0f} ms",
        f"device: {stats.device}; engine {stats.engine} ({stats.engine_reason}); rollback: {stats.rollback}",
        f"arithmetic: {stats.arithmetic}{f' ({stats.rule})' if stats.rule else ''}; profile: {stats.profile or 'none'}",
    ]
    return "\n".join(lines)
