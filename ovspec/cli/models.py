from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ovspec.base.errors import OvspecError
from ovspec.base.progress import format_size
from ovspec.cli.options import raise_usage_error_if

if TYPE_CHECKING:
    from ovspec.setup.model_store import StoredModel

REMOVE_WORD = "rm"


@click.command()
@click.argument("arguments", nargs=-1, metavar="[rm NAME...]")
@click.option("--prune", type=click.FloatRange(0), metavar="DAYS", help="Delete models unused for this many days.")
def models(arguments: tuple[str, ...], prune: float | None) -> None:
    """List or delete the models in the cache.

    Each line shows a model's name, source, weight format, size, last use, and draft or head, if any. 'rm' deletes
    models by name or source. Models in use by a process are kept.

    \b
    Examples:
      ovspec models
      ovspec models rm SmolLM2-135M-Instruct.Q4_1-keep
      ovspec models --prune 30
    """
    raise_usage_error_if(
        arguments and arguments[0] != REMOVE_WORD, "Too many arguments; to delete models, run: ovspec models rm NAME..."
    )
    raise_usage_error_if(len(arguments) == 1, "Missing names; give the models to delete: ovspec models rm NAME...")
    raise_usage_error_if(
        arguments and prune is not None, "--prune can't be combined with names; leave out --prune or the names."
    )
    from ovspec.setup import model_store

    folders = []
    if arguments:
        folders = [folder for name in arguments[1:] for folder in find_named_folders(name)]
    elif prune is not None:
        folders = model_store.list_unused_models(prune)
    if not arguments and prune is None:
        print_models()
        return
    model_store.delete_leftovers()
    failures: list[OvspecError] = []
    for folder in dict.fromkeys(folders):
        try:
            model_store.remove_model(folder)
            click.echo(f"{folder.name}: deleted")
        except OvspecError as error:
            failures.append(error)
    if failures:
        raise OvspecError("\n".join(map(str, failures)))


def find_named_folders(name: str) -> list[Path]:
    """Return the store's folders for a listed name or a source; raises OvspecError if there are none."""
    from ovspec.setup import model_names, model_store

    folders = [folder for folder in model_store.list_entry_folders() if folder.name == name]
    if not folders and (source := model_names.find_model_source(name)):
        folders = [
            stored.folder
            for stored in model_store.list_stored_models()
            if stored.record.source == source.name and source.revision in (None, stored.record.revision)
        ]
    if not folders:
        raise OvspecError(f"{name}: not a model in the cache; run 'ovspec models' to list the models.")
    return folders


def print_models() -> None:
    """Print a table of the models in the store."""
    from ovspec.setup import model_store

    folders = model_store.list_entry_folders()
    if not folders:
        click.echo("The cache has no models yet; 'ovspec chat MODEL' exports and keeps MODEL.", err=True)
        return
    rows = [
        ("NAME", "SOURCE", "FORMAT", "SIZE", "LAST USED", "DRAFT"),
        *map(make_row, model_store.list_stored_models()),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for folder in filter(model_store.is_damaged_entry, folders):
        click.echo(
            f"{folder.name}: damaged, so it is never used; 'ovspec models rm {folder.name}' deletes it", err=True
        )


def make_row(stored: StoredModel) -> tuple[str, ...]:
    """Return the cells of a model's line."""
    source = stored.record.source + f"@{stored.record.revision}" * bool(
        stored.record.revision and not Path(stored.record.source).is_absolute()
    )
    return (
        stored.name,
        source,
        stored.manifest.target.weight_format,
        format_size(stored.size_in_bytes),
        format_age(time.time() - stored.last_used),
        stored.draft_kind,
    )


def format_age(seconds: float) -> str:
    """Return an age in its largest unit."""
    for unit, unit_seconds in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= unit_seconds:
            count = int(seconds // unit_seconds)
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "just now"
