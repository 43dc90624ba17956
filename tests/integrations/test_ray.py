"""Batches on local clusters of Ray: the lines that one machine writes, whatever happens to workers and driver."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT
from pyarrow import fs

pytest.importorskip("ray", reason="needs the extra ovspec[ray]")

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.drafting.proposal import NOTHING
from ovspec.integrations.ray.cluster import connected
from ovspec.ir.instruction_set import instruction_set
from ovspec.openai.batch_file import BatchProgress, run_file
from ovspec.openai.batch_requests import read_requests

PROMPTS = ["def fib(", "The sky is", "Once upon a time", "import os\n"]
OPTIONS: Any = {"max_tokens": 12, "seed": 5}


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


@pytest.fixture(scope="module")
def cluster(storage: str) -> Iterator[None]:
    """Run a cluster with room for two workers of a processor each, also if this process has one."""
    assert storage
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ovspec.integrations.ray.cluster.processors", lambda: [[0, 1]])
        with connected("local"):
            yield


LOADING: Any = {"threads": 1}


def on_cluster(
    source: Any, output: Any, model: Path, draft: Any = None, loading: Any = LOADING, **ways: Any
) -> BatchProgress:
    from ovspec.integrations.ray.batch import run_on_cluster

    return run_on_cluster(source, str(output), model, draft, loading, OPTIONS, cpus=1, **ways)


def requests_of_all_kinds(count: int = 12) -> list[Any]:
    """Return requests with and without seeds, and some that fail."""
    own: Any = [{"id": f"own {n}", "prompt": PROMPTS[n % 4] + str(n), "temperature": n % 2} for n in range(count)]
    seeded = [{"id": f"seed {n}", "prompt": PROMPTS[n], "seed": n, "temperature": 0.8, "n": 2} for n in range(4)]
    body = {"model": "m", "prompt": "def f(", "max_tokens": 5, "logprobs": 2}
    openai = {"custom_id": "openai", "method": "POST", "url": "/v1/completions", "body": body}
    return [
        *own,
        *seeded,
        openai,
        {"id": "bad", "prompt": "x", "max_tokens": -5},
        "just a prompt",
        {"id": "own 3", "prompt": "twice"},
    ]


def as_lines(values: list[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


@pytest.fixture
def requests_file(tmp_path: Path) -> Path:
    file = tmp_path / "requests.jsonl"
    file.write_text(as_lines(requests_of_all_kinds()), encoding="utf-8")
    return file


def without_times(text: str) -> list[dict[str, Any]]:
    """Return the lines of a result without times, ids of the run and cached tokens."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cleaned(each) for name, each in value.items() if name not in ("created", "cached_tokens")}
        return [cleaned(each) for each in value] if isinstance(value, list) else value

    return [cleaned(json.loads(line)) for line in text.splitlines()]


@pytest.fixture(scope="module")
def alone(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that returns what one machine writes for a file."""

    def run(file: Path, draft: Any = None, loading: Any = LOADING) -> list[dict[str, Any]]:
        output = tmp_path_factory.mktemp("alone") / "out.jsonl"
        run_file(ovspec.load(pair, draft, **loading), read_requests(file), output, OPTIONS)
        return without_times(output.read_text("utf-8"))

    return run


@pytest.mark.slow
def test_workers_that_compute_other_bits(pair: Path, requests_file: Path, tmp_path: Path) -> None:
    """On a cluster of two machines, one of which pretends to have a lesser processor.

    Before the tests of this file that share a cluster, because a process has one at a time.
    """
    from ray.cluster_utils import Cluster

    if instruction_set() == "AVX2":
        pytest.skip("needs a processor with more than AVX2")
    requests_file.write_text(as_lines(requests_of_all_kinds(120)), encoding="utf-8")

    def slowly(progress: BatchProgress) -> None:
        """Leave lines for the worker that loads last."""
        time.sleep(3 * (progress.loading > 0))

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1, env_vars=dict.fromkeys(("ONEDNN_MAX_CPU_ISA", "OV_CPU_MAX_ISA"), "AVX2"))
        with connected(str(cluster.address)):
            with pytest.raises(
                OvspecError, match=r"computes other bits \(.*\) than the first one .* with `mixed=True`"
            ):
                on_cluster(read_requests(requests_file), tmp_path / "out", pair, note=slowly)
            on_cluster(read_requests(requests_file), tmp_path / "out", pair, mixed=True, note=slowly)
    finally:
        cluster.shutdown()
    kinds = {json.loads(line)["worker"] for line in (tmp_path / "out").read_text("utf-8").splitlines()}
    assert len(kinds) == 2, kinds


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("draft", [None, pytest.param("lookup,draft", marks=pytest.mark.slow)])
def test_the_lines_that_one_machine_writes(
    pair: Path, requests_file: Path, tmp_path: Path, alone: Callable[..., Any], draft: Any
) -> None:
    found = on_cluster(read_requests(requests_file), tmp_path / "ray", pair, draft)
    assert (found.total, found.done, found.failed, found.workers) == (20, 20, 2, 2)
    assert without_times((tmp_path / "ray").read_text("utf-8")) == alone(requests_file, draft)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_the_real_model_with_its_head(tmp_path: Path) -> None:
    """In int8, greedy and sampled, at the defaults but for one thread; the head is in the model's folder."""
    model, file = ROOT / "smollm2", tmp_path / "in.jsonl"
    if not model.is_dir():
        pytest.skip("the real model could not be fetched")
    asked = ("Write a haiku about rain.", "What is the capital of France?", "List three fruits.")
    chats = [[{"role": "user", "content": f"{asked[n % 3]} ({n})"}] for n in range(12)]
    file.write_text(
        as_lines([{"messages": chat, "temperature": n % 2, "n": 1} for n, chat in enumerate(chats)]), "utf-8"
    )
    on_cluster(read_requests(file), tmp_path / "ray", model, "lookup,head")
    run_file(ovspec.load(model, "lookup,head", threads=1), read_requests(file), tmp_path / "alone", OPTIONS)
    found, expected = (without_times((tmp_path / name).read_text("utf-8")) for name in ("ray", "alone"))
    assert found == expected
    assert len({line["text"] for line in found}) > 6


@pytest.mark.usefixtures("cluster")
def test_folders_go_to_folders_and_an_interrupted_run_goes_on(
    pair: Path, tmp_path: Path, alone: Callable[..., Any]
) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    (source / "more").mkdir(parents=True)
    lines = requests_of_all_kinds(40)
    (source / "a b.jsonl").write_text(as_lines(lines), encoding="utf-8")
    (source / "more" / "prompts.txt").write_text("import os\ndef f(\n", encoding="utf-8")
    (source / "empty.jsonl").write_text("", encoding="utf-8")
    (source / "_SUCCESS.jsonl").write_text("not read", encoding="utf-8")
    rows = [{"id": n + 10, "prompt": PROMPTS[n], "temperature": float(n % 2) or None} for n in range(4)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source / "rows.parquet")

    def stop(progress: BatchProgress) -> None:
        if progress.done > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        on_cluster(str(source), output, pair, note=stop)
    found = on_cluster(str(source), output, pair)
    assert (found.total, found.failed >= 1, found.before > 20) == (54, True, True)
    assert found.before + found.done == 54
    assert not (tmp_path / "out.partial").exists()
    assert sorted(str(file.relative_to(output)) for file in output.rglob("*") if file.is_file()) == [
        "a b.jsonl",
        "empty.jsonl",
        "more/prompts.txt.jsonl",
        "rows.parquet",
    ]
    assert without_times((output / "a b.jsonl").read_text("utf-8")) == alone(source / "a b.jsonl")
    written = (output / "more" / "prompts.txt.jsonl").read_text("utf-8")
    assert without_times(written) == alone(source / "more" / "prompts.txt")
    (tmp_path / "rows.jsonl").write_text(as_lines([{k: v for k, v in row.items() if v} for row in rows]), "utf-8")
    expected = alone(tmp_path / "rows.jsonl")
    table = pyarrow.parquet.read_table(output / "rows.parquet").to_pylist()
    assert [row["text"] for row in table] == [line["text"] for line in expected]
    assert without_times("\n".join(row["result"] for row in table)) == expected
    with pytest.raises(OvspecError, match="already exists"):
        on_cluster(str(source), output, pair)
    with pytest.raises(OvspecError, match="in the folder of the requests"):
        on_cluster(str(source), source / "out", pair)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_object_storage(
    pair: Path, storage: str, requests_file: Path, tmp_path: Path, alone: Callable[..., Any]
) -> None:
    bucket, path = fs.FileSystem.from_uri(f"{storage}/in")
    for name in ("a b.jsonl", "c.jsonl"):
        with bucket.open_output_stream(f"{path}/{name}") as file:
            file.write(requests_file.read_bytes())
    found = on_cluster(f"{storage}/in", f"{storage}/out/", pair)
    assert (found.total, found.done, found.failed) == (40, 40, 4)
    expected = alone(requests_file)
    for name in ("a b.jsonl", "c.jsonl"):
        with bucket.open_input_stream(f"bucket/out/{name}") as file:
            assert without_times(file.read().decode()) == expected
    with pytest.raises(OvspecError, match="already exists"):
        on_cluster(f"{storage}/in", f"{storage}/out", pair)
    with pytest.raises(OvspecError, match="there is no file whose name ends in"):
        on_cluster(f"{storage}/other", f"{storage}/new", pair)
    on_cluster(f"{storage}/in/c.jsonl", tmp_path / "c.parquet", pair)
    table = pyarrow.parquet.read_table(tmp_path / "c.parquet").to_pylist()
    assert without_times("\n".join(row["result"] for row in table)) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_line_that_kills_workers_has_an_error_and_a_run_without_workers_goes_on(
    pair: Path, tmp_path: Path, alone: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kills by a drafter of the user's own, first where no worker is started again."""
    loading = LOADING | {"precision": "f32"}  # in bf16, some processors die of this model in one thread
    deadly = ovspec.load(pair, **loading).tokenizer.encode("Once upon a killer").tolist()

    class Deadly(ovspec.Drafter):
        def propose(self, rows: list[Any], lookahead: Any) -> Any:  # noqa: ARG002
            if any(row.sequence.tokens[: len(deadly)].tolist() == deadly for row in rows):
                os.kill(os.getpid(), signal.SIGFPE)
                time.sleep(60)
            return [NOTHING] * len(rows)

    requests = requests_of_all_kinds(40)
    requests[17] = {"id": "deadly", "prompt": "Once upon a killer"}
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(as_lines(requests), encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr("ovspec.integrations.ray.pool.RESTARTS", 0)
        patch.setattr("ovspec.integrations.ray.pool.LINES", 1000)
        with pytest.raises(OvspecError, match=rf"last one died of SIGFPE while it answered with {pair} .*exact; set "):
            on_cluster(str(file), output, pair, Deadly(), loading)
    assert not output.exists()
    found = on_cluster(str(file), output, pair, Deadly(), loading)
    assert (found.total, found.failed >= 1, found.before > 0) == (48, True, True)
    *_, error = [line for line in without_times(output.read_text("utf-8")) if line["id"] == "deadly"]
    assert error == {
        "id": "deadly",
        "error": "The worker that answered this line died of SIGFPE; others answered the lines beside it.",
    }
    others = [
        [line for line in lines if line["id"] != "deadly"]
        for lines in (without_times(output.read_text("utf-8")), alone(file, loading=loading))
    ]
    assert others[0] == others[1]


@pytest.mark.usefixtures("cluster")
def test_a_first_worker_that_dies(pair: Path, requests_file: Path, tmp_path: Path) -> None:
    class Deadly:
        of = os.getpid()

        @property
        def propose(self) -> Any:
            if os.getpid() != self.of:
                os.kill(os.getpid(), signal.SIGFPE)
                time.sleep(60)

    told = (
        rf"The first worker died of SIGFPE while it loaded {pair} `threads=1` on 1 processor; set another `precision`"
    )
    with pytest.raises(OvspecError, match=told):
        on_cluster(read_requests(requests_file), tmp_path / "out", pair, Deadly())


@pytest.mark.slow
def test_a_machine_without_memory_is_told_of(
    pair: Path, requests_file: Path, tmp_path: Path, command_environment: dict[str, str]
) -> None:
    """Ray's monitor, which here allows hardly any memory, ends each process that works."""
    few = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    command = batch_command(pair, requests_file, tmp_path / "out.jsonl")
    done = subprocess.run(command, env=command_environment | few, capture_output=True, check=False, timeout=200)
    assert (done.returncode, done.stdout) == (1, b""), done
    *progress, told = done.stderr.decode().splitlines()
    assert told.startswith(("Error: Ray: ", "Error: The first worker was killed ")), told
    assert all(line.endswith("…") for line in progress), progress


@pytest.mark.usefixtures("cluster")
def test_the_predictor_answers_the_rows_of_a_dataset(pair: Path) -> None:
    import ray.data
    from ray.exceptions import RayError

    from ovspec.integrations.ray import Predictor

    lm = ovspec.load(pair, threads=1)
    options = {"model": str(pair), "max_tokens": 8, "threads": 1}
    rows = [{"name": n, "prompt": PROMPTS[n]} for n in range(4)]
    dataset, alone = ray.data.from_items(rows, override_num_blocks=2), ray.data.ActorPoolStrategy(size=1)
    answered = dataset.map_batches(Predictor, fn_constructor_kwargs=options, num_cpus=1, compute=alone).take_all()
    for row in answered:
        assert row["text"] == lm.generate(PROMPTS[row["name"]], max_tokens=8).text
        assert (row["prompt"], row["error"], row["finish_reason"]) == (PROMPTS[row["name"]], None, "length")
        assert json.loads(row["result"])["record"]["token_ids"]
    for wrong, told in (({"column": "question"}, "no column 'question'"), ({"model": "nowhere"}, "nowhere")):
        with pytest.raises(RayError, match=told):
            dataset.map_batches(Predictor, fn_constructor_kwargs=options | wrong, num_cpus=1, compute=alone).take_all()


def batch_command(model: Path, file: Path, output: Path, *options: str) -> list[str]:
    ways = ["--ray", "--cpus-per-worker", "1", "--threads", "1", "--max-tokens", "12", "--seed", "5"]
    return [sys.executable, "-m", "ovspec", "batch", *map(str, (model, file, "-o", output)), *ways, *options]


def started(command: list[str], environment: dict[str, str], output: Path, lines: int) -> subprocess.Popen[bytes]:
    """Start a batch, and return when it has some lines."""
    partial = output.with_name(f"{output.name}.partial")
    run = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    while run.poll() is None and not (partial.is_file() and partial.read_bytes().count(b"\n") >= lines):
        time.sleep(0.02)
    return run


def of_ray(of: int, name: str = "") -> list[psutil.Process]:
    """Return the processes of a cluster that the process ``of`` runs, or those whose name begins with ``name``."""
    found = psutil.Process(of).children(recursive=True)
    return [process for process in found if "".join(process.cmdline()).startswith(name)]


ALL = "all, with Ctrl-C"
KILLS = [
    pytest.param(killed, turn, marks=pytest.mark.slow if turn < 3 else pytest.mark.soak)
    for killed, turns in (("worker", 20), ("driver", 20), (ALL, 1))
    for turn in range(turns)
]


@pytest.mark.parametrize(("killed", "turn"), KILLS)
def test_a_kill_loses_nothing(
    pair: Path,
    tmp_path: Path,
    alone: Callable[..., Any],
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
    assert without_times(output.read_text("utf-8")) == alone(file)
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
    found = [each for process in processes if process.is_running() for each in process.net_connections()]
    listens = {each.laddr.ip.removeprefix("::ffff:") for each in found if each.status == psutil.CONN_LISTEN}
    assert "127.0.0.1" in listens and listens <= {"127.0.0.1", "::1"}
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


def test_progress_says_how_many_workers_are_loading() -> None:
    from ovspec.cli.batch import Report

    report = Report()
    assert report.line(BatchProgress(0, 0, workers=2, loading=2)) == "2 workers: loading …"
    assert report.line(BatchProgress(9, 0, done=4, workers=2, loading=1)).endswith("2 workers (1 loading)")
    assert report.line(BatchProgress(9, 0, done=9, workers=2, loading=1)).endswith("2 workers")


def test_without_the_extra_a_sentence_says_what_to_install(requests_file: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['ray'] = None; from ovspec.__main__ import main; main()"
    command = [sys.executable, "-c", code, "batch", str(requests_file), "-o", str(tmp_path / "out"), "--ray"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert (done.returncode, b"Ray is missing; run pip install 'ovspec[ray]'." in done.stderr) == (1, True), done.stderr


def test_an_address_where_no_cluster_is(requests_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ovspec", "batch", str(requests_file), "-o", str(tmp_path / "out")]
    done = subprocess.run([*command, "--ray", "127.0.0.1:9"], capture_output=True, check=False, timeout=100)
    assert done.returncode == 1
    assert b"No cluster of Ray answers at 127.0.0.1:9" in done.stderr, done.stderr


@pytest.mark.usefixtures("cluster")
def test_a_model_is_shipped_to_machines_without_it(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ovspec.integrations.ray import nodes

    folder = tmp_path / "model"
    shutil.copytree(pair, folder)
    assert nodes.ship(folder).pieces == [], "all machines have it"
    monkeypatch.setattr(nodes, "on_each_node", lambda _: {"node": False})
    monkeypatch.setattr(nodes, "PIECE", 1 << 16)
    shipped = nodes.ship(folder)
    assert len(shipped.pieces) > len(list(folder.rglob("*")))
    assert shipped.arrive() == folder.resolve()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(OvspecError, match="has another model on"):
        shipped.arrive()
    shutil.rmtree(folder)
    copy = shipped.arrive()
    assert copy == shipped.arrive() != folder
    assert sorted(str(file.relative_to(copy)) for file in copy.rglob("*")) == sorted(
        str(file.relative_to(pair)) for file in pair.rglob("*")
    )
    late = nodes.Shipment(folder, f"{shipped.identity}0", [])
    with pytest.raises(OvspecError, match="joined late"):
        late.arrive()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_workers_get_a_model_and_a_draft_that_they_lack(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests_file: Path, alone: Callable[..., Any]
) -> None:
    """The draft isn't in the model's folder; both are shipped under names that no worker finds."""
    from ovspec.integrations.ray import nodes

    model, draft = tmp_path / "model", tmp_path / "draft"
    shutil.copytree(pair, model, ignore=shutil.ignore_patterns("draft", "ovspec.json"))
    shutil.copytree(pair / "draft", draft)
    monkeypatch.setattr(nodes, "on_each_node", lambda _: {"node": False})
    requests = read_requests(requests_file)
    real = nodes.ship

    def shipped_away(folder: Path) -> Any:
        return dataclasses.replace(real(folder), folder=tmp_path / "elsewhere" / folder.name)

    monkeypatch.setattr("ovspec.integrations.ray.batch.ship", shipped_away)
    on_cluster(requests, tmp_path / "out", model, f"lookup,{draft}")
    found = without_times((tmp_path / "out").read_text("utf-8"))
    texts = [[line.get("text"), line.get("samples", [{}])[0].get("text")] for line in found]
    assert texts == [
        [line.get("text"), line.get("samples", [{}])[0].get("text")] for line in alone(requests_file, "lookup,draft")
    ]
    assert "elsewhere" in json.dumps(found[0]["record"])
