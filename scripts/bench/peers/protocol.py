"""JSON lines between a benchmark and a worker, the same for every peer; run by the peer's own interpreter.

The first line sets a worker up, which answers ``{"ready": true, "versions": {...}, "load_s": x}``. Every further line
is a request. An error is answered as ``{"error": "one sentence"}``; after a failed set-up the worker ends. An empty
line or the end of stdin also ends it. What a request asks for depends on the worker: texts (``Setup``, ``Request``),
requests that arrive over time (``arrivals.py``) or walks through grammars (``grammar_protocol.py``).

All timing happens here: a call is timed from the token ids of its prompts to those of its texts, and a token counts
when the peer's streamer is called.
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
from typing import Any


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
    """A request. ``k``: the lookahead; None leaves it to the peer. ``top_k``: None allows any token to be drawn.

    lengths: tokens of each text; None for ``max_tokens``.
    """

    prompts: list[list[int]]
    max_tokens: int
    lengths: list[int] | None = None
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 1
    k: int | None = None

    @property
    def each_length(self) -> list[int]:
        return self.lengths or [self.max_tokens] * len(self.prompts)

    @property
    def prompt(self) -> list[int]:
        """The only prompt.

        Raises:
            Refusal: there are several prompts.
        """
        if len(self.prompts) > 1:
            raise Refusal("it has no batches here")
        return self.prompts[0]


class Watch:
    """A clock that notes when tokens come."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start again, because everything until now was preparation."""
        self.began = time.perf_counter()
        self.times: list[float] = []  # seconds until each token

    def tokens(self, count: int = 1) -> None:
        """Note that ``count`` tokens came."""
        self.times += [time.perf_counter() - self.began] * count


@dataclass
class Texts:
    """The generated ids of each prompt, and the conditional acceptance if the peer reports it."""

    tokens: list[list[int]]
    acceptance: float | None = None


class Refusal(Exception):
    """A sentence that says what a peer can't do."""


Generate = Callable[[Request, Watch], Texts]
Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve_texts(load: Callable[[Setup], Generate], packages: list[str]) -> None:
    """Answer requests for texts with the function that ``load`` returns."""

    def loaded(setup: dict[str, Any]) -> Answer:
        generate = load(Setup(**setup))
        return lambda asked: timed(generate, Request(**asked))

    serve(loaded, packages)


def serve(load: Callable[[dict[str, Any]], Answer], packages: list[str]) -> None:
    """Answer each line with what the function that ``load`` returns makes of it, until there are no more.

    Args:
        load: takes the first line, and raises if it can't be used.
        packages: names of packages whose versions are reported.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to stderr

    def reply(answer: dict[str, Any]) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    try:
        began = time.perf_counter()
        work = load(json.loads(sys.stdin.readline()))
        loaded = time.perf_counter() - began
        versions = {package: version(package) for package in packages}
        reply({"ready": True, "versions": versions, "load_s": round(loaded, 3)})
    except Exception as error:
        reply({"error": sentence(error)})
        return
    while line := sys.stdin.readline().strip():
        try:
            answer = work(json.loads(line))
        except Exception as error:
            answer = {"error": sentence(error)}
        reply(answer)


def timed(generate: Generate, request: Request) -> dict[str, Any]:
    """Return the texts and their times; ``times``: seconds until each token, for peers that stream."""
    watch = Watch()
    texts = generate(request, watch)
    seconds = time.perf_counter() - watch.began
    lengths = [len(tokens) for tokens in texts.tokens]
    if lengths != request.each_length:
        raise Refusal(f"it should have generated texts of {request.each_length} tokens, but generated {lengths}")
    first = watch.times[0] if watch.times else None
    alone = first is not None and len(request.prompts) == 1 and request.max_tokens > 1
    return {
        "tokens": texts.tokens,
        "times": watch.times,
        "ttft_ms": first and first * 1e3,
        "seconds": seconds,
        "tpot_ms": (seconds - first) * 1e3 / (request.max_tokens - 1) if alone and first is not None else None,
        "acceptance": texts.acceptance,
    }


def sentence(error: Exception) -> str:
    """Return ``error`` as one line, without the C++ source locations that OpenVINO names."""
    text = " ".join(re.sub(r"Exception from \S+| at /\S+", "", str(error)).split())
    name = "" if isinstance(error, Refusal) else f"{type(error).__name__}: "
    return f"{name}{text}"[:600]
