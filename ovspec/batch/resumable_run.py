"""Runs a file of requests, and resumes after an interruption; ``ovspec batch`` calls it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ovspec.api.model import LanguageModel
from ovspec.api.verify import option_as_json
from ovspec.base.files import write_atomically
from ovspec.base.json_types import JsonObject
from ovspec.batch.partial_results import PartialResults, lines_to_text, result_fingerprint
from ovspec.batch.requests import BatchRequest
from ovspec.batch.run import BatchRun, count_generated_tokens
from ovspec.params import Params
from ovspec.params.generation import GRAMMAR_OPTIONS, SPEED_OPTIONS
from ovspec.sampling.grammar_options import convert_requested_grammar
from ovspec.setup.engine_choice import CompiledModel
from ovspec.setup.identity import describe_cache_setting, hash_model_and_tokenizer, hash_prompt_files


@dataclass
class BatchProgress:
    """Counts of requests and generated tokens.

    ``done_before`` counts the requests completed by earlier runs; ``done`` counts this run's, including ``failed``, and
    ``done_tokens`` their tokens. On a cluster, ``loading_workers`` of its ``worker_count`` aren't ready yet.
    """

    total: int
    done_before: int
    done: int = 0
    failed: int = 0
    generated_tokens: int = 0
    done_tokens: int = 0
    worker_count: int = 0
    loading_workers: int = 0

    @property
    def requests_left(self) -> int:
        return self.total - self.done_before - self.done

    def count_output_line(self, line: JsonObject) -> None:
        """Count an output line."""
        self.done += 1
        self.failed += line.get("error") is not None
        self.done_tokens += count_generated_tokens(line)


def run_file(
    lm: LanguageModel,
    requests: list[BatchRequest],
    output: Path,
    params: Params,
    report_progress: Callable[[BatchProgress], None] | None = None,
) -> BatchProgress:
    """Generate a result for each of ``requests`` and write ``output``, continuing an interrupted earlier run.

    ``params`` apply to requests without their own; ``report_progress`` is called after each round. If the inference
    fails, the results so far are kept, and the same call continues from them.
    """
    complete_params = lm.runtime.row_maker.complete_params(params)
    lm.runtime.row_maker.constraint_maker.check_requested_grammar(complete_params)  # once, not for each text
    run_identity = make_run_identity(lm, complete_params)
    result_keys = [result_fingerprint(request, run_identity) for request in requests]
    partial_results = PartialResults(output)
    try:
        unfinished_requests = [
            request for request, key in zip(requests, result_keys, strict=True) if key not in partial_results
        ]
        progress = BatchProgress(len(requests), len(requests) - len(unfinished_requests))

        def store_and_count(request: BatchRequest, line: JsonObject) -> None:
            partial_results.store_line(result_fingerprint(request, run_identity), line)
            progress.count_output_line(line)

        for tokens in BatchRun(lm, params, unfinished_requests, store_and_count).run_rounds():
            progress.generated_tokens += tokens
            if report_progress:
                report_progress(progress)
        write_atomically(output, lines_to_text(partial_results.select_lines(result_keys)))
        partial_results.delete_file()
    finally:
        partial_results.close()
    return progress


def list_text_deciding_models(lm: LanguageModel, params: Params) -> list[CompiledModel]:
    """Return the models with an effect on texts: with rejection sampling, also those behind proposals."""
    draft_layers = lm.draft.list_layers() if params.accept == "rejection" and lm.draft else []
    return [lm.target, *draft_layers]


def make_run_identity(lm: LanguageModel, params: Params) -> str:
    """Return a text to identify the model and all options with an effect on results, not only on speed."""
    identities = [
        (hash_model_and_tokenizer(model.ir.folder), describe_cache_setting(model))
        for model in list_text_deciding_models(lm, params)
    ]
    changed_options = params.changed_options(excluded=(*SPEED_OPTIONS, *GRAMMAR_OPTIONS))
    options = {name: option_as_json(name, changed_options[name]) for name in sorted(changed_options)}
    prompt_identity = (
        hash_prompt_files(lm.folder),
        lm.runtime.prompt_encoder.custom_template,
        lm.runtime.prompt_encoder.tool_format,
    )
    return repr(
        (
            identities,
            prompt_identity,
            options,
            convert_requested_grammar(params)[0],
            collect_proposal_settings(lm, params),
        )
    )


def collect_proposal_settings(lm: LanguageModel, params: Params) -> tuple[Any, ...] | None:
    """Return the settings with an effect on proposals (without the draft model); None if no token depends on them."""
    if params.accept != "rejection":
        return None
    draft_choice = lm.runtime.models.draft_choice
    if draft_choice:
        draft_choice = replace(draft_choice, model=None)
    corpora = [hashlib.sha256(corpus.indexed_tokens.tobytes()).hexdigest() for corpus in lm.runtime.models.corpora]
    return params.lookahead, str(draft_choice), corpora
