"""The places of arrays with unique items, which a grammar can't enforce: see ``sampling.unique_items``."""

from __future__ import annotations

from collections.abc import Iterable

from ovspec.base.json_types import JsonObject
from ovspec.grammars.json_schema.schemas import SchemaGraph
from ovspec.grammars.json_schema.shapes import Arrays, Objects, SchemaNode

# For each track number, the possible arrays and objects at its place; number 0 is the whole text. Arrays: {"unique",
# "prefix", "items"}; objects: {"properties", "patterns", "rest"}, with the track numbers of their members.
ItemTracks = list[list[JsonObject]]
# In a text with JSON only in parts: the properties of the objects around JSON arguments.
ARGUMENT_KEYS = ("arguments", "parameters")


def make_item_tracks(graph: SchemaGraph) -> ItemTracks:
    """Return the tracks of the values of a whole schema."""
    track_numbers = {graph.root_node: 0}
    pending_nodes = [graph.root_node]
    tracks: ItemTracks = []

    def assign_track_number(node: SchemaNode) -> int:
        if node not in track_numbers:
            track_numbers[node] = len(track_numbers)
            pending_nodes.append(node)
        return track_numbers[node]

    while pending_nodes:
        tracks.append([])
        for alternatives in graph.find_shape(pending_nodes.pop(0)).by_type.values():
            for alternative in alternatives:
                if isinstance(alternative, Arrays):
                    prefix_tracks = [assign_track_number(item) for item in alternative.prefix]
                    items_track = assign_track_number(alternative.items)
                    tracks[-1].append({"unique": alternative.unique, "prefix": prefix_tracks, "items": items_track})
                elif isinstance(alternative, Objects):
                    property_tracks = {name: assign_track_number(node) for name, node in alternative.properties}
                    pattern_tracks = [(pattern, assign_track_number(node)) for pattern, node in alternative.patterns]
                    unlisted_track = assign_track_number(alternative.unlisted_node)
                    object_track = {"properties": property_tracks, "patterns": pattern_tracks, "rest": unlisted_track}
                    tracks[-1].append(object_track)
    return tracks


def merge_item_tracks(tracks_of_schemas: Iterable[ItemTracks]) -> ItemTracks:
    """Return the tracks of texts with JSON of several schemas, alone, in objects or in lists."""
    root_track: list[JsonObject] = []
    merged_tracks: ItemTracks = [[], root_track]
    for tracks in tracks_of_schemas:
        shifted_tracks = [[shift_track(track, len(merged_tracks)) for track in alternatives] for alternatives in tracks]
        root_track += shifted_tracks[0]
        merged_tracks += shifted_tracks
    around_arguments = {"properties": dict.fromkeys(ARGUMENT_KEYS, 1), "patterns": [], "rest": len(merged_tracks)}
    merged_tracks[0] = [*root_track, around_arguments, {"unique": False, "prefix": [], "items": 0}]
    return [*merged_tracks, []]


def shift_track(track: JsonObject, offset: int) -> JsonObject:
    """Return a track with ``offset`` added to its track numbers."""
    if "items" in track:
        prefix_tracks = [number + offset for number in track["prefix"]]
        return {**track, "prefix": prefix_tracks, "items": track["items"] + offset}
    property_tracks = {name: number + offset for name, number in track["properties"].items()}
    pattern_tracks = [(pattern, number + offset) for pattern, number in track["patterns"]]
    return {"properties": property_tracks, "patterns": pattern_tracks, "rest": track["rest"] + offset}
