"""The driver of ``ovspec batch --ray``: files of requests, run by the workers of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from pyarrow.fs import FileSystem, LocalFileSystem
from ray.exceptions import RayError, RayTaskError

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec.base.progress import show_step
from ovspec.batch.folder import delete_partial_results, find_batch_files, read_file_requests
from ovspec.batch.groups import RequestGroup, ResultCollector, make_groups
from ovspec.batch.ray.deaths import describe_death
from ovspec.batch.ray.errors import plain_ray_errors
from ovspec.batch.ray.nodes import plan_workers
from ovspec.batch.ray.pool import GROUPS_IN_FLIGHT, MEMORY_ADVICE, WorkerPool
from ovspec.batch.ray.shipment import ship_folder
from ovspec.batch.ray.worker import ReferenceArithmetic, Worker, WorkerSetup
from ovspec.batch.requests import BatchRequest
from ovspec.batch.resumable_run import BatchProgress
from ovspec.params import Params
from ovspec.setup.model_folders import list_model_folders, resolve_model_folder


def run_on_cluster(
    source: str | list[BatchRequest],
    output: str,
    model: Path | None,
    draft: Any,
    load_options: JsonObject,
    params: Params,
    *,
    cpus: int | None = None,
    mixed: bool = False,
    overwrite: bool = False,
    convert: Callable[[BatchRequest], BatchRequest] = lambda request: request,
    report: Callable[[BatchProgress], None] = lambda _: None,
) -> BatchProgress:
    """Run files of requests like ``run_file``, with the workers of this process's cluster.

    Args:
        source, output: two files, or two folders with a results file per input file, as paths or URIs of object
            storage; or a list of requests and a file.
        model, draft, load_options: as for ``ovspec.load``.
        params: for requests without their own.
        cpus: processors per worker, by default all of a NUMA node.
        mixed: allow workers with other arithmetic; each line then names its worker's arithmetic.
        overwrite: whether to replace ``output``.
        convert: applied to each request.
        report: called with the progress at least once a second.

    Raises OvspecError if nothing can be read or written, a worker fails or computes other bits than the first, or all
    have died.
    """
    filesystem, files = find_batch_files(source if isinstance(source, str) else None, output, overwrite)
    model_folder, *draft_folders = list_model_folders(resolve_model_folder(model), draft)
    outside_drafts = [draft_folder for draft_folder in draft_folders if not draft_folder.is_relative_to(model_folder)]
    with plain_ray_errors():
        worker_setup = WorkerSetup(
            [ship_folder(folder) for folder in (model_folder, *outside_drafts)], draft, load_options, params, mixed
        )
        worker_count, cpus = plan_workers(cpus)
        reference = find_reference_arithmetic(worker_setup, cpus)
    run_identity = f"{reference.run_identity}{' mixed' * mixed}"
    collector = ResultCollector(files, run_identity, BatchProgress(0, 0, worker_count=worker_count))
    requests = source if isinstance(source, list) else None
    file_numbers = collector.unfinished_file_numbers
    reader = GroupReader(
        filesystem, file_numbers, collector.finished_keys, run_identity, requests, worker_count, convert
    )
    try:
        if file_numbers:
            pool = WorkerPool(
                partial(start_worker, worker_setup, reference, cpus),
                worker_count,
                mixed,
                worker_setup.describe_worker(cpus, reference),
            )
            with plain_ray_errors(), closing(pool):
                for groups in pool.run_groups(*reader.read_all_groups()):
                    for group in groups:
                        collector.collect_group(group)
                    collector.progress.worker_count = pool.worker_count
                    collector.progress.loading_workers = pool.loading_count
                    report(collector.progress)
    finally:
        collector.close()
    delete_partial_results(output)
    return collector.progress


@dataclass
class GroupReader:
    """Reads the unfinished files, on this or, copied there by Ray, on another machine of the cluster.

    numbers, finished_keys: see ``ResultCollector``.
    requests: used instead of a file.
    workers: number of workers.
    """

    filesystem: FileSystem
    numbers: dict[str, int]
    finished_keys: dict[str, frozenset[str]]
    run_identity: str
    requests: list[BatchRequest] | None
    workers: int
    convert: Callable[[BatchRequest], BatchRequest]

    def read_all_groups(self) -> tuple[list[RequestGroup], Iterable[ray.ObjectRef]]:
        """Return the groups of all local files, and tasks for the groups of files in object storage."""
        if isinstance(self.filesystem, LocalFileSystem):
            return [group for path in self.numbers for group in self.read_groups(path)], ()
        # Reserve no processor for reading, because the workers have all of them.
        task_options: JsonObject = {"num_cpus": 0, "retry_exceptions": [OSError]}

        def read_remote_file(path: str) -> list[RequestGroup]:
            with self.filesystem.open_input_stream(path) as file:
                return self.read_groups(path, file.read())

        return [], map(ray.remote(**task_options)(read_remote_file).remote, self.numbers)

    def read_groups(self, path: str, content: bytes | None = None) -> list[RequestGroup]:
        """Return the groups of a file's ``content`` (None: read the local file)."""
        requests = read_file_requests(path, content) if self.requests is None else self.requests
        converted_requests = [self.convert(request) for request in requests]
        finished_keys = self.finished_keys[path]
        return list(make_groups(self.numbers[path], converted_requests, self.run_identity, finished_keys, self.workers))


def start_worker(
    worker_setup: WorkerSetup, reference: ReferenceArithmetic | None, cpus: int, worker_number: int
) -> Any:
    """Start an actor without Ray's restarts, which have no end."""
    actor_options: JsonObject = {"num_cpus": cpus, "max_restarts": 0, "max_task_retries": 0}
    actor_options["max_concurrency"] = GROUPS_IN_FLIGHT
    return ray.remote(**actor_options)(Worker).remote(worker_setup, reference, worker_number)


def find_reference_arithmetic(worker_setup: WorkerSetup, cpus: int) -> ReferenceArithmetic:
    """Return the first worker's reference, and free its processors."""
    worker = start_worker(worker_setup, None, cpus, 0)
    try:
        with show_step(f"{worker_setup.shipments[0].folder}: loading on a first worker"):
            return ray.get(worker.load_worker_model.remote())
    except RayTaskError:  # the worker's own error
        raise
    except RayError as error:
        death_description = f"{describe_death(0, error)} while it loaded {worker_setup.describe_worker(cpus)}"
        raise OvspecError(f"The first worker {death_description}; {MEMORY_ADVICE}.") from None
    finally:
        ray.kill(worker)
