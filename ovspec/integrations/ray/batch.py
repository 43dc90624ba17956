"""The work behind ``ovspec batch --ray``: files of requests, answered by the workers of a cluster."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import ray.data
from pyarrow.fs import FileSystem, LocalFileSystem

from ovspec.api.loading import folders_of, model_folder
from ovspec.base.progress import step
from ovspec.integrations.ray.nodes import ship, told, workers
from ovspec.integrations.ray.worker import Job, Reference, Worker
from ovspec.openai.batch_file import BatchProgress
from ovspec.openai.batch_folder import find_files, forget, read
from ovspec.openai.batch_groups import Answers, Group, groups_of
from ovspec.openai.batch_requests import BatchRequest

TOGETHER = 4  # groups that a worker answers at a time, so that its batch stays full from one to the next


def run_on_cluster(
    source: str | list[BatchRequest],
    output: str,
    model: Path | None,
    draft: Any,
    loading: Any,
    generating: Any,
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
        note: called after each group of lines.

    Raises OvspecError if nothing can be read or written, or a worker fails or computes other bits than the first one.
    """
    filesystem, files = find_files(source if isinstance(source, str) else None, output, overwrite)
    folder, *others = folders_of(model_folder(model), draft)
    shipped = [ship(each) for each in (folder, *others) if each == folder or not each.is_relative_to(folder)]
    job, (count, cpus) = Job(shipped, draft, loading, generating, mixed), workers(cpus)
    with step(f"{folder}: loading on a first worker"), told():  # in a process that then frees its processors
        first = ray.remote(num_cpus=cpus, max_calls=1)(lambda: Worker(job).loaded()[1])
        reference: Reference = ray.get(first.remote())
    answers = Answers(files, f"{reference.depends_on}{' mixed' * mixed}", BatchProgress(0, 0, workers=count))
    left, known, depends_on = answers.left, answers.known, answers.depends_on

    def groups(path: str, data: bytes | None) -> Iterator[Group]:
        requests = read(path, data) if isinstance(source, str) else source
        return groups_of(left[path], list(map(change, requests)), depends_on, known[path], count)

    try:
        with told():
            for group in answered(dataset(filesystem, list(left), groups), job, reference, count, cpus) if left else ():
                answers.take(group)
                note(answers.progress)
    finally:
        answers.close()
    forget(output)
    return answers.progress


def dataset(there: FileSystem, paths: list[str], groups: Callable[..., Iterator[Group]]) -> ray.data.Dataset:
    """Return the pickled groups of the files at ``paths``, read by Ray unless they are here."""

    def rows(file: dict[str, Any]) -> list[dict[str, bytes]]:
        return [{"group": pickle.dumps(group)} for group in groups(file["path"], file["bytes"])]

    if not isinstance(there, LocalFileSystem):
        beside: Any = {"num_cpus": 0}  # because the workers have all processors
        files = ray.data.read_binary_files(paths, filesystem=there, include_paths=True, **beside)
        return files.flat_map(rows, **beside)
    found = [row for path in paths for row in rows({"path": path, "bytes": None})]
    return ray.data.from_arrow([pyarrow.Table.from_pylist([row]) for row in found])


def answered(groups: ray.data.Dataset, job: Job, reference: Reference, count: int, cpus: int) -> Iterator[Group]:
    """Yield ``groups``, answered, in any order."""
    groups.context.target_max_block_size = 1  # so that each is a block of its own, which any worker may take
    full: Any = {"max_tasks_in_flight_per_actor": TOGETHER, "max_concurrent_calls_per_actor": TOGETHER}
    pool = ray.data.ActorPoolStrategy(size=count, enable_true_multi_threading=True, **full)
    ways: Any = {"fn_constructor_args": (job, reference), "batch_size": None, "num_cpus": cpus, "compute": pool}
    for row in groups.map_batches(Worker, **ways).iter_rows():
        yield pickle.loads(row["group"])
