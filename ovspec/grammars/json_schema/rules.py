"""Writes rules and terminals in llguidance's dialect of Lark: their names, and those of strings and numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ovspec.errors import OvspecError
from ovspec.grammars.json_schema import numbers
from ovspec.grammars.json_schema.expressions import in_ascii, none_of, slashed, sought
from ovspec.grammars.json_schema.formats import STRICTER
from ovspec.grammars.json_schema.schemas import Schemas
from ovspec.grammars.json_schema.shapes import Node, Numbers, Strings

# Without \uXXXX: a key would have several spellings.
ESCAPES = 'nrbtf\\"'
UNESCAPED = r'[^"\\\x00-\x1f\x7f]'
MOST_BOUNDED = 1000
CHARACTER = r'([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])'


@dataclass(frozen=True)
class Style:
    """How texts are laid out: expressions of the white space between tokens, and of the separators."""

    white_space: str | None
    item_separator: str = ","
    key_separator: str = ":"


@dataclass
class RuleWriter:
    """Writes rules and terminals; those of equal content are written once.

    ``waiting``: nodes whose rules have names and aren't written yet.
    """

    schemas: Schemas
    style: Style
    patterns_apart: Callable[[str, str], bool]
    repeats: bool = False  # whether the grammar allows arrays to repeat items that must differ: see ``tracks_of``
    lines: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # content -> name of a rule or terminal
    _nodes: dict[Node, str] = field(default_factory=dict)
    waiting: list[tuple[Node, str]] = field(default_factory=list)

    # ------------------------------------------------------------ names

    def write(self, name: str, content: str) -> None:
        self.lines.append(f"{name}: {content}")

    def terminal(self, content: str) -> str:
        if content not in self.names:
            self.names[content] = f"T{len(self.names)}"
            self.write(self.names[content], content)
        return self.names[content]

    def rule(self, content: str) -> str:
        if content not in self.names:
            self.names[content] = f"r{len(self.names)}"
            self.write(self.names[content], content)
        return self.names[content]

    def value(self, node: Node) -> str:
        """Return the rule of a node, which is written later."""
        if node not in self._nodes:
            name = self._nodes[node] = f"v{len(self._nodes)}"
            self.waiting.append((node, name))
        return self._nodes[node]

    # ------------------------------------------------------------ values

    def number(self, each: Numbers) -> str:
        if each.multiple:
            exact = all(bound is None or abs(bound.value) <= numbers.EXACT for bound in (each.low, each.high))
            if each.excluded or not exact:
                self.refuse("#", "multipleOf can't be enforced beside excluded numbers or bounds beyond 2**53")
            return self._leaf(multiple_schema(each))
        parts = [f"/{slashed(part)}/" for part in numbers.expressions(each)]
        if without := numbers.excluded(each):
            parts.append(f"~/{without}/")
        return self.terminal(" & ".join(parts))

    def string(self, each: Strings) -> str:
        if each.values is not None and not each.formats:
            return self.terminal(" | ".join(map(quoted, each.values)))
        if each.absent:
            return self._unescaped(each)
        if not each.patterns and not each.formats:
            parts = [f'/"{CHARACTER}{lengths(each)}"/']
            if each.excluded:
                parts.append(f"~({' | '.join(map(quoted, sorted(each.excluded)))})")
            return self.terminal(" & ".join(parts))
        return self._leaf(string_schema(each))

    def _unescaped(self, each: Strings) -> str:
        """Return the texts without any escape that fit ``each``: only they can be compared with ``absent``."""
        present = [sought(in_ascii(pattern)) for pattern in sorted(each.patterns)]
        absent = [sought(pattern) for pattern in sorted(each.absent)]
        if each.formats or None in present or None in absent:
            self.refuse(f"the pattern {min(each.absent)!r}", "it can't be negated here")
            return self.string(replace(each, absent=frozenset()))
        parts = [
            f'/"{UNESCAPED}{lengths(each)}"/',
            *(f"/{part}/" for part in present),
            *(f"~/{part}/" for part in absent),
        ]
        if each.excluded:
            parts.append(f"~({' | '.join(map(quoted, sorted(each.excluded)))})")
        return self.terminal(" & ".join(parts))

    def _leaf(self, schema: dict[str, Any]) -> str:
        """Return the rule of a number or string that llguidance's own JSON schemas describe."""
        style = (
            {"whitespace_pattern": self.style.white_space} if self.style.white_space else {"whitespace_flexible": False}
        )
        guided = {**schema, "x-guidance": {**style, "json_allowed_escapes": ESCAPES}}
        return self.rule(f"%json {json.dumps(guided)}")

    def separator(self, expression: str) -> str:
        return quoted_text(expression) if expression in (",", ":") else self.terminal(f"/{slashed(expression)}/")

    def refuse(self, at: str, why: str) -> None:
        """Raise OvspecError, unless what can't be enforced is to be left out."""
        if not self.schemas.lenient:
            raise OvspecError(f"{at}: {why}; rewrite it, or set `json_schema_mode='checked'`.")


def multiple_schema(each: Numbers) -> dict[str, Any]:
    """Return llguidance's own schema of the multiples of a number, with a bounded number of digits."""
    assert each.multiple
    schema = {"type": "integer" if each.integer else "number", "multipleOf": as_number(each.multiple)}
    bounded = each.multiple < MOST_BOUNDED  # else the bounds would take llguidance too long
    for bound, key, usual in ((each.low, "minimum", -numbers.EXACT), (each.high, "maximum", numbers.EXACT)):
        if bound or bounded:
            name = f"exclusive{key.capitalize()}" if bound and bound.strict else key
            schema[name] = as_number(bound.value) if bound else usual
    return schema


def lengths(each: Strings) -> str:
    return "*" if not each.least and each.most is None else f"{{{each.least},{'' if each.most is None else each.most}}}"


def string_schema(each: Strings) -> dict[str, Any]:
    """Return llguidance's own schema of a string."""
    schema: dict[str, Any] = {"type": "string", "minLength": each.least}
    if each.values is not None:
        schema["enum"] = list(each.values)
    if each.most is not None:
        schema["maxLength"] = each.most
    patterns = [*sorted(each.patterns), *(STRICTER[form] for form in sorted(each.formats) if form in STRICTER)]
    parts = [{"pattern": pattern} for pattern in patterns] + [{"format": form} for form in sorted(each.formats)]
    if each.excluded:
        parts.append({"pattern": none_of(each.excluded)})
    return {**schema, "allOf": parts}


def quoted(value: str) -> str:
    """Return a literal of Lark that is the JSON string of ``value``."""
    return quoted_text(json.dumps(value, ensure_ascii=False))


def quoted_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def as_number(value: Any) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)
