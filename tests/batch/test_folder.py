"""Batches of many files: what is found in folders, groups of lines, and answers that come in any order."""

from __future__ import annotations

import itertools
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.batch.groups import MAX_GROUP_LINES, RequestGroup, ResultCollector, make_groups
from ovspec.batch.ray.cluster import scratch_folder
from ovspec.batch.ray.shipment import create_folder_once, read_pieces
from ovspec.batch.requests import BatchRequest, make_prompt_request, parse_row, parse_rows
from ovspec.batch.resumable_run import BatchProgress
from ovspec.batch.run import BatchThread, line_to_row, lines_to_columns
from ovspec.engine.decoders import DecoderPool
from ovspec.params import make_params

pytest.importorskip("pyarrow", reason="needs the extra ovspec[ray]")

from ovspec.batch.folder import BatchFile, find_batch_files, join_path, read_file_requests, write_results


def prompts(count: int) -> list[BatchRequest]:
    return [make_prompt_request(str(n), f"{n % 7} prompt {n}", f"{n % 7} prompt {n}") for n in range(count)]


def answered(group: RequestGroup) -> RequestGroup:
    group.lines = {place: {"id": request.id, "text": request.source} for place, request in group.requests.items()}
    return group


@pytest.mark.parametrize(("count", "workers", "size"), [(0, 2, 0), (1, 2, 1), (200, 2, 7), (5000, 4, MAX_GROUP_LINES)])
def test_groups_have_all_lines_and_common_beginnings(count: int, workers: int, size: int) -> None:
    found = list(make_groups(3, prompts(count), "x", (), workers))
    assert max(len(group.keys) for group in found) == size
    assert sorted(place for group in found for place in group.requests) == list(range(count))
    beginnings = [request.source[0] for group in found for request in group.requests.values()]
    assert beginnings == sorted(beginnings)
    assert {(group.file_number, group.file_line_count) for group in found} == {(3, count)}


def test_answers_in_any_order_and_over_two_runs(tmp_path: Path) -> None:
    requests, file = prompts(100), BatchFile("", str(tmp_path / "out.jsonl"))

    def run(most: int) -> BatchProgress:
        answers = ResultCollector([file], "model", BatchProgress(0, 0))
        groups = list(make_groups(0, requests, "model", answers.finished_keys[""], 2))
        random.Random(most).shuffle(groups)
        for group in groups[:most]:
            answers.collect_group(answered(group))
        answers.close()
        return answers.progress

    first, second = run(9), run(100)
    assert (first.done, first.total) == (36, 100)
    assert (second.done_before, second.done, second.total) == (36, 64, 100)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert lines == [{"id": request.id, "text": request.source} for request in requests]
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_group_line_by_line_is_the_same_file(tmp_path: Path) -> None:
    """Also where an earlier run has answered some of its lines."""
    requests, file = prompts(16), BatchFile("", str(tmp_path / "out.jsonl"))
    for most in (3, 16):
        answers = ResultCollector([file], "model", BatchProgress(0, 0))
        groups = make_groups(0, requests, "model", answers.finished_keys[""], 1)
        whole = RequestGroup(0, 16, {}, {})
        for group in groups:
            whole.keys |= group.keys
            whole.requests |= group.requests
        for single in itertools.islice(whole.split_by_request(), most):
            assert len(single.requests) == 1
            answers.collect_group(answered(single))
        answers.close()
    assert (answers.progress.done_before, answers.progress.done) == (3, 13)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert [line["id"] for line in lines] == [request.id for request in requests]


def test_a_file_of_a_folder_is_done_again_if_it_has_changed(tmp_path: Path) -> None:
    file = BatchFile("a", str(tmp_path / "out" / "a.jsonl"), tmp_path / "out.partial" / "a.jsonl", "3 17")
    answers = ResultCollector([file], "model", BatchProgress(0, 0))
    assert answers.unfinished_file_numbers == {"a": 0}
    for group in make_groups(0, prompts(3), "model", (), 1):
        answers.collect_group(answered(group))
    again = BatchProgress(0, 0)
    assert ResultCollector([file], "model", again).unfinished_file_numbers == {}
    assert (again.total, again.done_before) == (3, 3)
    for changed, model in ((BatchFile("a", file.results_path, file.partial_path, "4 18"), "model"), (file, "other")):
        assert ResultCollector([changed], model, BatchProgress(0, 0)).unfinished_file_numbers == {"a": 0}


def test_what_is_read_of_a_folder(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for name in ("a.jsonl", "b/c d.txt", "b/e.parquet", ".hidden/f.jsonl", "_temporary.jsonl", "notes.md"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text('"import os"\n', encoding="utf-8")
    _, files = find_batch_files(str(source), str(tmp_path / "out"), overwrite=False)
    assert [Path(file.results_path).relative_to(tmp_path / "out").as_posix() for file in files] == [
        "a.jsonl",
        "b/c d.txt.jsonl",
        "b/e.parquet",
    ]
    assert join_path("s3://bucket/out/?region=x", "b/c d.jsonl") == "s3://bucket/out/b/c%20d.jsonl?region=x"
    (tmp_path / "there").mkdir()
    for given, output, sentence in (
        (source / "notes.md", tmp_path / "out", "contains no request files \\(.jsonl, .parquet, .txt\\)"),
        (tmp_path / "nothing", tmp_path / "out", "nothing: contains no request files"),
        (source, source / "out", "is inside the input folder"),
        (source, tmp_path / "there", "already exists; choose another `output`"),
        (source, "nosuch://bucket/out", "nosuch://bucket/out: "),
    ):
        with pytest.raises(OvspecError, match=sentence):
            find_batch_files(str(given), str(output), overwrite=False)
    assert len(find_batch_files(str(source), str(tmp_path / "there"), overwrite=True)[1]) == 3
    (tmp_path / "there.partial").mkdir()
    assert len(find_batch_files(str(source), str(tmp_path / "there"), overwrite=False)[1]) == 3, "to be continued"
    for name, data in (("x.parquet", b"no parquet"), ("x.jsonl", b"\xff\xff")):
        with pytest.raises(OvspecError, match=name):
            read_file_requests(name, data)


def test_parquet_has_texts_and_errors(tmp_path: Path) -> None:
    from pyarrow import parquet

    chat = {"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    lines: list[dict[str, Any]] = [
        {"id": "a", "text": "one", "finish_reason": "length"},
        {"id": "b", "samples": [{"text": "two", "finish_reason": "stop"}, {"text": "three", "finish_reason": "stop"}]},
        {"id": "c", "error": "wrong"},
        {"id": "batch_req_d", "custom_id": "d", "response": {"body": {"choices": [chat]}}, "error": None},
        {"id": "batch_req_e", "custom_id": "e", "response": None, "error": {"code": "x", "message": "bad"}},
    ]
    write_results(str(tmp_path / "out.parquet"), lines)
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [json.loads(row.pop("result")) for row in rows] == lines
    assert [tuple(row.values()) for row in rows] == [
        ("a", "one", "length", None),
        ("b", "two", "stop", None),
        ("c", None, None, "wrong"),
        ("d", "hi", "stop", None),
        ("e", None, None, "bad"),
    ]
    assert lines_to_columns([])["text"] == []
    assert line_to_row({"id": "x", "text": ""})["text"] == ""


def test_rows_of_tables_are_requests() -> None:
    rows = [
        {"prompt": "a", "id": None},
        {"prompt": "b", "temperature": 1.0},
        {"id": "1", "prompt": "c"},
        {"ask": 1},
    ]
    found = parse_rows(rows)
    assert [request.id for request in found] == ["1", "2", "3", "4"]
    assert [bool(request.error) for request in found] == [False, False, True, True]
    assert parse_row([{"role": "user", "content": "hi", "name": None}], "x").text_request.kind == "batch_line"
    assert parse_row("def f(", "x").text_request.prompts == ["def f("]


def test_threads_that_ask_share_a_batch(pair: Path) -> None:
    lm, asked = ovspec.load(pair, engine="paged"), [prompts(3), prompts(5)[3:], [], prompts(9)[5:]]
    thread, found = BatchThread(lm, make_params({"max_tokens": 6})), dict[int, Any]()
    askers = [threading.Thread(target=lambda n=n: found.update({n: thread.run_requests(asked[n])})) for n in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(60)
    for n, requests in enumerate(asked):
        texts = [line["text"] for line in found[n]]
        assert texts == [lm.generate(request.source, max_tokens=6).text for request in requests]
    with pytest.raises(OvspecError, match="max_tokens"):
        BatchThread(lm, make_params({"max_tokens": -5}))


def test_an_inference_that_fails_is_told_to_all_that_ask(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ovspec.base.errors import InferenceError

    lm = ovspec.load(pair, engine="paged")
    thread = BatchThread(lm, make_params({"max_tokens": 6}))

    def fail(*_: Any, **__: Any) -> Any:
        raise InferenceError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(DecoderPool, "run_batch", fail)
        with pytest.raises(InferenceError, match="no memory"):
            thread.run_requests(prompts(2))
    assert len(thread.run_requests(prompts(2))) == 2, "it goes on"


def test_scratch_folders_are_short_and_go(tmp_path: Path) -> None:
    parent = tmp_path / "some" / "sessions"
    with scratch_folder(parent, max_path_bytes=500) as folder:
        assert folder.parent == parent
        name = folder.name
        (folder / "file").write_text("x", encoding="utf-8")
        killed = parent / f"{name.rpartition('-')[0]}-4999999"
        killed.mkdir()
    with scratch_folder(parent, max_path_bytes=36) as folder:
        assert len(str(folder)) <= 36
        assert folder.resolve().parent == parent
        (folder / "file").write_text("x", encoding="utf-8")
    assert not list(parent.iterdir())
    assert not folder.exists()


def test_a_folder_in_pieces(tmp_path: Path) -> None:
    source = tmp_path / "model"
    (source / "draft").mkdir(parents=True)
    (source / "a.bin").write_bytes(bytes(range(256)) * 5)
    (source / "draft" / "empty").touch()
    files = [file for file in source.rglob("*") if file.is_file()]
    pieces = [(file.relative_to(source).as_posix(), piece) for file in files for piece in read_pieces(file, 300)]
    assert len(pieces) == 6

    def broken() -> Any:
        yield pieces[0]
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        create_folder_once(tmp_path / "copy", broken())
    assert not (tmp_path / "copy").exists()
    create_folder_once(tmp_path / "copy", pieces)
    create_folder_once(tmp_path / "copy", broken())  # which is there already
    for file in files:
        assert (tmp_path / "copy" / file.relative_to(source)).read_bytes() == file.read_bytes()
