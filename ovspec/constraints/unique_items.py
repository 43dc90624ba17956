"""Finds what would write an item again in a JSON array whose items must all differ.

A grammar can't tell, because it has no memory of the items. So the text is followed here, byte by byte, beside it.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ovspec.grammars.json_schema.shapes import found

# What may be where in a text: for each number, the alternatives of a value as ``schema_lark.Writer.tracks`` lists them.
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
        return json.dumps(plain(json.loads(token, strict=False)), ensure_ascii=False)
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
class Followed:
    """A text that was followed. ``within``: "string", "escape" (in a string), "scalar" or "" between tokens."""

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
        self._tracks, self._vocabulary = tracks, vocabulary
        known = [(text, i) for i, text in enumerate(vocabulary) if text]
        self._sorted = sorted(known)
        self._closing = [i for text, i in known if CLOSERS.search(text) or text.count(b'"') > 1]
        self._quoting = [i for text, i in known if b'"' in text]
        self._numeric = [i for text, i in known if not text.strip(b"0123456789.eE+-")]
        self._zeros = [i for text, i in known if not text.strip(b"0.eE+-")]

    def after(self, followed: Followed, token: int) -> Followed | None:
        """Return ``followed`` with ``token`` behind it; None if that completes an item that is there already."""
        text = self._vocabulary[token] if token < len(self._vocabulary) else None
        try:
            return self.follow(followed, text) if text else followed
        except ValueError:  # not JSON, which the grammar sees to
            return followed

    def forbidden(self, followed: Followed, tokens: Iterable[int], following: Following) -> list[int]:
        """Return those of ``tokens`` after which an item would be, or could only become, one that is there already.

        Args:
            tokens: ids that the grammar allows; only those that ``suspects`` returns can be forbidden.
            following: returns (what is allowed after a token, itself for that place), as the grammar says.
        """
        search = Search()
        return [token for token in tokens if self._leads_nowhere(followed, token, following, search)]

    def suspects(self, followed: Followed, allowed: np.ndarray) -> list[int]:
        """Return those of the ``allowed`` ids (n,) that might repeat an item, or begin one like an earlier item."""
        begun = [each for each in followed.opened if each.seen]
        if not begun:
            return []
        if len(allowed) <= FEW:
            return allowed.tolist()
        found = set(self._quoting if followed.within == "string" else self._closing)
        for each in begun:
            item = Begun.of(followed.text[each.start :] if each.start >= 0 else b"")
            if "e" in item.tail.lower() and item.number:
                found.update(self._numeric)
            found.update(self._zeros)
            for text in each.texts:
                if item.begins(text):
                    found.update(self._near(text[len(item.whole) + len(item.tail) :].encode()))
        return [token for token in allowed.tolist() if token in found]

    def _near(self, rest: bytes) -> Iterator[int]:
        """Yield the ids of tokens that ``rest`` begins with."""
        for end in range(1, len(rest) + 1):
            at = bisect.bisect_left(self._sorted, (rest[:end], -1))
            if at == len(self._sorted) or not self._sorted[at][0].startswith(rest[:end]):
                return
            while at < len(self._sorted) and self._sorted[at][0] == rest[:end]:
                yield self._sorted[at][1]
                at += 1

    def _leads_nowhere(self, followed: Followed, token: int, following: Following, search: Search) -> bool:
        after = self.after(followed, token)
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

    def _resembling(self, followed: Followed) -> Begun | None:
        """Return the item that has begun, or must follow, if it is like an earlier one so far."""
        for each in followed.opened:
            if each.seen and (each.start >= 0 or followed.text.rstrip().endswith(b",")):
                item = Begun.of(followed.text[each.start :] if each.start >= 0 else b"")
                if any(item.begins(text) for text in each.texts):
                    return item
        return None

    def follow(self, followed: Followed, more: bytes) -> Followed | None:
        """Return ``followed`` with ``more`` behind it; None if that completes an item that is there already."""
        if followed.skip:
            left = max(0, followed.skip - len(more))
            more, followed = more[followed.skip :], replace(followed, skip=left)
        start = len(followed.text)
        text, opened = followed.text + more, list(followed.opened)
        within, key, begun = followed.within, followed.key, followed.begun
        for at in range(start, len(text)):
            byte = text[at : at + 1]
            if within == "escape":
                within = "string"
            elif within == "string":
                if byte == b"\\":
                    within = "escape"
                elif byte == b'"':
                    within = ""
                    if key:
                        self._named(opened, json.loads(text[begun : at + 1], strict=False))
                        key = False
                    elif not self._complete(opened, text[: at + 1]):
                        return None
            else:
                if within == "scalar" and byte in b",]} \n\t\r":
                    within = ""
                    if not self._complete(opened, text[:at]):
                        return None
                if within == "scalar" or byte in b" \n\t\r:":
                    continue
                if byte == b",":
                    key = bool(opened) and not opened[-1].array
                elif byte in b"]}":
                    if opened:
                        opened.pop()
                    if not self._complete(opened, text[: at + 1]):
                        return None
                else:
                    if not key:
                        self._begin(opened, at)
                    begun, within = at, "string" if byte == b'"' else "scalar"
                    if byte in b"[{":
                        within, key = "", byte == b"{"
                        opened.append(self._opened(opened, byte == b"["))
        return Followed(text, tuple(opened), within, key, begun, followed.skip)

    def _opened(self, opened: list[Open], array: bool) -> Open:
        numbers = opened[-1].inner if opened else (0,)
        unique = array and any(each.get("unique") for number in numbers for each in self._tracks[number])
        return Open(array, numbers, frozenset() if unique else None)

    def _begin(self, opened: list[Open], at: int) -> None:
        """Note where an item begins."""
        if opened and opened[-1].array and opened[-1].start < 0:
            around = opened[-1]
            inner = set[int]()
            for each in self._alternatives(around):
                if "items" in each:
                    prefix = each["prefix"]
                    inner.add(prefix[around.index] if around.index < len(prefix) else each["items"])
            opened[-1] = replace(around, start=at, inner=tuple(sorted(inner)))

    def _named(self, opened: list[Open], name: str) -> None:
        """Note which property's value follows."""
        inner = set[int]()
        for each in self._alternatives(opened[-1]):
            if "rest" in each:
                matching = [number for pattern, number in each["patterns"] if found(pattern, name)]
                inner |= {each["properties"][name]} if name in each["properties"] else {*matching, each["rest"]}
        opened[-1] = replace(opened[-1], inner=tuple(sorted(inner)))

    def _alternatives(self, opened: Open) -> Iterable[dict[str, Any]]:
        return (each for number in opened.numbers for each in self._tracks[number])

    def _complete(self, opened: list[Open], text: bytes) -> bool:
        """Note that a value has ended; return False if it is in the array around it already."""
        if not opened or not opened[-1].array:
            return True
        around = opened[-1]
        if around.seen is None:
            opened[-1] = replace(around, index=around.index + 1, start=-1)
            return True
        item = canonical(json.loads(text[around.start :], strict=False))
        if item in around.seen:
            return False
        tokens = TOKEN.findall(text[around.start :].decode("utf-8", "replace"))
        texts = (*around.texts, "".join(compact(token) for token in tokens if token.strip()))
        opened[-1] = replace(around, index=around.index + 1, start=-1, seen=around.seen | {item}, texts=texts)
        return True


def canonical(value: Any) -> str:
    """Return a text that is the same for equal values, as JSON Schema compares them."""
    return json.dumps(plain(value), sort_keys=True, ensure_ascii=False)


def plain(value: Any) -> Any:
    """Return a value of JSON with integers instead of equal fractions."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [plain(each) for each in value]
    return {name: plain(each) for name, each in value.items()} if isinstance(value, dict) else value
