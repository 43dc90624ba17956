"""ovspec bench"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ovspec.cli.options import LookaheadType, refuse, runtime_options
from ovspec.cli.progress import TerminalProgress

if TYPE_CHECKING:
    from ovspec.loop.results import Result
    from ovspec.model import LanguageModel

HEADS = ("mode", "tokens/s", "ms/token", "speed-up", "accepted", "same text")
WARM_UP = 32  # tokens
PROMPTS = Path(__file__).with_name("bench_prompts.json")


@dataclass
class Measured:
    """One mode beside plain decoding of the same texts. ``spread``: the least and the greatest speed-up of a text."""

    mode: str
    lookahead: int | str
    tokens_per_s: float
    tpot_ms: float
    speedup: float | None
    spread: tuple[float, float] | None
    proposed: int
    accepted: int
    equal: int
    texts: int
    note: str


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path), metavar="[DIR]")
@click.option("--draft", metavar="PATH", help="The draft model, or none.  [default: the one exported beside DIR]")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Your own prompt; may be repeated.")
@click.option(
    "--prompt-file", "files", multiple=True, type=click.Path(path_type=Path), metavar="FILE", help="The same in a file."
)
@click.option("--lookahead", type=LookaheadType(), default="auto", show_default=True, help="Tokens proposed a round.")
@click.option(
    "-n", "--max-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Tokens of every text."
)
@click.option("-t", "--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Turns for each prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each mode.")
@click.option("--plot", type=click.Path(dir_okay=False), metavar="FILE", help="Draw the speed-ups (needs matplotlib).")
@runtime_options
def bench(
    folder: Path | None,
    draft: str | None,
    prompts: tuple[str, ...],
    files: tuple[Path, ...],
    lookahead: int | str,
    max_tokens: int,
    temperature: float,
    repeats: int,
    as_json: bool,
    plot: str | None,
    **runtime: Any,
) -> None:
    """Time the model in DIR without and with each way of proposing tokens.

    The modes take turns, prompt by prompt. Speed-up is the median over all texts, with the least and the most. Texts
    don't end before --max-tokens. The prompts are code, an edit and prose unless you give your own. Use an idle
    machine.

    \b
    Examples:
      ovspec bench my-pair
      ovspec bench my-pair --prompt-file my-prompt.txt --temperature 0.7 --repeats 3 --plot speed-up.png
    """
    refuse(lookahead == 0, "--lookahead 0 is plain decoding, which is timed in any case.")
    refuse(draft and "lookup" in draft.split(","), "--draft names a draft model; lookup is timed in any case.")
    if plot:
        check_plot(plot)
    import ovspec
    from ovspec.drafting.choice import DraftChoice
    from ovspec.files import read_text
    from ovspec.loading import embedded_pair
    from ovspec.setup.manifest import DRAFT_FOLDER

    folder = folder or embedded_pair()
    if draft is None and (folder / DRAFT_FOLDER).is_dir():
        draft = "draft"
    refuse(runtime["draft_device"] and draft in (None, "none"), "--draft-device needs a draft.")
    texts = [*prompts, *map(read_text, files)] or json.loads(PROMPTS.read_text("utf-8"))
    lm = ovspec.load(folder, ["lookup", draft or "none"], **runtime)
    models = {"plain": lm.with_drafters(None), "lookup": lm.with_drafters(DraftChoice(lookup=True))}
    if lm.draft:
        model = lm.draft.ir.folder
        models["draft"] = lm.with_drafters(DraftChoice(model=model))
        models["lookup,draft"] = lm.with_drafters(DraftChoice(lookup=True, model=model))
    options = {"lookahead": lookahead, "max_tokens": max_tokens, "temperature": temperature, "ignore_eos": True}
    results = measure(models, texts, options, repeats)
    rows = [row_of(mode, lookahead, found, results["plain"]) for mode, found in results.items()]
    click.echo("\n".join(json.dumps(asdict(row)) for row in rows) if as_json else table(rows))
    if plot:
        draw(rows, Path(plot))
        click.echo(f"{plot}: written", err=True)


def measure(
    models: dict[str, LanguageModel], prompts: list[str], options: dict[str, Any], repeats: int
) -> dict[str, list[Result]]:
    """Each mode's texts: for every prompt the modes take turns, after a short text of each that isn't counted."""
    results: dict[str, list[Result]] = {mode: [] for mode in models}
    progress = TerminalProgress()
    for turn in range(-1, repeats * len(prompts)):
        warm_up = {"max_tokens": min(options["max_tokens"], WARM_UP)} if turn < 0 else {}
        with progress.step("warm-up" if turn < 0 else f"text {turn + 1} of {repeats * len(prompts)}"):
            for mode, lm in models.items():
                given: dict[str, Any] = options | warm_up | ({"lookahead": 0} if mode == "plain" else {})
                result = lm.generate(prompts[turn % len(prompts)], seed=turn + 1, **given)
                results[mode] += [result] if turn >= 0 else []
    return results


def row_of(mode: str, lookahead: int | str, results: list[Result], plain: list[Result]) -> Measured:
    """No speed-up is claimed where nothing was accepted: drafting can't have caused it."""
    stats = [result.stats for result in results]
    proposed, accepted = (sum(getattr(s, name) for s in stats) for name in ("proposed", "accepted"))
    ratios = [p.stats.tpot_ms / s.tpot_ms for p, s in zip(plain, stats, strict=True)]
    note = ""
    if mode != "plain" and not accepted:
        why = "drafting doesn't pay for this model here" if lookahead == "auto" else "lookup found nothing to quote"
        note = "nothing that was proposed was accepted" if proposed else f"nothing was proposed: {why}"
    tpot = statistics.median(s.tpot_ms for s in stats)
    return Measured(
        mode=mode,
        lookahead=0 if mode == "plain" else lookahead,
        tokens_per_s=round(1e3 / tpot, 2),
        tpot_ms=round(tpot, 4),
        speedup=None if note else round(statistics.median(ratios), 4),
        spread=None if note else (round(min(ratios), 4), round(max(ratios), 4)),
        proposed=proposed,
        accepted=accepted,
        equal=sum(a.token_ids == b.token_ids for a, b in zip(results, plain, strict=True)),
        texts=len(results),
        note=note,
    )


def table(rows: list[Measured]) -> str:
    """Rows aligned in columns; below them why a speed-up is missing."""
    cells: list[tuple[str, ...]] = [HEADS]
    for row in rows:
        speedup = f"{row.speedup:.2f}" if row.speedup else "-"
        if row.spread and row.mode != "plain":
            speedup += f" ({row.spread[0]:.2f}-{row.spread[1]:.2f})"
        accepted = f"{row.accepted} of {row.proposed}" if row.proposed else "-"
        equal = f"{row.equal} of {row.texts}"
        cells.append((row.mode, f"{row.tokens_per_s:.1f}", f"{row.tpot_ms:.2f}", speedup, accepted, equal))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([*lines, *(f"{row.mode}: {row.note}" for row in rows if row.note)])


def check_plot(file: str) -> None:
    """Raises UsageError before minutes of measuring are lost."""
    refuse(not find_spec("matplotlib"), "--plot needs matplotlib: pip install matplotlib.")
    refuse(not Path(file).resolve().parent.is_dir(), f"--plot {file}: its folder isn't there.")


def draw(rows: list[Measured], file: Path) -> None:
    """A bar of the median speed-up for each mode, with a line from the least to the most."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(1.5 + 1.3 * len(rows), 3.5))
    for row in rows:
        middle = row.speedup or 0.0
        least, most = row.spread or (0.0, 0.0)
        bar = axis.bar(row.mode, middle, yerr=[[middle - least], [most - middle]], capsize=4)
        axis.bar_label(bar, [f"{middle:.2f}" if row.speedup else "-"], label_type="center")
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_ylabel("speed-up over plain decoding")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
