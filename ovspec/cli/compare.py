"""``ovspec generate --compare``: texts with and without speculation, their equality, and the speed-up."""

import json
from dataclasses import replace

import click

from ovspec.api.comparison import Comparison, ResultPair, compare_turns, iterate_turns, rotate_modes
from ovspec.api.model import LanguageModel
from ovspec.base.json_types import JsonObject
from ovspec.base.progress import show_step
from ovspec.cli import output
from ovspec.engine.prompts import Prompt
from ovspec.engine.row_maker import with_random_seed
from ovspec.params import Params


def print_comparison(lm: LanguageModel, prompt: Prompt, params: Params, stats: str | None, as_json: bool) -> bool:
    """Print both texts, then time both modes in turns and print the speed-up; return whether the texts are equal.

    Ctrl-C ends the timing; finished turns are shown.
    """
    params = with_random_seed(params)
    if params.chat_template_kwargs is not None:  # render once
        prompt = lm.runtime.prompt_encoder.encode(prompt, template_variables=params.chat_template_kwargs).tolist()
        params = replace(params, chat_template_kwargs=None)
    params_by_mode = {"plain": replace(params, lookahead=0), "speculative": params}
    first_pair = print_texts(lm, prompt, params_by_mode, as_json)
    turns, interrupted = time_turns(lm, prompt, params_by_mode)
    comparison = compare_turns(lm, prompt, first_pair, turns, compute_gaps=not params.heal)
    if as_json:
        print_comparison_json(lm, comparison, stats)
    else:
        print_comparison_summary(comparison, stats)
    if interrupted:
        raise KeyboardInterrupt
    return not comparison.divergence


def print_texts(lm: LanguageModel, prompt: Prompt, params_by_mode: dict[str, Params], as_json: bool) -> ResultPair:
    """Print both texts as they are generated, as an untimed warm-up of kernels and lookahead."""
    results = []
    for mode, params in params_by_mode.items():
        if not as_json:
            output.print_heading(mode)
        result, interrupted = output.run_stream(lm.stream(prompt, sampling=params), print_text=not as_json)
        if not as_json:
            click.echo()
        if interrupted:
            raise KeyboardInterrupt
        results.append(result)
    return results[0], results[1]


def time_turns(lm: LanguageModel, prompt: Prompt, params_by_mode: dict[str, Params]) -> tuple[list[ResultPair], bool]:
    """Return (the results of each turn, whether Ctrl-C ended them)."""
    result_pairs = list[ResultPair]()
    modes = list(params_by_mode)
    try:
        for turn in iterate_turns():
            with show_step(f"timing both in turns, turn {turn + 1}"):
                turn_modes = rotate_modes(modes, turn)
                results = {mode: lm.generate(prompt, sampling=params_by_mode[mode]) for mode in turn_modes}
            result_pairs.append((results["plain"], results["speculative"]))
    except KeyboardInterrupt:
        if not result_pairs:
            raise
        return result_pairs, True
    return result_pairs, False


def print_comparison_summary(comparison: Comparison, stats: str | None) -> None:
    """Print speeds, acceptance rate, equality of the texts, and speed-up."""
    speedup = comparison.speedup
    speculative = comparison.last_pair[1]
    acceptance_text = (
        f"{output.describe_acceptance(speculative)}, {speculative.stats.tokens_per_round:.2f} tokens per round"
    )
    click.echo(f"plain        {1e3 / speedup.plain_ms:.1f} tokens/s", err=True)
    click.echo(f"speculative  {1e3 / speedup.speculative_ms:.1f} tokens/s; {acceptance_text}", err=True)
    for result in comparison.shown_pair:
        output.print_stats(result, "full" if stats == "full" else None)
    click.echo(f"{comparison.equality_sentence}\n{comparison.speedup_sentence}", err=True)


def print_comparison_json(lm: LanguageModel, comparison: Comparison, stats: str | None) -> None:
    """Print the comparison as one JSON object."""
    speedup = comparison.speedup
    divergence = comparison.divergence
    plain_result, speculative = comparison.shown_pair
    comparison_json: JsonObject = {
        "plain": output.result_as_json(lm, plain_result),
        "speculative": output.result_as_json(lm, speculative),
        "equal": divergence is None,
        "speedup": round(speedup.claimed_ratio, 3) if speedup.claimed_ratio else None,
        "speedups": [round(ratio, 3) for ratio in speedup.ratios],
        "plain_ms_per_token": round(speedup.plain_ms, 4),
        "speculative_ms_per_token": round(speedup.speculative_ms, 4),
    }
    if divergence:
        comparison_json["part"] = {
            "after": divergence.after,
            "plain": token_as_json(lm, divergence.plain),
            "speculative": token_as_json(lm, divergence.other),
            "gap": divergence.gap,
        }
        comparison_json["top2_gap"] = divergence.top2_gap
    click.echo(json.dumps(comparison_json, ensure_ascii=False))
    for result in comparison.shown_pair:
        output.print_stats(result, stats)


def token_as_json(lm: LanguageModel, token_id: int | None) -> JsonObject:
    """Return the id and the text of a token, both None for the end of a text."""
    return {"id": token_id, "text": None if token_id is None else lm.tokenizer.decode([token_id])}
