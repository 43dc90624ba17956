"""Writes the grammar of an object whose properties are written one by one, strings without quotes, others as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from ovspec.base.errors import OvspecError
from ovspec.grammars.json_schema.expressions import escaped, found_in, in_ascii, slashed
from ovspec.grammars.json_schema.shapes import Node, Objects, Refused, Strings, closed
from ovspec.grammars.json_schema.writing import RuleWriter, in_order, lengths, options_of, quoted_text

# llguidance 1.9 fails where a token follows what has no way on but by the negation in its expression.
SPACE = "/ ?/"


@dataclass(frozen=True)
class Around:
    """What is around names and values.

    open, middle, after: expressions of Lark in front of a name, between name and value, and behind ``close``.
    name_end: the text that ends a name; "" if there is a token in it.
    close: text behind a value.
    token: whether ``after`` begins with a token; otherwise no string may have ``close`` in it.
    """

    open: str
    middle: str
    name_end: str
    close: str
    after: str
    token: bool


def grammar_of_parameters(rules: RuleWriter, close_objects: bool, around: Around) -> tuple[str, list[str]]:
    """Return (the whole grammar, the properties that are written as text without quotes).

    Args:
        close: as for ``writing.grammar_of``.

    Raises:
        OvspecError: no object matches, or something can't be enforced.
    """
    objects, strings, alternatives = list[str](), set[str](), rules.schemas.shape(rules.schemas.root).kinds
    for each in alternatives.get("object", ()):
        if isinstance(each, Refused):
            raise OvspecError(f"{each.at}: {each.why}; rewrite it, or set `json_schema_mode='checked'`.")
        assert isinstance(each, Objects)
        objects.append(parameters(rules, closed(each) if close_objects else each, around, strings))
    if not objects:
        raise OvspecError("#: no object satisfies this schema.")
    while rules.waiting:
        node, name = rules.waiting.pop()
        rules.lines.append(f"{name}: {options_of(rules, node, close_objects)}")
    if rules.repeats and not rules.schemas.lenient:
        raise OvspecError("#: uniqueItems can't be enforced in this tool format; leave it out.")
    return "\n".join([f"start: {' | '.join(objects)}", *rules.lines]), sorted(strings)


def parameters(rules: RuleWriter, each: Objects, around: Around, strings: set[str]) -> str:
    """Return the properties of an object; add those that are texts to ``strings``."""
    if not each.properties and (each.patterns or not rules.schemas.empty(each.rest)):
        rules.refuse("#", "properties that aren't listed can't be written in this tool format")
    items = list[tuple[str, bool]]()
    for name, node in each.properties:
        if rules.schemas.empty(node):
            continue
        if around.name_end and (name + around.name_end).find(around.name_end) < len(name):
            raise OvspecError(f"#: in this tool format no parameter can be called {name!r:.80}; rename it.")
        text = text_of(rules, node, around)
        if text:
            strings.add(name)
        elif name in strings:
            raise OvspecError(f"#: in this tool format {name} can't be both a string and another value.")
        value = text or f"{rules.value(node)} {quoted_text(around.close) if around.close else SPACE}"
        head = f"{around.open} {quoted_text(name)} {around.middle}"
        items.append((rules.rule(f"{head} {value} {around.after}"), name in each.required))
    return in_order(rules, items, (each.least, each.most), None, "")


def text_of(rules: RuleWriter, node: Node, around: Around) -> str | None:
    """Return the terminals of a node's texts with ``around.close`` behind them; None if some values are no texts."""
    kinds = {kind: alternatives for kind, alternatives in rules.schemas.shape(node).kinds.items() if alternatives}
    found = list[str]()
    if kinds.keys() != {"string"}:
        return None
    for each in kinds["string"]:
        if not isinstance(each, Strings) or each.formats or each.absent:
            return None
        patterns = [found_in(in_ascii(pattern), "(?s:.*)") for pattern in sorted(each.patterns)]
        if None in patterns:
            return None
        if each.excluded and around.token:  # see SPACE
            return None
        found.append(terminal(rules, each, [*filter(None, patterns)], around))
    return f"({' | '.join(found)})"


def terminal(rules: RuleWriter, each: Strings, patterns: list[str], around: Around) -> str:
    end = slashed(escaped(around.close))
    parts = [f"/(?s:.){lengths(each)}{end}/", *(f"/{slashed(pattern)}{end}/" for pattern in patterns)]
    if each.values is not None:
        parts.append(f"({' | '.join(quoted_text(value + around.close) for value in each.values)})")
    if each.excluded:
        parts.append(f"~({' | '.join(quoted_text(value + around.close) for value in sorted(each.excluded))})")
    if not around.token:
        parts.append(f"~/(?s:.*){end}(?s:.+)/")
    return rules.terminal(" & ".join(parts))
