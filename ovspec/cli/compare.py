"""``ovspec generate --compare``: the text without and with speculation, whether both are equal, and the speed-up."""

import json
from dataclasses import replace
from typing import Any

import click

from ovspec.api.comparison import Comparison, ResultPair, compare_turns, rotate_modes, turns_within
from ovspec.api.model import LanguageModel
from ovspec.base.progress import show_step
from ovspec.cli import output
from ovspec.engine.row_maker import with_seed
from ovspec.params import Params


def print_comparison(lm: LanguageModel, prompt: Any, params: Params, stats: str | None, as_json: bool) -> bool:
    """Print both texts, then time both ways in turns and print the speed-up; return whether the texts are equal.

    Ctrl-C while the turns run ends them; what was measured until then is shown.
    """
    params = with_seed(params)
    if params.chat_template_kwargs is not None:  # render once
        prompt = lm.runtime.prompts.encode(prompt, variables=params.chat_template_kwargs).tolist()
        params = replace(params, chat_template_kwargs=None)
    ways = {"plain": replace(params, lookahead=0), "speculative": params}
    first = show_texts(lm, prompt, ways, as_json)
    turns, interrupted = timed(lm, prompt, ways)
    found = compare_turns(lm, prompt, first, turns, logits=not params.heal)
    if as_json:
        print_comparison_json(lm, found, stats)
    else:
        print_comparison_text(found, stats)
    if interrupted:
        raise KeyboardInterrupt
    return not found.divergence


def show_texts(lm: LanguageModel, prompt: Any, ways: dict[str, Params], as_json: bool) -> ResultPair:
    """Print both texts as they come. They aren't timed: kernels are made, and the lookahead learns what pays."""
    results = []
    for name, params in ways.items():
        if not as_json:
            output.heading(name)
        result, interrupted = output.run(lm.stream(prompt, sampling=params), show=not as_json)
        if not as_json:
            click.echo()
        if interrupted:
            raise KeyboardInterrupt
        results.append(result)
    return results[0], results[1]


def timed(lm: LanguageModel, prompt: Any, ways: dict[str, Params]) -> tuple[list[ResultPair], bool]:
    """Return (the results of each turn, whether Ctrl-C ended them)."""
    pairs = list[ResultPair]()
    try:
        for turn in turns_within():
            with show_step(f"timing both in turns, turn {turn + 1}"):
                results = {name: lm.generate(prompt, sampling=ways[name]) for name in rotate_modes(list(ways), turn)}
            pairs.append((results["plain"], results["speculative"]))
    except KeyboardInterrupt:
        if not pairs:
            raise
        return pairs, True
    return pairs, False


def print_comparison_text(found: Comparison, stats: str | None) -> None:
    """Print speed and acceptance, whether the texts are equal, and the verdict."""
    speculative = found.last_pair[1]
    accepted = f"{output.acceptance(speculative)}, {speculative.stats.tokens_per_round:.2f} tokens per round"
    click.echo(f"plain        {1e3 / found.speedup.plain_ms:.1f} tokens/s", err=True)
    click.echo(f"speculative  {1e3 / found.speedup.ms:.1f} tokens/s; {accepted}", err=True)
    for result in found.shown_pair:
        output.show_stats(result, "full" if stats == "full" else None)
    click.echo(f"{found.equality}\n{found.verdict}", err=True)


def print_comparison_json(lm: LanguageModel, found: Comparison, stats: str | None) -> None:
    """Print all of it as one JSON object."""
    speedup, where = found.speedup, found.divergence
    report: dict[str, Any] = {
        "plain": output.as_dict(lm, found.shown_pair[0]),
        "speculative": output.as_dict(lm, found.shown_pair[1]),
        "equal": where is None,
        "speedup": round(speedup.claimed_ratio, 3) if speedup.claimed_ratio else None,
        "speedups": [round(ratio, 3) for ratio in speedup.ratios],
        "plain_ms_per_token": round(speedup.plain_ms, 4),
        "speculative_ms_per_token": round(speedup.ms, 4),
    }
    if where:
        plain, speculative = (
            {"id": token, "text": None if token is None else lm.tokenizer.decode([token])}
            for token in (where.plain, where.other)
        )
        report["part"] = {"after": where.after, "plain": plain, "speculative": speculative, "gap": where.gap}
        report["top2_gap"] = where.top2_gap
    click.echo(json.dumps(report, ensure_ascii=False))
    for result in found.shown_pair:
        output.show_stats(result, stats)
