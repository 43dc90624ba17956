"""The output of generating commands: text on stdout, everything else on stderr."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict

import click

from ovspec.api.model import LanguageModel
from ovspec.api.session import TextStream
from ovspec.api.verify import record_as_json
from ovspec.base.interrupts import DelayedInterrupts
from ovspec.base.json_types import JsonObject
from ovspec.base.progress import show_step
from ovspec.engine.prompts import Prompt
from ovspec.engine.results import Piece, Result, Stats, answer_extras_json
from ovspec.params import Params


def print_stream(lm: LanguageModel, stream: TextStream, stats: str | None, as_json: bool) -> bool:
    """Print a text as it is generated, and its statistics; return whether Ctrl-C ended it."""
    result, interrupted = run_stream(stream, print_text=not as_json)
    if as_json:
        click.echo(json.dumps(result_as_json(lm, result), ensure_ascii=False))
    else:
        click.echo()
    print_stats(result, stats)
    return interrupted


def print_context_memory(lm: LanguageModel, context: int) -> None:
    """Print the size of the KV cache for the requested context."""
    click.echo(f"context: {context} tokens, about {lm.cache_bytes(context) / 1e6:.0f} MB of KV cache", err=True)


def print_samples(lm: LanguageModel, prompt: Prompt, params: Params, stats: str | None, as_json: bool) -> None:
    """Print the texts for a prompt, under headings if there are several."""
    with show_step("generating"):
        results = lm.samples(prompt, sampling=params)
    has_several = len(results) > 1
    if as_json:
        samples_json = {"samples": [result_as_json(lm, result) for result in results]}
        if not has_several:
            [samples_json] = samples_json["samples"]
        click.echo(json.dumps(samples_json, ensure_ascii=False))
    for sample_number, result in enumerate(results, 1):
        if has_several and not as_json:
            print_heading(f"sample {sample_number}")
        if not as_json:
            click.echo(result.text)
        if has_several and stats:
            click.echo(f"sample {sample_number}: ", nl=stats == "full", err=True)
        print_stats(result, stats)


def print_heading(text: str) -> None:
    """Print a heading between texts, on a pipe too."""
    click.secho(f"==> {text} <==", bold=True)


def run_stream(stream: TextStream, print_text: bool) -> tuple[Result, bool]:
    """Run a stream to its end and return (result, whether Ctrl-C ended it); print the text if ``print_text``."""
    printed_count = 0  # characters
    interrupted = False
    interrupts = DelayedInterrupts()  # no Ctrl-C may come between printing and counting
    try:
        try:
            for piece in iterate_with_progress(stream, print_text):
                if print_text:
                    interrupts.delaying = True
                    click.echo(piece.text, nl=False)
                    printed_count += len(piece.text)
                    interrupts.delaying = False
                    if interrupts.ctrl_c_pressed:
                        raise KeyboardInterrupt
        except KeyboardInterrupt:
            interrupts.delaying = interrupted = True
            stream.cancel()
        result = stream.result()
        if print_text:
            click.echo(result.text[printed_count:], nl=False)
    finally:
        interrupts.restore_handler()
    return result, interrupted


def iterate_with_progress(stream: TextStream, print_text: bool) -> Iterator[Piece]:
    """Yield the pieces of a stream; show a progress line until the first text is printed."""
    pieces = iter(stream)
    with show_step("reading the prompt" if print_text else "generating"):
        unprinted_pieces = list(itertools.islice(pieces, 1 if print_text else None))
    yield from unprinted_pieces
    yield from pieces


def result_as_json(lm: LanguageModel, result: Result) -> JsonObject:
    """Return a text with its statistics, for ``--json``."""
    stats: JsonObject = asdict(result.stats)
    for rate_name in ("acceptance_rate", "conditional_acceptance"):
        stats[rate_name] = getattr(result.stats, rate_name)
    for stat_name, value in stats.items():
        if isinstance(value, float):
            stats[stat_name] = round(value, 4)
    result_json: JsonObject = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
    }
    result_json |= answer_extras_json(result)
    if result.logprobs is not None:
        result_json["logprobs"] = [logprob.as_json(lm.tokenizer.token_text) for logprob in result.logprobs]
    if result.schema_errors is not None:
        result_json["schema_errors"] = result.schema_errors
    return result_json | {"stats": stats, "record": record_as_json(result)}


# ---------------------------------------------------------------- statistics


def print_stats(result: Result, level: str | None) -> None:
    """Print a text's schema violations and its statistics, "short" or "full"; None for no statistics."""
    for error in result.schema_errors or ():
        click.echo(f"Warning: the text breaks its schema at {error}", err=True)
    if level == "full":
        click.echo(describe_stats(result), err=True)
    elif level:
        click.echo(summarize_stats(result), err=True)


def summarize_stats(result: Result) -> str:
    """Return tokens, speed and acceptance rate in a line."""
    stats = result.stats
    summary = f"prompt {stats.prompt_tokens} tokens"
    if stats.cached_tokens:
        summary += f" ({stats.cached_tokens} cached)"
    summary += f" in {stats.ttft_ms / 1e3:.2f} s; text {stats.generated_tokens} tokens{describe_speed(stats)}"
    if stats.proposed or stats.draft_engine:
        summary += f"; {describe_acceptance(result)}"
    return summary


def describe_speed(stats: Stats) -> str:
    return f" at {1e3 / stats.tpot_ms:.1f} tokens/s" if stats.tpot_ms else ""


def describe_acceptance(result: Result) -> str:
    stats = result.stats
    if not stats.proposed:
        return "nothing proposed"
    return f"accepted {stats.accepted} of {stats.proposed} proposed ({100 * stats.accepted / stats.proposed:.0f} %)"


def describe_stats(result: Result) -> str:
    """Return all statistics, a line per kind."""
    stats = result.stats
    text_line = f"text: {stats.generated_tokens} tokens{describe_speed(stats)}"
    if stats.tpot_ms:
        text_line += f", {stats.tpot_ms:.2f} ms each"
    rule_clause = stats.rule and f" ({stats.rule})"
    cached_clause = f"{stats.cached_tokens} of them cached"
    if stats.cached_tokens and stats.arithmetic != "exact":
        cached_clause += " (without exact arithmetic that may change bits)"
    lines = [
        f"prompt: {stats.prompt_tokens} tokens, {cached_clause}; first token after {stats.ttft_ms:.0f} ms",
        f"{text_line}; ended by {result.finish_reason}",
        f"rounds: {stats.rounds}, {stats.tokens_per_round:.2f} tokens per round",
    ]
    if stats.proposed:
        drafter_counts = stats.drafters.items()
        by_drafter = ", ".join(
            f"{drafter} {drafter_count['accepted']} of {drafter_count['proposed']}"
            for drafter, drafter_count in drafter_counts
        )
        lines.append(f"speculation: {describe_acceptance(result)}; by drafter: {by_drafter}")
        positions = " ".join(map(str, stats.accepted_by_position))
        conditional_clause = (
            f"{stats.conditional_acceptance or 0:.2f}, given that the proposed tokens before it were accepted"
        )
        lines.append(f"  accepted by position in the proposal: {positions or 'none'}")
        lines.append(f"  conditional acceptance: {conditional_clause}")
    if stats.forced:
        lines.append(f"grammar: {stats.forced} forced tokens")
    if stats.seed is not None:
        lines.append(f"seed: {stats.seed}")
    lines += [
        f"time: target {stats.target_ms:.0f} ms, draft {stats.draft_ms:.0f} ms, other {stats.other_ms:.0f} ms",
        f"device: {stats.device}; engine {stats.engine} ({stats.engine_reason}); rollback: {stats.rollback}",
        f"arithmetic: {stats.arithmetic}{rule_clause}; profile: {stats.profile or 'none'}",
    ]
    return "\n".join(lines)
