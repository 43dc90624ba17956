"""OpenAI's own client and langchain's talk to a real server; each text is the one that ``generate`` gives alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from commands_here import Command, commands_here
from conftest import PROMPTS
from pydantic import BaseModel
from servers import DEMO, Running

import ovspec

CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write a loop in Python."}]
BODIES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"logit_bias": {"300": -100.0}, "frequency_penalty": 0.7},
    {"stop": ["\n", "::"]},
]


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def lm(cache_dir: Path) -> ovspec.LanguageModel:
    return ovspec.load(DEMO, "lookup,draft", precision="f32", cache_dir=cache_dir)


def ours(body: dict[str, Any]) -> dict[str, Any]:
    bias = {int(token): value for token, value in body.get("logit_bias", {}).items()}
    return body | ({"logit_bias": bias} if bias else {})


@pytest.mark.parametrize("body", BODIES)
def test_completions(client: Any, lm: ovspec.LanguageModel, body: dict[str, Any]) -> None:
    for prompt in PROMPTS[:2]:
        alone = lm.generate(prompt, max_tokens=40, **ours(body))
        whole = client.completions.create(model="demo", prompt=prompt, max_tokens=40, **body)
        assert whole.choices[0].text == alone.text
        assert whole.choices[0].finish_reason == ("length" if alone.finish_reason == "length" else "stop")
        assert whole.usage and whole.usage.completion_tokens == alone.stats.generated_tokens
        stream = client.completions.create(model="demo", prompt=prompt, max_tokens=40, stream=True, **body)
        assert "".join(chunk.choices[0].text for chunk in stream) == alone.text


@pytest.mark.parametrize("body", [*BODIES, {"max_completion_tokens": 5}])
def test_chats(client: Any, lm: ovspec.LanguageModel, body: dict[str, Any]) -> None:
    body = {"max_completion_tokens": 40, **body}
    options = {name: value for name, value in ours(body).items() if name != "max_completion_tokens"}
    alone = lm.generate(CHAT, max_tokens=body["max_completion_tokens"], **options)
    whole = client.chat.completions.create(model="demo", messages=CHAT, **body)
    assert whole.choices[0].message.content == alone.text
    stream = client.chat.completions.create(
        model="demo", messages=CHAT, stream=True, stream_options={"include_usage": True}, **body
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == alone.text
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens  # type: ignore
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason


def test_content_in_parts_and_the_developer_are_read(client: Any) -> None:
    parts: Any = [{"type": "text", "text": "Write a loop in Python."}]
    same: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    found = [
        client.chat.completions.create(model="demo", messages=messages, max_tokens=20).choices[0].message.content
        for messages in (CHAT, same)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "draft", ["lookup,draft", *(pytest.param(draft, marks=pytest.mark.slow) for draft in ("none", "lookup", "draft"))]
)
def test_log_probabilities_are_the_same_in_a_stream_and_with_any_draft(client: Any, draft: str) -> None:
    body: dict[str, Any] = {"model": "demo", "max_tokens": 30, "stop": ["zzz", ")\n"], "extra_body": {"draft": draft}}
    plain = client.completions.create(prompt=PROMPTS[1], logprobs=2, **body | {"extra_body": {"draft": "none"}})
    expected = plain.choices[0].logprobs
    assert expected and expected.tokens
    whole = client.completions.create(prompt=PROMPTS[1], logprobs=2, **body).choices[0].logprobs
    chunks = list(client.completions.create(prompt=PROMPTS[1], logprobs=2, stream=True, **body))
    told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [value for each in told for value in getattr(each, name)]
        assert streamed == getattr(whole, name) == getattr(expected, name), name
    chat: Any = {"messages": CHAT, "logprobs": True, "top_logprobs": 2, **body}
    whole_chat = client.chat.completions.create(**chat).choices[0].logprobs
    pieces = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(stream=True, **chat)]
    assert whole_chat and whole_chat.content
    assert [token for each in pieces if each for token in each.content or []] == whole_chat.content


def test_several_texts_of_several_prompts(client: Any, lm: ovspec.LanguageModel) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "n": 2}
    found = client.completions.create(model="demo", prompt=PROMPTS[:2], **options)
    alone = [result.text for prompt in PROMPTS[:2] for result in lm.samples(prompt, **options)]
    assert [choice.text for choice in found.choices] == alone
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(model="demo", prompt=PROMPTS[:2], stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == alone
    greedy = client.completions.create(model="demo", prompt=PROMPTS[0], n=2, max_tokens=12)
    assert [choice.text for choice in greedy.choices] == [lm.generate(PROMPTS[0], max_tokens=12).text] * 2


def test_the_prompt_is_repeated(client: Any, lm: ovspec.LanguageModel) -> None:
    body: dict[str, Any] = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 8, "echo": True, "logprobs": 1}
    whole = client.completions.create(**body).choices[0]
    assert whole.text == body["prompt"] + lm.generate(body["prompt"], max_tokens=8).text
    assert whole.logprobs and whole.logprobs.token_logprobs and whole.logprobs.token_logprobs[0] is None
    assert "".join(whole.logprobs.tokens or []) == whole.text
    chunks = list(client.completions.create(stream=True, **body))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [value for each in told for value in each.text_offset or []] == whole.logprobs.text_offset


class Fruit(BaseModel):
    name: Literal["apple", "pear"]
    ripe: bool


def test_answers_are_parsed_as_pydantic_models(client: Any) -> None:
    found = client.chat.completions.parse(model="demo", messages=CHAT, response_format=Fruit, max_tokens=60)
    assert isinstance(found.choices[0].message.parsed, Fruit)
    made = client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=200, response_format={"type": "json_object"}, temperature=1.0, seed=1
    )
    assert (
        isinstance(json.loads(made.choices[0].message.content or ""), dict) or made.choices[0].finish_reason == "length"
    )


def test_what_a_request_allows_to_be_proposed(server: Running) -> None:
    for more, proposed in (({}, True), ({"draft": "none"}, False), ({"lookahead": 0}, False)):
        found = server.post("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 40, **more}).json()
        details = found["usage"]["completion_tokens_details"]
        assert any(details.values()) == proposed, more


def test_grammars_under_our_names(client: Any) -> None:
    for body, expected in [
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "(ab){2}"}, {"abab"}),
        ({"gbnf": 'root ::= "x" "y"'}, {"xy"}),
        ({"grammar": 'start: "x" "z"'}, {"xz"}),
    ]:
        found = client.completions.create(model="demo", prompt="a", max_tokens=20, extra_body=body)
        assert found.choices[0].text in expected


def test_many_at_once(server: Running, lm: ovspec.LanguageModel) -> None:
    import openai

    async def ask(prompts: list[str]) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120) as client:
            asked = [client.completions.create(model="demo", prompt=prompt, max_tokens=20) for prompt in prompts]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    prompts = PROMPTS[:8]
    assert asyncio.run(ask(prompts)) == [result.text for result in lm.generate(prompts, max_tokens=20)]


@pytest.mark.slow  # it asks with OpenAI's client, as the tests above do
def test_langchain(server: Running, lm: ovspec.LanguageModel) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="demo", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=20)  # type: ignore[call-arg]
    expected = lm.generate(CHAT, max_tokens=20).text
    assert chat.invoke(CHAT).content == expected
    assert "".join(str(chunk.content) for chunk in chat.stream(CHAT)) == expected
    made = chat.model_copy(update={"max_tokens": 60}).with_structured_output(Fruit, method="json_schema").invoke(CHAT)
    assert isinstance(made, Fruit)


def test_tokens(server: Running, lm: ovspec.LanguageModel) -> None:
    text = "def f(x): return 'ä€'"
    tokens = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert tokens == lm.encode(text).tolist()
    assert server.post("/detokenize", {"tokens": tokens}).json()["content"] == text
    chat = server.post("/tokenize", {"messages": CHAT}).json()
    assert chat["tokens"] == lm.encode(CHAT).tolist() and chat["count"] == len(chat["tokens"])


def test_the_model_and_the_state_are_told(server: Running, client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    client.completions.create(model="demo", prompt="def f(", max_tokens=3)
    assert server.get("/health").json() == {"status": "ok"}
    ready = server.get("/ready").json()
    cache = ready.pop("cache")
    assert cache["limit_bytes"] > cache["kept_bytes"] > cache["used_bytes"] == cache["reserved_bytes"] == 0
    assert ready == {
        "status": "ready",
        "arithmetic": "exact",
        "deterministic": True,
        "prefix_cache": "exact",
        "drafters": ["lookup", "draft"],
        "device": "CPU",
        "engine": "paged",
    }
    assert server.metric("ovspec_generated_tokens_total") > 0
    assert server.metric("ovspec_requests_total") > 0


def test_usage_counts_tokens_and_proposals(server: Running) -> None:
    found = server.post("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 20}).json()
    assert found["usage"]["completion_tokens"] == 20
    assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


@pytest.fixture
def command(cache_dir: Path) -> Iterator[Command]:
    yield from commands_here(cache_dir)


def test_answers_are_verified(server: Running, tmp_path: Path, command: Command) -> None:
    """Whole answers are what 'ovspec verify' reads, here one a line."""
    answers = list[str]()
    for path, more in (("/v1/completions", {"prompt": PROMPTS[0]}), ("/v1/chat/completions", {"messages": CHAT})):
        body = {"max_tokens": 20, "temperature": 0.7, "seed": 2, "n": 2, "return_record": True, **more}
        answers.append(server.post(path, body).text)
    (tmp_path / "answers.jsonl").write_text("\n".join(answers), encoding="utf-8")
    done = command("verify", tmp_path / "answers.jsonl")
    assert not done.returncode and "exact: 80 of 80 tokens in 4 texts" in done.stdout
    stream = {"prompt": "a", "max_tokens": 20, "ignore_eos": True, "return_record": True, "stream": True}
    chunks = server.post("/v1/completions", stream).text.split("\n\n")
    assert chunks[-2] == "data: [DONE]"
    last = json.loads(chunks[-3].removeprefix("data: "))["choices"][0]
    assert len(last["record"]["token_ids"]) == 20


def test_broken_texts_are_generated_again(server: Running, lm: ovspec.LanguageModel) -> None:
    """With the seeds that ``samples`` would take."""
    schema = {"type": "integer", "minimum": 0, "maximum": 9, "not": {"multipleOf": 2}}
    options: Any = {"json_schema": schema, "json_schema_mode": "checked", "temperature": 2.0, "seed": 4, "n": 4}
    first = lm.samples("= ", **options)
    assert any(each.schema_errors for each in first)
    expected = lm.samples("= ", retries=20, **options)
    answer = server.post("/v1/completions", {"prompt": "= ", "retries": 20, **options})
    choices = answer.json()["choices"]
    assert [choice["text"] for choice in choices] == [each.text for each in expected] != [each.text for each in first]
    assert all(int(choice["text"]) % 2 for choice in choices)
