"""Describe the models in a folder and what running them takes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ovspec.cache.decoder import Arithmetic
from ovspec.ir.compile import MODEL_FILE, compile_ir
from ovspec.ir.device import DeviceOptions
from ovspec.ir.heads import is_head_folder
from ovspec.ir.memory import kv_bytes_per_token
from ovspec.setup.engine_choice import CompiledModel, EngineChoice
from ovspec.setup.manifest import DRAFT_FOLDER, ExportedModel, read_manifest
from ovspec.setup.profile import count_weight_shapes, load_model_with_profile, read_profile
from ovspec.setup.proposers import load_compiled_head
from ovspec.setup.rollback_probing import load_rollback_probe

# OpenVINO's element types for weights -> the names that users know.
WEIGHT_FORMAT_NAMES = {
    "f32": "fp32",
    "f16": "fp16",
    "bf16": "bf16",
    "i8": "int8",
    "u8": "int8",
    "i4": "int4",
    "u4": "int4",
}

# How requests go on with copied states, which all CPUs do rightly.
COPY_NOTES = {
    "any": "",
    "run": ", copied states only in a request that has run",
    None: ", texts read again because copied states differ",
}
NO_PROFILE_NOTE = "none; a first load or 'ovspec tune' measures one"


def inspect_models(
    folder: Path,
    options: DeviceOptions,
    engine: EngineChoice = "auto",
    arithmetic: Arithmetic | None = None,
    tuned: bool = True,
    verify: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return what is known about the target in ``folder`` and its draft, if there is one, as JSON values.

    ``engine``, ``arithmetic`` and ``verify`` are as in ``load``; ``tuned`` applies the profile, if there is one. Sizes
    are in bytes. Raises like ``load``.
    """
    manifest, draft = read_manifest(folder, verify), folder / DRAFT_FOLDER

    head = draft if is_head_folder(draft) else None

    def load(part: Path, arithmetic: Arithmetic | None, head: Path | None = None) -> CompiledModel:
        return load_model_with_profile(
            read_profile(part, options) if tuned else None, part, options, engine, arithmetic, head
        )

    target = load(folder, arithmetic, head)
    found = {"target": inspect_model(target, options, manifest.target if manifest else None)}
    if (draft / MODEL_FILE).is_file():
        loaded = load_compiled_head(draft, target, options) if head else load(draft, "fast")
        found["draft"] = inspect_model(loaded, options, manifest.draft if manifest else None)
    return found


def inspect_model(loaded: CompiledModel, options: DeviceOptions, exported: ExportedModel | None) -> dict[str, Any]:
    folder, ir, probe = loaded.ir.folder, loaded.ir, None
    if not loaded.is_head:
        if loaded.engine == "paged":
            used = {name: value for name, value in ir.properties.items() if name != "CACHE_DIR"}
            ir = compile_ir(folder, replace(options, properties=options.properties | used))
        probe = load_rollback_probe(ir, options.cache_folder)
    parameters, weights = compute_weight_shares(folder)
    return {
        "folder": str(folder),
        "source": exported.source if exported else None,
        "options": exported.options if exported else {},
        "model_type": "EAGLE-3 head" if loaded.is_head else ir.config.language_config.model_type,
        "parameters": parameters,
        "weights": weights,
        "size": sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
        "context": ir.context_length,
        "window": ir.config.attention_window,
        "logits": ir.logits_width,
        "states": [asdict(state) for state in ir.states],
        "engine": loaded.engine,
        "engine_reason": loaded.engine_reason,
        "arithmetic": loaded.arithmetic_note,
        "rule": str(loaded.rule),
        "profile": loaded.profile,
        "kl": loaded.kl_divergence,
        "rollback": str(probe.rollback if probe else loaded.rollback),
        "probed": probe and asdict(probe),
        "kv_precision": ir.kv_precision or "the device's own",
        "kv_bytes_per_1000_tokens": round(1000 * kv_bytes_per_token(ir)),
    }


def compute_weight_shares(folder: Path) -> tuple[int, dict[str, float]]:
    """Return the number of weights and the share of each format; scales, zero points and norms are not counted."""
    counts: Counter[str] = Counter()
    for (element_type, text), count in count_weight_shapes(folder).items():
        kind, shape = WEIGHT_FORMAT_NAMES.get(element_type), [int(size) for size in text.split(",")]
        if kind and len(shape) > 1 and min(shape) > 1:
            counts[kind] += count * math.prod(shape)
    total = sum(counts.values())
    return total, {kind: round(count / total, 4) for kind, count in counts.most_common()}


def format_inspection(name: str, found: dict[str, Any]) -> list[str]:
    """Return the lines that ``ovspec inspect`` prints for one model."""
    shares = ", ".join(f"{kind} {share:.1%}" for kind, share in found["weights"].items())
    probe = found["probed"]
    fixed = sum(state["sequence_axis"] is None for state in found["states"])
    states = f"{len(found['states']) - fixed} for keys and values" + (f", {fixed} that can't be cut" if fixed else "")
    probed = ""
    if probe:
        copies = COPY_NOTES[probe["rollback"]["copies"]]
        probed = f" on the stateful engine{copies} (probed on {probe['setting']} in {probe['seconds']:.2f} s)"
    cache = f"{found['kv_bytes_per_1000_tokens'] / 1e6:,.1f} MB per 1000 tokens (KV cache: {found['kv_precision']})"
    lines = {
        name: found["folder"] + (f", exported from {found['source']}" if found["source"] else ""),
        "model": f"{found['model_type'] or 'unknown'}, {found['parameters'] / 1e6:,.1f} M weights: {shares}",
        "size": f"{found['size'] / 1e6:,.1f} MB",
        "context": f"{found['context'] or 'unknown'}" + (f", window {found['window']}" if found["window"] else ""),
        "logits": f"{found['logits']} wide",
        "states": states,
        "engine": f"{found['engine']} ({found['engine_reason']})",
        "arithmetic": found["arithmetic"] + (f": {found['rule']}" if found["arithmetic"] == "exact" else ""),
        "profile": f"{found['profile']}; KL divergence {found['kl']:.1e} nats" if found["profile"] else NO_PROFILE_NOTE,
        "rollback": found["rollback"] + probed,
        "memory": f"{cache}, {found['size'] / 1e6:,.1f} MB for the weights",
    }
    return [f"{key:11}{value}" for key, value in lines.items()]
