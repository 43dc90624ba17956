"""Time plain decoding and ways of proposing tokens on the same prompts, for ``ovspec bench`` and ``ovspec distill``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ovspec.api.comparison import compare_result_times, rotate_modes
from ovspec.api.model import LanguageModel
from ovspec.base.progress import show_step
from ovspec.engine.prompts import Prompt
from ovspec.engine.results import Result

TIME_COLUMNS = ("plain ms/token", "ms/token", "tokens/s")
TABLE_COLUMNS = ("mode", *TIME_COLUMNS, "speed-up", "range", "accepted of proposed", "tokens/round", "same text")
WARM_UP_TOKENS = 32  # tokens
PROMPTS_FILE = Path(__file__).with_name("bench_prompts.json")


def default_prompts() -> list[str]:
    """Return the prompts that are timed unless others are given: code, an edit and prose."""
    return json.loads(PROMPTS_FILE.read_text("utf-8"))


def time_modes(
    models: dict[str, LanguageModel], prompts: Sequence[Prompt], options: dict[str, Any], repeats: int
) -> dict[str, list[Result]]:
    """Generate the texts in turns and return the results of each mode; a short warm-up is not counted."""
    results: dict[str, list[Result]] = {mode: [] for mode in models}
    for turn in range(-1, repeats * len(prompts)):
        warm_up = {"max_tokens": min(options["max_tokens"], WARM_UP_TOKENS)} if turn < 0 else {}
        with show_step("warm-up" if turn < 0 else f"text {turn + 1} of {repeats * len(prompts)}", keep=True):
            for mode in rotate_modes(list(models), max(turn, 0)):
                given: dict[str, Any] = options | warm_up | ({"lookahead": 0} if mode == "plain" else {})
                result = models[mode].generate(prompts[turn % len(prompts)], seed=turn + 1, **given)
                results[mode] += [result] if turn >= 0 else []
    return results


def summarize_mode(mode: str, lookahead: int | str, results: list[Result], plain: list[Result]) -> dict[str, Any]:
    """Return the measurements of a mode, compared with ``plain`` as in ``ovspec.api.comparison``."""
    proposed, accepted, tokens, rounds = (
        sum(getattr(result.stats, name) for result in results)
        for name in ("proposed", "accepted", "generated_tokens", "rounds")
    )
    speedup, alone = compare_result_times(plain, results), mode == "plain"
    return {
        "mode": mode,
        "lookahead": 0 if alone else lookahead,
        "plain_tpot_ms": round(speedup.plain_ms, 4),
        "tpot_ms": round(speedup.ms, 4),
        "tokens_per_s": round(1e3 / speedup.ms, 2),
        "speedup": 1.0 if alone else round(speedup.claimed_ratio, 4) if speedup.claimed_ratio else None,
        "spread": (round(speedup.ratios[0], 4), round(speedup.ratios[-1], 4)),
        "proposed": proposed,
        "accepted": accepted,
        "tokens_per_round": round(tokens / max(rounds, 1), 4),
        "equal": sum(a.token_ids == b.token_ids for a, b in zip(results, plain, strict=True)),
        "texts": len(results),
        "note": "" if alone or speedup.is_clear else speedup.describe_gain(proposed, accepted),
    }


def format_mode_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows aligned in columns, and below them why a mode has no clear speed-up."""
    cells: list[tuple[str, ...]] = [TABLE_COLUMNS]
    for row in rows:
        plain, speedup, spread, accepted = f"{row['plain_tpot_ms']:.2f}", "none", "", "nothing proposed"
        if row["speedup"]:
            speedup, spread = f"{row['speedup']:.2f}", f"{row['spread'][0]:.2f} to {row['spread'][1]:.2f}"
        if row["proposed"]:
            accepted = f"{row['accepted']} of {row['proposed']}"
        if row["mode"] == "plain":
            plain = speedup = spread = accepted = ""
        times = f"{row['tpot_ms']:.2f}", f"{row['tokens_per_s']:.1f}"
        equal = f"{row['equal']} of {row['texts']}"
        rate = f"{row['tokens_per_round']:.2f}"
        cells.append((row["mode"], plain, *times, speedup, spread, accepted, rate, equal))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([*lines, *(f"{row['mode']}: {row['note']}" for row in rows if row["note"])])
