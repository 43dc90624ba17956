"""llama.cpp's endpoint for editors: the text between a prefix and a suffix, and replies in llama.cpp's shape."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, RootModel
from pydantic_core import PydanticCustomError

from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.engine.results import Piece, Result
from ovspec.params import Params
from ovspec.protocols.bodies import FAIL_FAST, OtherServersFields
from ovspec.protocols.chat.bodies import OpenAIBody
from ovspec.protocols.chat.reply import make_verification_record
from ovspec.protocols.chat.request import build_text_request
from ovspec.protocols.reply import Events, ReplyInputs, ReplyMaker, ReplyModel
from ovspec.protocols.requests import TextRequest
from ovspec.protocols.timings import Timings, make_llamacpp_timings
from ovspec.text.infill import DEFAULT_CHUNK_FILE, FileChunk, InfillPrompt

StopType = Literal["eos", "limit", "word"]
# By finish reason, for texts without a final stop string.
STOP_TYPES: dict[str, StopType] = {"eos": "eos", "stop": "eos", "length": "limit", "cancelled": "limit"}


def read_input_extra(input_extra: JsonValue) -> tuple[FileChunk, ...]:
    """Return ``input_extra`` without the editors' extra fields."""
    if isinstance(input_extra, list) and all(isinstance(chunk, Mapping) for chunk in input_extra):
        chunks = [FileChunk(chunk.get("text"), chunk.get("filename", DEFAULT_CHUNK_FILE)) for chunk in input_extra]
        if all(isinstance(chunk_part, str) for chunk in chunks for chunk_part in chunk):
            return tuple(chunks)
    raise PydanticCustomError("problem", 'must be a list of {"filename": …, "text": …}, with strings as values')


class InfillRequest(OpenAIBody, OtherServersFields):
    """A gap in a text, to be filled."""

    input_prefix: str = Field(description="The text before the gap.")
    input_suffix: str = Field(description="The text after the gap.")
    input_extra: Annotated[Any, PlainValidator(read_input_extra, json_schema_input_type=list[JsonObject])] = Field(
        (),
        description="Parts of other files, as objects with filename and text. If the prompt is too long, the first "
        "parts are left out.",
    )
    prompt: str | None = Field(None, description="Beginning of the text in the gap, to be continued.")
    response_fields: Annotated[list[str], FAIL_FAST] | None = Field(
        None,
        description='Fields to return, such as "content" or "timings/prompt_n", under these names; unknown names are '
        "left out. Default: all.",
    )


class InfillDelta(ReplyModel):
    """A part of a text in a stream."""

    index: int
    content: str
    tokens: list[int] = Field(description="Empty.")
    stop: bool = Field(description="Whether this is the last part; only the last part has the other fields.")


class InfillReplyModel(InfillDelta):
    """A text."""

    model: str
    tokens_predicted: int
    tokens_evaluated: int = Field(description="Prompt tokens.")
    tokens_cached: int = Field(description="Prompt tokens found in the KV cache.")
    truncated: bool = Field(description="Whether the context ended the text.")
    stop_type: StopType
    stopping_word: str = Field(description="The stop string at the end of the text.")
    has_new_line: bool
    prompt: str = Field(description="The whole prompt, with special tokens as text.")
    generation_settings: JsonObject = Field(description="As in /props, and n_ctx.")
    timings: Timings
    record: JsonObject = Field(default={}, description="With return_record: the record for 'ovspec verify'.")


class InfillReplies(RootModel[InfillReplyModel | list[InfillReplyModel | JsonObject] | JsonObject]):
    """A text, or a list of texts; with response_fields, each has only these fields."""


def read_infill_request(body: InfillRequest) -> TextRequest:
    """Return the request in a body; raises RequestError for conflicting fields."""
    prompt = InfillPrompt(body.input_prefix, body.input_suffix, body.input_extra, body.prompt or "")
    return replace(build_text_request(body, "infill", [prompt]), body=body)


class InfillReplyMaker(ReplyMaker):
    """The reply to a request, in llama.cpp's shape."""

    def __init__(self, reply_inputs: ReplyInputs) -> None:
        self._reply_inputs = reply_inputs
        self._response_fields: list[str] | None = reply_inputs.request.body.response_fields

    def whole_reply(self, results: list[Result]) -> InfillReplies:
        replies = [make_infill_reply(self._reply_inputs, index, result) for index, result in enumerate(results)]
        selected_replies = [select_fields(reply, self._response_fields) for reply in replies]
        if len(selected_replies) == 1:
            return InfillReplies.model_construct(selected_replies[0])
        return InfillReplies.model_construct(selected_replies)

    def piece_events(self, index: int, piece: Piece) -> Events:
        events: list[BaseModel] = []
        if piece.text:
            events.append(InfillDelta(index=index, content=piece.text, tokens=[], stop=False))
        if piece.finish_reason:
            reply = make_infill_reply(self._reply_inputs, index, self._reply_inputs.rows[index].result())
            reply.content = ""  # its text was in earlier events
            events.append(InfillReplies.model_construct(select_fields(reply, self._response_fields)))
        return events


def make_infill_reply(reply_inputs: ReplyInputs, index: int, result: Result) -> InfillReplyModel:
    """Return the reply for a single text."""
    request = reply_inputs.request
    tokenizer = reply_inputs.tokenizer
    stats = result.stats
    record = result.record
    assert record
    sampling_settings = to_llamacpp_sampling(record.params)
    if request.only_prompts:
        sampling_settings |= {"n_predict": 0, "max_tokens": 0}
    context_length = request.model_context_length
    reply = InfillReplyModel(
        index=index,
        content=result.text,
        tokens=[],
        stop=True,
        model=reply_inputs.identity["model"],
        tokens_predicted=stats.generated_tokens,
        tokens_evaluated=stats.prompt_tokens,
        tokens_cached=stats.cached_tokens,
        truncated=context_length is not None and stats.prompt_tokens + stats.generated_tokens >= context_length,
        stop_type="word" if result.stop_string is not None else STOP_TYPES[result.finish_reason],
        stopping_word=result.stop_string or "",
        has_new_line="\n" in result.text,
        prompt=tokenizer.decode_with_special(record.prompt_ids) or tokenizer.decode(record.prompt_ids),
        generation_settings={"n_ctx": context_length, **sampling_settings},
        timings=make_llamacpp_timings(stats),
    )
    if request.return_record:
        reply.record = make_verification_record(result, "")
    return reply


def select_fields(reply: InfillReplyModel, paths: list[str] | None) -> InfillReplyModel | JsonObject:
    """Return a reply, or only its fields at ``paths``, if given, each under its whole path."""
    if not paths:
        return reply
    selected_fields: JsonObject = {}
    for path in paths:
        field_value: JsonValue = reply.model_dump(exclude_unset=True)
        for path_part in path.split("/"):
            field_value = field_value.get(path_part) if isinstance(field_value, dict) else None
        if field_value is not None:
            selected_fields[path] = field_value
    return selected_fields


def to_llamacpp_sampling(params: Params) -> JsonObject:
    """Return sampling options under llama.cpp's names."""
    max_tokens = -1 if params.max_tokens is None else params.max_tokens
    return {
        "n_predict": max_tokens,
        "max_tokens": max_tokens,
        "n_indent": params.min_indent,
        "t_max_predict_ms": params.max_predict_ms,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "typical_p": params.typical_p,
        "repeat_penalty": 1.0 if params.repetition_penalty is None else params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": params.stop_strings,
        "ignore_eos": params.ignore_eos,
    }
