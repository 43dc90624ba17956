"""OpenVINO's paged-attention rewrite of a stateful IR, after which the caller owns the blocks of the KV cache."""

from __future__ import annotations

import re

import openvino as ov
from openvino import opset13 as ops

from ovspec.errors import OvspecError
from ovspec.ir.compile import last_line
from ovspec.ir.device import core

INPUTS = (
    "input_ids", "position_ids", "past_lens", "subsequence_begins",
    "block_indices", "block_indices_begins", "max_context_len", "logits_idx",
)  # fmt: skip
CACHE = re.compile(r"(key|value)_cache\.\d+")  # names of the inputs that hold the blocks
SLIDING_WINDOW = 10  # index of this input of the attention operation


class NotPaged(OvspecError):
    """The paged decoder can't run this model, on this device or with this OpenVINO; the message says why."""


def to_paged(model: ov.Model) -> None:
    """Rewrite a stateful model in place; raise NotPaged if that fails or the result has inputs or states left over."""
    try:
        # Private to OpenVINO: this is the only place that imports it.
        from openvino._offline_transformations import paged_attention_transformation
    except ImportError:
        raise NotPaged("this OpenVINO has no paged-attention transformation") from None
    try:
        paged_attention_transformation(model)
    except (RuntimeError, TypeError) as error:
        raise NotPaged(f"OpenVINO's transformation fails ({last_line(error)})") from None
    if any(op.get_type_name() == "ReadValue" for op in model.get_ops()):
        raise NotPaged("it has states other than keys and values")
    names = {name for port in model.inputs for name in port.names}
    unknown = sorted(name for name in names if name not in INPUTS and not CACHE.fullmatch(name))
    if unknown or not {"past_lens", "block_indices", "key_cache.0", "value_cache.0"} <= names:
        raise NotPaged(f"OpenVINO's transformation gives wrong inputs ({', '.join(unknown) or 'some are missing'})")


def attention_windows(model: ov.Model) -> set[int | None]:
    """Return the sliding windows of a rewritten model's layers, in slots; None for a layer that sees everything.

    Raises NotPaged if they are not constants.
    """
    layers = [op for op in model.get_ops() if op.get_type_name() == "PagedAttentionExtension"]
    try:
        computed = ov.Model([ops.result(op.input_value(SLIDING_WINDOW)) for op in layers], [])  # type: ignore[misc]
        windows = core().compile_model(computed, "CPU")([])
    except (RuntimeError, LookupError) as error:
        raise NotPaged(f"its attention windows cannot be determined ({last_line(error)})") from None
    return {int(window.item()) or None for window in windows.values()}
