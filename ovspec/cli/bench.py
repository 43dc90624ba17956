from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ovspec.base.progress import step
from ovspec.cli.options import load, options_of, refuse, runtime_options
from ovspec.params import GENERATE

if TYPE_CHECKING:
    from ovspec.api.model import LanguageModel
    from ovspec.engine.results import Result

TIMES = ("plain ms/token", "ms/token", "tokens/s")
HEADS = ("mode", *TIMES, "speed-up", "range", "accepted of proposed", "tokens/round", "same text")
WARM_UP = 32  # tokens
FILE = click.Path(path_type=Path)
PROMPTS = Path(__file__).with_name("bench_prompts.json")


@click.command()
@click.argument("folder", required=False, type=FILE, metavar="[DIR]")
@click.option("--draft", metavar="PATH", help="Folder of a draft model or head, or none.  [default: that in DIR]")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Your own prompt. May be repeated.")
@click.option("--prompt-file", "files", multiple=True, type=FILE, metavar="FILE", help="The same, read from a file.")
@click.option("-n", "--max-tokens", type=click.IntRange(2), default=128, show_default=True, help="Tokens per text.")
@options_of({name: GENERATE[name] for name in ("lookahead", "temperature")})
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Texts per prompt and mode.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each mode.")
@runtime_options
def bench(
    folder: Path | None,
    draft: str | None,
    prompts: tuple[str, ...],
    files: tuple[Path, ...],
    lookahead: int | str | None,
    max_tokens: int,
    temperature: float | None,
    repeats: int,
    as_json: bool,
    **runtime: Any,
) -> None:
    """Time the model in DIR (by default the embedded demo pair) without and with each way of proposing tokens.

    The modes are plain decoding, lookup, the draft model or head if there is one, and both. For each prompt the modes
    take turns, and each turn begins with another mode. The speed-up is that of the median turn: the time of plain
    decoding divided by the mode's. No gain is shown if speculation saved no inferences. Texts don't end before
    --max-tokens. The prompts are code, an edit and prose unless you give your own. Use an idle machine.

    \b
    Examples:
      ovspec bench my-pair
      ovspec bench my-pair --prompt-file my-prompt.txt --temperature 0.7 --repeats 3
    """
    refuse(draft and "lookup" in draft.split(","), "--draft names a draft model; lookup is timed in any case.")
    from ovspec.api.loading import embedded_pair
    from ovspec.base.files import read_text
    from ovspec.drafting.choice import DraftChoice
    from ovspec.setup.manifest import DRAFT_FOLDER

    folder = folder or embedded_pair()
    if draft is None and (folder / DRAFT_FOLDER).is_dir():
        draft = "draft"
    texts = [*prompts, *map(read_text, files)] or json.loads(PROMPTS.read_text("utf-8"))
    lm = load(folder, ["lookup", draft or "none"], cache_memory=0, **runtime)  # each turn reads its prompt
    models = {"plain": lm.with_drafters(None), "lookup": lm.with_drafters(DraftChoice(lookup=True))}
    if lm.draft:
        model = lm.draft.ir.folder
        name = lm.draft.drafter
        models[name] = lm.with_drafters(DraftChoice(model=model))
        models[f"lookup,{name}"] = lm.with_drafters(DraftChoice(lookup=True, model=model))
    lookahead = "auto" if lookahead is None else lookahead
    options = {"lookahead": lookahead, "max_tokens": max_tokens, "temperature": temperature or 0.0, "ignore_eos": True}
    results = measure(models, texts, options, repeats)
    rows = [row_of(mode, lookahead, found, results["plain"]) for mode, found in results.items()]
    click.echo("\n".join(json.dumps(row) for row in rows) if as_json else table(rows))


def measure(
    models: dict[str, LanguageModel], prompts: list[str], options: dict[str, Any], repeats: int
) -> dict[str, list[Result]]:
    """Generate the texts in turns and return the results of each mode; a short warm-up is not counted."""
    from ovspec.api.comparison import rotated

    results: dict[str, list[Result]] = {mode: [] for mode in models}
    for turn in range(-1, repeats * len(prompts)):
        warm_up = {"max_tokens": min(options["max_tokens"], WARM_UP)} if turn < 0 else {}
        with step("warm-up" if turn < 0 else f"text {turn + 1} of {repeats * len(prompts)}", keep=True):
            for mode in rotated(list(models), max(turn, 0)):
                given: dict[str, Any] = options | warm_up | ({"lookahead": 0} if mode == "plain" else {})
                result = models[mode].generate(prompts[turn % len(prompts)], seed=turn + 1, **given)
                results[mode] += [result] if turn >= 0 else []
    return results


def row_of(mode: str, lookahead: int | str, results: list[Result], plain: list[Result]) -> dict[str, Any]:
    """Return the measurements of a mode, compared with ``plain`` as in ``ovspec.api.comparison``."""
    from ovspec.api.comparison import speedup_of_results

    proposed, accepted, tokens, rounds = (
        sum(getattr(result.stats, name) for result in results)
        for name in ("proposed", "accepted", "generated_tokens", "rounds")
    )
    speedup, alone = speedup_of_results(plain, results), mode == "plain"
    return {
        "mode": mode,
        "lookahead": 0 if alone else lookahead,
        "plain_tpot_ms": round(speedup.plain_ms, 4),
        "tpot_ms": round(speedup.ms, 4),
        "tokens_per_s": round(1e3 / speedup.ms, 2),
        "speedup": 1.0 if alone else round(speedup.claimed, 4) if speedup.claimed else None,
        "spread": (round(speedup.ratios[0], 4), round(speedup.ratios[-1], 4)),
        "proposed": proposed,
        "accepted": accepted,
        "tokens_per_round": round(tokens / max(rounds, 1), 4),
        "equal": sum(a.token_ids == b.token_ids for a, b in zip(results, plain, strict=True)),
        "texts": len(results),
        "note": "" if alone or speedup.clear else speedup.verdict(proposed, accepted),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows aligned in columns, and below them why a mode has no clear speed-up."""
    cells: list[tuple[str, ...]] = [HEADS]
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
