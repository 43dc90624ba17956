"""Check the outputs of a head's IR against the head in torch, before its weights are compressed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov
import torch

from ovspec.base.errors import OvspecError
from ovspec.ir.device import DeviceOptions, make_compile_properties, openvino_core
from ovspec_export.heads import HeadModule

# Entries of a text, in order: several at once, some singly with the head's own features, then several at once.
FIRST_ENTRY_COUNT, UNROLLED_ENTRY_COUNT, LAST_ENTRY_COUNT = 9, 3, 4
KNOWN_ENTRY_COUNT = FIRST_ENTRY_COUNT + LAST_ENTRY_COUNT  # entries with features of the target
MISSING_ENTRY_COUNT = 4  # entries missing at the beginning of the batch's second row
# Largest difference of an output, root mean square, as a share of its own spread: rounding in f32 causes some 1e-6.
OUTPUT_TOLERANCE = 1e-3


def check_head_ir(head: HeadModule, model: ov.Model, target_states: np.ndarray | None = None) -> None:
    """Raise OvspecError if ``model`` computes other features, logits or outputs than ``head``.

    It reads a text step by step with a cache, in a batch of two rows; torch reads each row anew from its beginning.
    target_states: the inputs of the target's layers for some text, (positions, width) float32; random if they don't
        fit.
    """
    layout = head.layout
    generator = np.random.default_rng(0)
    states_shape = (KNOWN_ENTRY_COUNT, layout.tap_count * layout.target_hidden_size)
    if (
        target_states is not None
        and len(target_states) >= KNOWN_ENTRY_COUNT
        and target_states[:KNOWN_ENTRY_COUNT].shape == states_shape
    ):
        target_states = target_states[:KNOWN_ENTRY_COUNT]
    else:
        target_states = generator.standard_normal(states_shape).astype(np.float32)
    entry_count = FIRST_ENTRY_COUNT + UNROLLED_ENTRY_COUNT + LAST_ENTRY_COUNT
    if head.embed_tokens is not None:
        tokens = generator.integers(0, layout.vocab_size, entry_count)
    else:
        tokens = generator.standard_normal((entry_count, layout.hidden_size)).astype(np.float32)
    row_outputs = [
        compute_head_outputs(head, tokens[first_entry:], target_states[first_entry:], FIRST_ENTRY_COUNT - first_entry)
        for first_entry in (0, MISSING_ENTRY_COUNT)
    ]
    expected_outputs = {name: np.concatenate([row[name] for row in row_outputs]) for name in row_outputs[0]}
    for name, ir_output in compute_ir_outputs(model, head.output_names, tokens, target_states).items():
        expected_output = expected_outputs[name]
        root_mean_square = np.sqrt(np.square(ir_output - expected_output).mean())
        difference = float(np.nan_to_num(root_mean_square / (expected_output.std() + 1e-30), nan=np.inf))
        if difference > OUTPUT_TOLERANCE:
            raise OvspecError(
                f"the exported head's output {name!r} differs from the checkpoint's by {difference:.2g} standard "
                f"deviations, more than {OUTPUT_TOLERANCE}, so the export was deleted; report this bug to ovspec"
            )


def compute_head_outputs(
    head: HeadModule, tokens: np.ndarray, states: np.ndarray, first_entries: int
) -> dict[str, np.ndarray]:
    """Return a row's outputs by name, (entries, width), with ``first_entries`` before the unrolled entries."""
    with torch.no_grad():
        target_states = torch.from_numpy(states)[None]
        token_batch = torch.from_numpy(tokens)[None]
        fused_features = head.fuse_target_states(target_states)

        def run_head(features: torch.Tensor) -> dict[str, torch.Tensor]:
            attention_mask = torch.ones(features.shape[:2], dtype=torch.int64)
            outputs = head(
                token_batch[:, : attention_mask.shape[1]],
                features,
                attention_mask,
                attention_mask.cumsum(1) - 1,
                target_states,
                *head.make_empty_cache(),
            )
            return dict(zip(head.output_names, outputs, strict=False))

        features = fused_features[:, :first_entries]
        for _ in range(UNROLLED_ENTRY_COUNT):
            features = torch.cat((features, run_head(features)["hidden"][:, -1:]), 1)
        outputs = run_head(torch.cat((features, fused_features[:, first_entries:]), 1))
    outputs["fused"] = fused_features
    return {name: output[0].numpy() for name, output in outputs.items()}


def compute_ir_outputs(
    model: ov.Model, output_names: Sequence[str], tokens: np.ndarray, states: np.ndarray
) -> dict[str, np.ndarray]:
    """Return these outputs of ``model`` for both rows, one after the other: (entries, width) by name."""
    device_options = DeviceOptions(precision="f32", properties={"CACHE_DIR": ""})
    request = (
        openvino_core().compile_model(model, "CPU", make_compile_properties(device_options)).create_infer_request()
    )
    tokens_input = next(port.get_any_name() for port in request.model_inputs if port.get_any_name().startswith("input"))
    attention_mask = np.ones((2, len(tokens)), dtype=np.int64)
    attention_mask[1, :MISSING_ENTRY_COUNT] = 0
    positions = np.maximum(attention_mask.cumsum(1) - 1, 0)
    both_tokens = np.stack([tokens] * 2)
    both_states = np.stack([states] * 2)

    def run_ir(
        first_entry: int, end_entry: int, features: np.ndarray, target_states: np.ndarray
    ) -> dict[str, np.ndarray]:
        inputs = {
            tokens_input: both_tokens[:, first_entry:end_entry],
            "hidden_states": features,
            "attention_mask": attention_mask[:, :end_entry],
            "position_ids": positions[:, first_entry:end_entry],
            "target_hidden_states": target_states,
            "beam_idx": np.arange(2, dtype=np.int32),
        }
        request.infer(inputs)
        return {name: request.get_tensor(name).data.copy() for name in output_names}

    # The fusing branch reads no features, so its first run gets zeros.
    no_features = np.zeros((2, 1, request.get_tensor("hidden").shape[-1]), np.float32)
    fused_features = run_ir(0, 1, no_features, both_states)["fused"]
    request.reset_state()
    run_outputs = [
        run_ir(0, FIRST_ENTRY_COUNT, fused_features[:, :FIRST_ENTRY_COUNT], both_states[:, :FIRST_ENTRY_COUNT])
    ]
    first_known_entry = FIRST_ENTRY_COUNT + UNROLLED_ENTRY_COUNT
    for end in range(FIRST_ENTRY_COUNT + 1, first_known_entry + 1):
        run_outputs.append(run_ir(end - 1, end, run_outputs[-1]["hidden"][:, -1:], both_states[:, :1]))
    run_outputs.append(
        run_ir(
            first_known_entry, len(tokens), fused_features[:, FIRST_ENTRY_COUNT:], both_states[:, FIRST_ENTRY_COUNT:]
        )
    )
    outputs = {name: np.concatenate([run[name] for run in run_outputs], 1) for name in run_outputs[0]}
    outputs["fused"] = fused_features
    return {name: np.concatenate((output[0], output[1, MISSING_ENTRY_COUNT:])) for name, output in outputs.items()}
