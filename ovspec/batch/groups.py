"""Files of requests in groups of lines, run in any order, and their results so far."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from ovspec.base.files import write_atomically
from ovspec.base.json_types import JsonObject
from ovspec.batch.folder import BatchFile, append_ending, write_results
from ovspec.batch.partial_results import PartialResults, result_fingerprint
from ovspec.batch.requests import BatchRequest
from ovspec.batch.resumable_run import BatchProgress
from ovspec.batch.run import count_generated_tokens

# Lines per group, and groups of a file per worker: small groups, to leave no worker idle for long at the end.
MAX_GROUP_LINES = 16
GROUPS_PER_WORKER = 16


@dataclass
class RequestGroup:
    """Lines of a file, by their index in it.

    file_number: the file's number.
    file_line_count: number of lines in the whole file.
    keys: the key of each line of the group.
    requests: the requests of lines still to generate.
    lines: the output lines so far.
    worker_deaths: number of workers killed while running this group.
    """

    file_number: int
    file_line_count: int
    keys: dict[int, str]
    requests: dict[int, BatchRequest]
    lines: dict[int, JsonObject] = field(default_factory=dict)
    worker_deaths: int = 0

    def set_output_lines(self, lines: Iterable[JsonObject]) -> None:
        """Replace the requests by their output lines."""
        self.lines = dict(zip(self.requests, lines, strict=True))
        self.requests = {}

    def split_by_request(self) -> Iterator[RequestGroup]:
        """Yield a group for each request; the first group also has the keys of all lines without a request."""
        group_keys = {index: key for index, key in self.keys.items() if index not in self.requests}
        for index, request in self.requests.items():
            group_keys[index] = self.keys[index]
            yield RequestGroup(
                self.file_number, self.file_line_count, group_keys, {index: request}, worker_deaths=self.worker_deaths
            )
            group_keys = {}


def make_groups(
    file_number: int, requests: list[BatchRequest], run_identity: str, finished_keys: Collection[str], worker_count: int
) -> Iterator[RequestGroup]:
    """Yield all ``requests`` of a file, at least one group; prompts with the same beginning are neighbours.

    Args:
        file_number: the number of the file.
        run_identity: everything that affects results, see ``make_run_identity``.
        finished_keys: the keys of lines finished by an earlier run.
        worker_count: the number of workers.
    """
    result_keys = [result_fingerprint(request, run_identity) for request in requests]

    def sort_key(index: int) -> tuple[bool, str]:
        return result_keys[index] not in finished_keys, repr(requests[index].text_request.prompts)

    sorted_indices = sorted(range(len(result_keys)), key=sort_key)
    group_size = max(1, min(MAX_GROUP_LINES, -(-len(sorted_indices) // (GROUPS_PER_WORKER * worker_count))))
    for group_start in range(0, max(1, len(sorted_indices)), group_size):
        group_indices = sorted_indices[group_start : group_start + group_size]
        unfinished_requests = {
            index: requests[index] for index in group_indices if result_keys[index] not in finished_keys
        }
        yield RequestGroup(
            file_number, len(result_keys), {index: result_keys[index] for index in group_indices}, unfinished_requests
        )


class ResultCollector:
    """Collects the results of each file, and writes the file when it has all.

    unfinished_file_numbers: the numbers of the files not finished by earlier runs, by path.
    finished_keys: the keys of the lines finished by earlier runs, by path.
    """

    def __init__(self, files: list[BatchFile], run_identity: str, progress: BatchProgress) -> None:
        self.progress = progress
        self.run_identity = run_identity
        self._files = files
        self._open_results = dict[int, tuple[PartialResults, dict[int, str]]]()  # with keys by line index
        self.unfinished_file_numbers = {
            file.requests_path: file_number for file_number, file in enumerate(files) if not self._was_finished(file)
        }
        self.finished_keys = {
            path: self._load_finished_keys(file_number) for path, file_number in self.unfinished_file_numbers.items()
        }

    def collect_group(self, group: RequestGroup) -> None:
        """Keep the lines of ``group``, and write its file if they complete it."""
        partial_results, line_keys = self._open_partial_results(group.file_number)
        if not line_keys:
            self.progress.total += group.file_line_count
        self.progress.done_before += len(group.keys) - len(group.lines)
        line_keys |= group.keys
        for index, line in group.lines.items():
            partial_results.store_line(line_keys[index], line)
            self.progress.count_output_line(line)
            self.progress.generated_tokens += count_generated_tokens(line)
        if len(line_keys) == group.file_line_count:
            file = self._files[group.file_number]
            write_results(
                file.results_path,
                partial_results.select_lines(line_keys[index] for index in range(group.file_line_count)),
            )
            if file.size_and_time:
                mark_text = f"{group.file_line_count} {self._make_finished_mark(file)}"
                write_atomically(append_ending(file.partial_results_path, ".done"), mark_text)
            partial_results.delete_file()
            partial_results.close()
            del self._open_results[group.file_number]

    def close(self) -> None:
        for partial_results, _ in self._open_results.values():
            partial_results.close()

    def _load_finished_keys(self, file_number: int) -> frozenset[str]:
        """Return the keys of the lines of a file finished by an earlier run."""
        has_partial_results = append_ending(self._files[file_number].partial_results_path, ".partial").exists()
        return self._open_partial_results(file_number)[0].keys() if has_partial_results else frozenset()

    def _open_partial_results(self, file_number: int) -> tuple[PartialResults, dict[int, str]]:
        if file_number not in self._open_results:
            self._open_results[file_number] = PartialResults(self._files[file_number].partial_results_path), {}
        return self._open_results[file_number]

    def _was_finished(self, file: BatchFile) -> bool:
        """Return whether an earlier run finished a file of a folder in its present version."""
        mark_file = append_ending(file.partial_results_path, ".done")
        if not file.size_and_time or not mark_file.is_file():
            return False
        line_count, _, size_and_time = mark_file.read_text(encoding="utf-8").partition(" ")
        if size_and_time != self._make_finished_mark(file):
            return False
        self.progress.total += int(line_count)
        self.progress.done_before += int(line_count)
        return True

    def _make_finished_mark(self, file: BatchFile) -> str:
        return f"{file.size_and_time} {self.run_identity}"
