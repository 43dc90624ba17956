"""Changes to optimum and transformers inside the exporting process, as requested by ``families.py``."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from typing import TYPE_CHECKING, Any

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec_export.families import FAMILIES

if TYPE_CHECKING:
    from openvino import Output
    from torch import Tensor

# Names of tensors necessary to interpret quantised weights.
QUANTISED_TENSORS = re.compile(r"scale|qweight|qzeros|zero_point|absmax")


def hide_torchvision() -> None:
    """Hide torchvision from transformers: beside an unsuitable torch, importing it would fail."""
    sys.modules["torchvision"] = None  # type: ignore[assignment]


def apply_splits_in_turn() -> None:
    """Make OpenVINO's tokenizers cut a text by their regular expressions one after another, not all at once.

    OpenVINO joins the expressions as alternatives, so the second would no longer get only the pieces left by the first.
    """
    from openvino_tokenizers.tokenizer_pipeline import TokenizerPipeline

    TokenizerPipeline.merge_regex_split_steps = lambda _: None  # type: ignore[method-assign]


def match_hugging_face_tokens() -> None:
    """Make OpenVINO's BPE find the same tokens as Hugging Face's.

    It finds tokens without a merge, such as Gemma's <s>, a normal token, anywhere in a text; and it misses added
    tokens such as DeepSeek's "ö", because it takes their text for bytes in the alphabet of byte-level BPE.
    """
    from openvino_tokenizers.tokenizer_pipeline import BPETokenizationStep, create_string_constant_node

    original_from_json, original_get_subgraph, original_finalize = (
        getattr(BPETokenizationStep, name) for name in ("from_hf_json", "get_ov_subgraph", "finalize")
    )

    def from_hf_json(tokenizer_json: JsonObject) -> Any:
        bpe_step = original_from_json(tokenizer_json)
        model = tokenizer_json["model"]
        merge_pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        merged_tokens = {left + right for left, right in merge_pairs} | {*bpe_step.added_tokens, model["unk_token"]}
        bpe_step.unmerged = [
            token_id
            for token, token_id in model["vocab"].items()
            if len(token) > 1 and token not in merged_tokens and not re.fullmatch("<0x[0-9A-F]{2}>", token)
        ]
        if model.get("ignore_merges"):  # a word in the vocabulary stays whole, with or without merges
            bpe_step.unmerged = []
        return bpe_step

    def finalize_with_bytes(self: Any) -> None:
        if self.added_tokens and self.get_pipeline().is_byte_level:
            added_tokens = self.added_tokens.items()
            encoded_tokens = {
                text.encode() if isinstance(text, str) else text: token_id for text, token_id in added_tokens
            }
            self.added_tokens = encoded_tokens
        original_finalize(self)

    def get_subgraph_without_unmerged(self: Any, input_nodes: list[Output]) -> list[Output]:
        vocabulary = self.vocab
        self.vocab = list(vocabulary)
        for token_id in getattr(self, "unmerged", []):  # empty without a tokenizer.json
            self.vocab[token_id] = type(vocabulary[0])()
        output_nodes: list[Output] = original_get_subgraph(self, input_nodes)
        self.vocab = vocabulary
        self.get_pipeline().vocab_node_outputs = create_string_constant_node(vocabulary)  # for the detokenizer
        return output_nodes

    BPETokenizationStep.from_hf_json = from_hf_json  # type: ignore[method-assign]
    BPETokenizationStep.finalize = finalize_with_bytes
    BPETokenizationStep.get_ov_subgraph = get_subgraph_without_unmerged


def adapt_optimum(model_type: str) -> JsonObject:
    """Change optimum for the family; return further arguments for loading the checkpoint."""
    from optimum.exporters.openvino import model_configs  # noqa: F401  (fills the registry)
    from optimum.exporters.tasks import TasksManager

    registry: JsonObject = TasksManager._SUPPORTED_MODEL_TYPE
    family = FAMILIES[model_type]
    if family.alias_of:
        registry.setdefault(model_type, registry[family.alias_of])
    if family.ignores_version_limit:
        for constructor in registry[model_type]["openvino"].values():
            constructor.func.MIN_TRANSFORMERS_VERSION = constructor.func.MAX_TRANSFORMERS_VERSION = None
    for patch in family.patches:
        globals()[patch]()
    return {"experts_implementation": family.experts_implementation} if family.experts_implementation else {}


def patch_for_tracing(model: Any, model_type: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context with optimum's changes to the model's experts; other models need no context."""
    if not any("experts" in name for name, _ in model.named_parameters()):
        return contextlib.nullcontext()
    from optimum.exporters.tasks import TasksManager

    constructor = TasksManager._SUPPORTED_MODEL_TYPE[model_type]["openvino"]["text-generation-with-past"]
    return constructor(model.config).patch_model_for_export(model)


def refuse_missing_tensors() -> None:
    """Make ``from_pretrained`` refuse a checkpoint with a missing tensor; transformers would initialise it randomly."""
    from transformers import PreTrainedModel

    original_load = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    @functools.wraps(original_load)
    def load_all(
        cls: type[PreTrainedModel], *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> PreTrainedModel | tuple[PreTrainedModel, JsonObject]:
        model, loading_info = original_load(cls, *args, output_loading_info=True, **kwargs)
        missing_names = sorted(loading_info["missing_keys"]) + sorted(
            str(key[0]) for key in loading_info["mismatched_keys"]
        )
        if missing_names:
            raise OvspecError(
                f"tensors missing in the checkpoint or of a wrong shape: {len(missing_names)}, such as "
                f"{missing_names[0]}; download the model again"
            )
        unread_names = sorted(key for key in loading_info["unexpected_keys"] if QUANTISED_TENSORS.search(key))
        if unread_names:
            raise OvspecError(
                f"the checkpoint's quantised tensor {unread_names[0]} is not supported; export the unquantised "
                "checkpoint"
            )
        return (model, loading_info) if output_loading_info else model

    PreTrainedModel.from_pretrained = classmethod(load_all)  # type: ignore[assignment]


def shorten_dummy_window() -> None:
    """Trace Gemma 4 with as many slots in its windows as elsewhere; full windows have another mask."""
    from optimum.exporters.openvino.input_generators import Gemma4DummyPastKeyValuesGenerator as Generator

    original_generate = Generator.generate

    @functools.wraps(original_generate)
    def generate_short(self: Any, *args: Any, **kwargs: Any) -> list[tuple[Tensor, ...]]:
        self.sliding_window = self.sequence_length
        return original_generate(self, *args, **kwargs)

    Generator.generate = generate_short


def pass_position_ids() -> None:
    """Let Qwen3.5 use the input ``position_ids``; optimum's forward function for text leaves it out."""
    from optimum.exporters.openvino.model_patcher import Qwen3_5ModelPatcher as Patcher

    original_initialize = Patcher.__init__

    @functools.wraps(original_initialize)
    def initialize_with_positions(self: Any, *args: Any, **kwargs: Any) -> None:
        original_initialize(self, *args, **kwargs)
        patched_forward = self.patched_forward
        model_forward = self.model_orig_forward

        @functools.wraps(patched_forward)
        def forward_with_positions(*args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
            self.model_orig_forward = functools.partial(model_forward, position_ids=position_ids)
            try:
                return patched_forward(*args, **kwargs)
            finally:
                self.model_orig_forward = model_forward

        self.patched_forward = self.orig_forward = forward_with_positions

    Patcher.__init__ = initialize_with_positions


def scan_mamba_in_a_loop() -> None:
    """Make Mamba read any number of tokens after any past."""
    from ovspec_export import mamba

    mamba.replace_optimum_mixer()


def compress_as_gpt_oss() -> None:
    """Make optimum find the defaults of gpt-oss for int4, whatever the name of the checkpoint's folder."""
    from optimum.intel.openvino import configuration

    original_candidates = configuration._get_model_id_candidates
    configuration._get_model_id_candidates = lambda name: [*original_candidates(name), "openai/gpt-oss-20b"]
