"""What a request leaves out of its sampling is what the model's generation config recommends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servers import StartHere

import ovspec
from ovspec.params.serving import ServeParams
from ovspec.protocols.chat.request import read_chat_or_completion
from ovspec.protocols.parsing import BODIES_WITH_FIELDS, validate_body
from ovspec.protocols.requests import RequestKind
from ovspec.server.context import ServerContext

RECOMMENDED = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 20}
HI: list[Any] = [{"role": "user", "content": "hi"}]
CHAT, COMPLETION = ("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "hi"})
KINDS: dict[str, RequestKind] = {CHAT[0]: "chat", COMPLETION[0]: "completion"}


@pytest.fixture(scope="module")
def lm(with_generation_config: Callable[[dict[str, Any]], Path], cache_dir: Path) -> ovspec.LanguageModel:
    options: Any = {"engine": "stateful", "arithmetic": "fast", "cache_dir": cache_dir}
    return ovspec.load(with_generation_config(RECOMMENDED), "none", precision="f32", **options)


def served(lm: Any, temperature: float | None = None) -> ServerContext:
    engine: Any = SimpleNamespace(metrics=None)
    return ServerContext(lm, engine, ["it"], ServeParams(temperature=temperature))


def sampling(service: ServerContext, path: str, body: dict[str, Any]) -> tuple[float, int, float]:
    params = service.preparer.make_request_params(
        read_chat_or_completion(validate_body(body, BODIES_WITH_FIELDS[path]), KINDS[path])
    )
    return params.temperature, params.top_k, params.top_p


# (temperature of the server, what a body sets, what it gets)
CASES: list[tuple[float | None, dict[str, Any], tuple[float, int, float]]] = [
    (None, {}, (1.5, 20, 0.9)),
    (None, {"temperature": None, "top_p": None}, (1.5, 20, 0.9)),
    (None, {"temperature": 0.3}, (0.3, 20, 0.9)),
    (None, {"top_p": 1}, (1.5, 20, 1)),
    (None, {"top_k": 0, "top_p": 0.5}, (1.5, 0, 0.5)),
    (None, {"temperature": 0}, (0, 0, 1)),
    (None, {"temperature": 0, "top_p": 1}, (0, 0, 1)),
    (None, {"n": 3, "logprobs": None, "regex": "[a-z]+", "accept": "rejection"}, (1.5, 20, 0.9)),
    (0.0, {}, (0, 0, 1)),
    (0.0, {"temperature": 0.3}, (0.3, 0, 1)),
    (0.7, {}, (0.7, 20, 0.9)),
    (0.7, {"temperature": 0}, (0, 0, 1)),
]


@pytest.mark.parametrize(("temperature", "body", "expected"), CASES)
def test_what_a_request_leaves_out(
    lm: ovspec.LanguageModel, temperature: float | None, body: dict[str, Any], expected: tuple[float, int, float]
) -> None:
    for path, prompt in (CHAT, COMPLETION):
        assert sampling(served(lm, temperature), path, prompt | body) == expected


@pytest.mark.parametrize("temperature", [None, 0.0, 0.7])
def test_without_a_recommendation(
    lm: ovspec.LanguageModel, with_generation_config: Callable[[dict[str, Any]], Path], temperature: float | None
) -> None:
    for more in ({}, RECOMMENDED | {"do_sample": False}):
        other = SimpleNamespace(**vars(lm) | {"folder": with_generation_config(more)})
        service = served(other, temperature)
        assert service.recommended_sampling == {}
        assert sampling(service, *CHAT) == (temperature or 0, 0, 1)
        assert sampling(service, CHAT[0], CHAT[1] | {"temperature": 0.5, "top_k": 4}) == (0.5, 4, 1)
        # It changes nothing of a greedy text.
        assert sampling(service, CHAT[0], CHAT[1] | {"top_p": 0.5}) == (temperature or 0, 0, 0.5 if temperature else 1)


def test_what_the_model_list_says(lm: ovspec.LanguageModel) -> None:
    recommended = {"top_k": 20, "top_p": 0.9}
    assert served(lm).sampling == {"temperature": 1.5} | recommended
    assert served(lm, 0.7).sampling == {"temperature": 0.7} | recommended
    assert served(lm, 0.0).sampling == {}


def test_a_greedy_request_may_truncate(lm: ovspec.LanguageModel) -> None:
    """Clients send a top_p, which has no effect then."""
    assert sampling(served(lm), CHAT[0], CHAT[1] | {"temperature": 0, "top_p": 0.5, "top_k": 1}) == (0, 0, 1)


def test_a_wrong_recommendation(
    lm: ovspec.LanguageModel, with_generation_config: Callable[[dict[str, Any]], Path]
) -> None:
    other = SimpleNamespace(**vars(lm) | {"folder": with_generation_config({"do_sample": True, "min_p": 2})})
    with pytest.raises(ovspec.OvspecError, match="min_p is 2; it must be from 0 to 1; correct this file"):
        served(other)
    assert sampling(served(other, 0.0), *CHAT) == (0, 0, 1)


def test_a_server_says_what_it_samples_with(
    start_here: StartHere, with_generation_config: Callable[[dict[str, Any]], Path]
) -> None:
    running = start_here(with_generation_config(RECOMMENDED), "--draft", "lookup", "--precision", "f32")
    log = running.log.read_text("utf-8")
    assert (
        "default sampling, as the model recommends: temperature 1.5, top-k 20, top-p 0.9; --temperature 0 for greedy\n"
    ) in log
    expected = {"temperature": 1.5, "top_k": 20, "top_p": 0.9}
    said = running.get("/v1/models").json()["data"][0]["sampling"]
    assert said == expected
    for (path, prompt), seed in ((CHAT, 1), (COMPLETION, 2)):
        body = prompt | {"seed": seed, "max_tokens": 12, "return_record": True}
        texts = []
        for more in ({}, said, {"temperature": 0}):  # a request takes what the list says
            answer = running.post(path, body | more)
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            texts.append(choice["message"]["content"] if "message" in choice else choice["text"])
        assert texts[0] == texts[1] != texts[2]
