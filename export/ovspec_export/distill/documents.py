"""The texts that are learnt from: ``documents.jsonl``, a document a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Document:
    """A text in tokens, with those of its template.

    answer: index of the first token that the model has answered with; 0 for plain text.
    source: "own" (written by the model), "chats" or "text" (given). greedy: the model chose its answer greedily.
    held_out: for judging only.
    """

    ids: list[int]
    answer: int
    source: str
    greedy: bool
    held_out: bool


def read_documents(file: Path) -> list[Document]:
    """Return the documents in a file; a last line that was cut off by a kill is left out."""
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []
    return [Document(**json.loads(line)) for line in lines]
