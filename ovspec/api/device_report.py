"""A report of a model's run on a device, for machines unknown to the developers."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ovspec import __version__
from ovspec.api.comparison import find_divergence
from ovspec.api.loading import load
from ovspec.api.model import LanguageModel
from ovspec.base.json_types import JsonObject
from ovspec.ir.device import identify_machine, list_available_devices
from ovspec.ir.gpu import read_gpu_facts
from ovspec.setup.exactness import draw_probe_ids

REPORT_PROMPT = (
    "def first(items):\n    return items[0]\n\n\ndef second(items):\n    return items[1]\n\n\ndef third(items):\n"
)
REPORT_TOKENS = 64
INFERENCE_WIDTHS = (1, 2, 4, 8, 16)
INFERENCE_REPEATS = 5
CONTEXT_TOKENS = 128


def make_device_report(folder: Path, descriptions: dict[str, JsonObject], options: JsonObject) -> JsonObject:
    """Return the machine, its devices, the ``descriptions`` of the models in ``folder``, timings and a text, as JSON.

    The report contains no names of files or users.
    """
    lm = load(folder, "lookup", **options)
    models = {
        name: {key: value for key, value in description.items() if key not in ("folder", "source", "options")}
        | {"engine_reason": description["engine_reason"].replace(str(folder), "the model")}
        for name, description in descriptions.items()
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
        "timings": time_inferences(lm),
        "text": compare_with_lookup(lm),
    }


def time_inferences(lm: LanguageModel) -> JsonObject:
    """Return milliseconds per prompt token, and per inference of each width: the first and the fastest."""
    decoder = lm.target.make_decoder()
    max_width = max(INFERENCE_WIDTHS)
    probe_ids = draw_probe_ids(decoder, lm.target.ir.logits_width)[: CONTEXT_TOKENS + max_width]
    context_length = len(probe_ids) - max_width

    def time_feed(token_ids: np.ndarray) -> float:
        start_time = time.perf_counter()
        decoder.feed([token_ids], [1])
        return 1e3 * (time.perf_counter() - start_time)

    prompt_times = []
    for _ in range(2):
        decoder.reset(1)
        prompt_times.append(time_feed(probe_ids[:context_length]) / context_length)
    inference_times: JsonObject = {}
    for width in INFERENCE_WIDTHS:
        width_times_ms = []
        for _ in range(INFERENCE_REPEATS + 1):
            decoder.truncate(0, context_length)
            unread_ids = probe_ids[len(decoder.rows[0]) : context_length]
            if len(unread_ids):
                decoder.feed([unread_ids], [0])
            width_times_ms.append(time_feed(probe_ids[context_length : context_length + width]))
        inference_times[str(width)] = {"first": width_times_ms[0], "fastest": min(width_times_ms[1:])}
    return {
        "prompt_ms_per_token": {"first": prompt_times[0], "again": prompt_times[1]},
        "inference_ms": inference_times,
    }


def compare_with_lookup(lm: LanguageModel) -> JsonObject:
    """Return a greedy text without a draft and with lookup, and the first difference."""
    plain_result, lookup_result = (
        lm.generate(REPORT_PROMPT, max_tokens=REPORT_TOKENS, lookahead=lookahead) for lookahead in (0, 4)
    )
    divergence = find_divergence(lm, REPORT_PROMPT, plain_result.token_ids, lookup_result.token_ids)
    texts = {
        name: {
            "text": result.text,
            "ms_per_token": result.stats.tpot_ms,
            "first_token_ms": result.stats.ttft_ms,
            "tokens_per_round": result.stats.generated_tokens / max(result.stats.rounds, 1),
            "accepted": result.stats.accepted,
        }
        for name, result in (("plain", plain_result), ("lookup", lookup_result))
    }
    return {**texts, "equal": divergence is None, "parting": divergence and asdict(divergence)}
