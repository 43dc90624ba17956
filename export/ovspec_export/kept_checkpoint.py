"""A copy of a checkpoint without its quantised weights; they are read in place."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from ovspec.base.json_types import JsonObject
from ovspec.base.progress import print_note
from ovspec_export.checkpoint_weights import read_quantisation
from ovspec_export.kept_weights import QUANTISATION_KEYS, WEIGHTS_FILE
from ovspec_export.quantised import find_quantisation_config
from ovspec_export.sources import Source, copy_missing_files


def write_kept_checkpoint(source: Source, folder: Path) -> Source:
    """Write the config and the tokenizer of a quantised checkpoint into ``folder``, without its weights."""
    folder.mkdir(parents=True)
    quantisation = read_quantisation(find_quantisation_config(source.config) or {})
    if quantisation.rounds_inputs:
        print_note(
            f"{source.name}: made to round the values that its weights are multiplied with, too, which isn't kept"
        )
    dtype_keys = {"dtype": "float32", "torch_dtype": "float32"}
    config = {
        name: dtype_keys.get(name, entry) for name, entry in source.config.items() if name not in QUANTISATION_KEYS
    }
    location: JsonObject = {"checkpoint": str(source.path.absolute()), "quantisation": asdict(quantisation)}
    for file_name, entries in (("config.json", config), (WEIGHTS_FILE, location)):
        (folder / file_name).write_text(json.dumps(entries, indent=2), encoding="utf-8", newline="\n")
    copy_missing_files(source.path, folder)
    return Source(source.name, folder, is_ir=False, revision=source.revision)
