"""The workers of a batch on a cluster, and the handling of lines when their worker dies."""

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
from ovspec.batch.run import make_error_line

GROUPS_IN_FLIGHT = 4  # groups a worker runs at a time, to keep its batch full between groups
FILES_READ_AHEAD = 4  # files read at a time
# Maximum restarts: a number per worker, and another restart per number of finished lines. So a few deadly lines don't
# stop a long batch, but a model with constant crashes stops it soon.
RESTARTS_PER_WORKER, LINES_PER_RESTART = 3, 10
MEMORY_ADVICE = (
    "after a crash, set `precision='f32'`; for lack of memory, raise `cpus_per_worker` to start fewer workers"
)


@dataclass(eq=False)
class PoolWorker:
    """A worker of the pool."""

    number: int  # kept by its replacement
    actor: Any  # Ray's
    arithmetic: str = ""  # its kind of arithmetic; empty until it has loaded
    running_groups: list[RequestGroup] = field(default_factory=list)

    @property
    def has_room(self) -> bool:
        """Whether it may get another group; a group suspected of killing a worker runs alone."""
        return (
            bool(self.arithmetic)
            and len(self.running_groups) < GROUPS_IN_FLIGHT
            and not any(group.worker_deaths for group in self.running_groups)
        )


class WorkerPool:
    """Runs groups of requests with ``worker_count`` workers, started by number by ``start_worker``.

    A worker is left out if it dies while loading, and replaced if it dies later. Its groups then run last, each alone;
    if the worker dies again, the group runs line by line; if it dies again, the line gets an error.

    Args:
        start_worker: returns an actor of Ray with the methods of ``Worker``, without restarts by Ray.
        mixed_arithmetic: whether each line names its worker's arithmetic.
        model_description: the model and its options, in words.
    """

    def __init__(
        self, start_worker: Callable[[int], Any], worker_count: int, mixed_arithmetic: bool, model_description: str
    ) -> None:
        self._start_worker = start_worker
        self._mixed_arithmetic = mixed_arithmetic
        self._model_description = model_description
        self._restarts_left = float(RESTARTS_PER_WORKER * worker_count)
        self._last_death = ""
        self._workers = list[PoolWorker]()
        self._tasks = dict[ray.ObjectRef, tuple[PoolWorker, RequestGroup | None]]()  # None for a loading worker
        self._waiting_groups = deque[RequestGroup]()
        self._interrupted_groups = deque[RequestGroup]()  # groups of dead workers
        self._finished_groups = list[RequestGroup]()
        for number in range(1, worker_count + 1):
            self._add_worker(number)

    @property
    def worker_count(self) -> int:
        return len(self._workers)

    @property
    def loading_count(self) -> int:
        return sum(not worker.arithmetic for worker in self._workers)

    def run_groups(
        self, groups: Iterable[RequestGroup], file_tasks: Iterable[ray.ObjectRef] = ()
    ) -> Iterator[list[RequestGroup]]:
        """Yield, at least once a second, the newly finished groups, in any order.

        Args:
            groups: the first groups to run.
            file_tasks: tasks of Ray, each returning the groups of a file; a few of them run ahead.

        Raises OvspecError if no worker is left, and a worker's errors.
        """
        self._add_groups(groups)
        unstarted_tasks = iter(file_tasks)
        reading_tasks = list[ray.ObjectRef]()
        while True:
            if len(self._waiting_groups) < GROUPS_IN_FLIGHT * self.worker_count:
                reading_tasks.extend(itertools.islice(unstarted_tasks, FILES_READ_AHEAD - len(reading_tasks)))
            self._assign_groups()
            finished_groups = self._finished_groups
            self._finished_groups = []
            yield finished_groups
            has_running_groups = any(group for _, group in self._tasks.values())
            if not (reading_tasks or self._waiting_groups or self._interrupted_groups or has_running_groups):
                return
            if not self._workers:
                raise OvspecError(
                    f"No workers are left: the last worker {self._last_death}; {MEMORY_ADVICE}. Then "
                    "run the command again to resume the batch."
                )
            for task in wait_for_completed([*reading_tasks, *self._tasks]):
                if task in reading_tasks:
                    reading_tasks.remove(task)
                    self._add_groups(ray.get(task))
                elif task in self._tasks:  # its worker is still alive
                    self._complete_task(task)

    def close(self) -> None:
        for worker in self._workers:
            ray.kill(worker.actor)

    def _add_groups(self, groups: Iterable[RequestGroup]) -> None:
        for group in groups:
            (self._waiting_groups if group.requests else self._finished_groups).append(group)

    def _add_worker(self, number: int) -> None:
        worker = PoolWorker(number, self._start_worker(number))
        self._workers.append(worker)
        self._tasks[worker.actor.load_worker_model.remote()] = worker, None

    def _assign_groups(self) -> None:
        """Assign groups to the workers with the fewest groups."""
        while available_workers := [worker for worker in self._workers if worker.has_room]:
            worker = min(available_workers, key=lambda worker: len(worker.running_groups))
            if not self._waiting_groups and (worker.running_groups or not self._interrupted_groups):
                return
            group = (self._waiting_groups or self._interrupted_groups).popleft()
            worker.running_groups.append(group)
            self._tasks[worker.actor.run_requests.remote(list(group.requests.values()))] = worker, group

    def _complete_task(self, task: ray.ObjectRef) -> None:
        """Use the result of a task, or replace its worker if it has died."""
        worker, group = self._tasks[task]
        try:
            task_result = ray.get(task)
        except RayTaskError:  # the worker's own error; the worker is alive
            raise
        except RayError as error:
            self._remove_dead_worker(worker, describe_death(worker.number, error))
            return
        del self._tasks[task]
        if group:
            worker.running_groups.remove(group)
            self._finish_group(group, task_result, worker.arithmetic)
        else:
            worker.arithmetic = task_result.computing_conditions

    def _finish_group(self, group: RequestGroup, output_lines: list[JsonObject], arithmetic: str) -> None:
        if self._mixed_arithmetic:
            output_lines = [line | {"worker": arithmetic} for line in output_lines]
        group.set_output_lines(output_lines)
        self._finished_groups.append(group)
        self._restarts_left += len(output_lines) / LINES_PER_RESTART

    def _remove_dead_worker(self, worker: PoolWorker, death_description: str) -> None:
        """Remove a worker; replace it if it had loaded and restarts are left."""
        ray.kill(worker.actor)  # it may only be unreachable
        self._workers.remove(worker)
        self._tasks = {task: entry for task, entry in self._tasks.items() if entry[0] is not worker}
        activity = "generated texts with" if worker.arithmetic else "loaded"
        self._last_death = f"{death_description} while it {activity} {self._model_description}"
        for group in worker.running_groups:
            group.worker_deaths += 1
            if group.worker_deaths == 1:
                self._interrupted_groups.append(group)
            elif len(group.requests) > 1:
                self._interrupted_groups.extend(group.split_by_request())
            else:
                sentence = (
                    f"Several workers failed while they ran this line, and the last {death_description}; leave the "
                    "line out."
                )
                output_lines = [make_error_line(request, sentence) for request in group.requests.values()]
                self._finish_group(group, output_lines, worker.arithmetic)
        is_replaced = bool(worker.arithmetic) and self._restarts_left >= 1
        consequence = "another one starts" if is_replaced else "it is left out"
        print_note(f"worker {worker.number} {death_description}; {consequence}")
        if is_replaced:
            self._restarts_left -= 1
            self._add_worker(worker.number)


def wait_for_completed(tasks: list[ray.ObjectRef]) -> list[ray.ObjectRef]:
    """Return the finished tasks, after at most a second."""
    any_completed, _ = ray.wait(tasks, timeout=1)
    return ray.wait(tasks, num_returns=len(tasks), timeout=0)[0] if any_completed else []
