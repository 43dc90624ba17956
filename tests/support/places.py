"""A worker's place among the workers, and its share of the cores."""

from __future__ import annotations

PLACE = "OVSPEC_TESTS_PLACE"  # such as "1 of 2", counted from 0


def cores_at(place: str, usable: set[int]) -> list[int]:
    """Return the cores at a place, or all if there are fewer cores than places."""
    number, places = map(int, place.split(" of "))
    return sorted(usable)[number::places] or sorted(usable)
