"""llama.cpp's endpoint for editors: the text between a prefix and a suffix, and answers in llama.cpp's shape."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, RootModel
from pydantic_core import PydanticCustomError

from ovspec.engine.results import Piece, Result, Stats
from ovspec.engine.row import Row
from ovspec.protocols.bodies import FIRST, Common, Foreign
from ovspec.protocols.chat.reply import Answer, record_of
from ovspec.protocols.logprobs import Echo
from ovspec.protocols.models import settings_of
from ovspec.protocols.reply import Events, Writer
from ovspec.protocols.requests import TextRequest, asked_for
from ovspec.text.infill import DEFAULT_CHUNK_FILE, FileChunk, Infill
from ovspec.text.tokenizer import Tokenizer

StopType = Literal["eos", "limit", "word"]
# By finish reason, if no stop string ended the text.
STOP_TYPES: dict[str, StopType] = {"eos": "eos", "stop": "eos", "length": "limit", "cancelled": "limit"}


def chunks_of(value: Any) -> tuple[FileChunk, ...]:
    """Return ``input_extra``; fields that editors add for themselves are left out."""
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        made = [FileChunk(each.get("text"), each.get("filename", DEFAULT_CHUNK_FILE)) for each in value]
        if all(isinstance(part, str) for chunk in made for part in chunk):
            return tuple(made)
    raise PydanticCustomError("problem", "must be a list of objects with a text and a filename, which are strings")


class InfillRequest(Common, Foreign):
    """A place in a text, to be filled."""

    input_prefix: str = Field(description="What comes before the text.")
    input_suffix: str = Field(description="What comes behind it.")
    input_extra: Annotated[Any, PlainValidator(chunks_of, json_schema_input_type=list[dict[str, Any]])] = Field(
        (),
        description="Parts of other files, as objects with filename and text. Where the prompt is too long, the first "
        "ones are left out.",
    )
    prompt: str | None = Field(None, description="What the text begins with.")
    response_fields: Annotated[list[str], FIRST] | None = Field(
        None,
        description='The fields that the answer has, such as "content" or "timings/prompt_n", which then is a field of '
        "that name; unknown ones are left out. Default: all.",
    )


class Timings(Answer):
    cache_n: int = Field(description="Tokens of the prompt that were in the KV cache already.")
    prompt_n: int = Field(description="Tokens of the prompt that were read.")
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int = Field(0, description="Proposed tokens, if there were any.")
    draft_n_accepted: int = 0


class InfillPart(Answer):
    """A part of a text in a stream."""

    index: int
    content: str
    tokens: list[int] = Field(description="Empty.")
    stop: bool = Field(description="Whether this is the text's last part, which has all other fields, too.")


class InfillAnswer(InfillPart):
    """A text."""

    model: str
    tokens_predicted: int
    tokens_evaluated: int = Field(description="Tokens of the prompt.")
    tokens_cached: int = Field(description="Those of them that were in the KV cache already.")
    truncated: bool = Field(description="Whether the context ended the text.")
    stop_type: StopType
    stopping_word: str = Field(description="The stop string that ended the text.")
    has_new_line: bool
    prompt: str = Field(description="The whole prompt, with its tokens spelt.")
    generation_settings: dict[str, Any] = Field(description="As in /props, and n_ctx.")
    timings: Timings
    record: dict[str, Any] = Field(default={}, description="With return_record: what 'ovspec verify' checks.")


class InfillAnswers(RootModel[InfillAnswer | list[InfillAnswer | dict[str, Any]] | dict[str, Any]]):
    """A text, or a list of several; with response_fields, each has only these."""


def read_infill(body: InfillRequest) -> TextRequest:
    """Return the request in a body; raises RequestError for fields that can't be met together."""
    prompt = Infill(body.input_prefix, body.input_suffix, body.input_extra, body.prompt or "")
    return replace(asked_for(body, "infill", [prompt]), body=body)


def timings_of(stats: Stats) -> Timings:
    read, count = stats.prompt_tokens - stats.cached_tokens, stats.generated_tokens
    # Without a token, all time was the prompt's.
    prompt_ms = stats.ttft_ms if count else stats.target_ms + stats.draft_ms + stats.other_ms
    predicted_ms = stats.tpot_ms * max(0, count - 1)
    made: dict[str, Any] = {"cache_n": stats.cached_tokens}
    for name, n, ms in (("prompt", read, prompt_ms), ("predicted", count, predicted_ms)):
        made |= {f"{name}_n": n, f"{name}_ms": ms, f"{name}_per_token_ms": ms / n if n else 0.0}
        made |= {f"{name}_per_second": 1e3 * n / ms if ms else 0.0}
    if stats.proposed:
        made |= {"draft_n": stats.proposed, "draft_n_accepted": stats.accepted}
    return Timings(**made)


def selected(answer: InfillAnswer, fields: list[str] | None) -> Any:
    """Return an answer, or, if there are any, the fields of it that are wanted, each under its whole path."""
    if not fields:
        return answer
    made, found = dict[str, Any](), answer.model_dump(exclude_unset=True)
    for path in fields:
        value: Any = found
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            made[path] = value
    return made


def answer_of(tokenizer: Tokenizer, head: dict[str, Any], request: TextRequest, index: int, result: Result) -> Any:
    """Return the answer for one text."""
    stats, record = result.stats, result.record
    assert record
    context, used = request.context, stats.prompt_tokens + stats.generated_tokens
    settings = settings_of(record.params) | ({"n_predict": 0, "max_tokens": 0} if request.only_prompts else {})
    answer = InfillAnswer(
        index=index,
        content=result.text,
        tokens=[],
        stop=True,
        model=head["model"],
        tokens_predicted=stats.generated_tokens,
        tokens_evaluated=stats.prompt_tokens,
        tokens_cached=stats.cached_tokens,
        truncated=context is not None and used >= context,
        stop_type="word" if result.stop_string is not None else STOP_TYPES[result.finish_reason],
        stopping_word=result.stop_string or "",
        has_new_line="\n" in result.text,
        prompt=tokenizer.decode_with_special(record.prompt_ids) or tokenizer.decode(record.prompt_ids),
        generation_settings={"n_ctx": context, **settings},
        timings=timings_of(stats),
    )
    if request.return_record:
        answer.record = record_of(result, "")
    return answer


def whole_infill(
    tokenizer: Tokenizer, head: dict[str, Any], request: TextRequest, results: list[Result], _: list[Echo]
) -> InfillAnswers:
    """Return the answer to a request."""
    answers = [answer_of(tokenizer, head, request, index, result) for index, result in enumerate(results)]
    made = [selected(answer, request.body.response_fields) for answer in answers]
    return InfillAnswers.model_construct(made if len(made) > 1 else made[0])


class InfillWriter(Writer):
    """Makes the events of a stream from the pieces of a request's texts."""

    def __init__(
        self, tokenizer: Tokenizer, head: dict[str, Any], request: TextRequest, rows: list[Row], _: list[Echo]
    ) -> None:
        self._tokenizer, self._head, self._request, self._rows = tokenizer, head, request, rows

    def more(self, index: int, piece: Piece) -> Events:
        events = [InfillPart(index=index, content=piece.text, tokens=[], stop=False)] if piece.text else []
        if not piece.finish_reason:
            return events
        answer = answer_of(self._tokenizer, self._head, self._request, index, self._rows[index].result())
        answer.content = ""  # it has been told
        return [*events, InfillAnswers.model_construct(selected(answer, self._request.body.response_fields))]
