"""The workers of a batch on a cluster, and the handling of lines whose worker dies."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec.base.progress import print_note
from ovspec.batch.groups import RequestGroup
from ovspec.batch.ray.deaths import describe_death
from ovspec.batch.run import error_line

GROUPS_IN_FLIGHT = 4  # groups that a worker answers at a time, so that its batch stays full from one to the next
FILES_READ_AHEAD = 4  # files that are read at a time
# Workers that are started again: of each place for one, and one more for so many answered lines, so that lines that
# kill stop no long batch, and a model that always does stops soon.
RESTARTS_PER_WORKER, LINES_PER_RESTART = 3, 10
MEMORY_ADVICE = "set another `precision`, or more `cpus_per_worker` for fewer workers"


@dataclass(eq=False)
class PoolWorker:
    """A worker."""

    number: int  # of its place
    actor: Any  # of Ray
    kind: str = ""  # how it computes; empty until it has loaded
    groups: list[RequestGroup] = field(default_factory=list)  # that it has to answer

    @property
    def has_room(self) -> bool:
        """Whether it may get a group; a group that may have killed a worker runs alone."""
        return (
            bool(self.kind) and len(self.groups) < GROUPS_IN_FLIGHT and not any(group.deaths for group in self.groups)
        )


class WorkerPool:
    """Runs groups of requests with ``count`` workers, which ``start`` makes from their numbers.

    A worker that dies while it loads is left out; a worker that dies later is replaced. Its groups run last, each
    alone; a group whose worker dies again runs line by line, and the line whose worker dies then gets an error.

    Args:
        start: returns an actor of Ray with the methods of ``Worker``, which Ray doesn't restart.
        mixed: whether each line names the kind of its worker.
        model: the model and its options, in words.
    """

    def __init__(self, start: Callable[[int], Any], count: int, mixed: bool, model: str) -> None:
        self._start = start
        self._mixed = mixed
        self._model = model
        self._restarts_left = float(RESTARTS_PER_WORKER * count)
        self._last_death = ""
        self._workers = list[PoolWorker]()
        self._tasks = dict[ray.ObjectRef, tuple[PoolWorker, RequestGroup | None]]()  # without a group: the worker loads
        self._waiting = deque[RequestGroup]()
        self._interrupted = deque[RequestGroup]()  # groups whose worker died
        self._finished = list[RequestGroup]()
        for number in range(1, count + 1):
            self._add_worker(number)

    @property
    def size(self) -> int:
        return len(self._workers)

    @property
    def loading(self) -> int:
        return sum(not worker.kind for worker in self._workers)

    def run_groups(
        self, groups: Iterable[RequestGroup], files: Iterable[ray.ObjectRef] = ()
    ) -> Iterator[list[RequestGroup]]:
        """Yield, each second or earlier, the groups that have finished since, in any order.

        Args:
            groups: the first groups to run.
            files: tasks that return the groups of a file each; a few of them run ahead.

        Raises OvspecError if no worker is left, and a worker's errors.
        """
        self._add_groups(groups)
        unread_files = iter(files)
        reading = list[ray.ObjectRef]()
        while True:
            if len(self._waiting) < GROUPS_IN_FLIGHT * self.size:
                reading.extend(itertools.islice(unread_files, FILES_READ_AHEAD - len(reading)))
            self._assign_groups()
            finished = self._finished
            self._finished = []
            yield finished
            running = any(group for _, group in self._tasks.values())
            if not (reading or self._waiting or self._interrupted or running):
                return
            if not self._workers:
                raise OvspecError(
                    f"No worker is left, because the last one {self._last_death}; {MEMORY_ADVICE}, and the same "
                    "command continues from the finished lines."
                )
            for task in wait_for_completed([*reading, *self._tasks]):
                if task in reading:
                    reading.remove(task)
                    self._add_groups(ray.get(task))
                elif task in self._tasks:  # its worker hasn't died meanwhile
                    self._complete_task(task)

    def close(self) -> None:
        for worker in self._workers:
            ray.kill(worker.actor)

    def _add_groups(self, groups: Iterable[RequestGroup]) -> None:
        for group in groups:
            (self._waiting if group.requests else self._finished).append(group)

    def _add_worker(self, number: int) -> None:
        worker = PoolWorker(number, self._start(number))
        self._workers.append(worker)
        self._tasks[worker.actor.load_worker_model.remote()] = worker, None

    def _assign_groups(self) -> None:
        """Give groups to the workers with the fewest."""
        while available := [worker for worker in self._workers if worker.has_room]:
            worker = min(available, key=lambda worker: len(worker.groups))
            if not self._waiting and (worker.groups or not self._interrupted):
                return
            group = (self._waiting or self._interrupted).popleft()
            worker.groups.append(group)
            self._tasks[worker.actor.run_requests.remote(list(group.requests.values()))] = worker, group

    def _complete_task(self, task: ray.ObjectRef) -> None:
        """Use the result of a task, or replace its worker if that has died."""
        worker, group = self._tasks[task]
        try:
            result = ray.get(task)
        except RayTaskError:  # the worker's own error, and it lives
            raise
        except RayError as error:
            self._remove_dead_worker(worker, describe_death(worker.number, error))
            return
        del self._tasks[task]
        if group:
            worker.groups.remove(group)
            self._finish_group(group, result, worker.kind)
        else:
            worker.kind = result.kind

    def _finish_group(self, group: RequestGroup, lines: list[JsonObject], kind: str) -> None:
        if self._mixed:
            lines = [line | {"worker": kind} for line in lines]
        group.complete(lines)
        self._finished.append(group)
        self._restarts_left += len(lines) / LINES_PER_RESTART

    def _remove_dead_worker(self, worker: PoolWorker, death: str) -> None:
        """Remove a worker; replace it if it had loaded and not too many have died."""
        ray.kill(worker.actor)  # in case that it is only out of reach
        self._workers.remove(worker)
        self._tasks = {ref: task for ref, task in self._tasks.items() if task[0] is not worker}
        self._last_death = f"{death} while it {'answered with' if worker.kind else 'loaded'} {self._model}"
        for group in worker.groups:
            group.deaths += 1
            if group.deaths == 1:
                self._interrupted.append(group)
            elif len(group.requests) > 1:
                self._interrupted.extend(group.split())
            else:
                message = f"The worker that answered this line {death}; others answered the lines beside it."
                lines = [error_line(request, message) for request in group.requests.values()]
                self._finish_group(group, lines, worker.kind)
        is_replaced = bool(worker.kind) and self._restarts_left >= 1
        print_note(f"worker {worker.number} {death}; {'another one starts' if is_replaced else 'it is left out'}")
        if is_replaced:
            self._restarts_left -= 1
            self._add_worker(worker.number)


def wait_for_completed(tasks: list[ray.ObjectRef]) -> list[ray.ObjectRef]:
    """Return the tasks that have ended, after at most a second."""
    first, _ = ray.wait(tasks, timeout=1)
    return ray.wait(tasks, num_returns=len(tasks), timeout=0)[0] if first else []
