"""How a text came about: each token's source and the times in a reply, and /compare."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from servers import Running

CHAT = [{"role": "user", "content": "def add(a, b):\n    return a + b\n\ndef add(a, b):\n"}]
INSIDE = {"return_token_sources": True, "timings_per_token": True}
BODY: dict[str, Any] = {"messages": CHAT, "max_tokens": 40, "temperature": 0, **INSIDE}


def chunks_of(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def token_sources_in(chunks: list[Any], index: int = 0) -> list[Any]:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [token for choice in choices for token in choice.get("token_sources", ())]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_sources_of_tokens(server: Running, path: str) -> None:
    """The same in a stream and in a whole reply, as many as were accepted, and they spell the text."""
    body = BODY if "chat" in path else {**BODY, "messages": None, "prompt": CHAT[0]["content"]}
    whole = server.post(path, body).json()
    [choice] = whole["choices"]
    sources = choice["token_sources"]
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    assert "".join(token["text"] for token in sources).removesuffix("<|im_end|>").startswith(text)
    assert len(sources) == whole["usage"]["completion_tokens"] == whole["timings"]["predicted_n"]
    accepted = [token for token in sources if token["source"] in ("lookup", "draft")]
    drafters = whole["timings"]["drafters"]
    assert accepted and len(accepted) == sum(drafter["accepted"] for drafter in drafters.values())
    assert len(accepted) == whole["timings"]["draft_n_accepted"] == len(sources) - whole["timings"]["rounds"]
    chunks = chunks_of(server.post(path, {**body, "stream": True}))
    assert token_sources_in(chunks) == sources
    generated = [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
    assert generated == sorted(generated) and generated[-1] == len(sources)
    assert chunks[-1]["timings"]["predicted_per_second"] > 0


def test_forced_tokens_and_logprobs(server: Running) -> None:
    """A token of a grammar is forced, and sources don't change log-probabilities."""
    body = {**BODY, "regex": "the beginning is forced[a-z]+"}
    whole = server.post("/v1/chat/completions", body).json()
    sources = [token["source"] for token in whole["choices"][0]["token_sources"]]
    assert sources.count("forced") == whole["timings"]["forced_n"] > 3
    body |= {"logprobs": True, "top_logprobs": 2}  # for which each token is computed
    [choice] = server.post("/v1/chat/completions", body).json()["choices"]
    assert [token["token"] for token in choice["logprobs"]["content"]] == [
        token["text"] for token in choice["token_sources"]
    ]


def test_nothing_of_it_unless_it_is_asked_for(server: Running) -> None:
    answer = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4}).json()
    assert "timings" not in answer and "token_sources" not in answer["choices"][0]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_a_comparison_is_streamed(server: Running, sampling: dict[str, float]) -> None:
    """Both texts have the same tokens, of which only one choice's were proposed; the turns and the verdict follow."""
    answer = server.post("/compare", {**BODY, **sampling, "max_tokens": 24, "stream": True})
    chunks = chunks_of(answer)
    plain, speculative = token_sources_in(chunks, 0), token_sources_in(chunks, 1)
    assert {token["source"] for token in plain} == {"target"}
    assert {token["source"] for token in speculative} > {"target"}
    assert [token["id"] for token in plain] == [token["id"] for token in speculative]
    *turns, last = [chunk["comparison"] for chunk in chunks if "comparison" in chunk]
    assert [turn["turns"] for turn in turns] == [*range(1, last["turns"] + 1)] and last["turns"] >= 4
    assert last["equal"] and last["equality_sentence"] == f"both texts are identical: {len(plain)} tokens"
    assert "speed-up" in last["speedup_sentence"]
    assert last["plain_per_second"] > 0 and last["speculative_per_second"] > 0


def test_a_comparison_as_a_whole(server: Running) -> None:
    answer = server.post("/compare", {**BODY, "max_tokens": 16, "json_schema": {"type": "integer"}}).json()
    assert "error" not in answer, answer
    plain, speculative = (choice["message"]["content"] for choice in answer["choices"])
    assert plain == speculative and int(plain) is not None
    assert answer["object"] == "chat.completion" and answer["comparison"]["equal"]
    alone = server.post("/v1/chat/completions", {**BODY, "max_tokens": 16, "json_schema": {"type": "integer"}}).json()
    assert alone["choices"][0]["message"]["content"] == plain


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("n", {"n": 2}),
        ("draft", {"draft": "none"}),
        ("draft", {"draft": "head"}),
        ("lookahead", {"lookahead": 0}),
        ("max_tokens", {"max_tokens": 0}),
        ("regex", {"regex": "("}),
    ],
)
def test_what_cannot_be_compared(server: Running, field: str, fields: dict[str, Any]) -> None:
    answer = server.post("/compare", {**BODY, **fields, "stream": True})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_a_client_that_leaves_ends_its_comparison(server: Running) -> None:
    body = {**BODY, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/compare", json=body, timeout=60) as answer:
        next(answer.iter_lines())
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
