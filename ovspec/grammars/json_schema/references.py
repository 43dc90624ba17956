"""Finds what a $ref in a JSON schema refers to."""

from __future__ import annotations

import functools
from typing import Any
from urllib.parse import unquote

from ovspec.errors import OvspecError


class References:
    """The places within one schema, ``root``."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def resolved(self, value: Any, at: str) -> tuple[Any, str]:
        """Return the schema that a reference at JSON pointer ``at`` refers to, and its JSON pointer."""
        if not isinstance(value, str):
            raise OvspecError(f"{at}: this should be text such as #/$defs/name.")
        own = self.root.get("$id", self.root.get("id"))
        target = value.removeprefix(own.rstrip("#")) if isinstance(own, str) else value
        if target in ("", "#"):
            return self.root, "#"
        if not target.startswith("#"):
            raise OvspecError(f"{at}: {value!r} is outside this schema; copy it to $defs and refer to #/$defs/name.")
        if not target.startswith("#/"):
            if target[1:] in self.anchors:
                return self.anchors[target[1:]]
            raise OvspecError(f"{at}: there is no {value!r} in this schema.")
        found: Any = self.root
        for part in target[2:].split("/"):
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                raise OvspecError(f"{at}: there is no {value!r} in this schema.")
        return found, target

    @functools.cached_property
    def anchors(self) -> dict[str, tuple[Any, str]]:
        """The schemas that have a name of their own, with their JSON pointers."""
        found: dict[str, tuple[Any, str]] = {}
        waiting: list[tuple[Any, str]] = [(self.root, "#")]
        while waiting:
            value, at = waiting.pop()
            if isinstance(value, dict):
                for name in (value.get("$anchor"), value.get("$dynamicAnchor"), str(value.get("id"))[1:]):
                    if isinstance(name, str) and name:
                        found.setdefault(name, (value, at))
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(each, f"{at}/{pointed(str(key))}") for key, each in pairs if isinstance(each, dict | list)]
        return found


def pointed(key: str) -> str:
    """Return a key as JSON pointers write it."""
    return key.replace("~", "~0").replace("/", "~1")
