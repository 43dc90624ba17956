"""The tokens an MTP layer may propose: for a large vocabulary, only the model's own most used tokens.

The logits of 150,000 tokens and more take longer than the layer. A target token outside the reduced vocabulary is never
proposed; this only costs speed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from ovspec.base.progress import show_step
from ovspec.setup.manifest import MANIFEST_FILE
from ovspec_export.convert import run_worker_job
from ovspec_export.draft_vocabulary import read_draft_vocabulary
from ovspec_export.folders import link_or_copy
from ovspec_export.sources import Source

MAX_FULL_VOCABULARY = 65_536  # tokens; smaller vocabularies aren't reduced
TRIMMED_VOCABULARY = 32_768  # tokens kept of larger vocabularies
TEXT_SECONDS = 60.0  # limit of the time for writing texts
TEXT_TOKENS = 100_000.0  # this much text is enough


def choose_mtp_vocabulary(target: Source, folder: Path) -> np.ndarray | None:
    """Return the ids for the MTP layer of a target to propose, (n,) int64; None for all.

    Args:
        folder: has the target's IR; it writes texts for a minute, to count their tokens.
    """
    vocab_size = target.get_config_number("vocab") or 0
    if vocab_size <= MAX_FULL_VOCABULARY:
        return None
    texts_folder = folder / "texts"
    with show_step(f"{target.name}: writing texts, to find its most used tokens", keep_line=True):
        model_folder = texts_folder / "model"  # without the manifest of the unfinished export
        model_folder.mkdir(parents=True)
        for file in folder.iterdir():
            if file.is_file() and file.name != MANIFEST_FILE:
                link_or_copy(file, model_folder / file.name)
        run_worker_job(
            "find_most_used_ids",
            Source(target.name, model_folder, is_ir=True, revision=target.revision),
            texts_folder,
            model=str(model_folder),
            folder=str(texts_folder),
            seconds=TEXT_SECONDS,
            tokens=TEXT_TOKENS,
            count=TRIMMED_VOCABULARY,
            vocab_size=vocab_size,
        )
        ids = read_draft_vocabulary(texts_folder)
        shutil.rmtree(texts_folder)
    return ids
