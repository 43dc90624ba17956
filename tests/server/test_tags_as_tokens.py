"""Thinking and calls over each API, on a random model with Qwen3's tokenizer and template, where tags are tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from clients import type_of
from kept import kept_model
from real_families import DOWNLOADS, FAMILIES, export
from servers import Running, Start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (DOWNLOADS / "tokenizers").is_dir(), reason="the tokenizers could not be fetched"),
]
QUESTION = "Bake bread."
SCHEMA = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 9}, "pace": {"enum": ["slow", "fast"]}},
    "required": ["number", "pace"],
}
STEPS = 5


@pytest.fixture(scope="module")
def qwen(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Running:
    family = FAMILIES["qwen3"]
    folder = kept_model(tmp_path_factory, f"real-{family.tokenizer}", lambda place: export(family, place))
    return start(folder, "--draft", "lookup", "--lookahead", "3", "--temperature", "0", "--no-tune")


@pytest.fixture(scope="module")
def thinking(qwen: Running) -> dict[str, Any]:
    """Options that make the model think for a while, and then write letters."""
    tags = FAMILIES["qwen3"].thinks
    assert tags
    [opens], [closes] = (qwen.post("/tokenize", {"content": tag}).json()["tokens"] for tag in tags)
    bias = {str(opens): 30.0, str(closes): -100.0}
    return {"logit_bias": bias, "regex": "[a-z]{9}", "max_thinking_tokens": 8}


def response_of(client: Any, stream: bool, **body: Any) -> Any:
    if not stream:
        return client.responses.create(model="any", **body)
    events: list[Any] = list(client.responses.create(model="any", stream=True, **body))
    for event in events:
        type_of("openai.types.responses:ResponseStreamEvent").validate_python(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events[-1].response


@pytest.mark.parametrize("stream", [False, True])
def test_responses(qwen: Running, thinking: dict[str, Any], stream: bool) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{qwen.url}/v1", api_key="none", max_retries=0)
    answer = response_of(client, stream, input=QUESTION, extra_body=thinking)
    reasoning, message = answer.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert reasoning.content[0].text and "<think>" not in answer.output_text and len(answer.output_text) == 9
    assert answer.usage.output_tokens_details.reasoning_tokens > 1
    tools: Any = [{"type": "function", "name": "take_step", "parameters": SCHEMA}]
    asked: Any = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for step in range(STEPS):
        answer = response_of(client, stream, input=items, **asked)
        [call] = answer.output
        assert call.type == "function_call" and json.loads(call.arguments)["pace"] in ("slow", "fast")
        assert bool(answer.usage.input_tokens_details.cached_tokens) >= bool(step)
        output = {"type": "function_call_output", "call_id": call.call_id, "output": f"Step {step} is done."}
        items += [call.to_dict(), output]
    forms = {"text": {"format": {"type": "json_schema", "name": "step", "schema": SCHEMA}}}
    answer = response_of(client, stream, input=items, **forms)
    assert json.loads(answer.output_text)["number"] in range(1, 10)


def message_of(client: Any, stream: bool, **body: Any) -> Any:
    body = {"model": "any", "max_tokens": 200, **body}
    if not stream:
        return client.messages.create(**body)
    for event in client.messages.create(stream=True, **body):
        type_of("anthropic.types:RawMessageStreamEvent").validate_python(event.to_dict())
    with client.messages.stream(**body) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_messages(qwen: Running, thinking: dict[str, Any], stream: bool) -> None:
    import anthropic

    client: Any = anthropic.Anthropic(base_url=qwen.url, api_key="none", max_retries=0)
    chat: list[Any] = [{"role": "user", "content": QUESTION}]
    answer = message_of(client, stream, messages=chat, extra_body=thinking)
    thought, text = answer.content
    assert (thought.type, text.type, len(text.text)) == ("thinking", "text", 9) and thought.thinking
    tools = [{"name": "take_step", "input_schema": SCHEMA}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    for step in range(STEPS):
        answer = message_of(client, stream, messages=chat, tools=tools, tool_choice=choice)
        [call] = answer.content
        assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "take_step")
        assert call.input["number"] in range(1, 10)
        assert bool(answer.usage.cache_read_input_tokens) >= bool(step)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"Step {step} is done."}
        chat += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = message_of(client, stream, messages=chat, output_config=config)
    assert json.loads(answer.content[-1].text)["pace"] in ("slow", "fast")
