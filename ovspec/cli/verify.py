from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ovspec.base.progress import show_step
from ovspec.cli.loading import load_model
from ovspec.cli.options import raise_usage_error_if, read_text_or_stdin, target_options
from ovspec.cli.path_type import PATH_TYPE
from ovspec.params.option import OptionValue

if TYPE_CHECKING:
    from ovspec.api.model import LanguageModel
    from ovspec.api.verify import Verification
    from ovspec.base.json_types import JsonObject, JsonValue


@click.command()
@click.argument("file", type=PATH_TYPE, metavar="RESULT")
@click.option("--model", "folder", metavar="DIR", help="Folder of the model.  [default: the folder named in RESULT]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@target_options
def verify(file: Path, folder: str | None, as_json: bool, **runtime: OptionValue) -> None:
    """Check every token in RESULT against the model's own choice.

    RESULT is the output of 'ovspec generate --json' or 'ovspec batch'; - is stdin. The model computes each text in a
    single forward pass, and each token is compared with the model's choice: the most likely token or, with a
    temperature, the token sampled with the recorded seed. By default the model runs with the settings recorded in
    RESULT. The exit code is 1 if a token differs.

    \b
    Example:
      ovspec generate my-pair "import os" --draft --json > result.json
      ovspec verify result.json
    """
    from ovspec.api.verify import result_from_json
    from ovspec.base.errors import OvspecError

    source_name = "stdin" if str(file) == "-" else str(file)
    models: dict[str, LanguageModel] = {}
    verifications: dict[str, Verification] = {}
    mistakes: list[str] = []
    for label, entry in iterate_recorded_texts(read_text_or_stdin(file), source_name):
        try:
            result = result_from_json(entry)
            assert result.record
            identity = result.record.model()
            model_key = json.dumps(identity, sort_keys=True, default=str)
            if model_key not in models:
                model_folder = Path(folder or str(identity.get("folder", "")))
                problem = f"the result names the model {model_folder}, but there is no such folder"
                message = f"{label}: {problem}; give the model's folder with --model."
                raise_usage_error_if(not folder and not model_folder.is_dir(), message)
                models[model_key] = load_model(model_folder, draft="none", **recorded_load_options(identity, runtime))
            with show_step(f"{label}: checking"):
                verification = models[model_key].verify(result)
        except OvspecError as error:
            raise OvspecError(f"{label}: {error}".rstrip(".") + ".") from None
        verifications[label] = verification
        if not verification.ok:
            mistakes += [
                f"{label}: {mistake_line}"
                for mistake_line in describe_mistakes(models[model_key], verification, identity)
            ]
    raise_usage_error_if(
        not verifications,
        f"{source_name}: no text to verify, because all requests failed; give another file.",
    )
    token_count = sum(verification.tokens for verification in verifications.values())
    exact_count = sum(verification.exact for verification in verifications.values())
    if as_json:
        texts_json = {label: {**asdict(text), "ok": text.ok} for label, text in verifications.items()}
        click.echo(json.dumps({"tokens": token_count, "exact": exact_count, "texts": texts_json}, ensure_ascii=False))
    else:
        verdict = f"{'not ' * bool(mistakes)}exact: {exact_count} of {token_count}"
        if len(verifications) > 1:
            verdict += f" tokens in {len(verifications)} texts"
        click.echo("\n".join([*mistakes, verdict]))
    if mistakes:
        sys.exit(1)


def iterate_recorded_texts(source: str, source_name: str) -> Iterator[tuple[str, JsonObject]]:
    """Yield (label, text with its record) for each text in a result or in a batch's output."""
    for label, entry in parse_entries(source, source_name):
        is_object = isinstance(entry, dict)
        raise_usage_error_if(
            not is_object, f"{label}: not a result; give the output of 'ovspec generate --json' or 'ovspec batch'."
        )
        if "record" not in entry and entry.get("error"):  # a batch's failed request
            continue
        response = entry.get("response")
        result_body = response.get("body", entry) if isinstance(response, dict) else entry
        compared_texts = [result_body[mode] for mode in ("plain", "speculative") if mode in result_body]
        texts = result_body.get("samples") or result_body.get("choices") or compared_texts or [result_body]
        for text_number, text in enumerate(texts, 1):
            yield (f"{label}, text {text_number}" if len(texts) > 1 else label), text


def parse_entries(source: str, source_name: str) -> list[tuple[str, JsonValue]]:
    """Return (label, value) of a single JSON value, or of each line of JSON Lines."""
    with contextlib.suppress(ValueError):
        return [(source_name, json.loads(source))]
    entries = []
    for line_number, line in enumerate(source.splitlines(), 1):
        label = f"{source_name}, line {line_number}"
        try:
            if line.strip():
                entries.append((label, json.loads(line)))
        except ValueError:
            raise click.UsageError(
                f"{label}: not JSON; give the output of 'ovspec generate --json' or 'ovspec batch'."
            ) from None
    return entries


def recorded_load_options(identity: JsonObject, runtime: dict[str, OptionValue]) -> dict[str, OptionValue]:
    """Return a text's recorded model settings as options of ``load``; ``runtime`` takes precedence."""
    passed_options = {option: value for option, value in runtime.items() if value is not None}
    recorded_options = {
        option: identity[option] for option in ("device", "engine", "arithmetic", "threads") if identity.get(option)
    }
    properties: dict[str, OptionValue] = {}
    if isinstance(identity.get("properties"), dict):
        properties = dict(identity["properties"])
    if passed_options.get("device", recorded_options.get("device")) != recorded_options.get("device"):
        recorded_options.pop("engine", None)
        properties = {}  # another device's
    kv_follows_precision = properties.get("KV_CACHE_PRECISION") == properties.get("INFERENCE_PRECISION_HINT")
    if "kv_precision" in passed_options or ("precision" in passed_options and kv_follows_precision):
        properties.pop("KV_CACHE_PRECISION", None)
    if "precision" in passed_options:
        properties.pop("INFERENCE_PRECISION_HINT", None)
    properties |= passed_options.get("properties", {})
    return {"tune": False, **recorded_options, **passed_options, "properties": properties}


def describe_mistakes(lm: LanguageModel, verification: Verification, identity: JsonObject) -> list[str]:
    """Return a text's mistakes, line by line; ``identity``: its recorded model."""

    def quote_token_with_id(token: int) -> str:
        return f"{lm.tokenizer.decode([token])!r} (id {token})"

    mistake_lines: list[str] = []
    this_system = lm.runtime.identity["system"]
    recorded_system = identity.get("system", this_system)
    if recorded_system != this_system:
        mistake_lines.append(
            f"made on {recorded_system}, but this is {this_system}, which may round differently; "
            f"check it on {recorded_system}"
        )
    if verification.problem:
        mistake_lines.append(verification.problem)
    difference = verification.difference
    if not difference:
        return mistake_lines
    model_choice = "the text must end before it"
    if difference.chosen is not None:
        model_choice = f"the model chooses {quote_token_with_id(difference.chosen)}"
    token = quote_token_with_id(difference.found)
    mistake_lines.append(f"token {difference.index + 1} of {verification.tokens} is {token}, but {model_choice}")
    if difference.top:
        top_text = ", ".join(f"{quote_token_with_id(token_id)} {logit:.4f}" for token_id, logit in difference.top)
        mistake_lines.append(f"  most likely there: {top_text}")
    if lm.target.arithmetic != "exact":
        arithmetic_note = lm.target.arithmetic_note
        mistake_lines.append(
            f"  arithmetic is {arithmetic_note}: where two logits are nearly equal, neither token can be certified"
        )
    return mistake_lines
