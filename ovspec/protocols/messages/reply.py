"""Answers of Anthropic's API: whole messages, and the events of a stream."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_core import from_json

from ovspec.engine.results import Piece, Result, Stats
from ovspec.engine.row import Row
from ovspec.protocols.chat.reply import Answer, ending
from ovspec.protocols.errors import Failure, anthropic_error
from ovspec.protocols.reply import Events
from ovspec.protocols.requests import TextRequest

SIGNATURE = "ovspec"  # Anthropic's API has one on all thinking, which clients send back
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(Answer):
    input_tokens: int = Field(description="Tokens of the prompt that weren't in the KV cache.")
    cache_creation_input_tokens: int = Field(description="Always 0.")
    cache_read_input_tokens: int = Field(description="Tokens of the prompt that were in the KV cache already.")
    output_tokens: int


class ThinkingBlock(Answer):
    type: Literal["thinking"]
    thinking: str
    signature: str


class TextBlock(Answer):
    type: Literal["text"]
    text: str


class ToolUseBlock(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(description="What a call that was cut off has of it.")


Block = ThinkingBlock | TextBlock | ToolUseBlock


class MessageEnd(Answer):
    """How an answer has ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None = Field(description="That which ended the text.")
    record: dict[str, Any] = Field(default={}, description="With return_record: what 'ovspec verify' checks.")
    schema_errors: list[str] = Field(default=[], description="In the mode checked: how the text breaks its schema.")


class Message(MessageEnd):
    """An answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    usage: MessageUsage


# ---------------------------------------------------------------- events


class TextDelta(Answer):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Answer):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(Answer):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(Answer):
    type: Literal["input_json_delta"]
    partial_json: str


class MessageStart(Answer):
    type: Literal["message_start"]
    message: Message


class BlockStart(Answer):
    type: Literal["content_block_start"]
    index: int
    content_block: Block


class BlockDelta(Answer):
    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Answer):
    type: Literal["content_block_stop"]
    index: int


class Ping(Answer):
    type: Literal["ping"]


class MessageDelta(Answer):
    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Answer):
    type: Literal["message_stop"]


# ---------------------------------------------------------------- whole answers


def whole_message(_: Any, head: dict[str, Any], request: TextRequest, results: list[Result], *_others: Any) -> Message:
    """Return the answer to a request."""
    [result] = results
    return Message(**head_of(head), content=blocks_of(result), **end_of(request, result), usage=usage_of(result.stats))


def head_of(head: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that an answer begins with."""
    return {"id": head["id"], "type": "message", "role": "assistant", "model": head["model"]}


def blocks_of(result: Result) -> list[Block]:
    """Return what an answer says; a text without characters only where it says nothing else."""
    blocks = list[Block]()
    if result.thinking:
        blocks.append(ThinkingBlock(type="thinking", thinking=result.thinking, signature=SIGNATURE))
    if result.text or not (result.thinking or result.tool_calls):
        blocks.append(TextBlock(type="text", text=result.text))
    for call in result.tool_calls:
        given = input_of(call.arguments)
        blocks.append(ToolUseBlock(type="tool_use", id=call.id or "", name=call.name or "", input=given))
    return blocks


def input_of(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; of those that are cut off, the members that are there."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def end_of(request: TextRequest, result: Result) -> dict[str, Any]:
    """Return how an answer has ended, as fields of a message."""
    found = ending(request, result, "")
    stopped: StopReason = "end_turn" if result.stop_string is None else "stop_sequence"
    reasons: dict[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use", "stop": stopped}
    return {"stop_reason": reasons[found.pop("finish_reason")], "stop_sequence": result.stop_string, **found}


def usage_of(stats: Stats) -> MessageUsage:
    return MessageUsage(
        input_tokens=stats.prompt_tokens - stats.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=stats.cached_tokens,
        output_tokens=stats.generated_tokens,
    )


# ---------------------------------------------------------------- streams


class MessageWriter:
    """Makes the events of a stream from the pieces of an answer."""

    def __init__(self, _: Any, head: dict[str, Any], request: TextRequest, rows: list[Row], *_others: Any) -> None:
        self._head, self._request, [self._row] = head_of(head), request, rows
        self._begun = False
        self._open: Literal["thinking", "text"] | int | None = None  # the block that is open; a call's by its index
        self._index = -1  # of the last block

    def first(self) -> Events:
        return ()  # what was cached of the prompt is known with the first piece

    def more(self, _: int, piece: Piece) -> Events:
        return [*self._begin(), *self._say(piece)]

    def waiting(self) -> Events:
        return [*self._begin(waiting=True), Ping(type="ping")]

    def last(self) -> Events:
        events = [*self._begin()]
        if self._index < 0:
            events += self._turn("text", TextBlock(type="text", text=""))
        events += self._close()
        result = self._row.result()
        end = MessageEnd(**end_of(self._request, result))
        events.append(MessageDelta(type="message_delta", delta=end, usage=usage_of(result.stats)))
        return [*events, MessageStop(type="message_stop")]

    def failed(self, failure: Failure) -> Events:
        return [anthropic_error(failure)]

    def _begin(self, waiting: bool = False) -> Iterator[BaseModel]:
        """Yield the first event, once."""
        if self._begun:
            return
        self._begun, usage = True, usage_of(self._row.stats)
        if waiting:  # what the row has as cached is corrected when its prompt is read
            usage.input_tokens, usage.cache_read_input_tokens = self._row.stats.prompt_tokens, 0
        message = Message(**self._head, content=[], stop_reason=None, stop_sequence=None, usage=usage)
        yield MessageStart(type="message_start", message=message)

    def _say(self, piece: Piece) -> Iterator[BaseModel]:
        """Yield the events for what a piece says."""
        for kind in ("text", "thinking") if self._open == "text" else ("thinking", "text"):
            if kind == "text" and piece.text:
                yield from self._turn("text", TextBlock(type="text", text=""))
                yield self._delta(TextDelta(type="text_delta", text=piece.text))
            if kind == "thinking" and piece.thinking:
                yield from self._turn("thinking", ThinkingBlock(type="thinking", thinking="", signature=""))
                yield self._delta(ThinkingDelta(type="thinking_delta", thinking=piece.thinking))
        for call in piece.tool_calls:
            if call.name is not None:
                block = ToolUseBlock(type="tool_use", id=call.id or "", name=call.name, input={})
                yield from self._turn(call.index, block)
            if call.arguments:
                yield self._delta(InputDelta(type="input_json_delta", partial_json=call.arguments))

    def _delta(self, delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta) -> BlockDelta:
        return BlockDelta(type="content_block_delta", index=self._index, delta=delta)

    def _turn(self, kind: Literal["thinking", "text"] | int, block: Block) -> Iterator[BaseModel]:
        """Yield what opens a block, unless one of its kind is open."""
        if self._open == kind:
            return
        yield from self._close()
        self._open, self._index = kind, self._index + 1
        yield BlockStart(type="content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[BaseModel]:
        """Yield what closes the block that is open, if one is."""
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta(SignatureDelta(type="signature_delta", signature=SIGNATURE))
        yield BlockStop(type="content_block_stop", index=self._index)
        self._open = None
