"""Time plain decoding and drafters on the same prompts, for ``ovspec bench`` and ``ovspec distill``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ovspec.api.comparison import compare_result_times, rotate_modes
from ovspec.api.model import LanguageModel
from ovspec.base.json_types import JsonObject
from ovspec.base.progress import show_step
from ovspec.engine.prompts import Prompt
from ovspec.engine.results import Result

TIME_COLUMNS = ("plain ms/token", "ms/token", "tokens/s")
TABLE_COLUMNS = ("mode", *TIME_COLUMNS, "speed-up", "range", "accepted of proposed", "tokens/round", "same text")
WARM_UP_TOKENS = 32
PROMPTS_FILE = Path(__file__).with_name("bench_prompts.json")


def default_prompts() -> list[str]:
    """Return the built-in prompts: code, an edit and prose."""
    return json.loads(PROMPTS_FILE.read_text("utf-8"))


def time_modes(
    models: dict[str, LanguageModel], prompts: Sequence[Prompt], options: JsonObject, repeats: int
) -> dict[str, list[Result]]:
    """Generate the texts in turns, after a short warm-up, and return the results of each mode."""
    results: dict[str, list[Result]] = {mode: [] for mode in models}
    turn_count = repeats * len(prompts)
    with show_step("warm-up", keep_line=True):
        warm_up_options = options | {"max_tokens": min(options["max_tokens"], WARM_UP_TOKENS)}
        for mode in models:
            generate_in_mode(models, mode, prompts[-1], 0, warm_up_options)
    for turn in range(turn_count):
        with show_step(f"text {turn + 1} of {turn_count}", keep_line=True):
            for mode in rotate_modes(list(models), turn):
                prompt = prompts[turn % len(prompts)]
                results[mode].append(generate_in_mode(models, mode, prompt, turn + 1, options))
    return results


def generate_in_mode(
    models: dict[str, LanguageModel], mode: str, prompt: Prompt, seed: int, options: JsonObject
) -> Result:
    """Continue ``prompt`` with the model of ``mode``."""
    if mode == "plain":
        options = options | {"lookahead": 0}
    return models[mode].generate(prompt, seed=seed, **options)


def summarize_mode(mode: str, lookahead: int | str, results: list[Result], plain_results: list[Result]) -> JsonObject:
    """Return a mode's measurements relative to ``plain_results``, as in ``ovspec.api.comparison``."""
    proposed, accepted, token_count, round_count = (
        sum(getattr(result.stats, stat_name) for result in results)
        for stat_name in ("proposed", "accepted", "generated_tokens", "rounds")
    )
    speedup = compare_result_times(plain_results, results)
    summary = {
        "mode": mode,
        "lookahead": lookahead,
        "plain_tpot_ms": round(speedup.plain_ms, 4),
        "tpot_ms": round(speedup.speculative_ms, 4),
        "tokens_per_s": round(1e3 / speedup.speculative_ms, 2),
        "speedup": round(speedup.claimed_ratio, 4) if speedup.claimed_ratio else None,
        "spread": (round(speedup.ratios[0], 4), round(speedup.ratios[-1], 4)),
        "proposed": proposed,
        "accepted": accepted,
        "tokens_per_round": round(token_count / max(round_count, 1), 4),
        "equal": sum(a.token_ids == b.token_ids for a, b in zip(results, plain_results, strict=True)),
        "texts": len(results),
        "note": "" if speedup.is_clear else speedup.describe_gain(proposed, accepted),
    }
    if mode == "plain":
        summary |= {"lookahead": 0, "speedup": 1.0, "note": ""}
    return summary


def format_mode_table(summaries: list[JsonObject]) -> str:
    """Return the summaries as a table, with the reasons for unclear speed-ups below."""
    table_lines = [TABLE_COLUMNS, *map(format_cells, summaries)]
    widths = [max(map(len, column)) for column in zip(*table_lines, strict=True)]
    rows = [
        "  ".join(cell.ljust(width) for cell, width in zip(table_line, widths, strict=True)).rstrip()
        for table_line in table_lines
    ]
    notes = [f"{summary['mode']}: {summary['note']}" for summary in summaries if summary["note"]]
    return "\n".join([*rows, *notes])


def format_cells(summary: JsonObject) -> tuple[str, ...]:
    """Return a summary as the cells of ``TABLE_COLUMNS``."""
    plain_ms = speedup = ratio_range = accepted = ""
    if summary["mode"] != "plain":
        plain_ms = f"{summary['plain_tpot_ms']:.2f}"
        speedup = "none"
        accepted = "nothing proposed"
        if summary["speedup"]:
            speedup = f"{summary['speedup']:.2f}"
            ratio_range = f"{summary['spread'][0]:.2f} to {summary['spread'][1]:.2f}"
        if summary["proposed"]:
            accepted = f"{summary['accepted']} of {summary['proposed']}"
    time_cells = (f"{summary['tpot_ms']:.2f}", f"{summary['tokens_per_s']:.1f}")
    tokens_per_round = f"{summary['tokens_per_round']:.2f}"
    equal_count = f"{summary['equal']} of {summary['texts']}"
    return (summary["mode"], plain_ms, *time_cells, speedup, ratio_range, accepted, tokens_per_round, equal_count)
