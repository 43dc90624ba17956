"""Makes the output lines of a batch file, each in the form of its request."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from ovspec.integrations.openai_batch import BatchRequest
from ovspec.loop.perplexity import CHUNK, predictions
from ovspec.loop.results import Result
from ovspec.model import LanguageModel
from ovspec.sampling.logprobs import TokenLogprob, token_logprob
from ovspec.text.tokenizer import Tokenizer
from ovspec.verify import record_as_json

T = TypeVar("T")
LEAST = -9999.0  # what OpenAI's API writes for a log-probability of -inf, which JSON can't hold


@dataclass(frozen=True)
class Place:
    """A token in an answer: its position in the text, and its log-probability, which a prompt's first token lacks."""

    token: int
    offset: int
    logprob: TokenLogprob | None


def error_line(request: BatchRequest, message: str) -> dict[str, Any]:
    """Return the output line for a request that failed."""
    if request.kind == "plain":
        return {"id": request.id, "error": message}
    error = {"code": "invalid_request", "message": message}
    return {"id": f"batch_req_{request.id}", "custom_id": request.id, "response": None, "error": error}


def result_line(lm: LanguageModel, request: BatchRequest, results: list[Result]) -> dict[str, Any]:
    """Return the output line for a request from its results, those of the first prompt first."""
    n = len(results) // len(request.prompts)
    choices = []
    for prompt, start in zip(request.prompts, range(0, len(results), n), strict=True):
        texts, before, ids = results[start : start + n], "", list[int]()
        if request.echo and (record := texts[0].record):
            ids = record.prompt_ids.tolist()
            before = prompt if isinstance(prompt, str) else lm.tokenizer.decode(ids)
        if request.kind == "plain":
            choices += [plain_choice(lm, result, before) for result in texts]
        elif request.kind == "chat":
            choices += [chat_choice(lm.tokenizer, result) for result in texts]
        else:
            places = list[Place]()
            if ids and texts[0].logprobs is not None:
                logprobs = at_once(prompt_logprobs(lm, ids, count_of(texts[0])))
                places = echoed(lm.tokenizer, ids, before, logprobs)
            choices += [completion_choice(lm.tokenizer, result, before, places) for result in texts]
    if request.kind == "plain":
        return {"id": request.id, **choices[0]} if len(choices) == 1 else {"id": request.id, "samples": choices}
    stats = [result.stats for result in results]
    prompt_tokens, generated = sum(s.prompt_tokens for s in stats[::n]), sum(s.generated_tokens for s in stats)
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": generated, "total_tokens": prompt_tokens + generated}
    chat = request.kind == "chat"
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request.id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": request.model or "",
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": usage | {"prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in stats[::n])}},
    }
    response = {"status_code": 200, "request_id": request.id, "body": body}
    return {"id": f"batch_req_{request.id}", "custom_id": request.id, "response": response, "error": None}


def plain_choice(lm: LanguageModel, result: Result, before: str) -> dict[str, Any]:
    """Return a text of a request that isn't OpenAI's; ``before`` is the prompt, if that is repeated."""
    found: dict[str, Any] = {"text": before + result.text, "finish_reason": result.finish_reason}
    if result.logprobs is not None:
        found["logprobs"] = [each.as_json(lm.tokenizer.token_text) for each in result.logprobs]
    found |= judged(result)
    counts = {"prompt_tokens": result.stats.prompt_tokens, "generated_tokens": result.stats.generated_tokens}
    return found | counts | {"record": batch_record(result, before)}


def chat_choice(tokenizer: Tokenizer, result: Result) -> dict[str, Any]:
    """Return a choice of OpenAI's chat API."""
    logprobs = None if result.logprobs is None else chat_logprobs(tokenizer, generated(tokenizer, result))
    message = {"role": "assistant", "content": result.text}
    return {"message": message, "logprobs": logprobs} | ending(result, "")


def chat_logprobs(tokenizer: Tokenizer, places: list[Place]) -> dict[str, Any]:
    """Return the log-probabilities of a chat's tokens."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        known = {"token": tokenizer.token_text(token), "bytes": list(tokenizer.token_bytes(token))}
        return known | {"logprob": max(logprob, LEAST)}

    content = [
        shown(each.token_id, each.logprob) | {"top_logprobs": [shown(*top) for top in each.top]}
        for each in (place.logprob for place in places)
        if each
    ]
    return {"content": content, "refusal": None}


def completion_choice(tokenizer: Tokenizer, result: Result, before: str, places: list[Place]) -> dict[str, Any]:
    """Return a choice of OpenAI's completion API; ``places`` are the tokens of ``before``, the repeated prompt."""
    logprobs = None
    if result.logprobs is not None:
        places = [*places, *generated(tokenizer, result, len(before))]
        logprobs = completion_logprobs(tokenizer, places, bool(count_of(result)))
    return {"text": before + result.text, "logprobs": logprobs} | ending(result, before)


def completion_logprobs(tokenizer: Tokenizer, places: list[Place], tops: bool) -> dict[str, Any]:
    """Return the log-probabilities of a completion's tokens; ``tops``: also of the most likely ones at each place."""
    found = [place.logprob for place in places]
    likely = [
        each and {tokenizer.token_text(t): max(v, LEAST) for t, v in [*each.top, (each.token_id, each.logprob)]}
        for each in found
    ]
    return {
        "tokens": [tokenizer.token_text(place.token) for place in places],
        "token_logprobs": [each and max(each.logprob, LEAST) for each in found],
        "top_logprobs": likely if tops else None,
        "text_offset": [place.offset for place in places],
    }


def ending(result: Result, before: str) -> dict[str, Any]:
    reason = "length" if result.finish_reason == "length" else "stop"
    return {"finish_reason": reason, "record": batch_record(result, before)} | judged(result)


def judged(result: Result) -> dict[str, Any]:
    """Return how a text breaks its schema, if that was judged."""
    return {} if result.schema_errors is None else {"schema_errors": result.schema_errors}


def batch_record(result: Result, before: str) -> dict[str, Any]:
    """Return what ``ovspec verify`` needs to check a text of the batch. ``echo``: its first characters, the prompt."""
    made: dict[str, Any] = {"token_ids": result.token_ids, "finish_reason": result.finish_reason}
    return (record_as_json(result) or {}) | made | ({"echo": len(before)} if before else {})


# ---------------------------------------------------------------- tokens in a text


def generated(tokenizer: Tokenizer, result: Result, begin: int = 0) -> list[Place]:
    """Return the generated tokens of a text that begins at ``begin``, except those after its end: EOS or stop strings.

    The first token may begin in the prompt, if that was healed.
    """
    if result.logprobs is None:
        return []
    offsets = offsets_of(tokenizer, result.token_ids)
    healed = max(0, tokenizer.decode(result.token_ids).find(result.text))
    return [
        Place(each.token_id, begin + max(0, offset - healed), each)
        for each, offset in zip(result.logprobs, offsets, strict=True)
        if offset - healed < len(result.text)
    ]


def echoed(tokenizer: Tokenizer, ids: list[int], before: str, logprobs: list[TokenLogprob | None]) -> list[Place]:
    """Return the tokens of a prompt that spell ``before``, with their log-probabilities."""
    added = len(tokenizer.decode(ids)) - len(before)  # a space that some tokenizers put in front
    offsets = [max(0, offset - added) for offset in offsets_of(tokenizer, ids)]
    return [Place(*each) for each in zip(ids, offsets, logprobs, strict=True)]


def prompt_logprobs(
    lm: LanguageModel, ids: list[int], tops: int, chunk: Callable[[], int] = lambda: CHUNK
) -> Generator[None, None, list[TokenLogprob | None]]:
    """Compute the log-probabilities of a prompt's tokens, an inference at a time; return them at the end.

    ``chunk`` is asked before each inference for the most tokens that it may read.
    """
    logprobs: list[TokenLogprob | None] = [None]
    decoders, tokens = lm.workspace.pool.take(), lm.encode(ids)
    try:
        for position, logits in predictions(decoders.target, tokens, len(ids), chunk):
            pairs = zip(logits, ids[position : position + len(logits)], strict=True)
            logprobs += [token_logprob(row, token, tops) for row, token in pairs]
            yield
    finally:
        lm.workspace.pool.give_back(decoders)
    return logprobs


def at_once(steps: Generator[None, None, T]) -> T:
    """Run a generator to its end, and return what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return ended.value


def count_of(result: Result) -> int:
    """Return how many of the most likely tokens were requested beside each one."""
    return (result.record.options.get("logprobs") or 0) if result.record else 0


def offsets_of(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return the number of characters before each token."""
    detokenizer, offsets, length = tokenizer.detokenizer(), list[int](), 0
    for token in ids:
        offsets.append(length)
        length += len(detokenizer.push(token))
    return offsets
