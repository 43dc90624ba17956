"""The workers of a batch on a cluster, and what becomes of the lines whose worker dies."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from ovspec.base.errors import OvspecError
from ovspec.base.progress import print_note
from ovspec.batch.groups import Group
from ovspec.batch.ray.deaths import how_it_died
from ovspec.batch.run import error_line

TOGETHER = 4  # groups that a worker answers at a time, so that its batch stays full from one to the next
READ = 4  # files that are read at a time
# Workers that are started again: of each place for one, and one more for so many answered lines, so that lines that
# kill stop no long batch, and a model that always does stops soon.
RESTARTS, LINES = 3, 10
ADVICE = "set another `precision`, or more `cpus_per_worker` for fewer workers"


@dataclass(eq=False)
class Hired:
    """A worker."""

    number: int  # of its place
    actor: Any  # of Ray
    kind: str = ""  # how it computes; empty until it has loaded
    groups: list[Group] = field(default_factory=list)  # that it has to answer

    @property
    def has_room(self) -> bool:
        """Whether it may get a group; nothing is answered beside a group that may have killed a worker."""
        return bool(self.kind) and len(self.groups) < TOGETHER and not any(group.deaths for group in self.groups)


class Pool:
    """Answers groups of requests with ``count`` workers, which ``start`` makes from the numbers of their places.

    A worker that dies while it loads is left out; later, another takes its place. What it had to answer is answered
    last, each group alone; a group whose worker dies again is answered line by line, and the line whose worker dies
    then gets an error.

    Args:
        start: returns an actor of Ray with the methods of ``Worker``, which Ray doesn't restart.
        mixed: whether each line says which kind of worker it is from.
        model: what is loaded, and how, in words.
    """

    def __init__(self, start: Callable[[int], Any], count: int, mixed: bool, model: str) -> None:
        self._start, self._mixed, self._model = start, mixed, model
        self._restarts, self._death = float(RESTARTS * count), ""  # that are left; how the last one died
        self._hired = list[Hired]()
        self._tasks = dict[ray.ObjectRef, tuple[Hired, Group | None]]()  # without a group: it loads
        self._waiting, self._again = deque[Group](), deque[Group]()  # not begun; that lost a worker
        self._finished = list[Group]()
        for number in range(1, count + 1):
            self._hire(number)

    @property
    def size(self) -> int:
        return len(self._hired)

    @property
    def loading(self) -> int:
        return sum(not hired.kind for hired in self._hired)

    def answer(self, groups: Iterable[Group], files: Iterable[ray.ObjectRef] = ()) -> Iterator[list[Group]]:
        """Yield, each second or earlier, the groups that were answered since, in any order.

        Args:
            groups: to be answered first.
            files: tasks that return the groups of a file each; a few of them run ahead.

        Raises OvspecError if no worker is left, or what a worker raises.
        """
        self._wait_for(groups)
        more, reading = iter(files), list[ray.ObjectRef]()
        while True:
            if len(self._waiting) < TOGETHER * self.size:
                reading.extend(itertools.islice(more, READ - len(reading)))
            self._hand_out()
            finished, self._finished = self._finished, []
            yield finished
            if not (reading or self._waiting or self._again or any(group for _, group in self._tasks.values())):
                return
            if not self._hired:
                raise OvspecError(
                    f"No worker is left, because the last one {self._death}; {ADVICE}, and the same "
                    "command continues from the finished lines."
                )
            for ref in completed([*reading, *self._tasks]):
                if ref in reading:
                    reading.remove(ref)
                    self._wait_for(ray.get(ref))
                elif ref in self._tasks:  # its worker hasn't died meanwhile
                    self._take(ref)

    def close(self) -> None:
        for hired in self._hired:
            ray.kill(hired.actor)

    def _wait_for(self, groups: Iterable[Group]) -> None:
        for group in groups:
            (self._waiting if group.requests else self._finished).append(group)

    def _hire(self, number: int) -> None:
        hired = Hired(number, self._start(number))
        self._hired.append(hired)
        self._tasks[hired.actor.load.remote()] = hired, None

    def _hand_out(self) -> None:
        """Give groups to those with the least to do."""
        while free := [hired for hired in self._hired if hired.has_room]:
            hired = min(free, key=lambda hired: len(hired.groups))
            if not self._waiting and (hired.groups or not self._again):
                return
            group = (self._waiting or self._again).popleft()
            hired.groups.append(group)
            self._tasks[hired.actor.answer.remote(list(group.requests.values()))] = hired, group

    def _take(self, ref: ray.ObjectRef) -> None:
        """Take what a worker returned, or its death."""
        hired, group = self._tasks[ref]
        try:
            found = ray.get(ref)
        except RayTaskError:  # it raised this, and lives
            raise
        except RayError as error:
            self._bury(hired, how_it_died(hired.number, error))
            return
        del self._tasks[ref]
        if not group:
            hired.kind = found.kind
            return
        hired.groups.remove(group)
        self._finish(group, found, hired.kind)

    def _finish(self, group: Group, lines: list[dict[str, Any]], kind: str) -> None:
        group.answer(line | ({"worker": kind} if self._mixed else {}) for line in lines)
        self._finished.append(group)
        self._restarts += len(lines) / LINES

    def _bury(self, hired: Hired, death: str) -> None:
        """Give up a worker, and start another one in its place if it had loaded and not too many have died."""
        ray.kill(hired.actor)  # in case that it is only out of reach
        self._hired.remove(hired)
        self._tasks = {ref: task for ref, task in self._tasks.items() if task[0] is not hired}
        self._death = f"{death} while it {'answered with' if hired.kind else 'loaded'} {self._model}"
        for group in hired.groups:
            group.deaths += 1
            if group.deaths == 1:
                self._again.append(group)
            elif len(group.requests) > 1:
                self._again.extend(group.apart())
            else:
                message = f"The worker that answered this line {death}; others answered the lines beside it."
                self._finish(group, [error_line(request, message) for request in group.requests.values()], hired.kind)
        again = bool(hired.kind) and self._restarts >= 1
        print_note(f"worker {hired.number} {death}; {'another one starts' if again else 'it is left out'}")
        if again:
            self._restarts -= 1
            self._hire(hired.number)


def completed(refs: list[ray.ObjectRef]) -> list[ray.ObjectRef]:
    """Return those whose task has ended, after at most a second."""
    first, _ = ray.wait(refs, timeout=1)
    return ray.wait(refs, num_returns=len(refs), timeout=0)[0] if first else []
