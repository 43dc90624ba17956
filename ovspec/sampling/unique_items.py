"""Finds the tokens leading to a duplicate item in a JSON array with unique items.

A grammar has no memory of the items, so it can't prevent duplicates. So the text is also parsed here, byte by byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.grammars.json_schema.item_tracks import ItemTracks
from ovspec.grammars.json_schema.shapes import search_pattern
from ovspec.sampling.vocabulary_index import VocabularyIndex

# A token -> (the tokens allowed after it by the grammar, the same function for the position after it).
FollowingIds = Callable[[int], tuple[list[int], "FollowingIds"]]
ITEM_CLOSERS = re.compile(rb"[\]},\s]")
MAX_SEARCH_STEPS = 400  # tokens looked ahead for a mask
MAX_UNFILTERED_IDS = 300  # up to this many tokens are all tried
JSON_TOKEN = re.compile(r"""\s+|"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|[a-z]+|[\[\]{}:,]""", re.DOTALL)
JSON_NUMBER = re.compile(r"-?[0-9][0-9.eE+-]*")


@dataclass(frozen=True, slots=True)
class BegunItem:
    """An item as far as it is written.

    ``finished_text``: its finished tokens, as written by ``normalize_json_token``; ``open_text``: the rest.
    ``is_number``: the rest is a number.
    """

    finished_text: str
    open_text: str
    is_number: bool = False

    @classmethod
    def from_bytes(cls, item: bytes) -> BegunItem:
        text = item.decode("utf-8", "replace")
        offset = 0
        finished_tokens: list[str] = []
        while match := JSON_TOKEN.match(text, offset):
            if match.end() == len(text) and match[0].strip('[]{}:," \t\r\n') and not match[0].endswith('"'):
                break  # a number or a word, which may continue
            finished_tokens.append(normalize_json_token(match[0]) if match[0].strip() else "")
            offset = match.end()
        open_text = text[offset:]
        if open_text.startswith('"'):
            return cls("".join(finished_tokens), normalize_open_string(open_text))
        is_number = open_text[:1] == "-" or open_text[:1].isdigit()
        # A zero stays zero with any exponent.
        is_zero = is_number and "e" in open_text.lower() and not open_text.lower().partition("e")[0].strip("-0.")
        return cls("".join(finished_tokens), "0e" if is_zero else open_text, is_number)

    def may_become(self, text: str) -> bool:
        """Return whether ``text``, a whole item, begins like this item so far."""
        if not text.startswith(self.finished_text):
            return False
        remaining_text = text[len(self.finished_text) :]
        if remaining_text.startswith(self.open_text) or not self.is_number:
            return remaining_text.startswith(self.open_text)
        number_match = JSON_NUMBER.match(remaining_text)
        digits = re.sub(r"\.?([eE][+-]?)?$", "", self.open_text)
        return number_match is not None and normalize_json_token("0" if digits == "-" else digits) == number_match[0]


def normalize_open_string(begun_string: str) -> str:
    """Return an unfinished string as ``normalize_json_token`` writes it."""
    begun_string = (
        re.sub(r"\\(u[0-9a-fA-F]{0,3})?$", "", begun_string) if not begun_string.endswith("\\\\") else begun_string
    )
    return normalize_json_token(begun_string + '"')[:-1]


def normalize_json_token(token: str) -> str:
    """Return a token of JSON in its canonical spelling."""
    try:
        return json.dumps(replace_whole_floats(json.loads(token, strict=False)), ensure_ascii=False)
    except ValueError:  # a bracket, a comma or a colon
        return token


@dataclass
class ContinuationSearch:
    """A search for a continuation of some tokens. ``dead_end_by_item``: whether a begun item is a dead end."""

    steps_left: int = MAX_SEARCH_STEPS
    dead_end_by_item: dict[BegunItem, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenContainer:
    """An open array or object.

    ``earlier_items``: the items so far, if they must be unique; ``earlier_texts``: their tokens as written by
    ``normalize_json_token``. ``item_start``: start of the current item in the text. ``track_numbers``: the tracks of
    the whole; ``item_tracks``: the tracks of the current item or property.
    """

    is_array: bool
    track_numbers: tuple[int, ...]
    earlier_items: frozenset[str] | None = None
    earlier_texts: tuple[str, ...] = ()
    item_index: int = 0
    item_start: int = -1
    item_tracks: tuple[int, ...] = ()

    def begun_item(self, cursor: JsonCursor) -> BegunItem:
        """Return the current item as far as it is written at ``cursor``."""
        return BegunItem.from_bytes(cursor.text[self.item_start :] if self.item_start >= 0 else b"")


@dataclass(frozen=True, slots=True)
class JsonCursor:
    """A position in a JSON text. ``token_kind``: "string", "escape" (in a string), "scalar" or "" between tokens."""

    text: bytes = b""
    containers: tuple[OpenContainer, ...] = ()
    token_kind: str = ""
    expects_key: bool = False  # the open or next string is a property name
    token_start: int = 0  # start of the string or scalar
    skipped_bytes: int = 0  # bytes before the JSON text


class UniqueItems:
    """Follows the texts of a schema.

    Args:
        tracks: where the arrays with unique items may be.
        vocabulary: the bytes added to a text by each token id.
    """

    def __init__(self, tracks: ItemTracks, vocabulary: Sequence[bytes | None]) -> None:
        self._tracks = tracks
        self._vocabulary = vocabulary
        self._vocabulary_index = VocabularyIndex(vocabulary)
        token_bytes = [(token_text, token_id) for token_id, token_text in enumerate(vocabulary) if token_text]
        self._closing_ids = [
            token_id
            for token_text, token_id in token_bytes
            if ITEM_CLOSERS.search(token_text) or token_text.count(b'"') > 1
        ]
        self._quoting_ids = [token_id for token_text, token_id in token_bytes if b'"' in token_text]
        self._numeric_ids = [
            token_id for token_text, token_id in token_bytes if not token_text.strip(b"0123456789.eE+-")
        ]
        self._zero_ids = [token_id for token_text, token_id in token_bytes if not token_text.strip(b"0.eE+-")]

    def advance_cursor(self, cursor: JsonCursor, token: int) -> JsonCursor | None:
        """Return ``cursor`` with ``token`` appended; None if it completes a duplicate item."""
        added_bytes = self._vocabulary[token] if token < len(self._vocabulary) else None
        try:
            return self.advance_by_bytes(cursor, added_bytes) if added_bytes else cursor
        except ValueError:  # invalid JSON, which the grammar prevents
            return cursor

    def find_forbidden_ids(
        self, cursor: JsonCursor, tokens: Iterable[int], find_following_ids: FollowingIds
    ) -> list[int]:
        """Return the ``tokens`` after which an item would be, or could only become, a duplicate.

        Args:
            tokens: ids allowed by the grammar; only the results of ``find_suspect_ids`` can be forbidden.
            find_following_ids: returns (the ids allowed after a token, itself for that position), by the grammar.
        """
        repeat_search = ContinuationSearch()
        return [token for token in tokens if self._leads_nowhere(cursor, token, find_following_ids, repeat_search)]

    def find_suspect_ids(self, cursor: JsonCursor, allowed_ids: np.ndarray) -> list[int]:
        """Return the ``allowed_ids`` (n,) that might duplicate an item, or begin like an earlier item."""
        containers = [container for container in cursor.containers if container.earlier_items]
        if not containers:
            return []
        if len(allowed_ids) <= MAX_UNFILTERED_IDS:
            return allowed_ids.tolist()
        suspect_ids = set(self._quoting_ids if cursor.token_kind == "string" else self._closing_ids)
        for container in containers:
            open_item = container.begun_item(cursor)
            if "e" in open_item.open_text.lower() and open_item.is_number:
                suspect_ids.update(self._numeric_ids)
            suspect_ids.update(self._zero_ids)
            for earlier_text in container.earlier_texts:
                if open_item.may_become(earlier_text):
                    remaining_bytes = earlier_text[len(open_item.finished_text) + len(open_item.open_text) :].encode()
                    suspect_ids.update(self._vocabulary_index.ids_of_prefixes(remaining_bytes))
        return [token for token in allowed_ids.tolist() if token in suspect_ids]

    def _leads_nowhere(
        self, cursor: JsonCursor, token: int, find_following_ids: FollowingIds, repeat_search: ContinuationSearch
    ) -> bool:
        next_cursor = self.advance_cursor(cursor, token)
        if next_cursor is None:
            return True
        repeated_item = self._find_repeated_item(next_cursor)
        if repeated_item is None:
            return False
        if repeated_item not in repeat_search.dead_end_by_item:
            if not repeat_search.steps_left:
                return False
            repeat_search.steps_left -= 1
            repeat_search.dead_end_by_item[repeated_item] = True  # if all paths return here, it is a dead end
            following_ids, find_next_ids = find_following_ids(token)
            # White space opens no paths beyond the other tokens' paths.
            following_ids = [token_id for token_id in following_ids if (self._vocabulary[token_id] or b"x").strip()]
            repeat_search.dead_end_by_item[repeated_item] = bool(following_ids) and all(
                self._leads_nowhere(next_cursor, token_id, find_next_ids, repeat_search) for token_id in following_ids
            )
        return repeat_search.dead_end_by_item[repeated_item]

    def _find_repeated_item(self, cursor: JsonCursor) -> BegunItem | None:
        """Return the open or next item, if it is like an earlier item so far."""
        for container in cursor.containers:
            if container.earlier_items and (container.item_start >= 0 or cursor.text.rstrip().endswith(b",")):
                open_item = container.begun_item(cursor)
                if any(open_item.may_become(earlier_text) for earlier_text in container.earlier_texts):
                    return open_item
        return None

    def advance_by_bytes(self, cursor: JsonCursor, added_bytes: bytes) -> JsonCursor | None:
        """Return ``cursor`` with ``added_bytes`` appended; None if they complete a duplicate item."""
        skipped_count = min(cursor.skipped_bytes, len(added_bytes))
        json_reader = JsonByteReader(self._tracks, cursor, added_bytes[skipped_count:])
        if not all(map(json_reader.read_byte, range(len(cursor.text), len(json_reader.text)))):
            return None
        unskipped_count = cursor.skipped_bytes - skipped_count
        return JsonCursor(
            json_reader.text,
            tuple(json_reader.containers),
            json_reader.token_kind,
            json_reader.expects_key,
            json_reader.token_start,
            unskipped_count,
        )


class JsonByteReader:
    """Reads ``added_bytes`` appended to a text; its fields are like ``JsonCursor``'s."""

    def __init__(self, tracks: ItemTracks, cursor: JsonCursor, added_bytes: bytes) -> None:
        self._tracks = tracks
        self.text = cursor.text + added_bytes
        self.containers = list(cursor.containers)
        self.token_kind = cursor.token_kind
        self.expects_key = cursor.expects_key
        self.token_start = cursor.token_start

    def read_byte(self, offset: int) -> bool:
        """Read the byte at ``offset``; return False if it completes a duplicate item."""
        byte = self.text[offset : offset + 1]
        if self.token_kind == "escape":
            self.token_kind = "string"
            return True
        if self.token_kind == "string":
            return self._read_in_string(byte, offset)
        if self.token_kind == "scalar":
            if byte not in b",]} \n\t\r{[":
                return True
            self.token_kind = ""
            if not self._end_value(offset):
                return False
        return self._read_between_tokens(byte, offset)

    def _read_in_string(self, byte: bytes, offset: int) -> bool:
        if byte == b"\\":
            self.token_kind = "escape"
        elif byte == b'"':
            self.token_kind = ""
            if not self.expects_key:
                return self._end_value(offset + 1)
            self._begin_property(json.loads(self.text[self.token_start : offset + 1], strict=False))
            self.expects_key = False
        return True

    def _read_between_tokens(self, byte: bytes, offset: int) -> bool:
        if byte == b",":
            self.expects_key = bool(self.containers) and not self.containers[-1].is_array
        elif byte in b"]}":
            if self.containers:
                self.containers.pop()
            return self._end_value(offset + 1)
        elif byte not in b" \n\t\r:":
            self._begin_value(byte, offset)
        return True

    def _begin_value(self, byte: bytes, offset: int) -> None:
        """Note the start of a string, a number, a word, an array or an object."""
        if (
            not self.expects_key
            and self.containers
            and self.containers[-1].is_array
            and self.containers[-1].item_start < 0
        ):
            container = self.containers[-1]
            item_tracks = {
                track["prefix"][container.item_index] if container.item_index < len(track["prefix"]) else track["items"]
                for track in self._list_item_tracks(container)
                if "items" in track
            }
            self.containers[-1] = replace(container, item_start=offset, item_tracks=tuple(sorted(item_tracks)))
        self.token_start = offset
        self.token_kind = "string" if byte == b'"' else "scalar"
        if byte in b"[{":
            self.token_kind = ""
            self.expects_key = byte == b"{"
            track_numbers = self.containers[-1].item_tracks if self.containers else (0,)
            is_unique = byte == b"[" and any(
                track.get("unique") for track_number in track_numbers for track in self._tracks[track_number]
            )
            self.containers.append(OpenContainer(byte == b"[", track_numbers, frozenset() if is_unique else None))

    def _begin_property(self, property_name: str) -> None:
        """Note the property of the next value."""
        item_tracks = set[int]()
        for track in self._list_item_tracks(self.containers[-1]):
            if "rest" in track:
                matching_tracks = [
                    track_number
                    for pattern, track_number in track["patterns"]
                    if search_pattern(pattern, property_name)
                ]
                item_tracks |= (
                    {track["properties"][property_name]}
                    if property_name in track["properties"]
                    else {*matching_tracks, track["rest"]}
                )
        self.containers[-1] = replace(self.containers[-1], item_tracks=tuple(sorted(item_tracks)))

    def _list_item_tracks(self, container: OpenContainer) -> Iterable[JsonObject]:
        return (track for track_number in container.track_numbers for track in self._tracks[track_number])

    def _end_value(self, value_end: int) -> bool:
        """Note the end of a value before ``value_end``; return False if it duplicates an item of its array."""
        if not self.containers or not self.containers[-1].is_array:
            return True
        container = self.containers[-1]
        changed_container = replace(container, item_index=container.item_index + 1, item_start=-1)
        if container.earlier_items is not None:
            item_text = self.text[container.item_start : value_end]
            # The same for equal values, as in JSON Schema.
            item_json = json.dumps(
                replace_whole_floats(json.loads(item_text, strict=False)), sort_keys=True, ensure_ascii=False
            )
            if item_json in container.earlier_items:
                return False
            tokens = JSON_TOKEN.findall(item_text.decode("utf-8", "replace"))
            earlier_texts = (
                *container.earlier_texts,
                "".join(normalize_json_token(token) for token in tokens if token.strip()),
            )
            changed_container = replace(
                changed_container, earlier_items=container.earlier_items | {item_json}, earlier_texts=earlier_texts
            )
        self.containers[-1] = changed_container
        return True


def replace_whole_floats(value: JsonValue) -> JsonValue:
    """Return a JSON value with integers instead of equal fractions."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [replace_whole_floats(item) for item in value]
    return {name: replace_whole_floats(member) for name, member in value.items()} if isinstance(value, dict) else value
