"""A model's most used tokens, in texts written for this purpose."""

from __future__ import annotations

from pathlib import Path

from ovspec_export.distill.documents import read_documents
from ovspec_export.distill.texts import write_texts
from ovspec_export.distill.work_folder import DOCUMENTS_FILE
from ovspec_export.draft_vocabulary import choose_most_used_ids, write_draft_vocabulary


def find_most_used_ids(model: str, folder: str, seconds: float, tokens: float, count: int, vocab_size: int) -> None:
    """Write the most used ids of the exported ``model`` into ``folder``, as ``write_draft_vocabulary`` does.

    Args:
        seconds, tokens: limits of its writing.
        count: number of ids. vocab_size: of the model.
    """
    write_texts(model, folder, seconds, tokens)
    texts = [document.ids for document in read_documents(Path(folder) / DOCUMENTS_FILE)]
    write_draft_vocabulary(Path(folder), choose_most_used_ids(texts, count, vocab_size))
