"""JSON lines between the driver and a worker, the same for every peer; run by the peer's own interpreter.

The first line sets a worker up, which answers ``{"ready": true, "versions": {...}, "load_s": x}``. Every further line
is a request, answered with tokens and times. An error is answered as ``{"error": "one sentence"}``; after a failed
set-up the worker ends. An empty line or the end of stdin also ends it.

All timing happens here: a call is timed from the token ids of its prompts to those of its texts, and the first token
counts when the peer's streamer is called.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TextIO


@dataclass(frozen=True)
class Setup:
    """What to load. ``properties`` are OpenVINO's; ``options`` depend on the worker."""

    target: str
    draft: str | None = None
    mode: str = "plain"
    properties: dict[str, str] = field(default_factory=dict)
    draft_properties: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def draft_folder(self) -> str:
        if self.draft is None:
            raise Refusal(f"the mode {self.mode} needs a draft")
        return self.draft


@dataclass(frozen=True)
class Request:
    """A request. ``k``: the lookahead; None leaves it to the peer. ``top_k``: None allows any token to be drawn."""

    prompts: list[list[int]]
    max_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 1
    k: int | None = None

    @property
    def prompt(self) -> list[int]:
        """The only prompt.

        Raises:
            Refusal: there are several prompts.
        """
        if len(self.prompts) > 1:
            raise Refusal("it has no batches here")
        return self.prompts[0]


@dataclass
class Watch:
    """A clock that notes when the first token comes."""

    began: float = field(default_factory=time.perf_counter)
    first: float | None = None

    def restart(self) -> None:
        """Start again, because everything until now was preparation."""
        self.began, self.first = time.perf_counter(), None

    def token(self) -> None:
        """Note the time of the first token; to be called for every token, or every few."""
        if self.first is None:
            self.first = time.perf_counter()


@dataclass
class Texts:
    """The generated ids of each prompt, and the conditional acceptance if the peer reports it."""

    tokens: list[list[int]]
    acceptance: float | None = None


class Refusal(Exception):
    """A sentence that says what a peer can't do."""


Generate = Callable[[Request, Watch], Texts]


def serve(load: Callable[[Setup], Generate], packages: list[str]) -> None:
    """Answer the driver until it has no more to ask.

    Args:
        load: returns the function that generates texts, or raises.
        packages: names of packages whose versions are reported.
    """

    def loaded(setup: Setup) -> Callable[[dict[str, Any]], dict[str, Any]]:
        generate = load(setup)
        return lambda asked: timed(generate, Request(**asked))

    answer_lines(loaded, packages)


def answer_lines(load: Callable[[Setup], Callable[[dict[str, Any]], dict[str, Any]]], packages: list[str]) -> None:
    """Answer each line of the driver with what the function that ``load`` returns makes of it."""
    replies = own_stdout()
    try:
        began = time.perf_counter()
        setup = Setup(**json.loads(sys.stdin.readline()))
        work = load(setup)
        loaded = time.perf_counter() - began
        versions = {package: version(package) for package in packages}
        reply(replies, {"ready": True, "versions": versions, "load_s": round(loaded, 3)})
    except Exception as error:
        reply(replies, {"error": sentence(error)})
        return
    while line := sys.stdin.readline().strip():
        try:
            answer = work(json.loads(line))
        except Exception as error:
            answer = {"error": sentence(error)}
        reply(replies, answer)


def own_stdout() -> TextIO:
    """Return the pipe to the driver. From now on, what libraries print goes to stderr."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(pipe, "w", encoding="utf-8")


def reply(replies: TextIO, answer: dict[str, Any]) -> None:
    replies.write(json.dumps(answer) + "\n")
    replies.flush()


def timed(generate: Generate, request: Request) -> dict[str, Any]:
    watch = Watch()
    texts = generate(request, watch)
    seconds = time.perf_counter() - watch.began
    lengths = [len(tokens) for tokens in texts.tokens]
    if lengths != [request.max_tokens] * len(request.prompts):
        raise Refusal(f"it should have generated {request.max_tokens} tokens per text, but generated {lengths}")
    first = watch.first - watch.began if watch.first is not None else None
    alone = first is not None and len(request.prompts) == 1 and request.max_tokens > 1
    return {
        "tokens": texts.tokens,
        "ttft_ms": [] if first is None else [first * 1e3],
        "seconds": seconds,
        "tpot_ms": (seconds - first) * 1e3 / (request.max_tokens - 1) if alone and first is not None else None,
        "acceptance": texts.acceptance,
    }


def sentence(error: Exception) -> str:
    """Return ``error`` as one line, without the C++ source locations that OpenVINO names."""
    text = " ".join(re.sub(r"Exception from \S+| at /\S+", "", str(error)).split())
    name = "" if isinstance(error, Refusal) else f"{type(error).__name__}: "
    return f"{name}{text}"[:600]
