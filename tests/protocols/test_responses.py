"""The Responses API: how items are read, and which events a stream has."""

from __future__ import annotations

from typing import Any

import pytest
from clients import type_of
from hypothesis import given
from hypothesis import strategies as st

from ovspec.engine.results import Piece, Result, Stats
from ovspec.params import Params
from ovspec.protocols.bodies import RequestError
from ovspec.protocols.chat.reply import new_reply_identity
from ovspec.protocols.parsing import drop_unknown_fields, validate_body
from ovspec.protocols.requests import TextRequest
from ovspec.protocols.responses.body import ResponsesRequest
from ovspec.protocols.responses.reply import ResponseBuilder
from ovspec.protocols.responses.request import read_responses_request
from ovspec.text.answer import ToolCall

EVENT = "openai.types.responses:ResponseStreamEvent"
GO = {"type": "function", "name": "go", "parameters": {"type": "object", "properties": {}}}
FUNCTION = {name: value for name, value in GO.items() if name != "type"}
SPACE = {"type": "namespace", "name": "mcp__maps", "description": "Maps.", "tools": [GO]}
TOOLS = [GO, {"type": "web_search"}, {"type": "custom", "name": "patch"}, SPACE]
HI = {"role": "user", "content": "Hi"}


def read(**body: Any) -> TextRequest:
    given, _ = drop_unknown_fields({"input": "Hi", **body}, ResponsesRequest)
    return read_responses_request(validate_body(given, ResponsesRequest))


def said(text: str, kind: str = "output_text") -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": kind, "text": text}]}


def called(id: str, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": "go", "arguments": "{}", **more}


def result(id: str, output: Any = "done", kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": id, "output": output}


def call(id: str, name: str = "go", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "x"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("Hi", [HI]),
        ([HI], [HI]),
        ([{"role": "developer", "content": "Be brief."}, HI], [{"role": "system", "content": "Be brief."}, HI]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": each} for each in "ab"]}],
            [HI | {"content": "a\nb"}],
        ),
        ([HI, said("Yes?")], [HI, ANSWER | {"content": "Yes?"}]),
        ([HI, THOUGHT, said("Yes?")], [HI, ANSWER | {"content": "Yes?", "reasoning_content": "Hm."}]),
        ([HI, SUMMARY, said("Yes?")], [HI, ANSWER | {"content": "Yes?", "reasoning_content": "Hm."}]),
        (
            [
                HI,
                THOUGHT,
                said("I go."),
                called("a"),
                called("b"),
                result("a"),
                result("b", [{"type": "input_text", "text": "x"}]),
            ],
            [
                HI,
                ANSWER | {"content": "I go.", "reasoning_content": "Hm.", "tool_calls": [call("a"), call("b")]},
                {"role": "tool", "tool_call_id": "a", "content": "done"},
                {"role": "tool", "tool_call_id": "b", "content": "x"},
            ],
        ),
        (
            [HI, called("a"), result("a"), THOUGHT, called("b"), result("b")],
            [
                HI,
                ANSWER | {"tool_calls": [call("a")]},
                {"role": "tool", "tool_call_id": "a", "content": "done"},
                ANSWER | {"reasoning_content": "Hm.", "tool_calls": [call("b")]},
                {"role": "tool", "tool_call_id": "b", "content": "done"},
            ],
        ),
        ([HI, called("a", namespace="mcp__maps__")], [HI, ANSWER | {"tool_calls": [call("a", "mcp__maps__go")]}]),
        (
            [
                HI,
                {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "+x"},
                result("a", kind="custom_tool_call_output"),
            ],
            [
                HI,
                ANSWER | {"tool_calls": [call("a", "patch", {"input": "+x"})]},
                {"role": "tool", "tool_call_id": "a", "content": "done"},
            ],
        ),
        (
            [HI, {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
            [HI, ANSWER | {"content": "No."}],
        ),
    ],
)
def test_items_make_a_chat(items: Any, messages: Any) -> None:
    assert read(input=items).prompts == [messages]
    assert read(input=items, instructions="Obey.").prompts == [[{"role": "system", "content": "Obey."}, *messages]]


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "own"),
    [
        ({}, {}),
        (
            {"max_output_tokens": 7, "temperature": 0.5, "top_p": 0.9},
            {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9},
        ),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {"json_schema": None}),
        ({"text": {"format": {"type": "json_object"}}}, {"json_schema": {"type": "object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
            {"json_schema": {"name": "n", "schema": SCHEMA}},
        ),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": 0}),
        ({"top_logprobs": 3}, {"logprobs": 3}),
        ({"seed": 3, "regex": "a+", "draft": "none", "lookahead": 2}, {"seed": 3, "regex": "a+", "lookahead": 2}),
        (
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
            {
                "tools": [FUNCTION, FUNCTION | {"name": "mcp__maps__go"}],
                "tool_choice": "required",
                "parallel_tool_calls": False,
            },
        ),
    ],
)
def test_fields_are_options(body: Any, own: Any) -> None:
    assert read(**body).overrides.values == own


def test_what_is_left_out_is_named() -> None:
    old = {"type": "web_search_call", "id": "x", "status": "completed"}
    asked = read(
        input=[old, HI],
        tools=[
            GO | {"strict": False, "defer_loading": True},
            *TOOLS[1:],
            SPACE | {"tools": [{"type": "custom", "name": "x"}]},
        ],
        text={"verbosity": "low"},
        include=["reasoning.encrypted_content", "file_search_call.results"],
        reasoning={"context": "all"},
        store=True,
        truncation="auto",
    )
    assert asked.ignored == (
        "reasoning.context", "text.verbosity", "include.file_search_call.results", "tools.defer_loading",
        "tools.web_search", "tools.custom",
        "tools.mcp__maps", "input.web_search_call",
    )  # fmt: skip
    assert asked.prompts == [[HI]]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"input": None}, "input is missing"),
        ({"input": 3}, "input must be a string or a list of objects"),
        ({"input": []}, "no message to answer"),
        ({"input": [{"type": "web_search_call"}]}, "no message to answer"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "type input_image is not supported; send text",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "type input_file is not supported",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "type input_audio is not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "this server stores no items"),
        ({"input": [{"role": "robot", "content": "x"}]}, "the role of a message is 'robot'"),
        ({"input": [{"role": "user"}]}, "must be a string or a list of content parts"),
        ({"input": [{"text": "x"}]}, "the type of an item is None; it must be a string"),
        ({"input": [called("a") | {"name": 3}]}, "must have the field name, a string"),
        ({"input": [called("a") | {"call_id": None}]}, "must have the field call_id, a string"),
        ({"input": [called("a", namespace=3)]}, "the namespace of a tool call to go must be a string"),
        ({"input": [HI] + [called("a")] * 1001}, "more than 1000 tool calls"),
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id is not supported; send the whole chat in the field `input`",
        ),
        ({"conversation": "conv_1"}, "conversation is not supported; send the whole chat in the field `input`"),
        ({"prompt": {"id": "x"}}, "prompt is not supported; use the fields `instructions` and `input` instead"),
        ({"background": True}, "background is supported only with the value false; leave background out"),
        ({"n": 2}, "n is supported only with the value 1; leave n out"),
        ({"messages": [HI]}, "messages is not a field of this request, but of /v1/chat/completions; use input instead"),
        ({"max_output_tokens": 0}, "it must be at least 1"),
        ({"reasoning": {"effort": "giant"}}, "effort is 'giant'; it must be none, minimal"),
        ({"text": {"format": {"type": "xml"}}}, "text: format must be"),
        ({"text": {"format": {"type": []}}}, "text: format must be"),
        ({"input": [{"role": [], "content": "x"}]}, "the role of a message is []"),
        ({"max_tokens": 3}, "but of /v1/completions; use max_output_tokens instead"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text: format must be"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "`text` and `regex` can't be combined"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "shema": 1}}}, "shema is not a field of format"),
    ],
)
def test_what_cannot_be_met_is_refused(body: Any, told: str) -> None:
    with pytest.raises(RequestError) as error:
        read(**body)
    assert told in str(error.value) and error.value.param


# ---------------------------------------------------------------- events

RUNS = st.lists(
    st.one_of(
        st.tuples(st.just("thinking"), st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3)),
        st.tuples(st.just("text"), st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3)),
        st.tuples(st.just("go"), st.lists(st.text("{}a", max_size=3), max_size=3)),
        st.tuples(st.just("mcp__maps__go"), st.lists(st.text("{}a", max_size=3), max_size=3)),
    ),
    max_size=5,
)


def pieces_of(runs: list[tuple[str, list[str]]]) -> list[Piece]:
    pieces, calls = list[Piece](), 0
    for kind, parts in runs:
        if kind == "thinking":
            pieces += [Piece("", [1], thinking=part) for part in parts]
        elif kind == "text":
            pieces += [Piece(part, [1]) for part in parts]
        else:
            pieces.append(Piece("", [1], tool_calls=[ToolCall(calls, kind, "", f"call_{calls}")]))
            pieces += [Piece("", [1], tool_calls=[ToolCall(calls, None, part)]) for part in parts]
            calls += 1
    return pieces


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import the client before a test that has a deadline."""
    type_of(EVENT)


@given(RUNS, st.sampled_from(["eos", "length", "stop"]), st.booleans())
def test_events_are_complete_and_in_order(runs: Any, reason: Any, record: bool) -> None:
    asked = read(tools=TOOLS, return_record=record, metadata={"a": "b"})
    output = ResponseBuilder(new_reply_identity("resp_", "m"), asked, Params())
    made = [*output.first_events()]
    for piece in pieces_of(runs):
        made += output.piece_events(piece, [])
    made += output.last_events(Result("", [1, 2], reason, Stats(prompt_tokens=5, generated_tokens=2)))
    events = [type_of(EVENT).validate_json(event.model_dump_json(exclude_unset=True)) for event in made]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == ("response.incomplete" if reason == "length" else "response.completed")
    check_items(events[2:-1], last.response)
    expected = list[tuple[str, str]]()
    for kind, parts in runs:  # neighbours of the same kind are one item
        if expected and expected[-1][0] == kind and kind in ("thinking", "text"):
            expected[-1] = (kind, expected[-1][1] + "".join(parts))
        else:
            expected.append((kind, "".join(parts)))
    assert [content_of(item) for item in last.response.output] == (expected or [("text", "")])
    assert last.response.store is False and last.response.usage.total_tokens == 7
    assert events[0].response.output == [] and events[0].response.status == "in_progress"


def content_of(item: Any) -> tuple[str, str]:
    if item.type == "function_call":
        return (item.name if item.namespace is None else f"{item.namespace}__{item.name}"), item.arguments
    return {"reasoning": "thinking", "message": "text"}[item.type], item.content[0].text


def check_items(events: list[Any], response: Any) -> None:
    """Check that each item begins, grows and ends before the next one does, as OpenAI's do."""
    for index, item in enumerate(response.output):
        own = [event for event in events if event.output_index == index]
        assert own == events[: len(own)] and len({event.item_id for event in own if hasattr(event, "item_id")}) == 1
        events = events[len(own) :]
        first, last = own[0], own[-1]
        assert (first.type, last.type) == ("response.output_item.added", "response.output_item.done")
        assert first.item.status == "in_progress" and last.item == item
        assert last.item.status == ("incomplete" if response.status == "incomplete" and not events else "completed")
        kinds = [event.type.removeprefix("response.") for event in own[1:-1]]
        if item.type == "function_call":
            assert kinds[-1] == "function_call_arguments.done" and own[-2].arguments == item.arguments
            assert set(kinds[:-1]) <= {"function_call_arguments.delta"}
            assert "".join(event.delta for event in own[1:-2]) == item.arguments
        else:
            part = {"message": "output_text", "reasoning": "reasoning_text"}[item.type]
            assert kinds[0] == "content_part.added" and kinds[-2:] == [f"{part}.done", "content_part.done"]
            assert set(kinds[1:-2]) <= {f"{part}.delta"}
            text = "".join(event.delta for event in own[2:-3])
            assert text == item.content[0].text == own[-3].text == own[-2].part.text
    assert not events
