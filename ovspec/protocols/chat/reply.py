"""Answers of OpenAI's API: their parts, whole answers, and the chunks of a stream."""

import secrets
import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ovspec.api.verify import record_as_json
from ovspec.engine.results import Piece, Result, Stats
from ovspec.engine.row import Row
from ovspec.protocols.logprobs import Echo, Place, PlaceStream, places_of
from ovspec.protocols.reply import DONE, Events, Writer
from ovspec.protocols.requests import TextRequest
from ovspec.text.answer import ToolCall
from ovspec.text.tokenizer import Tokenizer

LEAST = -9999.0  # what OpenAI's API writes for a log-probability of -inf, which JSON can't hold


class Answer(BaseModel):
    """A part of an answer; only fields that were set are sent."""

    model_config = ConfigDict(extra="forbid")


class PromptDetails(Answer):
    cached_tokens: int = Field(description="Tokens of the prompt that were in the KV cache already.")


class CompletionDetails(Answer):
    accepted_prediction_tokens: int = Field(description="Proposed tokens that were accepted.")
    rejected_prediction_tokens: int = Field(description="Proposed tokens that were rejected.")
    reasoning_tokens: int = Field(description="Tokens of thinking.")


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class LikelyToken(Answer):
    token: str
    bytes: list[int]
    logprob: float


class ChatToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(Answer):
    content: list[ChatToken]
    refusal: None


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class Part(Answer):
    """A text, or a part of it in a stream, where all but the last part have a finish reason of null."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    record: dict[str, Any] = Field(default={}, description="With return_record: what 'ovspec verify' checks.")
    schema_errors: list[str] = Field(default=[], description="In the mode checked: how the text breaks its schema.")


class FunctionCall(Answer):
    name: str = ""
    arguments: str = Field("", description="JSON; the last call may be cut off where the finish reason is length.")


class ToolCallAnswer(Answer):
    """A call of a tool, or a part of it in a stream, where only the first part has id, type and name."""

    index: int = Field(0, description="In a stream: which call this belongs to.")
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = Field("", description="The model's thinking.")
    tool_calls: list[ToolCallAnswer] = []


class ChatChoice(Part):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(Part):
    text: str
    logprobs: CompletionLogprobs | None


class Delta(Answer):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallAnswer] = Field(default=[], description="Parts of calls.")


class ChatPart(Part):
    delta: Delta
    logprobs: ChatLogprobs | None


class Texts(Answer):
    id: str
    created: int
    model: str
    usage: Usage


class ChatCompletion(Texts):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(Texts):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Chunk(Answer):
    """A chunk of a stream. ``usage`` is null in all but the last one, if it was asked for."""

    id: str
    object: Literal["chat.completion.chunk", "text_completion"]
    created: int
    model: str
    choices: list[ChatPart | CompletionChoice]
    usage: Usage | None = None


def head_of(prefix: str, model: str, name: str | None = None) -> dict[str, Any]:
    """Return the fields that an answer, or each chunk of it, begins with; its id: ``prefix`` and ``name``."""
    return {"id": prefix + (name or secrets.token_hex(12)), "created": int(time.time()), "model": model}


def whole(
    tokenizer: Tokenizer, head: dict[str, Any], request: TextRequest, results: list[Result], echoes: list[Echo]
) -> ChatCompletion | Completion:
    """Return the answer to a request; ``echoes``: what is repeated of each prompt."""
    n, choices = len(results) // len(request.prompts), list[Any]()
    for index, result in enumerate(results):
        echo, places = echoes[index // n], None
        if result.logprobs is not None:
            piece = Piece(result.text, result.token_ids, logprobs=result.logprobs)
            told = result.thinking or result.tool_calls  # then the text isn't what the tokens spell
            own = places_of(piece) if told else PlaceStream(tokenizer, len(echo.text)).push(piece)
            places = [*(echo.places or []), *own]
        ends = {"index": index, **ending(request, result, echo.text)}
        if request.kind == "chat":
            logprobs = None if places is None else chat_logprobs(tokenizer, places)
            message = message_of(result)
            choices.append(ChatChoice(message=message, logprobs=logprobs, **ends))
        else:
            logprobs = None if places is None else completion_logprobs(tokenizer, places, bool(tops_of(result)))
            choices.append(CompletionChoice(text=echo.text + result.text, logprobs=logprobs, **ends))
    usage = usage_of([result.stats for result in results], n)
    if request.kind == "chat":
        return ChatCompletion(**head, object="chat.completion", choices=choices, usage=usage)
    return Completion(**head, object="text_completion", choices=choices, usage=usage)


def message_of(result: Result) -> ChatMessage:
    """Return the message of an answer; without text beside calls its content is null, as OpenAI's is."""
    parts: dict[str, Any] = {"content": result.text if result.text or not result.tool_calls else None}
    if result.thinking:
        parts["reasoning_content"] = result.thinking
    if result.tool_calls:
        parts["tool_calls"] = [call_of(call, False) for call in result.tool_calls]
    return ChatMessage.model_construct(role="assistant", **parts)


def call_of(call: ToolCall, stream: bool = True) -> ToolCallAnswer:
    """Return a call, or a part of one in a stream."""
    head: dict[str, Any] = {"index": call.index} if stream else {}
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.name is not None:
        head |= {"id": call.id, "type": "function"}
        function["name"] = call.name
    return ToolCallAnswer.model_construct(**head, function=FunctionCall.model_construct(**function))


def ending(request: TextRequest, result: Result, before: str) -> dict[str, Any]:
    """Return how a text ends, as fields of a choice; ``before``: the prompt, if that is repeated."""
    reason = "length" if result.finish_reason == "length" else "tool_calls" if result.tool_calls else "stop"
    found: dict[str, Any] = {"finish_reason": reason}
    if request.return_record:
        found["record"] = record_of(result, before)
    if result.schema_errors is not None:
        found["schema_errors"] = result.schema_errors
    return found


def record_of(result: Result, before: str) -> dict[str, Any]:
    """Return what ``ovspec verify`` needs to check a text. ``echo``: its first characters, the prompt."""
    made: dict[str, Any] = {"token_ids": result.token_ids, "finish_reason": result.finish_reason}
    return (record_as_json(result) or {}) | made | ({"echo": len(before)} if before else {})


def tops_of(result: Result) -> int:
    """Return how many of the most likely tokens were requested beside each one."""
    return (result.record.params.logprobs or 0) if result.record else 0


def chat_logprobs(tokenizer: Tokenizer, places: list[Place]) -> ChatLogprobs:
    """Return the log-probabilities of a chat's tokens."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        known = {"token": tokenizer.token_text(token), "bytes": list(tokenizer.token_bytes(token))}
        return known | {"logprob": max(logprob, LEAST)}

    content = [
        ChatToken(**shown(each.token_id, each.logprob), top_logprobs=[LikelyToken(**shown(*top)) for top in each.top])
        for each in (place.logprob for place in places)
        if each
    ]
    return ChatLogprobs(content=content, refusal=None)


def completion_logprobs(tokenizer: Tokenizer, places: list[Place], tops: bool) -> CompletionLogprobs:
    """Return the log-probabilities of a completion's tokens; ``tops``: also of the most likely ones at each place."""
    found = [place.logprob for place in places]
    likely = [
        each and {tokenizer.token_text(t): max(v, LEAST) for t, v in [*each.top, (each.token_id, each.logprob)]}
        for each in found
    ]
    return CompletionLogprobs(
        tokens=[tokenizer.token_text(place.token) for place in places],
        token_logprobs=[each and max(each.logprob, LEAST) for each in found],
        top_logprobs=likely if tops else None,
        text_offset=[place.offset for place in places],
    )


def usage_of(stats: list[Stats], n: int) -> Usage:
    """Return the usage of a request with ``n`` texts for each prompt."""
    prompt, cached = sum(s.prompt_tokens for s in stats[::n]), sum(s.cached_tokens for s in stats[::n])
    proposed, accepted = sum(s.proposed for s in stats), sum(s.accepted for s in stats)
    generated = sum(s.generated_tokens for s in stats)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
        completion_tokens_details=CompletionDetails(
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=proposed - accepted,
            reasoning_tokens=sum(s.thinking_tokens for s in stats),
        ),
    )


# ---------------------------------------------------------------- streams


class ChunkWriter(Writer):
    """Makes the chunks of a stream from the pieces of a request's texts."""

    def __init__(
        self, tokenizer: Tokenizer, head: dict[str, Any], request: TextRequest, rows: list[Row], echoes: list[Echo]
    ) -> None:
        self._tokenizer, self._request, self._rows = tokenizer, request, rows
        self._chat, self._n = request.kind == "chat", len(rows) // len(request.prompts)
        self._head: dict[str, Any] = head | {"object": "chat.completion.chunk" if self._chat else "text_completion"}
        if request.include_usage:
            self._head["usage"] = None
        self._echoes = [echoes[index // self._n] for index in range(len(rows))]
        self._places: list[PlaceStream] = []  # for each row, if log-probabilities are wanted
        if rows[0].logprobs is not None:
            self._places = [PlaceStream(tokenizer, len(echo.text)) for echo in self._echoes]

    def first(self) -> Events:
        """Return the chunks that come before the texts: their roles, or the prompts that are repeated."""
        if self._chat:
            return [self._chunk(index, Delta(role="assistant", content="")) for index in range(len(self._rows))]
        echoes = enumerate(self._echoes)
        return [self._chunk(index, Delta(content=echo.text), echo.places) for index, echo in echoes if echo.text]

    def more(self, index: int, piece: Piece) -> Events:
        """Return the chunks for a piece of a text; there are none if it has nothing to tell yet."""
        places, chunks = None, list[Chunk]()
        if self._places:
            places = places_of(piece) if self._rows[index].parses_answer else self._places[index].push(piece)
        deltas = [Delta(reasoning_content=piece.thinking)] if piece.thinking else []
        deltas += [Delta(content=piece.text)] if piece.text else []
        deltas += [Delta(tool_calls=[call_of(call)]) for call in piece.tool_calls]
        for delta in deltas or [Delta(content="")] * bool(places):
            chunks.append(self._chunk(index, delta, places))
            places = None
        if piece.finish_reason:
            chunks.append(self._chunk(index, Delta(), **ending(self._request, self._rows[index].result(), "")))
        return chunks

    def last(self) -> Events:
        """Return the last events: the usage, if it was asked for, and the end."""
        if not self._request.include_usage:
            return [DONE]
        chunk = Chunk(**self._head, choices=[])
        chunk.usage = usage_of([row.stats for row in self._rows], self._n)
        return [chunk, DONE]

    def _chunk(self, index: int, delta: Delta, places: list[Place] | None = None, **ends: Any) -> Chunk:
        ends = {"index": index, "finish_reason": None} | ends
        if self._chat:
            logprobs = chat_logprobs(self._tokenizer, places) if places else None
            part = ChatPart.model_construct(delta=delta, logprobs=logprobs, **ends)
            return Chunk.model_construct(**self._head, choices=[part])
        tops = bool(self._rows[index].params.logprobs)
        logprobs = completion_logprobs(self._tokenizer, places, tops) if places else None
        part = CompletionChoice.model_construct(text=delta.content, logprobs=logprobs, **ends)
        return Chunk.model_construct(**self._head, choices=[part])
