"""JSON lines between the driver and a worker, the same for every peer; run by the peer's own interpreter.

The first line sets a worker up, and it answers ``{"ready": true, "versions": {...}, "load_s": x}``. Every further line
is a request, answered by tokens and times. What goes wrong is answered as ``{"error": "one sentence"}``; after a failed
set-up the worker ends. An empty line or the end of stdin ends it, too.

All clocks are in here: a call is timed from the token ids of its prompts to those of its texts, and the first token is
there when the peer's streamer is called.
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
    """What to load. ``properties`` are OpenVINO's; ``options`` are those of one worker."""

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
    """``k``: tokens proposed each round; None leaves that to the peer. ``top_k`` None: any token may be drawn."""

    prompts: list[list[int]]
    max_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 1
    k: int | None = None

    @property
    def prompt(self) -> list[int]:
        """The only one.

        Raises:
            Refusal: there are several.
        """
        if len(self.prompts) > 1:
            raise Refusal("it has no batches here")
        return self.prompts[0]


@dataclass
class Watch:
    """When the first token came."""

    began: float = field(default_factory=time.perf_counter)
    first: float | None = None

    def restart(self) -> None:
        """What was done until now was preparing."""
        self.began, self.first = time.perf_counter(), None

    def token(self) -> None:
        """To be called with every token, or every few."""
        if self.first is None:
            self.first = time.perf_counter()


@dataclass
class Texts:
    """Generated ids of each prompt, and the share of compared proposals that was accepted, where the peer says it."""

    tokens: list[list[int]]
    acceptance: float | None = None


class Refusal(Exception):
    """What a peer can't do, in a sentence."""


Generate = Callable[[Request, Watch], Texts]


def serve(load: Callable[[Setup], Generate], packages: list[str]) -> None:
    """Answer the driver until it has no more to ask.

    Args:
        load: makes what generates texts, or raises.
        packages: whose versions are told.
    """
    replies = own_stdout()
    try:
        began = time.perf_counter()
        setup = Setup(**json.loads(sys.stdin.readline()))
        generate = load(setup)
        loaded = time.perf_counter() - began
        versions = {package: version(package) for package in packages}
        reply(replies, {"ready": True, "versions": versions, "load_s": round(loaded, 3)})
    except Exception as error:
        reply(replies, {"error": sentence(error)})
        return
    while line := sys.stdin.readline().strip():
        try:
            answer = timed(generate, Request(**json.loads(line)))
        except Exception as error:
            answer = {"error": sentence(error)}
        reply(replies, answer)


def own_stdout() -> TextIO:
    """The pipe to the driver. What libraries print goes to stderr from now on."""
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
        raise Refusal(f"it was asked for {request.max_tokens} tokens of each text and gave {lengths}")
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
    """``error`` in one line, without the places in C++ that OpenVINO names."""
    text = " ".join(re.sub(r"Exception from \S+| at /\S+", "", str(error)).split())
    name = "" if isinstance(error, Refusal) else f"{type(error).__name__}: "
    return f"{name}{text}"[:600]
