"""Anthropic's messages: what is read of their bodies, and what streams and whole answers say."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from clients import type_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ovspec.base.errors import OvspecError
from ovspec.engine.results import Piece, Result, Stats
from ovspec.params import Params
from ovspec.params.tool_formats import TOOL_FORMATS_BY_NAME
from ovspec.protocols.bodies import MAX_NAMED_FIELDS, RequestError
from ovspec.protocols.errors import RequestFailure
from ovspec.protocols.messages.body import MESSAGES_FIELDS_WITHOUT_EFFECT, MessagesRequest
from ovspec.protocols.messages.reply import MessageReplyMaker, parse_partial_arguments
from ovspec.protocols.messages.request import BILLING_HEADER, read_messages_request
from ovspec.protocols.parsing import drop_unknown_fields, validate_body
from ovspec.protocols.reply import ReplyInputs
from ovspec.protocols.requests import TextRequest
from ovspec.server.endpoints import format_event
from ovspec.text.answer import HARMONY_THINKING, THINKING_FORMATS, AnswerContent, AnswerFormat, AnswerReader

HI: dict[str, Any] = {"role": "user", "content": "Hi"}
TOOL: dict[str, Any] = {"name": "f", "description": "A tool.", "input_schema": {"type": "object"}}
OURS = {"type": "function", "function": {"name": "f", "description": "A tool.", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
NAMED = {"name": "output", "schema": SCHEMA}
CACHE = {"cache_control": {"type": "ephemeral"}}


def text(text: Any, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def use(name: str = "f", id: str = "toolu_1", **input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": input}


def result(id: str = "toolu_1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, **more}


def call(id: str = "toolu_1", **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments or "{}"}}


def of(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": [*content]}


def read(**body: Any) -> TextRequest:
    """Return the request in a body, read as a server does."""
    value, _ = drop_unknown_fields({"messages": [HI], **body}, MessagesRequest)
    return read_messages_request(validate_body(value, MessagesRequest))


# ---------------------------------------------------------------- messages

USER = {"role": "user", "content": "Hi"}
CHATS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({}, [USER]),
    ({"messages": [of("user", text("a", **CACHE), text("b"))]}, [{"role": "user", "content": "a\nb"}]),
    ({"system": "S"}, [{"role": "system", "content": "S"}, USER]),
    ({"system": [text("S", **CACHE), text("T")]}, [{"role": "system", "content": "S\nT"}, USER]),
    ({"system": ""}, [USER]),
    (
        {"system": "S", "messages": [HI, {"role": "system", "content": "T"}, of("developer", text("U"))]},
        [{"role": "system", "content": "S"}, USER, *({"role": "system", "content": each} for each in "TU")],
    ),
    (
        {"messages": [HI, of("assistant", text("a"), use(x=1)), of("user", result(content="r"))]},
        [
            USER,
            {"role": "assistant", "content": "a", "tool_calls": [call(x=1)]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "r"},
        ],
    ),
    (  # results come before the text of the same message; an answer may think, and only call
        {
            "messages": [
                HI,
                of(
                    "assistant",
                    {"type": "thinking", "thinking": "Hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    use(),
                    use(id="toolu_2", x=2),
                ),
                of("user", text("Go on."), result("toolu_2", content=[text("a"), text("b")], is_error=False), result()),
            ]
        },
        [
            USER,
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "Hm",
                "tool_calls": [call(), call("toolu_2", x=2)],
            },
            {"role": "tool", "tool_call_id": "toolu_2", "content": "a\nb"},
            {"role": "tool", "tool_call_id": "toolu_1", "content": ""},
            {"role": "user", "content": "Go on."},
        ],
    ),
    (
        {"messages": [HI, of("assistant", {"type": "redacted_thinking", "data": "x"}), HI]},
        [USER, {"role": "assistant", "content": ""}, USER],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "chat"), CHATS)
def test_messages_become_those_of_chat_templates(body: dict[str, Any], chat: list[dict[str, Any]]) -> None:
    request = read(**body)
    assert request.prompts == [chat] and request.kind == "message" and not request.ignored
    assert request.chat_character_count >= sum(len(message["content"]) for message in chat)


def test_the_billing_header_is_left_out() -> None:
    """It differs in each request, so that nothing behind it could be found in the cache."""
    for system in ([text(f"{BILLING_HEADER}: cc=1;"), text("S")], [text("S"), text(f"{BILLING_HEADER}: cc=2;")]):
        request = read(system=system)
        assert request.prompts == [[{"role": "system", "content": "S"}, USER]]
        assert request.ignored == (f"system.{BILLING_HEADER}",)
    assert read(system=[text(f"{BILLING_HEADER}: cc=1;")]).prompts == [[USER]]
    whole = f"{BILLING_HEADER}: cc=1;\nS"  # there is no telling where it ends
    assert read(system=whole).prompts == [[{"role": "system", "content": whole}, USER]]


# ---------------------------------------------------------------- options

SAMPLED = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 4}
OWN = {"seed": 3, "min_p": 0.1, "lookahead": 2, "regex": "a+"}
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (SAMPLED, SAMPLED),
    (OWN, OWN),
    ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"stop_sequences": []}, {}),
    ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, {"tools": [OURS], "tool_choice": "auto"}),
    ({"tools": [{**TOOL, "type": "custom", **CACHE}]}, {"tools": [OURS]}),
    ({"tools": [{**TOOL, "strict": True, "eager_input_streaming": True, "defer_loading": False}]}, {"tools": [OURS]}),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {"tools": [OURS], "tool_choice": "required"}),
    ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tools": [OURS], "tool_choice": "none"}),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}},
        {"tools": [OURS], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"tools": [OURS], "tool_choice": "auto", "parallel_tool_calls": False},
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": False}},
        {"tools": [OURS], "tool_choice": "required"},
    ),
    ({"thinking": {"type": "adaptive"}}, {}),
    ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 9, "display": "summarized"}},
        {"max_thinking_tokens": 9, "reasoning_effort": "medium"},
    ),
    ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, {"reasoning_effort": "xhigh"}),
    ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, {"reasoning_effort": "none"}),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 9}, "output_config": {"effort": "low"}},
        {"max_thinking_tokens": 9, "reasoning_effort": "low"},
    ),
    ({"thinking": {"type": "enabled"}, "reasoning_effort": "high"}, {"reasoning_effort": "high"}),
    ({"output_config": {"format": FORMAT}}, {"json_schema": NAMED}),
    ({"output_format": FORMAT, "output_config": {"effort": None, "format": FORMAT}}, {"json_schema": NAMED}),
    ({name: {"a": [1]} for name in MESSAGES_FIELDS_WITHOUT_EFFECT}, {}),
    ({"mcp_servers": [], "thinking": None}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("body", "own"), OPTIONS)
def test_options(body: dict[str, Any], own: dict[str, Any]) -> None:
    request = read(**body)
    assert request.overrides.values == own and not request.ignored


def test_what_else_a_request_says() -> None:
    request = read(model="x", stream=True, draft="none", return_record=True)
    assert (request.model, request.stream, request.draft, request.return_record) == ("x", True, "none", True)
    assert not read().stream and read().draft is None


IGNORED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]}, ("tools.web_search_20250305",)),
    (
        {"tools": [{"type": "bash_20250124", "name": "bash"}, {"type": "computer_toolset_20260801"}]},
        ("tools.bash_20250124", "tools.computer_toolset_20260801"),
    ),
    ({"tools": [{**TOOL, "flavour": 1, "input_examples": [{}]}]}, ("tools.flavour", "tools.input_examples")),
    ({"messages": [{**HI, "mood": 1}, of("user", text("a", shade=1))]}, ("messages.mood", "text.shade")),
    (
        {"messages": [HI, of("assistant", {**use(), "hue": 1}), of("user", result(content=[text("a", hue=1)]))]},
        ("tool_use.hue", "text.hue"),
    ),
    ({"messages": [HI, of("assistant", use()), of("user", result(is_error=True))]}, ("tool_result.is_error",)),
    ({"thinking": {"type": "adaptive", "depth": 1}}, ("thinking.depth",)),
    ({"output_config": {"task_budget": {"type": "tokens"}}}, ("output_config.task_budget",)),
    ({"tools": [TOOL], "tool_choice": {"type": "auto", "mood": 1}}, ("tool_choice.mood",)),
    (
        {"messages": [of("user", text("a", **{f"field{n}": 1 for n in range(50)}))] * 3},
        tuple(f"text.field{n}" for n in range(MAX_NAMED_FIELDS)),
    ),
    (
        {"tools": [{"type": f"tool{n}_20260101"} for n in range(50)]},
        tuple(f"tools.tool{n}_20260101" for n in range(MAX_NAMED_FIELDS)),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "ignored"), IGNORED)
def test_what_is_left_out_is_named(body: dict[str, Any], ignored: tuple[str, ...]) -> None:
    assert read(**body).ignored == ignored


def test_fields_that_no_request_has_are_named() -> None:
    body = {"messages": [HI], "context_management": {"edits": []}, "container": None, "compaction": {}}
    assert drop_unknown_fields(body, MessagesRequest)[1] == ["context_management", "compaction"]


# ---------------------------------------------------------------- refusals

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages must not be empty", "messages"),
    ({"messages": None}, "messages is missing", "messages"),
    ({"messages": "Hi"}, "messages must be a list of objects", "messages"),
    ({"messages": [{"role": "user"}]}, "each message needs content", "messages"),
    ({"messages": [of("user")]}, "each message needs content", "messages"),
    ({"messages": [of("user", "Hi")]}, "each message needs content", "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "the role of a message is 'tool'; it must be user", "messages"),
    ({"messages": [{"content": "a"}]}, "the role of a message is None", "messages"),
    ({"messages": [{"role": {}, "content": "a"}]}, "the role of a message is {}", "messages"),
    ({"messages": [of("user", {"type": "image", "source": {}})]}, "type image is not supported; send text", "messages"),
    ({"messages": [of("user", {"type": "document"})]}, "type document is not supported", "messages"),
    ({"messages": [of("user", {"type": "search_result"})]}, "type search_result is not supported", "messages"),
    ({"messages": [of("user", {"type": []})]}, r"type \[\] is not supported", "messages"),
    ({"messages": [of("user", result(content=5))]}, "each message needs content", "messages"),
    ({"messages": [of("user", {"type": "tool_result", "content": "a"})]}, "the field tool_use_id", "messages"),
    ({"messages": [of("user", use())]}, "type tool_use is not supported in user messages, only text or", "messages"),
    ({"messages": [of("assistant", result()), HI]}, "tool_result is not supported in assistant messages", "messages"),
    ({"messages": [of("user", text(5))]}, "type text must have the field text, a string", "messages"),
    ({"messages": [of("assistant", {**use(), "name": 5}), HI]}, "must have the field name, a string", "messages"),
    ({"messages": [of("assistant", {**use(), "id": None}), HI]}, "must have the field id, a string", "messages"),
    ({"messages": [of("assistant", {"type": "thinking"}), HI]}, "must have the field thinking, a string", "messages"),
    ({"messages": [of("assistant", *[use()] * 1001), HI]}, "at most 1000", "messages"),
    ({"system": 5}, "system must be a string or a list of objects", "system"),
    ({"system": [{"type": "image"}]}, "type image is not supported", "messages"),
    ({"max_tokens": 0}, "`max_tokens` is 0; it must be at least 1", "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens must be a whole number", "max_tokens"),
    ({"temperature": -1}, "temperature is -1", "temperature"),
    ({"stop_sequences": "a"}, "stop_sequences must be a list of strings", "stop_sequences"),
    ({"stop": ["a"]}, "stop is not a field of this request, but of /v1/", "stop"),
    ({"n": 2}, "n is supported only with the value 1; leave n out", "n"),
    ({"logprobs": True}, "logprobs is not a field of this request, but of", "logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format is not a field of this", "response_format"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls is not a field of this", "parallel_tool_calls"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported; leave mcp_servers out", "mcp_servers"),
    ({"tools": {}}, "tools must be a list of objects", "tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "a tool of the type function; only the type custom", "tools"),
    ({"tools": [{"name": "f"}]}, "the tool f needs an input_schema, a JSON schema", "tools"),
    ({"tools": [{"name": "f", "input_schema": "{}"}]}, "the tool f needs an input_schema, a JSON schema", "tools"),
    ({"tool_choice": {"type": "any"}}, "`tool_choice` is any, but `tools` has no custom tool", "tool_choice"),
    ({"tool_choice": {"type": "required"}}, "`tool_choice` must be {.type.: .auto.}", "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "`tool_choice` must be", "tool_choice"),
    ({"tool_choice": {"type": {}}}, "`tool_choice` must be", "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice must be an object", "tool_choice"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "must be true or false", "tool_choice"),
    ({"thinking": {"type": "on"}}, "`thinking` must be {.type.: .enabled.", "thinking"),
    ({"thinking": {"type": {}}}, "`thinking` must be", "thinking"),
    *(
        ({"thinking": {"type": "enabled", "budget_tokens": each}}, "budget_tokens must be a whole number", "thinking")
        for each in (0, -1, True, 1.5, "9", 10**200)
    ),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}, "max_thinking_tokens": 8}, "contradict each", "thinking"),
    ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, "contradict each", "thinking"),
    ({"output_config": {"effort": "huge"}}, "the effort is 'huge'; it must be one of low, medium", "output_config"),
    ({"output_config": {"effort": []}}, "the effort is", "output_config"),
    ({"output_config": {"effort": "low"}, "reasoning_effort": "high"}, "contradict each", "output_config"),
    ({"output_config": {"format": {"type": "xml"}}}, "The format in `output_config` must be", "output_config"),
    ({"output_config": {"format": "json"}}, "The format in `output_config` must be", "output_config"),
    ({"output_format": {"type": "json_schema"}}, "The format in `output_format` must be", "output_format"),
    ({"output_format": FORMAT, "regex": "a"}, "`output_format` and `regex` can't be combined", "output_format"),
    ({"output_format": FORMAT, "json_schema": {}}, "`output_format` and `json_schema` can't", "output_format"),
    ({"output_format": FORMAT, "output_config": {"format": {**FORMAT, "schema": {}}}}, "contradict", "output_format"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message", "field"), REFUSED)
def test_refusals(body: dict[str, Any], message: str, field: str) -> None:
    with pytest.raises(RequestError, match=message) as found:
        read(**body)
    assert found.value.param == field and len(str(found.value)) < 300 and str(found.value).endswith(".")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"stop_sequences": [""]}, "`stop_sequences` has an empty string"),
        ({"tools": [TOOL, TOOL]}, "`tools` has two tools named f"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "`tools`: the name 'a b' is invalid"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "names 'g', but the tools are f"),
        ({"tools": [TOOL], "ignore_eos": True}, "`tools` can't be combined with `ignore_eos`"),
        ({"output_config": {"format": FORMAT}, "ignore_eos": True}, "`output_config` can't be combined with"),
    ],
)  # fmt: skip
def test_params_that_cannot_be_met_are_named_as_the_client_does(body: dict[str, Any], told: str) -> None:
    with pytest.raises(OvspecError, match=told):
        read(**body).overrides.apply_to(Params(), "message")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
KEYS = ["type", "role", "content", "text", "thinking", "id", "name", "input", "tool_use_id", "input_schema", "schema"]
KEYS += ["budget_tokens", "effort", "format", "disable_parallel_tool_use", "x"]
WORDS = [
    "text",
    "user",
    "assistant",
    "system",
    "tool_use",
    "tool_result",
    "thinking",
    "custom",
    "tool",
    "any",
    "enabled",
]
JSON = st.recursive(
    SCALARS | st.sampled_from([*WORDS, "json_schema"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=12,
)
FIELDS = [
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "output_format",
    "stop_sequences",
    "max_tokens",
]


@settings(max_examples=100, deadline=None)
@given(
    messages=JSON | st.lists(st.fixed_dictionaries({"role": st.sampled_from(WORDS[1:4]), "content": JSON}), max_size=3),
    more=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
)
def test_whatever_is_sent_is_read_or_refused(messages: Any, more: dict[str, Any]) -> None:
    with contextlib.suppress(RequestError):
        assert read(messages=messages, **more).chat_character_count >= 0


# ---------------------------------------------------------------- answers

TOOLS = TOOL_FORMATS_BY_NAME["hermes"]
THINK = next(each for each in THINKING_FORMATS if each.open_tag == "<think>")
EVENT = "anthropic.types:RawMessageStreamEvent"
HEAD = {"id": "msg_1", "created": 1, "model": "demo"}
STATS = Stats(prompt_tokens=9, cached_tokens=4, generated_tokens=7)
PLAIN = read()


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import the client before a test that has a deadline."""
    type_of(EVENT)


def answered(format: AnswerFormat, raw: str, cuts: list[int], cut_off: bool) -> tuple[list[Piece], Result]:
    """Return the pieces of an answer that is cut into parts, and its result."""
    places = [0, *sorted({cut % (len(raw) + 1) for cut in cuts}), len(raw)]
    reader, pieces, ended = AnswerReader(format, {}), list[Piece](), "length" if cut_off else "eos"
    for begin, end in itertools.pairwise(places):
        said = AnswerContent()
        reader.push(raw[begin:end], said)
        if end == len(raw):
            reader.flush(said)
        pieces.append(Piece(said.text, [], None, thinking=said.thinking, tool_calls=said.calls))
    pieces[-1].finish_reason = ended
    said = "".join(piece.text for piece in pieces), "".join(piece.thinking for piece in pieces)
    return pieces, Result(said[0], [], ended, STATS, thinking=said[1], tool_calls=reader.calls)


def reply_to(request: TextRequest, result: Result) -> MessageReplyMaker:
    row: Any = SimpleNamespace(stats=result.stats, result=lambda: result)
    tokenizer: Any = None
    return MessageReplyMaker(ReplyInputs(tokenizer, HEAD, request, [row], []))


def streamed(pieces: list[Piece], result: Result, request: TextRequest = PLAIN) -> list[Any]:
    """Return the events of an answer, as JSON, after checking what all streams have."""
    reply = reply_to(request, result)
    made = [
        *reply.first_events(),
        *(event for piece in pieces for event in reply.piece_events(0, piece)),
        *reply.last_events(),
    ]
    events = list[Any]()
    for name, data in (format_event(each).decode().strip().split("\n") for each in made):
        events.append(json.loads(data.removeprefix("data: ")))
        type_of(EVENT).validate_json(data.removeprefix("data: "))
        assert name == f"event: {events[-1]['type']}"
    return events


def message_of(events: list[Any]) -> dict[str, Any]:
    """Return the message that a client puts together."""
    kinds = [each["type"] for each in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    message, blocks = events[0]["message"], list[dict[str, Any]]()
    for each in events[1:-2]:
        if each["type"] == "content_block_start":
            assert each["index"] == len(blocks) and all(block["closed"] for block in blocks)
            blocks.append({**each["content_block"], "closed": False})
        elif each["type"] == "content_block_stop":
            assert each["index"] == len(blocks) - 1
            blocks[-1]["closed"] = True
        else:
            assert each["index"] == len(blocks) - 1 and not blocks[-1]["closed"]
            [(name, value)] = ((name, value) for name, value in each["delta"].items() if name != "type")
            assert value, "no empty deltas"
            blocks[-1][name] = blocks[-1].get(name, "") + value
    for block in blocks:
        assert block.pop("closed")
        if block["type"] == "tool_use":
            block["input"] = parse_partial_arguments(block.pop("partial_json", ""))
    return message | {"content": blocks, "usage": events[-2]["usage"]} | events[-2]["delta"]


ARGUMENTS = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=6) | st.none(), max_size=3)
TEXTS = st.text(st.sampled_from('ab <>\n"é🙂'), max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    thought=st.none() | TEXTS,
    text=TEXTS,
    calls=st.lists(st.tuples(st.sampled_from(["f", "get"]), ARGUMENTS), max_size=3),
    cuts=st.lists(st.integers(0, 500), max_size=9),
    ends=st.none() | st.integers(0, 500),
)
def test_a_stream_says_what_the_whole_answer_says(
    thought: str | None, text: str, calls: list[Any], cuts: list[int], ends: int | None
) -> None:
    """However it is cut into pieces, and wherever it ends."""
    raw = (
        ("" if thought is None else f"<think>{thought}</think>") + text + (TOOLS.write_calls(calls, 0) if calls else "")
    )
    raw = raw if ends is None else raw[:ends]
    pieces, result = answered(AnswerFormat(TOOLS, THINK, ("f", "get")), raw, cuts, ends is not None)
    whole = reply_to(PLAIN, result).whole_reply([result])
    type_of("anthropic.types:Message").validate_json(whole.model_dump_json(exclude_unset=True), strict=True)
    assert message_of(streamed(pieces, result)) == whole.model_dump(exclude_unset=True, mode="json")
    assert whole.content and (whole.stop_reason == "max_tokens") == (ends is not None)


@given(cuts=st.lists(st.integers(0, 500), max_size=30))
def test_thinking_after_text_is_a_block_of_its_own(cuts: list[int]) -> None:
    """Formats with headers may think again; the blocks are in the order of the answer."""
    raw = "<|end|><|start|>assistant".join(
        ["<|channel|>analysis<|message|>ab", "<|channel|>final<|message|>cd", "<|channel|>analysis<|message|>ef"]
    )
    alone = list(range(1, len(raw)))
    format = AnswerFormat(None, HARMONY_THINKING)
    blocks = message_of(streamed(*answered(format, raw, alone, False)))["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "thinking"]
    said = message_of(streamed(*answered(format, raw, cuts, False)))["content"]
    for name in ("text", "thinking"):
        assert "".join(each.get(name, "") for each in said) == {"text": "cd", "thinking": "abef"}[name]


@pytest.mark.parametrize(
    ("arguments", "input"),
    [
        ("", {}),
        ("{", {}),
        ('{"a": 1, "b": [1, 2', {"a": 1, "b": [1, 2]}),
        ('{"a": "x", "b": "half', {"a": "x"}),
        ('{"a": {"b": tru', {"a": {}}),
        ("[1]", {}),
        ("nonsense", {}),
    ],
)
def test_calls_that_are_cut_off_have_an_input(arguments: str, input: dict[str, Any]) -> None:
    assert parse_partial_arguments(arguments) == input


def test_how_an_answer_ends() -> None:
    _, plain = answered(AnswerFormat(), "Hi", [], False)
    for change, reason, sequence in (
        ({}, "end_turn", None),
        ({"finish_reason": "stop"}, "end_turn", None),
        ({"finish_reason": "stop", "stop_string": "X"}, "stop_sequence", "X"),
        ({"finish_reason": "length"}, "max_tokens", None),
    ):
        changed = replace(plain, **change)
        made = reply_to(PLAIN, changed).whole_reply([changed])
        assert (made.stop_reason, made.stop_sequence) == (reason, sequence)


def test_what_was_asked_for_besides() -> None:
    pieces, plain = answered(AnswerFormat(), "Hi", [], False)
    result = replace(plain, schema_errors=["wrong"], token_ids=[5])
    request = read(return_record=True)
    whole = reply_to(request, result).whole_reply([result]).model_dump(exclude_unset=True)
    assert whole["schema_errors"] == ["wrong"] and whole["record"]["token_ids"] == [5]
    delta = streamed(pieces, result, request)[-2]["delta"]
    assert delta["schema_errors"] == ["wrong"] and delta["record"] == whole["record"]


def test_a_stream_that_waits_and_fails() -> None:
    """A ping isn't the first event; what is cached isn't known before the first piece."""
    pieces, result = answered(AnswerFormat(), "Hi", [], False)
    reply = reply_to(PLAIN, result)
    events = [
        *reply.first_events(),
        *reply.keep_alive_events(),
        *reply.keep_alive_events(),
        *reply.piece_events(0, pieces[0]),
        *reply.last_events(),
    ]
    kinds = [each.type for each in events]  # type: ignore[union-attr]
    assert kinds[:3] == ["message_start", "ping", "ping"] and kinds.count("message_start") == 1
    start: Any = events[0]
    assert (start.message.usage.input_tokens, start.message.usage.cache_read_input_tokens) == (9, 0)
    assert format_event(events[1]) == b'event: ping\ndata: {"type":"ping"}\n\n'
    late: Any = streamed(pieces, result)[0]["message"]["usage"]
    assert (late["input_tokens"], late["cache_read_input_tokens"]) == (5, 4)
    [failed] = reply.failure_events(RequestFailure(504, "Too slow.", code="timeout"))
    name, data = format_event(failed).decode().strip().split("\n")
    body = json.loads(data.removeprefix("data: "))
    assert name == "event: error" and body["type"] == "error"
    assert body["error"] == {"type": "timeout_error", "message": "Too slow."}
