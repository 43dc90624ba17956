"""Each benchmark runs for a second or so, and what its figures are computed with."""

from __future__ import annotations

import argparse
import itertools
import json
import runpy
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chats
import figures
import harness
import jsonschema
import pytest
from conftest import CHECKPOINTS, PROMPTS, ROOT
from harness import Worker
from ovspec_export.distill.documents import Document, write_first_documents
from protocol import Load

import ovspec

BENCH = ROOT / "scripts" / "bench"
DEMO = ROOT / "models" / "demo"
TOKENIZER = CHECKPOINTS / "target" / "tokenizer.json"
# A script and its arguments; OUT is an empty folder.
REAL = ROOT / "smollm2"
RUNS: dict[str, Any] = {
    "cluster.py, measure": "measure DEMO --lines 4 --tokens 4 --turns 1 --groups 8 --json OUT/x",
    "inferences.py, engines": "engines DEMO/draft --contexts 16,32",
    "grammars.py": f"--tokenizer {TOKENIZER} --steps 2",
    "grammars.py, peers": f"--tokenizer {TOKENIZER} --steps 1 --peers xgrammar,llamacpp_grammar",
    "chats.py": (
        f"{REAL} --out OUT/x.jsonl --draft head={ROOT / 'models' / 'smollm2-head'} --kinds explain --prompts 1"
        " --turns 1 --ways lookup head@2 lookup,head --tokens 8 --contexts 0,400 --batches 1,2"
        " --accept compare,rejection"
    ),
    "chats.py, texts": (
        "DEMO --out OUT/x.jsonl --kinds completion,prose,JSON --prompts 1 --turns 1 --tokens 4"
        " --ways forced free draft@1 lookup,draft ovspec-fast --contexts 32"
    ),
    "exactness.py, texts": "texts DEMO --prompts 1 --tokens 8",
    "exactness.py, cache": "cache DEMO/draft",
    "exactness.py, processors": "processors DEMO/draft --here",
    "inferences.py, formats": f"formats {CHECKPOINTS / 'draft'} --formats int8 --output OUT",
    "inferences.py, pages": "pages DEMO/draft",
    "inferences.py, loop": "loop DEMO/draft --tokens 8 --rounds 1",
    "distribution.py": "--texts 8 --k 2",
    "sessions.py, prefixes": "prefixes DEMO/draft --prompt 100 --turns 1 --steps 3 --peers none",
    "record_traces.py": "x=DEMO --output OUT --prompts 1 --tokens 8 --most 2",
    "schemas.py": "--part pydantic --names ClientSecret --seconds 0.05",
    "serve.py": "DEMO/draft --systems lm.stream;serve --clients 1,2 --turns 1 --prompts chat",
    "cluster.py, simulate": f"simulate {BENCH / 'cluster.json'} --workers 1,10 --hours 0.1",
    "sessions.py, chat": "chat DEMO/draft --steps 2 --tokens 4",
    "startup.py, command": "command DEMO",
    "startup.py, load": "load DEMO/draft",
    "startup.py, tokens": "tokens DEMO/draft --turns 1 --tokens 2,4 --ways ovspec",
    "sessions.py, program": "program DEMO/draft --steps 3 --turns 1",
}
QUICK = ("sessions.py, prefixes",)


@pytest.fixture
def script(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[[str, str], str]:
    """Runs a script in this process and returns its output."""

    def run(name: str, arguments: str) -> str:
        filled = arguments.replace("DEMO", str(DEMO)).replace("OUT", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache_dir))
        monkeypatch.setattr(sys, "argv", [str(BENCH / name), *filled.split()])
        runpy.run_path(str(BENCH / name), run_name="__main__")
        return capfd.readouterr().out

    return run


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in RUNS])
def test_each_benchmark_runs(name: str, script: Callable[[str, str], str]) -> None:
    if str(REAL) in RUNS[name] and not REAL.is_dir():
        pytest.skip("the real model could not be fetched")
    assert script(name.partition(",")[0], RUNS[name])


def test_every_benchmark_is_run() -> None:
    """Workers and what the scripts import have no main function."""
    found = {
        file.relative_to(BENCH).as_posix() for file in BENCH.rglob("*.py") if "def main()" in file.read_text("utf-8")
    }
    elsewhere = {"peers/install.py", "peers/gguf_writer.py"}
    assert found - elsewhere == {name.partition(",")[0] for name in RUNS}


# ---------------------------------------------------------------- arithmetic of the figures


def test_turns_ratios_and_medians() -> None:
    order: list[tuple[str, int]] = []
    found = figures.take_turns("abc", lambda name, turn: order.append((name, turn)) or turn, 2)
    assert found == {name: [0, 1] for name in "abc"}
    assert [name for name, _ in order] == list("cab" + "abc" + "bca")
    assert figures.median_and_range(figures.ratios([2.0, 9.0, 1.0], [1.0, 3.0, 2.0])) == "2.00 (0.50 to 3.00)"


def test_chats() -> None:
    """Six kinds of six, of which two are for judging; what is extracted has a schema, whose keys the model is told."""
    found = harness.chats()
    by_kind = {kind: [chat for chat in found if chat.kind == kind] for kind in dict.fromkeys(c.kind for c in found)}
    assert [len(each) for each in by_kind.values()] == [6] * 6
    assert all([chat.judge for chat in each] == [True] * 2 + [False] * 4 for each in by_kind.values())
    assert len({chat.name for chat in found}) == len({json.dumps(chat.content) for chat in found}) == 36
    for chat in found:
        assert isinstance(chat.content, list)
        messages: list[Any] = chat.content
        roles, last = [message["role"] for message in messages], messages[-1]["content"]
        assert roles[0] == "system" or roles[0::2] == ["user"] * len(roles[0::2])
        assert roles[-1] == "user" and (len(roles) >= 4) == (chat.kind == "chat")
        assert (len(last) > 3000) == (chat.kind == "long document")
        assert (chat.schema is not None) == (chat.kind == "extract")
        if chat.schema:
            jsonschema.Draft202012Validator.check_schema(chat.schema)
            assert all(f'"{key}"' in last for key in chat.schema["required"])


def test_held_out_documents_are_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat is one up to its answer, another text with its beginning."""
    chat, text = Document([5, 6, 7, 8], 3, "own", True, True), Document([9, 10, 11, 12], 0, "text", False, True)
    write_first_documents(tmp_path / "documents.jsonl", [chat, text, Document([1, 2, 3], 1, "own", True, False)])
    added: list[harness.Prompt] = []
    monkeypatch.setattr(harness, "prompts", lambda: added)
    harness.add_held_out(tmp_path / "documents.jsonl", 24)
    assert {prompt.name: prompt.content for prompt in added} == {
        "held-out own 1": [5, 6, 7],
        "held-out text 1": [9, 10],
    }
    assert not any(prompt.judge for prompt in added) and {prompt.kind for prompt in added} < set(chats.CHAT_KINDS)


@pytest.fixture
def talker(tmp_path: Path) -> Path:
    """A model with a chat template."""
    shutil.copytree(DEMO / "draft", tmp_path / "talker")
    template = "{% for message in messages %}# {{ message.content }}\n{% endfor %}"
    (tmp_path / "talker" / "chat_template.jinja").write_text(template, "utf-8")
    return tmp_path / "talker"


def loaded_once(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return what loads each model once."""
    found = dict[str, Any]()

    def load_new(*given: Any, **options: Any) -> Any:
        key = repr((given, options))
        if key not in found:
            found[key] = load(*given, **options)
        return found[key]

    return load_new


@pytest.mark.slow
def test_the_bench_of_chats_can_be_stopped_and_goes_on(
    script: Callable[[str, str], str], talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ovspec, "load", loaded_once(ovspec.load))
    file, ways = tmp_path / "chats.jsonl", "plain lookup@2 ovspec"
    options = f"{talker} --out OUT/chats.jsonl --tokens 6 --ways {ways} --kinds extract --temperatures 0,1"
    generate = ovspec.LanguageModel.generate

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if file.read_bytes().count(b"\n") >= 3:
            signal.raise_signal(signal.SIGINT)
        return generate(*arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="goes on"):
        patch.setattr(ovspec.LanguageModel, "generate", interrupted)
        script("chats.py", f"{options} --prompts 1 --turns 99")
    before = file.read_text("utf-8").splitlines()
    assert len(before) >= 3
    with file.open("a", encoding="utf-8") as half:
        half.write(before[-1][:40])  # as if it had been killed in the middle of a line
    options += " --turns 2"
    tables = script("chats.py", f"{options} --prompts 1")
    lines = file.read_text("utf-8").splitlines()
    assert lines[: len(before)] == before
    turns = {chats.Case(**line["case"]): line["texts"] for line in map(json.loads, lines[1:])}
    for chat, temperature, turn in itertools.product(("extract 1",), (0.0, 1.0), (0, 1)):
        texts = turns[chats.Case(chat, 0, 1, temperature, "compare", turn)]
        assert set(texts) == set(ways.split())
        assert all(text["tokens"] == texts["plain"]["tokens"] for text in texts.values())
    assert script("chats.py", f"{options} --prompts 1") == tables, "nothing is left to measure"
    assert file.read_text("utf-8").splitlines() == lines
    assert "the chats as they are, greedy" in tables and "T=1, by compare" in tables and "\n| ovspec |" in tables
    assert "| extract |" in script("chats.py", options.replace(" ovspec", ""))  # two prompts of each kind
    assert len(file.read_text("utf-8").splitlines()) == len(lines) + 4
    added = script("chats.py", f"{options} --prompts 1".replace(ways, "lookup@3"))
    assert all(f"\n| {way} |" in added for way in (*ways.split(), "lookup@3"))
    new = [json.loads(line)["texts"] for line in file.read_text("utf-8").splitlines()[len(lines) + 4 :]]
    assert [set(texts) for texts in new] == [{"plain", "lookup@3"}] * 4
    with pytest.raises(SystemExit, match="its tokens is 6, not 7; give another --out"):
        script("chats.py", options.replace("--tokens 6", "--tokens 7"))


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("genai-lookup", "genai-lookup needs the number of tokens to propose, as in genai-lookup@4"),
        ("llamacpp-lookup@4", "llamacpp-lookup takes no number after @"),
        ("lookup@all", "lookup takes a whole number after @"),
    ],
)
def test_a_lookahead_that_a_way_ignores_is_refused(way: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        chats.way_of(way)


def test_batches_and_contexts_of_chats(talker: Path) -> None:
    """A batch has the chats of one kind in their order, over again; short prompts have other text before them."""
    lm = ovspec.load(talker, "lookup", cache_memory=0)
    ways = [chats.way_of("plain"), chats.way_of("lookup@2")]
    bench = chats.Bench({"plain": lm.with_drafters(None), "lookup": lm}, {}, 6)
    case = chats.Case("extract 5", 400, 8, 0.0, "compare", 0)
    prompts = bench.prompt_ids(case)
    own = [lm.encode(chat.content).tolist() for chat in harness.chats() if chat.kind == "extract"]
    order = [*own[4:], *own]
    assert [prompt[-len(chat) :] for prompt, chat in zip(prompts, order, strict=True)] == order
    assert {len(prompt) for prompt in prompts} == {400}
    turn = bench.turn(case, ways)
    assert turn.prompt_tokens == 8 * 400
    assert turn.texts["lookup@2"].tokens == turn.texts["plain"].tokens
    assert turn.texts["lookup@2"].proposed > 0


def test_figures_of_chats() -> None:
    def turn(chat: str, number: int, plain: float, lookup: float, peer: float, tokens: list[int]) -> chats.Turn:
        texts = {
            "plain": chats.Text([[1, 2]], 0.06, 50.0, plain, 2),
            "lookup": chats.Text([tokens], 0.06, 60.0, lookup, 1, 4, 2),
            "genai": chats.Text([[1, 2]], 0.03, 50.0, peer),
        }
        return chats.Turn(chats.Case(chat, 0, 1, 0.0, "compare", number), 10, texts)

    turns = [turn("explain 1", 0, 8.0, 4.0, 8.0, [1, 2]), turn("explain 1", 1, 8.0, 10.0, 8.0, [1, 3])]
    found = chats.Figures([*turns, turn("extract 3", 0, 6.0, 8.0, 24.0, [1, 2])])
    assert found.speed("lookup") == "0.80 (0.75 to 2.00)"
    assert found.speed("genai") == "1.00 (0.25 to 1.00)"
    assert (found.ms("plain"), found.prompt_ms("lookup"), found.ms("torch")) == ("8.0", "6.00", None)
    assert (found.rate("lookup", "Tokens a round"), found.accepted("lookup")) == ("2.00", "6 of 12")
    assert (found.rate("genai", "Tokens a round"), found.accepted("genai")) == (None, None), "peers don't tell"
    assert found.equal("lookup") == "2 of 3"
    assert found.of(lambda prompt: prompt.judge).turns == turns
    batch = chats.Case("chat 1", 0, 2, 0.0, "compare", 0)
    texts = {"plain": chats.Text([[1], [2]], 3.0, 50.0, 8.0, 2), "genai": chats.Text([[1], [2]], 2.0)}
    assert chats.Figures([chats.Turn(batch, 10, texts)]).speed("genai") == "1.50 (1.50 to 1.50)", "of the whole time"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--ways genai-head@2", "genai-head needs --draft genai-head=PATH"),
        ("--ways llamacpp", "llamacpp needs --checkpoint, what MODEL was exported from"),
        ("--ways torch", "torch needs --checkpoint, what MODEL was exported from"),
    ],
)
def test_peers_need_their_files(script: Callable[[str, str], str], talker: Path, arguments: str, told: str) -> None:
    with pytest.raises(SystemExit, match=told):
        script("chats.py", f"{talker} --out OUT/x.jsonl --kinds explain {arguments}")


@pytest.mark.parametrize("count", [1, 5, 6, 8, 9, 18, 100])
def test_the_interval_of_a_median(count: int) -> None:
    """scipy says how probable it is that the median lies between two order statistics."""
    from scipy import stats

    least, most = figures.median_interval(range(count))
    assert least + most == count - 1, "as many are left out below as above"

    def confidence(left_out: float) -> float:
        return 1 - 2 * float(stats.binom.cdf(left_out, count, 0.5))

    assert least == 0 or confidence(least) >= 0.95
    assert count < 6 or confidence(least + 1) < 0.95 <= confidence(least)


def test_contexts_and_weights() -> None:
    lm = ovspec.load(DEMO, tune=False)
    ids = lm.encode("def f():").tolist()
    assert harness.with_context(lm.tokenizer, ids, 500)[-len(ids) :] == ids
    assert len(harness.with_context(lm.tokenizer, ids, 500)) == 500
    assert harness.with_context(lm.tokenizer, ids, 0) == ids
    size = (DEMO / "openvino_model.bin").stat().st_size
    assert 0.5 * size < harness.bytes_a_step(DEMO) < size
    assert harness.read_bandwidth(1 << 24) > 1e8


@pytest.mark.slow
def test_workers_give_what_ovspec_gives(pair: Path, load: Callable[..., ovspec.LanguageModel]) -> None:
    lm = load(engine="paged")
    expected = [result.token_ids for result in lm.generate(PROMPTS[:2], max_tokens=12, ignore_eos=True)]
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    setup = {"target": str(pair), "draft": str(pair / "draft"), "properties": exact, "draft_properties": exact}
    ids = [lm.encode(prompt).tolist() for prompt in PROMPTS[:2]]
    with Worker("ovspec", setup | {"mode": "lookup,draft"}) as worker:
        answer = worker.ask({"prompts": ids[:1], "max_tokens": 12})
        assert answer["tokens"] == expected[:1]
        assert len(answer["times"]) == 12 and sorted(answer["times"]) == answer["times"]
        assert 0 < answer["ttft_ms"] < answer["seconds"] * 1e3
        assert answer["tpot_ms"] * 11 == pytest.approx(answer["seconds"] * 1e3 - answer["ttft_ms"])
        assert worker.ask({"prompts": ids, "max_tokens": 12})["tokens"] == expected
        wrong = worker.ask({"prompts": ids, "max_tokens": 12, "lengths": [12, 11]})
        assert wrong["error"] == "it should have generated texts of [12, 11] tokens, but generated [12, 12]"


def test_workers_that_fail_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker("ovspec", {"target": str(tmp_path / "none")}) as worker:
        assert "none" in worker.ready["error"] and "\n" not in worker.ready["error"]
    monkeypatch.setattr("harness.python_of", lambda name: tmp_path / name)
    assert "run scripts/bench/peers/install.py genai" in Worker("genai", {"target": str(DEMO)}).ready["error"]
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "worker_dying.py").write_text("import sys; sys.stdin.readline(); sys.exit('it is over')")
    (tmp_path / "peers" / "worker_slow.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr("harness.HERE", tmp_path)
    assert Worker("dying", {}).ready["error"] == "its process ended (exit code 1): it is over"
    assert Worker("slow", {}, seconds=0.5).ready["error"] == "no answer within 0.5 s"


def test_a_client_of_a_load_waits_for_its_answer() -> None:
    load = Load([[1], [2], [3]], [4, 5, 6], clients=2)
    assert (load.due(), load.due(), load.sent_all) == ([0, 1], [], False)
    load.answered()
    assert load.due() == [2] and load.sent_all and load.due() == []


def test_output_is_appended_to_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = tmp_path / "docs" / "records"
    records.mkdir(parents=True)
    (records / "hello.md").write_text("# Hello\n", encoding="utf-8")
    script = tmp_path / "hello.py"
    script.write_text("import sys\nprint('hello', sys.argv[1:])\n", encoding="utf-8")
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "a b", "--record"])
    with pytest.raises(SystemExit) as ended:
        harness.record_output()
    assert ended.value.code is None
    lines = (records / "hello.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# Hello" and lines[2] == f"## {figures.machine()}"
    assert lines[4:] == ["```sh", ".venv/bin/python hello.py 'a b'", "```", "", "hello ['a b']"]
