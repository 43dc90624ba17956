"""Files that are whole or not there."""

from __future__ import annotations

import secrets
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8 to ``path``, whose folder is made; readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
