"""EAGLE-3 heads in torch, read from a checkpoint, and the conversion of heads to an IR.

The IR has the inputs ``input_ids`` [batch, new] (or ``inputs_embeds`` [batch, new, hidden] for a head without
embeddings), ``hidden_states`` [batch, new, hidden], ``attention_mask`` [batch, past + new], ``position_ids`` and
``beam_idx``, and the outputs ``logits`` [batch, new, draft vocabulary] and ``hidden`` [batch, new, hidden], the next
entry's feature. A separate branch computes ``fused`` [batch, new, hidden] from ``target_hidden_states`` [batch, new,
taps * width]. ``d2t`` [draft vocabulary] is constant: the target's id of token i is i + d2t[i].
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import openvino as ov
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb, repeat_kv

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_json
from ovspec.ir.compile import write_target_ids
from ovspec.ir.heads import FUSION_INPUT, FUSION_OUTPUT, HIDDEN_OUTPUT, TARGET_LAYERS_INFO
from ovspec_export.head_layout import HeadLayout, map_to_eagle_head_name, read_head_layout, read_rope_type
from ovspec_export.kept_export import read_kept_embedding
from ovspec_export.kept_weights import has_kept_weights
from ovspec_export.pickled import read_pickled_tensors

# Ends of the families' names for the token embedding.
EMBEDDING_NAMES = [[name, "weight"] for name in ("embed_tokens", "wte", "word_embeddings", "embed_in")]
KeyValueCache = tuple[Tensor, Tensor]  # keys and values, each [batch, KV heads, slots, head_dim]


class HeadModule(Protocol):
    """An EAGLE-3 head or an MTP layer.

    output_names: names of its outputs, without the extended cache after them.
    target_ids: the target's ids of the tokens it can propose, (n,) int64; None for all.
    """

    @property
    def layout(self) -> HeadLayout: ...

    @property
    def output_names(self) -> tuple[str, ...]: ...

    @property
    def embed_tokens(self) -> nn.Module | None: ...

    @property
    def target_ids(self) -> np.ndarray | None: ...

    def fuse_target_states(self, target_hidden_states: Tensor) -> Tensor: ...

    def make_empty_cache(self, batch: int = 1, slots: int = 0) -> KeyValueCache: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class HeadAttention(nn.Module):
    """Attention with queries, keys and values computed from an embedding and a feature, concatenated."""

    def __init__(self, layout: HeadLayout) -> None:
        super().__init__()
        self.layout = layout
        query_width = layout.head_count * layout.head_dim
        key_width = layout.kv_head_count * layout.head_dim
        self.q_proj = make_linear(layout, "layer.self_attn.q_proj", 2 * layout.hidden_size, query_width)
        self.k_proj = make_linear(layout, "layer.self_attn.k_proj", 2 * layout.hidden_size, key_width)
        self.v_proj = make_linear(layout, "layer.self_attn.v_proj", 2 * layout.hidden_size, key_width)
        self.o_proj = make_linear(layout, "layer.self_attn.o_proj", query_width, layout.hidden_size)
        self.q_norm, self.k_norm = (
            LlamaRMSNorm(layout.head_dim, layout.norm_epsilon) if layout.qk_norm else nn.Identity() for _ in "qk"
        )

    def forward(
        self, states: Tensor, mask: Tensor, cosines_and_sines: KeyValueCache, past: KeyValueCache
    ) -> tuple[Tensor, KeyValueCache]:
        """Return the attended states, and the cache extended by the new keys and values."""
        shape = (*states.shape[:2], -1, self.layout.head_dim)
        queries = self.q_norm(self.q_proj(states).view(shape)).transpose(1, 2)
        keys = self.k_norm(self.k_proj(states).view(shape)).transpose(1, 2)
        values = self.v_proj(states).view(shape).transpose(1, 2)
        queries, keys = apply_rotary_pos_emb(queries, keys, *cosines_and_sines)
        keys = torch.cat((past[0], keys), 2)
        values = torch.cat((past[1], values), 2)
        repeat_count = self.layout.head_count // self.layout.kv_head_count
        attended = scaled_dot_product_attention(
            queries, repeat_kv(keys, repeat_count), repeat_kv(values, repeat_count), mask
        )
        return self.o_proj(attended.transpose(1, 2).reshape(*states.shape[:2], -1)), (keys, values)


class GatedMLP(nn.Module):
    """The gated MLP of a decoder layer."""

    def __init__(self, layout: HeadLayout) -> None:
        super().__init__()
        self.gate_proj = make_linear(layout, "layer.mlp.gate_proj", layout.hidden_size, layout.intermediate_size)
        self.up_proj = make_linear(layout, "layer.mlp.up_proj", layout.hidden_size, layout.intermediate_size)
        self.down_proj = make_linear(layout, "layer.mlp.down_proj", layout.intermediate_size, layout.hidden_size)
        self.activation = ACT2FN[layout.activation]

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(states)) * self.up_proj(states))


class HeadLayer(nn.Module):
    """The decoder layer of a head."""

    def __init__(self, layout: HeadLayout) -> None:
        super().__init__()
        self.layout = layout
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(layout.hidden_size, layout.norm_epsilon) for _ in range(3)
        )
        self.self_attn = HeadAttention(layout)
        self.mlp = GatedMLP(layout)

    def forward(
        self, embedded: Tensor, features: Tensor, mask: Tensor, rotary: KeyValueCache, past: KeyValueCache
    ) -> tuple[Tensor, KeyValueCache]:
        normalized_features = self.hidden_norm(features)
        residual = normalized_features if self.layout.norm_before_residual else features
        attended, cache = self.self_attn(
            torch.cat((self.input_layernorm(embedded), normalized_features), -1), mask, rotary, past
        )
        states = residual + attended
        return states + self.mlp(self.post_attention_layernorm(states)), cache


class EagleHead(nn.Module):
    """An EAGLE-3 head. Without an embedding of its own, it uses the target's as ``embed_tokens``."""

    output_names: tuple[str, ...] = ("logits", HIDDEN_OUTPUT, FUSION_OUTPUT)

    def __init__(self, layout: HeadLayout) -> None:
        super().__init__()
        self.layout = layout
        epsilon = layout.norm_epsilon
        states_width = layout.tap_count * layout.target_hidden_size
        self.embed_tokens = nn.Embedding(layout.vocab_size, layout.hidden_size) if layout.has_own_embedding else None
        self.input_norm = LlamaRMSNorm(states_width, epsilon) if layout.fused_norm == "before_fc" else None
        norm_count = layout.tap_count * (layout.fused_norm == "fc")
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(layout.target_hidden_size, epsilon) for _ in range(norm_count))
        self.fc = make_linear(layout, "fc", states_width, layout.hidden_size)
        self.layer = HeadLayer(layout)
        self.norm = LlamaRMSNorm(layout.hidden_size, epsilon)
        self.lm_head = make_linear(layout, "lm_head", layout.hidden_size, layout.draft_vocab_size)
        self.rotary = LlamaRotaryEmbedding(make_rotary_config(layout))
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(layout.draft_vocab_size, dtype=torch.int64), persistent=False)

    @property
    def target_ids(self) -> np.ndarray:
        """The target's ids of the tokens it can propose, (n,) int64."""
        return self.d2t.numpy() + np.arange(len(self.d2t))

    def fuse_target_states(self, target_hidden_states: Tensor) -> Tensor:
        """Return features [batch, new, hidden] from the concatenated inputs of the target's layers."""
        states = target_hidden_states if self.input_norm is None else self.input_norm(target_hidden_states)
        if self.fc_norm:
            layer_states = states.chunk(self.layout.tap_count, -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, layer_states, strict=True)], -1)
        return self.fc(states)

    def run_layer(
        self, embedded: Tensor, features: Tensor, mask: Tensor, position_ids: Tensor, past: KeyValueCache
    ) -> tuple[Tensor, KeyValueCache]:
        """Return the layer's output [batch, new, hidden] and the extended cache.

        mask: added to the attention's scores, [batch, 1, new, past + new].
        """
        return self.layer(embedded, features, mask, self.rotary(embedded, position_ids), past)

    def compute_next_features(self, states: Tensor) -> Tensor:
        """Return the features of the next entries, in place of features of the target."""
        return self.norm(states) if self.layout.norm_output else states

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return the logits [batch, new, draft vocabulary] of the layer's output."""
        return self.lm_head(self.norm(states) if self.layout.norm_before_head else states)

    def make_empty_cache(self, batch: int = 1, slots: int = 0) -> KeyValueCache:
        shape = (batch, self.layout.kv_head_count, slots, self.layout.head_dim)
        return torch.zeros(shape), torch.zeros(shape)

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        target_hidden_states: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return logits, the next features, the output of ``fuse_target_states``, and the extended cache, like the IR.

        tokens: ids, or embeddings if the head has no embedding.
        """
        embedded = tokens if self.embed_tokens is None else self.embed_tokens(tokens)
        mask = make_causal_mask(attention_mask, position_ids.shape[1])
        states, cache = self.run_layer(embedded, features, mask, position_ids, (key, value))
        outputs = (self.compute_logits(states), self.compute_next_features(states))
        return *outputs, self.fuse_target_states(target_hidden_states), *cache


def make_linear(layout: HeadLayout, name: str, input_width: int, output_width: int) -> nn.Linear:
    return nn.Linear(input_width, output_width, bias=name in layout.biased_layers)


def make_causal_mask(attention_mask: Tensor, new_count: int) -> Tensor:
    """Return the mask to add to the last ``new_count`` slots' scores, [batch, 1, new, slots]; dead slots have a 0."""
    slots = torch.arange(attention_mask.shape[1])
    is_before = slots[None] <= slots[-new_count:, None]
    is_visible = is_before[None, None] & (attention_mask[:, None, None] > 0)
    return torch.where(is_visible, torch.zeros(()), torch.full((), torch.finfo(torch.float32).min))


def make_rotary_config(layout: HeadLayout) -> LlamaConfig:
    """Return a config with the entries for transformers' rotary embedding; head_dim is the only size."""
    config_entries = dict(layout.rope_config)
    for name in ("rope_scaling", "rope_parameters"):
        if name in config_entries:
            config_entries[name] = {**config_entries[name], "rope_type": read_rope_type(config_entries[name])}
    config_entries |= {"hidden_size": layout.head_count * layout.head_dim, "num_attention_heads": layout.head_count}
    config_entries |= {"head_dim": layout.head_dim}
    return LlamaConfig(**config_entries)


def load_head_checkpoint(folder: Path, name: str = "", embedding: Tensor | None = None) -> EagleHead:
    """Return the head of a checkpoint, with weights in f32. embedding: the target's.

    An embedding equal to the target's, to the bit, is left out. A head without an lm_head gets its tokens' rows of the
    embedding.
    """
    stored_tensors = read_checkpoint_tensors(folder)
    shapes = {stored_name: list(tensor.shape) for stored_name, tensor in stored_tensors.items()}
    layout = read_head_layout(read_json(folder / "config.json"), shapes, name or folder.name)
    tensors = {map_to_eagle_head_name(stored_name): tensor for stored_name, tensor in stored_tensors.items()}
    own_embedding = tensors.get("embed_tokens.weight")
    if own_embedding is not None and embedding is not None and have_equal_values(own_embedding, embedding):
        layout = dataclasses.replace(layout, has_own_embedding=False)
        own_embedding = None
    with torch.device("meta"):
        head = EagleHead(layout)
    head.rotary = LlamaRotaryEmbedding(make_rotary_config(layout))
    if "d2t" in tensors:
        head.d2t = tensors["d2t"].long()
    else:
        head.d2t = torch.zeros(layout.draft_vocab_size, dtype=torch.int64)
    if not layout.has_own_lm_head:
        embedding_rows = embedding if own_embedding is None else own_embedding
        if embedding_rows is None:
            raise OvspecError(
                f"{name}: the head has neither an lm_head nor an embedding to use instead; download the head again."
            )
        tensors["lm_head.weight"] = embedding_rows[torch.arange(layout.draft_vocab_size) + head.d2t]
    weights = {tensor: tensors[tensor].float() for tensor in (*layout.tensor_shapes(), "lm_head.weight")}
    head.load_state_dict(weights, assign=True)
    return head.eval().requires_grad_(False)


def have_equal_values(matrix: Tensor, other_matrix: Tensor) -> bool:
    """Return whether two matrices have the same values, whatever their types."""
    if matrix.shape != other_matrix.shape:
        return False
    blocks = zip(matrix.split(4096), other_matrix.split(4096), strict=True)
    return all(torch.equal(block.float(), other_block.float()) for block, other_block in blocks)


def read_target_embedding(folder: Path) -> Tensor | None:
    """Return a checkpoint's token embedding, or None if it has none under a common name."""
    from safetensors import safe_open

    if has_kept_weights(folder):
        return torch.from_numpy(read_kept_embedding(folder))
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for tensor_name in tensors.keys():  # noqa: SIM118
                if tensor_name.split(".")[-2:] in EMBEDDING_NAMES:
                    return tensors.get_tensor(tensor_name)
    return None


def read_checkpoint_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, from safetensors, or else from pickled files, without running their code."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("model*.safetensors"))
    if files:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    pickled_files = sorted(folder.glob("pytorch_model*.bin"))
    return {name: tensor for file in pickled_files for name, tensor in read_pickled_tensors(file).items()}


def convert_head_to_ir(head: HeadModule, tap_layers: list[int]) -> ov.Model:
    """Return a head as a stateful model.

    tap_layers: the target layers whose inputs it reads; empty for the lm_head's input.
    """
    from optimum.exporters.openvino.stateful import patch_stateful_decoder

    layout = head.layout
    batch_size, new_count, past_count = 2, 3, 2
    ids = torch.zeros((batch_size, new_count), dtype=torch.int64)
    features = torch.zeros((batch_size, new_count, layout.hidden_size))
    target_states = torch.zeros((batch_size, new_count, layout.tap_count * layout.target_hidden_size))
    tokens = features
    tokens_input = {"inputs_embeds": [-1, -1, layout.hidden_size]}
    if head.embed_tokens is not None:
        tokens = ids
        tokens_input = {"input_ids": [-1, -1]}
    attention_mask = torch.ones((batch_size, past_count + new_count), dtype=torch.int64)
    example_inputs = (
        tokens,
        features,
        attention_mask,
        ids,
        target_states,
        *head.make_empty_cache(batch_size, past_count),
    )
    with torch.no_grad():
        model = ov.convert_model(head, example_input=example_inputs)
    cache_shape = [-1, layout.kv_head_count, -1, layout.head_dim]
    input_shapes = {
        **tokens_input,
        "hidden_states": [-1, -1, layout.hidden_size],
        "attention_mask": [-1, -1],
        "position_ids": [-1, -1],
        FUSION_INPUT: [-1, -1, layout.tap_count * layout.target_hidden_size],
        "past_key_values.0.key": cache_shape,
        "past_key_values.0.value": cache_shape,
    }
    for port, (name, shape) in zip(model.inputs, input_shapes.items(), strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        port.get_node().set_partial_shape(ov.PartialShape(shape))  # type: ignore[attr-defined]
    output_names = (*head.output_names, "present.0.key", "present.0.value")
    for port, name in zip(model.outputs, output_names, strict=True):
        # In MTP, the tensor with the target's states is an input and an output, and so has two names.
        port.get_tensor().set_names({name} | {FUSION_INPUT} & port.get_names())
    if head.target_ids is not None:
        write_target_ids(model, head.target_ids)
    model.validate_nodes_and_infer_types()
    patch_stateful_decoder(LlamaConfig(), model)
    model.set_rt_info(tap_layers, TARGET_LAYERS_INFO)
    if tap_layers:
        model.set_rt_info(True, ["eagle3_mode"])
    return model
