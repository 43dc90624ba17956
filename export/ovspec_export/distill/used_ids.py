"""The tokens that a model uses most, in texts that it writes for this alone."""

from __future__ import annotations

from pathlib import Path

from ovspec_export.distill.documents import read_documents
from ovspec_export.distill.texts import write_texts
from ovspec_export.distill.work_folder import DOCUMENTS_FILE
from ovspec_export.draft_vocabulary import choose_most_used_ids, write_draft_vocabulary


def find_most_used_ids(model: str, folder: str, seconds: float, tokens: float, count: int, vocab_size: int) -> None:
    """Write the ids that the exported ``model`` uses most into ``folder``, as ``write_draft_vocabulary`` does.

    Args:
        seconds, tokens: for which it writes, and that are enough.
        count: as many ids. vocab_size: of the model.
    """
    write_texts(model, folder, seconds, tokens)
    texts = [document.ids for document in read_documents(Path(folder) / DOCUMENTS_FILE)]
    write_draft_vocabulary(Path(folder), choose_most_used_ids(texts, count, vocab_size))
