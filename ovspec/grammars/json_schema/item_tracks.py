"""Where arrays are whose items must all differ, which a grammar can't enforce: see ``sampling.unique_items``."""

from __future__ import annotations

from collections.abc import Iterable

from ovspec.base.json_types import JsonObject
from ovspec.grammars.json_schema.schemas import SchemaGraph
from ovspec.grammars.json_schema.shapes import Arrays, Objects, SchemaNode

# For each track number, the arrays and objects that a value may be there; number 0 is the whole text. Arrays:
# {"unique", "prefix", "items"}; objects: {"properties", "patterns", "rest"}, with the track numbers of their members.
ItemTracks = list[list[JsonObject]]
# In a text that isn't JSON as a whole, but in which arguments are: the properties of objects around the arguments.
ARGUMENT_KEYS = ("arguments", "parameters")


def make_item_tracks(graph: SchemaGraph) -> ItemTracks:
    """Return the tracks of the values of a whole schema."""
    numbers = {graph.root: 0}
    pending = [graph.root]
    tracks: ItemTracks = []

    def track_number(node: SchemaNode) -> int:
        if node not in numbers:
            numbers[node] = len(numbers)
            pending.append(node)
        return numbers[node]

    while pending:
        tracks.append([])
        for alternatives in graph.find_shape(pending.pop(0)).by_type.values():
            for alternative in alternatives:
                if isinstance(alternative, Arrays):
                    prefix = [track_number(item) for item in alternative.prefix]
                    items = track_number(alternative.items)
                    tracks[-1].append({"unique": alternative.unique, "prefix": prefix, "items": items})
                elif isinstance(alternative, Objects):
                    properties = {name: track_number(node) for name, node in alternative.properties}
                    patterns = [(pattern, track_number(node)) for pattern, node in alternative.patterns]
                    rest = track_number(alternative.rest)
                    tracks[-1].append({"properties": properties, "patterns": patterns, "rest": rest})
    return tracks


def merge_item_tracks(tracks_of_schemas: Iterable[ItemTracks]) -> ItemTracks:
    """Return the tracks of texts that hold JSON of several schemas, alone, in objects or in lists."""
    roots: list[JsonObject] = []
    merged: ItemTracks = [[], roots]
    for tracks in tracks_of_schemas:
        shifted = [[shift_track(track, len(merged)) for track in alternatives] for alternatives in tracks]
        roots += shifted[0]
        merged += shifted
    around_arguments = {"properties": dict.fromkeys(ARGUMENT_KEYS, 1), "patterns": [], "rest": len(merged)}
    merged[0] = [*roots, around_arguments, {"unique": False, "prefix": [], "items": 0}]
    return [*merged, []]


def shift_track(track: JsonObject, offset: int) -> JsonObject:
    """Return a track whose track numbers are higher by ``offset``."""
    if "items" in track:
        prefix = [number + offset for number in track["prefix"]]
        return {**track, "prefix": prefix, "items": track["items"] + offset}
    properties = {name: number + offset for name, number in track["properties"].items()}
    patterns = [(pattern, number + offset) for pattern, number in track["patterns"]]
    return {"properties": properties, "patterns": patterns, "rest": track["rest"] + offset}
