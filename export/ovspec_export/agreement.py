"""Check that an IR computes what its checkpoint computes, before its weights are compressed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.cache.decoder import Rollback
from ovspec.cache.stateful import RowByRowDecoder, StatefulDecoder
from ovspec.ir.compile import CompiledIR, compile_ir
from ovspec.ir.device import DeviceOptions

SHORTEST_TEXT, LONGEST_TEXT = 48, 320  # tokens of the text; it is longer than a window, if that is possible
MOST_SINGLE_STEPS = 8  # tokens at the end of the text that are fed one by one
# Largest difference, as a share of the standard deviation of a position's logits. Weights in 16 bits, which some parts
# of a model round again, differ by 0.001 to 0.02, and another computation by 0.3 and more.
LOGITS_TOLERANCE = 0.1
REPORT_ADVICE = "a wrong IR is not kept, so please report the name of this model to ovspec"
TIED_SHARE = 0.1  # share of the positions that may differ by more: where two experts tie, rounding chooses


def check_agreement(model: Any, folder: Path, tolerance: float = LOGITS_TOLERANCE) -> None:
    """Raise OvspecError if the IR in ``folder`` computes other logits than ``model``, a transformers model.

    Both compute in f32: a text alone, and its first two thirds beside it in a ragged batch. Its last tokens are fed
    one by one, so that the cache is used. The model's weights are converted, and can't be used otherwise after that.
    """
    ir = compile_ir(folder, DeviceOptions(precision="f32", properties={"CACHE_DIR": ""}))
    text = draw_token_ids(ir)
    short = text[: 2 * len(text) // 3]
    compute_in_f32(model)
    expected = [compute_checkpoint_logits(model, tokens, ir.logits_width) for tokens in (text, short)]
    for rows, where in (([text], "than the checkpoint"), ([text, short], "in a batch")):
        apart = measure_difference(compute_ir_logits(ir, rows), expected[: len(rows)])
        if apart > tolerance:
            told = f"the IR computes other logits {where}: they differ by {apart:.2g} of their spread"
            raise OvspecError(f"{told}; {REPORT_ADVICE}")


def draw_token_ids(ir: CompiledIR) -> np.ndarray:
    """Return random ids, longer than the narrowest attention window if that is short, (n,) int64."""
    window = ir.config.attention_window or 0
    length = window + SHORTEST_TEXT if window + SHORTEST_TEXT <= LONGEST_TEXT else SHORTEST_TEXT
    return np.random.default_rng(0).integers(0, ir.logits_width, min(length, ir.context_length or length))


def compute_ir_logits(ir: CompiledIR, rows: list[np.ndarray]) -> list[np.ndarray]:
    """Return the logits of every position of each row, (n, vocab) float32, computed as a batch."""

    def make_decoder() -> StatefulDecoder:
        return StatefulDecoder(ir, Rollback("trim" if ir.kv_states else None, replay=bool(ir.recurrent_states)))

    decoder = RowByRowDecoder(make_decoder) if ir.needs_single_rows else make_decoder()
    decoder.reset(len(rows))
    steps = count_single_steps(rows[-1])
    pieces = [[row[:-steps] for row in rows]] + [[row[n : n + 1 or None] for row in rows] for n in range(-steps, 0)]
    fed = [[logits.copy() for logits in decoder.feed(new, [len(row) for row in new])] for new in pieces]
    return [np.concatenate(of_row) for of_row in zip(*fed, strict=True)]


def count_single_steps(tokens: np.ndarray) -> int:
    """Return how many tokens at the end of a text are fed one by one."""
    return min(MOST_SINGLE_STEPS, len(tokens) // 2)


def compute_checkpoint_logits(model: Any, tokens: np.ndarray, width: int) -> np.ndarray:
    """Return the checkpoint's logits of every position, (n, vocab) float32."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens[None])).logits[0, :, :width].float().numpy()


def save_hidden_states(model: Any, layers: list[int], file: Path) -> None:
    """Write what these layers of a transformers model read of a short text, (positions, width) each, side by side.

    Writes nothing if the model doesn't tell.
    """
    import torch

    tokens = np.random.default_rng(0).integers(0, model.get_input_embeddings().weight.shape[0], SHORTEST_TEXT)
    with torch.no_grad():
        states = model(input_ids=torch.from_numpy(tokens[None]), output_hidden_states=True).hidden_states
    if states and all(states[layer].ndim == 3 for layer in layers):
        np.save(file, np.concatenate([states[layer][0].float().numpy() for layer in layers], 1))


def measure_difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Return by how much positions differ: the root mean square over the logits, in standard deviations of them.

    Of all but ``EXCEPT`` of the positions, it is the largest, of those read at once and of those read one by one;
    infinity for logits that are not numbers.
    """
    steps = count_single_steps(ours[-1])
    found = [np.sqrt(np.square(a - b).mean(-1)) / (b.std(-1) + 1e-30) for a, b in zip(ours, theirs, strict=True)]
    parts = [np.nan_to_num(part, nan=np.inf) for row in found for part in (row[:-steps], row[-steps:])]
    return max(float(np.quantile(part, 1 - TIED_SHARE, method="lower")) for part in parts)


def compute_in_f32(model: Any) -> None:
    """Let a model with weights in 16 bits compute in f32: each layer's weights are converted while it is computed."""
    import torch

    layers = [layer for layers in find_outermost_modules(model, torch.nn.ModuleList) for layer in layers]
    inside = {id(weights) for layer in layers for weights in (*layer.parameters(), *layer.buffers())}
    for weights in (*model.parameters(), *model.buffers()):
        if id(weights) not in inside and weights.is_floating_point():
            weights.data = weights.data.float()
    for layer in layers:
        stored = {weights: weights.data for weights in layer.parameters() if weights.is_floating_point()}
        for buffer in layer.buffers():
            buffer.data = buffer.data.float() if buffer.is_floating_point() else buffer.data
        layer.register_forward_pre_hook(functools.partial(set_weight_data, stored, torch.Tensor.float))
        layer.register_forward_hook(functools.partial(set_weight_data, stored, lambda data: data))


def set_weight_data(stored: dict[Any, Any], converted: Callable[[Any], Any], *_: Any) -> None:
    for weights, data in stored.items():
        weights.data = converted(data)


def find_outermost_modules(module: Any, kind: type) -> list[Any]:
    """Return the modules of a kind that are not inside another of that kind."""
    if isinstance(module, kind):
        return [module]
    return [found for child in module.children() for found in find_outermost_modules(child, kind)]
