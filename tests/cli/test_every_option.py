"""Every option of every command is run with a value, and shows an effect.

The cases of the generating commands come from one table for all three; ``test_no_option_is_without_a_case`` compares
them with what the commands take.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
import pytest
from command_runs import Outcome, runs
from conftest import ROOT, TARGET
from serving_options import LOADING, SERVING
from test_options_of_tools import OTHERS_OF_EXPORT, TO_COMPRESSION, TO_DISTILL, TO_EXPORT

from ovspec.cli import COMMANDS, cli
from ovspec.cli.options import fill_missing_flag_value
from ovspec.params.loading import RUNTIME_OPTIONS

FOLDER = Path()  # of the small pair, which loads sooner than the demo pair; ``run`` sets it
PROMPT = "import os\n\ndef f(12"
EOS = json.loads((TARGET / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"][0]
ENDS = ("--logit-bias", f"{EOS}=1000")
DRAWN = ("-t", "1.5", "--seed", "3")
DRAFT = ("--draft", "--lookahead", "3")
# Odd digits: no grammar tells them from even ones.
ODD = ("--json-schema", '{"type": "integer", "minimum": 0, "maximum": 9, "not": {"multipleOf": 2}}')
ONE_NULL = '{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}'
GENERATING = ("generate", "chat", "batch")
# What can't be had on this machine is refused, or only handed on.
NOT_HERE = {"--device GPU", "--draft-device GPU", "--trust-remote-code"}


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_dir: Path, pair: Path
) -> Iterator[Callable[..., Outcome]]:
    monkeypatch.setattr(sys.modules[__name__], "FOLDER", pair)
    yield from runs(monkeypatch, tmp_path, cache_dir)


def generating(run: Callable[..., Outcome], command: str, *options: Any, prompt: str = PROMPT) -> Outcome:
    """One of the commands that generate, on the small pair and the same prompt."""
    if not {"-n", "--max-tokens"} & set(options):
        options = ("-n", "12", *options)
    if "--engine" not in options:
        options = ("--engine", "stateful", *options)  # which loads sooner
    if "--arithmetic" not in options:
        options = ("--arithmetic", "fast", *options)
    folder = damaged() if "--verify" in options else talkative() if "--chat" in options or TALKS in options else FOLDER
    if command == "generate":
        return run(command, folder, *options, "--json", "-p", prompt)
    if command == "chat":
        return run(command, folder, *options, stdin="hi\n")
    Path("in.jsonl").write_text(f"{json.dumps(prompt)}\n" * 3, encoding="utf-8")
    return run(command, folder, "in.jsonl", "-o", "out.jsonl", "--overwrite", *options)


def damaged() -> Path:
    """A copy of the small pair of which one file has been changed."""
    folder = Path("damaged")
    shutil.copytree(FOLDER, folder)
    file = folder / "generation_config.json"
    file.write_bytes(file.read_bytes().replace(b"\n", b" ", 1))
    return folder


def talkative() -> Path:
    """A copy of the small pair whose chat template reads a variable."""
    folder = Path("talkative")
    if not folder.exists():
        shutil.copytree(FOLDER, folder)
        (folder / "ovspec.json").unlink()
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


Effect = Callable[[Outcome, Outcome], bool]


@dataclass(frozen=True)
class Case:
    """Options, what they change against others (none by default), and how that is seen."""

    options: tuple[Any, ...]
    effect: Effect
    against: tuple[Any, ...] = ()
    prompt: str = PROMPT


BASES: dict[tuple[Any, ...], Outcome] = {}


def base_of(run: Callable[..., Outcome], command: str, case: Case) -> Outcome:
    """Return what a command did with the options that a case is compared with, which many cases share."""
    key = command, case.against, case.prompt
    if key not in BASES:
        BASES[key] = generating(run, command, *case.against, prompt=case.prompt)
        assert BASES[key].code == 0, BASES[key].err
    return BASES[key]


def refusal(sentence: str) -> Effect:
    return lambda found, _: found.code in (1, 2) and sentence in found.err


TALKS = "--chat-template-kwargs"
# Thinks if it is told to.
TEMPLATE = "{{ messages[-1].content }}{{ word }}{% if reasoning_effort == 'high' %}<think>{% endif %}{# </think> #}"
HARD = ("--chat", "--reasoning-effort", "high")


def other_text(found: Outcome, base: Outcome) -> bool:
    return found.tokens != base.tokens


def text_is(*texts: str) -> Effect:
    return lambda found, base: found.text in texts and found.text != base.text


def last_text(found: Outcome) -> str:
    return found.rows[-1].result().text


def is_f32(found: Outcome, _: Outcome) -> bool:
    return any(name in found.property("INFERENCE_PRECISION_HINT") for name in ("f32", "float"))


def no_repeats(found: Outcome, base: Outcome) -> bool:
    return len(set(found.tokens)) == len(found.tokens) and found.tokens != base.tokens


def goes_on_inside(found: Outcome, _: Outcome) -> bool:
    return len(found.text) == 3 and found.text[:2].isdecimal()


def other_cache(found: Outcome, base: Outcome) -> bool:
    return found.property("KV_CACHE_PRECISION") != base.property("KV_CACHE_PRECISION")


def longer_prompt(found: Outcome, base: Outcome) -> bool:
    return found.stats.prompt_tokens > base.stats.prompt_tokens


def one_thread(found: Outcome, _: Outcome) -> bool:
    return found.property("INFERENCE_NUM_THREADS") == "1"


def is_phi4(found: Outcome, _: Outcome) -> bool:
    return "<|im_sep|>" in found.lm.runtime.prompt_encoder.chat_format.template.source


def read_first(name: str) -> Any:
    return json.loads(Path(name).read_text(encoding="utf-8").partition("\n")[0])


SHARED: dict[str, Case] = {
    "draft": Case(("--draft",), lambda found, base: bool(found.lm.draft) and not base.lm.draft),
    "lookahead": Case(DRAFT, lambda f, b: f.stats.proposed > 0 == b.stats.proposed, ("--draft", "--lookahead", "0")),
    "lookup_corpus": Case(
        ("--draft", "lookup", "--lookahead", "4", "-n", "40", "--lookup-corpus", "corpus.txt"),
        lambda f, b: (f.stats.proposed, f.stats.accepted) != (b.stats.proposed, b.stats.accepted),
        ("--draft", "lookup", "--lookahead", "4", "-n", "40"),
    ),
    "cache_size": Case(
        ("-n", "-1", "--ignore-eos", "--cache-size", "2e-4"),
        lambda f, b: len(b.tokens) > len(f.tokens) > 5 and f.lm.runtime.models.cache_limit_bytes == 2e5,
        ("-n", "-1", "--ignore-eos"),
    ),
    "cache_memory": Case(
        ("--cache-memory", "0"),
        lambda f, b: f.lm.runtime.models.cache_bytes == 0 and b.lm.runtime.models.cache_bytes is None,
    ),
    "accept": Case((*DRAWN, *DRAFT, "-n", "30", "--accept", "rejection"), other_text, (*DRAWN, *DRAFT, "-n", "30")),
    "max_tokens": Case(("-n", "-1", *ENDS, "--min-tokens", "15"), lambda f, b: len(f.tokens) == 16 > len(b.tokens)),
    "min_tokens": Case((*ENDS, "--min-tokens", "4"), lambda f, b: len(f.tokens) == 5 > len(b.tokens), ENDS),
    "min_indent": Case(("--regex", "a\n   b\n c", "--min-indent", "2"), text_is("a\n   b")),
    "ignore_eos": Case((*ENDS, "--ignore-eos"), lambda f, b: len(f.tokens) == 12 > len(b.tokens), ENDS),
    "stop": Case(("--stop", "TEXT"), lambda f, b: f.stopped and len(f.text) < len(b.text)),
    "stop_ids": Case(("--stop-id", "STOP"), lambda f, b: f.stopped and len(f.tokens) < len(b.tokens)),
    "temperature": Case(("--temp", *DRAWN[1:]), other_text),
    "top_k": Case((*DRAWN, "--top-k", "1"), lambda f, b: f.tokens == b.tokens),
    "top_p": Case((*DRAWN, "--top-p", "0.0001"), lambda f, b: f.tokens == b.tokens),
    "min_p": Case((*DRAWN, "--min-p", "1"), lambda f, b: f.tokens == b.tokens),
    "typical_p": Case((*DRAWN, "--typical-p", "0.05"), other_text, DRAWN),
    "repetition_penalty": Case(("--repetition-penalty", "50", "-n", "30"), other_text, ("-n", "30")),
    "presence_penalty": Case(("--presence-penalty", "100", "-n", "30"), no_repeats),
    "frequency_penalty": Case(("--frequency-penalty", "100", "-n", "30"), no_repeats),
    "logit_bias": Case(("--logit-bias", "STOP=-inf"), other_text),
    "seed": Case(("-t", "1.5", "--seed", "4"), lambda f, b: f.tokens != b.tokens and f.stats.seed == 4, DRAWN),
    "n": Case(("--samples", "2"), lambda f, b: len(f.rows) == 2 * len(b.rows)),
    "logprobs": Case(("--logprobs", "2"), lambda f, _: len(json.loads(f.out)["logprobs"]) == 12),
    "chat_template_kwargs": Case(
        ("--chat", "--chat-template-kwargs", '{"word": "a, b, c, d"}'),
        longer_prompt,
        ("--chat", "--chat-template-kwargs", '{"word": ""}'),
    ),
    "reasoning_effort": Case(HARD, lambda f, b: f.stats.thinking_tokens > 0 == b.stats.thinking_tokens, ("--chat",)),
    "max_thinking_tokens": Case(
        (*HARD, "--max-thinking-tokens", "0"), lambda f, b: f.stats.thinking_tokens < b.stats.thinking_tokens, HARD
    ),
    "tool_format": Case(
        ("--tool-format", "llama3"), lambda f, _: f.lm.runtime.prompt_encoder.chat_format.tool_format.name == "llama3"
    ),
    "chat_template": Case(("--chat", "--chat-template", "phi4"), is_phi4),
    "json_schema": Case(("--json-schema", '{"enum": ["yes"]}'), text_is('"yes"')),
    "json_schema_mode": Case((*ODD, "--json-schema-mode", "checked"), lambda f, _: int(f.text) in range(10)),
    "retries": Case(
        (*DRAWN, *ODD, "--json-schema-mode", "checked", "--retries", "20"),
        lambda f, _: last_text(f) in ("1", "3", "5", "7", "9"),
    ),
    "additional_properties": Case(
        ("--json-schema", ONE_NULL, "--no-additional-properties"), lambda f, _: json.loads(f.text) == {"a": None}
    ),
    "compact_json": Case(
        ("--json-schema", ONE_NULL[:-1] + ', "additionalProperties": false}', "--compact-json"), text_is('{"a":null}')
    ),
    "regex": Case(("--regex", "yes|no"), text_is("yes", "no")),
    "grammar": Case(("--grammar", "grammar.lark"), text_is("yes", "no")),
    "gbnf": Case(("--gbnf", "grammar.gbnf"), text_is("yes", "no")),
    "choice": Case(("--choice", "yes", "--choice", "no"), text_is("yes", "no")),
    "constrain_from": Case(("--regex", "[(]12[0-9]{2}[)]", "--constrain-from", "("), goes_on_inside),
    "heal": Case(
        ("--heal",), lambda f, b: f.rows[0].prompt_length < b.rows[0].prompt_length, prompt="def f(self):\n    retur"
    ),
    "batch_size": Case(("--batch-size", "1"), lambda f, b: f.together < b.together),
    "device": Case(("--device", "AUTO:CPU"), lambda f, _: f.lm.target.ir.device == "AUTO:CPU"),
    "draft_device": Case((*DRAFT, "--draft-device", "AUTO:CPU"), lambda f, _: f.stats.draft_device == "AUTO:CPU"),
    "precision": Case(("--precision", "f32"), is_f32),
    "kv_precision": Case(("--kv-precision", "u8"), other_cache),
    "arithmetic": Case(
        ("--arithmetic", "fast"),
        lambda f, b: f.stats.arithmetic == "fast" and "exact" in b.stats.arithmetic,
        ("--arithmetic", "exact"),
    ),
    "engine": Case(("--engine", "paged"), lambda f, b: (f.stats.engine, b.stats.engine) == ("paged", "stateful")),
    "threads": Case(("--threads", "1"), one_thread),
    "properties": Case(("--property", "INFERENCE_NUM_THREADS=1"), one_thread),
    "cache_dir": Case(("--cache-dir", "here"), lambda *_: any(Path("here").rglob("*"))),
    "tune": Case(("--no-tune",), lambda f, b: b.tuned and not f.tuned),
    "verify": Case(("--verify",), refusal("changed since the export")),
    # tests/cli/test_models.py takes one that is exported.
    "weight_format": Case(
        ("--weight-format", "int4"), refusal("already exported to an OpenVINO IR; leave --weight-format out.")
    ),
}
OWN: dict[tuple[str, str], Case] = {
    ("chat", "retries"): Case(
        (*DRAWN, *ODD, "--json-schema-mode", "checked", "--retries", "2"), refusal("can't be used in a session")
    ),
    ("batch", "logprobs"): Case(("--logprobs", "2"), lambda *_: len(read_first("out.jsonl")["logprobs"]) == 12),
    ("chat", "chat_template_kwargs"): Case(
        ("--chat-template-kwargs", '{"word": "a, b, c, d"}'), longer_prompt, ("--chat-template-kwargs", '{"word": ""}')
    ),
    ("chat", "chat_template"): Case(("--chat-template", "phi4"), is_phi4),
    ("chat", "constrain_from"): Case(
        ("--regex", "a", "--constrain-from", "("), refusal("'('; it must be a part of the prompt.")
    ),
}
NOT_TAKEN = {
    *product(("generate", "chat"), ("batch_size", "tool_format", "reasoning_effort", "max_thinking_tokens")),
    *product(("chat",), ("n", "logprobs", "heal")),
}


def case_of(command: str, name: str) -> Any:
    """Options are the same for all commands: in quick runs, each is tested with one of them, in turns."""
    commands = [each for each in GENERATING if (each, name) not in NOT_TAKEN]
    turn = commands[[*SHARED].index(name) % len(commands)]
    slow = command != turn and (command, name) not in OWN
    return pytest.param(command, name, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(
    ("command", "name"),
    [case_of(command, name) for name in SHARED for command in GENERATING if (command, name) not in NOT_TAKEN],
)
def test_options_of_generating_commands(run: Callable[..., Outcome], command: str, name: str) -> None:
    Path("grammar.lark").write_text('start: "yes" | "no"\n', encoding="utf-8")
    Path("grammar.gbnf").write_text('root ::= "yes" | "no"\n', encoding="utf-8")
    case = OWN.get((command, name)) or SHARED[name]
    base = base_of(run, command, case)
    Path("corpus.txt").write_text(f"{base.text}\n{PROMPT}{base.text}", encoding="utf-8")
    values = {"TEXT": base.text[2:4], "STOP": str(base.tokens[3])} if len(base.tokens) > 3 else {}
    options = [option if (value := values.get(option)) is None else value for option in case.options]
    options = [option.replace("STOP", values.get("STOP", "")) for option in options]
    found = generating(run, command, *options, prompt=case.prompt)
    assert found.code == 0 or case.effect.__qualname__.startswith("refusal"), found.err
    assert case.effect(found, base), (found, base)


# ---------------------------------------------------------------- what each command has of its own

GENERATE: dict[str, tuple[tuple[Any, ...], str, Callable[[Outcome], bool]]] = {
    "prompt_option": (("--prompt", "import"), "", lambda f: f.rows[0].prompt_length == 1),
    "prompt_file": (("--file", "prompt.txt"), "", lambda f: f.rows[0].prompt_length == 1),
    "token_ids": (("--token-ids", "5 6 7"), "", lambda f: f.rows[0].sequence.tokens[:3].tolist() == [5, 6, 7]),
    "chat": (("--chat",), "import", lambda f: f.rows[0].prompt_length > 3),
    "system": (("--chat", "--system", "Be brief."), "import", lambda f: f.rows[0].prompt_length > 8),
    "prefill": (("--chat", "--prefill", "Be brief."), "import", lambda f: f.rows[0].prompt_length > 8),
    "stats": (("--stats",), "import", lambda f: "tokens/s" in f.err),
    "as_json": (("--json",), "import", lambda f: len(json.loads(f.out)["token_ids"]) == 6),
    "compare": (("--compare",), "import", lambda f: "speed-up" in f.err and "identical: 6 tokens" in f.err),
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
    "chat": (("-o", "out", "--chat"), "", lambda f: f.rows[0].prompt_length > 3),
    "system": (("-o", "out", "--chat", "--system", "Be brief."), "", lambda f: f.rows[0].prompt_length > 8),
}
OF_EACH = {"generate": GENERATE, "chat": CHAT, "batch": BATCH}


@pytest.mark.parametrize(("command", "name"), [(command, name) for command, cases in OF_EACH.items() for name in cases])
def test_what_a_command_has_of_its_own(run: Callable[..., Outcome], command: str, name: str) -> None:
    Path("prompt.txt").write_text("import", encoding="utf-8")
    Path("there").write_text("precious", encoding="utf-8")
    options, stdin, effect = OF_EACH[command][name]
    more = ["prompt.txt"] if command == "batch" else []
    found = run(
        command, FOLDER, *more, "--engine", "stateful", "--arithmetic", "fast", "-n", "6", *options, stdin=stdin
    )
    assert found.code == 0, found.err
    assert effect(found), found


# ---------------------------------------------------------------- what can't be had here


@pytest.mark.parametrize("option", ["--device GPU", "--draft-device GPU"])
def test_devices_that_are_not_here(run: Callable[..., Outcome], option: str) -> None:
    from ovspec.ir.device import list_available_devices

    assert option in NOT_HERE
    if any(name.startswith("GPU") for name, _ in list_available_devices()):
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
    assert (found.code, "run 'ovspec export --trust-remote-code' if you trust the code" in found.err) == (1, True)


# ---------------------------------------------------------------- all of them

OF_TARGET = RUNTIME_OPTIONS.keys() - {"draft_device"}
TESTED: dict[str, set[str]] = {
    **{
        command: {*SHARED, *cases} - {name for name in SHARED if (command, name) in NOT_TAKEN}
        for command, cases in OF_EACH.items()
    },
    "chat": {*SHARED, *CHAT, "web"} - {name for name in SHARED if ("chat", name) in NOT_TAKEN},  # of tests/server/
    "batch": {*SHARED, *BATCH, "ray", "cpus_per_worker", "mixed"},  # tests/batch/test_ray.py
    "inspect": {*OF_TARGET, "verify", "as_json", "report"},  # tests/cli/test_options_of_tools.py
    "perplexity": {*OF_TARGET, "context", "as_json"},
    "verify": {*OF_TARGET, "folder", "as_json"},  # tests/cli/test_verify_command.py
    "tune": {"goal", "device", "as_json", "cache_dir"},
    "export": {*TO_COMPRESSION, *TO_EXPORT, *OTHERS_OF_EXPORT},
    "distill": {*TO_DISTILL},
    "devices": set(),
    "models": {"prune"},  # tests/cli/test_models.py
    "serve": {*SERVING, *LOADING},  # tests/server/test_serve_options.py
    # tests/cli/test_bench.py runs these.
    "bench": {
        *("draft", "prompts", "files", "lookahead", "max_tokens", "temperature", "repeats", "as_json", "weight_format"),
        *RUNTIME_OPTIONS,
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


def test_flags_that_take_a_value_or_none() -> None:
    def fill(*arguments: str) -> list[str]:
        return fill_missing_flag_value([*arguments], "--stats", "short", lambda value: value == "full")

    assert fill() == []
    assert fill("--", "--stats") == ["--", "--stats"]
    assert fill("--stats", "a prompt") == ["--stats=short", "a prompt"]
    assert fill("--stats", "full") == ["--stats", "full"]
