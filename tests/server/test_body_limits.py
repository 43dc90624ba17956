"""Bodies that are as large as they may be: they are refused without much memory, and nobody waits for them."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from servers import Running

from ovspec.protocols.apis import BODY_TYPES
from ovspec.protocols.bodies import RequestBody
from ovspec.protocols.chat.bodies import ChatRequest, CompletionRequest
from ovspec.protocols.messages.body import MessagesRequest
from ovspec.protocols.tokenize import DetokenizeRequest
from ovspec.server.body_limits import MAX_COMMAS, parse_body
from ovspec.server.errors import ApiError

TEXT = {"prompt": "a"}


def hostile(many: int) -> list[tuple[type[RequestBody], Any, str]]:
    """Return requests, bodies with ``many`` wrong items, and what is told of them."""
    numbered = {str(number): "" for number in range(many)}
    return [
        (ChatRequest, {"messages": [0] * many}, "messages must be a list of objects"),
        (CompletionRequest, {"prompt": [None] * many}, "prompt must be a string"),
        (CompletionRequest, {"prompt": ["a"] * many + [0]}, "prompt must be a string"),
        (CompletionRequest, {"prompt": [[5], ["a"] * many]}, "prompt must be a string"),
        (CompletionRequest, {**TEXT, "stop": [0] * many}, "stop must be a string or a list of strings"),
        (
            CompletionRequest,
            {**TEXT, "logit_bias": numbered},
            "logit_bias must be an object that maps whole numbers",
        ),
        (CompletionRequest, {**TEXT, "max_tokens": 1, **numbered}, "0 is not a field"),
        (CompletionRequest, {**TEXT, "stream_options": numbered}, "stream_options.0 is not a field"),
        (DetokenizeRequest, {"tokens": ["a"] * many}, "tokens must be a list of whole numbers"),
        (MessagesRequest, {"messages": [0] * many}, "messages must be a list of objects"),
        (MessagesRequest, {"messages": [{}], "tools": [0] * many}, "tools must be a list of objects"),
        (MessagesRequest, {"messages": [{}], "stop_sequences": [0] * many}, "stop_sequences must be a list of strings"),
    ]


@pytest.mark.parametrize(("request_type", "body", "message"), hostile(20_000))
def test_few_errors_are_kept(request_type: type[RequestBody], body: Any, message: str) -> None:
    """Pydantic takes some hundred bytes for each error, and much time to tell them."""
    with pytest.raises(ValidationError) as found:
        request_type.model_validate(body)
    assert found.value.error_count() < 1000
    with pytest.raises(ApiError, match=message):
        parse_body(json.dumps(body).encode(), request_type)


def test_long_values_are_read_whole() -> None:
    """Long ones are checked in parts."""
    for prompt in ([5] * 250, ["a"] * 250, [[5] * 250] * 3, [[5]] * 250):
        read: Any = parse_body(json.dumps({"prompt": prompt}).encode(), CompletionRequest)
        assert read.prompt == prompt
    bias = {str(number): 1.0 for number in range(250)}
    read: Any = parse_body(json.dumps({**TEXT, "logit_bias": bias}).encode(), CompletionRequest)
    assert read.logit_bias == dict.fromkeys(range(250), 1.0)


def test_more_values_than_any_prompt_has() -> None:
    with pytest.raises(ApiError, match="more than 1000000 commas") as found:
        parse_body(b'{"prompt":[5' + b",5" * (MAX_COMMAS + 1) + b"]}", CompletionRequest)
    assert found.value.status_code == 413


@pytest.mark.parametrize("many", [60_000, pytest.param(300_000, marks=pytest.mark.slow)])
def test_others_are_answered_meanwhile(server: Running, many: int) -> None:
    """A body of 300,000 items would hold the server up for half a minute, if each wrong item were an error."""
    paths = {body: path for path, body in BODY_TYPES.items()}
    sent = [(paths[request], body) for request, body, _ in hostile(many)]
    sent += [("/v1/completions", {"prompt": [[]] * many}), ("/v1/completions", {"prompt": [5] * many})]
    answers = list[httpx.Response]()
    thread = threading.Thread(target=lambda: answers.extend(server.post(*each) for each in sent))
    thread.start()
    asked = 0
    with httpx.Client(base_url=server.url, timeout=max(4, many / 25_000)) as client:
        while thread.is_alive() or not asked:
            answer = client.post("/v1/completions", json={**TEXT, "max_tokens": 1})
            assert answer.status_code == 200, answer.text
            asked += 1
    thread.join()
    unknown = [len(body) > many for _, body in sent]  # fields of a request, which are ignored
    assert [answer.status_code for answer in answers] == [200 if each else 400 for each in unknown], answers
    assert [len(answer.headers.get("X-Ovspec-Ignored", "").split(",")) > 15 for answer in answers] == [
        each or "stream_options" in body for each, (_, body) in zip(unknown, sent, strict=True)
    ]
    assert all(len(answer.content) + len(str(answer.headers)) < 3000 for answer in answers)
