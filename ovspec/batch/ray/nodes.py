"""The machines of a cluster and their processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ovspec.base.errors import OvspecError
from ovspec.batch.ray.processors import usable_processors


def run_on_each_node(function: Callable[[], Any], timeout: float | None = None) -> dict[str, Any]:
    """Return a function's result on each machine of the cluster, by node id; ``timeout``: maximum wait in seconds."""
    # No retries: if memory is short, Ray would retry for ever.
    remote_function = ray.remote(num_cpus=0, max_retries=0)(lambda: function())
    node_ids = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    strategies = [NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in node_ids]
    results = ray.get(
        [remote_function.options(scheduling_strategy=strategy).remote() for strategy in strategies], timeout=timeout
    )
    return dict(zip(node_ids, results, strict=True))


def plan_workers(cpus: int | None) -> tuple[int, int]:
    """Return the number of workers for the cluster, and the processors of each: a NUMA node's, or ``cpus``."""
    cpus_of_node = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]}
    if cpus is None:
        numa_nodes = run_on_each_node(usable_processors)
        smallest_numa_nodes = [
            min(node_cpus, *map(len, numa_nodes[node_id])) for node_id, node_cpus in cpus_of_node.items() if node_cpus
        ]
        cpus = min(smallest_numa_nodes, default=1)
    worker_count = sum(node_cpus // cpus for node_cpus in cpus_of_node.values())
    if not worker_count:
        raise OvspecError(f"No machine in the cluster has {cpus} CPUs; lower `cpus_per_worker`.")
    return worker_count, cpus
