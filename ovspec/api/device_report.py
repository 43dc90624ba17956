"""A report of how a model runs on a device, for machines that we have never seen."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ovspec import __version__
from ovspec.api.comparison import find_divergence
from ovspec.api.loading import load
from ovspec.api.model import LanguageModel
from ovspec.ir.device import identify_machine, list_available_devices
from ovspec.ir.gpu import read_gpu_facts
from ovspec.setup.exactness import draw_probe_text

PROMPT = "def first(items):\n    return items[0]\n\n\ndef second(items):\n    return items[1]\n\n\ndef third(items):\n"
TOKENS = 64
WIDTHS, REPEATS, CONTEXT = (1, 2, 4, 8, 16), 5, 128


def device_report(folder: Path, inspected: dict[str, dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    """Return the machine, its devices, the models in ``folder`` as ``inspected``, timings and a text, as JSON values.

    The report names no files and no users.
    """
    lm = load(folder, "lookup", **options)
    models = {
        name: {key: value for key, value in model.items() if key not in ("folder", "source", "options")}
        | {"engine_reason": model["engine_reason"].replace(str(folder), "the model")}
        for name, model in inspected.items()
    }
    device = lm.target.ir.device
    return {
        "ovspec": __version__,
        "machine": identify_machine(device),
        "devices": {
            name: read_gpu_facts(name) or {"name": description} for name, description in list_available_devices()
        },
        "models": models,
        "properties": {name: value for name, value in lm.target.ir.properties.items() if name != "CACHE_DIR"},
        "timings": timings(lm),
        "text": compared(lm),
    }


def timings(lm: LanguageModel) -> dict[str, Any]:
    """Return the milliseconds of a prompt's tokens and of inferences, the first of each width and the fastest."""
    decoder = lm.target.decoder()
    text = draw_probe_text(decoder, lm.target.ir.logits_width)[: CONTEXT + max(WIDTHS)]
    context = len(text) - max(WIDTHS)

    def milliseconds(tokens: np.ndarray) -> float:
        began = time.perf_counter()
        decoder.feed([tokens], [1])
        return 1e3 * (time.perf_counter() - began)

    prompts = []
    for _ in range(2):
        decoder.reset(1)
        prompts.append(milliseconds(text[:context]) / context)
    widths: dict[str, Any] = {}
    for width in WIDTHS:
        times = []
        for _ in range(REPEATS + 1):
            decoder.truncate(0, context)
            unread = text[len(decoder.rows[0]) : context]
            if len(unread):
                decoder.feed([unread], [0])
            times.append(milliseconds(text[context : context + width]))
        widths[str(width)] = {"first": times[0], "fastest": min(times[1:])}
    return {"prompt_ms_per_token": {"first": prompts[0], "again": prompts[1]}, "inference_ms": widths}


def compared(lm: LanguageModel) -> dict[str, Any]:
    """Return a greedy text without a draft and with lookup, and where they part."""
    plain, other = (lm.generate(PROMPT, max_tokens=TOKENS, lookahead=lookahead) for lookahead in (0, 4))
    where = find_divergence(lm, PROMPT, plain.token_ids, other.token_ids)
    results = {"plain": plain, "lookup": other}
    texts = {
        name: {
            "text": result.text,
            "ms_per_token": result.stats.tpot_ms,
            "first_token_ms": result.stats.ttft_ms,
            "tokens_per_round": result.stats.generated_tokens / max(result.stats.rounds, 1),
            "accepted": result.stats.accepted,
        }
        for name, result in results.items()
    }
    return {**texts, "equal": where is None, "parting": where and asdict(where)}
