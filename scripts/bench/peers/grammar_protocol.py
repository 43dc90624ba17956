"""JSON lines between ``grammars.py`` and a grammar engine; the walk that is timed is the same for every engine.

The first line is a ``Vocabulary``, answered by ``{"ready": true, "versions": {...}, "load_s": x}``. Every further line
is a ``Task``, answered with the result of ``measured`` or with ``{"error": "one sentence"}``. An empty line or the end
of stdin ends the engine's process.
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
    """A vocabulary. ``file``: a byte-level BPE tokenizer.json; ``size``: number of ids, including unused ones."""

    file: str
    size: int
    end: int

    def spelled(self) -> list[str]:
        """Return the tokens by id, as the file spells them; "" if an id has none."""
        tokens = [""] * self.size
        for token, i in json.loads(Path(self.file).read_text(encoding="utf-8"))["model"]["vocab"].items():
            tokens[i] = token
        return tokens


@dataclass(frozen=True)
class Task:
    """A grammar and texts that it allows, as token ids. ``kind``: json (a schema), lark or gbnf."""

    kind: str
    source: str
    texts: list[list[int]]
    steps: int = 1_000_000  # maximum number of tokens per text


class Walk(Protocol):
    """The state of a grammar within a text. ``mask``, ``apply``, ``check`` and ``accept`` are timed."""

    def prepare(self, logits: np.ndarray) -> None:
        """Put the logits where the engine needs them, which every engine must do without a grammar too."""
        ...

    def mask(self) -> bool:
        """Compute which tokens are allowed; return whether the mask still has to be applied."""
        ...

    def apply(self) -> None: ...

    def check(self, token: int) -> bool | None:
        """Return whether ``token`` is allowed, without a mask; None if the engine can't check a single token."""
        ...

    def allows(self, token: int) -> bool:
        """Return whether the applied mask allows ``token``."""
        ...

    def accept(self, token: int) -> bool: ...


Begin = Callable[[str, str], Walk]  # takes a grammar's kind and source


def measured(begin: Begin, task: Task, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the milliseconds of every step, by ``KINDS``, and ``outside``: how many tokens of the texts masks forbid.

    The grammar is constructed again for each text, so that nothing is known from the last one.

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
                raise Refusal(f"it refuses token {place + 1} of {len(text)} of a text that its grammar allows")
        walk.prepare(logits)
        walk.mask()
        walk.apply()
        if len(text) <= task.steps and not walk.allows(vocabulary.end):
            raise Refusal("it doesn't let a text end that its grammar allows to end")
    return {**{f"{kind}_ms": values for kind, values in times.items()}, "outside": outside}


def serve(load: Callable[[Vocabulary], Begin], packages: list[str], read: Callable[[Task], Task] | None = None) -> None:
    """Answer the driver until it has no more to ask.

    Args:
        load: reads the vocabulary and returns the function that begins a walk.
        packages: names of packages whose versions are reported.
        read: converts a task to the engine's grammar language; it is not timed.
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
