"""Give a draft model fewer ids, without training: its lm_head takes less time, and keeps the most used ids.

A right proposal stays right if its token is among the remaining ids. So the share of the target's tokens outside them
is an upper bound for the loss of acceptance rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.setup.manifest import MANIFEST_FILE, ExportedModel, Manifest
from ovspec_export.compression import INT8
from ovspec_export.convert import copy_ir_files
from ovspec_export.draft_vocabulary import concatenate_ids, is_trimmed, trim_ir, write_draft_vocabulary
from ovspec_export.folders import check_disk_space, check_output_folder, open_partial_folder
from ovspec_export.manifests import complete_export, make_manifest_entry, read_installed_versions
from ovspec_export.sources import GgufSource, HeadSource, Source, copy_model_files


def compute_missing_share(texts: Iterable[Sequence[int]], ids: np.ndarray) -> float:
    """Return the share of the tokens of ``texts``, answers of the target, outside ``ids`` (n,)."""
    tokens = concatenate_ids(texts)
    return float(np.isin(tokens, ids, invert=True).mean()) if len(tokens) else 0.0


def check_trimmable(draft: Source) -> None:
    """Raise OvspecError if a draft isn't a draft model, or has few ids already."""
    if isinstance(draft, (HeadSource, GgufSource)):
        source_kind = "an EAGLE-3 head" if isinstance(draft, HeadSource) else "a GGUF file"
        raise OvspecError(
            f"{draft.name}: the vocabulary of {source_kind} can't be trimmed; give a draft model's checkpoint or IR."
        )
    if is_trimmed(draft):
        raise OvspecError(
            f"{draft.name}: this draft's vocabulary is already trimmed; set `draft` to the untrimmed draft model."
        )


def trim_draft_model(draft: Source, ids: np.ndarray, output: Path, overwrite: bool = False) -> None:
    """Write the draft model with logits of only ``ids`` (n,), sorted, into ``output``.

    An IR stays an IR. A checkpoint stays unchanged, with an added file of ids; ``export_pair`` cuts the lm_head.

    Raises:
        OvspecError: it is not a draft model or has few ids already, its lm_head isn't found, a folder is in the way, or
            the disk has too little space.
    """
    check_trimmable(draft)
    output = output.expanduser().resolve()
    check_output_folder(output, overwrite)
    check_disk_space(output, draft.size_in_bytes)
    with open_partial_folder(output, overwrite) as partial_folder:
        if draft.is_ir:
            copy_ir_files(draft, partial_folder)
            trim_ir(partial_folder, ids, draft.name)
            model_entry = make_manifest_entry(draft, partial_folder, INT8)
        else:
            copy_model_files(draft.path, partial_folder, lambda file: file.name != MANIFEST_FILE)
            write_draft_vocabulary(partial_folder, ids)
            model_entry = ExportedModel(draft.name, "as it was", {}, [], draft.revision)
        complete_export(partial_folder, output, Manifest(model_entry, None, read_installed_versions(), {}))
