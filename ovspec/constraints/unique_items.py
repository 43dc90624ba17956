"""Finds what would write an item again in a JSON array whose items must all differ.

A grammar can't tell, because it has no memory of the items. So the text is followed here, byte by byte, beside it.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ovspec.grammars.shapes import found

# What may be where in a text: for each number, the alternatives of a value as ``schema_lark.Writer.tracks`` lists them.
Tracks = list[list[dict[str, Any]]]
# A token -> (the tokens that a grammar allows after it, the same function for that place).
Following = Callable[[int], tuple[list[int], "Following"]]
CLOSERS = re.compile(rb"[\]},\s]")
MOST_STEPS = 100  # looked ahead for a mask


@dataclass(frozen=True, slots=True)
class Open:
    """An array or object that has begun.

    ``seen``: the items so far, if they must differ; ``texts``: as they were written. ``start``: where the current item
    begins in the text.
    ``numbers``: the tracks of the whole; ``inner``: those of the current item or property.
    """

    array: bool
    numbers: tuple[int, ...]
    seen: frozenset[str] | None = None
    texts: tuple[bytes, ...] = ()
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
        left = [MOST_STEPS]
        return [token for token in tokens if self._leads_nowhere(followed, token, following, left)]

    def suspects(self, followed: Followed) -> list[int]:
        """Return the ids of tokens that might repeat an item, or begin one like an item that is there already."""
        begun = [each for each in followed.opened if each.seen]
        if not begun:
            return []
        found = set(self._closing)
        for each in begun:
            item = followed.text[each.start :] if each.start >= 0 else b""
            for text in each.texts:
                if text.startswith(item):
                    found.update(self._near(text[len(item) :]))
        return sorted(found)

    def _near(self, rest: bytes) -> Iterator[int]:
        """Yield the ids of tokens that ``rest`` begins with."""
        for end in range(1, len(rest) + 1):
            at = bisect.bisect_left(self._sorted, (rest[:end], -1))
            if at == len(self._sorted) or not self._sorted[at][0].startswith(rest[:end]):
                return
            while at < len(self._sorted) and self._sorted[at][0] == rest[:end]:
                yield self._sorted[at][1]
                at += 1

    def _leads_nowhere(self, followed: Followed, token: int, following: Following, left: list[int]) -> bool:
        after = self.after(followed, token)
        if after is None:
            return True
        if not self._resembles(after) or left[0] <= 0:
            return False
        left[0] -= 1
        tokens, further = following(token)
        # White space can't lead where nothing else does.
        tokens = [each for each in tokens if (self._vocabulary[each] or b"x").strip()]
        return bool(tokens) and all(self._leads_nowhere(after, each, further, left) for each in tokens)

    def _resembles(self, followed: Followed) -> bool:
        """Return whether a new item is like an earlier one so far."""
        for each in followed.opened:
            if each.seen:
                item = followed.text[each.start :] if each.start >= 0 else b""
                if any(text.startswith(item) for text in each.texts):
                    return True
        return False

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
        texts = (*around.texts, text[around.start :].rstrip())
        opened[-1] = replace(around, index=around.index + 1, start=-1, seen=around.seen | {item}, texts=texts)
        return True


def canonical(value: Any) -> str:
    """Return a text that is the same for equal values, as JSON Schema compares them."""

    def plain(each: Any) -> Any:
        if isinstance(each, float) and each.is_integer():
            return int(each)
        if isinstance(each, list):
            return [plain(one) for one in each]
        return {name: plain(one) for name, one in each.items()} if isinstance(each, dict) else each

    return json.dumps(plain(value), sort_keys=True, ensure_ascii=False)
