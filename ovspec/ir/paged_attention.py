"""OpenVINO's paged-attention rewrite of a stateful IR; afterwards the caller owns the blocks of the KV cache."""

from __future__ import annotations

import re
from collections.abc import Collection

import openvino as ov
from openvino import opset13 as ops

from ovspec.base.errors import OvspecError
from ovspec.ir.compile import last_error_line
from ovspec.ir.device import openvino_core

PAGED_INPUTS = (
    "input_ids", "position_ids", "past_lens", "subsequence_begins",
    "block_indices", "block_indices_begins", "max_context_len", "logits_idx", "hidden_states",
)  # fmt: skip
QUERY_INPUTS = ("query_tokens", "token_queries")  # added by ``allow_several_queries_per_token``
CACHE_INPUT = re.compile(r"(key|value)_cache\.\d+")  # names of the block inputs
SLIDING_WINDOW_INPUT = 10  # index of this input in the attention operation


class NotPaged(OvspecError):
    """The paged decoder can't run this model on this device, or with this version of OpenVINO; the message says why."""


def rewrite_to_paged(model: ov.Model, other_inputs: Collection[str] = ()) -> None:
    """Rewrite a stateful model in place; raise NotPaged if it fails or leaves inputs or states over.

    ``other_inputs``: names of further inputs, added by an earlier rewrite.
    """
    try:
        # Private to OpenVINO; imported only here.
        from openvino._offline_transformations import paged_attention_transformation
    except ImportError:
        raise NotPaged("this OpenVINO has no paged-attention transformation") from None
    try:
        paged_attention_transformation(model)
    except (RuntimeError, TypeError) as error:
        raise NotPaged(f"OpenVINO's transformation fails ({last_error_line(error)})") from None
    if any(op.get_type_name() == "ReadValue" for op in model.get_ops()):
        raise NotPaged("the model has states other than keys and values")
    known_names = {*PAGED_INPUTS, *other_inputs}
    unknown_inputs: list[str] = []
    input_names: set[str] = set()
    for port in model.inputs:
        known_port_names = {name for name in port.names if name in known_names or CACHE_INPUT.fullmatch(name)}
        if known_port_names:
            port.get_tensor().set_names(known_port_names)  # drops names of operations
        else:
            unknown_inputs.append(port.get_any_name())
        input_names |= known_port_names
    if unknown_inputs or not {"past_lens", "block_indices", "key_cache.0", "value_cache.0"} <= input_names:
        problem = ", ".join(sorted(unknown_inputs)) or "some are missing"
        raise NotPaged(f"OpenVINO's transformation produces wrong inputs ({problem})")


def allow_several_queries_per_token(model: ov.Model) -> None:
    """Let attention take several queries for a token; everything else computes the token once. Rewrites in place.

    Adds the inputs ``query_tokens`` [queries] i32, the token index of each query, and ``token_queries`` [tokens] i32,
    the query index for each token's result.
    """
    index_parameters = [ops.parameter([-1], ov.Type.i32, name=name) for name in QUERY_INPUTS]
    query_tokens, token_queries = index_parameters
    for parameter, name in zip(index_parameters, QUERY_INPUTS, strict=True):
        parameter.output(0).get_tensor().set_names({name})
    axis = ops.constant(0, dtype=ov.Type.i64)
    for layer in find_attention_operations(model):
        readers = list(layer.output(0).get_target_inputs())
        for input_index in range(3):  # queries, keys and values
            repeated_values = ops.gather(layer.input_value(input_index), query_tokens, axis)
            layer.input(input_index).replace_source_output(repeated_values.output(0))
        token_results = ops.gather(layer.output(0), token_queries, axis)
        for reader in readers:
            reader.replace_source_output(token_results.output(0))
    model.add_parameters(index_parameters)
    model.validate_nodes_and_infer_types()


def find_attention_operations(model: ov.Model) -> list[ov.Node]:
    """Return the attention operations of a rewritten model."""
    return [op for op in model.get_ops() if op.get_type_name() == "PagedAttentionExtension"]


def read_attention_windows(model: ov.Model) -> set[int | None]:
    """Return the sliding windows of a rewritten model's layers, in slots; None for full attention.

    Raises NotPaged if they are not constants.
    """
    try:
        results = [ops.result(layer.input_value(SLIDING_WINDOW_INPUT)) for layer in find_attention_operations(model)]
        window_model = ov.Model(results, [])  # type: ignore[misc]
        windows = openvino_core().compile_model(window_model, "CPU")([])
    except (RuntimeError, LookupError) as error:
        raise NotPaged(f"the model's attention windows cannot be determined ({last_error_line(error)})") from None
    return {int(window.item()) or None for window in windows.values()}
