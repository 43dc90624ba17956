"""What generating commands print: text on stdout, the rest on stderr."""

from __future__ import annotations

import itertools
import json
import secrets
from dataclasses import asdict
from typing import Any

import click
import numpy as np

from ovspec.constraints.maker import grammar_asked
from ovspec.loop.results import Result, Stats
from ovspec.model import LanguageModel
from ovspec.session import TextStream


def generate(stream: TextStream, stats: bool, as_json: bool) -> bool:
    """Print a text as it comes, and its statistics; whether Ctrl-C ended it."""
    result, interrupted = run(stream, show=not as_json)
    click.echo(json.dumps(as_dict(result), ensure_ascii=False) if as_json else "")
    if stats:
        click.echo(summary(result), err=True)
    return interrupted


def show_context(lm: LanguageModel, context: int | None) -> None:
    """What the KV cache of a context that was asked for takes."""
    if context:
        click.echo(f"context: {context} tokens, about {lm.cache_bytes(context) / 1e6:.0f} MB of KV cache", err=True)


def samples(lm: LanguageModel, prompt: Any, options: dict[str, Any], stats: bool, as_json: bool) -> None:
    """Several texts for one prompt, whole ones, each under a line with its number."""
    results = lm.samples(prompt, **options)
    if as_json:
        click.echo(json.dumps({"samples": [as_dict(result) for result in results]}, ensure_ascii=False))
        return
    for number, result in enumerate(results, 1):
        click.secho(f"sample {number}", bold=True, err=True)
        click.echo(result.text)
        if stats:
            click.echo(summary(result), err=True)


def compare(lm: LanguageModel, prompt: Any, options: dict[str, Any], as_json: bool) -> None:
    """Plain and speculative decoding of the same prompt, after a short warm-up of both."""
    if options.get("temperature") and "seed" not in options:
        options = options | {"seed": secrets.randbits(32)}
    both: dict[str, dict[str, Any]] = {"plain": options | {"lookahead": 0}, "speculative": options}
    for given in both.values():
        for _ in itertools.islice(lm.stream(prompt, **given), 8):
            pass
    results = []
    for name, given in both.items():
        if not as_json:
            click.secho(name, bold=True, err=True)
        result, interrupted = run(lm.stream(prompt, **given), show=not as_json)
        if interrupted:
            raise KeyboardInterrupt
        if not as_json:
            click.echo()
        results.append(result)
    plain, speculative = results
    equal = plain.token_ids == speculative.token_ids
    report: dict[str, Any] = {
        "plain": as_dict(plain),
        "speculative": as_dict(speculative),
        "equal": equal,
        "speedup": round(ms_a_token(plain.stats) / ms_a_token(speculative.stats), 3),
    }
    if not (equal or grammar_asked(options) or options.get("heal")):
        report["top2_gap"] = top2_gap(lm, prompt, plain.token_ids, speculative.token_ids)
    if as_json:
        click.echo(json.dumps(report, ensure_ascii=False))
        return
    click.echo(f"plain        {summary(plain)}", err=True)
    click.echo(f"speculative  {summary(speculative)}", err=True)
    verdict = f"the {len(plain.token_ids)} token ids are identical"
    if not equal:
        verdict = "the texts part where rounding decided which token came"
    if "top2_gap" in report and not options.get("temperature"):
        gap = report["top2_gap"]
        verdict = f"the texts part where the logits of the two most likely tokens are {gap:.4f} apart"
    click.echo(f"{verdict}; speed-up {report['speedup']:.2f}x", err=True)


def run(stream: TextStream, show: bool) -> tuple[Result, bool]:
    """(result, whether Ctrl-C ended it)"""
    printed, interrupted = 0, False
    try:
        for piece in stream:
            if show and piece.text:
                click.echo(piece.text, nl=False)
                printed += len(piece.text)
    except KeyboardInterrupt:
        # It may come while a piece is printed, when the stream knows nothing of it.
        interrupted = True
        stream.cancel()
    result = stream.result()
    if show and printed < len(result.text):
        click.echo(result.text[printed:], nl=False)
    return result, interrupted


def ms_a_token(stats: Stats) -> float:
    """Decoding only: the first token's time is the prompt's."""
    return stats.tpot_ms or stats.ttft_ms


def as_dict(result: Result) -> dict[str, Any]:
    rate = result.stats.acceptance_rate
    stats = {name: round(v, 3) if isinstance(v, float) else v for name, v in asdict(result.stats).items()}
    stats["acceptance_rate"] = round(rate, 4) if rate is not None else None
    found = {"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason}
    if result.logprobs is not None:
        found["logprobs"] = [asdict(logprob) for logprob in result.logprobs]
    return found | {"stats": stats}


def summary(result: Result) -> str:
    """The statistics in a line."""
    stats = result.stats
    parts = [
        f"{stats.prompt_tokens} + {stats.generated_tokens} tokens ({result.finish_reason})",
        f"first after {stats.ttft_ms:.0f} ms",
    ]
    if stats.tpot_ms:
        parts.append(f"then {stats.tpot_ms:.2f} ms each ({1e3 / stats.tpot_ms:.0f} tokens/s)")
    if stats.proposed:
        rate = stats.acceptance_rate or 0
        parts.append(f"acceptance rate {rate:.2f} ({stats.accepted} of {stats.proposed} proposed)")
        parts.append(f"{stats.generated_tokens / stats.rounds:.2f} tokens a round")
    if stats.forced:
        parts.append(f"{stats.forced} forced by the grammar")
    if len(stats.drafters) > 1:
        each = [f"{name} {counts['accepted']} of {counts['proposed']}" for name, counts in stats.drafters.items()]
        parts.append(f"accepted by drafter: {', '.join(each)}")
    if stats.seed is not None:
        parts.append(f"seed {stats.seed}")
    times = f"target {stats.target_ms:.0f} ms, draft {stats.draft_ms:.0f} ms, other {stats.other_ms:.0f} ms"
    engine = f"engine {stats.engine} ({stats.engine_reason}), rollback {stats.rollback}"
    return "; ".join([*parts, f"{times} on {stats.device}", engine, f"profile: {stats.profile or 'none'}"])


def top2_gap(lm: LanguageModel, prompt: Any, plain: list[int], speculative: list[int]) -> float:
    """Distance of the target's two largest logits where the texts part."""
    pairs = enumerate(zip(plain, speculative, strict=False))
    shared = next((place for place, (a, b) in pairs if a != b), min(len(plain), len(speculative)))
    logits = lm.next_logits([*lm.encode(prompt).tolist(), *plain[:shared]])
    second, first = np.partition(logits, -2)[-2:]
    return float(first - second)
