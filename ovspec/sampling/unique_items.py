"""Finds what would write an item again in a JSON array whose items must all differ.

A grammar can't tell, because it has no memory of the items. So the text is followed here, byte by byte, beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ovspec.grammars.json_schema.shapes import search_pattern
from ovspec.sampling.vocabulary_index import VocabularyIndex

# What may be where in a text: for each number, the alternatives of a value, see ``json_schema.item_tracks``.
Tracks = list[list[dict[str, Any]]]
# A token -> (the tokens that a grammar allows after it, the same function for that place).
Following = Callable[[int], tuple[list[int], "Following"]]
CLOSERS = re.compile(rb"[\]},\s]")
MOST_STEPS = 400  # looked ahead for a mask
FEW = 300  # tokens that are all tried
TOKEN = re.compile(r"""\s+|"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|[a-z]+|[\[\]{}:,]""", re.DOTALL)
NUMBER = re.compile(r"-?[0-9][0-9.eE+-]*")


@dataclass(frozen=True, slots=True)
class Begun:
    """An item as far as it is written. ``whole``: its finished tokens, written as ``compact`` does; ``tail``: the rest.

    ``number``: the tail is a number.
    """

    whole: str
    tail: str
    number: bool = False

    @classmethod
    def of(cls, item: bytes) -> Begun:
        text, at, whole = item.decode("utf-8", "replace"), 0, list[str]()
        while found := TOKEN.match(text, at):
            if found.end() == len(text) and found[0].strip('[]{}:," \t\r\n') and not found[0].endswith('"'):
                break  # a number or a word, which may go on
            whole.append(compact(found[0]) if found[0].strip() else "")
            at = found.end()
        tail = text[at:]
        if tail.startswith('"'):
            return cls("".join(whole), open_text(tail))
        number = tail[:1] == "-" or tail[:1].isdigit()
        # All that follows a 0 with an exponent is 0.
        zero = number and "e" in tail.lower() and not tail.lower().partition("e")[0].strip("-0.")
        return cls("".join(whole), "0e" if zero else tail, number)

    def begins(self, text: str) -> bool:
        """Return whether ``text``, a whole item, is like this one so far."""
        if not text.startswith(self.whole):
            return False
        rest = text[len(self.whole) :]
        if rest.startswith(self.tail) or not self.number:
            return rest.startswith(self.tail)
        other, mine = NUMBER.match(rest), re.sub(r"\.?([eE][+-]?)?$", "", self.tail)
        return other is not None and compact("0" if mine == "-" else mine) == other[0]


def open_text(begun: str) -> str:
    """Return a string that hasn't ended, as ``compact`` writes it."""
    begun = re.sub(r"\\(u[0-9a-fA-F]{0,3})?$", "", begun) if not begun.endswith("\\\\") else begun
    return compact(begun + '"')[:-1]


def compact(token: str) -> str:
    """Return a token of JSON in the one spelling of its value."""
    try:
        return json.dumps(normal(json.loads(token, strict=False)), ensure_ascii=False)
    except ValueError:  # a bracket, a comma or a colon
        return token


@dataclass
class Search:
    """A search for a way on from some tokens. ``known``: whether a begun item leads nowhere."""

    left: int = MOST_STEPS
    known: dict[Begun, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Open:
    """An array or object that has begun.

    ``seen``: the items so far, if they must differ; ``texts``: as ``compact`` writes their tokens. ``start``: where the
    current item begins in the text.
    ``numbers``: the tracks of the whole; ``inner``: those of the current item or property.
    """

    array: bool
    numbers: tuple[int, ...]
    seen: frozenset[str] | None = None
    texts: tuple[str, ...] = ()
    index: int = 0
    start: int = -1
    inner: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class JsonCursor:
    """A place in a JSON text. ``within``: "string", "escape" (in a string), "scalar" or "" between tokens."""

    text: bytes = b""
    opened: tuple[Open, ...] = ()
    within: str = ""
    key: bool = False  # the string is, or the next one will be, the name of a property
    begun: int = 0  # where the string or scalar begins
    skip: int = 0  # bytes before the JSON text


class UniqueItems:
    """Follows texts of one schema.

    Args:
        tracks: where arrays with different items may be.
        vocabulary: the bytes that each token id adds to a text.
    """

    def __init__(self, tracks: Tracks, vocabulary: Sequence[bytes | None]) -> None:
        self._tracks, self._vocabulary, self._tokens = tracks, vocabulary, VocabularyIndex(vocabulary)
        known = [(text, i) for i, text in enumerate(vocabulary) if text]
        self._closing = [i for text, i in known if CLOSERS.search(text) or text.count(b'"') > 1]
        self._quoting = [i for text, i in known if b'"' in text]
        self._numeric = [i for text, i in known if not text.strip(b"0123456789.eE+-")]
        self._zeros = [i for text, i in known if not text.strip(b"0.eE+-")]

    def after(self, cursor: JsonCursor, token: int) -> JsonCursor | None:
        """Return ``cursor`` with ``token`` behind it; None if that completes an item that is there already."""
        text = self._vocabulary[token] if token < len(self._vocabulary) else None
        try:
            return self.follow(cursor, text) if text else cursor
        except ValueError:  # not JSON, which the grammar sees to
            return cursor

    def forbidden(self, cursor: JsonCursor, tokens: Iterable[int], following: Following) -> list[int]:
        """Return those of ``tokens`` after which an item would be, or could only become, one that is there already.

        Args:
            tokens: ids that the grammar allows; only those that ``suspects`` returns can be forbidden.
            following: returns (what is allowed after a token, itself for that place), as the grammar says.
        """
        search = Search()
        return [token for token in tokens if self._leads_nowhere(cursor, token, following, search)]

    def suspects(self, cursor: JsonCursor, allowed: np.ndarray) -> list[int]:
        """Return those of the ``allowed`` ids (n,) that might repeat an item, or begin one like an earlier item."""
        begun = [each for each in cursor.opened if each.seen]
        if not begun:
            return []
        if len(allowed) <= FEW:
            return allowed.tolist()
        found = set(self._quoting if cursor.within == "string" else self._closing)
        for each in begun:
            item = Begun.of(cursor.text[each.start :] if each.start >= 0 else b"")
            if "e" in item.tail.lower() and item.number:
                found.update(self._numeric)
            found.update(self._zeros)
            for text in each.texts:
                if item.begins(text):
                    found.update(self._tokens.ids_of_prefixes(text[len(item.whole) + len(item.tail) :].encode()))
        return [token for token in allowed.tolist() if token in found]

    def _leads_nowhere(self, cursor: JsonCursor, token: int, following: Following, search: Search) -> bool:
        after = self.after(cursor, token)
        if after is None:
            return True
        state = self._resembling(after)
        if state is None:
            return False
        if state not in search.known:
            if not search.left:
                return False
            search.left -= 1
            search.known[state] = True  # what leads only back to itself leads nowhere
            tokens, further = following(token)
            # White space can't lead where nothing else does.
            tokens = [each for each in tokens if (self._vocabulary[each] or b"x").strip()]
            search.known[state] = bool(tokens) and all(
                self._leads_nowhere(after, each, further, search) for each in tokens
            )
        return search.known[state]

    def _resembling(self, cursor: JsonCursor) -> Begun | None:
        """Return the item that has begun, or must follow, if it is like an earlier one so far."""
        for each in cursor.opened:
            if each.seen and (each.start >= 0 or cursor.text.rstrip().endswith(b",")):
                item = Begun.of(cursor.text[each.start :] if each.start >= 0 else b"")
                if any(item.begins(text) for text in each.texts):
                    return item
        return None

    def follow(self, cursor: JsonCursor, more: bytes) -> JsonCursor | None:
        """Return ``cursor`` with ``more`` behind it; None if that completes an item that is there already."""
        skipped = min(cursor.skip, len(more))
        walk = Walk(self._tracks, cursor, more[skipped:])
        if not all(map(walk.read, range(len(cursor.text), len(walk.text)))):
            return None
        skip = cursor.skip - skipped
        return JsonCursor(walk.text, tuple(walk.opened), walk.within, walk.key, walk.begun, skip)


class Walk:
    """Reads the bytes of ``more`` behind a text; its fields are those of ``JsonCursor``."""

    def __init__(self, tracks: Tracks, cursor: JsonCursor, more: bytes) -> None:
        self._tracks = tracks
        self.text, self.opened = cursor.text + more, list(cursor.opened)
        self.within, self.key, self.begun = cursor.within, cursor.key, cursor.begun

    def read(self, at: int) -> bool:
        """Read the byte at ``at``; return False if it completes an item that is there already."""
        byte = self.text[at : at + 1]
        if self.within == "escape":
            self.within = "string"
            return True
        if self.within == "string":
            return self._read_in_string(byte, at)
        if self.within == "scalar":
            if byte not in b",]} \n\t\r{[":
                return True
            self.within = ""
            if not self._complete(at):
                return False
        return self._read_between(byte, at)

    def _read_in_string(self, byte: bytes, at: int) -> bool:
        if byte == b"\\":
            self.within = "escape"
        elif byte == b'"':
            self.within = ""
            if not self.key:
                return self._complete(at + 1)
            self._name(json.loads(self.text[self.begun : at + 1], strict=False))
            self.key = False
        return True

    def _read_between(self, byte: bytes, at: int) -> bool:
        if byte == b",":
            self.key = bool(self.opened) and not self.opened[-1].array
        elif byte in b"]}":
            if self.opened:
                self.opened.pop()
            return self._complete(at + 1)
        elif byte not in b" \n\t\r:":
            self._begin(byte, at)
        return True

    def _begin(self, byte: bytes, at: int) -> None:
        """Note that a string, a number, a word, an array or an object begins."""
        if not self.key and self.opened and self.opened[-1].array and self.opened[-1].start < 0:
            around = self.opened[-1]
            inner = {
                each["prefix"][around.index] if around.index < len(each["prefix"]) else each["items"]
                for each in self._alternatives(around)
                if "items" in each
            }
            self.opened[-1] = replace(around, start=at, inner=tuple(sorted(inner)))
        self.begun, self.within = at, "string" if byte == b'"' else "scalar"
        if byte in b"[{":
            self.within, self.key = "", byte == b"{"
            numbers = self.opened[-1].inner if self.opened else (0,)
            unique = byte == b"[" and any(each.get("unique") for n in numbers for each in self._tracks[n])
            self.opened.append(Open(byte == b"[", numbers, frozenset() if unique else None))

    def _name(self, name: str) -> None:
        """Note which property's value follows."""
        inner = set[int]()
        for each in self._alternatives(self.opened[-1]):
            if "rest" in each:
                matching = [number for pattern, number in each["patterns"] if search_pattern(pattern, name)]
                inner |= {each["properties"][name]} if name in each["properties"] else {*matching, each["rest"]}
        self.opened[-1] = replace(self.opened[-1], inner=tuple(sorted(inner)))

    def _alternatives(self, opened: Open) -> Iterable[dict[str, Any]]:
        return (each for number in opened.numbers for each in self._tracks[number])

    def _complete(self, end: int) -> bool:
        """Note that a value has ended before ``end``; return False if it is in the array around it already."""
        if not self.opened or not self.opened[-1].array:
            return True
        around = self.opened[-1]
        after = replace(around, index=around.index + 1, start=-1)
        if around.seen is not None:
            text = self.text[around.start : end]
            # The same for equal values, as JSON Schema compares them.
            item = json.dumps(normal(json.loads(text, strict=False)), sort_keys=True, ensure_ascii=False)
            if item in around.seen:
                return False
            tokens = TOKEN.findall(text.decode("utf-8", "replace"))
            texts = (*around.texts, "".join(compact(token) for token in tokens if token.strip()))
            after = replace(after, seen=around.seen | {item}, texts=texts)
        self.opened[-1] = after
        return True


def normal(value: Any) -> Any:
    """Return a value of JSON with integers instead of equal fractions."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [normal(each) for each in value]
    return {name: normal(each) for name, each in value.items()} if isinstance(value, dict) else value
