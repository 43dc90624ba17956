from __future__ import annotations

import json
from pathlib import Path

import click

from ovspec.cli.loading import load_model
from ovspec.cli.options import add_options, raise_usage_error_if, read_text_or_stdin, runtime_options
from ovspec.cli.path_type import MODEL_TYPE, PATH_TYPE
from ovspec.params.generation import GENERATE_OPTIONS
from ovspec.params.loading import LOAD_OPTIONS
from ovspec.params.option import OptionValue


@click.command()
@click.argument("model", required=False, type=MODEL_TYPE, metavar="[MODEL]")
@click.option("--draft", metavar="DRAFT", help="A draft model or head, or none.  [default: the draft in MODEL]")
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="Prompt to use instead of the built-in prompts. May be repeated.",
)
@click.option(
    "--prompt-file",
    "files",
    multiple=True,
    type=PATH_TYPE,
    metavar="FILE",
    help="File with a prompt to use instead of the built-in prompts; - is stdin. May be repeated.",
)
@click.option("-n", "--max-tokens", type=click.IntRange(2), default=128, show_default=True, help="Tokens per text.")
@add_options({name: GENERATE_OPTIONS[name] for name in ("lookahead", "temperature")})
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Texts per prompt and mode.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each mode.")
@add_options({"weight_format": LOAD_OPTIONS["weight_format"]})
@runtime_options
def bench(
    model: str | None,
    draft: str | None,
    prompts: tuple[str, ...],
    files: tuple[Path, ...],
    lookahead: int | str | None,
    max_tokens: int,
    temperature: float | None,
    repeats: int,
    as_json: bool,
    **runtime: OptionValue,
) -> None:
    """Benchmark MODEL (by default the embedded demo pair) with plain decoding and each drafter.

    The modes are plain decoding, prompt lookup, the draft model or head (if any), and both drafters together. For each
    prompt, the modes run alternately, in changing order. The speed-up is the median of plain decoding's time divided
    by the mode's time. No speed-up is shown if speculation saved no forward passes. Every text has exactly
    --max-tokens tokens. The built-in prompts are code, an edit and prose. Use an idle machine.

    \b
    Examples:
      ovspec bench my-pair
      ovspec bench my-pair --prompt-file my-prompt.txt --temperature 0.7 --repeats 3
    """
    raise_usage_error_if(
        draft and "lookup" in draft.split(","),
        "--draft must be a draft model or head, because prompt lookup is timed anyway.",
    )
    from ovspec.api.timing import default_prompts, format_mode_table, summarize_mode, time_modes
    from ovspec.drafting.choice import DraftChoice
    from ovspec.setup.exporting import find_or_export_model
    from ovspec.setup.manifest import DRAFT_FOLDER

    folder, draft_choice = find_or_export_model(model, draft, runtime.pop("weight_format"))
    draft = None if draft_choice is None else str(draft_choice)
    if draft is None and (folder / DRAFT_FOLDER).is_dir():
        draft = "draft"
    prompt_texts = [*prompts, *map(read_text_or_stdin, files)] or default_prompts()
    lm = load_model(folder, draft=["lookup", draft or "none"], cache_memory=0, **runtime)  # each turn reads its prompt
    models_by_mode = {"plain": lm.with_drafters(None), "lookup": lm.with_drafters(DraftChoice(lookup=True))}
    if lm.draft:
        draft_folder = lm.draft.ir.folder
        drafter = lm.draft.proposer_name
        models_by_mode[drafter] = lm.with_drafters(DraftChoice(model=draft_folder))
        models_by_mode[f"lookup,{drafter}"] = lm.with_drafters(DraftChoice(lookup=True, model=draft_folder))
    if lookahead is None:
        lookahead = "auto"
    options = {"lookahead": lookahead, "max_tokens": max_tokens, "temperature": temperature or 0.0, "ignore_eos": True}
    results = time_modes(models_by_mode, prompt_texts, options, repeats)
    summaries = [summarize_mode(mode, lookahead, results[mode], results["plain"]) for mode in results]
    if as_json:
        click.echo("\n".join(map(json.dumps, summaries)))
    else:
        click.echo(format_mode_table(summaries))
