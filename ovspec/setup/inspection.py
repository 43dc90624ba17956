"""Describe the models in a folder and the cost of running them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from ovspec.base.json_types import JsonObject
from ovspec.cache.decoder import Arithmetic
from ovspec.ir.compile import MODEL_FILE, compile_ir
from ovspec.ir.device import DeviceOptions
from ovspec.ir.heads import is_head_folder
from ovspec.ir.memory import kv_bytes_per_token
from ovspec.setup.engine_choice import CompiledModel, EngineChoice
from ovspec.setup.manifest import DRAFT_FOLDER, ExportedModel, read_manifest
from ovspec.setup.profile import count_weight_shapes, load_model_with_profile, read_profile
from ovspec.setup.proposers import load_compiled_head
from ovspec.setup.rollback_probing import ProbedRollback, load_or_probe_rollback

# OpenVINO's element types for weights -> their common names.
WEIGHT_FORMAT_NAMES = {
    "f32": "fp32",
    "f16": "fp16",
    "bf16": "bf16",
    "i8": "int8",
    "u8": "int8",
    "i4": "int4",
    "u4": "int4",
}

# Which requests continue correctly with copied states; on CPUs, all do.
STATE_COPY_NOTES = {
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
) -> dict[str, JsonObject]:
    """Return facts about the target in ``folder`` and its draft, if any, as JSON values.

    ``engine``, ``arithmetic`` and ``verify`` are as in ``load``; ``tuned`` applies the profile, if any. Sizes are in
    bytes. Raises like ``load``.
    """
    manifest = read_manifest(folder, verify)
    draft_folder = folder / DRAFT_FOLDER
    head_folder = draft_folder if is_head_folder(draft_folder) else None

    def load_with_profile(
        model_folder: Path, arithmetic: Arithmetic | None, head_folder: Path | None = None
    ) -> CompiledModel:
        profile = read_profile(model_folder, options) if tuned else None
        return load_model_with_profile(profile, model_folder, options, engine, arithmetic, head_folder)

    target = load_with_profile(folder, arithmetic, head_folder)
    inspections = {"target": describe_compiled_model(target, options, manifest and manifest.target)}
    if (draft_folder / MODEL_FILE).is_file():
        proposer = (
            load_compiled_head(draft_folder, target, options)
            if head_folder
            else load_with_profile(draft_folder, "fast")
        )
        inspections["draft"] = describe_compiled_model(proposer, options, manifest and manifest.draft)
    return inspections


def describe_compiled_model(model: CompiledModel, options: DeviceOptions, exported: ExportedModel | None) -> JsonObject:
    ir = model.ir
    folder = ir.folder
    rollback = model.rollback
    model_type: str | None = "MTP layer" if model.proposer_name == "mtp" else "EAGLE-3 head"
    if (layer_count := len(model.list_layers())) > 1:
        model_type = f"{layer_count} MTP layers"
    probe: ProbedRollback | None = None
    if not model.is_head:
        model_type = ir.config.language_config.model_type
        if model.engine == "paged":
            properties = {name: property_value for name, property_value in ir.properties.items() if name != "CACHE_DIR"}
            ir = compile_ir(folder, replace(options, properties=options.properties | properties))
        probe = load_or_probe_rollback(ir, options.cache_folder)
        rollback = probe.rollback
    weight_count, weight_shares = compute_weight_format_shares(folder)
    return {
        "folder": str(folder),
        "source": exported and exported.source,
        "options": exported.options if exported else {},
        "model_type": model_type,
        "parameters": weight_count,
        "weights": weight_shares,
        "size": sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
        "context": ir.context_length,
        "window": ir.config.attention_window,
        "logits": ir.logits_width,
        "states": [asdict(state) for state in ir.states],
        "engine": model.engine,
        "engine_reason": model.engine_reason,
        "arithmetic": model.arithmetic_note,
        "rule": str(model.feed_rule),
        "profile": model.profile,
        "kl": model.kl_divergence,
        "rollback": str(rollback),
        "probed": probe and asdict(probe),
        "kv_precision": ir.kv_precision or "the device's own",
        "kv_bytes_per_1000_tokens": round(1000 * kv_bytes_per_token(ir)),
    }


def compute_weight_format_shares(folder: Path) -> tuple[int, dict[str, float]]:
    """Return the number of weights and the share of each format, without scales, zero points and norms."""
    weight_counts: Counter[str] = Counter()
    for (element_type, shape_text), shape_count in count_weight_shapes(folder).items():
        weight_format = WEIGHT_FORMAT_NAMES.get(element_type)
        shape = [int(axis_size) for axis_size in shape_text.split(",")]
        if weight_format and len(shape) > 1 and min(shape) > 1:
            weight_counts[weight_format] += shape_count * math.prod(shape)
    total_count = sum(weight_counts.values())
    return total_count, {
        weight_format: round(shape_count / total_count, 4) for weight_format, shape_count in weight_counts.most_common()
    }


def format_inspection(name: str, facts: JsonObject) -> list[str]:
    """Return the lines of ``ovspec inspect`` for a model."""
    shares_text = ", ".join(
        f"{weight_format} {weight_share:.1%}" for weight_format, weight_share in facts["weights"].items()
    )
    fixed_state_count = sum(state["sequence_axis"] is None for state in facts["states"])
    profile = NO_PROFILE_NOTE
    if facts["profile"]:
        profile = f"{facts['profile']}; KL divergence {facts['kl']:.1e} nats"
    rollback = facts["rollback"]
    if probe := facts["probed"]:
        copies_note = STATE_COPY_NOTES[probe["rollback"]["copies"]]
        rollback += f" on the stateful engine{copies_note} (probed on {probe['setting']} in {probe['seconds']:.2f} s)"
    cache_text = (
        f"{facts['kv_bytes_per_1000_tokens'] / 1e6:,.1f} MB per 1000 tokens (KV cache: {facts['kv_precision']})"
    )
    text_by_label = {
        name: facts["folder"] + f", exported from {facts['source']}" * bool(facts["source"]),
        "model": f"{facts['model_type'] or 'unknown'}, {facts['parameters'] / 1e6:,.1f} M weights: {shares_text}",
        "size": f"{facts['size'] / 1e6:,.1f} MB",
        "context": f"{facts['context'] or 'unknown'}" + f", window {facts['window']}" * bool(facts["window"]),
        "logits": f"{facts['logits']} wide",
        "states": f"{len(facts['states']) - fixed_state_count} for keys and values"
        + f", {fixed_state_count} that can't be cut" * bool(fixed_state_count),
        "engine": f"{facts['engine']} ({facts['engine_reason']})",
        "arithmetic": facts["arithmetic"] + f": {facts['rule']}" * (facts["arithmetic"] == "exact"),
        "profile": profile,
        "rollback": rollback,
        "memory": f"{cache_text}, {facts['size'] / 1e6:,.1f} MB for the weights",
    }
    return [f"{label:11}{text}" for label, text in text_by_label.items()]
