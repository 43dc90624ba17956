"""The gain of a new head or draft: plain decoding, the old draft and the new draft in turns, on held-out texts."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

from ovspec.base.json_types import JsonObject
from ovspec_export.distill.documents import read_documents

MAX_PROMPTS = 8
MAX_GENERATED_TOKENS = 96
MIN_PROMPTS, MIN_GENERATED_TOKENS = 2, 32  # texts, and tokens of each, if time is short
PLAIN_PROMPT_TOKENS = 64  # tokens of a plain text used as a prompt
OLD_DRAFT_MODE = "old draft"


def measure_gain(
    model: str, new_draft: str, old_draft: str, documents_file: str, output: str, seconds: float = math.inf
) -> None:
    """Time the model with ``new_draft`` and ``old_draft`` ("" for none), in about so many ``seconds``; a job.

    Args:
        model, new_draft, old_draft: exported folders.
        documents_file: the documents, for their held-out part.
        output: the file for the rows, as in ``ovspec bench --json``; the new draft's is last.
    """
    import ovspec
    from ovspec.api.timing import default_prompts, summarize_mode, time_modes

    began = time.monotonic()
    prompts = read_held_out_prompts(Path(documents_file)) or default_prompts()
    lm = ovspec.load(model, new_draft, cache_memory=0)
    models = {"plain": lm.with_drafters(None)}
    if old_draft:
        models[OLD_DRAFT_MODE] = ovspec.load(model, old_draft, cache_memory=0)
    assert lm.draft
    models[lm.draft.proposer_name] = lm
    generation_options: JsonObject = {"lookahead": "auto", "temperature": 0.0, "ignore_eos": True}
    first_stats = lm.generate(prompts[0], max_tokens=MIN_GENERATED_TOKENS, lookahead=0, ignore_eos=True).stats
    seconds_left = seconds - (time.monotonic() - began)
    affordable_tokens = seconds_left / (1e-3 * first_stats.tpot_ms * len(models)) - MIN_GENERATED_TOKENS  # a warm-up
    prompts = prompts[: int(min(max(affordable_tokens / MIN_GENERATED_TOKENS, MIN_PROMPTS), MAX_PROMPTS))]
    generation_options["max_tokens"] = int(
        min(max(affordable_tokens / len(prompts), MIN_GENERATED_TOKENS), MAX_GENERATED_TOKENS)
    )
    results = time_modes(models, prompts, generation_options, repeats=1)
    rows = [summarize_mode(mode, "auto", timing, results["plain"]) for mode, timing in results.items()]
    Path(output).write_text(json.dumps({"rows": rows}), encoding="utf-8", newline="\n")


def read_held_out_prompts(documents_file: Path, max_prompts: int = MAX_PROMPTS, source: str = "") -> list[list[int]]:
    """Return the beginnings of ``max_prompts`` held-out texts, spread over all of them: each up to its answer.

    source: of the documents; by default any.
    """
    prompts = [
        document.ids[: document.answer or min(PLAIN_PROMPT_TOKENS, len(document.ids) // 2)]
        for document in read_documents(documents_file)
        if document.held_out and source in ("", document.source)
    ]
    prompts = [prompt for prompt in prompts if prompt]
    prompt_count = min(max_prompts, len(prompts))
    return [prompts[i * len(prompts) // prompt_count] for i in range(prompt_count)]


def is_new_draft_fastest(rows: list[JsonObject]) -> bool:
    """Return whether the new draft is faster than plain decoding and than the old draft."""
    *other_speedups, new_speedup = (row["speedup"] or 0.0 for row in rows)
    return new_speedup > max(other_speedups)


def describe_missing_gain(result_name: str, rows: list[JsonObject]) -> str:
    """Return the sentence to report a result without a gain."""
    new_row = rows[-1]
    old_row = next((row for row in rows if row["mode"] == OLD_DRAFT_MODE), None)
    speed_text = "no speed-up"
    if new_row["speedup"]:
        speed_text = f"{new_row['speedup']:.2f} of plain speed"
    if old_row and old_row["speedup"]:
        speed_text += f", with the old draft {old_row['speedup']:.2f}"
    advice = "more minutes, or texts like those that you generate, may help"
    return f"{result_name}: nothing was gained ({speed_text}); {advice}"
