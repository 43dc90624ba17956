"""Answers of the Responses API: their items, and the events of a stream."""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from ovspec.engine.results import Piece, Result, Stats
from ovspec.engine.row import Row
from ovspec.params import Params
from ovspec.protocols.chat.reply import Answer, ChatToken, chat_logprobs, record_of
from ovspec.protocols.errors import Failure
from ovspec.protocols.logprobs import Echo, Place, PlaceStream, places_of
from ovspec.protocols.reply import WAITING, Events
from ovspec.protocols.requests import TextRequest
from ovspec.protocols.responses.request import functions_of
from ovspec.text.answer import ToolCall
from ovspec.text.tokenizer import Tokenizer

Status = Literal["in_progress", "completed", "incomplete", "failed"]
PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}
PARTS = {"reasoning": "reasoning_text", "message": "output_text"}


class TextPart(Answer):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] = Field(default=[], description="Always empty.")
    logprobs: list[ChatToken] = Field(default=[], description="If they were requested.")


class Item(Answer):
    """What the model thought, said, or called."""

    type: Literal["reasoning", "message", "function_call"]
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    summary: list[Any] = Field(default=[], description="Of thinking: always empty.")
    content: list[TextPart] = Field(default=[], description="Of thinking and of a message.")
    call_id: str = Field("", description="Of a call.")
    name: str = ""
    namespace: str = ""
    arguments: str = Field("", description="JSON; cut off where the status is incomplete.")


class InputDetails(Answer):
    cached_tokens: int = Field(description="Tokens of the prompt that were in the KV cache already.")
    cache_write_tokens: int = 0


class OutputDetails(Answer):
    reasoning_tokens: int = Field(description="Tokens of thinking.")


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(Answer):
    """A whole answer. Fields that were in the request are as they were there."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: Literal[False] = False
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    metadata: Any
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: Any = None
    reasoning: dict[str, Any]
    safety_identifier: Any = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = Field(False, description="Nothing is stored.")
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None
    user: Any = None
    record: dict[str, Any] = Field(default={}, description="With return_record: what 'ovspec verify' checks.")
    schema_errors: list[str] = Field(default=[], description="In the mode checked: how the text breaks its schema.")


class ResponseEvent(Answer):
    """An event of a stream; only the fields that its type has are sent."""

    type: str
    sequence_number: int
    output_index: int = 0
    content_index: int = 0
    item_id: str = ""
    response: Response | None = None
    item: Item | None = None
    part: TextPart | None = None
    delta: str = ""
    text: str = ""
    arguments: str = ""
    logprobs: list[ChatToken] = Field(default=[])


def response_of(head: dict[str, Any], body: Any, params: Params, functions: list[dict[str, Any]]) -> Response:
    """Return the answer to a request before anything was generated; ``functions``: those that aren't in namespaces."""
    spaces = [tool for tool in body.tools or [] if tool.get("type") == "namespace"]
    defaults = {"type": "function", "description": None, "parameters": None, "strict": False}
    return Response.model_construct(
        id=head["id"],
        created_at=head["created"],
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=head["model"],
        output=[],
        parallel_tool_calls=params.parallel_tool_calls,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": params.reasoning_effort, "summary": None},
        safety_identifier=body.safety_identifier,
        temperature=params.temperature or 0.0,
        text={"format": (body.text or {}).get("format") or {"type": "text"}},
        tool_choice=body.tool_choice or "auto",
        tools=[defaults | tool for tool in functions] + spaces,
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p or 1.0,
        usage=None,
        user=body.user,
        # These are sent, too.
        object="response",
        background=False,
        error=None,
        incomplete_details=None,
        previous_response_id=None,
        service_tier="default",
        store=False,
        truncation="disabled",
    )


def usage_of(stats: Stats) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=stats.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=stats.cached_tokens, cache_write_tokens=0),
        output_tokens=stats.generated_tokens,
        output_tokens_details=OutputDetails(reasoning_tokens=stats.thinking_tokens),
        total_tokens=stats.prompt_tokens + stats.generated_tokens,
    )


@dataclass
class OpenItem:
    """The item that is being generated: what it says so far."""

    item: Item
    index: int
    parts: list[str] = field(default_factory=list)
    logprobs: list[ChatToken] = field(default_factory=list)


class ResponseWriter:
    """Makes the events of a stream, and the answer that they make up."""

    def __init__(
        self, tokenizer: Tokenizer, head: dict[str, Any], request: TextRequest, rows: list[Row], _: list[Echo]
    ) -> None:
        [self._row] = rows
        self._tokenizer, self._request = tokenizer, request
        self._answer = Output(head, request, self._row.params)
        self._places = None if self._row.logprobs is None or self._row.parses_answer else PlaceStream(tokenizer, 0)

    def first(self) -> Events:
        return self._answer.begin()

    def more(self, index: int, piece: Piece) -> Events:  # noqa: ARG002  # there is one text
        logprobs = list[ChatToken]()
        if piece.logprobs is not None:
            places = self._places.push(piece) if self._places else places_of(piece)
            logprobs = chat_logprobs(self._tokenizer, places).content
        return self._answer.add(piece, logprobs)

    def last(self) -> Events:
        return self._answer.end(self._row.result())

    def waiting(self) -> Events:
        return [WAITING]

    def failed(self, failure: Failure) -> Events:
        return self._answer.fail(failure)


def whole_response(
    tokenizer: Tokenizer, head: dict[str, Any], request: TextRequest, results: list[Result], _: list[Echo]
) -> Response:
    """Return the answer to a request: the one that a stream makes up."""
    [result] = results
    assert result.record
    answer, logprobs = Output(head, request, result.record.params), list[ChatToken]()
    piece = Piece(result.text, result.token_ids, None, result.logprobs)
    piece.thinking, piece.tool_calls = result.thinking, result.tool_calls
    if result.logprobs is not None:
        read = result.thinking or result.tool_calls
        places: list[Place] = places_of(piece) if read else PlaceStream(tokenizer, 0).push(piece)
        logprobs = chat_logprobs(tokenizer, places).content
    answer.begin()
    answer.add(piece, logprobs)
    answer.end(result)
    return answer.response


class Output:
    """An answer as it grows, item by item, and the events that tell of it."""

    def __init__(self, head: dict[str, Any], request: TextRequest, params: Params) -> None:
        functions = functions_of(request.body.tools or [], {})
        alone = [tool for tool, _, space in functions if not space]
        self.response = response_of(head, request.body, params, alone)
        self._request, self._number = request, 0
        self._names = {tool["name"]: (name, space) for tool, name, space in functions if space}
        self._open: OpenItem | None = None

    def begin(self) -> list[ResponseEvent]:
        return [self._event(f"response.{kind}", response=self.response) for kind in ("created", "in_progress")]

    def add(self, piece: Piece, logprobs: list[ChatToken]) -> list[ResponseEvent]:
        """Return the events for a piece of the text."""
        events = list[ResponseEvent]()
        parts: dict[str, tuple[str, list[ChatToken]]] = {
            "reasoning": (piece.thinking, []),
            "message": (piece.text, logprobs),
        }
        for kind in sorted(parts, key=lambda kind: not self._is_open(kind)):  # what is open goes on first
            if parts[kind][0]:
                events += self._say(kind, *parts[kind])
        for call in piece.tool_calls:
            events += self._call(call)
        return events

    def end(self, result: Result) -> list[ResponseEvent]:
        """Return the events that end the answer."""
        response, complete = self.response, result.finish_reason != "length"
        status: Status = "completed" if complete else "incomplete"
        events = [] if self._open or response.output else self._begin("message")
        events += self._close(status)
        response.status, response.usage = status, usage_of(result.stats)
        if not complete:
            response.incomplete_details = {"reason": "max_output_tokens"}
        if self._request.return_record:
            response.record = record_of(result, "")
        if result.schema_errors is not None:
            response.schema_errors = result.schema_errors
        return [*events, self._event(f"response.{status}", response=response)]

    def fail(self, failure: Failure) -> list[ResponseEvent]:
        """Return the events that end an answer which has failed."""
        events = self._close("incomplete")
        code = "server_error" if failure.status >= 500 else "invalid_prompt"
        self.response.status, self.response.error = "failed", {"code": code, "message": failure.message}
        return [*events, self._event("response.failed", response=self.response)]

    def _say(self, kind: str, text: str, logprobs: list[ChatToken]) -> list[ResponseEvent]:
        """Add to a message or to thinking; what is open and another ends."""
        events = [] if self._is_open(kind) else self._begin(kind)
        assert self._open
        self._open.parts.append(text)
        self._open.logprobs += logprobs
        more: dict[str, Any] = {"logprobs": logprobs} if kind == "message" else {}
        return [*events, self._inside(f"response.{PARTS[kind]}.delta", content_index=0, delta=text, **more)]

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open.item.type == kind

    def _call(self, call: ToolCall) -> list[ResponseEvent]:
        """Add a call, or a part of one."""
        events = list[ResponseEvent]()
        if call.name is not None:
            name, space = self._names.get(call.name, (call.name, None))
            more = {"namespace": space} if space else {}
            events = self._begin("function_call", call_id=call.id, name=name, arguments="", **more)
        if call.arguments:
            assert self._open
            self._open.parts.append(call.arguments)
            events.append(self._inside("response.function_call_arguments.delta", delta=call.arguments))
        return events

    def _begin(self, kind: str, **fields: Any) -> list[ResponseEvent]:
        """End the item that is open, and begin another."""
        events = self._close("completed")
        index = len(self.response.output)
        id = PREFIXES[kind] + self.response.id.partition("_")[2] + f"{index:02}"
        given = {"role": "assistant", "content": []} if kind == "message" else fields
        given = {"summary": [], "content": []} if kind == "reasoning" else given
        item = Item.model_construct(type=kind, id=id, status="in_progress", **given)
        self._open = OpenItem(item, index)
        events.append(self._event("response.output_item.added", output_index=index, item=item.model_copy()))
        if kind in PARTS:
            part = part_of(kind, "", [])
            events.append(self._inside("response.content_part.added", content_index=0, part=part))
        return events

    def _close(self, status: Status) -> list[ResponseEvent]:
        """End the item that is open."""
        if not (opened := self._open):
            return []
        item, text, events = opened.item, "".join(opened.parts), list[ResponseEvent]()
        kind: str = item.type
        if kind in PARTS:
            part = part_of(kind, text, opened.logprobs)
            more: dict[str, Any] = {"logprobs": opened.logprobs} if kind == "message" else {}
            events.append(self._inside(f"response.{PARTS[kind]}.done", content_index=0, text=text, **more))
            events.append(self._inside("response.content_part.done", content_index=0, part=part))
            item.content = [part]
        else:
            events.append(self._inside("response.function_call_arguments.done", arguments=text))
            item.arguments = text
        item.status = status
        self.response.output.append(item)
        self._open = None
        return [*events, self._event("response.output_item.done", output_index=opened.index, item=item)]

    def _inside(self, kind: str, **fields: Any) -> ResponseEvent:
        """Return an event of the item that is open."""
        assert self._open
        return self._event(kind, output_index=self._open.index, item_id=self._open.item.id, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        self._number += 1
        if response := fields.get("response"):
            fields["response"] = response.model_copy(update={"output": [*response.output]})
        return ResponseEvent.model_construct(type=kind, sequence_number=self._number - 1, **fields)


def part_of(kind: str, text: str, logprobs: list[ChatToken]) -> TextPart:
    more: dict[str, Any] = {"annotations": [], "logprobs": logprobs} if kind == "message" else {}
    return TextPart.model_construct(type=PARTS[kind], text=text, **more)
