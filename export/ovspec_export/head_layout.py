"""EAGLE-3 heads in the formats of AngelSlim, SpecForge and speculators: their sizes, options and tensors.

A head is a decoder layer on the target's hidden states: entry i has token i + 1 and a feature fused from the inputs of
some target layers at position i. It predicts token i + 2. Its own output is the next entry's feature if the target
hasn't computed that position yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject

HEAD_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
LAYER_CONFIG_ENTRY = "transformer_layer_config"  # the entry about the decoder layer in speculators' configs
LAYER_IDS_ENTRY = "eagle_aux_hidden_state_layer_ids"
HEAD_FAMILIES = ("llama", "qwen3")
SUPPORTED_ROPES = ("default", "linear", "llama3", "yarn")  # their frequencies don't depend on the text's length
DEFAULT_TAP_COUNT = 3
# Tensors needed only in training, or implied by the config.
IGNORED_TENSORS = re.compile(r"verifier_|(.*\.)?rotary_emb\.|[dt]2[dt]$")


@dataclass(frozen=True)
class HeadLayout:
    """Sizes and options of a head.

    vocab_size: the number of the target's tokens. draft_vocab_size: the number of the head's tokens.
    tap_count: the number of target layers fused into a feature. target_hidden_size: the width of each.
    tap_layers: the target layers whose inputs the head reads; None for the target's default.
    fused_norm: the normalisation of fused states: "" for none, "before_fc" (all together) or "fc" (by layer).
    norm_before_residual: the residual is the normalised feature.
    norm_before_head: the lm_head reads the normalised output.
    norm_output: the normalised output is the next feature, too.
    rope_config: the config's entries about the rotary embedding, and max_position_embeddings.
    has_own_embedding, has_own_lm_head: whether the checkpoint has them.
    biased_layers: names of the linear layers with a bias.
    """

    hidden_size: int
    intermediate_size: int
    head_count: int
    kv_head_count: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    tap_count: int
    target_hidden_size: int
    tap_layers: tuple[int, ...] | None = None
    norm_epsilon: float = 1e-6
    activation: str = "silu"
    qk_norm: bool = False
    fused_norm: str = ""
    norm_before_residual: bool = False
    norm_before_head: bool = True
    norm_output: bool = False
    rope_config: JsonObject = field(default_factory=dict)
    has_own_embedding: bool = True
    has_own_lm_head: bool = True
    biased_layers: frozenset[str] = frozenset()

    def tensor_shapes(self) -> dict[str, list[int]]:
        """Return the shapes of its tensors, by ``EagleHead``'s names."""
        width = self.hidden_size
        query_width = self.head_count * self.head_dim
        key_width = self.kv_head_count * self.head_dim
        states_width = self.tap_count * self.target_hidden_size
        linear_shapes = {
            "fc": [width, states_width],
            "layer.self_attn.q_proj": [query_width, 2 * width],
            "layer.self_attn.k_proj": [key_width, 2 * width],
            "layer.self_attn.v_proj": [key_width, 2 * width],
            "layer.self_attn.o_proj": [width, query_width],
            "layer.mlp.gate_proj": [self.intermediate_size, width],
            "layer.mlp.up_proj": [self.intermediate_size, width],
            "layer.mlp.down_proj": [width, self.intermediate_size],
        }
        if self.has_own_embedding:
            linear_shapes["embed_tokens"] = [self.vocab_size, width]
        if self.has_own_lm_head:
            linear_shapes["lm_head"] = [self.draft_vocab_size, width]
        norm_names = ("layer.input_layernorm", "layer.hidden_norm", "layer.post_attention_layernorm", "norm")
        norm_widths: dict[str, int] = dict.fromkeys(norm_names, width)
        if self.qk_norm:
            norm_widths |= {f"layer.self_attn.{name}_norm": self.head_dim for name in "qk"}
        if self.fused_norm == "before_fc":
            norm_widths["input_norm"] = states_width
        if self.fused_norm == "fc":
            norm_widths |= {f"fc_norm.{i}": self.target_hidden_size for i in range(self.tap_count)}
        shapes = {f"{name}.weight": shape for name, shape in linear_shapes.items()}
        shapes |= {f"{name}.weight": [norm_width] for name, norm_width in norm_widths.items()}
        return shapes | {f"{name}.bias": [linear_shapes[name][0]] for name in self.biased_layers}


def is_head_config(config: JsonObject) -> bool:
    """Return whether a config.json belongs to an EAGLE-3 head."""
    architectures = config.get("architectures")
    architecture_names = {str(name) for name in architectures} if isinstance(architectures, list) else set()
    # EAGLE's authors call their heads Llama models.
    is_named_llama = architecture_names == {"LlamaForCausalLM"} and "draft_vocab_size" in config
    is_speculators = config.get("speculators_model_type") == "eagle3"
    return is_named_llama or bool({*HEAD_ARCHITECTURES} & architecture_names) or is_speculators


def flatten_head_config(config: JsonObject) -> JsonObject:
    """Return a head's config with the entries of its layer at the top level; speculators nests them."""
    flat_config = dict(config)
    layer_config = config.get(LAYER_CONFIG_ENTRY)
    if isinstance(layer_config, dict):
        flat_config |= layer_config
    return flat_config | {"architectures": config.get("architectures")}


def map_to_eagle_head_name(name: str) -> str:
    """Return ``EagleHead``'s name for a tensor of a checkpoint."""
    return re.sub(r"^(midlayer|layers\.0)\.", "layer.", name.removeprefix("model."))


def read_head_layout(config: JsonObject, shapes: Mapping[str, Sequence[int]], name: str) -> HeadLayout:
    """Return the layout from the config and the shapes of a head's tensors.

    Raises:
        OvspecError: it has an unsupported part, lacks a tensor, or config and tensors contradict each other.
    """
    flat_config = flatten_head_config(config)
    tensor_shapes = {map_to_eagle_head_name(tensor_name): list(shape) for tensor_name, shape in shapes.items()}
    tensor_shapes = {
        tensor_name: shape for tensor_name, shape in tensor_shapes.items() if not IGNORED_TENSORS.match(tensor_name)
    }
    check_head_supported(flat_config, tensor_shapes, name)
    for tensor_name in ("fc.weight", "norm.weight"):
        if tensor_name not in tensor_shapes:
            raise OvspecError(f"{name}: the head lacks the tensor {tensor_name}; download the head again.")
    try:
        layout = build_head_layout(flat_config, tensor_shapes, isinstance(config.get(LAYER_CONFIG_ENTRY), dict))
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise OvspecError(
            f"{name}: its config.json has a missing or wrong entry ({error}); download the head again."
        ) from None
    expected_shapes = layout.tensor_shapes()
    for tensor_name in sorted({*expected_shapes, *tensor_shapes}):
        if tensor_name not in expected_shapes:
            raise OvspecError(f"{name}: the head has the unknown tensor {tensor_name}; choose another head.")
        if tensor_name not in tensor_shapes:
            raise OvspecError(f"{name}: the head lacks the tensor {tensor_name}; download the head again.")
        if expected_shapes[tensor_name] != tensor_shapes[tensor_name]:
            shape, expected_shape = (
                " x ".join(map(str, named_shapes[tensor_name])) for named_shapes in (tensor_shapes, expected_shapes)
            )
            raise OvspecError(
                f"{name}: its tensor {tensor_name} has the shape {shape}, but needs {expected_shape} according to "
                "config.json; download the head again."
            )
    return layout


def build_head_layout(
    config: JsonObject, tensor_shapes: Mapping[str, Sequence[int]], is_speculators: bool
) -> HeadLayout:
    """Return the layout from the flat config. is_speculators: the config was nested, as in speculators."""
    hidden_size, head_count, vocab_size = (
        int(config[name]) for name in ("hidden_size", "num_attention_heads", "vocab_size")
    )
    tap_layers = read_tap_layers(config)
    tap_count = len(tap_layers or ()) or DEFAULT_TAP_COUNT
    head_dim = config.get("head_dim")
    if not head_dim:
        head_dim = tensor_shapes.get("layer.self_attn.q_norm.weight", [hidden_size // head_count])[0]
    fused_norm = ""
    if config.get("norm_before_fc"):
        fused_norm = "before_fc"
    elif config.get("fc_norm"):
        fused_norm = "fc"
    rope_entries = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    return HeadLayout(
        hidden_size=hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        head_count=head_count,
        kv_head_count=int(config.get("num_key_value_heads") or head_count),
        head_dim=int(head_dim),
        vocab_size=vocab_size,
        draft_vocab_size=int(config.get("draft_vocab_size") or vocab_size),
        tap_count=tap_count,
        target_hidden_size=tensor_shapes["fc.weight"][1] // tap_count,
        tap_layers=tap_layers,
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        activation=str(config.get("hidden_act", "silu")),
        qk_norm=config.get("model_type") == "qwen3",
        fused_norm=fused_norm,
        norm_before_residual=bool(config.get("norm_before_residual")),
        # ``norm_output`` is about the lm_head's input; in speculators, about the next entry's feature.
        norm_before_head=is_speculators or config.get("norm_output") is not False,
        norm_output=is_speculators and bool(config.get("norm_output")),
        rope_config={name: config[name] for name in rope_entries if config.get(name) is not None},
        has_own_embedding="embed_tokens.weight" in tensor_shapes,
        has_own_lm_head="lm_head.weight" in tensor_shapes,
        biased_layers=frozenset(name.removesuffix(".bias") for name in tensor_shapes if name.endswith(".bias")),
    )


def read_tap_layers(config: JsonObject) -> tuple[int, ...] | None:
    """Return the target layers whose inputs a head reads, or None if its config has none.

    speculators numbers them by their inputs; AngelSlim and SpecForge, in ``eagle_config``, by their outputs.
    """
    if config.get(LAYER_IDS_ENTRY):
        return tuple(int(layer) for layer in config[LAYER_IDS_ENTRY])
    eagle_config = config.get("eagle_config")
    if isinstance(eagle_config, dict) and eagle_config.get(LAYER_IDS_ENTRY):
        return tuple(int(layer + 1) for layer in eagle_config[LAYER_IDS_ENTRY])
    return None


def choose_default_tap_layers(layer_count: int) -> list[int]:
    """Return the target layers whose inputs a head reads if its config has none."""
    return [2, layer_count // 2, layer_count - 3]


def choose_new_head_tap_layers(layer_count: int) -> list[int]:
    """Return the target layers whose inputs a new head reads."""
    tap_layers = choose_default_tap_layers(layer_count)
    if tap_layers[0] < tap_layers[1] < tap_layers[2]:
        return tap_layers
    return sorted({layer_count // 4, layer_count // 2, layer_count - 1})


def check_head_supported(config: JsonObject, tensor_names: Iterable[str], name: str) -> None:
    """Raise OvspecError if a head has parts unsupported by ``EagleHead``. tensor_names: empty if not known yet."""
    family = config.get("model_type", "llama")
    if family not in HEAD_FAMILIES:
        raise OvspecError(
            f"{name}: the head's layer is of the family {family}; only {' and '.join(HEAD_FAMILIES)} are "
            "supported; choose another head."
        )
    has_further_layers = any(re.match(r"layers\.[1-9]", tensor) for tensor in tensor_names)
    if has_further_layers or config.get("num_hidden_layers", 1) != 1:
        raise OvspecError(
            f"{name}: the head has several layers; only a single layer is supported; choose another head."
        )
    if config.get("use_sliding_window") or {*(config.get("layer_types") or ())} - {"full_attention"}:
        raise OvspecError(
            f"{name}: the head's attention has a sliding window, but only full attention is supported; choose another "
            "head."
        )
    if config.get("norm_before_fc") and config.get("fc_norm"):
        raise OvspecError(f"{name}: its config.json has both norm_before_fc and fc_norm; remove the wrong entry.")
    rope_configs = [
        rope_config
        for rope_config in (config.get("rope_parameters"), config.get("rope_scaling"))
        if isinstance(rope_config, dict)
    ]
    unsupported_ropes = [
        read_rope_type(rope_config)
        for rope_config in rope_configs
        if read_rope_type(rope_config) not in SUPPORTED_ROPES
    ]
    if any(rope_entries.get("partial_rotary_factor") not in (None, 1) for rope_entries in (config, *rope_configs)):
        unsupported_ropes.append("partial")
    if unsupported_ropes:
        raise OvspecError(
            f"{name}: the head's rotary embedding is {unsupported_ropes[0]}; only full rotary embeddings of the "
            f"types {', '.join(SUPPORTED_ROPES)} are supported; choose another head."
        )


def read_rope_type(rope_config: JsonObject) -> str:
    """Return the kind of a rotary embedding; the three axes of images (mrope) are the same for text."""
    rope_type = str(rope_config.get("rope_type") or rope_config.get("type") or "default")
    return "default" if rope_type == "mrope" else rope_type
