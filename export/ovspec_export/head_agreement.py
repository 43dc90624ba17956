"""Check that the IR of a head computes the same as the head in torch, before its weights are compressed."""

from __future__ import annotations

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
    states: the inputs of the target's layers for some text, (positions, width) float32; random ones if it doesn't fit.
    """
    layout = head.layout
    generator = np.random.default_rng(0)
    states_shape = (KNOWN_ENTRIES, layout.tap_count * layout.target_hidden_size)
    if states is not None and len(states) >= KNOWN_ENTRIES and states[:KNOWN_ENTRIES].shape == states_shape:
        states = states[:KNOWN_ENTRIES]
    else:
        states = generator.standard_normal(states_shape).astype(np.float32)
    entry_count = FIRST_ENTRIES + UNROLLED_ENTRIES + LAST_ENTRIES
    if head.embed_tokens is not None:
        tokens = generator.integers(0, layout.vocab_size, entry_count)
    else:
        tokens = generator.standard_normal((entry_count, layout.hidden_size)).astype(np.float32)
    rows = [
        compute_head_outputs(head, tokens[start:], states[start:], FIRST_ENTRIES - start)
        for start in (0, MISSING_ENTRIES)
    ]
    expected = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    for name, ir_output in compute_ir_outputs(model, tokens, states).items():
        expected_output = expected[name]
        root_mean_square = np.sqrt(np.square(ir_output - expected_output).mean())
        difference = float(np.nan_to_num(root_mean_square / (expected_output.std() + 1e-30), nan=np.inf))
        if difference > OUTPUT_TOLERANCE:
            raise OvspecError(
                f"the IR of the head computes other {name} than the checkpoint: they differ by {difference:.2g} of "
                f"their spread; {REPORT_ADVICE}"
            )


def compute_head_outputs(
    head: EagleHead, tokens: np.ndarray, states: np.ndarray, first_entries: int
) -> dict[str, np.ndarray]:
    """Return a row's outputs by name, (entries, width), where ``first_entries`` come before the unrolled ones."""
    with torch.no_grad():
        target_states = torch.from_numpy(states)[None]
        ids = torch.from_numpy(tokens)[None]
        fused_features = head.fuse_states(target_states)

        def run_head(features: torch.Tensor) -> tuple[torch.Tensor, ...]:
            mask = torch.ones(features.shape[:2], dtype=torch.int64)
            return head(
                ids[:, : mask.shape[1]], features, mask, mask.cumsum(1) - 1, target_states, *head.make_empty_cache()
            )

        features = fused_features[:, :first_entries]
        for _ in range(UNROLLED_ENTRIES):
            features = torch.cat((features, run_head(features)[1][:, -1:]), 1)
        logits, hidden, *_ = run_head(torch.cat((features, fused_features[:, first_entries:]), 1))
    outputs = {"fused": fused_features, "logits": logits, "hidden": hidden}
    return {name: output[0].numpy() for name, output in outputs.items()}


def compute_ir_outputs(model: ov.Model, tokens: np.ndarray, states: np.ndarray) -> dict[str, np.ndarray]:
    """Return the outputs of ``model`` for both rows, one after the other: (entries, width) by name."""
    options = DeviceOptions(precision="f32", properties={"CACHE_DIR": ""})
    request = openvino_core().compile_model(model, "CPU", make_compile_properties(options)).create_infer_request()
    tokens_input = next(port.get_any_name() for port in request.model_inputs if port.get_any_name().startswith("input"))
    attention_mask = np.ones((2, len(tokens)), dtype=np.int64)
    attention_mask[1, :MISSING_ENTRIES] = 0
    positions = np.maximum(attention_mask.cumsum(1) - 1, 0)
    both_tokens = np.stack([tokens] * 2)
    both_states = np.stack([states] * 2)

    def run_ir(start: int, end: int, features: np.ndarray, target_states: np.ndarray) -> dict[str, np.ndarray]:
        inputs = {
            tokens_input: both_tokens[:, start:end],
            "hidden_states": features,
            "attention_mask": attention_mask[:, :end],
            "position_ids": positions[:, start:end],
            "target_hidden_states": target_states,
            "beam_idx": np.arange(2, dtype=np.int32),
        }
        request.infer(inputs)
        return {name: request.get_tensor(name).data.copy() for name in ("logits", "hidden", "fused")}

    # The branch that fuses reads nothing else, so other features do for its first run.
    no_features = np.zeros((2, 1, request.get_tensor("hidden").shape[-1]), np.float32)
    fused_features = run_ir(0, 1, no_features, both_states)["fused"]
    request.reset_state()
    runs = [run_ir(0, FIRST_ENTRIES, fused_features[:, :FIRST_ENTRIES], both_states[:, :FIRST_ENTRIES])]
    first_known = FIRST_ENTRIES + UNROLLED_ENTRIES
    for end in range(FIRST_ENTRIES + 1, first_known + 1):
        runs.append(run_ir(end - 1, end, runs[-1]["hidden"][:, -1:], both_states[:, :1]))
    runs.append(run_ir(first_known, len(tokens), fused_features[:, FIRST_ENTRIES:], both_states[:, FIRST_ENTRIES:]))
    outputs = {"fused": fused_features}
    outputs |= {name: np.concatenate([run[name] for run in runs], 1) for name in ("logits", "hidden")}
    return {name: np.concatenate((output[0], output[1, MISSING_ENTRIES:])) for name, output in outputs.items()}
