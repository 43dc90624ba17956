"""scripts/bench/grammars.py applies masks exactly, and its grammars allow its texts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import grammars
import llguidance.numpy
import numpy as np
import pytest
from conftest import CHECKPOINTS, ROOT
from grammar_protocol import KINDS, Task, Vocabulary, measured
from grammars import GRAMMARS, HERE, OURS, Bench, Subject, answer_of, c_subjects, json_subjects, vocabulary_of
from peer import Worker
from protocol import Refusal
from tokenizer import END, files_of, train, write
from tokenizers import Tokenizer
from worker_llguidance import Matcher, appliers, begin_of, grammar_tokenizer

DEMO = CHECKPOINTS / "target" / "tokenizer.json"
SUBJECTS = [
    *json_subjects(HERE / "grammars.json"),
    *c_subjects(GRAMMARS / "c11.lark", sorted((GRAMMARS / "samples").glob("*.c"))),
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return vocabulary_of(DEMO)


@pytest.mark.parametrize("width", [4096, 4100, 77])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 1.0])
def test_all_ways_to_apply_a_mask_agree(width: int, share: float) -> None:
    noise = np.random.default_rng(0)
    logits = noise.normal(size=width).astype(np.float32)
    logits[3] = -np.inf
    mask = np.packbits(noise.random((width + 31) // 32 * 32) < share, bitorder="little")
    expected = logits.copy()
    llguidance.numpy.apply_token_bitmask_inplace(expected, mask.view(np.int32))
    given = logits.copy()
    for name, way in appliers(width).items():
        np.testing.assert_array_equal(way(given, mask), expected, name)
        np.testing.assert_array_equal(given, logits, f"{name} changes the logits")


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_texts_are_what_their_grammars_describe(subject: Subject, vocabulary: Vocabulary) -> None:
    bench = Bench(vocabulary, [subject], 1_000_000)
    tokenizer = grammar_tokenizer(vocabulary)
    [(_, task)] = bench.tasks()
    for tokens in task.texts:
        walk = begin_of(tokenizer)(subject.kind, subject.source)
        assert isinstance(walk, Matcher)
        assert walk.matcher.try_consume_tokens(tokens) == len(tokens), walk.matcher.get_error()
        assert walk.matcher.is_accepting()
        if subject.kind == "json":
            cut = begin_of(tokenizer)(subject.kind, subject.source)
            assert isinstance(cut, Matcher)
            assert cut.matcher.consume_tokens(tokens[:-1])
            assert not cut.matcher.is_accepting()


def test_the_end_of_a_text_is_never_text(vocabulary: Vocabulary) -> None:
    """The demo's vocabulary lists <|endoftext|> as a token like any other."""
    walk = begin_of(grammar_tokenizer(vocabulary))("lark", 'start: "a" /[a-z<|>]*/ "b"')
    assert isinstance(walk, Matcher)
    spelled = vocabulary.spelled()
    assert walk.matcher.consume_token(spelled.index("a"))
    assert walk.check(spelled.index("<"))
    assert not walk.check(vocabulary.end)
    walk.prepare(np.zeros(vocabulary.size, np.float32))
    walk.mask()
    walk.apply()
    assert walk.allows(spelled.index("<"))
    assert not walk.allows(vocabulary.end)
    assert walk.matcher.consume_token(spelled.index("b"))
    assert walk.check(vocabulary.end)


def test_a_walk_refuses_what_the_grammar_does(vocabulary: Vocabulary) -> None:
    begin = begin_of(grammar_tokenizer(vocabulary))
    tokens: Callable[[str], list[int]] = lambda text: Tokenizer.from_file(str(DEMO)).encode(text).ids  # noqa: E731
    schema = '{"type": "array", "items": {"type": "integer"}}'
    with pytest.raises(Refusal, match="doesn't satisfy the grammar"):
        measured(begin, Task("json", schema, [tokens('[1, "a"]')]), vocabulary)
    with pytest.raises(Refusal, match="let a text end"):
        measured(begin, Task("json", schema, [tokens("[1, 2")]), vocabulary)
    with pytest.raises(Refusal, match="doesn't read gbnf"):
        measured(begin, Task("gbnf", 'root ::= "a"', [tokens("a")]), vocabulary)
    found = measured(begin, Task("json", schema, [tokens("[1, 2]"), tokens("[]")], 3), vocabulary)
    assert len(found["construct_ms"]) == 2
    assert len(found["mask_ms"]) == len(found["check_ms"]) == len(found["accept_ms"])
    assert found["outside"] == 0


def test_the_worker_measures_like_the_bench(vocabulary: Vocabulary) -> None:
    with Worker("llguidance", asdict(vocabulary)) as worker:
        assert worker.ready["versions"]["llguidance"]
        [(subject, task)] = Bench(vocabulary, SUBJECTS[:1], 4).tasks()
        answer = answer_of(OURS, subject, worker.ask(asdict(task)))
        assert answer.error is None
        assert len(answer.times["mask"]) == 4 * len(subject.texts)
        assert "error" in worker.ask(asdict(Task("lark", "start: nowhere", [[0]])))


@pytest.mark.slow
def test_a_short_run_and_its_tables(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    for option, expected in ((["--peers", "--out", str(out)], OURS), (["--out", str(out)], "apply, ovspec")):
        command = [sys.executable, str(HERE / "grammars.py"), "--tokenizer", str(DEMO), "--steps", "3", *option]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert {"set", "engine", "operation", "count", "mean", "p50", "p99", "max"} == set(lines[0])
    measured_ones = {line["operation"] for line in lines if line["set"] == "JSON"}
    assert {*KINDS, "forced tokens", "rollback of one", "mask as bytes"} <= measured_ones
    assert all(0 <= line["p50"] <= line["p99"] <= line["max"] for line in lines)


def test_a_tokenizer_is_trained_alike_twice(tmp_path: Path) -> None:
    files = files_of([ROOT / "ovspec"])
    assert files == files_of([ROOT / "ovspec"])
    made = []
    for name in ("a", "b"):
        tokenizer, about = train(files, 700, 300_000)
        write(tokenizer, about, tmp_path / name)
        made.append((tmp_path / name / "tokenizer.json").read_bytes())
        assert json.loads((tmp_path / name / "about.json").read_text())["tokens"] == 700
    assert made[0] == made[1]
    vocabulary = vocabulary_of(tmp_path / "a" / "tokenizer.json")
    assert (vocabulary.size, vocabulary.end) == (700, 699)
    tokenizer = Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))
    text = "def naïve(x):\n\treturn 12345  # 日本\r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id(END) == 699
    with pytest.raises(SystemExit, match="install more packages"):
        train(files[:1], 100_000, 300_000)


def test_it_says_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["grammars.py", "--tokenizer", "nowhere.json"])
    with pytest.raises(SystemExit):
        grammars.main()
    assert "run scripts/train/tokenizer.py" in capsys.readouterr().err
