"""Types for parsed JSON; readers of a value check its shape."""

from __future__ import annotations

from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
JsonValue: TypeAlias = Any  # an object, list, string, number, boolean or None; type checkers can't narrow it further
