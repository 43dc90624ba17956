"""The work behind ``ovspec batch --ray``: files of requests, answered by the workers of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import ray
from pyarrow.fs import LocalFileSystem
from ray.exceptions import RayError, RayTaskError

from ovspec.base.errors import OvspecError
from ovspec.base.progress import show_step
from ovspec.batch.file import BatchProgress
from ovspec.batch.folder import find_files, forget, read
from ovspec.batch.groups import Answers, Group, groups_of
from ovspec.batch.ray.deaths import how_it_died
from ovspec.batch.ray.nodes import ship, told, workers
from ovspec.batch.ray.pool import ADVICE, TOGETHER, Pool
from ovspec.batch.ray.worker import Job, Reference, Worker
from ovspec.batch.requests import BatchRequest
from ovspec.params import Params
from ovspec.setup.model_folders import list_model_folders, resolve_model_folder


def run_on_cluster(
    source: str | list[BatchRequest],
    output: str,
    model: Path | None,
    draft: Any,
    loading: Any,
    params: Params,
    *,
    cpus: int | None = None,
    mixed: bool = False,
    overwrite: bool = False,
    change: Callable[[BatchRequest], BatchRequest] = lambda request: request,
    note: Callable[[BatchProgress], None] = lambda _: None,
) -> BatchProgress:
    """Do what ``run_file`` does, with the workers of the cluster that this process is connected to.

    Args:
        source, output: two files, or two folders, with a file of answers for each of requests; paths, or URIs of
            object storage. Or requests, and a file.
        cpus: processors of each worker, by default those of a NUMA node.
        mixed: let workers with other arithmetic take part; each line then says which kind of worker it is from.
        overwrite: whether to replace ``output``.
        change: applied to each request that is read.
        note: called each second or more often.

    Raises OvspecError if nothing can be read or written, a worker fails or computes other bits than the first one, or
    all have died.
    """
    filesystem, files = find_files(source if isinstance(source, str) else None, output, overwrite)
    folder, *others = list_model_folders(resolve_model_folder(model), draft)
    with told():
        shipped = [ship(each) for each in (folder, *others) if each == folder or not each.is_relative_to(folder)]
        job, (count, cpus) = Job(shipped, draft, loading, params, mixed), workers(cpus)
        reference = first_of(job, cpus)
    answers = Answers(files, f"{reference.depends_on}{' mixed' * mixed}", BatchProgress(0, 0, workers=count))
    left, known, depends_on = answers.left, answers.known, answers.depends_on

    def groups(path: str, data: bytes | None = None) -> list[Group]:
        requests = read(path, data) if isinstance(source, str) else source
        return list(groups_of(left[path], list(map(change, requests)), depends_on, known[path], count))

    def read_there(path: str) -> list[Group]:
        with filesystem.open_input_stream(path) as file:
            return groups(path, file.read())

    here = isinstance(filesystem, LocalFileSystem)
    beside: Any = {"num_cpus": 0, "retry_exceptions": [OSError]}  # because the workers have all processors
    reading = ray.remote(**beside)(read_there)
    words = job.in_words(cpus, reference)
    try:
        if left:
            todo = [group for path in left for group in groups(path)] if here else []
            with told(), closing(Pool(partial(start, job, reference, cpus), count, mixed, words)) as pool:
                for answered in pool.answer(todo, () if here else map(reading.remote, left)):
                    for group in answered:
                        answers.take(group)
                    answers.progress.workers, answers.progress.loading = pool.size, pool.loading
                    note(answers.progress)
    finally:
        answers.close()
    forget(output)
    return answers.progress


def start(job: Job, reference: Reference | None, cpus: int, number: int) -> Any:
    """Start an actor, whom Ray doesn't restart, because that would never end."""
    ways: Any = {"num_cpus": cpus, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": TOGETHER}
    return ray.remote(**ways)(Worker).remote(job, reference, number)


def first_of(job: Job, cpus: int) -> Reference:
    """Return what a first worker finds, whose processors are then free."""
    worker = start(job, None, cpus, 0)
    try:
        with show_step(f"{job.folders[0].folder}: loading on a first worker"):
            return ray.get(worker.load.remote())
    except RayTaskError:  # what it raised
        raise
    except RayError as error:
        death = f"{how_it_died(0, error)} while it loaded {job.in_words(cpus)}"
        raise OvspecError(f"The first worker {death}; {ADVICE}.") from None
    finally:
        ray.kill(worker)
