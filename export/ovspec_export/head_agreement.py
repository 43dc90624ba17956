"""Check that the IR of a head computes what the head computes in torch, before its weights are compressed."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import torch

from ovspec.base.errors import OvspecError
from ovspec.ir.device import DeviceOptions, make_compile_properties, openvino_core
from ovspec_export.agreement import REPORT_ADVICE
from ovspec_export.heads import EagleHead

# Entries of a text, in turn: several at once, some one by one with the head's own features, and several at once again.
FIRST_ENTRIES, UNROLLED_ENTRIES, LAST_ENTRIES = 9, 3, 4
KNOWN_ENTRIES = FIRST_ENTRIES + LAST_ENTRIES  # entries with features of the target
MISSING_ENTRIES = 4  # entries that a second row of the batch has less, at its beginning
# Largest difference of an output, root mean square, as a share of its own spread: rounding in f32 makes some 1e-6.
OUTPUT_TOLERANCE = 1e-3


def check_head_ir(head: EagleHead, model: ov.Model, states: np.ndarray | None = None) -> None:
    """Raise OvspecError if ``model`` computes other features, logits or outputs than ``head``.

    It reads a text step by step with a cache, as one of two rows; torch reads each row anew from its beginning.
    states: what the target's layers read of some text, (positions, width) float32; random ones if it doesn't fit.
    """
    layout = head.layout
    draws = np.random.default_rng(0)
    needed = (KNOWN_ENTRIES, layout.tap_count * layout.target_hidden_size)
    fits = states is not None and len(states) >= KNOWN_ENTRIES and states[:KNOWN_ENTRIES].shape == needed
    states = states[:KNOWN_ENTRIES] if fits and states is not None else draws.standard_normal(needed).astype(np.float32)
    if head.embed_tokens is not None:
        tokens = draws.integers(0, layout.vocab_size, FIRST_ENTRIES + UNROLLED_ENTRIES + LAST_ENTRIES)
    else:
        tokens = draws.standard_normal((FIRST_ENTRIES + UNROLLED_ENTRIES + LAST_ENTRIES, layout.hidden_size)).astype(
            np.float32
        )
    rows = [
        compute_head_outputs(head, tokens[start:], states[start:], FIRST_ENTRIES - start)
        for start in (0, MISSING_ENTRIES)
    ]
    expected = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    found = compute_ir_outputs(model, tokens, states)
    for name, ours in found.items():
        theirs = expected[name]
        apart = float(np.nan_to_num(np.sqrt(np.square(ours - theirs).mean()) / (theirs.std() + 1e-30), nan=np.inf))
        if apart > OUTPUT_TOLERANCE:
            raise OvspecError(
                f"the IR of the head computes other {name} than the checkpoint: they differ by {apart:.2g} of their "
                f"spread; {REPORT_ADVICE}"
            )


def compute_head_outputs(head: EagleHead, tokens: np.ndarray, states: np.ndarray, first: int) -> dict[str, np.ndarray]:
    """Return a row's outputs by name, (entries, width), where ``first`` entries come before the unrolled ones."""
    with torch.no_grad():
        taps, ids = torch.from_numpy(states)[None], torch.from_numpy(tokens)[None]
        fused = head.fuse_states(taps)

        def run_head(features: torch.Tensor) -> tuple[Any, ...]:
            ones = torch.ones(features.shape[:2], dtype=torch.int64)
            return head(ids[:, : ones.shape[1]], features, ones, ones.cumsum(1) - 1, taps, *head.make_empty_cache())

        features = fused[:, :first]
        for _ in range(UNROLLED_ENTRIES):
            features = torch.cat((features, run_head(features)[1][:, -1:]), 1)
        logits, hidden, *_ = run_head(torch.cat((features, fused[:, first:]), 1))
    outputs = {"fused": fused, "logits": logits, "hidden": hidden}
    return {name: output[0].numpy() for name, output in outputs.items()}


def compute_ir_outputs(model: ov.Model, tokens: np.ndarray, states: np.ndarray) -> dict[str, np.ndarray]:
    """Return the outputs of ``model`` for both rows, one after the other: (entries, width) by name."""
    options = DeviceOptions(precision="f32", properties={"CACHE_DIR": ""})
    request = openvino_core().compile_model(model, "CPU", make_compile_properties(options)).create_infer_request()
    name = next(port.get_any_name() for port in request.model_inputs if port.get_any_name().startswith("input"))
    alive = np.ones((2, len(tokens)), dtype=np.int64)
    alive[1, :MISSING_ENTRIES] = 0
    positions = np.maximum(alive.cumsum(1) - 1, 0)
    both_tokens, both_states = np.stack([tokens] * 2), np.stack([states] * 2)

    def run_ir(start: int, end: int, features: np.ndarray, known: np.ndarray) -> dict[str, np.ndarray]:
        feed = {
            name: both_tokens[:, start:end],
            "hidden_states": features,
            "attention_mask": alive[:, :end],
            "position_ids": positions[:, start:end],
            "target_hidden_states": known,
            "beam_idx": np.arange(2, dtype=np.int32),
        }
        request.infer(feed)
        return {each: request.get_tensor(each).data.copy() for each in ("logits", "hidden", "fused")}

    # The branch that fuses reads nothing else, so other features do for its first run.
    fused = run_ir(0, 1, np.zeros((2, 1, request.get_tensor("hidden").shape[-1]), np.float32), both_states)["fused"]
    request.reset_state()
    found = [run_ir(0, FIRST_ENTRIES, fused[:, :FIRST_ENTRIES], both_states[:, :FIRST_ENTRIES])]
    for end in range(FIRST_ENTRIES + 1, FIRST_ENTRIES + UNROLLED_ENTRIES + 1):
        found.append(run_ir(end - 1, end, found[-1]["hidden"][:, -1:], both_states[:, :1]))
    found.append(
        run_ir(FIRST_ENTRIES + UNROLLED_ENTRIES, len(tokens), fused[:, FIRST_ENTRIES:], both_states[:, FIRST_ENTRIES:])
    )
    outputs = {each: np.concatenate([part[each] for part in found], 1) for each in ("logits", "hidden")}
    outputs = {"fused": fused, **outputs}
    return {each: np.concatenate((both[0], both[1, MISSING_ENTRIES:])) for each, both in outputs.items()}
