"""What a new head or draft brings: plain decoding, the old draft and the new one in turns, on texts held out."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from ovspec_export.distill.documents import read_documents

PROMPTS, TOKENS = 8, 96
FEWEST, FEWEST_TOKENS = 2, 32  # texts and tokens of each, where there is little time
BEGINNING = 64  # tokens of a plain text that are a prompt
OLD = "old draft"


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

    began, prompts = time.monotonic(), prompts_in(Path(documents)) or default_prompts()
    lm = ovspec.load(model, new, cache_memory=0)
    models = {"plain": lm.with_drafters(None)}
    if old:
        models[OLD] = ovspec.load(model, old, cache_memory=0)
    models["head" if is_head_folder(Path(new)) else "draft"] = lm
    options: dict[str, Any] = {"lookahead": "auto", "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    first = lm.generate(prompts[0], max_tokens=FEWEST_TOKENS, lookahead=0, ignore_eos=True).stats
    tokens = (seconds - (time.monotonic() - began)) / (1e-3 * first.tpot_ms * len(models)) - FEWEST_TOKENS  # a warm-up
    prompts = prompts[: int(min(max(tokens / FEWEST_TOKENS, FEWEST), PROMPTS))]
    options["max_tokens"] = int(min(max(tokens / len(prompts), FEWEST_TOKENS), TOKENS))
    results = time_modes(models, prompts, options, repeats=1)
    rows = [summarize_mode(mode, "auto", found, results["plain"]) for mode, found in results.items()]
    Path(output).write_text(json.dumps({"rows": rows}), encoding="utf-8", newline="\n")


def prompts_in(documents: Path, most: int = PROMPTS, source: str = "") -> list[list[int]]:
    """Return the beginnings of ``most`` texts that are held out, spread over all of them: each up to its answer.

    source: of the documents; by default any.
    """
    held_out = [each for each in read_documents(documents) if each.held_out and source in ("", each.source)]
    prompts = [each.ids[: each.answer or min(BEGINNING, len(each.ids) // 2)] for each in held_out]
    prompts = [prompt for prompt in prompts if prompt]
    count = min(most, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def gained(rows: list[dict[str, Any]]) -> bool:
    """Return whether the new draft is faster than plain decoding and than the old draft."""
    *others, new = (row["speedup"] or 0.0 for row in rows)
    return new > max(others)


def no_gain(name: str, rows: list[dict[str, Any]]) -> str:
    """Return the sentence that says that nothing was gained."""
    new, old = rows[-1], next((row for row in rows if row["mode"] == OLD), None)
    speed = f"{new['speedup']:.2f} of plain speed" if new["speedup"] else "no speed-up"
    beside = f", with the old draft {old['speedup']:.2f}" if old and old["speedup"] else ""
    advice = "more minutes, or texts like those that you generate, may help"
    return f"{name}: nothing was gained ({speed}{beside}); {advice}"
