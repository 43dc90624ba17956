"""MTP layers in torch, with the interface of ``EagleHead``: read from a checkpoint, or new.

The decoder layer, its norms and its rotary embedding are transformers' own for the target's family.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ovspec.base.errors import OvspecError
from ovspec.base.files import open_replacement, read_json, write_atomically
from ovspec.base.json_types import JsonObject
from ovspec.ir.heads import FUSION_OUTPUT, HIDDEN_OUTPUT
from ovspec_export.head_layout import HeadLayout
from ovspec_export.heads import KeyValueCache, make_causal_mask
from ovspec_export.mtp_layout import LAYER_PREFIX, MTP_ARCHITECTURE, QWEN_NAMES, find_mtp_layers, make_layer_config

UNUSED_VOCAB_SIZE = 8  # of the embedding and the lm_head made by transformers along with the layer
OWN_PARTS = ("fc.", "embedding_norm.", "feature_norm.")  # not made by transformers


class AppendingCache:
    """A layer's cache with transformers' interface: new keys and values are appended."""

    def __init__(self, cache: KeyValueCache) -> None:
        self.keys, self.values = cache

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> KeyValueCache:
        self.keys = torch.cat((self.keys, keys), 2)
        self.values = torch.cat((self.values, values), 2)
        return self.keys, self.values

    def get_seq_length(self, *_: Any) -> int:
        return self.keys.shape[2]


class MtpLayer(nn.Module):
    """A layer for multi-token prediction. Its logits come from the target's lm_head.

    model: a model of transformers with this layer as its only layer.
    target_ids: the ids of the tokens it can propose, (n,) int64; None for all.
    lm_head: the target's rows for these tokens, in training.
    """

    output_names: tuple[str, ...] = (HIDDEN_OUTPUT, FUSION_OUTPUT)
    embed_tokens: nn.Module | None = None
    lm_head: nn.Linear

    def __init__(self, model: Any, target_ids: np.ndarray | None = None) -> None:
        super().__init__()
        self.target_ids = target_ids
        self.layer = model.model.layers[0]
        self.norm = model.model.norm
        self.rotary = model.model.rotary_emb
        self.layout = make_layout(model.config, self.layer)
        width = self.layout.hidden_size
        self.embedding_norm, self.feature_norm = (copy.deepcopy(self.norm) for _ in range(2))
        self.fc = nn.Linear(2 * width, width, bias=False)

    def fuse_target_states(self, target_hidden_states: Tensor) -> Tensor:
        """Return the features: the input of the target's lm_head, unchanged."""
        return target_hidden_states

    def run_layer(
        self, embedded: Tensor, features: Tensor, mask: Tensor, position_ids: Tensor, past: KeyValueCache
    ) -> tuple[Tensor, KeyValueCache]:
        """Return the layer's output [batch, new, hidden] and the extended cache.

        mask: added to the attention's scores, [batch, 1, new, past + new].
        """
        states = self.fc(torch.cat((self.embedding_norm(embedded), self.feature_norm(features)), -1))
        cache = AppendingCache(past)
        states = self.layer(
            states,
            position_embeddings=self.rotary(states, position_ids),
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        return states[0] if isinstance(states, tuple) else states, (cache.keys, cache.values)

    def compute_next_features(self, states: Tensor) -> Tensor:
        """Return the features of the next entries, which are also the input of the target's lm_head."""
        return self.norm(states)

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return the logits [batch, new, draft vocabulary] of the layer's output."""
        return self.lm_head(self.norm(states))

    def make_empty_cache(self, batch: int = 1, slots: int = 0) -> KeyValueCache:
        shape = (batch, self.layout.kv_head_count, slots, self.layout.head_dim)
        return torch.zeros(shape), torch.zeros(shape)

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        target_hidden_states: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the next features, the output of ``fuse_target_states``, and the extended cache, like the IR."""
        mask = make_causal_mask(attention_mask, position_ids.shape[1])
        states, cache = self.run_layer(embedded, features, mask, position_ids, (key, value))
        return self.compute_next_features(states), self.fuse_target_states(target_hidden_states), *cache


def make_layout(config: Any, layer: nn.Module) -> HeadLayout:
    """Return the sizes of the MTP layer of a target with this config of transformers."""
    head_dim = layer.self_attn.head_dim  # type: ignore[union-attr]
    return HeadLayout(
        hidden_size=config.hidden_size,
        intermediate_size=0,  # not needed: transformers makes the layer
        head_count=config.num_attention_heads,
        kv_head_count=config.num_key_value_heads,
        head_dim=int(head_dim),  # type: ignore[arg-type]
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size,
        tap_count=1,
        target_hidden_size=config.hidden_size,
        norm_output=True,
        has_own_embedding=False,
        has_own_lm_head=False,
    )


def count_mtp_layers(folder: Path) -> int:
    """Return the number of MTP layers of the checkpoint in ``folder``."""
    return len(find_mtp_layers(find_tensor_files(folder), read_json(folder / "config.json")))


def load_mtp_layer(folder: Path, name: str, depth: int = 0, **loading_options: Any) -> tuple[MtpLayer, Any]:
    """Return an MTP layer of the checkpoint in ``folder``, with weights in f32, and the model around it.

    depth: number of layers before it. loading_options: of ``from_pretrained``.

    Raises:
        OvspecError: a tensor is missing, or is unknown.
    """
    config = read_json(folder / "config.json")
    tensor_files = find_tensor_files(folder)
    new_names = find_mtp_layers(tensor_files, config)[depth]
    tensors = {
        new_names[old_name]: tensor
        for old_name, tensor in read_tensors({old_name: tensor_files[old_name] for old_name in new_names}).items()
    }
    own_names = [new_name for new_name in tensors if not new_name.startswith((LAYER_PREFIX, "norm."))]
    own_tensors = {new_name: tensors.pop(new_name).float() for new_name in own_names}
    model = load_only_layer(config, tensors, name, loading_options)
    layer = MtpLayer(model)
    try:
        missing_names, unknown_names = layer.load_state_dict(own_tensors, strict=False)
    except RuntimeError as error:
        raise OvspecError(
            f"{name}: its MTP layer has a tensor of the wrong shape ({str(error).splitlines()[-1].strip()}); "
            "download the model again."
        ) from None
    missing_names = [missing_name for missing_name in missing_names if missing_name.startswith(OWN_PARTS)]
    if missing_names or unknown_names:
        problem = (
            f"lacks the tensor {missing_names[0]}" if missing_names else f"has the unknown tensor {unknown_names[0]}"
        )
        raise OvspecError(f"{name}: its MTP layer {problem}; download the model again.")
    return layer.eval().requires_grad_(False), model


def load_only_layer(config: JsonObject, tensors: Mapping[str, Tensor], name: str, loading_options: JsonObject) -> Any:
    """Return a model of transformers with a single layer and its norm, from tensors with this package's names."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        write_layer_config(config, Path(folder))
        inner_names = {
            tensor_name: "model." + tensor_name.replace(LAYER_PREFIX, "layers.0.", 1) for tensor_name in tensors
        }
        save_file(
            {inner_names[tensor_name]: tensor for tensor_name, tensor in tensors.items()},
            f"{folder}/model.safetensors",
            {"format": "pt"},
        )
        load: Any = AutoModelForCausalLM.from_pretrained  # returns a pair with this option
        model, loading_info = load(
            folder,
            dtype=torch.float32,
            attn_implementation="sdpa",
            use_safetensors=True,
            output_loading_info=True,
            **loading_options,
        )
    missing_names = [key for key in loading_info["missing_keys"] if "embed_tokens" not in key and "lm_head" not in key]
    wrong_names = [*missing_names, *(str(key[0]) for key in loading_info["mismatched_keys"])]
    if wrong_names:
        raise OvspecError(
            f"{name}: its MTP layer lacks the tensor {min(wrong_names)}, or has a wrong shape for it; download "
            "the model again."
        )
    if unknown_names := loading_info["unexpected_keys"]:
        raise OvspecError(
            f"{name}: its MTP layer has the unknown tensor {min(unknown_names)}; download the model again."
        )
    return model.eval()


def make_new_mtp_layer(config: JsonObject) -> MtpLayer:
    """Return an untrained MTP layer for a target with this config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        write_layer_config(config, Path(folder))
        model_config = AutoConfig.from_pretrained(folder)
    return MtpLayer(AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa").float())


def write_layer_config(config: JsonObject, folder: Path) -> None:
    """Write the config of the layer alone, with a tiny vocabulary, because its embedding is unused."""
    token_entries = {name: None for name in config if name.endswith("_token_id")}
    layer_config = make_layer_config(config) | token_entries | {"vocab_size": UNUSED_VOCAB_SIZE}
    (folder / "config.json").write_text(json.dumps(layer_config), encoding="utf-8", newline="\n")


def save_mtp_layer(layer: MtpLayer, config: JsonObject, folder: Path) -> None:
    """Write an MTP layer in bf16 as a separate checkpoint, with Qwen's names. config: the target's."""
    old_prefixes = {new_prefix: old_prefix for old_prefix, new_prefix in QWEN_NAMES.items()}
    old_prefixes[LAYER_PREFIX] = "mtp.layers.0."
    tensors: dict[str, Tensor] = {}
    for name, tensor in layer.state_dict().items():
        prefix = next((prefix for prefix in old_prefixes if name.startswith(prefix)), None)
        if prefix:
            tensors[old_prefixes[prefix] + name.removeprefix(prefix)] = tensor.detach().bfloat16().contiguous()
    folder.mkdir(exist_ok=True)
    with open_replacement(folder / "model.safetensors") as partial_file:
        save_file(tensors, partial_file, {"format": "pt"})
    layer_config = config | {"architectures": [MTP_ARCHITECTURE], "mtp_num_hidden_layers": 1}
    write_atomically(folder / "config.json", json.dumps(layer_config, indent=2) + "\n")


def find_tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a checkpoint."""
    tensor_files: dict[str, Path] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as tensors:
            tensor_files |= dict.fromkeys(tensors.keys(), file)
    return tensor_files


def read_tensors(tensor_files: Mapping[str, Path]) -> dict[str, Tensor]:
    """Return these tensors, by name."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(tensor_files.values())):
        with safe_open(file, "pt") as stored_tensors:
            tensors |= {
                name: stored_tensors.get_tensor(name) for name, own_file in tensor_files.items() if own_file == file
            }
    return tensors
