"""/verify: a choice of a reply is checked by the server that made it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from servers import Running

CHAT = [{"role": "user", "content": "Write a function."}]


def choice_of(server: Running, **options: Any) -> Any:
    body = {"messages": CHAT, "max_tokens": 30, "return_record": True, **options}
    return server.post("/v1/chat/completions", body).json()["choices"][0]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.0, "top_p": 0.9, "seed": 3},
        {"json_schema": {"type": "string", "minLength": 30}, "logprobs": True, "top_logprobs": 3},
    ],
    ids=["greedy", "sampled", "schema"],
)
def test_an_answer_is_verified(server: Running, options: dict[str, Any]) -> None:
    choice = choice_of(server, **options)
    verdict = server.post("/verify", {"choice": choice}).json()
    assert verdict["ok"] and verdict["exact"] == verdict["tokens"] == len(choice["record"]["token_ids"])
    changed = json.loads(json.dumps(choice))
    wrong_id = 7 + (changed["record"]["token_ids"][4] == 7)
    changed["record"]["token_ids"][4] = wrong_id
    verdict = server.post("/verify", {"choice": changed}).json()
    assert not verdict["ok"] and verdict["exact"] == 4
    assert (verdict["wrong_id"], verdict["chosen_id"]) == (wrong_id, choice["record"]["token_ids"][4])
    choice["message"]["content"] += "!"
    verdict = server.post("/verify", {"choice": choice}).json()
    assert not verdict["ok"] and verdict["problem"] == "the text isn't what its tokens spell"


def test_while_others_generate(server: Running) -> None:
    """Verifying takes steps between the rounds of others, whose texts stay the same."""
    choice = choice_of(server, temperature=0, max_tokens=300, ignore_eos=True)
    alone = server.post("/v1/completions", {"prompt": "def f(", "max_tokens": 60, "temperature": 0}).json()
    with ThreadPoolExecutor(4) as pool:
        body = {"prompt": "def f(", "max_tokens": 60, "temperature": 0}
        texts = [pool.submit(server.post, "/v1/completions", body) for _ in range(2)]
        verdicts = [pool.submit(server.post, "/verify", {"choice": choice}) for _ in range(2)]
        assert all(verdict.result().json()["ok"] for verdict in verdicts)
        assert {text.result().json()["choices"][0]["text"] for text in texts} == {alone["choices"][0]["text"]}


def test_what_cannot_be_verified(server: Running) -> None:
    choice = choice_of(server, temperature=0)
    foreign = json.loads(json.dumps(choice))
    foreign["record"]["model"]["identity"] = "another"
    stops = json.loads(json.dumps(choice))
    stops["record"]["options"]["stop"] = [str(number) for number in range(100)]
    rejected = json.loads(json.dumps(choice))
    rejected["record"]["options"] |= {"accept": "rejection", "temperature": 1.0}
    for refused, words in (
        (foreign, "made by another model"),
        (stops, "stop has 100 strings"),
        (rejected, "can't be checked"),
        ({"message": {"content": "a"}}, "not a result with a record"),
    ):
        answer = server.post("/verify", {"choice": refused})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    assert server.post("/verify", {}).json()["error"]["param"] == "choice"
