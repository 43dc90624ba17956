"""Bodies that are as large as they may be: they are refused without much memory, and nobody waits for them."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from servers import Running

from ovspec.serving.bodies import MOST_COMMAS, read_fields
from ovspec.serving.errors import ApiError
from ovspec.serving.models import ChatRequest, CompletionRequest, DetokenizeRequest, Fields
from ovspec.serving.wording import TEXTS

MANY = 300_000
TEXT = {"prompt": "a"}
NUMBERED = {str(number): "" for number in range(MANY)}
# request, body, and what is told of it
HOSTILE: list[tuple[type[Fields], Any, str]] = [
    (ChatRequest, {"messages": [0] * MANY}, "messages must be a list of objects"),
    (CompletionRequest, {"prompt": [None] * MANY}, "prompt must be a string"),
    (CompletionRequest, {"prompt": ["a"] * MANY + [0]}, "prompt must be a string"),
    (CompletionRequest, {"prompt": [[5], ["a"] * MANY]}, "prompt must be a string"),
    (CompletionRequest, {**TEXT, "stop": [0] * MANY}, "stop must be a string or a list of strings"),
    (CompletionRequest, {**TEXT, "logit_bias": NUMBERED}, "an object whose values are numbers"),
    (CompletionRequest, {**TEXT, **NUMBERED}, "0 is not a field"),
    (CompletionRequest, {**TEXT, "stream_options": NUMBERED}, "stream_options.0 is not a field"),
    (DetokenizeRequest, {"tokens": ["a"] * MANY}, "tokens must be a list of whole numbers"),
]


@pytest.mark.parametrize(("request_type", "body", "message"), HOSTILE)
def test_few_errors_are_kept(request_type: type[Fields], body: Any, message: str) -> None:
    """Pydantic takes some hundred bytes for each error, and much time to tell them."""
    with pytest.raises(ValidationError) as found:
        request_type.model_validate(body)
    assert found.value.error_count() < 1000
    with pytest.raises(ApiError, match=message):
        read_fields(json.dumps(body).encode(), request_type)


def test_long_values_are_read_whole() -> None:
    """Long ones are checked in parts."""
    for prompt in ([5] * 250, ["a"] * 250, [[5] * 250] * 3, [[5]] * 250):
        assert read_fields(json.dumps({"prompt": prompt}).encode(), CompletionRequest).given() == {"prompt": prompt}
    bias = {str(number): 1.0 for number in range(250)}
    assert (
        read_fields(json.dumps({**TEXT, "logit_bias": bias}).encode(), CompletionRequest).given()["logit_bias"] == bias
    )


def test_more_values_than_any_prompt_has() -> None:
    with pytest.raises(ApiError, match="more than 1000000 commas") as found:
        read_fields(b'{"prompt":[5' + b",5" * (MOST_COMMAS + 1) + b"]}", CompletionRequest)
    assert found.value.status_code == 413


def test_others_are_answered_meanwhile(server: Running) -> None:
    """A body of some megabytes would hold the server up for half a minute, if each wrong item were an error."""
    paths = {request: path for path, request in TEXTS.items()} | {DetokenizeRequest: "/detokenize"}
    hostile = [(paths[request], body) for request, body, _ in HOSTILE]
    hostile += [("/v1/completions", {"prompt": [[]] * MANY}), ("/v1/completions", {"prompt": [5] * MANY})]
    answers = list[httpx.Response]()
    thread = threading.Thread(target=lambda: answers.extend(server.post(*each) for each in hostile))
    thread.start()
    asked = 0
    with httpx.Client(base_url=server.url, timeout=10) as client:
        while thread.is_alive() or not asked:
            answer = client.post("/v1/completions", json={**TEXT, "max_tokens": 1})
            assert answer.status_code == 200, answer.text
            asked += 1
    thread.join()
    assert [answer.status_code for answer in answers] == [400] * len(hostile), answers
    assert all(len(answer.content) < 1000 for answer in answers)
