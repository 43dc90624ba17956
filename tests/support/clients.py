"""The types of the clients openai and anthropic, which take seconds to import: only a test that uses them does."""

from __future__ import annotations

import functools
import pkgutil
from typing import Any

from pydantic import TypeAdapter


@functools.cache
def type_of(name: str) -> TypeAdapter[Any]:
    """Return what reads a type of a client, such as ``openai.types:Completion``."""
    return TypeAdapter(pkgutil.resolve_name(name))
