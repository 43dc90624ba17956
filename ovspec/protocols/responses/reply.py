"""Replies of the Responses API: their items, and the events of a stream."""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.engine.results import Piece, Result, Stats
from ovspec.params import Params
from ovspec.protocols.chat.logprobs import ChatToken, make_chat_logprobs
from ovspec.protocols.chat.reply import make_verification_record
from ovspec.protocols.errors import RequestFailure
from ovspec.protocols.logprobs import PlacedTokenStream, place_chat_tokens
from ovspec.protocols.reply import Events, ReplyInputs, ReplyMaker, ReplyModel
from ovspec.protocols.requests import TextRequest
from ovspec.protocols.responses.request import read_functions
from ovspec.text.answer import ToolCall

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]
ITEM_ID_PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}
PART_TYPES = {"reasoning": "reasoning_text", "message": "output_text"}


class ResponsePart(ReplyModel):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[JsonValue] = Field(default=[], description="Always empty.")
    logprobs: list[ChatToken] = Field(default=[], description="If requested.")


class OutputItem(ReplyModel):
    """The model's thinking, a message or a tool call."""

    type: Literal["reasoning", "message", "function_call"]
    id: str
    status: ResponseStatus
    role: Literal["assistant"] = "assistant"
    summary: list[JsonValue] = Field(default=[], description="Of thinking items; always empty.")
    content: list[ResponsePart] = Field(default=[], description="Of thinking items and messages.")
    call_id: str = Field("", description="Of function calls.")
    name: str = ""
    namespace: str = ""
    arguments: str = Field("", description="JSON; truncated if the status is incomplete.")


class InputTokensDetails(ReplyModel):
    cached_tokens: int = Field(description="Prompt tokens found in the KV cache.")
    cache_write_tokens: int = 0


class OutputTokensDetails(ReplyModel):
    reasoning_tokens: int = Field(description="Thinking tokens.")


class ResponseUsage(ReplyModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(ReplyModel):
    """A whole reply, with the request's own fields unchanged."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    background: Literal[False] = False
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    metadata: JsonValue
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: JsonValue = None
    reasoning: JsonObject
    safety_identifier: JsonValue = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = Field(False, description="Nothing is stored.")
    temperature: float
    text: JsonObject
    tool_choice: JsonValue
    tools: list[JsonObject]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None
    user: JsonValue = None
    record: JsonObject = Field(default={}, description="With return_record: the record for 'ovspec verify'.")
    schema_errors: list[str] = Field(default=[], description="In the mode checked: violations of the schema.")


class ResponseEvent(ReplyModel):
    """An event of a stream, sent with the fields of its type only."""

    type: str
    sequence_number: int
    output_index: int = 0
    content_index: int = 0
    item_id: str = ""
    response: Response | None = None
    item: OutputItem | None = None
    part: ResponsePart | None = None
    delta: str = ""
    text: str = ""
    arguments: str = ""
    logprobs: list[ChatToken] = Field(default=[])


def new_response(identity: JsonObject, body: Any, params: Params, functions: list[JsonObject]) -> Response:
    """Return the reply to a request before its text; ``functions``: the functions outside namespaces."""
    namespaces = [tool for tool in body.tools or [] if tool.get("type") == "namespace"]
    function_defaults = {"type": "function", "description": None, "parameters": None, "strict": False}
    return Response.model_construct(
        id=identity["id"],
        created_at=identity["created"],
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=identity["model"],
        output=[],
        parallel_tool_calls=params.parallel_tool_calls,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": params.reasoning_effort, "summary": None},
        safety_identifier=body.safety_identifier,
        temperature=params.temperature or 0.0,
        text={"format": (body.text or {}).get("format") or {"type": "text"}},
        tool_choice=body.tool_choice or "auto",
        tools=[function_defaults | tool for tool in functions] + namespaces,
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p or 1.0,
        usage=None,
        user=body.user,
        # Set explicitly, so that they are sent.
        object="response",
        background=False,
        error=None,
        incomplete_details=None,
        previous_response_id=None,
        service_tier="default",
        store=False,
        truncation="disabled",
    )


def make_response_usage(stats: Stats) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=stats.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=stats.cached_tokens, cache_write_tokens=0),
        output_tokens=stats.generated_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=stats.thinking_tokens),
        total_tokens=stats.prompt_tokens + stats.generated_tokens,
    )


@dataclass
class OpenItem:
    """The item under generation, and its text so far."""

    item: OutputItem
    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[ChatToken] = field(default_factory=list)


class ResponseReplyMaker(ReplyMaker):
    """The reply to a request: a whole response, or the events of a stream."""

    def __init__(self, reply_inputs: ReplyInputs) -> None:
        [self._row] = reply_inputs.rows
        self._tokenizer = reply_inputs.tokenizer
        self._builder = ResponseBuilder(reply_inputs.identity, reply_inputs.request, self._row.params)
        self._placed_token_stream = PlacedTokenStream(reply_inputs.tokenizer, 0)

    def whole_reply(self, results: list[Result]) -> Response:
        """Return the response, built from the events of a stream."""
        [result] = results
        piece = Piece(result.text, result.token_ids, None, result.logprobs)
        piece.thinking = result.thinking
        piece.tool_calls = result.tool_calls
        self._builder.first_events()
        self._builder.piece_events(piece, self._make_logprobs(piece, bool(result.thinking or result.tool_calls)))
        self._builder.last_events(result)
        return self._builder.response

    def first_events(self) -> Events:
        return self._builder.first_events()

    def piece_events(self, _: int, piece: Piece) -> Events:
        return self._builder.piece_events(piece, self._make_logprobs(piece, self._row.parses_answer))

    def last_events(self) -> Events:
        return self._builder.last_events(self._row.result())

    def failure_events(self, failure: RequestFailure) -> Events:
        return self._builder.failure_events(failure)

    def _make_logprobs(self, piece: Piece, is_parsed: bool) -> list[ChatToken]:
        """Return the log-probabilities of a piece; if ``is_parsed``, the tokens are longer than the text."""
        if piece.logprobs is None:
            return []
        placed_tokens = place_chat_tokens(piece) if is_parsed else self._placed_token_stream.push(piece)
        return make_chat_logprobs(self._tokenizer, placed_tokens).content


class ResponseBuilder:
    """A response under construction, item by item, and its events."""

    def __init__(self, identity: JsonObject, request: TextRequest, params: Params) -> None:
        functions = read_functions(request.body.tools or [], {})
        plain_functions = [function for function, _, namespace in functions if not namespace]
        self.response = new_response(identity, request.body, params, plain_functions)
        self._request = request
        self._event_count = 0
        self._names_by_full_name = {
            function["name"]: (name, namespace) for function, name, namespace in functions if namespace
        }
        self._open_item: OpenItem | None = None

    def first_events(self) -> list[ResponseEvent]:
        """Return the first events."""
        return [
            self._make_event(f"response.{event_name}", response=self.response)
            for event_name in ("created", "in_progress")
        ]

    def piece_events(self, piece: Piece, logprobs: list[ChatToken]) -> list[ResponseEvent]:
        """Return the events for a piece of the text."""
        events = list[ResponseEvent]()
        if self._is_item_open("message"):  # first continue the open item
            events += self._add_text("message", piece.text, logprobs)
            events += self._add_text("reasoning", piece.thinking, [])
        else:
            events += self._add_text("reasoning", piece.thinking, [])
            events += self._add_text("message", piece.text, logprobs)
        for call in piece.tool_calls:
            events += self._add_call(call)
        return events

    def last_events(self, result: Result) -> list[ResponseEvent]:
        """Return the final events of the response."""
        response = self.response
        status: ResponseStatus = "completed"
        if result.finish_reason == "length":
            status = "incomplete"
            response.incomplete_details = {"reason": "max_output_tokens"}
        events = list[ResponseEvent]()
        if not (self._open_item or response.output):
            events += self._begin_item("message")
        events += self._end_item(status)
        response.status = status
        response.usage = make_response_usage(result.stats)
        if self._request.return_record:
            response.record = make_verification_record(result, "")
        if result.schema_errors is not None:
            response.schema_errors = result.schema_errors
        return [*events, self._make_event(f"response.{status}", response=response)]

    def failure_events(self, failure: RequestFailure) -> list[ResponseEvent]:
        """Return the final events of a failed response."""
        events = self._end_item("incomplete")
        error_code = "server_error" if failure.status >= 500 else "invalid_prompt"
        self.response.status = "failed"
        self.response.error = {"code": error_code, "message": failure.message}
        return [*events, self._make_event("response.failed", response=self.response)]

    def _add_text(self, item_type: str, text: str, logprobs: list[ChatToken]) -> list[ResponseEvent]:
        """Add to a message or to thinking; end an open item of another kind."""
        if not text:
            return []
        events = list[ResponseEvent]()
        if not self._is_item_open(item_type):
            events = self._begin_item(item_type)
        assert self._open_item
        self._open_item.texts.append(text)
        self._open_item.logprobs += logprobs
        fields = make_text_event_fields(item_type, logprobs)
        return [
            *events,
            self._make_item_event(f"response.{PART_TYPES[item_type]}.delta", content_index=0, delta=text, **fields),
        ]

    def _is_item_open(self, item_type: str) -> bool:
        return self._open_item is not None and self._open_item.item.type == item_type

    def _add_call(self, call: ToolCall) -> list[ResponseEvent]:
        """Add a call, or a part of a call."""
        events = list[ResponseEvent]()
        if call.name is not None:
            call_fields: JsonObject = {"call_id": call.id, "name": call.name, "arguments": ""}
            if call.name in self._names_by_full_name:
                call_fields["name"], call_fields["namespace"] = self._names_by_full_name[call.name]
            events = self._begin_item("function_call", **call_fields)
        if call.arguments:
            assert self._open_item
            self._open_item.texts.append(call.arguments)
            events.append(self._make_item_event("response.function_call_arguments.delta", delta=call.arguments))
        return events

    def _begin_item(self, item_type: str, **item_fields: Any) -> list[ResponseEvent]:
        """End the open item, and begin another."""
        events = self._end_item("completed")
        output_index = len(self.response.output)
        item_id = ITEM_ID_PREFIXES[item_type] + self.response.id.partition("_")[2] + f"{output_index:02}"
        if item_type == "message":
            item_fields = {"role": "assistant", "content": []}
        elif item_type == "reasoning":
            item_fields = {"summary": [], "content": []}
        item = OutputItem.model_construct(type=item_type, id=item_id, status="in_progress", **item_fields)
        self._open_item = OpenItem(item, output_index)
        events.append(self._make_event("response.output_item.added", output_index=output_index, item=item.model_copy()))
        if item_type in PART_TYPES:
            part = make_response_part(item_type, "", [])
            events.append(self._make_item_event("response.content_part.added", content_index=0, part=part))
        return events

    def _end_item(self, status: ResponseStatus) -> list[ResponseEvent]:
        """End the open item."""
        if not self._open_item:
            return []
        item = self._open_item.item
        item_text = "".join(self._open_item.texts)
        events = list[ResponseEvent]()
        if item.type == "function_call":
            events.append(self._make_item_event("response.function_call_arguments.done", arguments=item_text))
            item.arguments = item_text
        else:
            logprobs = self._open_item.logprobs
            part = make_response_part(item.type, item_text, logprobs)
            fields = make_text_event_fields(item.type, logprobs)
            part_type = PART_TYPES[item.type]
            events.append(
                self._make_item_event(f"response.{part_type}.done", content_index=0, text=item_text, **fields)
            )
            events.append(self._make_item_event("response.content_part.done", content_index=0, part=part))
            item.content = [part]
        item.status = status
        self.response.output.append(item)
        output_index = self._open_item.index
        self._open_item = None
        return [*events, self._make_event("response.output_item.done", output_index=output_index, item=item)]

    def _make_item_event(self, event_type: str, **fields: Any) -> ResponseEvent:
        """Return an event of the open item."""
        assert self._open_item
        return self._make_event(
            event_type, output_index=self._open_item.index, item_id=self._open_item.item.id, **fields
        )

    def _make_event(self, event_type: str, **fields: Any) -> ResponseEvent:
        sequence_number = self._event_count
        self._event_count += 1
        if response := fields.get("response"):
            fields["response"] = response.model_copy(update={"output": [*response.output]})
        return ResponseEvent.model_construct(type=event_type, sequence_number=sequence_number, **fields)


def make_text_event_fields(item_type: str, logprobs: list[ChatToken]) -> JsonObject:
    """Return the extra fields of a message's text; none for thinking."""
    return {"logprobs": logprobs} if item_type == "message" else {}


def make_response_part(item_type: str, text: str, logprobs: list[ChatToken]) -> ResponsePart:
    part_fields: JsonObject = {}
    if item_type == "message":
        part_fields = {"annotations": [], "logprobs": logprobs}
    return ResponsePart.model_construct(type=PART_TYPES[item_type], text=text, **part_fields)
