"""Replies to OpenAI's chats and completions: their parts, whole replies, and the chunks of a stream."""

import secrets
import time
from typing import Any, Literal

from pydantic import Field

from ovspec.api.verify import record_as_json
from ovspec.base.json_types import JsonObject
from ovspec.engine.results import Piece, Result, Stats
from ovspec.protocols.chat.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    make_chat_logprobs,
    make_completion_logprobs,
    requested_top_count,
)
from ovspec.protocols.logprobs import PlacedToken, PlacedTokenStream, place_chat_tokens
from ovspec.protocols.reply import DONE_EVENT, Events, ReplyInputs, ReplyMaker, ReplyModel
from ovspec.protocols.requests import TextRequest
from ovspec.protocols.timings import TextTimings, TokenSource, make_text_timings
from ovspec.text.answer import ToolCall


class PromptTokensDetails(ReplyModel):
    cached_tokens: int = Field(description="Prompt tokens found in the KV cache.")


class CompletionTokensDetails(ReplyModel):
    accepted_prediction_tokens: int = Field(description="Number of accepted proposed tokens.")
    rejected_prediction_tokens: int = Field(description="Number of rejected proposed tokens.")
    reasoning_tokens: int = Field(description="Thinking tokens.")


class Usage(ReplyModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Choice(ReplyModel):
    """A text, or a part of it in a stream; only the last part has a finish reason."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    record: JsonObject = Field(default={}, description="With return_record: the record for 'ovspec verify'.")
    schema_errors: list[str] = Field(default=[], description="In the mode checked: violations of the schema.")
    token_sources: list[TokenSource] = Field(default=[], description="With return_token_sources: the tokens.")


class FunctionCall(ReplyModel):
    name: str = ""
    arguments: str = Field("", description="JSON; truncated in the last call if the finish reason is length.")


class ChatToolCall(ReplyModel):
    """A tool call, or a part of it in a stream; only the first part has id, type and name."""

    index: int = Field(0, description="In a stream: the index of the call.")
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(ReplyModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = Field("", description="The model's thinking.")
    tool_calls: list[ChatToolCall] = Field(default=[])


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class ChatDelta(ReplyModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ChatToolCall] = Field(default=[], description="Parts of tool calls.")


class ChatChunkChoice(Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class OpenAIReply(ReplyModel):
    id: str
    created: int
    model: str
    usage: Usage
    timings: TextTimings | None = Field(None, description="With timings_per_token: timings of the first text.")


class ChatCompletion(OpenAIReply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(OpenAIReply):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Chunk(ReplyModel):
    """A chunk of a stream. ``usage``, if requested, is null except in the last chunk."""

    id: str
    object: Literal["chat.completion.chunk", "text_completion"]
    created: int
    model: str
    choices: list[ChatChunkChoice | CompletionChoice]
    usage: Usage | None = None
    timings: TextTimings | None = Field(None, description="With timings_per_token: timings of the text so far.")


class ChatReplyMaker(ReplyMaker):
    """The reply to a chat or a completion: whole, or as chunks."""

    def __init__(self, reply_inputs: ReplyInputs) -> None:
        self._tokenizer = reply_inputs.tokenizer
        self._request = reply_inputs.request
        self._rows = reply_inputs.rows
        self._texts_per_prompt = reply_inputs.texts_per_prompt
        self._is_chat = reply_inputs.request.kind == "chat"
        self._identity: JsonObject = dict(reply_inputs.identity)
        self._echoes = [echo for echo in reply_inputs.echoes for _ in range(self._texts_per_prompt)]  # for each row
        names = {token_id: name for name, token_id in self._tokenizer.added_tokens.items()}
        self._detokenizers = [self._tokenizer.make_detokenizer(names) for _ in self._rows]
        self._placed_token_streams: list[PlacedTokenStream] = []  # for each row of a stream with log-probabilities

    def whole_reply(self, results: list[Result]) -> ChatCompletion | Completion:
        """Return the whole reply."""
        usage = make_openai_usage([result.stats for result in results], self._texts_per_prompt)
        self._identity |= self._make_timings_field(0)
        if self._is_chat:
            choices = [self._make_chat_choice(index, result) for index, result in enumerate(results)]
            return ChatCompletion(**self._identity, object="chat.completion", choices=choices, usage=usage)
        completion_choices = [self._make_completion_choice(index, result) for index, result in enumerate(results)]
        return Completion(**self._identity, object="text_completion", choices=completion_choices, usage=usage)

    def _make_chat_choice(self, index: int, result: Result) -> ChatChoice:
        placed_tokens = self._find_placed_tokens(index, result)
        logprobs = None
        if placed_tokens is not None:
            logprobs = make_chat_logprobs(self._tokenizer, placed_tokens)
        fields = make_ending_fields(self._request, result, "") | self._make_inside_fields(index, result)
        return ChatChoice(index=index, message=make_chat_message(result), logprobs=logprobs, **fields)

    def _make_completion_choice(self, index: int, result: Result) -> CompletionChoice:
        echo = self._echoes[index].text
        placed_tokens = self._find_placed_tokens(index, result)
        logprobs = None
        if placed_tokens is not None:
            logprobs = make_completion_logprobs(self._tokenizer, placed_tokens, bool(requested_top_count(result)))
        fields = make_ending_fields(self._request, result, echo) | self._make_inside_fields(index, result)
        return CompletionChoice(index=index, text=echo + result.text, logprobs=logprobs, **fields)

    def _make_inside_fields(self, index: int, part: Piece | Result) -> JsonObject:
        """Return the requested fields that say how a text, or a piece of it, came about."""
        fields: JsonObject = {}
        if self._request.return_token_sources:
            spell, spell_rest = self._detokenizers[index].push, self._detokenizers[index].flush
            sources = [
                TokenSource(id=token_id, text=spell(token_id), source=source)
                for token_id, source in zip(part.token_ids, part.sources, strict=True)
            ]
            if part.finish_reason and sources:
                sources[-1].text += spell_rest()
            fields["token_sources"] = sources
        return fields

    def _make_timings_field(self, index: int) -> JsonObject:
        """Return the field with a text's counts and times, if it was requested."""
        stats = self._rows[index].stats
        return {"timings": make_text_timings(stats)} if self._request.with_timings and stats.generated_tokens else {}

    def _find_placed_tokens(self, index: int, result: Result) -> list[PlacedToken] | None:
        """Return the tokens of a text, after the tokens of its echo, if log-probabilities were requested."""
        if result.logprobs is None:
            return None
        echo = self._echoes[index]
        piece = Piece(result.text, result.token_ids, logprobs=result.logprobs)
        if result.thinking or result.tool_calls:  # the tokens are longer than the text
            placed_tokens = place_chat_tokens(piece)
        else:
            placed_tokens = PlacedTokenStream(self._tokenizer, len(echo.text)).push(piece)
        return [*(echo.tokens or []), *placed_tokens]

    def first_events(self) -> Events:
        """Return the chunks before the texts: their roles, or the repeated prompts."""
        self._identity["object"] = "chat.completion.chunk" if self._is_chat else "text_completion"
        if self._request.include_usage:
            self._identity["usage"] = None
        if self._rows[0].logprobs is not None:
            self._placed_token_streams = [PlacedTokenStream(self._tokenizer, len(echo.text)) for echo in self._echoes]
        if self._is_chat:
            return [
                self._make_chunk(index, ChatDelta(role="assistant", content="")) for index in range(len(self._rows))
            ]
        echoes = enumerate(self._echoes)
        return [
            self._make_chunk(index, ChatDelta(content=echo.text), echo.tokens) for index, echo in echoes if echo.text
        ]

    def piece_events(self, index: int, piece: Piece) -> Events:
        """Return the chunks for a piece of a text; possibly none."""
        chunks = list[Chunk]()
        placed_tokens: list[PlacedToken] | None = None
        if self._placed_token_streams and self._rows[index].parses_answer:
            placed_tokens = place_chat_tokens(piece)
        elif self._placed_token_streams:
            placed_tokens = self._placed_token_streams[index].push(piece)
        deltas = list[ChatDelta]()
        if piece.thinking:
            deltas.append(ChatDelta(reasoning_content=piece.thinking))
        if piece.text:
            deltas.append(ChatDelta(content=piece.text))
        deltas += [ChatDelta(tool_calls=[make_chat_tool_call(call)]) for call in piece.tool_calls]
        inside_fields = self._make_inside_fields(index, piece)
        for delta in deltas or [ChatDelta(content="")] * bool(placed_tokens or inside_fields.get("token_sources")):
            chunks.append(self._make_chunk(index, delta, placed_tokens, **inside_fields))
            placed_tokens = None
            inside_fields.pop("token_sources", None)
        if piece.finish_reason:
            ending_fields = make_ending_fields(self._request, self._rows[index].result(), "")
            chunks.append(self._make_chunk(index, ChatDelta(), **inside_fields, **ending_fields))
        return chunks

    def last_events(self) -> Events:
        """Return the last events: the usage, if requested, and the end."""
        if not self._request.include_usage:
            return [DONE_EVENT]
        chunk = Chunk(**self._identity, choices=[])
        chunk.usage = make_openai_usage([row.stats for row in self._rows], self._texts_per_prompt)
        return [chunk, DONE_EVENT]

    def _make_chunk(
        self, index: int, delta: ChatDelta, tokens: list[PlacedToken] | None = None, **fields: Any
    ) -> Chunk:
        choice_fields: JsonObject = {"index": index, "finish_reason": None, **fields}
        chunk_fields = self._identity | self._make_timings_field(index)
        if self._is_chat:
            logprobs = make_chat_logprobs(self._tokenizer, tokens) if tokens else None
            choice = ChatChunkChoice.model_construct(delta=delta, logprobs=logprobs, **choice_fields)
            return Chunk.model_construct(**chunk_fields, choices=[choice])
        with_top_logprobs = bool(self._rows[index].params.logprobs)
        logprobs = make_completion_logprobs(self._tokenizer, tokens, with_top_logprobs) if tokens else None
        choice = CompletionChoice.model_construct(text=delta.content, logprobs=logprobs, **choice_fields)
        return Chunk.model_construct(**chunk_fields, choices=[choice])


def make_chat_message(result: Result) -> ChatMessage:
    """Return the message of a text; with calls and no text, its content is null, as in OpenAI's API."""
    message_fields: JsonObject = {"content": result.text}
    if result.tool_calls:
        message_fields = {"content": result.text or None}
        message_fields["tool_calls"] = [make_chat_tool_call(call, in_stream=False) for call in result.tool_calls]
    if result.thinking:
        message_fields["reasoning_content"] = result.thinking
    return ChatMessage.model_construct(role="assistant", **message_fields)


def make_chat_tool_call(call: ToolCall, in_stream: bool = True) -> ChatToolCall:
    """Return a call, or a part of a call in a stream."""
    function_fields: JsonObject = {"arguments": call.arguments}
    call_fields: JsonObject = {}
    if in_stream:
        call_fields["index"] = call.index
    if call.name is not None:
        call_fields |= {"id": call.id, "type": "function"}
        function_fields["name"] = call.name
    return ChatToolCall.model_construct(**call_fields, function=FunctionCall.model_construct(**function_fields))


def make_openai_usage(stats: list[Stats], texts_per_prompt: int) -> Usage:
    """Return the usage of a request with ``texts_per_prompt`` texts per prompt."""
    prompt_stats = stats[::texts_per_prompt]
    prompt_tokens = sum(prompt.prompt_tokens for prompt in prompt_stats)
    generated_tokens = sum(text.generated_tokens for text in stats)
    accepted_tokens = sum(text.accepted for text in stats)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=generated_tokens,
        total_tokens=prompt_tokens + generated_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(prompt.cached_tokens for prompt in prompt_stats)),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=accepted_tokens,
            rejected_prediction_tokens=sum(text.proposed for text in stats) - accepted_tokens,
            reasoning_tokens=sum(text.thinking_tokens for text in stats),
        ),
    )


def new_reply_identity(id_prefix: str, model: str, id_suffix: str | None = None) -> JsonObject:
    """Return the first fields of a reply or its chunks; ``id_suffix``: the id after ``id_prefix``."""
    return {"id": id_prefix + (id_suffix or secrets.token_hex(12)), "created": int(time.time()), "model": model}


def make_ending_fields(request: TextRequest, result: Result, echo: str) -> JsonObject:
    """Return the fields for the end of a text; ``echo``: the repeated prompt before it."""
    ending_fields: JsonObject = {"finish_reason": "stop"}
    if result.finish_reason == "length":
        ending_fields["finish_reason"] = "length"
    elif result.tool_calls:
        ending_fields["finish_reason"] = "tool_calls"
    if request.return_record:
        ending_fields["record"] = make_verification_record(result, echo)
    if result.schema_errors is not None:
        ending_fields["schema_errors"] = result.schema_errors
    return ending_fields


def make_verification_record(result: Result, echo: str) -> JsonObject:
    """Return the record for ``ovspec verify``; its ``echo``: the number of prompt characters in the text."""
    record = record_as_json(result) or {}
    record |= {"token_ids": result.token_ids, "finish_reason": result.finish_reason}
    if echo:
        record["echo"] = len(echo)
    return record
