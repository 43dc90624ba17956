"""Replies of Anthropic's API: whole messages, and the events of a stream."""

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_core import from_json

from ovspec.base.json_types import JsonObject
from ovspec.engine.results import Piece, Result, Stats
from ovspec.protocols.chat.reply import make_ending_fields
from ovspec.protocols.errors import RequestFailure, make_anthropic_error
from ovspec.protocols.reply import Events, ReplyInputs, ReplyMaker, ReplyModel
from ovspec.protocols.requests import TextRequest

THINKING_SIGNATURE = "ovspec"  # Anthropic's API signs all thinking, and clients send the signature back
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(ReplyModel):
    input_tokens: int = Field(description="Prompt tokens not found in the KV cache.")
    cache_creation_input_tokens: int = Field(description="Always 0.")
    cache_read_input_tokens: int = Field(description="Prompt tokens found in the KV cache.")
    output_tokens: int


class ThinkingBlock(ReplyModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class TextBlock(ReplyModel):
    type: Literal["text"]
    text: str


class ToolUseBlock(ReplyModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject = Field(description="The arguments; of a truncated call, the members so far.")


ContentBlock = ThinkingBlock | TextBlock | ToolUseBlock


class MessageEnding(ReplyModel):
    """The ending of a message."""

    stop_reason: StopReason | None
    stop_sequence: str | None = Field(description="The stop string at the end of the text.")
    record: JsonObject = Field(default={}, description="With return_record: the record for 'ovspec verify'.")
    schema_errors: list[str] = Field(default=[], description="In the mode checked: violations of the schema.")


class Message(MessageEnding):
    """A reply."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    usage: MessageUsage


# ---------------------------------------------------------------- events


class TextDelta(ReplyModel):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(ReplyModel):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(ReplyModel):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(ReplyModel):
    type: Literal["input_json_delta"]
    partial_json: str


class MessageStart(ReplyModel):
    type: Literal["message_start"]
    message: Message


class BlockStart(ReplyModel):
    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class BlockDelta(ReplyModel):
    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(ReplyModel):
    type: Literal["content_block_stop"]
    index: int


class Ping(ReplyModel):
    type: Literal["ping"]


class MessageDelta(ReplyModel):
    type: Literal["message_delta"]
    delta: MessageEnding
    usage: MessageUsage


class MessageStop(ReplyModel):
    type: Literal["message_stop"]


# ---------------------------------------------------------------- replies


class MessageReplyMaker(ReplyMaker):
    """The reply to a conversation: a whole message, or the events of a stream."""

    def __init__(self, reply_inputs: ReplyInputs) -> None:
        self._identity = make_message_identity(reply_inputs.identity)
        self._request = reply_inputs.request
        self._row = reply_inputs.rows[0]
        self._has_started = False
        self._open_block: Literal["thinking", "text"] | int | None = None  # a call's by its index
        self._block_index = -1  # of the last block

    def whole_reply(self, results: list[Result]) -> Message:
        """Return the whole message."""
        [result] = results
        ending = make_message_ending(self._request, result)
        return Message(
            **self._identity,
            content=make_content_blocks(result),
            **ending,
            usage=make_message_usage(result.stats),
        )

    def first_events(self) -> Events:
        return ()  # the number of cached tokens is known with the first piece

    def piece_events(self, _: int, piece: Piece) -> Events:
        return [*self._start_message(), *self._add_blocks(piece)]

    def keep_alive_events(self) -> Events:
        return [*self._start_message(is_waiting=True), Ping(type="ping")]

    def last_events(self) -> Events:
        events = [*self._start_message()]
        if self._block_index < 0:
            events += self._begin_block("text", TextBlock(type="text", text=""))
        events += self._end_block()
        result = self._row.result()
        ending = MessageEnding(**make_message_ending(self._request, result))
        events.append(MessageDelta(type="message_delta", delta=ending, usage=make_message_usage(result.stats)))
        return [*events, MessageStop(type="message_stop")]

    def failure_events(self, failure: RequestFailure) -> Events:
        return [make_anthropic_error(failure)]

    def _start_message(self, is_waiting: bool = False) -> Iterator[BaseModel]:
        """Yield the first event, once."""
        if self._has_started:
            return
        self._has_started = True
        usage = make_message_usage(self._row.stats)
        if is_waiting:  # the row's cached tokens are corrected during prefill
            usage.input_tokens = self._row.stats.prompt_tokens
            usage.cache_read_input_tokens = 0
        message = Message(**self._identity, content=[], stop_reason=None, stop_sequence=None, usage=usage)
        yield MessageStart(type="message_start", message=message)

    def _add_blocks(self, piece: Piece) -> Iterator[BaseModel]:
        """Yield the events for a piece: its text, thinking and calls; first for the open block."""
        block_order = ("text", "thinking") if self._open_block == "text" else ("thinking", "text")
        for block_kind in block_order:
            if block_kind == "text" and piece.text:
                yield from self._begin_block("text", TextBlock(type="text", text=""))
                yield self._make_block_delta(TextDelta(type="text_delta", text=piece.text))
            if block_kind == "thinking" and piece.thinking:
                yield from self._begin_block("thinking", ThinkingBlock(type="thinking", thinking="", signature=""))
                yield self._make_block_delta(ThinkingDelta(type="thinking_delta", thinking=piece.thinking))
        for call in piece.tool_calls:
            if call.name is not None:
                block = ToolUseBlock(type="tool_use", id=call.id or "", name=call.name, input={})
                yield from self._begin_block(call.index, block)
            if call.arguments:
                yield self._make_block_delta(InputDelta(type="input_json_delta", partial_json=call.arguments))

    def _make_block_delta(self, delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta) -> BlockDelta:
        return BlockDelta(type="content_block_delta", index=self._block_index, delta=delta)

    def _begin_block(self, block_kind: Literal["thinking", "text"] | int, block: ContentBlock) -> Iterator[BaseModel]:
        """Yield the events for opening a block, unless a block of its kind is open."""
        if self._open_block == block_kind:
            return
        yield from self._end_block()
        self._open_block = block_kind
        self._block_index += 1
        yield BlockStart(type="content_block_start", index=self._block_index, content_block=block)

    def _end_block(self) -> Iterator[BaseModel]:
        """Yield the events for closing the open block, if any."""
        if self._open_block is None:
            return
        if self._open_block == "thinking":
            yield self._make_block_delta(SignatureDelta(type="signature_delta", signature=THINKING_SIGNATURE))
        yield BlockStop(type="content_block_stop", index=self._block_index)
        self._open_block = None


def make_message_identity(identity: JsonObject) -> JsonObject:
    """Return the first fields of a message."""
    return {"id": identity["id"], "type": "message", "role": "assistant", "model": identity["model"]}


def make_content_blocks(result: Result) -> list[ContentBlock]:
    """Return the blocks of a text; an empty text only without thinking and calls."""
    blocks = list[ContentBlock]()
    if result.thinking:
        blocks.append(ThinkingBlock(type="thinking", thinking=result.thinking, signature=THINKING_SIGNATURE))
    if result.text or not (result.thinking or result.tool_calls):
        blocks.append(TextBlock(type="text", text=result.text))
    for call in result.tool_calls:
        arguments = parse_partial_arguments(call.arguments)
        blocks.append(ToolUseBlock(type="tool_use", id=call.id or "", name=call.name or "", input=arguments))
    return blocks


def parse_partial_arguments(arguments_json: str) -> JsonObject:
    """Return the arguments of a call as an object; of truncated arguments, the members so far."""
    try:
        arguments = from_json(arguments_json, allow_partial=True)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def make_message_ending(request: TextRequest, result: Result) -> JsonObject:
    """Return the fields for the end of a message's text."""
    ending_fields = make_ending_fields(request, result, "")
    stop_reasons: dict[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}
    stop_reasons["stop"] = "end_turn" if result.stop_string is None else "stop_sequence"
    stop_reason = stop_reasons[ending_fields.pop("finish_reason")]
    return {"stop_reason": stop_reason, "stop_sequence": result.stop_string, **ending_fields}


def make_message_usage(stats: Stats) -> MessageUsage:
    return MessageUsage(
        input_tokens=stats.prompt_tokens - stats.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=stats.cached_tokens,
        output_tokens=stats.generated_tokens,
    )
