"""Runs a file of requests, and resumes after an interruption; ``ovspec batch`` calls it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ovspec.api.model import LanguageModel
from ovspec.api.verify import option_as_json
from ovspec.base.errors import OvspecError
from ovspec.base.files import check_file_name, name_write_errors, write_atomically
from ovspec.base.json_types import JsonObject
from ovspec.batch.requests import BatchRequest
from ovspec.batch.run import BatchRun, count_generated_tokens
from ovspec.params import Params
from ovspec.params.generation import GRAMMAR_OPTIONS, SPEED_OPTIONS
from ovspec.sampling.grammar_options import convert_requested_grammar
from ovspec.setup.engine_choice import CompiledModel
from ovspec.setup.identity import describe_cache_setting, hash_model, hash_prompt_files


@dataclass
class BatchProgress:
    """Counts of requests and generated tokens.

    ``before`` counts the requests that earlier runs completed; ``done`` counts this run's, with the ``failed`` ones,
    and ``done_tokens`` their tokens. On a cluster, ``loading`` of its ``workers`` aren't ready yet.
    """

    total: int
    before: int
    done: int = 0
    failed: int = 0
    tokens: int = 0
    done_tokens: int = 0
    workers: int = 0
    loading: int = 0

    @property
    def left(self) -> int:
        return self.total - self.before - self.done

    def count_line(self, line: JsonObject) -> None:
        """Count an output line."""
        self.done += 1
        self.failed += line.get("error") is not None
        self.done_tokens += count_generated_tokens(line)


class PartialResults:
    """The results so far, in a file next to the output, so that an interrupted run needn't generate them again.

    Each result is stored under its ``result_key``. If the line, the model or an option has changed since, the result
    is generated again.
    """

    def __init__(self, output: Path) -> None:
        check_file_name(output)
        self.file = output.with_name(output.name + ".partial")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(output.with_name(f".{output.name}.lock"))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise OvspecError(f"{output}: another batch is writing it; wait for it, or name another output.") from None
        self._lines = dict[str, JsonObject]()
        self._stream = self.file.open("a", encoding="utf-8", newline="\n")
        *lines, cut_off = self.file.read_text(encoding="utf-8", errors="replace").split("\n")
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a line that was cut off earlier
                entry = json.loads(line)
                self._lines[entry["key"]] = entry["line"]
        if cut_off:
            self._stream.write("\n")

    def __contains__(self, key: str) -> bool:
        return key in self._lines

    def keys(self) -> frozenset[str]:
        return frozenset(self._lines)

    def store_line(self, key: str, line: JsonObject) -> None:
        self._lines[key] = line
        with name_write_errors(self.file):
            self._stream.write(json.dumps({"key": key, "line": line}, ensure_ascii=False) + "\n")
            self._stream.flush()

    def lines(self, keys: Iterable[str]) -> list[JsonObject]:
        return [self._lines[key] for key in keys]

    def delete_file(self) -> None:
        """Delete the file, whose results are all in the output now."""
        self._stream.close()
        self.file.unlink()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, which ``store_line`` has reported
            self._stream.close()
        with contextlib.suppress(OSError):  # Windows can't delete an open file
            Path(self._lock.lock_file).unlink()
        self._lock.release()


def result_key(request: BatchRequest, dependencies: str) -> str:
    """Return a key made from everything that the result of ``request`` depends on."""
    prompts = repr((request.text_request.prompts, request.error))  # which a command's options may change
    text = "\0".join((dependencies, request.id, request.source, prompts))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def lines_to_text(lines: list[JsonObject]) -> str:
    """Return output lines as the text of an output file."""
    return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)


def run_file(
    lm: LanguageModel,
    requests: list[BatchRequest],
    output: Path,
    params: Params,
    report: Callable[[BatchProgress], None] | None = None,
) -> BatchProgress:
    """Generate a result for each of ``requests`` and write ``output``, continuing an earlier run that was interrupted.

    ``params`` apply to all requests that don't set their own; ``report`` is called after each round. If the inference
    fails, the results so far are kept, and the same call continues from them.
    """
    complete_params = lm.runtime.row_maker.complete_params(params)
    lm.runtime.row_maker.constraints.check_requested_grammar(complete_params)  # once, not for each text
    dependencies = result_dependencies(lm, complete_params)
    keys = [result_key(request, dependencies) for request in requests]
    partial = PartialResults(output)
    try:
        unfinished = [request for request, key in zip(requests, keys, strict=True) if key not in partial]
        progress = BatchProgress(len(requests), len(requests) - len(unfinished))

        def store_and_count(request: BatchRequest, line: JsonObject) -> None:
            partial.store_line(result_key(request, dependencies), line)
            progress.count_line(line)

        for tokens in BatchRun(lm, params, unfinished, store_and_count).run_rounds():
            progress.tokens += tokens
            if report:
                report(progress)
        write_atomically(output, lines_to_text(partial.lines(keys)))
        partial.delete_file()
    finally:
        partial.close()
    return progress


def deciding_models(lm: LanguageModel, params: Params) -> list[CompiledModel]:
    """Return the models whose numbers decide texts: with rejection, sampled tokens depend on the proposals, too."""
    draft = [lm.draft] if params.accept == "rejection" and lm.draft else []
    return [lm.target, *draft]


def result_dependencies(lm: LanguageModel, params: Params) -> str:
    """Return a text that identifies the model and all options that change results, not only their speed."""
    identities = [(hash_model(model.ir.folder), describe_cache_setting(model)) for model in deciding_models(lm, params)]
    changed = params.changed_options(excluded=(*SPEED_OPTIONS, *GRAMMAR_OPTIONS))
    options = {name: option_as_json(name, changed[name]) for name in sorted(changed)}
    prompts = hash_prompt_files(lm.folder), lm.runtime.prompts.template, lm.runtime.prompts.tool_format
    return repr((identities, prompts, options, convert_requested_grammar(params)[0], proposal_dependencies(lm, params)))


def proposal_dependencies(lm: LanguageModel, params: Params) -> tuple[Any, ...] | None:
    """Return the settings that decide the proposals, except for the draft model, if sampled tokens depend on them."""
    if params.accept != "rejection":
        return None
    choice = lm.runtime.models.choice
    if choice:
        choice = replace(choice, model=None)
    corpora = [hashlib.sha256(corpus.indexed_tokens.tobytes()).hexdigest() for corpus in lm.runtime.models.corpora]
    return params.lookahead, str(choice), corpora
