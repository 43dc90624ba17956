"""Variables of chat templates reach the template in every way of generating, or are refused in a sentence."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ovspec
from ovspec.api.comparison import Divergence
from ovspec.api.verify import record_as_json, result_from_json
from ovspec.batch.requests import parse_lines
from ovspec.batch.resumable_run import run_file
from ovspec.cli import cli
from ovspec.cli.compare import print_comparison
from ovspec.params import make_params
from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import ChatTemplate

Load = Callable[..., ovspec.LanguageModel]
SOURCE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if think is defined and not think %}<think></think>{% endif %}{{ tools[0].name if tools }}"
)
CHAT = [{"role": "user", "content": "hi"}]
QUIET: dict[str, Any] = {"think": False}


@pytest.fixture
def lm(load: Load, monkeypatch: pytest.MonkeyPatch) -> ovspec.LanguageModel:
    lm = load()
    monkeypatch.setattr(lm.runtime.prompt_encoder, "chat_format", ChatFormat(ChatTemplate(SOURCE, {})))
    return lm


def prompt_of(lm: ovspec.LanguageModel, result: ovspec.Result) -> str:
    assert result.record
    return str(lm.tokenizer.decode_with_special(result.record.prompt_ids))


def test_every_call_renders_with_them(lm: ovspec.LanguageModel) -> None:
    options: Any = {"max_tokens": 3, "chat_template_kwargs": QUIET}
    stream = lm.stream(CHAT, **options)
    found = [lm.generate(CHAT, **options), stream.result(), *lm.samples([CHAT], **options)[0]]  # type: ignore[list-item]
    for result in found:
        assert prompt_of(lm, result).endswith("assistant\n<think></think>")
        again = json.loads(json.dumps({"text": result.text, "record": record_as_json(result)}))
        again |= {"token_ids": result.token_ids, "finish_reason": result.finish_reason}
        assert again["record"]["options"]["chat_template_kwargs"] == QUIET
        assert lm.verify(result_from_json(again)).ok
    for same in ({"think": True}, {}, None):
        assert prompt_of(lm, lm.generate(CHAT, max_tokens=1, chat_template_kwargs=same)).endswith("assistant\n")
    tools = lm.generate(CHAT, max_tokens=1, chat_template_kwargs={"tools": [{"name": "find"}]})
    assert prompt_of(lm, tools).endswith("find")


def test_what_no_template_gets_is_refused(lm: ovspec.LanguageModel) -> None:
    cases: list[tuple[Any, Any, str]] = [
        ("def f(", QUIET, "`chat_template_kwargs` needs chat messages"),
        ([5, 6], QUIET, "`chat_template_kwargs` needs chat messages"),
        ([*CHAT, None], None, "messages: None is not a message; append"),
        (CHAT, "think", "`chat_template_kwargs` must be an object, not 'think'"),
        (CHAT, {1: False}, "must be an object, not {1: False}"),
        (CHAT, {"thnk": False}, r"doesn't use the variable thnk; leave thnk out \(the template uses think, tools\)"),
        (CHAT, {"think": {1}}, "JSON"),
    ]
    for prompt, variables, sentence in cases:
        with pytest.raises(ovspec.OvspecError, match=sentence):
            lm.generate(prompt, max_tokens=1, chat_template_kwargs=variables)


def test_a_session_renders_its_chat_with_them(lm: ovspec.LanguageModel, tmp_path: Path) -> None:
    with lm.session(chat_template_kwargs=QUIET) as session:
        with pytest.raises(ovspec.OvspecError, match="`chat_template_kwargs` needs chat messages"):
            session.append("a text")
        session.append(CHAT)
        assert session.tokens == lm.runtime.prompt_encoder.encode(CHAT, template_variables=QUIET).tolist()
        with pytest.raises(ovspec.OvspecError, match=r"can't be set when a session generates, .* before you append"):
            session.generate(max_tokens=2, chat_template_kwargs=QUIET)
        session.generate(max_tokens=2)
        session.save(tmp_path / "chat")
        with session.fork() as other:
            assert other.chat_template_kwargs == QUIET
        session.append(" more")  # continues the answer
        session.chat_template_kwargs = None
        session.append({"role": "user", "content": "go on"})
        assert session.tokens == lm.runtime.prompt_encoder.encode(session.messages).tolist()
    with lm.session() as session:
        session.load(tmp_path / "chat")
        session.append({"role": "user", "content": "go on"})
        assert session.chat_template_kwargs == QUIET
        assert session.text.endswith("<think></think>")
        session.reset()
        session.append(CHAT)
        assert session.text.endswith("<think></think>"), "a reset forgets the text alone"
        session.chat_template_kwargs = None
        session.save(tmp_path / "chat")
    with lm.session(chat_template_kwargs=QUIET) as session:
        session.load(tmp_path / "chat")
        assert session.chat_template_kwargs is None


def test_a_chat_with_calls_is_saved(lm: ovspec.LanguageModel, tmp_path: Path) -> None:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": {}}}]}
    with lm.session() as session, lm.session() as other:
        session.append([*CHAT, called, {"role": "tool", "content": "found"}])
        session.save(tmp_path / "chat")
        other.load(tmp_path / "chat")
        assert other.messages == session.messages


def test_a_batch_takes_them_for_all_lines_and_for_one(lm: ovspec.LanguageModel, tmp_path: Path) -> None:
    lines = [{"messages": CHAT}, {"messages": CHAT, "chat_template_kwargs": {"think": True}}, "def f("]
    lines += [{"messages": CHAT, "chat_template_kwargs": "think"}]
    requests = parse_lines("\n".join(map(json.dumps, lines)))
    progress = run_file(lm, requests, tmp_path / "out", make_params({"max_tokens": 1, "chat_template_kwargs": QUIET}))
    first, second, text, wrong = map(json.loads, (tmp_path / "out").read_text("utf-8").splitlines())
    assert progress.failed == 2
    assert first["prompt_tokens"] > second["prompt_tokens"]
    assert "`chat_template_kwargs` needs chat messages" in text["error"]
    assert "must be an object" in wrong["error"]


def test_a_comparison_renders_with_them(lm: ovspec.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("ovspec.cli.compare.iterate_turns", lambda: range(1))
    monkeypatch.setattr("ovspec.cli.compare.print_comparison_json", lambda *_: shown.append(_))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert print_comparison(lm, CHAT, make_params({"max_tokens": 2, "chat_template_kwargs": QUIET}), None, True)
    assert shown
    assert not isinstance(shown[0][1].divergence, Divergence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("chat", "--chat-template-kwargs", "[1]"),
            "'[1]' is neither a file nor a JSON object, such as '{\"enable_thinking\": false}'.",
        ),
        (("chat", "--chat-template-kwargs", "think=no"), "is neither a file nor a JSON object"),
    ],
)
def test_what_the_commands_refuse(arguments: tuple[str, ...], sentence: str) -> None:
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())


def test_several_are_merged() -> None:
    from ovspec.cli.generate import generate

    given = ["--chat-template-kwargs", '{"a": 1, "b": [2]}', "--chat-template-kwargs", '{"a": null}', "x"]
    assert generate.make_context("generate", given).params["chat_template_kwargs"] == {"a": None, "b": [2]}
