"""Run only the attention mask of an IR: a cheap way to find how far attention reaches, at any length."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ovspec.ir.compile import MODEL_FILE, CompiledIR, StateVariable, find_state_variables
from ovspec.ir.device import openvino_core

LONGEST_TESTED_MASK = 32768  # slots to test a mask at if the config has no context length
UNBOUNDED = sys.maxsize


def find_narrowest_window(ir: CompiledIR) -> int:
    """Return the number of slots the narrowest layer sees, by the config and by the IR's own attention mask."""
    return min(bound for bound in (ir.config.attention_window, find_exact_masking_limit(ir), UNBOUNDED) if bound)


def find_exact_masking_limit(ir: CompiledIR) -> int | None:
    """Return the number of slots up to which dead slots leave the visibility of live slots unchanged.

    0 if they always change it, UNBOUNDED if they never do, None if unknown.
    """
    try:
        mask_model = extract_mask_model(openvino_core().read_model(ir.folder / MODEL_FILE))
        if mask_model is None:
            return None
        mask_request = (
            openvino_core().compile_model(mask_model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
        )
        states = {state.name: state for state in ir.states}
        min_slots = 16
        max_slots = min(ir.context_length or LONGEST_TESTED_MASK, 4 * LONGEST_TESTED_MASK)
        if not hides_dead_slots(mask_request, states, min_slots):
            return 0
        if max_slots <= min_slots or hides_dead_slots(mask_request, states, max_slots):
            return UNBOUNDED
        bound = bisect_left(
            range(max_slots), True, min_slots, key=lambda slots: not hides_dead_slots(mask_request, states, slots)
        )
        return bound - 1
    except (RuntimeError, LookupError, ValueError):  # an unknown kind of attention mask
        return None


def extract_mask_model(model: ov.Model) -> ov.Model | None:
    """Return the attention masks of ``model`` as a separate model, or None if it has none. Takes ``model`` apart.

    States become inputs of the same name. Only their lengths are read, so heads may have size 1.
    """
    masks = {}
    for op in model.get_ops():
        if op.get_type_name() == "ScaledDotProductAttention" and op.get_input_size() > 3:
            source = op.input_value(3)
            masks[source.get_node().get_friendly_name(), source.get_index()] = source
    if not masks:
        return None
    parameters = list(model.get_parameters())
    recurrent = {state.name for state in find_state_variables(model) if state.sequence_axis is None}
    state_shapes = {variable.info.variable_id: variable.info.data_shape for variable in model.get_variables()}
    for op in model.get_ops():
        if op.get_type_name() == "ReadValue":
            state_name = op.get_variable_id()  # type: ignore[attr-defined]
            state_shape = state_shapes[state_name]
            if state_name not in recurrent:
                state_shape = ov.PartialShape([-1] * len(state_shape))
            state = ops.parameter(state_shape, op.output(0).get_element_type(), name=state_name)
            state.output(0).get_tensor().set_names({state_name})
            for reader in op.output(0).get_target_inputs():
                reader.replace_source_output(state.output(0))
            parameters.append(state)
    results = [ops.result(source) for source in masks.values()]
    sources = collect_ancestor_names(results)
    inputs = [parameter for parameter in parameters if parameter.get_friendly_name() in sources]
    return ov.Model(results, inputs, "attention_mask")  # type: ignore[misc]


def collect_ancestor_names(nodes: Sequence[ov.Node]) -> set[str]:
    """Return the names of ``nodes`` and of all their direct and indirect inputs."""
    node_names = set[str]()
    unvisited_nodes = list(nodes)
    while unvisited_nodes:
        node = unvisited_nodes.pop()
        if node.get_friendly_name() not in node_names:
            node_names.add(node.get_friendly_name())
            unvisited_nodes += [node.input_value(i).get_node() for i in range(node.get_input_size())]
    return node_names


def hides_dead_slots(request: ov.InferRequest, states: dict[str, StateVariable], slots: int) -> bool:
    """Return whether the last of ``slots`` slots sees the same live slots with and without four dead slots."""
    dead_slots = slice(slots - 6, slots - 2)
    live_flags = np.ones((1, slots), dtype=np.int64)
    live_flags[:, dead_slots] = 0
    masks_with_dead = compute_masks(request, states, live_flags)
    masks_without_dead = compute_masks(request, states, np.ones((1, slots - 4), dtype=np.int64))
    for mask, mask_without_dead in zip(masks_with_dead, masks_without_dead, strict=True):
        mask = np.delete(mask, np.arange(slots)[dead_slots], axis=-1)
        visible_slots = mask_without_dead > -1e30
        if not ((mask > -1e30) == visible_slots).all():
            return False
        # Softmax ignores a constant added to a whole row.
        shifted_mask = mask - mask[..., -1:]
        expected_mask = mask_without_dead - mask_without_dead[..., -1:]
        if not np.allclose(shifted_mask[visible_slots], expected_mask[visible_slots], atol=1e-3):
            return False
    return True


def compute_masks(
    request: ov.InferRequest, states: dict[str, StateVariable], live_flags: np.ndarray
) -> list[np.ndarray]:
    """Return the masks of a token after ``slots - 1`` others: (1, heads or 1, 1, slots) float64, hidden < -1e30."""
    slots = live_flags.shape[1]
    arrays_by_input: dict[str, np.ndarray] = {
        "input_ids": np.zeros((1, 1), dtype=np.int64),
        "attention_mask": live_flags,
        "position_ids": np.array([[live_flags.sum() - 1]], dtype=np.int64),
        "beam_idx": np.zeros(1, dtype=np.int32),
    }
    fed_arrays: dict[str, np.ndarray] = {}
    for port in request.model_inputs:
        name = port.get_any_name()
        if name not in arrays_by_input:
            shape = [1 if length.is_dynamic else length.get_length() for length in port.get_partial_shape()]
            if (axis := states[name].sequence_axis) is not None:
                shape[axis] = slots - 1
            arrays_by_input[name] = np.zeros(shape, dtype=port.get_element_type().to_dtype())
        fed_arrays[name] = arrays_by_input[name]
    masks = [np.asarray(mask) for mask in request.infer(fed_arrays).values()]
    return [as_additive_mask(mask) for mask in masks]


def as_additive_mask(mask: np.ndarray) -> np.ndarray:
    """Return a mask as float64 to add to the attention scores; a boolean mask hides where it is false."""
    return np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask.astype(np.float64)
