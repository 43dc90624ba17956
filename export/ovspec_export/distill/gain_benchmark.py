"""What a new head or draft brings: plain decoding, the old draft and the new one in turns, on texts held out."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

from ovspec.base.json_types import JsonObject
from ovspec_export.distill.documents import read_documents

MAX_PROMPTS = 8
MAX_PROMPT_TOKENS = 96
MIN_PROMPTS, MIN_GENERATED_TOKENS = 2, 32  # texts and tokens of each, where there is little time
PLAIN_PROMPT_TOKENS = 64  # tokens of a plain text that are a prompt
OLD_DRAFT_MODE = "old draft"


def measure_gain(model: str, new: str, old: str, documents: str, output: str, seconds: float = math.inf) -> None:
    """Time the model with the drafts ``new`` and ``old`` ("" for none), in about so many ``seconds``; a job.

    Args:
        model, new, old: exported folders.
        documents: the documents, of which those that are held out are used.
        output: the file for the rows, as ``ovspec bench --json`` prints them; the new draft's is the last one.
    """
    import ovspec
    from ovspec.api.timing import default_prompts, summarize_mode, time_modes
    from ovspec.ir.heads import is_head_folder

    began = time.monotonic()
    prompts = read_held_out_prompts(Path(documents)) or default_prompts()
    lm = ovspec.load(model, new, cache_memory=0)
    models = {"plain": lm.with_drafters(None)}
    if old:
        models[OLD_DRAFT_MODE] = ovspec.load(model, old, cache_memory=0)
    models["head" if is_head_folder(Path(new)) else "draft"] = lm
    options: JsonObject = {"lookahead": "auto", "temperature": 0.0, "ignore_eos": True}
    first = lm.generate(prompts[0], max_tokens=MIN_GENERATED_TOKENS, lookahead=0, ignore_eos=True).stats
    seconds_left = seconds - (time.monotonic() - began)
    tokens = seconds_left / (1e-3 * first.tpot_ms * len(models)) - MIN_GENERATED_TOKENS  # a warm-up
    prompts = prompts[: int(min(max(tokens / MIN_GENERATED_TOKENS, MIN_PROMPTS), MAX_PROMPTS))]
    options["max_tokens"] = int(min(max(tokens / len(prompts), MIN_GENERATED_TOKENS), MAX_PROMPT_TOKENS))
    results = time_modes(models, prompts, options, repeats=1)
    rows = [summarize_mode(mode, "auto", timing, results["plain"]) for mode, timing in results.items()]
    Path(output).write_text(json.dumps({"rows": rows}), encoding="utf-8", newline="\n")


def read_held_out_prompts(documents: Path, most: int = MAX_PROMPTS, source: str = "") -> list[list[int]]:
    """Return the beginnings of ``most`` texts that are held out, spread over all of them: each up to its answer.

    source: of the documents; by default any.
    """
    prompts = [
        document.ids[: document.answer or min(PLAIN_PROMPT_TOKENS, len(document.ids) // 2)]
        for document in read_documents(documents)
        if document.held_out and source in ("", document.source)
    ]
    prompts = [prompt for prompt in prompts if prompt]
    count = min(most, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def is_faster(rows: list[JsonObject]) -> bool:
    """Return whether the new draft is faster than plain decoding and than the old draft."""
    *others, new = (row["speedup"] or 0.0 for row in rows)
    return new > max(others)


def describe_missing_gain(name: str, rows: list[JsonObject]) -> str:
    """Return the sentence that says that nothing was gained."""
    new = rows[-1]
    old = next((row for row in rows if row["mode"] == OLD_DRAFT_MODE), None)
    speeds = "no speed-up"
    if new["speedup"]:
        speeds = f"{new['speedup']:.2f} of plain speed"
    if old and old["speedup"]:
        speeds += f", with the old draft {old['speedup']:.2f}"
    advice = "more minutes, or texts like those that you generate, may help"
    return f"{name}: nothing was gained ({speeds}); {advice}"
