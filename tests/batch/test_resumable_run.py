"""``ovspec batch``: its input and output, and that no request is lost or run twice."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from clients import type_of
from commands_here import Command, commands_here
from conftest import PROMPTS, ROOT, Reference

import ovspec
from ovspec.api.verify import result_from_json
from ovspec.batch.partial_results import PartialResults, result_fingerprint
from ovspec.batch.requests import make_prompt_request, parse_line, read_requests, to_chat_request
from ovspec.batch.resumable_run import make_run_identity, run_file
from ovspec.cli.batch import BatchProgressPrinter
from ovspec.params import make_params
from ovspec.params.generation import GENERATE_OPTIONS

DEMO = ROOT / "models" / "demo"
COMPLETION, CHAT_COMPLETION = "openai.types:Completion", "openai.types.chat:ChatCompletion"


@pytest.fixture(scope="module")
def lm(cache_dir: Path) -> ovspec.LanguageModel:
    return ovspec.load(DEMO, "lookup,draft", precision="f32", cache_dir=cache_dir)


def write_lines(file: Path, lines: list[Any]) -> Path:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return file


def read_lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def run(lm: ovspec.LanguageModel, tmp_path: Path, lines: list[Any], **options: Any) -> list[Any]:
    tmp_path.mkdir(exist_ok=True)
    file, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    run_file(lm, read_requests(file), output, make_params(options or {"max_tokens": 12}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    return read_lines(output)


def test_greedy_texts_of_a_prompt_are_all_the_same(lm: ovspec.LanguageModel, tmp_path: Path) -> None:
    [line] = run(lm, tmp_path, [{"prompt": PROMPTS[0], "n": 2}], max_tokens=5)
    assert [each["text"] for each in line["samples"]] == [lm.generate(PROMPTS[0], max_tokens=5).text] * 2


def test_a_line_may_ask_for_fewer_tokens_than_the_model_recommends(
    with_generation_config: Callable[[dict[str, Any]], Path], cache_dir: Path, tmp_path: Path
) -> None:
    """The minimum follows from the line's maximum, not from that of the whole file."""
    folder = with_generation_config({"min_new_tokens": 20})
    lm = ovspec.load(folder, "none", engine="stateful", arithmetic="fast", precision="f32", cache_dir=cache_dir)
    short, long = run(lm, tmp_path, [{"prompt": PROMPTS[0], "max_tokens": 10}, {"prompt": PROMPTS[0]}], max_tokens=30)
    assert (short["generated_tokens"], long["generated_tokens"] >= 20) == (10, True)


def test_requests_of_openai(lm: ovspec.LanguageModel, tmp_path: Path) -> None:
    """OpenAI's own client can read the answers."""
    messages = [{"role": "user", "content": "Write a loop."}]
    chat = {"model": "demo", "messages": messages, "max_completion_tokens": 9, "temperature": 0, "stream": False}
    completion = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 7, "temperature": 1, "n": 2, "seed": 4}
    ending = {"model": "demo", "prompt": PROMPTS[1], "max_tokens": 60, "stop": ["\n"]}
    written = run(
        lm,
        tmp_path,
        [
            {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": chat},
            {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": completion},
            {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": ending},
            {"custom_id": "x", "method": "POST", "url": "/v1/embeddings", "body": {}},
        ],
    )
    assert [line["custom_id"] for line in written] == ["c", "a", "b", "x"]
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in written[:3])
    answer = type_of(CHAT_COMPLETION).validate_python(written[0]["response"]["body"], strict=True)
    assert answer.choices[0].message.content == lm.generate(messages, max_tokens=9).text
    assert answer.usage
    assert answer.usage.completion_tokens == 9
    texts = type_of(COMPLETION).validate_python(written[1]["response"]["body"], strict=True)
    expected = lm.samples(PROMPTS[0], n=2, max_tokens=7, temperature=1, seed=4)
    assert [choice.text for choice in texts.choices] == [result.text for result in expected]
    assert [choice.finish_reason for choice in texts.choices] == ["length", "length"]
    stopped = type_of(COMPLETION).validate_python(written[2]["response"]["body"], strict=True)
    assert stopped.choices[0].finish_reason == "stop"
    assert "\n" not in stopped.choices[0].text
    assert written[3]["response"] is None
    assert "/v1/embeddings" in written[3]["error"]["message"]


def test_tools(lm: ovspec.LanguageModel, tmp_path: Path) -> None:
    """Lines of either kind call tools as Python does; what was said before can be sent back."""
    schema = {"type": "object", "properties": {"day": {"enum": [1, 2]}}, "required": ["day"]}
    tool = {"type": "function", "function": {"name": "forecast", "parameters": schema}}
    messages: list[Any] = [{"role": "user", "content": "Will it rain?"}]
    asked: dict[str, Any] = {"messages": messages, "tools": [tool], "tool_choice": "required", "max_tokens": 90}
    once: dict[str, Any] = {"parallel_tool_calls": False}
    refused = {**asked, "tools": [{"name": "f", "parameters": {"type": "array"}}]}
    openai_line = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": asked | once}
    own, of_openai, failed = run(lm, tmp_path, [{"id": "a", **asked, **once}, openai_line, {"id": "b", **refused}])
    result: Any = lm.generate(messages, tools=[tool], tool_choice="required", max_tokens=90, **once)
    [call] = result.message["tool_calls"]
    assert json.loads(call["function"]["arguments"])["day"] in (1, 2)
    assert own["tool_calls"] == [call] and own["text"] == ""
    answer = type_of(CHAT_COMPLETION).validate_python(of_openai["response"]["body"], strict=True)
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.tool_calls
    assert answer.choices[0].message.tool_calls[0].model_dump() == call
    assert "the schema of f, at #/type" in failed["error"]
    later: Any = [*messages, result.message, {"role": "tool", "tool_call_id": call["id"], "content": "no"}]
    [line] = run(lm, tmp_path / "later", [{"messages": later, "tools": [tool], "max_tokens": 5}])
    assert line["text"] == lm.generate(later, tools=[tool], max_tokens=5).text
    assert lm.verify(result_from_json(own)).ok


def test_a_stop_string_ends_no_call(lm: ovspec.LanguageModel) -> None:
    tool = {"name": "forecast", "parameters": {"type": "object", "properties": {"day": {"enum": [12]}}}}
    chat: Any = [{"role": "user", "content": "Will it rain?"}]
    options: dict[str, Any] = {
        "tools": [tool],
        "tool_choice": "required",
        "max_tokens": 90,
        "parallel_tool_calls": False,
    }
    plain: Any = lm.generate(chat, **options)
    for stop in ("forecast", "fore", "12", "}", "day"):
        stopped: Any = lm.generate(chat, **options, stop=[stop])
        assert stopped.tool_calls == plain.tool_calls and stopped.token_ids == plain.token_ids


@pytest.mark.parametrize(
    "message",
    [
        {"content": "no role"},
        {"role": "tool", "tool_call_id": "1"},
        {"role": "assistant", "tool_calls": "abc"},
        {"role": "assistant", "tool_calls": [{"function": {}}]},
        {"role": "assistant", "tool_calls": [object()]},
        {"role": "assistant", "tool_calls": [{"id": [], "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": {"a": 1}},
    ],
)
def test_messages_that_no_chat_with_tools_takes(lm: ovspec.LanguageModel, message: Any) -> None:
    with pytest.raises(
        ovspec.OvspecError,
        match=r"each message needs both|must be a string|list|is not a tool call; use \{'type': 'function'",
    ):
        lm.generate([{"role": "user", "content": "Hi"}, message], tools=[{"name": "f"}], max_tokens=2)


def test_plain_prompts(lm: ovspec.LanguageModel, tmp_path: Path) -> None:
    ids = lm.encode(PROMPTS[2]).tolist()
    lines = [PROMPTS[0], {"prompt": PROMPTS[1], "max_tokens": 5}, {"id": "mine", "prompt": ids}]
    written = run(lm, tmp_path, lines, max_tokens=9)
    assert [line["id"] for line in written] == ["1", "2", "mine"]
    for line, prompt, length in zip(written, PROMPTS, (9, 5, 9), strict=False):
        alone = lm.generate(prompt, max_tokens=length)
        assert (line["text"], line["finish_reason"]) == (alone.text, alone.finish_reason)
        assert line["generated_tokens"] == length


def prompt_logprobs(reference: Reference, ids: list[int]) -> np.ndarray:
    """Return log-probabilities (n - 1, vocab) that predict each of ``ids`` but the first, by Hugging Face."""
    from scipy.special import log_softmax

    return log_softmax(reference.logits(ids).astype(np.float64), axis=-1)[:-1]


def test_several_prompts_logprobs_and_echo(
    load: Callable[..., ovspec.LanguageModel], reference: Reference, tmp_path: Path
) -> None:
    """Choices come prompt by prompt; log-probabilities are those of Hugging Face; ``ovspec verify`` reads the lines."""
    lm = load("lookup,draft")
    tokenizer = lm.tokenizer
    prompts = ["import os\n\n", PROMPTS[1], "def f(\N{SNOWMAN}"]
    several = {"prompt": prompts, "max_tokens": 6, "n": 2, "temperature": 1, "seed": 4, "logprobs": 2, "echo": True}
    ids = {"prompt": [tokenizer.encode(prompt).tolist() for prompt in prompts], "max_tokens": 5, "echo": True}
    messages = [{"role": "user", "content": "Write a loop."}]
    chat = {"messages": messages, "max_tokens": 6, "logprobs": True, "top_logprobs": 3, "stop": ["\n"]}
    written = run(
        lm,
        tmp_path / "run",
        [
            {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": several},
            {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": ids},
            {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": chat},
            {"prompt": prompts[:2], "max_tokens": 4, "logprobs": 1},
            {"prompt": prompts[0], "max_tokens": 4, "logprobs": False},
        ],
        logprobs=0,
    )
    bodies = [line["response"]["body"] for line in written[:3]]
    from openai.types import Completion

    texts = Completion.construct(**bodies[0])
    expected = lm.samples(prompts, n=2, max_tokens=6, temperature=1, seed=4)
    assert [choice.index for choice in texts.choices] == list(range(6))
    assert texts.usage
    assert texts.usage.prompt_tokens == sum(results[0].stats.prompt_tokens for results in expected)
    for choice, (prompt, result) in zip(
        texts.choices, [(prompts[at // 2], expected[at // 2][at % 2]) for at in range(6)], strict=True
    ):
        assert choice.text == prompt + result.text
        found, before = choice.logprobs, tokenizer.encode(prompt).tolist()
        assert found and found.tokens and found.text_offset and found.token_logprobs and found.top_logprobs
        whole = before + result.token_ids
        logprobs = prompt_logprobs(reference, whole)
        assert found.tokens[: len(whole)] == [tokenizer.token_text(token) for token in whole[: len(found.tokens)]]
        assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
        wanted = [logprobs[at, token] for at, token in enumerate(whole[1 : len(found.tokens)])]
        np.testing.assert_allclose(found.token_logprobs[1:], wanted, atol=2e-3)
        for name, at in zip(found.tokens, found.text_offset, strict=True):
            assert "\\x" in name or choice.text.startswith(name, at)
        tops = zip(found.tokens, found.top_logprobs, strict=True)
        assert all(len(top) in (2, 3) and name in top for name, top in tops if top)
    echoed = type_of(COMPLETION).validate_python(
        bodies[1] | {"choices": [{**each, "logprobs": None} for each in bodies[1]["choices"]]}, strict=True
    )
    alone = [lm.generate(prompt, max_tokens=5).text for prompt in prompts]
    assert [choice.text for choice in echoed.choices] == [one + two for one, two in zip(prompts, alone, strict=True)]
    assert bodies[1]["choices"][0]["logprobs"]["top_logprobs"] is None, "logprobs=0, which the whole file asks for"
    answer = type_of(CHAT_COMPLETION).validate_python(bodies[2], strict=True)
    content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert content
    spelt = b"".join(bytes(each.bytes or []) for each in content).decode("utf-8", "replace")
    assert spelt.startswith(answer.choices[0].message.content or "")
    assert all(len(each.top_logprobs) == 3 and each.top_logprobs[0].logprob >= each.logprob for each in content)
    assert answer.usage and answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert [text["text"] for text in written[3]["samples"]] == [lm.generate(p, max_tokens=4).text for p in prompts[:2]]
    assert all(len(text["logprobs"]) == 4 and text["logprobs"][0]["text"] for text in written[3]["samples"])
    assert "logprobs" not in written[4]
    checked = [lm.verify(result_from_json(choice)) for body in bodies for choice in body["choices"]]
    assert len(checked) == 10
    assert all(found.ok for found in checked)


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b'def a(\r\n\r\n{"x": 1}\n')
    assert [(each.id, each.text_request.prompts) for each in read_requests(file)] == [
        ("1", ["def a("]),
        ("3", ['{"x": 1}']),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "The line is not JSON"),
        ("42", "JSON object or string"),
        ("{}", "exactly one of the fields prompt and messages"),
        ('{"prompt": "a", "messages": [{}]}', "exactly one of the fields prompt and messages"),
        ('{"messages": []}', "messages must not be empty"),
        ('{"prompt": ["a", 5]}', "prompt must be a string"),
        ('{"prompt": true}', "prompt must be a string"),
        ('{"prompt": "a", "echo": 1}', "echo must be true or false"),
        ('{"messages": [{"role": "user", "content": "a"}], "echo": true}', "echo can't be combined with messages"),
        ('{"prompt": "a", "logprobs": -1}', "logprobs is -1; it must be 0 or more"),
        ('{"prompt": "a", "top_logprobs": 2}', "needs `logprobs` to be true"),
        ('{"prompt": "a", "logprobs": true, "top_logprobs": "x"}', "top_logprobs must be a whole number"),
        ('{"prompt": "a", "temprature": 1}', "temprature is not a field of this request; did you mean temperature?"),
        ('{"url": "/v1/completions", "body": {"prompt": "a"}, "max_tokens": 5}', "max_tokens must be inside body"),
        ('{"url": "/v1/completions", "body": {"prompt": "a"}, "customid": 5}', "did you mean custom_id?"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature must be a number"),
        ('{"prompt": "a", "temperature": -1}', "temperature is -1"),
        ('{"prompt": "a", "max_tokens": 1.5}', "max_tokens must be a whole number"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens must be a whole number"),
        ('{"prompt": "a", "max_tokens": 0}', "at least 1, or -1"),
        (f'{{"prompt": "a", "max_tokens": 1{"0" * 400}}}', "0 or more, or -1"),
        (f'{{"prompt": "a", "presence_penalty": 1{"0" * 400}}}', "presence_penalty is beyond 3e+38"),
        (f'{{"prompt": "a", "logit_bias": {{"5": 1{"0" * 400}}}}}', "`logit_bias` must be numbers up to 3e+38"),
        (f'{{"prompt": "a", "seed": 1{"0" * 5000}}}', "too many digits"),
        (f'{{"prompt": {"[" * 100_000}', "nested too deep"),
        ('{"prompt": "a", "stop": 5}', "stop must be a string or a list of strings"),
        ('{"prompt": "a", "n": 0}', "at least 1"),
        ('{"prompt": "a", "max_tokens": 0, "echo": true, "logprobs": 1}', "it must be at least 1, or -1"),
        ('{"prompt": "a", "zzz": 1}', "zzz is not a field of this request; leave it out."),
        ('{"prompt": "a", "tools": [{"name": "f"}]}', "`tools` needs chat messages"),
        ('{"prompt": "a", "tools": 1}', "tools must be a list of objects"),
        (
            '{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": ""}]}',
            "`tools`: the name '' is invalid",
        ),
        ('{"prompt": "a", "best_of": 1}', "best_of is not a field"),
        ('{"prompt": "a", "cache_prompt": true}', "cache_prompt is not a field"),
        ('{"url": "/v1/chat/completions", "body": {"messages": [{}], "tool": []}}', "did you mean tools"),
        ('{"prompt": "a", "stream": true}', "stream can't"),
        ('{"prompt": "a", "response_format": "json"}', "response_format must"),
        ('{"prompt": "a", "response_format": {"type": []}}', "`response_format` must"),
        ('{"prompt": "a", "response_format": {"type": "text", "schema": {}}}', "schema is not a field of"),
        (
            '{"prompt": "a", "response_format": {"type": "json_object", "json_schema": {}}}',
            "json_schema is not a field of `response_format`",
        ),
        (
            '{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strct": true}}}',
            "json_schema.strct is not a field of `response_format`; did you mean strict?",
        ),
        ('{"prompt": "a", "regex": "a", "response_format": {"type": "text"}}', "`response_format` and `regex` can't"),
        ('{"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}', "`max_tokens` and `max_completion_tokens`"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias must be an object that maps whole numbers to numbers"),
        ('{"prompt": "a", "logit_bias": {"99999": 1}}', "not in the vocabulary"),
        ('{"prompt": [99999]}', "not in the vocabulary"),
        ('{"url": "/v1/completions", "method": "GET", "body": {"prompt": "a"}}', "POST"),
        ('{"url": "/v1/completions"}', "no body"),
        ('{"url": "/v1/chat/completions", "body": {"prompt": "a"}}', "messages is missing"),
    ],
)
def test_one_bad_line_does_not_stop_the_rest(lm: ovspec.LanguageModel, tmp_path: Path, line: str, message: str) -> None:
    good = make_prompt_request("good", "good", PROMPTS[0])
    found = run_file(lm, [parse_line(line, "bad"), good], tmp_path / "out", make_params({"max_tokens": 5}))
    assert (found.done, found.failed) == (2, 1)
    bad, rest = read_lines(tmp_path / "out")
    error = bad["error"]
    assert message in (error if isinstance(error, str) else error["message"])
    assert rest["text"] == lm.generate(PROMPTS[0], max_tokens=5).text


def test_ids_that_come_twice(lm: ovspec.LanguageModel, tmp_path: Path) -> None:
    written = run(lm, tmp_path, [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}, {"id": 3, "prompt": "z"}, 5])
    assert [line["id"] for line in written] == ["a", "2", "3", "4"], "what has no id of its own is named by its line"
    assert "'a' is used twice" in written[1]["error"]
    written = run(lm, tmp_path / "taken", [{"id": "2", "prompt": "x"}, "y", {"id": 2, "prompt": "z"}])
    assert [line["id"] for line in written] == ["2", "line 2", "3"]


def test_what_is_done_is_not_done_again(lm: ovspec.LanguageModel, tmp_path: Path) -> None:
    requests = [make_prompt_request(str(i), prompt, prompt) for i, prompt in enumerate(PROMPTS[:8])]
    run_file(lm, requests, tmp_path / "whole", make_params({"max_tokens": 20}))
    output = tmp_path / "out"

    class Killed(BaseException):
        pass

    def kill(progress: Any) -> None:
        if progress.done >= 3:
            raise Killed

    with pytest.raises(Killed):
        run_file(lm, requests, output, make_params({"max_tokens": 20, "batch_size": 2}), kill)
    assert not output.exists()
    partial = tmp_path / "out.partial"
    with partial.open("a", encoding="utf-8") as file:
        file.write('{"key": "cut o')  # as a kill in the middle of a line leaves it
    found = run_file(lm, requests, output, make_params({"max_tokens": 20, "lookahead": 2}))  # which changes no text
    assert found.done_before >= 3
    assert found.done_before + found.done == 8
    assert output.read_bytes() == (tmp_path / "whole").read_bytes()
    assert not partial.exists()


@pytest.mark.parametrize(("lengths", "error"), [([20] * 10, 0.3), ([12, 24] * 5, 0.5)])
def test_the_time_left_falls_as_work_is_done(
    lm: ovspec.LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: list[int], error: float
) -> None:
    """On a clock by which a round takes a second. Of texts that differ, the short ones end first and mislead."""
    now, told = 0, list[int]()
    monkeypatch.setattr(sys.modules["ovspec.cli.batch"], "time", SimpleNamespace(monotonic=lambda: now))
    report = BatchProgressPrinter()

    def note(progress: Any) -> None:
        nonlocal now
        now += 1
        report.update(progress)
        seconds = re.search(r"about (\d+) s left", report.describe_progress(progress))
        told.append(int(seconds[1]) if seconds else 0)

    lines = [{"prompt": PROMPTS[i], "max_tokens": most, "ignore_eos": True} for i, most in enumerate(lengths)]
    requests = [parse_line(json.dumps(line), str(i)) for i, line in enumerate(lines)]
    run_file(lm, requests, tmp_path / "out", make_params({"batch_size": 4, "lookahead": 1}), note)
    first = next(at for at, seconds in enumerate(told) if seconds)
    right = range(now - 1 - first, 0, -1)
    assert len(right) > now / 2
    assert all(abs(seconds - left) <= error * now for seconds, left in zip(told[first:], right, strict=False)), told
    falls = [after < before for before, after in itertools.pairwise(told[first:])]
    assert sum(falls) > len(falls) / 2, told


def test_what_has_changed_is_done_again(tmp_path: Path) -> None:
    request, output = make_prompt_request("1", "a", "a"), tmp_path / "out"
    done = PartialResults(output)
    done.store_line(result_fingerprint(request, "model and options"), {"id": "1"})
    done.close()
    for depends_on, changed, known in (
        ("model and options", request, True),
        ("other options", request, False),
        ("model and options", make_prompt_request("1", "b", "b"), False),
        ("model and options", make_prompt_request("2", "a", "a"), False),
        ("model and options", to_chat_request(request, None), False),
        ("model and options", to_chat_request(request, "Be brief."), False),
        ("model and options", replace(request, error="No."), False),
    ):
        again = PartialResults(output)
        assert (result_fingerprint(changed, depends_on) in again) == known
        again.close()


def batch_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "ovspec", "batch", *map(str, arguments)]


@pytest.mark.slow  # others below stop it in process, and leave the file as a kill leaves it
@pytest.mark.parametrize("signals", [["SIGKILL"], ["SIGKILL", "SIGINT"]])
def test_a_batch_survives_being_stopped(
    tmp_path: Path,
    command_environment: dict[str, str],
    command_here: Command,
    signals: list[str],
) -> None:
    if os.name == "nt":
        pytest.skip("signals")
    file = write_lines(tmp_path / "in.jsonl", [{"id": f"p{i}", "prompt": p} for i, p in enumerate(PROMPTS[:6] * 2)])
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    options = ("-o", output, "--draft", "lookup", "--batch-size", "2", "-n", "150", "--ignore-eos")
    # In this arithmetic, a text does not depend on the other rows of its batch.
    options = (*options, "--precision", "f32", "--property", "DYNAMIC_QUANTIZATION_GROUP_SIZE=0")
    kept = 0
    for name in signals:
        process = subprocess.Popen(
            batch_command(DEMO / "draft", file, *options), env=command_environment, stderr=subprocess.PIPE
        )
        for _ in range(6000):
            if partial.is_file() and partial.read_bytes().count(b"\n") > kept + 2:
                break
            time.sleep(0.005)
        process.send_signal(getattr(signal, name))
        _, err = process.communicate(timeout=30)
        assert process.returncode == {"SIGKILL": -9, "SIGINT": 130}[name]
        assert not output.exists()
        if name == "SIGINT":
            assert b"the same command continues" in err
            assert b"Traceback" not in err
        kept = partial.read_bytes().count(b"\n")
        assert 0 < kept < 12
    done = command_here("batch", DEMO / "draft", file, *options)
    assert done.returncode == 0, done.stderr
    assert "of them by an earlier run" in done.stderr
    lines = read_lines(output)
    assert [line["id"] for line in lines] == [f"p{i}" for i in range(12)]
    assert [line["text"] for line in lines[:6]] == [line["text"] for line in lines[6:]]
    assert not partial.exists()


@pytest.fixture
def command_here(cache_dir: Path) -> Iterator[Command]:
    yield from commands_here(cache_dir)


def test_wrong_usage(tmp_path: Path, command_here: Command) -> None:
    file = write_lines(tmp_path / "in.jsonl", ["a"])
    there = write_lines(tmp_path / "there.jsonl", ["precious"])
    empty = write_lines(tmp_path / "empty.jsonl", [])
    output = tmp_path / "out.jsonl"
    for arguments, code, message in (
        ((file,), 2, "--output"),
        ((file, "-o", there), 2, "already exists"),
        ((file, "-o", file, "--overwrite"), 2, "is the input file"),
        ((DEMO, "-o", output), 2, "needs --ray"),
        ((file, "-o", tmp_path / "out.parquet"), 2, "needs --ray"),
        ((file, "-o", "s3://bucket/out.jsonl"), 2, "needs --ray"),
        ((file, "-o", output, "--mixed"), 2, "--mixed needs --ray"),
        (("--ray", file, "-o", there), 2, "already exists"),  # what follows --ray is no address
        ((file, "-o", output, "--ray", "ray://host:10001"), 2, "Ray Client isn't supported"),
        ((file, "-o", output, "--cpus-per-worker", "1"), 2, "--cpus-per-worker needs --ray"),
        ((tmp_path / "none.jsonl", "-o", output), 1, "none.jsonl"),
        ((empty, "-o", output), 1, "contains no text"),
        ((file, "-o", output, "--draft", "none", "--lookahead", "3"), 2, "--draft"),
        ((file, "-o", output, "--system", "x"), 2, "--chat"),
        ((file, "-o", "-"), 2, "give a file"),
        (("-", "-o", output), 2, "stdin: contains no text; give text."),
    ):
        done = command_here("batch", *arguments)
        assert (done.returncode, message in done.stderr) == (code, True), done.stderr
        assert "Traceback" not in done.stderr
    assert read_lines(there) == ["precious"]
    assert not output.exists()


def test_requests_on_stdin(tmp_path: Path, command_here: Command) -> None:
    done = command_here(
        "batch", DEMO / "draft", "-", "-o", tmp_path / "out", "-n", "3", stdin='"import os"\n{"prompt": "a"}\n'
    )
    assert done.returncode == 0, done.stderr
    assert [(line["id"], line["generated_tokens"]) for line in read_lines(tmp_path / "out")] == [("1", 3), ("2", 3)]


def test_each_line_has_its_own_grammar(lm: ovspec.LanguageModel, tmp_path: Path) -> None:
    """A line may use OpenAI's response_format or ovspec's options and replace the default, but never name a file."""
    secret = write_lines(tmp_path / "schema.json", [{"const": "secret"}])
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema |= {"additionalProperties": False}
    wrapped = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    chat = {"messages": [{"role": "user", "content": "All right?"}], "max_tokens": 30, "response_format": wrapped}
    lines = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"id": "default", "prompt": "The answer: ", "max_tokens": 30},
        {"id": "own", "prompt": "The answer: ", "choice": ["blue", "green"], "heal": True},
        {"id": "inside", "prompt": "f(12", "regex": "[(]12[0-9]{2}[)]", "constrain_from": "("},
        {"id": "text", "prompt": "A", "json_schema": json.dumps(schema), "max_tokens": 30},
        {"id": "object", "prompt": "A", "response_format": {"type": "json_object"}, "max_tokens": 3},
        {"id": "free", "prompt": "A", "response_format": {"type": "text"}, "max_tokens": 3},
        {"id": "nulls", "prompt": "A", "choice": ["blue"], "json_schema": None, "response_format": None},
        {"id": "schema", "prompt": "A", "json_schema": {"const": "5"}, "regex": None},
        {"id": "llama.cpp", "prompt": "A", "response_format": {"type": "json_object", "schema": {"const": "6"}}},
        {"id": "beside", "prompt": "A", "response_format": {"type": "json_schema", "schema": {"const": "7"}}},
        {"id": "wrapped", "prompt": "A", "json_schema": {"type": "json_schema", "schema": {"const": "8"}}},
        {"id": "file", "prompt": "A", "json_schema": str(secret)},
        {"id": "wrong", "prompt": "A", "json_schema": {"type": "objct"}},
        {"id": "format", "prompt": "A", "response_format": {"type": "json_schema"}},
    ]
    written = run(lm, tmp_path / "run", lines, regex="yes|no", max_tokens=12)
    assert set(json.loads(written[0]["response"]["body"]["choices"][0]["message"]["content"])) == {"ok"}
    texts = {line["id"]: line.get("text") for line in written[1:]}
    assert texts["default"] in ("yes", "no")
    assert texts["own"] in ("blue", "green")
    assert re.fullmatch("[0-9]{2}[)]", texts["inside"])
    assert set(json.loads(texts["text"])) == {"ok"}
    assert texts["object"].startswith("{")
    assert texts["free"] == lm.generate("A", max_tokens=3).text, "a response_format of text removes the default"
    assert [texts[name] for name in ("nulls", "schema", "llama.cpp")] == ["blue", '"5"', '"6"']
    assert [texts[name] for name in ("beside", "wrapped")] == ['"7"', '"8"']
    with pytest.raises(ovspec.OvspecError, match="regex"):
        run(lm, tmp_path / "wrong", lines, regex="[0")
    errors = {line["id"]: line.get("error", "") for line in written[1:]}
    assert "isn't JSON" in errors["file"]
    assert "#/type" in errors["wrong"]
    assert "response_format" in errors["format"]


HOSTILE = [
    "null", "true", "-1", "0", "1.5", "1e39", "-1e39", "1e300", "NaN", "-Infinity", "1" + "0" * 400,
    "9223372036854775808", "1" + "0" * 5000, '""', '"x"', '"\\ud800"', '"true.json"', "[]", "[5]", '["a"]', "[null]",
    "[[]]", "[1e39]", "[9223372036854775808]", "{}", '{"a": 1}', '{"5": 1e39}', '{"99999999999999999999": 1}',
    "[" * 2000 + "]" * 2000, '"' + '[\\"' * 20_000 + '"',
]  # fmt: skip


def test_a_hostile_value_of_any_option_costs_only_its_line(lm: ovspec.LanguageModel, tmp_path: Path) -> None:
    options = [*GENERATE_OPTIONS, "response_format", "messages", "custom_id", "body", "url", "method", "model"]
    lines = [
        f'{{"prompt": "A", "max_tokens": 2, "{name}": {value}}}'
        for name in options
        for value in HOSTILE
        if name != "max_tokens" or not value.isdigit()
    ]
    lines += [
        json.dumps({"prompt": "A", "temperature": 1, "n": 10**9}),
        json.dumps({"prompt": "A", "logit_bias": {str(i): -math.inf for i in range(lm.target.ir.logits_width)}}),
    ]
    good = json.dumps({"id": "good", "prompt": PROMPTS[0], "max_tokens": 6})
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, good]), encoding="utf-8")
    params = make_params({"max_tokens": 2, "batch_size": 3})
    found = run_file(lm, read_requests(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", params)
    written = read_lines(tmp_path / "out.jsonl")
    assert len(written) == found.total == len(lines) + 1
    assert found.failed > len(lines) / 2
    assert written[-1]["text"] == lm.generate(PROMPTS[0], max_tokens=6).text
    assert "n is" in written[-3]["error"] and "token" in written[-2]["error"]
    assert not any("Traceback" in str(line.get("error")) for line in written)


def test_a_text_that_fails_while_it_is_generated_costs_only_its_line(lm: ovspec.LanguageModel, tmp_path: Path) -> None:
    stuck = {"prompt": "A", "gbnf": 'root ::= "x" [\U0001f600]', "logit_bias": {}, "max_tokens": 9}
    every = {str(i): -math.inf for i in range(lm.target.ir.logits_width)}
    lines = [{"prompt": "A"}, {"prompt": "A", "logit_bias": every}, {"prompt": "B"}, stuck, {"prompt": "C"}]
    written = run(lm, tmp_path, lines, max_tokens=5, batch_size=3)
    assert [("error" in line) for line in written] == [False, True, False, "error" in written[3], False]
    for line, prompt in ((0, "A"), (2, "B"), (4, "C")):
        assert written[line]["text"] == lm.generate(prompt, max_tokens=5).text


@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps the files of a loaded model from being written")
def test_another_model_in_the_same_place_begins_anew(tmp_path: Path, cache_dir: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO / "draft", folder)

    lm = ovspec.load(folder, "none", engine="stateful", cache_dir=cache_dir)
    params = make_params({"max_tokens": 9, "stop": ["x"]})

    def depends_on() -> str:
        return make_run_identity(lm, params)  # which reads the files again

    seen = [depends_on()]
    assert depends_on() == seen[0]
    for name in ("generation_config.json", "openvino_model.bin", "chat_template.jinja"):
        content = bytearray((folder / name).read_bytes())
        at = len(content) - 3 if name.endswith(".bin") else len(content)
        content[at : at + 1] = b" " if content[at : at + 1] != b" " else b"\n"
        (folder / name).write_bytes(content)
        found = depends_on()
        assert found not in seen, name
        seen.append(found)


def test_options_that_change_answers_begin_anew(tmp_path: Path, cache_dir: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("import os", encoding="utf-8")

    def loaded(draft: str = "none", **options: Any) -> ovspec.LanguageModel:
        ways: Any = {"engine": "stateful", "arithmetic": "fast", "cache_dir": cache_dir}
        return ovspec.load(DEMO / "draft", draft, **ways, **options)

    def depends_on(lm: ovspec.LanguageModel, **options: Any) -> str:
        drawn: Any = {"temperature": 1.0, "json_schema": {}, "json_schema_mode": "checked"}
        return make_run_identity(lm, lm.runtime.row_maker.make_complete_params(drawn | options))

    lm, plain, other_lookup = loaded("lookup"), loaded(), loaded("lookup", lookup_corpus=[corpus])
    own = depends_on(lm)
    for speed in (depends_on(plain), depends_on(other_lookup), depends_on(lm, lookahead=0, batch_size=3)):
        assert speed == own
    rejection: Any = {"accept": "rejection", "lookahead": 2}
    changed = [
        depends_on(loaded(tool_format="hermes")),
        depends_on(loaded(chat_template="chatml")),
        depends_on(lm, retries=1),
        depends_on(lm, max_predict_ms=9.0),
        depends_on(lm, **rejection),
        depends_on(lm, **rejection | {"lookahead": 3}),
        depends_on(other_lookup, **rejection),
        depends_on(plain, **rejection | {"lookahead": 0}),
    ]
    assert len({own, *changed}) == 1 + len(changed)


def test_two_batches_on_one_output(tmp_path: Path) -> None:
    first = PartialResults(tmp_path / "out.jsonl")
    with pytest.raises(ovspec.OvspecError, match="another batch is writing this file"):
        PartialResults(tmp_path / "out.jsonl")
    first.close()
    PartialResults(tmp_path / "out.jsonl").close()
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.partial"]


def test_what_was_done_is_known_after_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    for key, before in (("a", []), ("b", ["a"]), ("c", ["a", "b"])):
        done = PartialResults(tmp_path / "out")
        assert sorted(done.keys()) == before
        done.store_line(key, {"id": key})
        assert done.select_lines([*before, key]) == [{"id": each} for each in [*before, key]]
        done.close()
        with done.file.open("a", encoding="utf-8") as file:
            file.write('{"key": "cut o')
