"""Makes answers of OpenAI's API: whole ones, and the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any

from ovspec.integrations.batch_answers import (
    Place,
    batch_record,
    chat_choice,
    chat_logprobs,
    completion_choice,
    completion_logprobs,
    judged,
)
from ovspec.loop.results import Piece, Stats
from ovspec.loop.row import Row
from ovspec.serving.requests import TextRequest
from ovspec.text.tokenizer import Detokenizer, Tokenizer

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Head:
    """What all parts of an answer begin with."""

    model: str
    chat: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, part: bool = False) -> dict[str, Any]:
        """Return the first fields; ``part``: of a chunk of a stream."""
        name = ("chat.completion" + ".chunk" * part) if self.chat else "text_completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": name, "created": self.created, "model": self.model}


def whole(tokenizer: Tokenizer, head: Head, request: TextRequest, echoes: list[tuple[str, list[Place]]]) -> Any:
    """Return the answer to a request whose texts have ended; ``echoes``: each prompt's text and tokens, to repeat."""
    choices = []
    for index, row in enumerate(request.rows):
        result, (before, places) = row.result(), echoes[index // request.n]
        if request.kind == "chat":
            choice = chat_choice(tokenizer, result)
        else:
            choice = completion_choice(tokenizer, result, before, places)
        if not request.return_record:
            del choice["record"]
        choices.append({"index": index, **choice})
    return head.body() | {"choices": choices} | counted(request)


def counted(request: TextRequest) -> dict[str, Any]:
    """Return the usage and the timings of a request's texts."""
    stats = [row.stats for row in request.rows]
    prompt, generated = sum(s.prompt_tokens for s in stats[:: request.n]), sum(s.generated_tokens for s in stats)
    accepted, rejected = sum(s.accepted for s in stats), sum(s.proposed - s.accepted for s in stats)
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    cached = sum(s.cached_tokens for s in stats[:: request.n])
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": details,
    }
    return {"usage": usage, "timings": timings(stats, prompt, cached)}


def timings(stats: list[Stats], prompt: int, cached: int) -> dict[str, Any]:
    """Return the times of a request as llama.cpp tells them; in milliseconds, from when its first text joined."""
    read, generated = prompt - cached, sum(s.generated_tokens for s in stats)
    prompt_ms = max(s.ttft_ms for s in stats)
    later = max(s.tpot_ms * max(s.generated_tokens - 1, 0) for s in stats)
    return {
        "cache_n": cached,
        "prompt_n": read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(read, 1),
        "prompt_per_second": 1e3 * read / prompt_ms if prompt_ms else 0.0,
        "predicted_n": generated,
        "predicted_ms": later,
        "predicted_per_token_ms": later / max(generated, 1),
        "predicted_per_second": 1e3 * generated / later if later else 0.0,
        "draft_n": sum(s.proposed for s in stats),
        "draft_n_accepted": sum(s.accepted for s in stats),
    }


def event(body: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Told:
    """What a stream has told of a text: it turns pieces into choices of chunks.

    A token's log-probability is told with the text that it has added to, so those of a stop string never are.
    """

    def __init__(self, tokenizer: Tokenizer, request: TextRequest, index: int, before: str) -> None:
        self._tokenizer, self._request, self._index = tokenizer, request, index
        self._row: Row = request.rows[index]
        self._begin, self._length = len(before), 0  # characters, of the repeated prompt and of the text told
        self._waiting: list[Place] = []  # their offsets count from the first token, which may be healed
        self._healed: int | None = None  # characters of the prompt that the first token spells again
        self._ids, self._text = list[int](), ""  # all so far, until that is known
        self._detokenizer: Detokenizer | None = tokenizer.detokenizer() if self._row.logprobs is not None else None
        self._offset = 0

    def first(self, before: str, places: list[Place]) -> list[dict[str, Any]]:
        """Return the choices that come before the text: its role, or the prompt if it is repeated."""
        if self._request.kind == "chat":
            return [self._choice({"delta": {"role": "assistant", "content": ""}}, None)]
        return [self._choice({"text": before}, places)] if before else []

    def more(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the choices for a piece; there are none if it has nothing to tell yet."""
        places = self._places(piece)
        found, reason = [], piece.finish_reason
        if piece.text or places:
            content = {"delta": {"content": piece.text}} if self._request.kind == "chat" else {"text": piece.text}
            found.append(self._choice(content, places))
        if reason:
            last = self._choice({"delta": {}} if self._request.kind == "chat" else {"text": ""}, None)
            last["finish_reason"] = "length" if reason == "length" else "stop"
            result = self._row.result()
            if self._request.return_record:
                last["record"] = batch_record(result, "")
            found.append(last | judged(result))
        return found

    def _places(self, piece: Piece) -> list[Place]:
        """Return the tokens whose text has now been told, with their log-probabilities."""
        self._length += len(piece.text)
        if not self._detokenizer:
            return []
        for token, logprob in zip(piece.token_ids, piece.logprobs or [], strict=True):
            self._waiting.append(Place(token, self._offset, logprob))
            self._offset += len(self._detokenizer.push(token))
        if self._healed is None:
            self._ids, self._text = self._ids + piece.token_ids, self._text + piece.text
            if self._text:
                self._healed = max(0, self._tokenizer.decode(self._ids).find(self._text))
        healed = self._healed or 0
        told = [place for place in self._waiting if place.offset - healed < self._length]
        self._waiting = self._waiting[len(told) :]
        return [replace(place, offset=self._begin + max(0, place.offset - healed)) for place in told]

    def _choice(self, content: dict[str, Any], places: list[Place] | None) -> dict[str, Any]:
        logprobs = None
        if places and self._detokenizer:
            tops = self._request.options.get("logprobs") or 0
            if self._request.kind == "chat":
                logprobs = chat_logprobs(self._tokenizer, places)
            else:
                logprobs = completion_logprobs(self._tokenizer, places, bool(tops))
        return {"index": self._index, **content, "logprobs": logprobs, "finish_reason": None}
