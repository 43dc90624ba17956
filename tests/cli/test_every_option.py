"""Every option of every command is run with a value, and shows an effect.

The cases of the generating commands come from one table for all three; ``test_no_option_is_without_a_case`` compares
them with what the commands take.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from conftest import ROOT

import ovspec
import ovspec.ir.compile
import ovspec.loading
from ovspec.cli import COMMANDS, cli
from ovspec.loop.row import Row
from ovspec.options.loading import RUNTIME

DEMO = ROOT / "models" / "demo"
PROMPT = "import os\n\ndef f(12"
EOS = json.loads((DEMO / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"][0]
ENDS = ("--logit-bias", f"{EOS}=1000")
DRAWN = ("-t", "1.5", "--seed", "3")
DRAFT = ("--draft", "--lookahead", "3")
GENERATING = ("generate", "chat", "batch")
# What can't be had on this machine is refused, or only handed on.
NOT_HERE = {"--device GPU", "--draft-device GPU", "--trust-remote-code"}


@dataclass
class Outcome:
    """What a command left. ``together``: the most rows that were generated at a time."""

    code: int
    out: str
    err: str
    rows: list[Row] = field(default_factory=list)
    together: int = 0
    lm: Any = None
    tuned: bool = False
    compiled: list[Any] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.rows[0].result().token_ids

    @property
    def text(self) -> str:
        return self.rows[0].result().text

    @property
    def stopped(self) -> bool:
        return self.rows[0].finish_reason not in (None, "length")

    @property
    def stats(self) -> Any:
        return self.rows[0].stats

    def property(self, name: str) -> str:
        return str(self.lm.target.ir.compiled.get_property(name))


LOADED: dict[str, tuple[Any, bool]] = {}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_dir: Path) -> Iterator[Callable[..., Outcome]]:
    """Runs a command in this process. Models are loaded once for each set of options."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_dir))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OVSPEC_TUNE", "1")
    load, init, compile_properties = ovspec.load, Row.__init__, ovspec.ir.compile.compile_properties
    found = Outcome(0, "", "")

    def load_once(*arguments: Any, **options: Any) -> Any:
        key = repr((arguments, sorted(options.items())))
        if key not in LOADED or {"cache_dir", "lookup_corpus"} & options.keys():
            LOADED[key] = load(*arguments, **options), found.tuned
        found.lm, found.tuned = LOADED[key]
        return found.lm

    def note_tuning(*_: Any) -> None:
        found.tuned = True

    def note_compiling(options: Any) -> dict[str, str]:
        found.compiled.append((options, properties := compile_properties(options)))
        return properties

    def noted(row: Row, *arguments: Any, **options: Any) -> None:
        init(row, *arguments, **options)
        found.rows.append(row)
        found.together = max(found.together, sum(not each.finish_reason for each in found.rows))

    monkeypatch.setattr(ovspec, "load", load_once, raising=False)
    monkeypatch.setattr(Row, "__init__", noted)
    monkeypatch.setattr(ovspec.loading, "tune_if_new", note_tuning)
    monkeypatch.setattr(ovspec.ir.compile, "compile_properties", note_compiling)

    def run(command: str, *arguments: Any, stdin: str = "") -> Outcome:
        nonlocal found
        found = Outcome(0, "", "")
        done = CliRunner().invoke(cli, [command, *map(str, arguments)], input=stdin)
        found.code, found.out, found.err = done.exit_code, done.stdout, done.stderr
        if done.exception and not isinstance(done.exception, SystemExit):
            if not isinstance(done.exception, (ovspec.OvspecError, OSError)):
                raise done.exception
            found.code, found.err = 1, found.err + str(done.exception)
        return found

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield run
    for number, handler in handlers.items():  # a chat and an export have their own
        signal.signal(number, handler)


def generating(run: Callable[..., Outcome], command: str, *options: Any, prompt: str = PROMPT) -> Outcome:
    """One of the commands that generate, on the demo pair and the same prompt."""
    if not {"-n", "--max-tokens"} & set(options):
        options = ("-n", "12", *options)
    if "--engine" not in options:
        options = ("--engine", "stateful", *options)  # which loads sooner
    folder = damaged() if "--verify" in options else DEMO
    if command == "generate":
        return run(command, folder, *options, "--json", "-p", prompt)
    if command == "chat":
        return run(command, folder, *options, stdin="hi\n")
    Path("in.jsonl").write_text(f"{json.dumps(prompt)}\n" * 3, encoding="utf-8")
    return run(command, folder, "in.jsonl", "-o", "out.jsonl", "--overwrite", *options)


def damaged() -> Path:
    """A copy of the demo pair of which one file has been changed."""
    folder = Path("damaged")
    shutil.copytree(DEMO, folder)
    file = folder / "generation_config.json"
    file.write_bytes(file.read_bytes().replace(b"\n", b" ", 1))
    return folder


Effect = Callable[[Outcome, Outcome], bool]


@dataclass(frozen=True)
class Case:
    """Options, what they change against others (none by default), and how that is seen."""

    options: tuple[Any, ...]
    effect: Effect
    against: tuple[Any, ...] = ()
    prompt: str = PROMPT


def refusal(sentence: str) -> Effect:
    return lambda found, _: found.code in (1, 2) and sentence in found.err


def other_text(found: Outcome, base: Outcome) -> bool:
    return found.tokens != base.tokens


def text_is(*texts: str) -> Effect:
    return lambda found, base: found.text in texts and found.text != base.text


def is_f32(found: Outcome, _: Outcome) -> bool:
    return any(name in found.property("INFERENCE_PRECISION_HINT") for name in ("f32", "float"))


def no_repeats(found: Outcome, base: Outcome) -> bool:
    return len(set(found.tokens)) == len(found.tokens) and found.tokens != base.tokens


def goes_on_inside(found: Outcome, _: Outcome) -> bool:
    return len(found.text) == 3 and found.text[:2].isdecimal()


def other_cache(found: Outcome, base: Outcome) -> bool:
    return found.property("KV_CACHE_PRECISION") != base.property("KV_CACHE_PRECISION")


def one_thread(found: Outcome, _: Outcome) -> bool:
    return found.property("INFERENCE_NUM_THREADS") == "1"


SHARED: dict[str, Case] = {
    "draft": Case(("--draft",), lambda found, base: bool(found.lm.draft) and not base.lm.draft),
    "lookahead": Case(DRAFT, lambda f, b: f.stats.proposed > 0 == b.stats.proposed, ("--draft", "--lookahead", "0")),
    "lookup_corpus": Case(
        ("--draft", "lookup", "--lookahead", "4", "-n", "40", "--lookup-corpus", "corpus.txt"),
        lambda f, b: (f.stats.proposed, f.stats.accepted) != (b.stats.proposed, b.stats.accepted),
        ("--draft", "lookup", "--lookahead", "4", "-n", "40"),
    ),
    "accept": Case((*DRAWN, *DRAFT, "-n", "30", "--accept", "rejection"), other_text, (*DRAWN, *DRAFT, "-n", "30")),
    "max_tokens": Case(("--max-tokens", "3"), lambda found, base: len(found.tokens) == 3 < len(base.tokens)),
    "min_tokens": Case((*ENDS, "--min-tokens", "4"), lambda f, b: len(f.tokens) == 5 > len(b.tokens), ENDS),
    "ignore_eos": Case((*ENDS, "--ignore-eos"), lambda f, b: len(f.tokens) == 12 > len(b.tokens), ENDS),
    "stop": Case(("--stop", "TEXT"), lambda f, b: f.stopped and len(f.text) < len(b.text)),
    "stop_ids": Case(("--stop-id", "STOP"), lambda f, b: f.stopped and len(f.tokens) < len(b.tokens)),
    "temperature": Case(DRAWN, other_text),
    "top_k": Case((*DRAWN, "--top-k", "1"), lambda f, b: f.tokens == b.tokens),
    "top_p": Case((*DRAWN, "--top-p", "0.0001"), lambda f, b: f.tokens == b.tokens),
    "min_p": Case((*DRAWN, "--min-p", "1"), lambda f, b: f.tokens == b.tokens),
    "typical_p": Case((*DRAWN, "--typical-p", "0.05"), other_text, DRAWN),
    "repetition_penalty": Case(("--repetition-penalty", "50", "-n", "30"), other_text, ("-n", "30")),
    "presence_penalty": Case(("--presence-penalty", "100", "-n", "30"), no_repeats),
    "frequency_penalty": Case(("--frequency-penalty", "100", "-n", "30"), no_repeats),
    "logit_bias": Case(("--logit-bias", "STOP=-inf"), other_text),
    "seed": Case(("-t", "1.5", "--seed", "4"), lambda f, b: f.tokens != b.tokens and f.stats.seed == 4, DRAWN),
    "n": Case((*DRAWN, "--samples", "2"), lambda f, b: len(f.rows) == 2 * len(b.rows)),
    "logprobs": Case(("--logprobs", "2"), lambda f, _: len(json.loads(f.out)["logprobs"]) == 12),
    "json_schema": Case(("--json-schema", '{"enum": ["yes"]}'), text_is('"yes"')),
    "regex": Case(("--regex", "yes|no"), text_is("yes", "no")),
    "grammar": Case(("--grammar", "grammar.lark"), text_is("yes", "no")),
    "gbnf": Case(("--gbnf", "grammar.gbnf"), text_is("yes", "no")),
    "choice": Case(("--choice", "yes", "--choice", "no"), text_is("yes", "no")),
    "constrain_from": Case(("--regex", "[(]12[0-9]{2}[)]", "--constrain-from", "("), goes_on_inside),
    "heal": Case(("--heal",), lambda f, b: f.rows[0].start < b.rows[0].start, prompt="def f(self):\n    retur"),
    "batch_size": Case(("--batch-size", "1"), lambda f, b: f.together < b.together),
    "device": Case(("--device", "AUTO:CPU"), lambda f, _: f.lm.target.ir.device == "AUTO:CPU"),
    "draft_device": Case((*DRAFT, "--draft-device", "AUTO:CPU"), lambda f, _: f.stats.draft_device == "AUTO:CPU"),
    "precision": Case(("--precision", "f32"), is_f32),
    "kv_precision": Case(("--kv-precision", "u8"), other_cache),
    "engine": Case(("--engine", "paged"), lambda f, b: (f.stats.engine, b.stats.engine) == ("paged", "stateful")),
    "threads": Case(("--threads", "1"), one_thread),
    "properties": Case(("--property", "INFERENCE_NUM_THREADS=1"), one_thread),
    "cache_dir": Case(("--cache-dir", "here"), lambda *_: any(Path("here").rglob("*"))),
    "tune": Case(("--no-tune",), lambda f, b: b.tuned and not f.tuned),
    "verify": Case(("--verify",), refusal("changed since it was exported")),
}
OWN: dict[tuple[str, str], Case] = {
    ("chat", "n"): Case((*DRAWN, "--samples", "2"), refusal("--samples can't be combined with a chat")),
    ("chat", "logprobs"): Case(("--logprobs", "2"), refusal("--logprobs can't be shown in a chat")),
    ("batch", "logprobs"): Case(("--logprobs", "2"), refusal("--logprobs can't be had in a batch")),
    ("chat", "heal"): Case(("--heal",), refusal("--heal can't be combined with a chat")),
    ("chat", "constrain_from"): Case(("--regex", "a", "--constrain-from", "("), refusal("'(' is not in the prompt")),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("command", GENERATING)
def test_options_of_generating_commands(run: Callable[..., Outcome], command: str, name: str) -> None:
    if name == "batch_size" and command != "batch":
        pytest.skip("only of batch")
    Path("grammar.lark").write_text('start: "yes" | "no"\n', encoding="utf-8")
    Path("grammar.gbnf").write_text('root ::= "yes" | "no"\n', encoding="utf-8")
    case = OWN.get((command, name)) or SHARED[name]
    base = generating(run, command, *case.against, prompt=case.prompt)
    assert base.code == 0, base.err
    Path("corpus.txt").write_text(f"{base.text}\n{PROMPT}{base.text}", encoding="utf-8")
    values = {"TEXT": base.text[2:4], "STOP": str(base.tokens[3])} if len(base.tokens) > 3 else {}
    options = [option if (value := values.get(option)) is None else value for option in case.options]
    options = [option.replace("STOP", values.get("STOP", "")) for option in options]
    found = generating(run, command, *options, prompt=case.prompt)
    assert found.code == 0 or case.effect.__qualname__.startswith("refusal"), found.err
    assert case.effect(found, base), (found, base)


# ---------------------------------------------------------------- what each command has of its own

GENERATE: dict[str, tuple[tuple[Any, ...], str, Callable[[Outcome], bool]]] = {
    "prompt_option": (("--prompt", "import"), "", lambda f: f.rows[0].start == 1),
    "prompt_file": (("--file", "prompt.txt"), "", lambda f: f.rows[0].start == 1),
    "token_ids": (("--token-ids", "5 6 7"), "", lambda f: f.rows[0].sequence.tokens[:3].tolist() == [5, 6, 7]),
    "chat": (("--chat",), "import", lambda f: f.rows[0].start > 3),
    "system": (("--chat", "--system", "Be brief."), "import", lambda f: f.rows[0].start > 8),
    "stats": (("--stats",), "import", lambda f: "tokens/s" in f.err),
    "as_json": (("--json",), "import", lambda f: len(json.loads(f.out)["token_ids"]) == 6),
    "compare": (("--compare",), "import", lambda f: "speed-up" in f.err and "identical" in f.err),
    "session": (("--session", "text.ov"), "import", lambda _: Path("text.ov").is_file()),
    "context": (("--context", "100"), "import", lambda f: "context: 100 tokens" in f.err),
}
CHAT: dict[str, tuple[tuple[Any, ...], str, Callable[[Outcome], bool]]] = {
    "system": (("--system", "Be brief."), "/system\n", lambda f: "Be brief." in f.err),
    "stats": (("--stats",), "hi\n", lambda f: "tokens/s" in f.err),
    "session": (("--session", "chat.ov"), "hi\n", lambda _: Path("chat.ov").is_file()),
    "context": (("--context", "100"), "hi\n", lambda f: "context: 100 tokens" in f.err),
}
BATCH: dict[str, tuple[tuple[Any, ...], str, Callable[[Outcome], bool]]] = {
    "output": (("-o", "elsewhere"), "", lambda _: Path("elsewhere").is_file()),
    "overwrite": (("-o", "there", "--overwrite"), "", lambda _: "text" in Path("there").read_text(encoding="utf-8")),
    "chat": (("-o", "out", "--chat"), "", lambda f: f.rows[0].start > 3),
    "system": (("-o", "out", "--chat", "--system", "Be brief."), "", lambda f: f.rows[0].start > 8),
}
OF_EACH = {"generate": GENERATE, "chat": CHAT, "batch": BATCH}


@pytest.mark.parametrize(("command", "name"), [(command, name) for command, cases in OF_EACH.items() for name in cases])
def test_what_a_command_has_of_its_own(run: Callable[..., Outcome], command: str, name: str) -> None:
    Path("prompt.txt").write_text("import", encoding="utf-8")
    Path("there").write_text("precious", encoding="utf-8")
    options, stdin, effect = OF_EACH[command][name]
    more = ["prompt.txt"] if command == "batch" else []
    found = run(command, DEMO, *more, "--engine", "stateful", "-n", "6", *options, stdin=stdin)
    assert found.code == 0, found.err
    assert effect(found), found


COMPILED: dict[str, tuple[tuple[str, ...], Callable[[Any, dict[str, str]], bool]]] = {
    "device": (("--device", "AUTO:CPU"), lambda options, _: options.device == "AUTO:CPU"),
    "precision": (("--precision", "f32"), lambda _, given: given["INFERENCE_PRECISION_HINT"] == "f32"),
    "kv_precision": (("--kv-precision", "u8"), lambda _, given: given["KV_CACHE_PRECISION"] == "u8"),
    "threads": (("--threads", "1"), lambda _, given: given["INFERENCE_NUM_THREADS"] == "1"),
    "properties": (("--property", "INFERENCE_NUM_THREADS=1"), lambda _, given: given["INFERENCE_NUM_THREADS"] == "1"),
    "cache_dir": (("--cache-dir", "here"), lambda _, given: given["CACHE_DIR"].startswith("here")),
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("command", ["inspect", "perplexity"])
def test_where_and_how_models_are_compiled(run: Callable[..., Outcome], command: str, name: str) -> None:
    """OpenVINO is given what the options say."""
    options, given = COMPILED[name]
    LOADED.clear()
    found = measuring(run, command, "--engine", "stateful", *options)
    assert found.code == 0, found.err
    assert found.compiled
    assert all(given(*each) for each in found.compiled)


def measuring(run: Callable[..., Outcome], command: str, *options: Any) -> Outcome:
    Path("notes.txt").write_text("import os\n" * 20, encoding="utf-8")
    return run(command, DEMO, *["notes.txt"] * (command == "perplexity"), *options)


@pytest.mark.parametrize("command", ["inspect", "perplexity"])
def test_commands_that_measure(run: Callable[..., Outcome], command: str) -> None:
    for engine in ("stateful", "paged"):
        found = measuring(run, command, "--json", "--engine", engine)
        assert found.code == 0, found.err
        told = json.loads(found.out)
        assert (told["target"]["engine"] if command == "inspect" else found.lm.target.engine) == engine
    refused = measuring(run, command, "--draft-device", "CPU")
    assert (refused.code, "--draft-device is not used here" in refused.err) == (2, True)
    if command == "perplexity":
        assert measuring(run, command, "--engine", "stateful").tuned
        assert not measuring(run, command, "--engine", "stateful", "--no-tune").tuned
        windows = [json.loads(measuring(run, command, "--json", "--context", n).out)["context"] for n in (20, 30)]
        assert windows == [20, 30]
    else:
        assert "All checksums are those of the export." in measuring(run, command, "--verify").out


def test_inspect_without_the_profile(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    from ovspec.setup import inspection

    asked: list[bool] = []
    known = inspection.known_profile
    monkeypatch.setattr(inspection, "known_profile", lambda *each: asked.append(True) or known(*each))
    assert run("inspect", DEMO, "--no-tune").code == 0
    assert not asked
    assert run("inspect", DEMO).code == 0
    assert asked


def test_tune(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is tested elsewhere; here, that the options arrive."""
    from ovspec.setup import tuning

    def measured(folder: Path, options: Any, goal: str, **_: Any) -> Any:  # noqa: ARG001
        raise ovspec.OvspecError(f"would tune for {goal} and keep it in {options.cache_dir}")

    monkeypatch.setattr(tuning, "tune", measured)
    found = run("tune", DEMO, "--for", "decode", "--cache-dir", "here", "--json")
    assert "would tune for decode and keep it in here" in found.err


# ---------------------------------------------------------------- export

TO_COMPRESSION = {
    "group_size": ("--group-size", "64", 64),
    "ratio": ("--ratio", "0.5", 0.5),
    "sym": ("--sym", None, True),
    "backup_precision": ("--backup-precision", "int8_sym", "int8_sym"),
    "awq": ("--awq", None, True),
    "scale_estimation": ("--scale-estimation", None, True),
    "gptq": ("--gptq", None, True),
    "lora_correction": ("--lora-correction", None, True),
    "calibration": ("--calibration", "notes.txt", Path("notes.txt")),
    "samples": ("--samples", "7", 7),
}
TO_EXPORT = {
    "draft_layers": ("--draft-layers", "2", 2),
    "evaluate": ("--evaluate", "notes.txt", Path("notes.txt")),
    "trust_remote_code": ("--trust-remote-code", None, True),
}
OTHERS_OF_EXPORT = {"draft", "output", "list_pairs", "weight_format", "draft_weight_format"}


def test_options_of_export(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """They arrive where the export is made; what they do there is tested with the exporter."""
    from types import SimpleNamespace

    from ovspec.setup import exporting

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    package = SimpleNamespace(
        Compression=lambda name, **options: {"format": name} | options,
        export_pair=lambda *arguments, **options: calls.append((arguments, options)),
    )
    monkeypatch.setattr(exporting, "export_package", lambda: package)
    given = [
        part for flag, value, _ in (*TO_COMPRESSION.values(), *TO_EXPORT.values()) for part in (flag, value) if part
    ]
    formats = ("--weight-format", "int4", "--draft-weight-format", "int8")
    found = run("export", "a-target", "--draft", "a-draft", "-o", "out", *formats, *given)
    assert found.code == 0, found.err
    (target, draft, output, first, second), options = calls[0]
    assert (target, draft, output) == ("a-target", "a-draft", Path("out"))
    assert (first["format"], second["format"]) == ("int4", "int8")
    assert {name: first[name] for name in TO_COMPRESSION} == {
        name: value for name, (*_, value) in TO_COMPRESSION.items()
    }
    assert all(options[name] == value for name, (*_, value) in TO_EXPORT.items())
    listed = run("export", "--list")
    assert listed.out
    assert len(calls) == 1


# ---------------------------------------------------------------- what can't be had here


@pytest.mark.parametrize("option", ["--device GPU", "--draft-device GPU"])
def test_devices_that_are_not_here(run: Callable[..., Outcome], option: str) -> None:
    from ovspec.ir.device import available_devices

    assert option in NOT_HERE
    if any(name.startswith("GPU") for name, _ in available_devices()):
        pytest.skip("there is a GPU")
    for command in GENERATING:
        found = generating(run, command, "--draft", *option.split())
        assert (found.code, "no GPU driver found" in found.err) == (1, True), found.err


def test_code_of_a_checkpoint_is_not_run_unasked(run: Callable[..., Outcome]) -> None:
    assert "--trust-remote-code" in NOT_HERE
    shutil.copytree(ROOT / "models" / "demo-hf" / "target", "with-code")
    file = Path("with-code", "config.json")
    config = json.loads(file.read_text(encoding="utf-8")) | {"auto_map": {"AutoModel": "code.Model"}}
    file.write_text(json.dumps(config), encoding="utf-8")
    found = run("export", "with-code", "-o", "out")
    assert (found.code, "add --trust-remote-code if you trust it" in found.err) == (1, True)


# ---------------------------------------------------------------- all of them

TESTED: dict[str, set[str]] = {
    **{
        command: {*SHARED, *cases} - (set() if command == "batch" else {"batch_size"})
        for command, cases in OF_EACH.items()
    },
    "batch": {*SHARED, *BATCH},
    "inspect": {*RUNTIME, "verify", "as_json"},
    "perplexity": {*RUNTIME, "context", "as_json"},
    "tune": {"goal", "as_json", "cache_dir"},
    "export": {*TO_COMPRESSION, *TO_EXPORT, *OTHERS_OF_EXPORT},
    "devices": set(),
    # tests/cli/test_bench.py runs these.
    "bench": {
        *("draft", "prompts", "files", "lookahead", "max_tokens", "temperature", "repeats", "as_json", "plot"),
        *RUNTIME,
    },
}


def test_no_option_is_without_a_case() -> None:
    assert TESTED.keys() == COMMANDS.keys()
    context: Any = None
    for name, tested in TESTED.items():
        command = cli.get_command(context, name)
        assert command
        taken = {parameter.name for parameter in command.params if isinstance(parameter, click.Option)}
        assert taken == tested, name


def test_devices(run: Callable[..., Outcome]) -> None:
    assert "CPU\t" in run("devices").out
