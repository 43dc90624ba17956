"""stand-in until texts branch lands"""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Document:
    ids: list[int]
    answer: int
    source: str
    greedy: bool
    held_out: bool


def read_documents(file: Path) -> list[Document]:
    return [Document(**json.loads(line)) for line in file.read_text().splitlines()]
