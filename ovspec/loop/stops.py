"""Stop strings: found in a text that grows, at a cost that doesn't depend on how many there are."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Node:
    """A beginning of stop strings, in Aho and Corasick's automaton.

    depth: its length.
    after: the beginning that each next character makes of it.
    shorter: the longest other beginning that it ends with; None for the empty one.
    found: the length of the longest stop string that it ends with.
    """

    depth: int = 0
    after: dict[str, Node] = field(default_factory=dict)
    shorter: Node | None = None
    found: int = 0

    def grown(self, character: str) -> Node:
        """Return the longest beginning that a text which ends with this one ends with after ``character``."""
        node = self
        while node.shorter and character not in node.after:
            node = node.shorter
        return node.after.get(character, node)


@functools.lru_cache(16)  # all texts of a request have the same
def empty_beginning(stops: tuple[str, ...]) -> Node:
    """Return the empty beginning, from which all others are reached."""
    root = Node()
    for stop in stops:
        node = root
        for character in stop:
            if character not in node.after:
                node.after[character] = Node(node.depth + 1)
            node = node.after[character]
        node.found = node.depth
    nodes = [root]
    for node in nodes:  # which grows: shorter ones come first
        for character, longer in node.after.items():
            longer.shorter = node.shorter.grown(character) if node.shorter else root
            longer.found = longer.found or longer.shorter.found
            nodes.append(longer)
    return root


class StopStrings:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, stops: list[str]) -> None:
        self._begins = self._node = empty_beginning(tuple(stops))
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add ``text``; return (text that may be shown, whether a stop string follows it)."""
        if not self._begins.after:
            return text, False
        starts, begin = list[int](), len(self._held) + 1
        self._held += text
        for end, character in enumerate(text, begin):
            self._node = self._node.grown(character)
            if self._node.found:
                starts.append(end - self._node.found)
        if starts:
            shown, self._held, self._node = self._held[: min(starts)], "", self._begins
            return shown, True
        end = len(self._held) - self._node.depth
        shown, self._held = self._held[:end], self._held[end:]
        return shown, False

    def flush(self) -> str:
        shown, self._held, self._node = self._held, "", self._begins
        return shown
