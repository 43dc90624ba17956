from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ovspec.cli.loading import load
from ovspec.cli.options import refuse, runtime_options
from ovspec.progress import step

if TYPE_CHECKING:
    from ovspec.model import LanguageModel
    from ovspec.verify import Verification


@click.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="RESULT")
@click.option("--model", "folder", metavar="DIR", help="Folder of the model.  [default: the one that the result names]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@runtime_options
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
    from ovspec.errors import OvspecError
    from ovspec.files import read_text
    from ovspec.verify import result_from_json

    refuse(runtime["draft_device"], "--draft-device is not used here: only the target checks a text.")
    source = sys.stdin.buffer.read().decode("utf-8", "replace") if str(file) == "-" else read_text(file)
    name = "stdin" if str(file) == "-" else str(file)
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
                models[key] = load(Path(folder or its_folder(made, label)), "none", **recorded_options(made, runtime))
            with step(f"{label}: checking"):
                found = checked[label] = models[key].verify(result)
        except OvspecError as error:
            raise OvspecError(f"{label}: {error}".rstrip(".") + ".") from None
        if not found.ok:
            lines += [f"{label}: {line}" for line in described(models[key], found)]
    refuse(not checked, f"{name}: no text in it, only errors.")
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
            if line.strip():
                try:
                    entries.append((f"{name}, line {number}", json.loads(line)))
                except ValueError:
                    raise click.UsageError(f"{name}, line {number}: not JSON.") from None
    for label, entry in entries:
        refuse(not isinstance(entry, dict), f"{label}: not a result; name a file that --json or a batch has written.")
        if "record" not in entry and entry.get("error"):  # a failed request of a batch
            continue
        body = (entry.get("response") or {}).get("body", entry) if isinstance(entry.get("response"), dict) else entry
        several = body.get("samples") or body.get("choices") or [body[k] for k in ("plain", "speculative") if k in body]
        for number, each in enumerate(several or [body], 1):
            yield (f"{label}, text {number}" if len(several) > 1 else label), each


def its_folder(made: dict[str, Any], label: str) -> str:
    """Return the folder of the model that made a text."""
    folder = str(made.get("folder", ""))
    refuse(not Path(folder).is_dir(), f"{label}: its model {folder} isn't here; name the model's folder with --model.")
    return folder


def recorded_options(made: dict[str, Any], runtime: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a text was made with, as options of ``load``; the given ones take precedence."""
    given = {name: value for name, value in runtime.items() if value is not None}
    named = {name: made[name] for name in ("device", "engine", "arithmetic", "threads") if made.get(name)}
    if "device" in given and "engine" not in given:
        named.pop("engine", None)
    properties = made.get("properties")
    properties = dict(properties) if isinstance(properties, dict) else {}
    if "precision" in given and properties.get("KV_CACHE_PRECISION") == properties.get("INFERENCE_PRECISION_HINT"):
        properties.pop("KV_CACHE_PRECISION", None)  # it followed from the precision that is replaced
    for name, replaced in (("precision", "INFERENCE_PRECISION_HINT"), ("kv_precision", "KV_CACHE_PRECISION")):
        if name in given:
            properties.pop(replaced, None)
    properties |= given.get("properties", {})
    return {"tune": False, **named, **given, "properties": properties}


def described(lm: LanguageModel, found: Verification) -> list[str]:
    """Return lines that say what is wrong with a text."""
    lines = [found.problem] if found.problem else []
    if difference := found.difference:

        def shown(token: int) -> str:
            return f"{lm.tokenizer.decode([token])!r} (id {token})"

        instead = "the text must end before it" if difference.chosen is None else shown(difference.chosen)
        chosen = instead if difference.chosen is None else f"the model chooses {instead}"
        lines.append(f"token {difference.index + 1} of {found.tokens} is {shown(difference.found)}, but {chosen}")
        if difference.top:
            top = ", ".join(f"{shown(token)} {logit:.4f}" for token, logit in difference.top)
            lines.append(f"  most likely there: {top}")
    return lines
