"""Runs a file of requests, and resumes after an interruption. The work behind ``ovspec batch``."""

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
from ovspec.batch.requests import BatchRequest
from ovspec.batch.run import BatchRun, tokens_of
from ovspec.params import Params
from ovspec.params.generation import GRAMMAR_OPTIONS, SPEED_OPTIONS
from ovspec.sampling.grammar_options import convert_requested_grammar
from ovspec.setup.engine_choice import CompiledModel
from ovspec.setup.identity import describe_cache_setting, hash_model, hash_prompt_files


@dataclass
class BatchProgress:
    """Counts of requests and generated tokens.

    ``before`` counts what earlier runs completed, ``done`` what this run has, ``failed`` requests included, and
    ``done_tokens`` their tokens. ``workers`` is their number on a cluster, ``loading`` of which aren't ready yet.
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

    def add(self, line: dict[str, Any]) -> None:
        """Count an output line."""
        self.done += 1
        self.failed += line.get("error") is not None
        self.done_tokens += tokens_of(line)


class Done:
    """The results so far, in a file beside the output, so that an interrupted run needn't generate them again.

    Each result is stored under its ``key_of``. If the line, the model or an option has changed since, the result is
    generated again.
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
        self._lines = dict[str, dict[str, Any]]()
        self._open = self.file.open("a", encoding="utf-8", newline="\n")
        *lines, cut_off = self.file.read_text(encoding="utf-8", errors="replace").split("\n")
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a line that was cut off earlier
                found = json.loads(line)
                self._lines[found["key"]] = found["line"]
        if cut_off:
            self._open.write("\n")

    def __contains__(self, key: str) -> bool:
        return key in self._lines

    def keys(self) -> frozenset[str]:
        return frozenset(self._lines)

    def add(self, key: str, line: dict[str, Any]) -> None:
        self._lines[key] = line
        with name_write_errors(self.file):
            self._open.write(json.dumps({"key": key, "line": line}, ensure_ascii=False) + "\n")
            self._open.flush()

    def lines(self, keys: Iterable[str]) -> list[dict[str, Any]]:
        return [self._lines[key] for key in keys]

    def remove(self) -> None:
        """Delete the file, of which all is in the output now."""
        self._open.close()
        self.file.unlink()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take, which ``add`` has told
            self._open.close()
        with contextlib.suppress(OSError):  # Windows can't delete an open file
            Path(self._lock.lock_file).unlink()
        self._lock.release()


def key_of(request: BatchRequest, depends_on: str) -> str:
    """Return a key made from all that the result of ``request`` depends on."""
    asked = repr((request.asked.prompts, request.error))  # which a command's options may change
    text = "\0".join((depends_on, request.id, request.source, asked))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def as_text(lines: list[dict[str, Any]]) -> str:
    """Return output lines as an output file has them."""
    return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)


def run_file(
    lm: LanguageModel,
    requests: list[BatchRequest],
    output: Path,
    params: Params,
    note: Callable[[BatchProgress], None] | None = None,
) -> BatchProgress:
    """Generate a result for each of ``requests`` and write ``output``, continuing an earlier run that was interrupted.

    ``params`` apply to all requests that don't set their own; ``note`` is called after each round. If the inference
    fails, the results so far are kept, and the same call continues from them.
    """
    complete = lm.runtime.row_maker.complete_params(params)
    lm.runtime.row_maker.constraints.check_requested_grammar(complete)  # once, not for each text
    depends_on = what_matters(lm, complete)
    keys = [key_of(request, depends_on) for request in requests]
    done = Done(output)
    try:
        todo = [request for request, key in zip(requests, keys, strict=True) if key not in done]
        progress = BatchProgress(len(requests), len(requests) - len(todo))

        def add(request: BatchRequest, line: dict[str, Any]) -> None:
            done.add(key_of(request, depends_on), line)
            progress.add(line)

        for tokens in BatchRun(lm, params, todo, add).rounds():
            progress.tokens += tokens
            if note:
                note(progress)
        write_atomically(output, as_text(done.lines(keys)))
        done.remove()
    finally:
        done.close()
    return progress


def deciding(lm: LanguageModel, params: Params) -> list[CompiledModel]:
    """Return the models whose numbers decide texts: with rejection, sampled tokens depend on what was proposed, too."""
    return [lm.target, *([lm.draft] if params.accept == "rejection" and lm.draft else [])]


def what_matters(lm: LanguageModel, params: Params) -> str:
    """Return a text that identifies the model and all options that change results, not only their speed."""
    identities = [(hash_model(model.ir.folder), describe_cache_setting(model)) for model in deciding(lm, params)]
    changed = params.changed_options(excluded=(*SPEED_OPTIONS, *GRAMMAR_OPTIONS))
    texts = {name: option_as_json(name, changed[name]) for name in sorted(changed)}
    written = hash_prompt_files(lm.folder), lm.runtime.prompts.template, lm.runtime.prompts.tool_format
    return repr((identities, written, texts, convert_requested_grammar(params)[0], proposing(lm, params)))


def proposing(lm: LanguageModel, params: Params) -> Any:
    """Return what, beside the draft model, decides which tokens are proposed, where sampled ones depend on that."""
    if params.accept != "rejection":
        return None
    choice = lm.runtime.models.choice and replace(lm.runtime.models.choice, model=None)
    texts = [hashlib.sha256(corpus.tokens.tobytes()).hexdigest() for corpus in lm.runtime.models.corpora]
    return params.lookahead, str(choice), texts
