"""Time a pair without and with each drafter, in every requested combination.

    python scripts/bench/matrix.py [DIR] [--workload ...] [--context ...] [--batch ...] [--lookahead ...] [--plot FILE]

'ovspec bench' is the short form for users; this is the one that the figures of docs/benchmarks.md come from.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from cells import MODES, WORKLOADS, Cell, Line, run_bench
from cells import as_json as to_json

import ovspec
from ovspec.cli.bench import check_plot
from ovspec.cli.options import LookaheadType, runtime_options
from ovspec.errors import OvspecError
from ovspec.ir.device import available_devices
from ovspec.loading import embedded_pair
from ovspec.setup.manifest import DRAFT_FOLDER

HERE = Path(__file__).resolve().parent
HEADS = ("workload", "context", "T", "batch", "mode", "k", "tokens/s", "plain ms/token", "ms/token", "speed-up")
HEADS = (*HEADS, "range", "conditional acceptance", "tokens/round", "p95 gap", "first", "GB/s", "equal")


class ListOf(click.ParamType):
    """A list of values, separated by commas."""

    def __init__(self, inner: click.ParamType) -> None:
        self.inner, self.name = inner, f"{inner.name},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        if isinstance(value, list):
            return value
        return [self.inner.convert(part.strip(), param, ctx) for part in str(value).split(",")]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("folder", required=False, type=click.Path(path_type=Path), metavar="[DIR]")
@click.option("--draft", metavar="PATH", help="The draft model.  [default: the one beside DIR, if there is one]")
@click.option(
    "--workload", "workloads", type=ListOf(click.Choice(WORKLOADS)), default="completion,edit,prose", show_default=True
)
@click.option("--context", "contexts", type=ListOf(click.IntRange(min=0)), default="0", show_default=True)
@click.option("--temperature", "temperatures", type=ListOf(click.FloatRange(min=0)), default="0,1", show_default=True)
@click.option(
    "--batch", "batches", type=ListOf(click.IntRange(min=1)), default="1", show_default=True, help="Texts at a time."
)
@click.option("--mode", "modes", type=ListOf(click.Choice(MODES)), help="[default: all that there are drafters for]")
@click.option(
    "--lookahead",
    "lookaheads",
    type=ListOf(LookaheadType()),
    default="4",
    show_default=True,
    help="Of the modes draft, lookup and chain; auto for as many as pay. The mode auto is chain with auto.",
)
@click.option("-n", "--max-tokens", "tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--prompts", type=click.IntRange(min=1), default=3, show_default=True, help="Of each workload, at most.")
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--accept",
    type=click.Choice(("compare", "rejection")),
    default="compare",
    show_default=True,
    help="How sampled tokens are compared with proposals.",
)
@click.option("--dictate", is_flag=True, help="Edits: generate the right answer whatever the model would generate.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line, as the figures come.")
@click.option(
    "--plot", type=click.Path(dir_okay=False), metavar="FILE", help="Draw speed-up by lookahead (matplotlib)."
)
@click.option(
    "--peers",
    is_flag=True,
    help="Time openvino-genai, llama.cpp, PyTorch and others beside ovspec, as peers/run.py does.",
)
@click.option("--checkpoints", metavar="PATH", help="With --peers: folder of the checkpoints target/ and draft/.")
@runtime_options
@click.pass_context
def matrix(
    ctx: click.Context,
    folder: Path | None,
    draft: str | None,
    workloads: list[str],
    contexts: list[int],
    temperatures: list[float],
    batches: list[int],
    modes: list[str] | None,
    lookaheads: list[int | str],
    tokens: int,
    prompts: int,
    repeats: int,
    accept: str,
    dictate: bool,
    as_json: bool,
    plot: str | None,
    peers: bool,
    checkpoints: str | None,
    **runtime: Any,
) -> None:
    """Time the model in DIR without and with each drafter.

    Workloads are code to complete, a file to edit and prose, none of which the demo pair was trained on; contexts are
    tokens of other text before them. The modes of a cell take turns, each beginning with another one. Use an idle
    machine.

    \b
    Examples:
      matrix.py my-pair
      matrix.py my-pair --workload completion --temperature 0 --lookahead 1,2,3,4,6,8 --plot lookahead.png
      matrix.py my-pair --peers --checkpoints my-checkpoints --context 128,1024
    """
    if peers:
        run_peers(ctx, folder)
        return
    if checkpoints:
        raise click.UsageError("--checkpoints needs --peers.")
    if plot:
        check_plot(plot)
    folder = folder or embedded_pair()
    has_draft = draft is not None or (folder / DRAFT_FOLDER).is_dir()
    if runtime["draft_device"] and not has_draft:
        raise click.UsageError("--draft-device needs a draft.")
    lm = ovspec.load(folder, f"lookup,{draft or 'draft'}" if has_draft else "lookup", **runtime)
    modes = modes or [mode for mode in MODES if has_draft or mode not in ("draft", "chain")]
    fixed = [None if k == "auto" else k for k in lookaheads]
    if 0 in fixed:
        raise click.UsageError("--lookahead 0 is the mode plain.")
    cells: list[Cell] = []
    for workload, context, temperature, size in itertools.product(workloads, contexts, temperatures, batches):
        for mode in modes:
            for k in {"plain": [0], "auto": [None]}.get(mode, fixed):
                cells.append(Cell(workload, context, temperature, mode, k, accept, size))  # type: ignore[arg-type]
    lines: list[Line] = []
    for cell, line in run_bench(lm, cells, tokens, prompts, dictate, repeats):
        lines.append(line)
        if as_json:
            click.echo(to_json(line))
        else:
            if len(lines) == 1:
                click.echo(heading(lm, line))
            click.echo(row(line))
        sys.stdout.flush()
        del cell
    if plot:
        draw(lines, Path(plot))
        click.echo(f"{plot}: written", err=True)


def run_peers(context: click.Context, folder: Path | None) -> None:
    """Run peers/run.py, which prints JSON lines."""
    given = {name: context.params[name] for name in context.params if is_given(context, name)}
    goes_with = {"folder", "peers", "checkpoints", "contexts", "tokens", "prompts", "as_json"}
    others = [option.opts[-1] for option in context.command.params if option.name in given.keys() - goes_with]
    if others:
        raise click.UsageError(
            f"--peers goes with --checkpoints, --context, --max-tokens and --prompts only, not with {others[0]}."
        )
    options = {"checkpoints": "--checkpoints", "tokens": "--tokens", "prompts": "--prompts"}
    command = [sys.executable, str(HERE / "peers" / "run.py"), str(folder or embedded_pair())]
    for name, option in options.items():
        command += [option, str(given[name])] if name in given else []
    if "contexts" in given:
        command += ["--contexts", ",".join(map(str, given["contexts"]))]
    sys.exit(subprocess.run(command).returncode)


def is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def heading(lm: Any, line: Line) -> str:
    machine = dict(available_devices()).get("CPU", "CPU")
    about = (
        f"{lm.folder} on {machine}, OpenVINO {line.versions['openvino']}; memory is read at {line.read_gb_s:.1f} GB/s"
    )
    return f"{about}\n\n| {' | '.join(HEADS)} |\n{'|---' * len(HEADS)}|"


def row(line: Line) -> str:
    acceptance = "" if line.acceptance is None else f"{line.acceptance:.2f}"
    parts = [
        line.workload,
        str(line.context),
        f"{line.temperature:g}",
        str(line.batch),
        line.mode,
        str(line.lookahead) if line.mode != "plain" else "",
        f"{line.tokens_per_s:.1f}",
        f"{line.plain_tpot_ms:.2f}",
        f"{line.tpot_ms:.2f}",
        f"{line.speedup:.2f}" if line.speedup else "none",
        f"{line.spread[0]:.2f} to {line.spread[1]:.2f}" if line.speedup and line.mode != "plain" else "",
        acceptance,
        f"{line.tokens_per_round:.2f}",
        f"{line.p95_gap_ms:.1f}",
        f"{line.ttft_ms:.0f}",
        f"{line.weights_gb_s:.1f}",
        line.equal,
    ]
    return f"| {' | '.join(parts)} |"


def draw(lines: list[Line], file: Path) -> None:
    """Draw speed-up by lookahead, 1 where none is claimed; dashed what costs and acceptance predict."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[tuple[str, int, float], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.workload, line.context, line.temperature), []).append(line)
    figure, axes = pyplot.subplots(1, len(groups), figsize=(4 * len(groups), 3.5), squeeze=False, sharey=True)
    for axis, ((workload, context, temperature), group) in zip(axes[0], groups.items(), strict=True):
        for mode, color in (("draft", "tab:blue"), ("lookup", "tab:orange"), ("chain", "tab:green")):
            points = [line for line in group if line.mode == mode and line.lookahead != "auto"]
            if points:
                ks = [int(line.lookahead) for line in points]
                axis.plot(ks, [line.speedup or 1 for line in points], "o-", color=color, label=mode)
                if all(line.predicted for line in points):
                    axis.plot(ks, [line.predicted or 0 for line in points], "--", color=color, alpha=0.6)
        for line in group:
            if line.mode == "auto":
                axis.axhline(line.speedup or 1, color="tab:red", label="auto")
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(title=f"{workload}, context {context}, T={temperature:g}", xlabel="lookahead")
    axes[0][0].set_ylabel("speed-up")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    try:
        matrix()
    except (OvspecError, OSError) as error:
        sys.exit(f"Error: {error}")
