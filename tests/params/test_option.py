"""Options are declared once: one entry adds an option to Python, the command line, batch files and the server."""

from __future__ import annotations

import inspect
import pydoc
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

import ovspec
from ovspec.cli import COMMANDS, cli
from ovspec.drafting.choice import DraftChoice, parse_draft
from ovspec.params import Params, SamplingParams, make_params
from ovspec.params.generation import GENERATE_OPTIONS, GenerateOptions
from ovspec.params.loading import LOAD_OPTIONS
from ovspec.params.sampling import SAMPLING_OPTIONS
from ovspec.params.values import parse_json_object

ENTRY = """
    loudness: float = option(
        "How loud the text is.", default=0.5, limits=NumberLimits(0, 1, "from 0 to 1"), aliases=("volume",)
    )
"""
CHECKS = """
import pytest, click, json
from click.testing import CliRunner
import ovspec, ovspec.params
from ovspec.cli import cli
from ovspec.cli.generate import generate
from ovspec.cli.options import split_load_and_generate_options
from ovspec.batch.requests import parse_line
from ovspec.protocols.chat.bodies import CompletionBody
from ovspec.protocols.chat.request import read_chat_or_completion
from ovspec.protocols.parsing import validate_body
from ovspec.params.generation import DEFAULT_PARAMS

assert "TMP" in ovspec.__file__
params = ovspec.SamplingParams(loudness=0.7)
assert params.loudness == 0.7 and ovspec.SamplingParams().loudness == 0.5
assert "loudness: How loud the text is." in ovspec.SamplingParams.__doc__
assert ovspec.params.make_params({"loudness": 1}).loudness == 1
for wrong in (2.0, "loud"):
    with pytest.raises(ovspec.OvspecError, match="`loudness` .*must be"):
        ovspec.params.make_params({"loudness": wrong})
for command in ("generate", "chat", "batch"):
    assert "--loudness FLOAT" in CliRunner().invoke(cli, [command, "--help"]).output
context = generate.make_context("generate", ["--loudness", "0.7", "x"])
params = split_load_and_generate_options({"loudness": context.params["loudness"]})[1]
assert params.recorded_options() == {"loudness": 0.7}
assert CliRunner().invoke(cli, ["generate", "x", "--loudness", "2"]).exit_code == 2
for name in ("loudness", "volume"):
    line = parse_line(json.dumps({"prompt": "a", name: 0.7}), "1")
    assert line.text_request.overrides.apply_to(DEFAULT_PARAMS, "batch_line").recorded_options() == {"loudness": 0.7}
    for wrong, told in (("loud", "loudness must be a number"), (2, "loudness is 2; it must be from 0 to 1")):
        error = parse_line(json.dumps({"prompt": "a", name: wrong}), "1").error
        assert told.replace("loudness", name) in error
    body = validate_body({"prompt": "a", name: 0.7}, CompletionBody)  # the server's
    assert read_chat_or_completion(body, "completion").overrides.apply_to(DEFAULT_PARAMS, "completion").loudness == 0.7
    assert CompletionBody.model_json_schema()["properties"][name]["maximum"] == 1
"""


def test_a_new_option_is_one_entry(tmp_path: Path) -> None:
    """Add an entry to the options table in a copy of the package, and change nothing else."""
    shutil.copytree(ROOT / "ovspec", tmp_path / "ovspec", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "ovspec" / "params" / "sampling.py"
    text = file.read_text(encoding="utf-8")
    _, place, rest = text.partition("class SamplingParams:\n")
    place += rest.partition("\n")[0] + "\n"
    file.write_text(text.replace(place, place + ENTRY, 1), encoding="utf-8")
    checks = CHECKS.replace("TMP", tmp_path.as_posix())
    done = subprocess.run([sys.executable, "-c", checks], cwd=tmp_path, env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def environment() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_types_and_ranges_are_checked_by_the_declaration() -> None:
    for options, message in (
        ({"max_tokens": 1.5}, "`max_tokens` must be a whole number, not 1.5"),
        ({"max_tokens": True}, "`max_tokens` must be a whole number, not True"),
        ({"stop": 5}, "`stop` must be a string or a list of strings, not 5"),
        ({"stop_ids": ["x"]}, "`stop_ids` must be a list of whole numbers, not \\['x'\\]"),
        ({"accept": "maybe"}, "`accept` is 'maybe'; it must be one of compare, rejection"),
        ({"lookahead": "few"}, 'must be a whole number or "auto", not .few'),
        ({"heal": 5}, "`heal` must be true or false, not 5"),
        ({"sampler": 5}, "`sampler` must be a function, not 5"),
        ({"sampler_options": 5}, "`sampler_options` must be an object, not 5"),
        ({"sampling": 5}, "`sampling` must be SamplingParams, not 5"),
        ({"batch_size": 0}, "`batch_size` is 0; it must be at least 1"),
        ({"temperature": float("inf")}, "`temperature` is inf; it must be 0 \\(greedy\\) or more"),
    ):
        with pytest.raises(ovspec.OvspecError, match=message):
            make_params(options)
    assert make_params({"temperature": 1, "sampling": SamplingParams(n=2)}) == Params(temperature=1, n=2)


def test_options_that_there_are_not() -> None:
    with pytest.raises(TypeError, match="unknown option 'temprature'; did you mean temperature"):
        make_params({"temprature": 1})
    with pytest.raises(TypeError, match="unknown option 'devise'; did you mean device"):
        ovspec.load(devise="CPU")  # type: ignore[call-arg]
    with pytest.raises(ovspec.OvspecError, match="`engine` is 'fast'; it must be one of auto, stateful, paged"):
        ovspec.load(engine="fast")  # type: ignore[arg-type]


def test_python_shows_its_names_and_options() -> None:
    assert dir(ovspec) == sorted(ovspec.__all__)
    for function, table in (
        (ovspec.LanguageModel.generate, GENERATE_OPTIONS),
        (ovspec.LanguageModel.samples, GENERATE_OPTIONS),
        (ovspec.LanguageModel.stream, GENERATE_OPTIONS),
        (ovspec.Session.generate, GENERATE_OPTIONS),
        (ovspec.Session.stream, GENERATE_OPTIONS),
        (ovspec.load, LOAD_OPTIONS),
    ):
        shown = inspect.signature(function).parameters
        for name, option in table.items():
            assert (shown[name].annotation, shown[name].default) == (option.value_type, option.default)
        assert not any(each.kind is each.VAR_KEYWORD for each in shown.values())
    assert "temperature: float = 0.0" in pydoc.render_doc(ovspec.LanguageModel.generate)


def test_a_model_says_what_it_is(load: Callable[..., ovspec.LanguageModel], pair: Path) -> None:
    class Mine(ovspec.Drafter):
        pass

    lm = load(draft="lookup,draft")
    settings = f"{str(pair)!r}, precision='f32', device='CPU', engine='paged'"
    both = f"lookup,{pair / 'draft'}"
    assert repr(lm) == f"LanguageModel({settings}, draft={both!r})"
    for draft, name in ((None, "none"), (Mine, "Mine"), (Mine(), "Mine"), (["lookup", Mine], "lookup,Mine")):
        assert repr(lm.with_drafters(parse_draft(draft))) == f"LanguageModel({settings}, draft={name!r})"


def test_every_option_is_documented() -> None:
    for made, table in (
        (SamplingParams, SAMPLING_OPTIONS),
        (GenerateOptions, GENERATE_OPTIONS),
        (ovspec.load, LOAD_OPTIONS),
    ):
        for name, option in table.items():
            assert f"{name}: " in str(made.__doc__)
            assert option.help.endswith(".")


def test_what_the_group_says_is_what_a_command_says() -> None:
    """``ovspec --help`` imports no command, so the sentences it prints are kept in a table."""
    context: Any = None
    assert set(COMMANDS) == {file.stem for file in (ROOT / "ovspec" / "cli").glob("*.py")} - {
        *("__init__", "compare", "loading", "options", "output", "path_type")
    }
    for name, sentence in COMMANDS.items():
        command = cli.get_command(context, name)
        assert command
        assert command.help
        said = command.help.replace(" (by default the embedded demo pair)", "").split("\n\n")[0].replace("\n", " ")
        assert said.startswith(sentence.removesuffix(".").removesuffix(", and use them")), name


def test_a_draft_is_read_once() -> None:
    choice = parse_draft("lookup,draft")
    assert choice == DraftChoice(lookup=True, model="draft")
    assert parse_draft(choice) is choice
    assert parse_draft(DraftChoice()) is None
    assert parse_draft([Path("x")]) == DraftChoice(model=Path("x"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 1.1, "temperature": 1.0}, "`top_p` is 1.1; it must be above 0 and at most 1"),
        ({"top_p": 0, "temperature": 1.0}, "`top_p` is 0; it must be above 0 and at most 1"),
        ({"n": 10_001, "temperature": 1.0}, "`n` is 10001; it must be at least 1 and at most 10,000"),
        ({"max_tokens": -2}, "`max_tokens` is -2; it must be 0 or more, or -1"),
        ({"temperature": True}, "`temperature` must be a number, not True"),
        ({"top_p": 0.9}, "`top_p` needs a `temperature` above 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "`min_tokens` is 9, which is more than `max_tokens`, 8"),
        ({"tools": [{"name": "f"}], "ignore_eos": True}, "`tools` can't be combined with `ignore_eos`"),
        ({"regex": "a", "ignore_eos": True}, "`regex` can't be combined with `ignore_eos`"),
        ({"regex": "a", "choice": ["b"]}, "`regex` and `choice` can't be combined"),
        ({"json_schema": {}, "retries": 1, "json_schema_mode": "checked"}, "`retries` needs a `temperature` above 0"),
        ({"sampler": len, "temperature": 1.0}, "`sampler` can't be combined with `temperature`"),
    ],
)
def test_values_out_of_range_and_options_that_exclude_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ovspec.OvspecError, match=re.escape(message)):
        make_params(options)


def test_the_ends_of_ranges_are_in_them() -> None:
    for options in ({"top_p": 1, "temperature": 1}, {"max_tokens": -1}, {"max_tokens": 1}, {"n": 10_000}):
        params = make_params(options)
        assert {name: getattr(params, name) for name in options} == options


def test_objects_come_from_files_too(tmp_path: Path) -> None:
    """Shells differ in their quotes."""
    (tmp_path / "given.json").write_text('{"a": 1}\r\n', encoding="utf-8-sig")
    assert parse_json_object(str(tmp_path / "given.json")) == parse_json_object('{"a": 1}') == {"a": 1}
    for wrong in ("[1]", str(tmp_path / "nowhere.json"), "{'a': 1}"):
        with pytest.raises(ValueError, match="neither a file nor a JSON object"):
            parse_json_object(wrong)
