"""The commands, run as a user runs them, and in this process where a process of their own would show nothing more."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands_here import Command, commands_here
from conftest import PROMPTS, ROOT, Reference

from ovspec import OvspecError
from ovspec.api.comparison import iterate_turns
from ovspec.cli import compare as comparing

HEAVY = ("openvino", "torch", "transformers", "numpy")


@pytest.fixture(scope="module")
def environment(command_environment: dict[str, str]) -> dict[str, str]:
    return command_environment


@pytest.fixture
def ovspec(cache_dir: Path) -> Iterator[Command]:
    yield from commands_here(cache_dir)


F32 = ("--precision", "f32")


def test_help_is_light_and_quick() -> None:
    code = f"""
import sys, contextlib, io
sys.argv = ["ovspec", "--help"]
from ovspec.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    times = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ovspec", "--help"], capture_output=True, check=True)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.25


def test_progress_is_a_line_a_step_and_moves_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ovspec.base import progress

    assert progress.SHOW_AFTER_SECONDS == 1.0
    monkeypatch.setattr(progress, "SHOW_AFTER_SECONDS", 0.3)
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        seconds = 1.0 if terminal else 0.5
        with progress.show_step("converting", keep_line=True) as converting:
            time.sleep(seconds)
            converting.result = "9 MB"
        with progress.show_step("loading"):
            pass
        with pytest.raises(KeyboardInterrupt), progress.show_step("never ends", keep_line=True):
            raise KeyboardInterrupt
        progress.print_note("done")
        told = capsys.readouterr().err
        took = re.search(r"converting: (\d+\.\d) s, 9 MB\n", told)
        assert took and seconds <= float(took[1]) < seconds + 1
        assert told.endswith("done\n")
        assert "never ends" not in told
        assert "loading" not in told, "it took no time"
        assert ("\rconverting … 1 s" in told or "\rconverting … 2 s" in told) is terminal
        assert ("converting …\n" in told) is not terminal
        assert ("\r" in told) is terminal


def test_the_text_of_a_step_may_change(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from ovspec.base import progress

    monkeypatch.setattr(progress, "SHOW_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(progress, "REPEAT_AFTER_SECONDS", 0.1)
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        seconds = 0.7 if terminal else 0.35
        with progress.show_step("training", keep_line=True) as training:
            time.sleep(seconds)
            training.text = "training, 12 tokens/s"
            time.sleep(seconds)
        told = re.split(r"[\r\n]+", capsys.readouterr().err.replace("\x1b[K", "").strip("\r\n"))
        lines = [re.sub(r"(?<=…) \d s $|: \d\.\d s$", "", line) for line in told]
        assert list(dict.fromkeys(lines)) == ["training …", "training, 12 tokens/s …", "training, 12 tokens/s"]
        assert terminal or len(lines) == 3, "a text that hasn't changed is not shown again"


@pytest.mark.parametrize(("error", "code"), [(OvspecError, 1), (ValueError, 130)])
def test_errors_that_follow_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[Exception], code: int
) -> None:
    """A save that fails is said; an error that only the interruption caused isn't."""
    from ovspec import cli

    def work(**_: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise error("not saved") from None

    monkeypatch.setattr(cli.cli, "main", work)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert ("not saved" in capsys.readouterr().err) == (code == 1)


def test_every_command_shows_an_example(ovspec) -> None:
    for command in ("generate", "distill", "export", "devices", "inspect", "perplexity", "tune"):
        assert "Example" in ovspec(command, "--help").stdout


def test_the_help_leaves_out_what_is_refused(ovspec) -> None:
    """A refusal names the option all the same (test_every_option.py)."""
    shown = {command: ovspec(command, "--help").stdout for command in ("generate", "chat", "batch", "inspect")}
    for option in ("--samples", "--logprobs", "--heal"):
        assert option in shown["generate"]
        assert option not in shown["chat"]
    assert "--draft-device" not in shown["inspect"]
    assert "[default: 1024]" in " ".join(shown["chat"].split())


def test_the_references_in_the_docs_are_current() -> None:
    """In a process of its own, because texts of options may depend on what other tests have left."""
    command = [sys.executable, str(ROOT / "scripts" / "reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_text_on_stdout_statistics_on_stderr(ovspec, ovspec_command: Command, pair: Path, reference: Reference) -> None:
    expected = reference.tokenizer.decode(reference.generate(PROMPTS[0], 20), skip_special_tokens=True)
    plain = ovspec_command("generate", pair, "-n", 20, *F32, stdin=PROMPTS[0])
    assert (plain.stdout, plain.stderr, plain.returncode) == (expected + "\n", "", 0)
    drafted = ovspec("generate", pair, PROMPTS[0], "--draft", "--stats", "-n", 20, *F32)
    assert drafted.stdout == expected + "\n"
    prompt, speed = r"prompt \d+ tokens in \d+\.\d\d s", r"text 20 tokens at [\d.]+ tokens/s"
    accepted = r"(accepted \d+ of \d+ proposed \(\d+ %\)|nothing proposed)"
    assert re.fullmatch(f"{prompt}; {speed}; {accepted}", drafted.stderr.strip())
    full = ovspec("generate", pair, PROMPTS[0], "--draft", "--lookahead", 2, "--stats", "full", "-n", 20, *F32)
    assert full.stdout == expected + "\n"
    names = [line.strip().split(":")[0] for line in full.stderr.splitlines()]
    assert names[:5] == ["prompt", "text", "rounds", "speculation", "accepted by position in the proposal"]
    assert names[5:] == ["conditional acceptance", "time", "device", "arithmetic"]


def test_stats_takes_no_prompt_for_its_value(ovspec, pair: Path) -> None:
    """'--stats' may stand before the prompt or the folder, which it must not take."""
    expected = ovspec("generate", pair, "import", "-n", 4, *F32).stdout
    for arguments in ((pair, "--stats", "import"), ("--stats", pair, "import"), (pair, "import", "--stats=full")):
        done = ovspec("generate", *arguments, "-n", 4, *F32)
        assert done.stdout == expected
        assert "tokens/s" in done.stderr
    after_dashes = ovspec("generate", pair, "-n", 4, *F32, "--", "--stats")
    assert after_dashes.returncode == 0
    assert "tokens/s" not in after_dashes.stderr


@pytest.mark.parametrize("way", ["argument", "option", "file", "windows", "stdin", "dash", "as argument", "ids"])
def test_ways_to_give_the_prompt(ovspec, pair: Path, tmp_path: Path, reference: Reference, way: str) -> None:
    file = tmp_path / "prompt.txt"
    text = PROMPTS[1] + {"file": "\n", "windows": "\r\n", "stdin": "\n", "dash": "\r\n", "as argument": "\n"}.get(
        way, ""
    )
    file.write_bytes(text.encode())
    ids = " ".join(map(str, reference.tokenizer(PROMPTS[1])["input_ids"]))
    arguments, stdin = {
        "argument": ([PROMPTS[1]], ""),
        "option": (["-p", PROMPTS[1]], ""),
        "file": (["-f", file], ""),
        "windows": (["-f", file], ""),
        "stdin": ([], text),
        "dash": (["-f", "-"], text),
        "as argument": (["-"], text),
        "ids": (["--token-ids", ids], ""),
    }[way]
    done = ovspec("generate", pair, *arguments, "--json", "-n", 8, *F32, stdin=stdin)
    result = json.loads(done.stdout)
    assert result["token_ids"] == reference.generate(PROMPTS[1], 8)
    assert result["finish_reason"] in ("length", "eos")
    assert result["stats"]["prompt_tokens"] == len(ids.split())


def test_logprobs_name_their_tokens(ovspec, pair: Path, reference: Reference) -> None:
    done = json.loads(ovspec("generate", pair, "import os", "--json", "-n", 6, "--logprobs", 2, *F32).stdout)
    assert "".join(entry["text"] for entry in done["logprobs"]) == done["text"]
    for entry, token in zip(done["logprobs"], done["token_ids"], strict=True):
        assert (entry["token_id"], entry["text"]) == (token, reference.tokenizer.decode([token]))
        assert [text for _, _, text in entry["top"]] == [reference.tokenizer.decode([each[0]]) for each in entry["top"]]
        assert entry["top"][0][:2] == [token, entry["logprob"]]


def test_json_has_every_statistic(ovspec, pair: Path) -> None:
    done = ovspec("generate", pair, PROMPTS[2], "--draft", "--lookahead", 3, "--json", "-n", 24, "--ignore-eos", *F32)
    stats = json.loads(done.stdout)["stats"]
    times, counts = {"ttft_ms", "tpot_ms", "target_ms", "draft_ms", "other_ms"}, {"rounds", "proposed", "accepted"}
    tokens = {"prompt_tokens", "cached_tokens", "generated_tokens", "accepted_by_position"}
    names = times | counts | tokens | {"rollback", "device", "draft_device"}
    assert names <= set(stats)
    assert stats["generated_tokens"] == 24
    assert stats["accepted"] == sum(stats["accepted_by_position"]) <= stats["proposed"] <= 3 * stats["rounds"]
    assert len(stats["accepted_by_position"]) <= 3
    assert (stats["device"], stats["draft_device"]) == ("CPU", "CPU")


@pytest.mark.parametrize("engine", ["stateful", "paged"])
def test_either_engine_and_it_is_said(ovspec, pair: Path, reference: Reference, engine: str) -> None:
    done = ovspec("generate", pair, PROMPTS[0], "--engine", engine, "--stats", "full", "-n", 20, *F32)
    assert done.stdout == reference.tokenizer.decode(reference.generate(PROMPTS[0], 20)) + "\n"
    assert f"engine {engine} (as requested)" in done.stderr
    assert "profile: none" in done.stderr
    found = json.loads(ovspec("inspect", pair, "--engine", engine, "--json", *F32).stdout)
    assert found["target"]["engine"] == found["draft"]["engine"] == engine
    assert found["target"]["rollback"] == "mask"


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time no more turns than there must be."""
    monkeypatch.setattr(comparing, "iterate_turns", lambda: iterate_turns(0.0))


@pytest.mark.usefixtures("hurried")
def test_compare(ovspec, pair: Path) -> None:
    done = ovspec("generate", pair, PROMPTS[3], "--compare", "--json", "-n", 40, "--lookahead", 4, *F32)
    report = json.loads(done.stdout)
    assert (done.returncode, report["equal"]) == (0, True)
    assert not {"top2_gap", "part"} & set(report)
    assert report["plain"]["text"] == report["speculative"]["text"]
    assert (report["plain"]["stats"]["proposed"], report["speculative"]["stats"]["proposed"] > 0) == (0, True)
    ratio = report["plain_ms_per_token"] / report["speculative_ms_per_token"]
    assert report["speedup"] == pytest.approx(ratio, abs=1e-2)
    assert len(report["speedups"]) >= 4
    assert report["speedups"] == sorted(report["speedups"])
    assert report["speedups"][0] <= report["speedup"] <= report["speedups"][-1]


@pytest.mark.usefixtures("hurried")
def test_compare_tells_both_texts_apart_on_a_pipe(ovspec, pair: Path, reference: Reference) -> None:
    text = reference.tokenizer.decode(reference.generate(PROMPTS[3], 40), skip_special_tokens=True)
    shown = ovspec("generate", pair, PROMPTS[3], "--compare", "-n", 40, "--lookahead", 4, *F32)
    assert shown.stdout == f"==> plain <==\n{text}\n==> speculative <==\n{text}\n"
    lines = shown.stderr.splitlines()
    assert re.fullmatch(r"plain        [\d.]+ tokens/s", lines[0])
    accepted = r"accepted \d+ of \d+ proposed \(\d+ %\), [\d.]+ tokens per round"
    assert re.fullmatch(rf"speculative  [\d.]+ tokens/s; {accepted}", lines[1])
    assert lines[2] == "both texts are identical: 40 tokens"
    assert re.match(r"(speed-up|no clear speed-up:|no speed-up:) ", lines[3])
    assert re.search(r"[\d.]+ to [\d.]+, \d+ turns", lines[3])


@pytest.mark.usefixtures("hurried")
def test_compare_claims_nothing_where_nothing_was_proposed(ovspec, pair: Path) -> None:
    """A text of two tokens leaves no room for a proposal, whatever the clock says."""
    done = ovspec("generate", pair, PROMPTS[3], "--compare", "-n", 2, *F32)
    last = done.stderr.splitlines()[-1]
    assert last == "no speed-up: drafting doesn't pay for this text (nothing was proposed)"
    report = json.loads(ovspec("generate", pair, PROMPTS[3], "--compare", "--json", "-n", 2, *F32).stdout)
    assert report["speedup"] is None or report["speedup"] < 1


def test_chat_renders_the_template(ovspec, pair: Path, reference: Reference) -> None:
    done = ovspec("generate", pair, "hi", "--chat", "--system", "Be brief.", "--json", "-n", 4, *F32)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    prompt = reference.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    result = json.loads(done.stdout)
    assert result["stats"]["prompt_tokens"] == len(reference.tokenizer(prompt)["input_ids"])
    assert result["token_ids"] == reference.generate(prompt, 4)


def test_prefill_begins_the_answer(ovspec, pair: Path, reference: Reference) -> None:
    done = ovspec("generate", pair, "hi", "--chat", "--prefill", "Well, it", "--json", "-n", 4, *F32)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, it"}]
    prompt = reference.tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    result = json.loads(done.stdout)
    assert result["stats"]["prompt_tokens"] == len(reference.tokenizer(prompt)["input_ids"])
    assert result["token_ids"] == reference.generate(prompt, 4)


def test_the_embedded_pair_is_the_default(ovspec) -> None:
    done = ovspec("generate", "def fib(", "--draft", "--engine", "stateful", "--arithmetic", "fast", "--json", "-n", 8)
    assert json.loads(done.stdout)["stats"]["generated_tokens"] <= 8


def test_a_bare_draft_option_may_stand_before_the_prompt(ovspec, pair: Path) -> None:
    options = ("--lookahead", 2, "--json", "-n", 12, *F32)
    before = json.loads(ovspec("generate", pair, "--draft", "import os\n", *options).stdout)
    after = json.loads(ovspec("generate", pair, "import os\n", *options, "--draft").stdout)
    named = json.loads(ovspec("generate", pair, "import os\n", *options, "--draft", pair / "draft").stdout)
    for result in (before, after, named):
        assert result["stats"]["proposed"] > 0
        assert result["token_ids"] == after["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "models/typo", "hi"], 1, "no such folder"),
        (["generate", "models/typo"], 1, "no such folder"),
        (["inspect", str(ROOT / "models" / "demo-hf" / "target")], 1, "run 'ovspec export"),
        (["generate", str(ROOT / "tests"), "hi"], 1, "no openvino_model.xml"),
        (["generate", "PAIR", "a", "b"], 2, "put the prompt in quotes"),
        (["generate", "PAIR", "hi", "-p", "ho"], 2, "Too many prompts"),
        (["generate", "PAIR", "hi", "--draft", "models/typo"], 1, "no such folder"),
        (["generate", "PAIR", "hi", "--draft", "./typo"], 2, "no such folder"),
        (["generate", "model.gguf"], 1, "no such folder"),
        (
            ["generate", "hi", "--weight-format", "int8"],
            1,
            "already exported to an OpenVINO IR; leave --weight-format out.",
        ),
        (
            ["chat", "PAIR", "--weight-format", "int8"],
            1,
            "already exported to an OpenVINO IR; leave --weight-format out.",
        ),
        (["models", "remove"], 2, "to delete models, run: ovspec models rm NAME..."),
        (["models", "rm"], 2, "Missing names; give the models to delete"),
        (["models", "rm", "a", "--prune", "1"], 2, "--prune can't be combined with names"),
        (["models", "rm", "a-name"], 1, "a-name: not a model in the cache; run 'ovspec models' to list the models."),
        (["generate", "hi", "--draft", "lookup,none"], 1, "none: no such folder"),
        (["generate", "PAIR", "hi", "--cache-dir", str(ROOT / "README.md")], 2, "is a file; give a folder"),
        (
            ["generate", "PAIR", "hi", "--draft", "none", "--lookahead", "3"],
            2,
            "--lookahead needs a source of proposals",
        ),
        (["generate", "PAIR", "hi", "--compare", "--draft", "none"], 2, "--compare needs a draft"),
        (["generate", "PAIR", "hi", "--system", "x"], 2, "--system needs --chat"),
        (["generate", "PAIR", "hi", "--prefill", "x"], 2, "--prefill needs --chat"),
        (["generate", "PAIR", "hi", "--draft-device", "CPU"], 1, "--draft-device needs a draft model"),
        (["generate", "PAIR", "--token-ids", "1 x"], 2, "not a list of numbers"),
        (["generate", "PAIR", "--token-ids", "99999", *F32], 1, "not in the vocabulary"),
        (["generate", "PAIR", "-f", "nowhere.txt"], 2, "No such file"),
        (["generate", "PAIR"], 2, "stdin: empty; give a prompt, or --prompt '' to generate without a prompt."),
        (["generate", "PAIR", "-f", "EMPTY"], 2, "empty.txt: empty; give a prompt"),
        (["generate", "PAIR", "hi", "--property", "x"], 2, "is not KEY=VALUE"),
        (["generate", "PAIR", "hi", "--device", "NPU9"], 1, "no such device"),
        (
            ["generate", "PAIR", "hi", "--json-schema", "[]"],
            1,
            "at the top: a schema must be an object.",
        ),
        (["generate", "PAIR", "--token-ids", "5 " * 2048, "-n", "1", *F32], 1, "context is 2048 tokens; shorten"),
        (["generate", "PAIR", "hi", "-n", "-2"], 2, "--max-tokens is -2; it must be 0 or more, or -1 for"),
        (["generate", "PAIR", "hi", "-n", "0", "--compare"], 2, "--compare needs a --max-tokens of at least 1, or -1"),
        (["chat", "PAIR", "-n", "0"], 2, "A chat needs a --max-tokens of at least 1, or -1: 0 only runs prefill."),
        (["chat", "PAIR", "--min-tokens", "2000"], 2, "--min-tokens is 2000, which is more than --max-tokens, 1024."),
        (["batch", "PAIR", "EMPTY", "-o", "OUT", "-n", "0"], 2, "A batch needs a --max-tokens of at least 1"),
        (["serve", "PAIR", "--max-tokens", "0"], 2, "--max-tokens is 0; it must be at least 1, or -1"),
        (["generate", "PAIR", "-"], 2, "stdin: empty; give a prompt"),
        (["generate", "PAIR", "-", "-p", "hi"], 2, "Too many prompts"),
        (["perplexity", "PAIR", "-"], 2, "stdin: contains no text; give text."),
        (["verify", "-"], 2, "stdin: contains no text; give text."),
        (["bench", "PAIR", "--prompt-file", "-"], 2, "stdin: contains no text; give text."),
        (["generate", "PAIR", "hi", "--chat-template", "chatml"], 2, "--chat-template needs --chat."),
        (["generate", "my-pear", "-p", "hi"], 1, "no such folder"),
        (["export", "PAIR", "-o", "OUT", "--group-size", "64"], 1, "works only with --weight-format int4"),
        (["inspect", str(ROOT / "README.md")], 1, "is a file"),
        (["inspect", str(ROOT / "tests")], 1, "no openvino_model.xml"),
        (["tune", str(ROOT / "README.md")], 1, "is a file"),
        (["tune", "my-pear"], 1, "no such folder"),
        (["export", "nowhere/at/all", "-o", "OUT"], 1, "no such file or folder"),
        (["export", "nowhere/at/all", "-o", "PAIR"], 1, "already exists; choose another --output, or add --overwrite."),
        (["export", "PAIR", "-o", "OUT", "--draft-weight-format", "int8"], 2, "needs --draft"),
    ],
)
def test_misuses_get_one_sentence(
    ovspec, pair: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "empty.txt").write_bytes(b"\r\n")
    places = {"PAIR": str(pair), "OUT": str(tmp_path / "out"), "EMPTY": str(tmp_path / "empty.txt")}
    done = ovspec(*[places.get(argument, argument) for argument in arguments])
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("Error: ")]) == 1


def test_nothing_is_read_where_options_are_wrong(pair: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "ovspec", "generate", str(pair), "--draft", "models/typo"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stderr
        try:
            assert b"no such folder" in process.stderr.read()  # while stdin is still open
        finally:
            process.kill()


# Says at once what a command begins.
AT_ONCE = """
from ovspec.__main__ import main
from ovspec.base import progress
assert progress.SHOW_AFTER_SECONDS > 0
progress.SHOW_AFTER_SECONDS = 0.0
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows sends Ctrl-C to a whole console")
@pytest.mark.parametrize("as_json", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ctrl_c_prints_what_there_is(pair: Path, environment: dict[str, str], as_json: bool) -> None:
    options = ["--ignore-eos", "-n", "1900", "--draft", "none", "--stats", "full", *["--json"] * as_json, *F32]
    process = subprocess.Popen(
        [sys.executable, "-c", AT_ONCE, "generate", str(pair), PROMPTS[4], *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        encoding="utf-8",
    )
    assert process.stdout and process.stderr
    if as_json:
        assert "generating …\n" in iter(process.stderr.readline, "")
    else:
        assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "ended by cancelled" in err
    assert "Traceback" not in err
    if as_json:
        assert json.loads(out)["finish_reason"] == "cancelled"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no broken pipes")
def test_a_reader_that_leaves_early_is_no_error(pair: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "ovspec", "generate", str(pair), PROMPTS[4], "--ignore-eos", "-n", "500", *F32]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout
    assert process.stderr
    process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    process.wait(timeout=30)
    assert err.decode() in ("", f"{pair}: loading …\n"), "a slow machine says that it loads"
