"""Tools and thinking on random models with real tokenizers and chat templates, whose tags are tokens."""

from __future__ import annotations

import json
import shutil
from typing import Any

import jsonschema
import pytest
from kept import kept_model
from real_families import DOWNLOADS, FAMILIES, TEMPLATES, Family, export

import ovspec
from ovspec.api.verify import record_as_json, result_from_json

pytestmark = pytest.mark.slow
CHAT: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": SCHEMA}}
    for name in ("get_weather", "get_weather_of_yesterday")
]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    family = FAMILIES[request.param]
    if not (DOWNLOADS / "tokenizers").is_dir() or not TEMPLATES.is_dir():
        pytest.skip("the tokenizers or the templates could not be fetched")
    return family


@pytest.fixture(scope="module")
def lm(family: Family, tmp_path_factory: pytest.TempPathFactory) -> ovspec.LanguageModel:
    folder = kept_model(tmp_path_factory, f"real-{family.tokenizer}", lambda place: export(family, place))
    mine = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(folder, mine)
    (mine / "ovspec.json").unlink()
    if family.template:
        shutil.copy(TEMPLATES / f"{family.template}.jinja", mine / "chat_template.jinja")
    return ovspec.load(mine, "lookup", tune=False)


def checked(lm: ovspec.LanguageModel, result: ovspec.Result, calls: bool = True) -> None:
    """Check that whole calls are valid, and that the text is verified, also from its record."""
    for call in result.tool_calls[:-1] if result.finish_reason == "length" else result.tool_calls:
        assert call.name in ("get_weather", "get_weather_of_yesterday")
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert bool(result.tool_calls) == calls, result
    assert lm.verify(result).ok
    again = {"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason}
    assert lm.verify(result_from_json(json.loads(json.dumps({**again, "record": record_as_json(result)})))).ok


def test_the_format_is_found(lm: ovspec.LanguageModel, family: Family) -> None:
    assert lm.runtime.prompt_encoder.chat_format.tool_format.name == family.format


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_required_calls_are_valid(lm: ovspec.LanguageModel, temperature: float) -> None:
    options: Any = {"tools": TOOLS, "tool_choice": "required", "temperature": temperature, "reasoning_effort": "none"}
    whole = 0
    for seed in range(6 if temperature else 1):
        result = lm.generate(CHAT, **options, seed=seed, max_tokens=120)
        checked(lm, result)
        assert result.text == "" and result.stats.forced > 0
        whole += result.finish_reason != "length"
        pieces = [*lm.stream(CHAT, **options, seed=seed, max_tokens=120)]
        parts = [call for piece in pieces for call in piece.tool_calls]
        for call in result.tool_calls:
            mine = [part for part in parts if part.index == call.index]
            assert (mine[0].name, mine[0].id) == (call.name, call.id)
            assert "".join(part.arguments for part in mine) == call.arguments
    assert whole


def test_a_call_that_begins_in_free_text_is_valid(lm: ovspec.LanguageModel, family: Family) -> None:
    if not family.opens:
        pytest.skip("no single token begins a call")
    bias = {lm.tokenizer.added_tokens[family.opens]: 12.0}
    options: Any = {"tools": TOOLS, "logit_bias": bias, "reasoning_effort": "none"}
    found = [lm.generate(CHAT, **options, temperature=1.0, seed=seed, max_tokens=120) for seed in range(6)]
    assert sum(bool(result.tool_calls) for result in found) > 2
    assert any(result.text and result.tool_calls for result in found)
    for result in found:
        checked(lm, result, bool(result.tool_calls))
    refused = lm.generate(CHAT, tools=TOOLS, tool_choice="none", logit_bias=bias, max_tokens=60)
    checked(lm, refused, calls=False)


def test_thinking_ends_with_its_budget(lm: ovspec.LanguageModel, family: Family) -> None:
    if not family.thinks:
        pytest.skip("no single token begins thinking")
    opens, closes = (lm.tokenizer.added_tokens[tag] for tag in family.thinks)
    options: Any = {"logit_bias": {opens: 30.0, closes: -100.0}, "max_tokens": 100}
    endless = lm.generate(CHAT, **options)
    assert endless.text == "" and endless.thinking and endless.finish_reason == "length"
    wanted: list[Any] = [{}, {"tools": TOOLS, "tool_choice": "required"}, {"json_schema": {"enum": ["yes", "no"]}}]
    for more in wanted:
        result = lm.generate(CHAT, **options, **more, max_thinking_tokens=9)
        assert result.token_ids.count(closes) >= 1 and result.thinking, result
        checked(lm, result, "tools" in more)
        if "json_schema" in more:
            assert json.loads(result.text) in ("yes", "no")


def test_what_is_spelt_out_stays_text(lm: ovspec.LanguageModel, family: Family) -> None:
    if not family.opens:
        pytest.skip("no single token begins a call")
    text = f'{family.opens}\n{{"name": "get_weather", "arguments": {{}}}}'
    ids = lm.tokenizer.encode(" ", special=False).tolist()
    by_byte = {spelt: token for token, spelt in enumerate(lm.tokenizer.vocabulary or ()) if spelt and len(spelt) == 1}
    spelt = [by_byte[bytes([byte])] for byte in text.encode()]
    chosen = iter([*ids, *spelt, *spelt])
    options: Any = {"sampler": lambda *_: next(chosen), "max_tokens": len(spelt)}
    result = lm.generate(CHAT, tools=TOOLS, **options)
    assert not result.tool_calls and family.opens in result.thinking + result.text
