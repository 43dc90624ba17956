"""What the tests of llama.cpp's server ask of it about chats, tools and tokens, asked of this one.

Each test is named as llama.cpp's. docs/reference/llama-cpp.md tells what differs, and why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import USERS_CACHE
from servers import REAL, Running, Start

from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import ChatTemplate

TEMPLATES = USERS_CACHE / "downloads" / "llama.cpp" / "models" / "templates"
CHATS = "/v1/chat/completions"
BOOK: Any = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
CODE: Any = [
    {"role": "system", "content": "You are a coding assistant."},
    {"role": "user", "content": "Write an example"},
]


def tool(name: str, argument: str, schema: Any, about: str = "") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: schema}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TEST = tool("test", "success", {"type": "boolean", "const": True})
# Where the code may be longer, the small model doesn't end it on every processor.
CODE_TEXT = {"type": "string", "description": "The code to run.", "maxLength": 200}
PYTHON = tool("python", "code", CODE_TEXT, "Runs Python code.")
WEATHER = tool(
    "get_current_weather",
    "location",
    {"type": "string", "description": "The city and country, e.g. 'Paris, France'"},
    "Get the current weather in a given location",
)
CALCULATE = tool("calculate", "expression", {"type": "string"}, "Computes values of arithmetic expressions.")


def answered(server: Running, messages: Any = BOOK, **more: Any) -> Any:
    answer = server.post(CHATS, {"messages": messages, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server: Running, messages: Any = BOOK, **more: Any) -> Any:
    answer = server.post(CHATS, {"messages": messages, **more})
    assert answer.status_code == 400
    return answer.json()["error"]


def chunks(server: Running, messages: Any = BOOK, **more: Any) -> Iterator[Any]:
    lines = server.post(CHATS, {"messages": messages, "stream": True, **more}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return (json.loads(line.removeprefix("data: ")) for line in lines[:-2])


def gathered(server: Running, messages: Any, **more: Any) -> Any:
    """Return the choice of a stream as one of a whole answer, checked as llama.cpp's tests do."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls, ended = list[dict[str, Any]](), None
    for number, chunk in enumerate(chunks(server, messages, **more)):
        [choice] = chunk["choices"]
        delta, ended = choice["delta"], choice["finish_reason"]
        assert ("role" in delta) is (number == 0)
        for name in ("content", "reasoning_content"):
            if name in delta:
                assert delta[name] or number == 0, "an empty delta"
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if call["index"] >= len(calls):
                assert call["id"] and call["type"] == "function" and call["function"]["name"]
                calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
            function = calls[call["index"]]["function"]
            function["name"] += call["function"].get("name", "")
            function["arguments"] += call["function"].get("arguments", "")
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return {"message": message, "finish_reason": ended}


def either(server: Running, stream: bool, messages: Any, **more: Any) -> Any:
    if stream:
        return gathered(server, messages, **more)
    return answered(server, messages, **more)["choices"][0]


# ---------------------------------------------------------------- test_chat_completion.py


@pytest.mark.parametrize(
    "asked", ["What is the best book", [{"type": "text", "text": "What is"}, {"type": "text", "text": "the best book"}]]
)
def test_chat_completion(server: Running, asked: Any) -> None:
    found = answered(server, [BOOK[0], {"role": "user", "content": asked}], max_tokens=8, ignore_eos=True)
    assert "cmpl" in found["id"] and found["usage"]["completion_tokens"] == 8 and found["usage"]["prompt_tokens"] > 8
    assert found["choices"][0]["message"]["role"] == "assistant"
    assert found["choices"][0]["finish_reason"] == "length"


def test_chat_completion_cached_tokens(server: Running) -> None:
    cached = list[int]()
    for asked in ("1 2 3 4 5 6", "1 2 3 4 5 6", "1 2 3 9 9 9"):
        found = answered(
            server, [{"role": "system", "content": "Cached. " * 40}, {"role": "user", "content": asked}], n_predict=8
        )
        cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] < cached[2] <= cached[1]


def test_chat_completion_stream(server: Running) -> None:
    found = list(chunks(server, max_tokens=8, ignore_eos=True, stream_options={"include_usage": True}))
    *texts, usage = found
    assert len({chunk["id"] for chunk in found}) == 1 and {chunk["model"] for chunk in found} == {"demo"}
    assert [chunk["choices"][0]["delta"].get("role") for chunk in texts] == ["assistant", *[None] * (len(texts) - 1)]
    assert "content" not in texts[-1]["choices"][0]["delta"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in texts] == [*[None] * (len(texts) - 1), "length"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 8


def test_chat_template_continue_final_message(server: Running) -> None:
    prefilled = [*BOOK, {"role": "assistant", "content": "Whill"}]
    for flags in ({}, {"add_generation_prompt": False, "continue_final_message": True}):
        found = answered(server, prefilled, max_tokens=1, return_record=True, **flags)
        ids = found["choices"][0]["record"]["prompt_token_ids"]
        text = server.post("/detokenize", {"tokens": ids}).json()["content"]
        assert text.endswith("Whill") and text.count("Whill") == 1
    assert refused(server, prefilled, add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ({"type": "json_object", "schema": {"const": "42"}}, '"42"'),
        ({"type": "json_object", "schema": {"items": [{"type": "integer"}]}}, ""),
        ({"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}}, '"foooooo"'),
        ({"type": "json_object"}, "{"),
        ({"type": "sound"}, None),
        ({"type": "json_object", "schema": 123}, None),
        ({"type": "json_object", "schema": {"type": 123}}, None),
        ({"type": "json_object", "schema": {"type": "hiccup"}}, None),
    ],
)
def test_completion_with_response_format(server: Running, format: Any, expected: str | None) -> None:
    if expected is None:
        assert "`response_format`" in refused(server, CODE, response_format=format)["message"]
    else:
        found = answered(server, CODE, max_tokens=10, response_format=format)
        assert found["choices"][0]["message"]["content"].startswith(expected)


def test_completion_with_json_schema_and_grammar(server: Running) -> None:
    for more, expected in (({"json_schema": {"const": "42"}}, '"42"'), ({"gbnf": 'root ::= "a"{5,5}'}, "aaaaa")):
        assert answered(server, CODE, max_tokens=10, **more)["choices"][0]["message"]["content"] == expected
    for grammar in ('root ::= "a"{5,5}', "root ::= this is (not valid GBNF"):
        assert "use `gbnf` instead of `grammar`" in refused(server, CODE, grammar=grammar)["message"]
    assert "gbnf" in refused(server, CODE, gbnf="root ::= this is (not valid GBNF")["message"]


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "string",
        [123],
        [{}],
        [{"role": 123}],
        [{"role": "system", "content": 123}],
        [{"content": "hello"}],
        [{"role": "system", "content": "test"}, {}],
    ],
)
def test_invalid_chat_completion_req(server: Running, messages: Any) -> None:
    error = refused(server, messages)
    assert error["message"].startswith("messages") and error["param"] == "messages"


def test_chat_completion_with_timings_per_token(server: Running) -> None:
    found = list(chunks(server, max_tokens=4, timings_per_token=True, return_progress=True, id_slot=0))
    first, *others = found
    assert "timings" not in first and not any("prompt_progress" in chunk for chunk in found)
    for chunk in others:
        assert chunk["timings"]["prompt_per_second"] > 0 and "predicted_per_second" in chunk["timings"]
        assert chunk["timings"]["predicted_n"] <= 4


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: Running, stream: bool) -> None:
    from openai import OpenAI

    client, text, tokens = OpenAI(base_url=f"{server.url}/v1", api_key="none"), "", list[Any]()
    asked: Any = {"model": "gpt-3.5-turbo-instruct", "messages": BOOK, "max_tokens": 5, "temperature": 0.0}
    asked |= {"logprobs": True, "top_logprobs": 10, "stream": stream}
    made = client.chat.completions.create(**asked)
    for answer in made if stream else [made]:
        [choice] = answer.choices
        text += (choice.delta if stream else choice.message).content or ""
        tokens += (choice.logprobs.content or []) if choice.logprobs else []
    assert "".join(token.token for token in tokens) == text and tokens
    assert all(token.logprob <= 0 and token.bytes is not None and token.top_logprobs for token in tokens)


def test_logit_bias(server: Running) -> None:
    plain = answered(server, max_tokens=32)["choices"][0]["message"]["content"]
    tokens = server.post("/tokenize", {"content": plain, "add_special": False}).json()["tokens"]
    biased = answered(server, max_tokens=32, logit_bias={str(token): -100 for token in tokens})
    again = server.post("/tokenize", {"content": biased["choices"][0]["message"]["content"]}).json()["tokens"]
    assert tokens and not set(tokens) & set(again)


@pytest.mark.parametrize("stream", [False, True])
def test_context_size_exceeded(server: Running, stream: bool) -> None:
    error = refused(server, BOOK * 1000, stream=stream)
    assert error["code"] == "context_length_exceeded" and "tokens" in error["message"]


def test_chat_completions_multiple_choices(server: Running) -> None:
    for _ in range(2):
        found = answered(server, max_tokens=8, n=2, id_slot=0, ignore_eos=True)["choices"]
        assert [choice["finish_reason"] for choice in found] == ["length"] * 2
        assert [choice["message"]["role"] for choice in found] == ["assistant"] * 2


def test_chat_completions_token_count(server: Running) -> None:
    counted = server.post("/tokenize", {"messages": BOOK}).json()["count"]
    assert counted == answered(server, max_tokens=1)["usage"]["prompt_tokens"] > 5


def test_verbose_debug(server: Running) -> None:
    assert "__verbose" not in answered(server, max_tokens=2, verbose=False)
    assert refused(server, max_tokens=2, verbose=True)["param"] == "verbose"


# ---------------------------------------------------------------- test_tool_call.py

slow_real = [pytest.mark.slow, pytest.mark.skipif(not REAL.is_dir(), reason="the real model could not be fetched")]


@pytest.fixture
def caller(request: pytest.FixtureRequest) -> Running:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    ("caller", "given", "argument", "stream"),
    [
        ("server", TEST, "success", True),
        *(
            pytest.param("real_server", given, argument, stream, marks=slow_real)
            for given, argument in ((TEST, "success"), (PYTHON, "code"))
            for stream in (False, True)
        ),
    ],
    indirect=["caller"],
)
def test_completion_with_required_tool(caller: Running, given: Any, argument: str, stream: bool) -> None:
    greedy = {"temperature": 0.0, "top_k": 1, "top_p": 1.0}
    asked: dict[str, Any] = {"tools": [given], "tool_choice": "required", "parallel_tool_calls": False, **greedy}
    choice = either(caller, stream, CODE, max_tokens=512, **asked)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == given["function"]["name"] and call["id"]
    assert argument in json.loads(call["function"]["arguments"])


@pytest.mark.parametrize(
    ("caller", "tools", "choice", "stream"),
    [
        ("server", None, None, False),
        ("server", [TEST], None, True),
        ("server", [PYTHON], "none", False),
        *(
            pytest.param("real_server", tools, choice, stream, marks=slow_real)
            for tools, choice in ((None, None), ([], None), ([TEST], None), ([PYTHON], "none"))
            for stream in (False, True)
        ),
    ],
    indirect=["caller"],
)
def test_completion_without_tool_call(caller: Running, tools: Any, choice: Any, stream: bool) -> None:
    asked = [CODE[0], {"role": "user", "content": "say hello world with python"}]
    found = either(caller, stream, asked, max_tokens=12, tools=tools, tool_choice=choice)
    assert "tool_calls" not in found["message"] and found["message"]["content"]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_weather(real_server: Running, stream: bool) -> None:
    """With tool_choice, as a model of this size hardly calls by itself."""
    system = "You are a chatbot that uses tools/functions. Dont overthink things."
    asked = [{"role": "system", "content": system}, {"role": "user", "content": "What is the weather in Istanbul?"}]
    named = {"type": "function", "function": {"name": "get_current_weather"}}
    choice = either(real_server, stream, asked, tools=[WEATHER], tool_choice=named, max_tokens=512)
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["location"].startswith("Istanbul")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_calc_result(real_server: Running, stream: bool) -> None:
    function = {"name": "calculate", "arguments": '{"expression":"sin(30 * pi / 180)"}'}
    asked = [
        {"role": "system", "content": "You express numerical values with at most two decimals."},
        {"role": "user", "content": "What's the y coordinate of a point on the unit sphere at angle 30 degrees?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_6789", "type": "function", "function": function}],
        },
        {"role": "tool", "name": "calculate", "content": "0.55644242476", "tool_call_id": "call_6789"},
    ]
    choice = either(real_server, stream, asked, tools=[CALCULATE], max_tokens=64)
    assert "tool_calls" not in choice["message"] and "0.556" in choice["message"]["content"]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_thoughts(thinking: Running, stream: bool) -> None:
    asked = [{"role": "user", "content": "What's the sum of 102 and 7?"}]
    for more in ({}, {"reasoning_format": "deepseek"}, {"reasoning_format": "auto"}):
        choice = either(thinking, stream, asked, max_tokens=48, min_tokens=32, max_thinking_tokens=16, **more)
        message = choice["message"]
        assert message["reasoning_content"] and message["content"] and "tool_calls" not in message
        assert "think>" not in message["reasoning_content"] + message["content"]
    answer = either(thinking, stream, asked, max_tokens=8, min_tokens=4, reasoning_effort="none")["message"]
    assert not answer.get("reasoning_content") and answer["content"]


@pytest.fixture(scope="module")
def thinking(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """The real model with a template that opens the thinking, as DeepSeek's does."""
    if not REAL.is_dir():
        pytest.skip("the real model could not be fetched")
    folder = tmp_path_factory.mktemp("thinking") / "model"
    folder.mkdir()
    for file in REAL.iterdir():
        if file.is_file() and file.name not in ("chat_template.jinja", "ovspec.json"):
            (folder / file.name).hardlink_to(file.resolve())
    source = (REAL / "chat_template.jinja").read_text("utf-8")
    opened = (
        "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(
        f"{source}{{% if add_generation_prompt %}}{opened}{{% endif %}}", "utf-8"
    )
    return start(folder, "--draft", "lookup", "--lookahead", "4", "--temperature", "0")


# ---------------------------------------------------------------- test_tokenize.py, test_template.py


def test_tokenize_detokenize(server: Running) -> None:
    content = "What is the capital of France ?"
    tokens = server.post("/tokenize", {"content": content}).json()["tokens"]
    assert len(tokens) > 5
    assert server.post("/detokenize", {"tokens": tokens}).json()["content"].strip() == content


def test_tokenize_with_bos(server: Running) -> None:
    without, by_default, given = (
        server.post("/tokenize", {"content": "What is", "parse_special": True, **more}).json()["tokens"]
        for more in ({"add_special": False}, {}, {"add_special": True})
    )
    assert given == by_default and given[len(given) - len(without) :] == without
    error = server.post("/tokenize", {"messages": BOOK, "add_special": True}).json()["error"]
    assert error["param"] == "add_special"


def test_tokenize_with_pieces(server: Running) -> None:
    content = "This is a test string with unicode 媽 and emoji 🤗"
    found = server.post("/tokenize", {"content": content, "with_pieces": True, "add_special": False}).json()
    pieces = [token["piece"] for token in found["tokens"]]
    assert all(pieces) and found["count"] == len(pieces)
    assert b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces).decode() == content
    ids = server.post("/tokenize", {"content": content, "add_special": False}).json()["tokens"]
    assert [token["id"] for token in found["tokens"]] == ids
    assert server.post("/tokenize", {"content": "", "with_pieces": True, "add_special": False}).json()["tokens"] == []


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="llama.cpp could not be fetched")
@pytest.mark.parametrize("tools", [[], [TEST]])
@pytest.mark.parametrize(
    ("name", "effort", "end"),
    [
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "high", "<think>\n"),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "none", "<think>\n</think>"),
        ("Qwen-Qwen3-0.6B", None, "<|im_start|>assistant\n"),
        ("Qwen-Qwen3-0.6B", "none", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("Qwen-QwQ-32B", "high", "<|im_start|>assistant\n<think>\n"),
        ("Qwen-QwQ-32B", "none", "<|im_start|>assistant\n<think>\n</think>"),
        (
            "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
            "none",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>",
        ),
    ],
)
def test_reasoning(name: str, effort: str | None, end: str, tools: list[Any]) -> None:
    source = Path(TEMPLATES, f"{name}.jinja").read_text("utf-8")
    format = ChatFormat(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}))
    assert format.render_prompt([{"role": "user", "content": "What is today?"}], tools, effort).endswith(end)
