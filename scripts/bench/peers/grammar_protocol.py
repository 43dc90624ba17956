"""JSON lines between ``grammars.py`` and a grammar engine; the walk that is timed is the same for every engine.

The first line is a ``Vocabulary``, answered by ``{"ready": true, "versions": {...}, "load_s": x}``. Every further line
is a ``Task``, answered by ``measured`` or by ``{"error": "one sentence"}``. An empty line or the end of stdin ends it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from protocol import Refusal, own_stdout, reply, sentence

KINDS = ("construct", "mask", "apply", "check", "accept")


@dataclass(frozen=True)
class Vocabulary:
    """``file``: a tokenizer.json of byte-level BPE; ``size``: ids of the model, with those that no text has."""

    file: str
    size: int
    end: int

    def spelled(self) -> list[str]:
        """Tokens as the file spells them, "" where there is none."""
        tokens = [""] * self.size
        for token, i in json.loads(Path(self.file).read_text(encoding="utf-8"))["model"]["vocab"].items():
            tokens[i] = token
        return tokens


@dataclass(frozen=True)
class Task:
    """A grammar and texts that it describes, as token ids. ``kind``: json (a schema), lark or gbnf."""

    kind: str
    source: str
    texts: list[list[int]]
    steps: int = 1_000_000  # of each text at most


class Walk(Protocol):
    """A grammar's place in a text. ``mask``, ``apply``, ``check`` and ``accept`` are timed."""

    def prepare(self, logits: np.ndarray) -> None:
        """What every engine would have to do without a grammar, too: get the logits to where it wants them."""
        ...

    def mask(self) -> bool:
        """Which tokens may come; False if any may."""
        ...

    def apply(self) -> None: ...

    def check(self, token: int) -> bool | None:
        """Whether this one may come, without a mask; None if the engine can't say that alone."""
        ...

    def allows(self, token: int) -> bool:
        """By the mask."""
        ...

    def accept(self, token: int) -> bool: ...


Begin = Callable[[str, str], Walk]  # of a grammar's kind and source


def measured(begin: Begin, task: Task, vocabulary: Vocabulary) -> dict[str, Any]:
    """Milliseconds of every step, by ``KINDS``, and ``outside``: how many tokens of the texts the masks forbid.

    The grammar is constructed anew for each text, so nothing is known from the last one.

    Raises:
        Refusal: the grammar isn't supported, or it doesn't accept one of the texts.
    """
    clock = time.perf_counter
    logits = np.random.default_rng(0).normal(size=vocabulary.size).astype(np.float32)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    outside = 0

    def note(kind: str, began: float) -> float:
        now = clock()
        times[kind].append(round((now - began) * 1e3, 5))
        return clock()

    for text in task.texts:
        began = clock()
        walk = begin(task.kind, task.source)
        note("construct", began)
        for place, token in enumerate(text[: task.steps]):
            walk.prepare(logits)
            began = clock()
            wanted = walk.mask()
            began = note("mask", began)
            if wanted:
                walk.apply()
            began = note("apply", began)
            may = walk.check(token)
            if may is not None:
                note("check", began)
            outside += not walk.allows(token)
            began = clock()
            accepted = walk.accept(token)
            note("accept", began)
            if not accepted:
                raise Refusal(f"it refuses token {place + 1} of {len(text)} of a text that its grammar describes")
        walk.prepare(logits)
        walk.mask()
        walk.apply()
        if len(text) <= task.steps and not walk.allows(vocabulary.end):
            raise Refusal("it doesn't let a text end that its grammar describes")
    return {**{f"{kind}_ms": values for kind, values in times.items()}, "outside": outside}


def serve(load: Callable[[Vocabulary], Begin], packages: list[str], read: Callable[[Task], Task] | None = None) -> None:
    """Answer the driver until it has no more to ask.

    Args:
        load: reads the vocabulary and returns what begins a walk.
        packages: whose versions are told.
        read: brings a task into the engine's language, without being timed.
    """
    replies = own_stdout()
    try:
        began = time.perf_counter()
        vocabulary = Vocabulary(**json.loads(sys.stdin.readline()))
        begin = load(vocabulary)
        loaded = time.perf_counter() - began
        versions = {package: version(package) for package in packages}
        reply(replies, {"ready": True, "versions": versions, "load_s": round(loaded, 3)})
    except Exception as error:
        reply(replies, {"error": sentence(error)})
        return
    while line := sys.stdin.readline().strip():
        try:
            task = Task(**json.loads(line))
            answer = measured(begin, read(task) if read else task, vocabulary)
        except Exception as error:
            answer = {"error": sentence(error)}
        reply(replies, answer)
