"""Batches on a cluster of Ray on this machine: the lines that one machine writes, though workers die.

One cluster runs for all tests, because it takes seconds to start. ``test_ray_clusters.py`` has those with clusters of
their own, and the kills.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from commands_here import Command, commands_here
from conftest import ROOT
from ray_batches import (
    FLAGS,
    LOADING,
    OPTIONS,
    PROMPTS,
    addresses,
    alone,
    as_lines,
    file_of_all_kinds,
    loaded,
    of_ray,
    on_cluster,
    requests_of_all_kinds,
    without_times,
)

pytest.importorskip("ray", reason="needs the extra ovspec[ray]")

import ray
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.batch.groups import RequestGroup, make_groups
from ovspec.batch.ray import driver
from ovspec.batch.ray.cluster import cluster_connection
from ovspec.batch.ray.deaths import describe_death
from ovspec.batch.ray.pool import GROUPS_IN_FLIGHT, RESTARTS_PER_WORKER, WorkerPool
from ovspec.batch.ray.predictor import Predictor
from ovspec.batch.ray.shipment import Shipment
from ovspec.batch.ray.worker import ReferenceArithmetic, Worker
from ovspec.batch.requests import BatchRequest, make_prompt_request, read_requests
from ovspec.batch.resumable_run import BatchProgress, run_file
from ovspec.drafting.choice import parse_draft
from ovspec.drafting.proposal import NO_PROPOSAL


@pytest.fixture(scope="module")
def cluster(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run a cluster with room for two workers of a processor each, also if this process has one; it leaves nothing."""
    temporary, others = tmp_path_factory.mktemp("temporary"), of_ray(os.getpid())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache_dir))
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", None)
        patch.setattr("ovspec.batch.ray.cluster.usable_processors", lambda: [[0, 1]])
        # As a variable says that ``cluster_connection`` sets, which Ray reads when it is imported.
        patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)
        with cluster_connection("local"):
            yield
            processes = [process for process in of_ray(os.getpid()) if process not in others]
    assert not psutil.wait_procs(processes, timeout=10)[1]
    assert not list(temporary.iterdir())
    assert not list((cache_dir / "ovspec" / "ray" / "sessions").iterdir())


@pytest.fixture
def joined(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Let commands use the cluster that this process is connected to."""
    monkeypatch.setattr("ovspec.batch.ray.cluster.cluster_connection", lambda _: contextlib.nullcontext())


@pytest.fixture
def command(cache_dir: Path) -> Iterator[Command]:
    yield from commands_here(cache_dir)


@pytest.fixture
def requests_file(tmp_path: Path) -> Path:
    return file_of_all_kinds(tmp_path)


def test_without_the_extra_a_sentence_says_what_to_install(
    command: Command, requests_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = command("batch", requests_file, "-o", tmp_path / "out", "--ray")
    assert (done.returncode, "Ray is not installed; run pip install 'ovspec[ray]'." in done.stderr) == (1, True), (
        done.stderr
    )


def test_an_address_where_no_cluster_is(command: Command, requests_file: Path, tmp_path: Path) -> None:
    """Before the tests that use a cluster, because a process has one folder for the sessions of Ray."""
    done = command("batch", requests_file, "-o", tmp_path / "out", "--ray", "127.0.0.1:9")
    assert done.returncode == 1
    assert "No Ray cluster answers at 127.0.0.1:9" in done.stderr, done.stderr


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("options", [(), pytest.param(("--draft", "lookup,draft", "--mixed"), marks=pytest.mark.slow)])
def test_the_lines_that_one_machine_writes(
    command: Command, pair: Path, requests_file: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    output = tmp_path / "out.jsonl"
    done = command("batch", pair, requests_file, "-o", output, "--ray", *FLAGS, *options)
    assert (done.returncode, done.stdout) == (1, ""), "because two lines fail"
    *progress, last = done.stderr.splitlines()
    assert re.fullmatch(r"20 of 20 done, 2 with an error, \d+ tokens in .* s \(.* tokens/s\), 2 workers", progress[-1])
    assert all(re.match(r"\d+ of 20 done", line) for line in progress), progress
    assert last == f"{output}: 2 of 20 lines have an error instead of a text"
    found = without_times(output.read_text("utf-8"))
    assert all(bool(line.pop("worker", "")) is ("--mixed" in options) for line in found)
    assert found == alone(pair, requests_file, "lookup,draft" if options else None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "requests.jsonl"]


@pytest.mark.usefixtures("cluster")
def test_the_cluster_stays_on_this_machine() -> None:
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    found = addresses([psutil.Process(), *of_ray(os.getpid())])
    assert "127.0.0.1" in found and found <= {"127.0.0.1", "::1"}


@pytest.mark.usefixtures("joined")
def test_options_reach_the_workers(
    command: Command, pair: Path, requests_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(driver, "ship_folder", lambda folder: Shipment(folder, "", []))
    monkeypatch.setattr(
        driver,
        "find_reference_arithmetic",
        lambda *first: given.extend(first) or ReferenceArithmetic("", "kind", "", []),
    )

    def pool(_: Any, *more: Any) -> Any:
        given.extend(more)
        raise OvspecError("seen enough")

    monkeypatch.setattr(driver, "WorkerPool", pool)
    ways = ("--ray", "--cpus-per-worker", "2", "--mixed", "--draft", "lookup", "--precision", "f32", "-n", "7")
    done = command("batch", pair, requests_file, "-o", "nowhere", *ways)
    assert "seen enough" in done.stderr
    job, cpus, count, mixed, words = given
    assert (cpus, count, mixed, job.allows_mixed_arithmetic, job.shipments[0].folder) == (2, 1, True, True, pair)
    assert (job.draft, job.load_options["precision"], job.params.max_tokens) == (parse_draft("lookup"), "f32", 7)
    assert "`precision='f32'` on 2 processors as kind" in words


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


class Here:
    """A pool whose only worker is in this process."""

    worker_count, loading_count = 1, 0

    def __init__(self, start: Callable[[int], Worker], *_: Any) -> None:
        self._worker = start(1)
        self._worker.load_worker_model()

    def run_groups(self, groups: list[RequestGroup], _: Any) -> Iterator[list[RequestGroup]]:
        for group in groups:
            group.set_output_lines(self._worker.run_requests(list(group.requests.values())))
            yield [group]

    def close(self) -> None:
        pass


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("here", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_folders_go_to_folders_and_an_interrupted_run_goes_on(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    if here:  # where a worker takes no seconds to start
        monkeypatch.setattr("ovspec.batch.ray.worker.record_signals", lambda _: None)
        monkeypatch.setattr("ovspec.batch.ray.worker.pin_actor", lambda: None)
        monkeypatch.setattr(driver, "start_worker", lambda job, reference, _, number: Worker(job, reference, number))
        monkeypatch.setattr(
            driver, "find_reference_arithmetic", lambda job, _: Worker(job, None, 0).load_worker_model()
        )
        monkeypatch.setattr(driver, "WorkerPool", Here)
        monkeypatch.setattr("ovspec.batch.ray.worker.load", loaded)
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
        on_cluster(str(source), output, pair, report=stop)
    found = on_cluster(str(source), output, pair)
    assert (found.total, found.failed >= 1, found.done_before > 20) == (54, True, True)
    assert found.done_before + found.done == 54
    assert not (tmp_path / "out.partial").exists()
    assert sorted(str(file.relative_to(output)) for file in output.rglob("*") if file.is_file()) == [
        "a b.jsonl",
        "empty.jsonl",
        "more/prompts.txt.jsonl",
        "rows.parquet",
    ]
    assert without_times((output / "a b.jsonl").read_text("utf-8")) == alone(pair, source / "a b.jsonl")
    written = (output / "more" / "prompts.txt.jsonl").read_text("utf-8")
    assert without_times(written) == alone(pair, source / "more" / "prompts.txt")
    (tmp_path / "rows.jsonl").write_text(as_lines([{k: v for k, v in row.items() if v} for row in rows]), "utf-8")
    expected = alone(pair, tmp_path / "rows.jsonl")
    table = pyarrow.parquet.read_table(output / "rows.parquet").to_pylist()
    assert [row["text"] for row in table] == [line["text"] for line in expected]
    assert without_times("\n".join(row["result"] for row in table)) == expected
    with pytest.raises(OvspecError, match="already exists"):
        on_cluster(str(source), output, pair)
    with pytest.raises(OvspecError, match="inside the input folder"):
        on_cluster(str(source), source / "out", pair)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_line_that_kills_workers_has_an_error_and_a_run_without_workers_goes_on(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kills by a drafter of the user's own, first where no worker is started again."""
    loading = LOADING | {"precision": "f32"}  # in bf16, some processors die of this model in one thread
    deadly = ovspec.load(pair, **loading).tokenizer.encode("Once upon a killer").tolist()

    class Deadly(ovspec.Drafter):
        def propose(self, rows: list[Any], lookahead: Any) -> Any:  # noqa: ARG002
            if any(row.sequence.tokens[: len(deadly)].tolist() == deadly for row in rows):
                os.kill(os.getpid(), signal.SIGFPE)
                time.sleep(60)
            return [NO_PROPOSAL] * len(rows)

    requests = requests_of_all_kinds(40)
    requests[17] = {"id": "deadly", "prompt": "Once upon a killer"}
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(as_lines(requests), encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr("ovspec.batch.ray.pool.RESTARTS_PER_WORKER", 0)
        patch.setattr("ovspec.batch.ray.pool.LINES_PER_RESTART", 1000)
        with pytest.raises(
            OvspecError,
            match=rf"last worker died of SIGFPE while it generated texts with {pair} .*exact; after a crash, set ",
        ):
            on_cluster(str(file), output, pair, Deadly(), loading)
    assert not output.exists()
    found = on_cluster(str(file), output, pair, Deadly(), loading)
    assert (found.total, found.failed >= 1, found.done_before > 0) == (48, True, True)
    *_, error = [line for line in without_times(output.read_text("utf-8")) if line["id"] == "deadly"]
    assert error == {
        "id": "deadly",
        "error": "Several workers failed while they ran this line, and the last died of SIGFPE; leave the line out.",
    }
    others = [
        [line for line in lines if line["id"] != "deadly"]
        for lines in (without_times(output.read_text("utf-8")), alone(pair, file, loading=loading))
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
        rf"The first worker died of SIGFPE while it loaded {pair} `threads=1` on 1 processor; after a crash, set "
        "`precision='f32'`"
    )
    with pytest.raises(OvspecError, match=told):
        on_cluster(read_requests(requests_file), tmp_path / "out", pair, Deadly())


def test_a_predictor_loads_with_its_first_rows(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an actor of Ray calls it, which would be started again for ever if its constructor failed."""
    claimed: list[bool] = []
    monkeypatch.setattr("ovspec.batch.ray.predictor.pin_actor", lambda: claimed.append(True))
    rows = {"name": np.arange(4), "prompt": np.array(PROMPTS)}
    answered = Predictor(pair, max_tokens=8, threads=1)(rows)
    assert answered.keys() == {"name", "prompt", "text", "finish_reason", "error", "result"}
    assert all(answered[name] is rows[name] for name in rows)
    lm = loaded(pair, threads=1)
    assert list(answered["text"]) == [lm.generate(prompt, max_tokens=8).text for prompt in PROMPTS]
    assert list(answered["finish_reason"]) == ["length"] * 4 and list(answered["error"]) == [None] * 4
    assert all(json.loads(result)["record"]["token_ids"] for result in answered["result"])
    for wrong, told in (
        (Predictor(pair, column="question"), "`column` is 'question'"),
        (Predictor("nowhere"), "nowhere"),
    ):
        with pytest.raises(OvspecError, match=told):
            wrong(rows)
    assert len(claimed) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_the_predictor_answers_the_rows_of_a_dataset(pair: Path) -> None:
    import ray.data
    from ray.exceptions import RayError

    lm = loaded(pair, threads=1)
    options = {"model": str(pair), "max_tokens": 8, "threads": 1}
    rows = [{"name": n, "prompt": PROMPTS[n]} for n in range(4)]
    dataset, alone = ray.data.from_items(rows, override_num_blocks=2), ray.data.ActorPoolStrategy(size=1)
    answered = dataset.map_batches(Predictor, fn_constructor_kwargs=options, num_cpus=1, compute=alone).take_all()
    for row in answered:
        assert row["text"] == lm.generate(PROMPTS[row["name"]], max_tokens=8).text
        assert (row["prompt"], row["error"], row["finish_reason"]) == (PROMPTS[row["name"]], None, "length")
        assert json.loads(row["result"])["record"]["token_ids"]
    for wrong, told in (({"column": "question"}, "`column` is 'question'"), ({"model": "nowhere"}, "nowhere")):
        with pytest.raises(RayError, match=told):
            dataset.map_batches(Predictor, fn_constructor_kwargs=options | wrong, num_cpus=1, compute=alone).take_all()


def test_progress_says_how_many_workers_are_loading() -> None:
    from ovspec.cli.batch import BatchProgressPrinter

    report = BatchProgressPrinter()
    assert report.describe_progress(BatchProgress(0, 0, worker_count=2, loading_workers=2)) == "2 workers: loading …"
    assert report.describe_progress(BatchProgress(9, 0, done=4, worker_count=2, loading_workers=1)).endswith(
        "2 workers (1 loading)"
    )
    assert report.describe_progress(BatchProgress(9, 0, done=9, worker_count=2, loading_workers=1)).endswith(
        "2 workers"
    )


@pytest.mark.usefixtures("cluster")
def test_a_model_is_shipped_to_machines_without_it(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ovspec.batch.ray import shipment

    folder = tmp_path / "model"
    shutil.copytree(pair, folder)
    assert shipment.ship_folder(folder).pieces == [], "all machines have it"
    monkeypatch.setattr(shipment, "run_on_each_node", lambda _: {"node": False})
    monkeypatch.setattr(shipment, "PIECE_BYTES", 1 << 16)
    shipped = shipment.ship_folder(folder)
    assert len(shipped.pieces) > len(list(folder.rglob("*")))
    assert shipped.receive_folder() == folder.resolve()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(OvspecError, match="contains another model on"):
        shipped.receive_folder()
    shutil.rmtree(folder)
    copy = shipped.receive_folder()
    assert copy == shipped.receive_folder() != folder
    assert sorted(str(file.relative_to(copy)) for file in copy.rglob("*")) == sorted(
        str(file.relative_to(pair)) for file in pair.rglob("*")
    )
    late = shipment.Shipment(folder, f"{shipped.identity}0", [])
    with pytest.raises(OvspecError, match="added after the start"):
        late.receive_folder()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_workers_get_a_model_and_a_draft_that_they_lack(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests_file: Path
) -> None:
    """The draft isn't in the model's folder; both are shipped under names that no worker finds."""
    from ovspec.batch.ray import shipment

    model, draft = tmp_path / "model", tmp_path / "draft"
    shutil.copytree(pair, model, ignore=shutil.ignore_patterns("draft", "ovspec.json"))
    shutil.copytree(pair / "draft", draft)
    monkeypatch.setattr(shipment, "run_on_each_node", lambda _: {"node": False})
    requests = read_requests(requests_file)
    real = shipment.ship_folder

    def shipped_away(folder: Path) -> Any:
        return dataclasses.replace(real(folder), folder=tmp_path / "elsewhere" / folder.name)

    monkeypatch.setattr("ovspec.batch.ray.driver.ship_folder", shipped_away)
    on_cluster(requests, tmp_path / "out", model, f"lookup,{draft}")
    found = without_times((tmp_path / "out").read_text("utf-8"))
    texts = [[line.get("text"), line.get("samples", [{}])[0].get("text")] for line in found]
    assert texts == [
        [line.get("text"), line.get("samples", [{}])[0].get("text")]
        for line in alone(pair, requests_file, "lookup,draft")
    ]
    assert "elsewhere" in json.dumps(found[0]["record"])


# ---------------------------------------------------------------- the pool

DEADLY = "kill"


def starting(how: signal.Signals, started: list[int], loading: tuple[int, ...] = ()) -> Callable[[int], Any]:
    """Return what starts workers without a model, which a signal ends at a deadly line, or while ``loading``."""

    class Fake:
        def __init__(self, number: int) -> None:
            self._number, self._answering = number, 0
            if how is not signal.SIGKILL:
                from ovspec.batch.ray.deaths import record_signals

                record_signals(number)

        def load_worker_model(self) -> SimpleNamespace:
            if self._number in loading:
                self.die()
            # The module of ReferenceArithmetic imports slowly.
            return SimpleNamespace(computing_conditions=f"kind of {self._number}")

        def run_requests(self, requests: list[BatchRequest]) -> list[dict[str, Any]]:
            self._answering += 1
            time.sleep(0.05)  # so that several groups are answered at a time
            if any(request.source.startswith(DEADLY) for request in requests):
                self.die()
            lines = [{"id": request.id, "text": request.source, "beside": self._answering - 1} for request in requests]
            self._answering -= 1
            return lines

        def die(self) -> None:
            os.kill(os.getpid(), how)
            time.sleep(60)

    def start(number: int) -> Any:
        started.append(number)
        ways: Any = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": GROUPS_IN_FLIGHT}
        return ray.remote(**ways)(Fake).remote(number)

    return start


def groups(texts: list[str], known: tuple[int, ...] = ()) -> list[RequestGroup]:
    """Return the groups of a file of such prompts, some of which an earlier run answered."""
    requests = [make_prompt_request(str(place), text, text) for place, text in enumerate(texts)]
    keys = [key for group in make_groups(0, requests, "", (), 2) for key in group.keys.items()]
    return list(make_groups(0, requests, "", [key for place, key in keys if place in known], 2))


def lines_of(pool: WorkerPool, todo: list[RequestGroup]) -> dict[int, dict[str, Any]]:
    """Return all output lines by place; each line is there once."""
    lines, keys = list[tuple[int, dict[str, Any]]](), list[int]()
    for answered in pool.run_groups(todo):
        for group in answered:
            lines.extend(group.lines.items())
            keys.extend(group.keys)
    assert sorted(keys) == list(range(todo[0].file_line_count))
    found = dict(lines)
    assert len(found) == len(lines)
    return found


@pytest.mark.slow  # test_pool.py has a quick one, and one of a line that kills
@pytest.mark.usefixtures("cluster")
def test_a_worker_that_dies_while_it_loads_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    started = list[int]()
    pool = WorkerPool(starting(signal.SIGFPE, started, loading=(2,)), 2, False, "model")
    found = lines_of(pool, groups([f"prompt {n}" for n in range(100)]))
    pool.close()
    assert [found[n]["text"] for n in range(100)] == [f"prompt {n}" for n in range(100)]
    assert max(line["beside"] for line in found.values()) == GROUPS_IN_FLIGHT - 1, "the others stay full"
    assert (started, pool.worker_count) == ([1, 2], 1)
    assert "worker 2 died of SIGFPE; it is left out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("count", "how", "told"),
    [
        (1, signal.SIGKILL, "was killed (by SIGKILL, as the system does when memory runs out)"),
        (2, signal.SIGFPE, "died of SIGFPE"),
    ],
)
def test_a_line_that_kills_gets_an_error(
    count: int, how: signal.Signals, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends a worker with others, then with its group, then alone; nothing else has an error."""
    started, texts = list[int](), [f"prompt {n}" for n in range(99)]
    texts[70:70] = [f"{DEADLY} this"]
    pool = WorkerPool(starting(how, started), count, True, "model")
    found = lines_of(pool, groups(texts, known=(3, 72)))
    pool.close()
    error = found.pop(70)
    assert f"ran this line, and the last {told}; " in error["error"]
    assert re.fullmatch(r"kind of \d", error["worker"])
    assert sorted(found) == [n for n in range(100) if n not in (3, 70, 72)]
    assert all(line["text"] == texts[n] for n, line in found.items())
    assert len(started) == count + 3
    assert capsys.readouterr().err.count(f"{told}; another one starts") == 3


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_lines_that_all_kill_stop_the_run() -> None:
    started, answered = list[int](), list[RequestGroup]()
    pool = WorkerPool(starting(signal.SIGKILL, started), 1, False, "model in words")
    told = (
        r"No workers are left: the last worker was killed \(.*SIGKILL.*\) "
        "while it generated texts with model in words; "
    )
    with pytest.raises(OvspecError, match=told):
        for more in pool.run_groups(groups([f"{DEADLY} {n}" for n in range(6)])):
            answered.extend(more)
    pool.close()
    failed = [line for group in answered for line in group.lines.values()]
    assert len(failed) == 2 and all("was killed" in line["error"] for line in failed), "they are kept"
    assert len(started) == 1 + RESTARTS_PER_WORKER


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_workers_that_all_die_while_they_load_stop_the_run() -> None:
    started = list[int]()
    pool = WorkerPool(starting(signal.SIGABRT, started, loading=(1, 2)), 2, False, "model in words")
    with pytest.raises(OvspecError, match=r"the last worker died of SIGABRT while it loaded model in words; "):
        list(pool.run_groups(groups(["a", "b"])))
    pool.close()
    assert started == [1, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_progress_goes_on_while_workers_load() -> None:
    class Slow:
        def load_worker_model(self) -> ReferenceArithmetic:
            time.sleep(2.5)
            return ReferenceArithmetic("", "kind", "", [])

        def run_requests(self, requests: list[BatchRequest]) -> list[dict[str, Any]]:
            return [{} for _ in requests]

    pool = WorkerPool(lambda _: ray.remote(num_cpus=0)(Slow).remote(), 1, False, "model")
    found = [(len(answered), pool.loading_count) for answered in pool.run_groups(groups(["a"]))]
    pool.close()
    assert found[0] == (0, 1) and found[-1] == (1, 0)
    assert len(found) >= 4, "each second"


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_files_are_read_while_others_are_answered() -> None:
    begun = list[int]()

    @ray.remote(num_cpus=0)
    def reading(number: int) -> list[RequestGroup]:
        texts = [f"{number} {place}" for place in range(32)]
        return list(make_groups(0, [make_prompt_request(text, text, text) for text in texts], "", (), 2))

    def files() -> Iterator[Any]:
        for number in range(40):
            begun.append(number)
            yield reading.remote(number)

    pool, behind = WorkerPool(starting(signal.SIGFPE, []), 1, False, "model"), list[int]()
    texts = list[str]()
    for answered in pool.run_groups([], files()):
        texts.extend(line["text"] for group in answered for line in group.lines.values())
        behind.append(32 * len(begun) - len(texts))
    pool.close()
    assert sorted(texts) == sorted(f"{number} {place}" for number in range(40) for place in range(32))
    assert max(behind) < 32 * 40 / 2, "files are read as they are needed"


@pytest.mark.usefixtures("cluster")
def test_how_a_worker_was_lost() -> None:
    class Broken:
        def __init__(self) -> None:
            raise ImportError("no module named x")

        def load_worker_model(self) -> None:
            pass

    class Killed:
        def load_worker_model(self) -> None:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    remote: Any = ray.remote(num_cpus=0)
    workers, told = [remote(each).remote() for each in (Broken, Killed)], list[str]()
    for number, call in enumerate([worker.load_worker_model.remote() for worker in workers]):
        with pytest.raises(ActorDiedError) as found:
            ray.get(call)
        told.append(describe_death(number, found.value))
    assert told[0] == "failed to start (ImportError: no module named x)"
    assert told[1] == "was killed (by SIGKILL, as the system does when memory runs out)"
    assert "ran out of memory" in describe_death(1, OutOfMemoryError("1 worker(s) were killed"))
    assert "lost with its machine" in describe_death(1, NodeDiedError(""))
