"""Find out by trial how a model's states can be rolled back; nothing is guessed from a model's name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ovspec import __version__
from ovspec.decoders.base import Rollback
from ovspec.decoders.stateful import StatefulDecoder
from ovspec.errors import OvspecError
from ovspec.files import read_json, write_atomically
from ovspec.ir.compile import MODEL_FILE, CompiledIR, State, model_states
from ovspec.ir.device import core

# Slots at which a mask is tried where the config doesn't say how long a text may be.
LONGEST = 32768
UNBOUNDED = sys.maxsize


@dataclass(frozen=True)
class Probe:
    """What was found, on which device with which properties, and what it cost."""

    rollback: Rollback
    setting: str
    seconds: float


def setting_of(device: str, properties: dict[str, str]) -> str:
    """The device, what of its properties may change a rollback, and OpenVINO's version."""
    ours = {name: value for name, value in properties.items() if name.endswith(("PRECISION", "PRECISION_HINT"))}
    version = ov.get_version().split("-")[0]
    return " ".join([device, *(f"{name}={value}" for name, value in sorted(ours.items())), f"OpenVINO {version}"])


def probe_rollback(ir: CompiledIR) -> Probe:
    """Prefill, feed junk, take it back, feed on, and compare with a clean run: masking first, then cutting.

    Raises:
        OvspecError: nothing gives back the clean run's logits, or they are not numbers.
    """
    began = time.perf_counter()
    replay = bool(ir.recurrent_states)
    kinds = (
        [Rollback("mask", replay=replay), Rollback("trim", replay=replay)]
        if ir.kv_states
        else [Rollback(None, replay=replay)]
    )
    for rollback in kinds:
        if not gives_back_the_clean_run(ir, rollback):
            continue
        if rollback.kv == "mask":
            bound = safe_bound(ir)
            if bound == 0:
                continue
            rollback = replace(rollback, mask_until=bound)
        return Probe(rollback, setting_of(ir.device, ir.properties), time.perf_counter() - began)
    raise OvspecError(f"{ir.folder}: tokens cannot be taken back from its cache, neither by mask nor by cutting it.")


def gives_back_the_clean_run(ir: CompiledIR, rollback: Rollback) -> bool:
    """Whether junk that was fed and taken back leaves no trace in the logits."""
    vocab = ir.compiled.output(0).get_partial_shape()[-1].get_length()
    text, junk = np.split(np.random.default_rng(0).integers(0, vocab, 22), [14])
    decoder = StatefulDecoder(ir, rollback)

    def run(*pieces: np.ndarray) -> np.ndarray:
        decoder.reset(1)
        for piece in pieces[:-1]:
            decoder.feed([piece], [len(piece)])
        return decoder.feed([pieces[-1]], [1])[0].copy()

    clean, regrouped = run(text[:10], text[10:]), run(text[:7], text[7:12], text[12:])
    decoder.reset(1)
    decoder.feed([text[:10]], [10])
    decoder.feed([junk], [len(junk)])
    decoder.truncate(0, 10)
    after = decoder.feed([text[len(decoder.rows[0]) :]], [1])[0]
    if not np.isfinite(clean).all():
        raise OvspecError(f"{ir.folder}: its logits are not numbers (NaN or infinity) on {ir.device}; export it again.")
    # What feeding the same text in other pieces does is rounding, and no rollback can be held to less.
    rounding = np.abs(regrouped - clean).max()
    return bool(np.abs(after - clean).max() <= 10 * rounding + 1e-4 * clean.std())


def safe_bound(ir: CompiledIR) -> int | None:
    """Slots up to which masking is exact: None for any number, 0 where there is a doubt.

    The config names a window; the IR's own attention mask, computed alone, shows where it ends.
    """
    shown = mask_bound(ir)
    if shown == 0 or (shown is None and not ir.config):
        return 0
    bound = min(bound for bound in (ir.attention_window, shown, UNBOUNDED) if bound)
    return bound if bound < UNBOUNDED else None


# ---------------------------------------------------------------- the attention mask alone


def mask_bound(ir: CompiledIR) -> int | None:
    """Slots up to which dead slots don't change what the live ones see; UNBOUNDED, or None if that can't be told.

    The part of the IR that computes attention masks runs without the rest, so any length costs next to nothing.
    """
    try:
        mask = mask_model(core().read_model(ir.folder / MODEL_FILE))
        if mask is None:
            return None
        request = core().compile_model(mask, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
        axes = {state.name: state for state in ir.states}
        low, high = 16, min(ir.context_length or LONGEST, 4 * LONGEST)
        if not same_view(request, axes, low):
            return 0
        if high <= low or same_view(request, axes, high):
            return UNBOUNDED
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if same_view(request, axes, middle) else (low, middle)
        return low
    except (RuntimeError, LookupError, ValueError):  # an attention mask of a kind not seen before
        return None


def mask_model(model: ov.Model) -> ov.Model | None:
    """The attention masks of ``model`` as a model of its own, which it takes apart; None where there are none.

    States become inputs of their name. Only the lengths of keys and values are read: heads of size 1 do.
    """
    masks = {}
    for op in model.get_ops():
        if op.get_type_name() == "ScaledDotProductAttention" and op.get_input_size() > 3:
            source = op.input_value(3)
            masks[source.get_node().get_friendly_name(), source.get_index()] = source
    if not masks:
        return None
    parameters = list(model.get_parameters())
    recurrent = {state.name for state in model_states(model) if state.sequence_axis is None}
    shapes = {variable.info.variable_id: variable.info.data_shape for variable in model.get_variables()}
    for op in model.get_ops():
        if op.get_type_name() == "ReadValue":
            name = op.get_variable_id()  # type: ignore[attr-defined]
            shape = shapes[name] if name in recurrent else ov.PartialShape([-1] * len(shapes[name]))
            state = ops.parameter(shape, op.output(0).get_element_type(), name=name)
            state.output(0).get_tensor().set_names({name})
            for use in op.output(0).get_target_inputs():
                use.replace_source_output(state.output(0))
            parameters.append(state)
    results = [ops.result(source) for source in masks.values()]
    reached = ancestors(results)
    return ov.Model(results, [p for p in parameters if p.get_friendly_name() in reached], "attention_mask")  # type: ignore[misc]


def ancestors(nodes: list[Any]) -> set[str]:
    """Names of all that ``nodes`` are computed from."""
    seen, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node.get_friendly_name() not in seen:
            seen.add(node.get_friendly_name())
            waiting += [node.input_value(i).get_node() for i in range(node.get_input_size())]
    return seen


def same_view(request: ov.InferRequest, axes: dict[str, State], slots: int) -> bool:
    """Whether the last of ``slots`` slots sees the same of the live ones, with four dead and without them."""
    dead = slice(slots - 6, slots - 2)
    alive = np.ones((1, slots), dtype=np.int64)
    alive[:, dead] = 0
    with_dead = masks_of(request, axes, alive)
    clean = masks_of(request, axes, np.ones((1, slots - 4), dtype=np.int64))
    for ours, theirs in zip(with_dead, clean, strict=True):
        ours = np.delete(ours, np.arange(slots)[dead], axis=-1)
        if not ((ours > -1e30) == (theirs > -1e30)).all():
            return False
        # Softmax doesn't feel a shift of a whole row.
        shown, expected = ours - ours[..., -1:], theirs - theirs[..., -1:]
        if not np.allclose(shown[theirs > -1e30], expected[theirs > -1e30], atol=1e-3):
            return False
    return True


def masks_of(request: ov.InferRequest, axes: dict[str, State], alive: np.ndarray) -> list[np.ndarray]:
    """The masks (1, heads or 1, 1, slots) float64 of one more token behind ``slots - 1``; hidden is -inf."""
    slots = alive.shape[1]
    inputs: dict[str, np.ndarray] = {
        "input_ids": np.zeros((1, 1), dtype=np.int64),
        "attention_mask": alive,
        "position_ids": np.array([[alive.sum() - 1]], dtype=np.int64),
        "beam_idx": np.zeros(1, dtype=np.int32),
    }
    feed = {}
    for port in request.model_inputs:
        name = port.get_any_name()
        if name in inputs:
            feed[name] = inputs[name]
        else:
            shape = [1 if length.is_dynamic else length.get_length() for length in port.get_partial_shape()]
            axis = axes[name].sequence_axis
            if axis is not None:
                shape[axis] = slots - 1
            feed[name] = np.zeros(shape, dtype=port.get_element_type().to_dtype())
    masks = [np.asarray(mask) for mask in request.infer(feed).values()]
    return [np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask.astype(np.float64) for mask in masks]


# ---------------------------------------------------------------- remembering


def find_probe(ir: CompiledIR, cache_dir: Path | None, exported: Probe | None) -> Probe:
    """The export's probe if it was made in this setting, else what an earlier run found, else a new one."""
    if exported and exported.setting == setting_of(ir.device, ir.properties):
        return exported
    probe = known_probe(ir, cache_dir)
    if probe is None:
        probe = probe_rollback(ir)
        remember_probe(ir, cache_dir, probe)
    return probe


def known_probe(ir: CompiledIR, cache_dir: Path | None) -> Probe | None:
    """What an earlier run found for this model, device and precision."""
    file = probe_file(ir, cache_dir)
    try:
        data = read_json(file) if file else {}
        return Probe(Rollback(**data["rollback"]), data["setting"], data["seconds"]) if data else None
    except (KeyError, TypeError, OvspecError):  # damaged, or of another version of ovspec
        return None


def remember_probe(ir: CompiledIR, cache_dir: Path | None, probe: Probe) -> None:
    """Keep it beside the compiled models; a cache that can't be written is no error."""
    if file := probe_file(ir, cache_dir):
        with contextlib.suppress(OSError):
            write_atomically(file, json.dumps(asdict(probe)))


def probe_file(ir: CompiledIR, cache_dir: Path | None) -> Path | None:
    return memory_file("probes", ir.folder, setting_of(ir.device, ir.properties), cache_dir)


def memory_file(kind: str, folder: Path, setting: str, cache_dir: Path | None) -> Path | None:
    """Where what was found about the model in ``folder`` in one ``setting`` is kept; None without a cache."""
    if not cache_dir:
        return None
    files = [folder / MODEL_FILE, (folder / MODEL_FILE).with_suffix(".bin"), folder / "config.json"]
    identity = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
    key = repr((identity, setting, __version__))
    return cache_dir / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
