"""Batches on clusters of their own: of several machines, with object storage, and the command's, whoever is killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest
from pyarrow import fs
from ray_batches import (
    FLAGS,
    addresses,
    alone,
    as_lines,
    file_of_all_kinds,
    of_ray,
    on_cluster,
    requests_of_all_kinds,
    without_times,
)

pytest.importorskip("ray", reason="needs the extra ovspec[ray]")

from ovspec.base.errors import OvspecError
from ovspec.batch.ray.cluster import cluster_connection
from ovspec.batch.requests import read_requests
from ovspec.batch.resumable_run import BatchProgress
from ovspec.ir.instruction_set import describe_instruction_set

pytestmark = pytest.mark.slow  # test_ray.py has the quick ones, on one cluster


@pytest.fixture
def requests_file(tmp_path: Path) -> Path:
    return file_of_all_kinds(tmp_path)


def test_workers_that_compute_other_bits(pair: Path, tmp_path: Path) -> None:
    """On a cluster of two machines, one of which pretends to have a lesser processor."""
    from ray.cluster_utils import Cluster

    if describe_instruction_set() == "AVX2":
        pytest.skip("needs a processor with more than AVX2")
    requests_file = file_of_all_kinds(tmp_path, 120)

    def slowly(progress: BatchProgress) -> None:
        """Leave lines for the worker that loads last."""
        time.sleep(3 * (progress.loading_workers > 0))

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1, env_vars=dict.fromkeys(("ONEDNN_MAX_CPU_ISA", "OV_CPU_MAX_ISA"), "AVX2"))
        with cluster_connection(str(cluster.address)):
            with pytest.raises(
                OvspecError, match=r"computes different logits \(.*\) from the first worker's .* set `mixed=True`"
            ):
                on_cluster(read_requests(requests_file), tmp_path / "out", pair, report=slowly)
            on_cluster(read_requests(requests_file), tmp_path / "out", pair, mixed=True, report=slowly)
    finally:
        cluster.shutdown()
    kinds = {json.loads(line)["worker"] for line in (tmp_path / "out").read_text("utf-8").splitlines()}
    assert len(kinds) == 2, kinds


@pytest.fixture(scope="module")
def storage() -> Iterator[str]:
    """Serve object storage with an empty bucket, as the environment tells; return its URI."""
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:{1}".format(*server.get_host_and_port()))
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            patch.setenv(f"AWS_{name}", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture
def cluster(storage: str) -> Iterator[None]:
    """Run a cluster that knows the storage, with room for two workers of a processor each."""
    assert storage
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ovspec.batch.ray.cluster.usable_processors", lambda: [[0, 1]])
        with cluster_connection("local"):
            yield


@pytest.mark.usefixtures("cluster")
def test_object_storage(pair: Path, storage: str, requests_file: Path, tmp_path: Path) -> None:
    bucket, path = fs.FileSystem.from_uri(f"{storage}/in")
    for name in ("a b.jsonl", "c.jsonl"):
        with bucket.open_output_stream(f"{path}/{name}") as file:
            file.write(requests_file.read_bytes())
    found = on_cluster(f"{storage}/in", f"{storage}/out/", pair)
    assert (found.total, found.done, found.failed) == (40, 40, 4)
    expected = alone(pair, requests_file)
    for name in ("a b.jsonl", "c.jsonl"):
        with bucket.open_input_stream(f"bucket/out/{name}") as file:
            assert without_times(file.read().decode()) == expected
    with pytest.raises(OvspecError, match="already exists"):
        on_cluster(f"{storage}/in", f"{storage}/out", pair)
    with pytest.raises(OvspecError, match="contains no request files"):
        on_cluster(f"{storage}/other", f"{storage}/new", pair)
    on_cluster(f"{storage}/in/c.jsonl", tmp_path / "c.parquet", pair)
    table = pyarrow.parquet.read_table(tmp_path / "c.parquet").to_pylist()
    assert without_times("\n".join(row["result"] for row in table)) == expected


def batch_command(model: Path, file: Path, output: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "ovspec", "batch", *map(str, (model, file, "-o", output)), "--ray", *FLAGS, *options]


def test_a_machine_without_memory_is_told_of(
    pair: Path, requests_file: Path, tmp_path: Path, command_environment: dict[str, str]
) -> None:
    """Ray's monitor, which here allows hardly any memory, ends each process that works."""
    few = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    command = batch_command(pair, requests_file, tmp_path / "out.jsonl")
    done = subprocess.run(command, env=command_environment | few, capture_output=True, check=False, timeout=200)
    assert (done.returncode, done.stdout) == (1, b""), done
    *progress, told = done.stderr.decode().splitlines()
    assert told.startswith(("Error: Ray reported an error: ", "Error: The first worker was killed ")), told
    assert all(line.endswith("…") for line in progress), progress


def started(command: list[str], environment: dict[str, str], output: Path, lines: int) -> subprocess.Popen[bytes]:
    """Start a batch, and return when it has some lines."""
    partial = output.with_name(f"{output.name}.partial")
    run = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    while run.poll() is None and not (partial.is_file() and partial.read_bytes().count(b"\n") >= lines):
        time.sleep(0.02)
    return run


ALL = "all, with Ctrl-C"
KILLS = [
    pytest.param(killed, turn, marks=[pytest.mark.soak] * (turn >= 3))
    for killed, turns in (("worker", 20), ("driver", 20), (ALL, 1))
    for turn in range(turns)
]


@pytest.mark.parametrize(("killed", "turn"), KILLS)
def test_a_kill_loses_nothing(
    pair: Path,
    tmp_path: Path,
    command_environment: dict[str, str],
    killed: str,
    turn: int,
) -> None:
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(as_lines(requests_of_all_kinds(400)), encoding="utf-8")
    command = batch_command(pair, file, output)
    run = started(command, command_environment, output, 10 * (1 + turn))
    assert run.poll() is None, run.communicate()
    # Its agents look every minute whether it is still there.
    children = [process for process in of_ray(run.pid) if "Agent" not in process.name()]
    if killed == ALL:
        os.killpg(run.pid, signal.SIGINT)
    elif killed == "worker":
        random.Random(turn).choice(of_ray(run.pid, "ray::Worker")).kill()
    else:
        run.kill()
    _, told = run.communicate(timeout=300)
    assert not psutil.wait_procs(children, timeout=20)[1], "the cluster ends with its driver"
    if killed == ALL:
        assert run.returncode == 130
        assert b"stopped; the same command continues from the results kept in" in told
        assert b"Traceback" not in told, told
    if killed != "worker":
        done = subprocess.run(command, env=command_environment, capture_output=True, check=False, timeout=300)
        told = done.stderr
        assert b"by an earlier run" in told
    assert b"of 408 done" in told, told
    assert without_times(output.read_text("utf-8")) == alone(pair, file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_the_command_stays_on_this_machine(
    pair: Path, requests_file: Path, tmp_path: Path, command_environment: dict[str, str]
) -> None:
    """It listens on no other address, says nothing but its progress, and leaves nothing behind but its output."""
    output, temporary = tmp_path / "out.jsonl", tmp_path / "tmp"
    temporary.mkdir()
    environment = command_environment | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(temporary)}
    environment["OVSPEC_TUNE"] = "0"
    run = started(batch_command(pair, requests_file, output, "--mixed"), environment, output, 1)
    processes = [psutil.Process(run.pid), *of_ray(run.pid)]
    found = addresses(processes)
    assert "127.0.0.1" in found and found <= {"127.0.0.1", "::1"}
    _, told = run.communicate(timeout=200)
    assert run.returncode == 1, "because two lines fail"
    *progress, last = told.decode().splitlines()
    assert re.fullmatch(
        r"20 of 20 done, 2 with an error, \d+ tokens in .* s \(.* tokens/s\), \d workers?", progress[-1]
    )
    assert last.endswith("2 of 20 lines have an error instead of a text")
    assert all(re.match(r"\d+ of \d+ done|.* …$", line) for line in progress), told
    assert all("worker" in json.loads(line) for line in output.read_text("utf-8").splitlines())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "out.jsonl", "requests.jsonl", "tmp"]
    assert not list(temporary.iterdir())
    assert not list((tmp_path / "cache" / "ovspec" / "ray" / "sessions").iterdir())
    assert not psutil.wait_procs(processes[1:], timeout=10)[1]
