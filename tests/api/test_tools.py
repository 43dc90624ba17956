"""Calls of tools are valid whatever the model says, and the same with every accelerator."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import schema_strategy
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic_core import from_json

import ovspec
from ovspec.api.verify import record_as_json, result_from_json
from ovspec.drafting.choice import parse_draft
from ovspec.engine.results import Piece
from ovspec.engine.row import Row
from ovspec.params.tool_formats import TOOL_FORMATS_BY_NAME
from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import ChatTemplate

Load = Callable[..., ovspec.LanguageModel]
SOURCE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if think %}<think>\n{% endif %}{# </think> #}{{ tools | length if tools and never }}"
)
CHATS = [
    [{"role": "user", "content": text}] for text in ("def test_get(self):", "import os", "class A:\n", "x = [1, 2, 3]")
]
TAGS = (
    "<think>",
    *(trigger.replace("{NAME}", "tool_") for each in TOOL_FORMATS_BY_NAME.values() for trigger in each.triggers),
)
QUICK = ("qwen-xml", "harmony")  # of each kind one; the slow test judges all


@pytest.fixture(autouse=True)
def templates(monkeypatch: pytest.MonkeyPatch) -> Callable[[ovspec.LanguageModel, str], ovspec.LanguageModel]:
    """Return a function that gives a model a chat template and a tool format."""

    def with_format(lm: ovspec.LanguageModel, tool_format: str) -> ovspec.LanguageModel:
        monkeypatch.setattr(lm.runtime.prompt_encoder, "chat_format", ChatFormat(ChatTemplate(SOURCE, {}), tool_format))
        return lm

    return with_format


# ---------------------------------------------------------------- no call is invalid


def random_tools(count: int, number: int) -> list[dict[str, Any]]:
    """Return tools whose schemas have all keywords that can be enforced."""
    found = list[dict[str, Any]]()
    leaves = schema_strategy.texts() | schema_strategy.numbers() | st.just({"type": "string", "maxLength": 6})

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list[Any](HealthCheck),
    )
    @given(schema_strategy.schemas(), st.dictionaries(st.sampled_from(schema_strategy.NAMES), leaves, max_size=3))
    def collect(schema: dict[str, Any], others: dict[str, Any]) -> None:
        kept = {name: value for name, value in schema.items() if name != "$defs"}
        parameters = {
            "type": "object",
            "properties": {"value": kept, **others},
            "required": ["value", *list(others)[:1]],
            "additionalProperties": False,
            "$defs": schema.get("$defs", {}),
        }
        function = {"name": f"tool_{len(found)}", "parameters": parameters}
        found.append({"type": "function", "function": function})

    collect()
    return found


def pushed(trigger: list[int], most: int, number: int) -> Callable[[Any, Any], Any]:
    """Return a logits processor that begins a call after ``most`` tokens or fewer."""
    numbers = random.Random(number)
    start = numbers.randint(0, most)

    def process(tokens: Any, logits: Any) -> Any:
        at = len(tokens) - process.start - start  # type: ignore[attr-defined]
        if 0 <= at < len(trigger):
            logits = logits.copy()
            logits[0, trigger[at]] += 100
        return logits

    return process


def begins_json(text: str) -> bool:
    """Return whether some JSON text begins with ``text``."""
    try:
        from_json(text or "{", allow_partial=True)
    except ValueError:
        return False
    return True


def check(row: Row, pieces: list[Piece], tools: dict[str, Any], counts: Counter[str]) -> None:
    """Check that the calls of a row are valid or cut off, and that its pieces tell the same."""
    result = row.result()
    told = dict[int, list[Any]]()
    for piece in pieces:
        for part in piece.tool_calls:
            call = told.setdefault(part.index, [part.name, part.id, ""])
            call[2] += part.arguments
    assert [tuple(call) for call in told.values()] == [(c.name, c.id, c.arguments) for c in result.tool_calls]
    assert "".join(piece.text for piece in pieces) == result.text
    for at, call in enumerate(result.tool_calls):
        if result.finish_reason == "length" and at == len(result.tool_calls) - 1:
            try:
                json.loads(call.arguments)
            except ValueError:
                assert begins_json(call.arguments), call.arguments
                counts["cut"] += 1
                continue
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, tools[call.name or ""])
        counts["whole"] += 1
    if not result.tool_calls:
        if row.params.allowed_calls.required:  # cut off before its call, perhaps within a tag
            assert result.finish_reason == "length"
            assert not result.text or any(tag.startswith(result.text) for tag in TAGS)
        counts["text"] += 1


def judge(lm: ovspec.LanguageModel, tool_format: str, count: int, number: int) -> Counter[str]:
    """Generate ``count`` random answers with a random tool each, and check them."""
    numbers, counts, rows, tools = random.Random(number), Counter[str](), list[Row](), dict[str, Any]()
    layout = TOOL_FORMATS_BY_NAME[tool_format]
    for at, each in enumerate(random_tools(count, number)):
        name = each["function"]["name"]
        trigger = lm.tokenizer.encode_continuation(layout.triggers[0].replace("{NAME}", name)).tolist()
        options: dict[str, Any] = {"tools": [each], "temperature": 1.0, "seed": at}
        options["max_tokens"] = numbers.choice((numbers.randint(1, 150), 320, 320))
        process = pushed(trigger, 8 if layout.calls_within_text else 0, at)
        if at % 3:
            options["tool_choice"] = "required"
        else:
            options["logits_processors"] = [process]
        try:
            row = lm.runtime.row_maker.make_rows(CHATS[at % 4], lm.runtime.row_maker.make_complete_params(options))[0]  # type: ignore[arg-type]
        except ovspec.OvspecError as refused:  # before anything was generated
            assert f"the schema of {name}, at " in str(refused) or f"the schema of {name}: " in str(refused), refused
            counts["refused"] += 1
            continue
        process.start = row.prompt_length  # type: ignore[attr-defined]
        tools[name] = each["function"]["parameters"]
        rows.append(row)
    pieces = [list[Piece]() for _ in rows]
    for batch in lm.runtime.decoder_pool.run_batch(
        rows, lm.runtime.row_maker.make_complete_params({"batch_size": 16}), len(rows)
    ):
        for at, piece in batch:
            pieces[at].append(piece)
    for row, told in zip(rows, pieces, strict=True):
        assert row.error is None, row.error
        check(row, told, tools, counts)
    return counts


@pytest.mark.parametrize("tool_format", QUICK)
def test_no_call_is_invalid(load: Load, templates: Any, tool_format: str) -> None:
    counts = judge(templates(load(), tool_format), tool_format, 10, len(tool_format))
    assert counts["whole"] >= 5, counts
    assert counts["refused"] <= 5, counts


@pytest.mark.slow
@pytest.mark.parametrize("tool_format", TOOL_FORMATS_BY_NAME)
def test_no_call_is_invalid_of_many(load: Load, templates: Any, tool_format: str) -> None:
    counts = judge(templates(load(), tool_format), tool_format, 40, 100 + len(tool_format))
    assert counts["whole"] >= 8, counts
    assert counts["cut"], counts


def test_what_is_refused_is_refused_before_anything_is_generated(load: Load, templates: Any) -> None:
    lm = templates(load(), "hermes")
    wrong = {"name": "evil", "parameters": {"type": "object", "properties": {"x": {"type": "strnig"}}}}
    for generate in (lm.generate, lm.stream, lm.samples):
        for choice in ("auto", "required"):
            with pytest.raises(
                ovspec.OvspecError, match=r"`tools`: the schema of evil, at #/properties/x/type: .*string"
            ):
                generate(CHATS[0], tools=[wrong], tool_choice=choice)
    text = lm.generate(CHATS[0], tools=[wrong], tool_choice="none", max_tokens=3)
    assert text.text
    assert not text.tool_calls


# ---------------------------------------------------------------- accelerators change nothing

TOOLS = [
    {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "maxLength": 12}, "lines": {"type": "integer", "minimum": 0}},
            "required": ["path", "lines"],
        },
    },
    {"name": "finds", "parameters": {"type": "object", "properties": {"kind": {"enum": ["file", "folder"]}}}},
]
TAG = 3800  # a token that few texts have


@pytest.fixture(scope="module")
def tagged(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the small pair with a special token <tool_call>."""
    folder = tmp_path_factory.mktemp("tagged") / "pair"
    shutil.copytree(pair, folder)
    for file in folder.glob("**/tokenizer.json"):
        loaded = json.loads(file.read_text("utf-8"))
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        loaded["added_tokens"].append({"id": TAG, "content": "<tool_call>", "special": True, **flags})
        loaded["model"]["vocab"] = {piece: i for piece, i in loaded["model"]["vocab"].items() if i != TAG}
        loaded["model"]["merges"] = []
        file.write_text(json.dumps(loaded), "utf-8")
    for file in folder.glob("**/ovspec.json"):
        file.unlink()
    return folder


WAYS: dict[str, dict[str, Any]] = {
    "auto": {"logit_bias": {TAG: 9.0}},
    "required": {"tool_choice": "required"},
    "thinking": {"chat_template_kwargs": {"think": True}, "max_thinking_tokens": 12, "logit_bias": {TAG: 9.0}},
    "thinking, required": {
        "chat_template_kwargs": {"think": True},
        "max_thinking_tokens": 5,
        "tool_choice": "required",
    },
    "thinking, format": {
        "chat_template_kwargs": {"think": True},
        "max_thinking_tokens": 7,
        "json_schema": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]},
        "logit_bias": {TAG: 4.0},
    },
}
ASKED = CHATS[:3]
DRAWN = {"temperature": 1.0, "seed": 7}


def said(result: ovspec.Result) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.thinking, result.tool_calls, result.finish_reason


def check_verified(lm: ovspec.LanguageModel, result: ovspec.Result) -> None:
    assert lm.verify(result).ok
    data = {"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason}
    again = result_from_json(json.loads(json.dumps({**data, "record": record_as_json(result)})))
    assert lm.verify(again).ok


@pytest.fixture(scope="module")
def fast_lm(tagged: Path, cache_dir: Path) -> ovspec.LanguageModel:
    """The pair with a fixed lookahead, so that something is proposed on a busy machine, too."""
    return ovspec.load(tagged, "lookup,draft", lookahead=3, precision="f32", cache_dir=cache_dir)


@pytest.fixture(scope="module")
def plain_lm(fast_lm: ovspec.LanguageModel) -> ovspec.LanguageModel:
    return fast_lm.with_drafters(None)


@pytest.fixture(scope="module")
def alone(plain_lm: ovspec.LanguageModel) -> Callable[[str, bool], list[ovspec.Result]]:
    """Return a function that generates an answer to each chat without anything that proposes, once for all drafts."""

    @functools.cache
    def alone(way: str, sampled: bool) -> list[ovspec.Result]:
        return [plain_lm.generate(chat, lookahead=0, **options_of(way, sampled)) for chat in ASKED]

    return alone


def options_of(way: str, sampled: bool) -> dict[str, Any]:
    return {"tools": TOOLS, "max_tokens": 40, **(DRAWN if sampled else {}), **WAYS[way]}


@pytest.mark.parametrize(
    "draft", ["lookup,draft", *(pytest.param(draft, marks=pytest.mark.slow) for draft in ("lookup", "draft"))]
)
@pytest.mark.parametrize("sampled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["greedy", "sampled"])
def test_accelerators_change_no_call(
    templates: Any,
    fast_lm: ovspec.LanguageModel,
    plain_lm: ovspec.LanguageModel,
    alone: Callable[[str, bool], list[ovspec.Result]],
    draft: str,
    sampled: bool,
) -> None:
    templates(plain_lm, "hermes")
    lm = templates(fast_lm.with_drafters(parse_draft(draft)), "hermes")
    proposed = accepted = forced = calls = thoughts = 0
    for way, options in WAYS.items():
        given, plain = options_of(way, sampled), alone(way, sampled)
        fast = [lm.generate(chat, **given) for chat in ASKED]
        batch = lm.generate(ASKED, batch_size=3, **given)
        assert [*map(said, fast)] == [*map(said, plain)], way
        assert [*map(said, batch)] == [*map(said, plain)], way
        if sampled:
            assert [*map(said, lm.samples(CHATS[0], n=3, **given))] == [
                *map(said, plain_lm.samples(CHATS[0], n=3, lookahead=0, **given))
            ]
        for result in (plain[0], fast[1], batch[2]):
            check_verified(lm, result)
        for result in [*fast, *batch]:
            proposed += result.stats.proposed
            accepted += result.stats.accepted
            forced += result.stats.forced
            calls += len(result.tool_calls)
            thoughts += result.stats.thinking_tokens
            budget = options.get("max_thinking_tokens")
            closing = len(plain_lm.tokenizer.encode_continuation("</think>"))
            assert budget is None or result.stats.thinking_tokens <= budget + closing
    assert proposed
    assert accepted
    assert forced
    assert calls
    assert thoughts
