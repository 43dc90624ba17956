"""Check that an IR computes the same logits as its checkpoint, before its weights are compressed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.cache.decoder import RollbackMethod
from ovspec.cache.stateful import RowByRowDecoder, StatefulDecoder
from ovspec.ir.compile import CompiledIR, compile_ir
from ovspec.ir.device import DeviceOptions

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, ModuleList
    from transformers import PreTrainedModel

SHORTEST_TEXT_TOKENS, LONGEST_TEXT_TOKENS = (
    48,
    320,
)  # length of the text in tokens; longer than a window, if possible
MAX_SINGLE_TOKEN_STEPS = 8  # tokens at the end of the text, fed one by one
# Largest allowed difference, as a share of the standard deviation of a position's logits. If a model rounds 16-bit
# weights again in some parts, logits differ by 0.001 to 0.02; a wrong computation makes 0.3 and more.
LOGITS_TOLERANCE = 0.1
TIED_POSITION_SHARE = 0.1  # share of positions allowed to differ by more: rounding decides between tied experts


def check_ir_agrees_with_model(model: PreTrainedModel, folder: Path, tolerance: float = LOGITS_TOLERANCE) -> None:
    """Raise OvspecError if the IR in ``folder`` computes other logits than ``model``.

    Both compute in f32: a text alone, and in a ragged batch with its first two thirds. The last tokens are fed singly,
    to test the cache. The model's weights are converted, so the model is unusable afterwards.
    """
    # With integer weights, OpenVINO would round the other factor of a product.
    properties = {"CACHE_DIR": "", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    ir = compile_ir(folder, DeviceOptions(precision="f32", properties=properties))
    text_ids = draw_token_ids(ir)
    shortened_ids = text_ids[: 2 * len(text_ids) // 3]
    enable_f32_computation(model)
    text_logits = compute_checkpoint_logits(model, text_ids, ir.logits_width)
    checkpoint_logits = [text_logits, text_logits[: len(shortened_ids)]]  # no token sees a later token
    for texts, circumstance in (([text_ids], "for a text"), ([text_ids, shortened_ids], "in a batch")):
        difference = measure_difference(compute_ir_logits(ir, texts), checkpoint_logits[: len(texts)])
        if difference > tolerance:
            raise OvspecError(
                f"the exported model's logits {circumstance} differ from the checkpoint's by {difference:.2g} standard "
                f"deviations, more than {tolerance:.2g}, so the export was deleted; report this bug to ovspec"
            )


def draw_token_ids(ir: CompiledIR) -> np.ndarray:
    """Return random ids, longer than the narrowest attention window if the window is short, (n,) int64."""
    text_length = SHORTEST_TEXT_TOKENS + (ir.config.attention_window or 0)
    if text_length > LONGEST_TEXT_TOKENS:
        text_length = SHORTEST_TEXT_TOKENS
    return np.random.default_rng(0).integers(0, ir.logits_width, min(text_length, ir.context_length or text_length))


def compute_ir_logits(ir: CompiledIR, rows: list[np.ndarray]) -> list[np.ndarray]:
    """Return the logits of every position, (n, vocab) float32, for each row of a batch."""

    def make_decoder() -> StatefulDecoder:
        return StatefulDecoder(ir, RollbackMethod("trim" if ir.kv_states else None, replay=bool(ir.recurrent_states)))

    decoder = RowByRowDecoder(make_decoder) if ir.needs_single_rows else make_decoder()
    decoder.reset(len(rows))
    single_steps = count_tokens_fed_singly(rows[-1])
    fed_batches = [[row[:-single_steps] for row in rows]] + [
        [row[n : n + 1 or None] for row in rows] for n in range(-single_steps, 0)
    ]
    logits = [[row.copy() for row in decoder.feed(tokens, [len(row) for row in tokens])] for tokens in fed_batches]
    return [np.concatenate(row_logits) for row_logits in zip(*logits, strict=True)]


def count_tokens_fed_singly(tokens: np.ndarray) -> int:
    """Return the number of tokens at the end of a text to feed singly."""
    return min(MAX_SINGLE_TOKEN_STEPS, len(tokens) // 2)


def compute_checkpoint_logits(model: PreTrainedModel, tokens: np.ndarray, width: int) -> np.ndarray:
    """Return the checkpoint's logits of every position, (n, width) float32."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens[None])).logits[0, :, :width].float().numpy()


def save_hidden_states(model: PreTrainedModel, layers: list[int], file: Path) -> None:
    """Write the inputs of these layers for a short text, (positions, width) each, concatenated.

    Without layers, write the lm_head's input: transformers' last hidden states, which are normalised. Nothing is
    written if the model doesn't return hidden states.
    """
    import torch

    embedding = next(model.get_input_embeddings().parameters())
    tokens = np.random.default_rng(0).integers(0, embedding.shape[0], SHORTEST_TEXT_TOKENS)
    with torch.no_grad():
        hidden_states = model(input_ids=torch.from_numpy(tokens[None]), output_hidden_states=True).hidden_states
    layers = layers or [-1]
    if hidden_states and all(hidden_states[layer].ndim == 3 for layer in layers):
        np.save(file, np.concatenate([hidden_states[layer][0].float().numpy() for layer in layers], 1))


def measure_difference(ir_logits: list[np.ndarray], checkpoint_logits: list[np.ndarray]) -> float:
    """Return the difference of positions: the root mean square over the logits, in their standard deviations.

    It is the largest over all but ``TIED_POSITION_SHARE`` of the positions, both for positions read at once and for
    positions read singly; infinity for NaN logits.
    """
    single_steps = count_tokens_fed_singly(ir_logits[-1])
    pairs = zip(ir_logits, checkpoint_logits, strict=True)
    position_differences = [np.sqrt(np.square(a - b).mean(-1)) / (b.std(-1) + 1e-30) for a, b in pairs]
    difference_groups = [
        np.nan_to_num(part, nan=np.inf)
        for text_differences in position_differences
        for part in (text_differences[:-single_steps], text_differences[-single_steps:])
    ]
    return max(float(np.quantile(part, 1 - TIED_POSITION_SHARE, method="lower")) for part in difference_groups)


def enable_f32_computation(model: Module) -> None:
    """Make a model with weights in 16 bits compute in f32: each layer's weights are converted while it runs."""
    import torch

    layers = [layer for module_list in find_module_lists(model) for layer in module_list]
    layer_weights = {id(weights) for layer in layers for weights in (*layer.parameters(), *layer.buffers())}
    for weights in (*model.parameters(), *model.buffers()):
        if id(weights) not in layer_weights and weights.is_floating_point():
            weights.data = weights.data.float()
    for layer in layers:
        stored_data: dict[Tensor, Tensor] = {
            weights: weights.data for weights in layer.parameters() if weights.is_floating_point()
        }
        for buffer in layer.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.float()
        layer.register_forward_pre_hook(functools.partial(set_weight_data, stored_data, torch.Tensor.float))
        layer.register_forward_hook(functools.partial(set_weight_data, stored_data, lambda data: data))


def set_weight_data(stored_data: dict[Tensor, Tensor], convert_data: Callable[[Tensor], Tensor], *_: Any) -> None:
    """Set each weight to its stored data, converted. The other arguments are for torch's hooks."""
    for weights, data in stored_data.items():
        weights.data = convert_data(data)


def find_module_lists(module: Module) -> list[ModuleList]:
    """Return the outermost lists of modules."""
    from torch import nn

    if isinstance(module, nn.ModuleList):
        return [module]
    return [module_list for child in module.children() for module_list in find_module_lists(child)]
