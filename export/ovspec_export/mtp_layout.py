"""Layers for multi-token prediction (MTP) in checkpoints: their tensors and their config.

Such a layer drafts from the target's own final hidden states (DeepSeek-V3, arXiv 2412.19437). Entry i has the embedding
of token i + 1 and the target's lm_head input at position i, each normalised; ``fc`` combines them into a state, the
input of a decoder layer like the target's. Its normalised output is the input of the target's lm_head, and also the
next entry's feature if the target hasn't computed that position yet.

Qwen names the tensors ``mtp.*``. DeepSeek and GLM append the layers to the target's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ovspec.base.json_types import JsonObject
from ovspec.ir.config import LAYER_KEYS
from ovspec_export.kept_weights import QUANTISATION_KEYS

MTP_ARCHITECTURE = "MTPLayer"  # in the config of a layer stored without its target
LAYER_PREFIX = "layer."  # of the decoder layer's tensors, in this package
# Names in checkpoints, after the layer's prefix, if any -> in this package.
QWEN_NAMES = {
    "mtp.fc.": "fc.",
    "mtp.pre_fc_norm_embedding.": "embedding_norm.",
    "mtp.pre_fc_norm_hidden.": "feature_norm.",
    "mtp.norm.": "norm.",
}
APPENDED_NAMES = {
    "eh_proj.": "fc.",
    "enorm.": "embedding_norm.",
    "hnorm.": "feature_norm.",
    "shared_head.norm.": "norm.",
}
# Copies of the target's tensors.
COPIED_TENSORS = re.compile(r"(embed_tokens|shared_head\.head|rotary_emb)\.")


def find_mtp_layers(names: Iterable[str], config: JsonObject) -> list[dict[str, str]]:
    """Return for each layer this package's names of its tensors, by their names in the checkpoint.

    Args:
        names: names of all tensors, with or without the prefix of a text model among other parts.
        config: the text model's, with the number of layers except MTP layers.
    """
    layer_count = next((config[key] for key in LAYER_KEYS if type(config.get(key)) is int), None)
    shared_names: dict[str, str] = {}
    layers: dict[int, dict[str, str]] = {}
    for name in names:
        inner_name = re.sub(r"^model\.language_model\.|^language_model\.model\.", "model.", name)
        if qwen_prefix := next((prefix for prefix in QWEN_NAMES if inner_name.startswith(prefix)), None):
            shared_names[name] = QWEN_NAMES[qwen_prefix] + inner_name.removeprefix(qwen_prefix)
            continue
        match = re.match(r"mtp\.layers\.(\d+)\.(.*)|model\.layers\.(\d+)\.(.*)", inner_name)
        if not match:
            continue
        if match[1] is not None:
            layers.setdefault(int(match[1]), {})[name] = LAYER_PREFIX + match[2]
        elif layer_count is not None and int(match[3]) >= layer_count and not COPIED_TENSORS.match(match[4]):
            prefix = next((prefix for prefix in APPENDED_NAMES if match[4].startswith(prefix)), "")
            new_name = APPENDED_NAMES.get(prefix, LAYER_PREFIX) + match[4].removeprefix(prefix)
            layers.setdefault(int(match[3]) - layer_count, {})[name] = new_name
    # Other layers beyond the config's number are unused.
    is_mtp = [bool(shared_names) or "fc.weight" in layers[depth].values() for depth in sorted(layers)]
    return [shared_names | layers[depth] for depth, found in zip(sorted(layers), is_mtp, strict=True) if found]


def make_layer_config(config: JsonObject) -> JsonObject:
    """Return the config of a model with the MTP layer alone: full attention, and experts if the target has some."""
    config = {name: entry for name, entry in config.items() if name not in QUANTISATION_KEYS}
    layer_config = config | {"layer_types": ["full_attention"], "architectures": [MTP_ARCHITECTURE]}
    layer_config |= {"sliding_window": None, "use_sliding_window": False}
    layer_config |= {"mlp_only_layers": [], "first_k_dense_replace": 0, "decoder_sparse_step": 1}
    if config.get("mlp_layer_types"):
        layer_config["mlp_layer_types"] = config["mlp_layer_types"][-1:]
    return layer_config | {key: 1 for key in LAYER_KEYS if key in config}
