"""A request's text is the one it gets alone, byte for byte, whatever else is asked for at the same time."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import PROMPTS, ROOT
from pydantic_core import from_json
from random_pairs import PAIRS, shared_pair
from servers import Running, StartHere

import ovspec
from ovspec.api.verify import result_from_json

FEW, MANY = 21, 64  # requests in quick and in slow runs: each way once, and about three times
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.02, "n": 2},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"stop": ["e", "\n\n"], "min_tokens": 4},
    {"regex": "[a-z ]{1,30}"},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"choice": ["apple", "pear", "plum"]},
    {"logprobs": 2},
    {"draft": "none"},
    {"draft": "lookup", "logit_bias": {"12": 50.0, "13": 50.0}, "ignore_eos": True},  # a text that repeats itself
    {"draft": "draft", "lookahead": 3},
    {"lookahead": 0},
    {"heal": True},
    {"temperature": 0.7, "logit_bias": {"12": 2.0}, "ignore_eos": True},
]
SCHEMA = {"type": "object", "properties": {"where": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2, 30]}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {**SCHEMA, "required": ["where"]}}}
    for name in ("get_weather", "book")
]
BOOK = {"type": "function", "function": {"name": "book"}}
THINK = {"chat_template_kwargs": {"think": True}}
CHAT_WAYS: list[dict[str, Any]] = [
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": "required", "temperature": 1.0, "n": 2},
    {"tools": TOOLS, "tool_choice": BOOK, **THINK, "max_thinking_tokens": 3},
    {**THINK, "max_thinking_tokens": 6, "temperature": 0.8},
    {**THINK, "max_thinking_tokens": 4, "json_schema": SCHEMA, "draft": "lookup"},
    {"tools": TOOLS, "logprobs": True, "top_logprobs": 1},
]
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if think %}<think>{% endif %}{# </think> #}"""


def requests(chance: random.Random, count: int) -> list[dict[str, Any]]:
    """Return bodies with prompts of all lengths, some of which share their beginning."""
    bodies = []
    for number in range(count):
        way = dict((WAYS + CHAT_WAYS)[number % len(WAYS + CHAT_WAYS)])
        if way.get("temperature"):
            way["seed"] = chance.randrange(2**31)
        long = "\n".join(PROMPTS[: chance.randint(1, 4)]) if number % 3 == 0 else chance.choice(PROMPTS)
        most = chance.randint(8, 32)
        prompt: dict[str, Any] = {"prompt": long, "max_tokens": most}
        if "tools" in way or "chat_template_kwargs" in way:
            system = {"role": "system", "content": PROMPTS[0]}
            user = {"role": "user", "content": chance.choice(PROMPTS)}
            prompt = {"messages": [system, user], "max_tokens": 2 * most}
        bodies.append({**prompt, "return_record": True, **way})
    return bodies


def sent(number: int, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request: chats are asked for in turns through each API that has chats."""
    if "messages" not in body:
        return "/v1/completions", body
    turn = (number % len(WAYS + CHAT_WAYS) + number // len(WAYS + CHAT_WAYS)) % 3
    if "n" in body or "logprobs" in body or turn == 1:  # some have what only OpenAI's older API has
        return "/v1/chat/completions", body
    tools = [tool["function"] for tool in body.get("tools", ())]
    choice = body.get("tool_choice")
    if turn == 0:
        made = {name: value for name, value in body.items() if name not in ("messages", "max_tokens")}
        made |= {"input": body["messages"], "max_output_tokens": body["max_tokens"]}
        if tools:
            made["tools"] = [{"type": "function", **tool} for tool in tools]
            made["tool_choice"] = {"type": "function", "name": "book"} if choice == BOOK else choice
        return "/v1/responses", made
    made = dict(body)
    if tools:
        made["tools"] = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in tools]
        made["tool_choice"] = {"type": "tool", "name": "book"} if choice == BOOK else {"type": "any"}
    return "/v1/messages", made


def options_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a request as Python takes them, without anything that proposes tokens."""
    others = ("prompt", "messages", "return_record", "draft", "top_logprobs")
    options: dict[str, Any] = {name: value for name, value in body.items() if name not in others} | {"lookahead": 0}
    if "logit_bias" in options:
        options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
    if options.get("logprobs") is True:
        options["logprobs"] = body["top_logprobs"]
    return options


def said(answer: dict[str, Any]) -> list[Any]:
    """Return what the texts of an answer say, as a completion or as messages."""
    if "choices" in answer:
        texts = [choice.get("text", choice.get("message")) for choice in answer["choices"]]
        return [text if isinstance(text, str) else {**text, "content": text["content"] or ""} for text in texts]
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for part in answer.get("output") or answer["content"]:
        if part["type"] in ("message", "text"):
            message["content"] += part["text"] if "text" in part else part["content"][0]["text"]
        elif part["type"] in ("reasoning", "thinking"):
            message["reasoning_content"] = part.get("thinking") or part["content"][0]["text"]
        else:
            arguments = part["arguments"] if "arguments" in part else part["input"]
            function = {"name": part["name"], "arguments": arguments}
            call = {"id": part.get("call_id") or part["id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    return [message]


def as_objects(message: Any) -> Any:
    """Return a message with the arguments of its calls as objects, as Anthropic's API has them."""
    if not isinstance(message, dict) or "tool_calls" not in message:
        return message
    calls = json.loads(json.dumps(message["tool_calls"]))
    for call in calls:
        call["function"]["arguments"] = from_json(call["function"]["arguments"] or "{}", allow_partial=True)
    return {**message, "tool_calls": calls}


async def send_all(server: Running, bodies: list[dict[str, Any]], chance: random.Random) -> tuple[list[Any], float]:
    """Send requests at random times, and break some off; return their answers, None for those, and the most rows."""
    most = 0.0
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=httpx.Limits(max_connections=100)) as client:

        async def send(number: int, body: dict[str, Any], delay: float) -> Any:
            await asyncio.sleep(delay)
            path, asked = sent(number, body)
            if number % 7 == 5:
                async with client.stream("POST", path, json={**asked, "stream": True}) as response:
                    async for _ in response.aiter_bytes():
                        return None
                return None
            answer = await client.post(path, json=asked)
            assert answer.status_code == 200, answer.text
            return answer.json()

        async def watch() -> None:
            nonlocal most
            while True:
                for line in (await client.get("/metrics")).text.splitlines():
                    if line.startswith("ovspec_texts_running "):
                        most = max(most, float(line.split()[1]))
                await asyncio.sleep(0.02)

        watching = asyncio.ensure_future(watch())
        answers = await asyncio.gather(*[send(i, body, chance.uniform(0, 0.5)) for i, body in enumerate(bodies)])
        watching.cancel()
        return answers, most


NAMES = ("qwen2-int8", "gpt2-int4", "demo-int8", "qwen3_5-int8")
TWO = ("gpt2-int4", "qwen2-int8-head", "gpt2-int4-head", "qwen2-int8-trimmed")
SLOW = [
    pytest.param(name, lookahead, MANY, marks=pytest.mark.slow)
    for name, lookahead in (*((name, "auto") for name in NAMES), *((name, "2") for name in ("qwen2-int8", *TWO)))
]


@pytest.mark.parametrize(("name", "lookahead", "count"), [("qwen2-int8", "2", FEW), *SLOW])
def test_no_request_changes_another(
    name: str,
    lookahead: str,
    count: int,
    start_here: StartHere,
    cache_dir: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    made = shared_pair(name, tmp_path_factory) if name in PAIRS else ROOT / "models" / "demo"
    folder = tmp_path / "model"
    shutil.copytree(made, folder, ignore=shutil.ignore_patterns("checkpoint", "uncompressed"))
    (folder / "ovspec.json").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    model = "head" if name.endswith("head") else "draft"
    drafting = ("--draft", f"lookup,{model}", "--lookahead", lookahead)
    server = start_here(folder, *drafting, "--batch-size", "6", "--deterministic")
    chance = random.Random(7)
    bodies = requests(chance, count)
    for body in bodies:
        body |= {"draft": model} if body.get("draft") == "draft" else {}
    answers, most = asyncio.run(send_all(server, bodies, chance))
    lm = ovspec.load(folder, cache_dir=cache_dir)
    assert lm.target.arithmetic_note == "exact"
    calls = thoughts = 0
    paths = dict[str, int]()
    for number, (body, answer) in enumerate(zip(bodies, answers, strict=True)):
        if answer is None:
            continue
        path, _ = sent(number, body)
        paths[path] = paths.get(path, 0) + 1
        alone = lm.samples(body.get("prompt") or body["messages"], **options_of(body))
        ours = [result.text if "prompt" in body else result.message for result in alone]
        assert said(answer) == ([*map(as_objects, ours)] if path == "/v1/messages" else ours), body
        calls += sum(len(result.tool_calls) for result in alone)
        thoughts += sum(bool(result.thinking) for result in alone)
        for choice, result in zip(answer.get("choices") or [answer], alone, strict=True):
            assert choice["record"]["token_ids"] == result.token_ids
            verified = lm.verify(result_from_json(choice))
            assert verified.ok, (body, str(verified))
    assert calls and thoughts and len(paths) == 4, paths
    assert most > 3, "requests must run beside each other"
    assert sum(answer is None for answer in answers) == count // 7 > 2
    metrics = server.get("/metrics").text
    # Unless the lookahead is fixed, only what pays is proposed: the draft in no batch, and lookup on small
    # random models only now and then.
    sure = ("lookup", model) if lookahead != "auto" else ("lookup",) if name == "demo-int8" else ()
    for what in ("proposed", "accepted"):
        for drafter in sure:
            found = re.search(rf'ovspec_{what}_tokens_total{{drafter="{drafter}"}} (\S+)', metrics)
            assert found and float(found[1]) > 0, metrics
    assert server.metric("ovspec_texts_running") == server.metric("ovspec_cache_blocks_used") == 0
