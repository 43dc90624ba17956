"""JSON lines between a benchmark and a worker, the same for every peer; run by the peer's own interpreter.

The first line is the set-up, with the kind of requests to follow as ``task``; the worker has a loader for each task:

- "texts": a ``Request`` for texts is answered with their ids and times. The set-up is a ``Setup``.
- "loads": a ``Load``, requests of several clients, is answered with their timelines. The same set-up.
- "widths": an ``Inference``, forward passes over several tokens, is answered with their times. The same set-up.
- "grammars": a ``GrammarTask``, a walk through a grammar, is answered with its times. The set-up is a ``Vocabulary``.

The worker answers the set-up with ``{"ready": true, "versions": {...}, "load_s": x}``. An error is answered as
``{"error": "one sentence"}``; after a failed set-up the worker ends. An empty line or the end of stdin also ends it.

All timing happens here: a call is timed from the token ids of its prompts to the token ids of its texts; a token's time
is the call of the peer's streamer.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class Refusal(Exception):
    """A sentence about something a peer can't do."""


Answer = Callable[[dict[str, Any]], dict[str, Any]]  # request -> answer


def serve(packages: list[str], **loaders: Any) -> None:
    """Answer the requests on stdin until there are no more.

    Args:
        packages: names of packages, to report their versions.
        loaders: the worker's functions from set-up to answers, by task: a ``LoadGenerate``, ``LoadRunner``,
            ``LoadInfer`` or ``LoadGrammars``; each raises for an unusable set-up.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(2, 1)  # output of libraries goes to stderr

    def reply(answer: dict[str, Any]) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    try:
        began = time.perf_counter()
        setup = json.loads(sys.stdin.readline())
        task = setup.pop("task", "texts")
        if task not in loaders:
            raise Refusal(f"it has no {task}")
        answer = ANSWERS[task](loaders[task], setup)
        seconds = time.perf_counter() - began
        versions = {package: version(package) for package in packages}
        reply({"ready": True, "versions": versions, "load_s": round(seconds, 3)})
    except Exception as error:
        reply({"error": sentence(error)})
        return
    while line := sys.stdin.readline().strip():
        try:
            reply(answer(json.loads(line)))
        except Exception as error:
            reply({"error": sentence(error)})


def sentence(error: Exception) -> str:
    """Return ``error`` as a single line, without OpenVINO's C++ source locations."""
    text = " ".join(re.sub(r"Exception from \S+| at /\S+", "", str(error)).split())
    name = "" if isinstance(error, Refusal) else f"{type(error).__name__}: "
    return f"{name}{text}"[:600]


@dataclass(frozen=True)
class Setup:
    """The model to load. ``properties`` are OpenVINO's; ``options`` depend on the worker."""

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


# ---------------------------------------------------------------- texts


@dataclass(frozen=True)
class Request:
    """A request. ``k``: the lookahead; None for the peer's choice. ``top_k``: None for all tokens.

    lengths: number of tokens of each text; None for ``max_tokens``.
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
    """A stopwatch for tokens."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start again, after preparations."""
        self.began = time.perf_counter()
        self.times: list[float] = []  # seconds until each token

    def tokens(self, count: int = 1) -> None:
        """Note the arrival of ``count`` tokens."""
        self.times += [time.perf_counter() - self.began] * count


TokenLists = list[list[int]]  # the generated ids of each prompt
Generate = Callable[[Request, Watch], TokenLists]
LoadGenerate = Callable[[Setup], Generate]


def answer_texts(load: LoadGenerate, setup: dict[str, Any]) -> Answer:
    generate = load(Setup(**setup))
    return lambda request: timed_texts(generate, Request(**request))


def timed_texts(generate: Generate, request: Request) -> dict[str, Any]:
    """Return the texts and their times; ``times``: seconds until each token, for streaming peers."""
    watch = Watch()
    tokens = generate(request, watch)
    seconds = time.perf_counter() - watch.began
    lengths = [len(ids) for ids in tokens]
    if lengths != request.each_length:
        raise Refusal(f"it should have generated texts of {request.each_length} tokens, but generated {lengths}")
    answer: dict[str, Any] = {"tokens": tokens, "times": watch.times, "seconds": seconds}
    answer |= {"ttft_ms": None, "tpot_ms": None}
    if watch.times:
        answer["ttft_ms"] = watch.times[0] * 1e3
        if len(request.prompts) == 1 and request.max_tokens > 1:
            answer["tpot_ms"] = (seconds - watch.times[0]) * 1e3 / (request.max_tokens - 1)
    return answer


# ---------------------------------------------------------------- loads


@dataclass
class Timeline:
    """The times of a request and of the pieces of its text, in seconds since the load began.

    A piece has the tokens of a forward pass.
    """

    sent: float
    pieces: list[float] = field(default_factory=list)


@dataclass
class Load:
    """Requests for greedy texts without EOS. Each client sends its next request after the answer to its last.

    Args:
        prompts: token ids of each request, in order.
        tokens: number of tokens of each request.
    """

    prompts: list[list[int]]
    tokens: list[int]
    clients: int = 1

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin now."""
        self.began = time.perf_counter()
        self._next = self._running = 0

    @property
    def now(self) -> float:
        return time.perf_counter() - self.began

    @property
    def sent_all(self) -> bool:
        return self._next == len(self.prompts)

    def due(self) -> list[int]:
        """Return the numbers of the requests to send now."""
        count = min(self.clients - self._running, len(self.prompts) - self._next)
        self._next += count
        self._running += count
        return list(range(self._next - count, self._next))

    def answered(self) -> None:
        """Note the answer to a request."""
        self._running -= 1


RunLoad = Callable[[Load], list[Timeline]]
LoadRunner = Callable[[Setup], RunLoad]


def answer_loads(load: LoadRunner, setup: dict[str, Any]) -> Answer:
    run = load(Setup(**setup))
    return lambda request: {"timelines": [asdict(timeline) for timeline in run(Load(**request))]}


# ---------------------------------------------------------------- widths


@dataclass(frozen=True)
class Inference:
    """A forward pass over all ``ids`` after the first ``context``; logits go to the .npy file ``logits``."""

    ids: list[int]
    context: int
    repeats: int = 1
    logits: str | None = None


Infer = Callable[[Inference], list[float]]  # returns milliseconds, ``repeats`` of them
LoadInfer = Callable[[Setup], Infer]


def answer_widths(load: LoadInfer, setup: dict[str, Any]) -> Answer:
    infer = load(Setup(**setup))
    return lambda request: {"ms": infer(Inference(**request))}


# ---------------------------------------------------------------- grammars


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary. ``file``: a byte-level BPE tokenizer.json; ``size``: number of ids, including unused ids."""

    file: str
    size: int
    end: int

    def spelled(self) -> list[str]:
        """Return the tokens by id, as spelled in the file; "" for an id without a token."""
        tokens = [""] * self.size
        for token, i in json.loads(Path(self.file).read_text(encoding="utf-8"))["model"]["vocab"].items():
            tokens[i] = token
        return tokens


@dataclass(frozen=True)
class GrammarTask:
    """A grammar and allowed texts, as token ids. ``kind``: json (a schema), lark or gbnf."""

    kind: str
    source: str
    texts: list[list[int]]
    steps: int = 1_000_000  # maximum number of tokens per text


class Walk(Protocol):
    """The state of a grammar within a text. ``mask``, ``apply``, ``check`` and ``accept`` are timed.

    prepare: put the logits in place for the engine, as needed without a grammar, too.
    mask: compute the mask of allowed tokens; return whether it still has to be applied.
    check: return whether a token is allowed, without a mask; None if the engine can't check a single token.
    allows: return whether the applied mask allows a token.
    """

    def prepare(self, logits: np.ndarray) -> None: ...
    def mask(self) -> bool: ...
    def apply(self) -> None: ...
    def check(self, token: int) -> bool | None: ...
    def allows(self, token: int) -> bool: ...
    def accept(self, token: int) -> bool: ...


# (kind, source) of a grammar -> the function to construct it, to be timed.
Grammars = Callable[[str, str], Callable[[], Walk]]
LoadGrammars = Callable[[Vocabulary], Grammars]


def answer_grammars(load: LoadGrammars, setup: dict[str, Any]) -> Answer:
    vocabulary = Vocabulary(**setup)
    grammars = load(vocabulary)
    return lambda request: timed_walks(grammars, GrammarTask(**request), vocabulary)


def timed_walks(grammars: Grammars, task: GrammarTask, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the milliseconds of every step by operation, and the number of tokens wrongly forbidden by masks.

    The grammar is constructed again for each text, so no engine profits from the text before.

    Raises:
        Refusal: the grammar isn't supported, or doesn't accept a text.
    """
    times: dict[str, list[float]] = defaultdict(list)
    outside = 0

    def timed(operation: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        outcome = work()
        times[operation].append(round((time.perf_counter() - began) * 1e3, 5))
        return outcome

    logits = np.random.default_rng(0).normal(size=vocabulary.size).astype(np.float32)
    construct = grammars(task.kind, task.source)
    for text in task.texts:
        walk: Walk = timed("construct", construct)
        for place, token in enumerate(text[: task.steps]):
            walk.prepare(logits)
            applies = timed("mask", walk.mask)
            timed("apply", walk.apply if applies else lambda: None)
            if timed("check", lambda walk=walk, token=token: walk.check(token)) is None:
                del times["check"]
            outside += not walk.allows(token)
            if not timed("accept", lambda walk=walk, token=token: walk.accept(token)):
                raise Refusal(f"it refuses token {place + 1} of {len(text)} of a text that its grammar allows")
        walk.prepare(logits)
        walk.mask()
        walk.apply()
        if len(text) <= task.steps and not walk.allows(vocabulary.end):
            raise Refusal("it doesn't let a text end that its grammar allows to end")
    return {"times": times, "outside": outside}


ANSWERS: dict[str, Any] = {"texts": answer_texts, "loads": answer_loads}
ANSWERS |= {"widths": answer_widths, "grammars": answer_grammars}
