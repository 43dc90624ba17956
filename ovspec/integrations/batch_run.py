"""Generates a result for each request of a batch file, and goes on after a kill. The work behind ``ovspec batch``."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ovspec.constraints.maker import grammar_of
from ovspec.errors import OvspecError
from ovspec.files import write_atomically
from ovspec.integrations.openai_batch import BatchRequest, result_line
from ovspec.ir.compile import MODEL_FILE
from ovspec.loop.row import Row
from ovspec.model import LanguageModel
from ovspec.options import GRAMMARS, GenerateOptions, params_of


@dataclass
class BatchProgress:
    """Requests and generated tokens; ``before``: requests that an earlier run has done."""

    total: int
    before: int
    done: int = 0
    failed: int = 0
    tokens: int = 0

    @property
    def left(self) -> int:
        return self.total - self.before - self.done


class Done:
    """Results so far, in a file beside the output: after a kill they needn't be generated again.

    Each is kept under a key of all that it depends on, so that a line, a model or an option that has changed
    meanwhile is done anew.
    """

    def __init__(self, output: Path, depends_on: str) -> None:
        self.file = output.with_name(output.name + ".partial")
        self._depends_on = depends_on
        self._lines = dict(read_entries(self.file))
        if self._lines:  # without what a kill has cut off
            write_atomically(self.file, "".join(entry(key, line) for key, line in self._lines.items()))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._open = self.file.open("a", encoding="utf-8", newline="\n")

    def key(self, request: BatchRequest) -> str:
        text = "\0".join((self._depends_on, request.id, request.source))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]

    def has(self, request: BatchRequest) -> bool:
        return self.key(request) in self._lines

    def add(self, request: BatchRequest, line: dict[str, Any]) -> None:
        self._lines[key := self.key(request)] = line
        self._open.write(entry(key, line))
        self._open.flush()

    def finish(self, output: Path, requests: list[BatchRequest]) -> None:
        """Write the output, whole or not at all, in the order of the requests."""
        self.close()
        lines = [json.dumps(self._lines[self.key(request)], ensure_ascii=False) for request in requests]
        write_atomically(output, "".join(f"{line}\n" for line in lines))
        self.file.unlink()

    def close(self) -> None:
        self._open.close()


def read_entries(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n") if file.is_file() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # cut off
            found = json.loads(line)
            yield found["key"], found["line"]


def entry(key: str, line: dict[str, Any]) -> str:
    return json.dumps({"key": key, "line": line}, ensure_ascii=False) + "\n"


def run_file(
    lm: LanguageModel,
    requests: list[BatchRequest],
    output: Path,
    options: GenerateOptions,
    note: Callable[[BatchProgress], None] | None = None,
) -> BatchProgress:
    """Generate what ``requests`` ask for and write ``output``; goes on where an earlier run was interrupted.

    ``options`` are for all requests that don't say otherwise; ``note`` is called after each round. Where the inference
    fails, what is done is kept, as after a kill, for the same call to go on with.
    """
    lm.workspace.check_grammar(options)
    done = Done(output, what_matters(lm, options))
    todo = [request for request in requests if not done.has(request)]
    progress = BatchProgress(len(requests), len(requests) - len(todo))
    started: dict[int, tuple[BatchRequest, list[Row]]] = {}  # by the number of a row, what it belongs to
    numbers = itertools.count()

    def rows() -> Iterator[Row]:
        for request in todo:
            try:
                made = rows_of(lm, request, options)
            except OvspecError as error:
                done.add(request, result_line(request, str(error)))
                progress.done, progress.failed = progress.done + 1, progress.failed + 1
                continue
            for row in made:
                started[next(numbers)] = request, made
                yield row

    try:
        for pieces in lm.workspace.run(rows(), options, sampled=bool(options.get("temperature"))):
            for number, piece in pieces:
                progress.tokens += len(piece.token_ids)
                if piece.finish_reason in (None, "cancelled"):
                    continue
                request, siblings = started.pop(number)
                if all(row.finish_reason for row in siblings) and not done.has(request):
                    done.add(request, result_line(request, [row.result() for row in siblings]))
                    progress.done += 1
            if note:
                note(progress)
        done.finish(output, requests)
    finally:
        done.close()
    return progress


def what_matters(lm: LanguageModel, options: GenerateOptions) -> str:
    """The model, and the options that results depend on: not what only makes them come faster."""
    weights = (lm.folder / MODEL_FILE).with_suffix(".bin").stat().st_size
    faster = ("batch_size",) if options.get("accept") == "rejection" else ("batch_size", "lookahead")
    texts = {name: options[name] for name in sorted(options) if name not in (*faster, *GRAMMARS)}
    return f"{lm.folder.resolve()} {weights} {texts} {grammar_of(options)[0]}"


def rows_of(lm: LanguageModel, request: BatchRequest, options: GenerateOptions) -> list[Row]:
    """A row for each text that is asked for; raises OvspecError where that can't be had."""
    if request.error:
        raise OvspecError(request.error)
    own = any(name in request.options for name in GRAMMARS)
    ours = {name: value for name, value in options.items() if not (own and name in (*GRAMMARS, "constrain_from"))}
    merged = cast(GenerateOptions, {**ours, **request.options})
    return lm.workspace.rows(request.prompt, merged, params_of(merged).n)
