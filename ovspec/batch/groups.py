"""Files of requests in groups of lines that are run in any order, and their results so far."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from ovspec.base.files import write_atomically
from ovspec.base.json_types import JsonObject
from ovspec.batch.file import BatchProgress
from ovspec.batch.folder import BatchFile, with_ending, write_results
from ovspec.batch.partial_results import PartialResults, result_fingerprint
from ovspec.batch.requests import BatchRequest
from ovspec.batch.run import count_generated_tokens

# Lines of a group, and groups of a file for each worker, so that none is idle for long at the end.
MAX_GROUP_LINES = 16
GROUPS_PER_WORKER = 16


@dataclass
class RequestGroup:
    """Lines of a file, by their index in it.

    file: the number of the file.
    file_lines: the number of all lines of the file.
    keys: of each line of the group.
    requests: of the lines that are to be generated.
    lines: output lines.
    deaths: the number of workers that died with this group.
    """

    file: int
    file_lines: int
    keys: dict[int, str]
    requests: dict[int, BatchRequest]
    lines: dict[int, JsonObject] = field(default_factory=dict)
    deaths: int = 0

    def complete(self, lines: Iterable[JsonObject]) -> None:
        """Replace the requests by their output lines."""
        self.lines = dict(zip(self.requests, lines, strict=True))
        self.requests = {}

    def split(self) -> Iterator[RequestGroup]:
        """Yield a group for each request; the first one has the keys of the other lines, too."""
        keys = {index: key for index, key in self.keys.items() if index not in self.requests}
        for index, request in self.requests.items():
            keys[index] = self.keys[index]
            yield RequestGroup(self.file, self.file_lines, keys, {index: request}, deaths=self.deaths)
            keys = {}


def make_groups(
    file: int, requests: list[BatchRequest], run_identity: str, finished: Collection[str], workers: int
) -> Iterator[RequestGroup]:
    """Yield all ``requests`` of a file, at least one group; prompts with the same beginning are neighbours.

    Args:
        file: the number of the file.
        run_identity: everything that results depend on, see ``result_dependencies``.
        finished: the keys of lines that an earlier run finished.
        workers: the number of workers.
    """
    keys = [result_fingerprint(request, run_identity) for request in requests]

    def sort_key(index: int) -> tuple[bool, str]:
        return keys[index] not in finished, repr(requests[index].text_request.prompts)

    order = sorted(range(len(keys)), key=sort_key)
    size = max(1, min(MAX_GROUP_LINES, -(-len(order) // (GROUPS_PER_WORKER * workers))))
    for begin in range(0, max(1, len(order)), size):
        indices = order[begin : begin + size]
        unfinished = {index: requests[index] for index in indices if keys[index] not in finished}
        yield RequestGroup(file, len(keys), {index: keys[index] for index in indices}, unfinished)


class ResultCollector:
    """Collects the results of each file, and writes the file when it has all.

    unfinished: the files that no earlier run finished: their numbers, by path.
    finished_keys: the keys of the lines that earlier runs finished, by path.
    """

    def __init__(self, files: list[BatchFile], run_identity: str, progress: BatchProgress) -> None:
        self.progress = progress
        self.run_identity = run_identity
        self._files = files
        self._open_files = dict[int, tuple[PartialResults, dict[int, str]]]()  # with the keys of the lines, by index
        self.unfinished = {file.source: number for number, file in enumerate(files) if not self._was_finished(file)}
        self.finished_keys = {path: self._load_keys(number) for path, number in self.unfinished.items()}

    def collect_group(self, group: RequestGroup) -> None:
        """Keep the lines of ``group``, and write its file if they are the last ones."""
        partial, keys = self._open_partial_results(group.file)
        if not keys:
            self.progress.total += group.file_lines
        self.progress.before += len(group.keys) - len(group.lines)
        keys |= group.keys
        for index, line in group.lines.items():
            partial.store_line(keys[index], line)
            self.progress.count_line(line)
            self.progress.tokens += count_generated_tokens(line)
        if len(keys) == group.file_lines:
            file = self._files[group.file]
            write_results(file.target, partial.lines(keys[index] for index in range(group.file_lines)))
            if file.size_and_time:
                mark = f"{group.file_lines} {self._finished_mark(file)}"
                write_atomically(with_ending(file.partial_base, ".done"), mark)
            partial.delete_file()
            partial.close()
            del self._open_files[group.file]

    def close(self) -> None:
        for partial, _ in self._open_files.values():
            partial.close()

    def _load_keys(self, number: int) -> frozenset[str]:
        """Return the keys of the lines of a file that an earlier run finished."""
        has_partial_results = with_ending(self._files[number].partial_base, ".partial").exists()
        return self._open_partial_results(number)[0].keys() if has_partial_results else frozenset()

    def _open_partial_results(self, number: int) -> tuple[PartialResults, dict[int, str]]:
        if number not in self._open_files:
            self._open_files[number] = PartialResults(self._files[number].partial_base), {}
        return self._open_files[number]

    def _was_finished(self, file: BatchFile) -> bool:
        """Return whether an earlier run finished a file of a folder as it is now."""
        mark = with_ending(file.partial_base, ".done")
        if not file.size_and_time or not mark.is_file():
            return False
        lines, _, size_and_time = mark.read_text(encoding="utf-8").partition(" ")
        if size_and_time != self._finished_mark(file):
            return False
        self.progress.total += int(lines)
        self.progress.before += int(lines)
        return True

    def _finished_mark(self, file: BatchFile) -> str:
        return f"{file.size_and_time} {self.run_identity}"
