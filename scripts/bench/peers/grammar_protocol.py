"""What workers of ``grammars.py`` answer; the walk that is timed is the same for every engine.

The set-up is a ``Vocabulary``, each request a ``Task``, and the answer what ``measured`` returns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from protocol import Refusal


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
    """The state of a grammar within a text. ``mask``, ``apply``, ``check`` and ``accept`` are timed.

    prepare: put the logits where the engine needs them, which every engine must do without a grammar too.
    mask: compute which tokens are allowed; return whether the mask still has to be applied.
    check: return whether a token is allowed, without a mask; None if the engine can't check a single token.
    allows: return whether the applied mask allows a token.
    """

    def prepare(self, logits: np.ndarray) -> None: ...
    def mask(self) -> bool: ...
    def apply(self) -> None: ...
    def check(self, token: int) -> bool | None: ...
    def allows(self, token: int) -> bool: ...
    def accept(self, token: int) -> bool: ...


Begin = Callable[[str, str], Walk]  # takes a grammar's kind and source


class Clock:
    """Milliseconds of operations, by their names."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        self.times.setdefault(name, []).append(round((time.perf_counter() - began) * 1e3, 5))
        return result


def logits_for(size: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=size).astype(np.float32)


def measured(begin: Begin, task: Task, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the milliseconds of every step by operation, and how many tokens of the texts masks forbid.

    The grammar is constructed again for each text, so that nothing is known from the last one.

    Raises:
        Refusal: the grammar isn't supported, or it doesn't accept one of the texts.
    """
    clock, logits, outside = Clock(), logits_for(vocabulary.size), 0
    for text in task.texts:
        walk: Walk = clock.timed("construct", lambda: begin(task.kind, task.source))
        for place, token in enumerate(text[: task.steps]):
            walk.prepare(logits)
            wanted = clock.timed("mask", walk.mask)
            clock.timed("apply", walk.apply if wanted else lambda: None)
            if clock.timed("check", lambda walk=walk, token=token: walk.check(token)) is None:
                del clock.times["check"]
            outside += not walk.allows(token)
            if not clock.timed("accept", lambda walk=walk, token=token: walk.accept(token)):
                raise Refusal(f"it refuses token {place + 1} of {len(text)} of a text that its grammar allows")
        walk.prepare(logits)
        walk.mask()
        walk.apply()
        if len(text) <= task.steps and not walk.allows(vocabulary.end):
            raise Refusal("it doesn't let a text end that its grammar allows to end")
    return {"times": clock.times, "outside": outside}
