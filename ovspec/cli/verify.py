from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ovspec.base.progress import show_step
from ovspec.cli.loading import load_model
from ovspec.cli.options import read_text_or_stdin, refuse_if, target_options
from ovspec.cli.path_type import PATH

if TYPE_CHECKING:
    from ovspec.api.model import LanguageModel
    from ovspec.api.verify import Verification


@click.command()
@click.argument("file", type=PATH, metavar="RESULT")
@click.option("--model", "folder", metavar="DIR", help="Folder of the model.  [default: the one that the result names]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@target_options
def verify(file: Path, folder: str | None, as_json: bool, **runtime: Any) -> None:
    """Check that every token in RESULT is the one that the model chooses there.

    RESULT is what 'ovspec generate --json' printed, or the output of 'ovspec batch'; - is stdin. One forward pass over
    prompt and text checks each token: greedy or by its seed, with grammars, penalties and healing. The model runs with
    the settings that the text was made with, unless you give others. Exits with 1 if a token differs.

    \b
    Example:
      ovspec generate my-pair "import os" --draft --json > result.json
      ovspec verify result.json
    """
    from ovspec.api.verify import result_from_json
    from ovspec.base.errors import OvspecError

    name = "stdin" if str(file) == "-" else str(file)
    source = read_text_or_stdin(file)
    models: dict[str, LanguageModel] = {}
    checked: dict[str, Verification] = {}
    lines: list[str] = []
    for label, data in texts_of(source, name):
        try:
            result = result_from_json(data)
            assert result.record
            made = result.record.model()
            key = json.dumps(made, sort_keys=True, default=str)
            if key not in models:
                place = Path(folder or str(made.get("folder", "")))
                gone = f"{label}: its model {place} isn't here; name the model's folder with --model."
                refuse_if(not folder and not place.is_dir(), gone)
                models[key] = load_model(place, "none", **recorded_options(made, runtime))
            with show_step(f"{label}: checking"):
                found = checked[label] = models[key].verify(result)
        except OvspecError as error:
            raise OvspecError(f"{label}: {error}".rstrip(".") + ".") from None
        if not found.ok:
            lines += [f"{label}: {line}" for line in mistakes(models[key], found, made)]
    refuse_if(not checked, f"{name}: no text in it, only errors.")
    tokens, exact = (sum(getattr(found, count) for found in checked.values()) for count in ("tokens", "exact"))
    if as_json:
        about = {label: {**asdict(found), "ok": found.ok} for label, found in checked.items()}
        click.echo(json.dumps({"tokens": tokens, "exact": exact, "texts": about}, ensure_ascii=False))
    else:
        several = f" tokens in {len(checked)} texts" if len(checked) > 1 else ""
        verdict = "not exact" if lines else "exact"
        click.echo("\n".join([*lines, f"{verdict}: {exact} of {tokens}{several}"]))
    if lines:
        sys.exit(1)


def texts_of(source: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (label, text with its record) for each text in a result or in a batch's output."""
    try:
        entries = [(name, json.loads(source))]
    except ValueError:
        entries = []
        for number, line in enumerate(source.splitlines(), 1):
            label = f"{name}, line {number}"
            try:
                entries += [(label, json.loads(line))] if line.strip() else []
            except ValueError:
                raise click.UsageError(f"{label}: not JSON.") from None
    for label, entry in entries:
        refuse_if(
            not isinstance(entry, dict), f"{label}: not a result; name a file that --json or a batch has written."
        )
        if "record" not in entry and entry.get("error"):  # a failed request of a batch
            continue
        response = entry.get("response")
        body = response.get("body", entry) if isinstance(response, dict) else entry
        several = body.get("samples") or body.get("choices") or [body[k] for k in ("plain", "speculative") if k in body]
        for number, each in enumerate(several or [body], 1):
            yield (f"{label}, text {number}" if len(several) > 1 else label), each


def recorded_options(made: dict[str, Any], runtime: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a text was made with, as options of ``load_model``; the given ones take precedence."""
    given = {name: value for name, value in runtime.items() if value is not None}
    named = {name: made[name] for name in ("device", "engine", "arithmetic", "threads") if made.get(name)}
    recorded = made.get("properties")
    properties = dict(recorded) if isinstance(recorded, dict) else {}
    if given.get("device", named.get("device")) != named.get("device"):
        named.pop("engine", None)
        properties = {}  # another device's
    kv_follows = properties.get("KV_CACHE_PRECISION") == properties.get("INFERENCE_PRECISION_HINT")
    if "kv_precision" in given or ("precision" in given and kv_follows):
        properties.pop("KV_CACHE_PRECISION", None)
    if "precision" in given:
        properties.pop("INFERENCE_PRECISION_HINT", None)
    properties |= given.get("properties", {})
    return {"tune": False, **named, **given, "properties": properties}


def mistakes(lm: LanguageModel, found: Verification, made: dict[str, Any]) -> list[str]:
    """Return lines that say what is wrong with a text, which was ``made`` with these settings."""

    def shown(token: int) -> str:
        return f"{lm.tokenizer.decode([token])!r} (id {token})"

    lines, here = list[str](), lm.runtime.identity["system"]
    if (there := made.get("system", here)) != here:
        lines.append(f"made on {there}, and this is {here}, which may round otherwise; check it on {there}")
    lines += [found.problem] if found.problem else []
    if wrong := found.difference:
        chosen = "the text must end before it" if wrong.chosen is None else f"the model chooses {shown(wrong.chosen)}"
        lines.append(f"token {wrong.index + 1} of {found.tokens} is {shown(wrong.found)}, but {chosen}")
        if wrong.top:
            top = ", ".join(f"{shown(token)} {logit:.4f}" for token, logit in wrong.top)
            lines.append(f"  most likely there: {top}")
        if lm.target.arithmetic != "exact":
            promise = lm.target.arithmetic_note
            lines.append(
                f"  arithmetic is {promise}: where two logits are nearly equal, neither token can be certified"
            )
    return lines
