"""EAGLE-3 heads as AngelSlim, SpecForge and speculators write them: their sizes, options and tensors.

A head is one decoder layer that drafts from the target's hidden states: entry i holds token i + 1 and a feature fused
from what some layers of the target read at position i. It predicts token i + 2, and its own output is the next
entry's feature where the target has computed none yet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ovspec.base.errors import OvspecError

HEAD_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
LAYER_CONFIG = "transformer_layer_config"  # the entry of a config of speculators that describes the decoder layer
LAYER_IDS_ENTRY = "eagle_aux_hidden_state_layer_ids"
HEAD_FAMILIES = ("llama", "qwen3")
SUPPORTED_ROPES = ("default", "linear", "llama3", "yarn")  # whose frequencies don't depend on the length of the text
DEFAULT_TAP_COUNT = 3
# Tensors that only training needs, or that follow from the config.
IGNORED_TENSORS = re.compile(r"verifier_|(.*\.)?rotary_emb\.|[dt]2[dt]$")


@dataclass(frozen=True)
class HeadLayout:
    """Sizes and options of a head.

    vocab: the target's tokens. draft_vocab: those it can propose.
    taps: how many layers of the target a feature is fused from. target_hidden: the width of each.
    tap_layers: these layers, of which the inputs are taken; None for the default, which depends on the target.
    norms: where the fused states are normalised: "" for nowhere, "before_fc" (together) or "fc" (each layer's).
    norm_before_residual: the residual is the normalised feature.
    norm_before_head: the lm_head reads the normalised output.
    norm_output: the normalised output is the next feature, too.
    rope: what the config says of the rotary embedding, and max_position_embeddings.
    own_embedding, own_lm_head: whether the checkpoint has them. biases: names of the linear layers that have one.
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
    rope_config: dict[str, Any] = field(default_factory=dict)
    own_embedding: bool = True
    own_lm_head: bool = True
    biased_layers: frozenset[str] = frozenset()

    def tensor_shapes(self) -> dict[str, list[int]]:
        """Return the shapes of its tensors, by the names that ``EagleHead`` has for them."""
        width, queries, keys = self.hidden_size, self.head_count * self.head_dim, self.kv_head_count * self.head_dim
        fused = self.tap_count * self.target_hidden_size
        linear = {
            "fc": [width, fused],
            "layer.self_attn.q_proj": [queries, 2 * width],
            "layer.self_attn.k_proj": [keys, 2 * width],
            "layer.self_attn.v_proj": [keys, 2 * width],
            "layer.self_attn.o_proj": [width, queries],
            "layer.mlp.gate_proj": [self.intermediate_size, width],
            "layer.mlp.up_proj": [self.intermediate_size, width],
            "layer.mlp.down_proj": [width, self.intermediate_size],
        }
        linear |= {"embed_tokens": [self.vocab_size, width]} if self.own_embedding else {}
        linear |= {"lm_head": [self.draft_vocab_size, width]} if self.own_lm_head else {}
        norms = ("layer.input_layernorm", "layer.hidden_norm", "layer.post_attention_layernorm", "norm")
        vectors = dict.fromkeys(norms, width)
        vectors |= {f"layer.self_attn.{name}_norm": self.head_dim for name in "qk"} if self.qk_norm else {}
        vectors |= {"input_norm": fused} if self.fused_norm == "before_fc" else {}
        vectors |= (
            {f"fc_norm.{i}": self.target_hidden_size for i in range(self.tap_count)} if self.fused_norm == "fc" else {}
        )
        found = linear | {name: [size] for name, size in vectors.items()}
        shapes = {f"{name}.weight": shape for name, shape in found.items()}
        return shapes | {f"{name}.bias": [linear[name][0]] for name in self.biased_layers}


def is_head_config(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of an EAGLE-3 head."""
    given = config.get("architectures")
    names = {str(name) for name in given} if isinstance(given, list) else set()
    # EAGLE's authors call theirs a Llama.
    theirs = names == {"LlamaForCausalLM"} and "draft_vocab_size" in config
    return theirs or bool({*HEAD_ARCHITECTURES} & names) or config.get("speculators_model_type") == "eagle3"


def flatten_head_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a head's config with the entries of its layer beside the others, where speculators nests them."""
    inner = config.get(LAYER_CONFIG)
    flat = {**config, **inner} if isinstance(inner, dict) else dict(config)
    return flat | {"architectures": config.get("architectures")}


def map_tensor_name(name: str) -> str:
    """Return ``EagleHead``'s name for a tensor of a checkpoint."""
    return re.sub(r"^(midlayer|layers\.0)\.", "layer.", name.removeprefix("model."))


def read_head_layout(config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], name: str) -> HeadLayout:
    """Return what the config and the shapes of the tensors say of a head.

    Raises:
        OvspecError: it has a part that isn't supported, lacks a tensor, or the two contradict each other.
    """
    flat = flatten_head_config(config)
    tensor_shapes = {
        map_tensor_name(each): list(shape)
        for each, shape in shapes.items()
        if not IGNORED_TENSORS.match(map_tensor_name(each))
    }
    check_head_supported(flat, tensor_shapes, name)
    lacking = next((each for each in ("fc", "norm") if f"{each}.weight" not in tensor_shapes), None)
    if lacking:
        raise OvspecError(f"{name}: the head lacks the tensor {lacking}.weight.")
    try:
        layout = build_head_layout(flat, tensor_shapes, isinstance(config.get(LAYER_CONFIG), dict))
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise OvspecError(f"{name}: its config.json lacks an entry, or has a wrong one ({error}).") from None
    expected = layout.tensor_shapes()
    for each in sorted({*expected, *tensor_shapes}):
        if each not in expected:
            raise OvspecError(f"{name}: the head has a tensor that ovspec doesn't know ({each}).")
        if each not in tensor_shapes:
            raise OvspecError(f"{name}: the head lacks the tensor {each}.")
        if expected[each] != tensor_shapes[each]:
            shown = [" x ".join(map(str, shape)) for shape in (tensor_shapes[each], expected[each])]
            raise OvspecError(f"{name}: its tensor {each} is {shown[0]}, but by its config.json it is {shown[1]}.")
    return layout


def build_head_layout(
    config: Mapping[str, Any], tensor_shapes: Mapping[str, Sequence[int]], nested: bool
) -> HeadLayout:
    """Return the layout by the flat config; ``nested``: it is one of speculators."""
    hidden, heads, vocab = (int(config[name]) for name in ("hidden_size", "num_attention_heads", "vocab_size"))
    ids = read_tap_layers(config)
    taps = len(ids) if ids else DEFAULT_TAP_COUNT
    head_dim = config.get("head_dim") or tensor_shapes.get("layer.self_attn.q_norm.weight", [hidden // heads])[0]
    norms = "before_fc" if config.get("norm_before_fc") else "fc" if config.get("fc_norm") else ""
    rope = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    return HeadLayout(
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        head_count=heads,
        kv_head_count=int(config.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        vocab_size=vocab,
        draft_vocab_size=int(config.get("draft_vocab_size") or vocab),
        tap_count=taps,
        target_hidden_size=tensor_shapes["fc.weight"][1] // taps,
        tap_layers=ids,
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        activation=str(config.get("hidden_act", "silu")),
        qk_norm=config.get("model_type") == "qwen3",
        fused_norm=norms,
        norm_before_residual=bool(config.get("norm_before_residual")),
        # The same name says whether the lm_head reads normalised states, which is the usual, or the next entry, too.
        norm_before_head=nested or config.get("norm_output") is not False,
        norm_output=nested and bool(config.get("norm_output")),
        rope_config={name: config[name] for name in rope if config.get(name) is not None},
        own_embedding="embed_tokens.weight" in tensor_shapes,
        own_lm_head="lm_head.weight" in tensor_shapes,
        biased_layers=frozenset(each.removesuffix(".bias") for each in tensor_shapes if each.endswith(".bias")),
    )


def read_tap_layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the layers of the target whose inputs a head reads, or None if its config names none.

    speculators names them by their inputs; AngelSlim and SpecForge, in ``eagle_config``, by their outputs.
    """
    inner = config.get("eagle_config")
    outputs = inner.get(LAYER_IDS_ENTRY) if isinstance(inner, dict) else None
    inputs = config.get(LAYER_IDS_ENTRY)
    given = inputs if inputs else [each + 1 for each in outputs] if outputs else None
    return tuple(int(each) for each in given) if given else None


def default_tap_layers(count: int) -> list[int]:
    """Return the layers of a target with ``count`` layers whose inputs a head reads if its config names none."""
    return [2, count // 2, count - 3]


def new_head_tap_layers(count: int) -> list[int]:
    """Return the layers of a target with ``count`` layers whose inputs a new head reads."""
    usual = default_tap_layers(count)
    return usual if usual[0] < usual[1] < usual[2] else sorted({count // 4, count // 2, count - 1})


def check_head_supported(config: Mapping[str, Any], tensor_names: Mapping[str, Any], name: str) -> None:
    """Raise OvspecError if a head has parts that ``EagleHead`` doesn't have. found: its tensors, if known yet."""
    family = config.get("model_type", "llama")
    if family not in HEAD_FAMILIES:
        raise OvspecError(
            f"{name}: the head's layer is one of the family {family}; ovspec exports heads with layers of "
            f"{' or '.join(HEAD_FAMILIES)}."
        )
    deeper = any(re.match(r"layers\.[1-9]", each) for each in tensor_names)
    if deeper or config.get("num_hidden_layers", 1) != 1:
        raise OvspecError(f"{name}: the head has more than one layer; ovspec exports heads of one.")
    if config.get("use_sliding_window") or {*(config.get("layer_types") or ())} - {"full_attention"}:
        raise OvspecError(f"{name}: the head's attention has a sliding window; ovspec exports heads without one.")
    if config.get("norm_before_fc") and config.get("fc_norm"):
        raise OvspecError(f"{name}: its config.json has both norm_before_fc and fc_norm; leave one out.")
    ropes = [rope for rope in (config.get("rope_parameters"), config.get("rope_scaling")) if isinstance(rope, dict)]
    kind = next((rope_type(rope) for rope in ropes if rope_type(rope) not in SUPPORTED_ROPES), None)
    partial = any(part.get("partial_rotary_factor") not in (None, 1) for part in (config, *ropes))
    if kind or partial:
        raise OvspecError(
            f"{name}: the head's rotary embedding is {kind or 'partial'}; ovspec exports heads where it is whole and "
            f"one of {', '.join(SUPPORTED_ROPES)}."
        )


def rope_type(rope: Mapping[str, Any]) -> str:
    """Return the kind of a rotary embedding; the three axes of images (mrope) are one and the same for text."""
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    return "default" if kind == "mrope" else kind
