"""Files of requests in groups of lines that are answered in any order, and the answers so far."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ovspec.base.files import write_atomically
from ovspec.batch.file import BatchProgress, Done, key_of
from ovspec.batch.folder import BatchFile, beside, write
from ovspec.batch.requests import BatchRequest
from ovspec.batch.run import tokens_of

# Lines of a group, and groups of a file for each worker, so that none is idle for long at the end.
MOST, GROUPS = 16, 16


@dataclass
class Group:
    """Lines of a file by their place in it: the key of each, and the request or the output line of some."""

    file: int
    total: int  # lines of the whole file
    keys: dict[int, str]
    requests: dict[int, BatchRequest]  # to be answered
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    deaths: int = 0  # of workers that were to answer it

    def answer(self, lines: Iterable[dict[str, Any]]) -> None:
        """Take the output line of each request."""
        self.lines, self.requests = dict(zip(self.requests, lines, strict=True)), {}

    def apart(self) -> Iterator[Group]:
        """Yield a group for each request; the first one has the keys of the other lines, too."""
        keys = {place: key for place, key in self.keys.items() if place not in self.requests}
        for place, request in self.requests.items():
            yield Group(self.file, self.total, keys | {place: self.keys[place]}, {place: request}, deaths=self.deaths)
            keys = {}


def groups_of(
    file: int, requests: list[BatchRequest], depends_on: str, done: Collection[str], workers: int
) -> Iterator[Group]:
    """Yield all ``requests`` of a file, at least one group; prompts that begin alike are beside each other."""
    keys = [key_of(request, depends_on) for request in requests]
    order = sorted(range(len(keys)), key=lambda place: (keys[place] not in done, repr(requests[place].asked.prompts)))
    size = max(1, min(MOST, -(-len(order) // (GROUPS * workers))))
    for begin in range(0, max(1, len(order)), size):
        places = order[begin : begin + size]
        todo = {place: requests[place] for place in places if keys[place] not in done}
        yield Group(file, len(keys), {place: keys[place] for place in places}, todo)


class Answers:
    """Keeps the answers to each file until it has all, and then writes them.

    ``left`` are the files that no earlier run finished, by path, and ``known`` the keys of what it answered of each.
    """

    def __init__(self, files: list[BatchFile], depends_on: str, progress: BatchProgress) -> None:
        self.progress, self.depends_on, self._files = progress, depends_on, files
        self._open = dict[int, tuple[Done, dict[int, str]]]()  # with the keys of the lines, by place
        self.left = {file.source: number for number, file in enumerate(files) if not self._finished(file)}
        self.known = {path: self._known(number) for path, number in self.left.items()}

    def take(self, group: Group) -> None:
        """Keep the lines of ``group``, and write its file if they are the last ones."""
        done, keys = self._opened(group.file)
        self.progress.total += 0 if keys else group.total
        self.progress.before += len(group.keys) - len(group.lines)
        keys |= group.keys
        for place, line in group.lines.items():
            done.add(keys[place], line)
            self.progress.add(line)
            self.progress.tokens += tokens_of(line)
        if len(keys) == group.total:
            file = self._files[group.file]
            write(file.target, done.lines(keys[place] for place in range(group.total)))
            if file.version:
                write_atomically(beside(file.state, ".done"), f"{group.total} {self._mark(file)}")
            done.remove()
            done.close()
            del self._open[group.file]

    def close(self) -> None:
        for done, _ in self._open.values():
            done.close()

    def _known(self, number: int) -> frozenset[str]:
        begun = beside(self._files[number].state, ".partial").exists()
        return self._opened(number)[0].keys() if begun else frozenset()

    def _opened(self, number: int) -> tuple[Done, dict[int, str]]:
        return self._open.get(number) or self._open.setdefault(number, (Done(self._files[number].state), {}))

    def _finished(self, file: BatchFile) -> bool:
        """Return whether an earlier run answered all that a file in a folder has now."""
        mark = beside(file.state, ".done")
        if not file.version or not mark.is_file():
            return False
        total, _, found = mark.read_text(encoding="utf-8").partition(" ")
        if found != self._mark(file):
            return False
        self.progress.total += int(total)
        self.progress.before += int(total)
        return True

    def _mark(self, file: BatchFile) -> str:
        return f"{file.version} {self.depends_on}"
