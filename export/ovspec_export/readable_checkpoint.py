"""Turns a source into a checkpoint readable by optimum."""

from __future__ import annotations

from pathlib import Path

from ovspec_export.compression import KEEP
from ovspec_export.gguf_checkpoint import write_gguf_checkpoint, write_kept_gguf_checkpoint
from ovspec_export.kept_checkpoint import write_kept_checkpoint
from ovspec_export.sources import GgufSource, Source
from ovspec_export.text_part import extract_text_model


def ensure_readable_checkpoint(source: Source, folder: Path, weight_format: str) -> Source:
    """Return a source readable by optimum: the same, or a new checkpoint in ``folder``."""
    if isinstance(source, GgufSource):
        if weight_format == KEEP:
            return write_kept_gguf_checkpoint(source, folder)
        return write_gguf_checkpoint(source, folder, weight_format)
    if weight_format == KEEP:
        return write_kept_checkpoint(source, folder)
    return extract_text_model(source, folder) if source.has_non_text_parts else source
