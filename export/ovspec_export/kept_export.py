"""Exports a checkpoint with its weights elsewhere: optimum converts a skeleton, then the weights are added."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ovspec.base.files import read_json
from ovspec_export.checkpoint_weights import CheckpointWeights, Quantisation
from ovspec_export.gguf_file import read_gguf_headers
from ovspec_export.gguf_weights import GgufWeights
from ovspec_export.kept_speed import are_offsets_faster
from ovspec_export.kept_weights import WEIGHTS_FILE, KeptWeights, has_kept_weights
from ovspec_export.skeleton import (
    GraphFiller,
    fill_skeleton,
    make_model_without_data,
    read_matrices_when_used,
    read_rounded_values,
)

if TYPE_CHECKING:
    import numpy as np
    import openvino as ov
    from transformers import PreTrainedModel

MODEL_OPTIONS = ("attn_implementation", "experts_implementation")  # loading options that apply without weights


@dataclass(frozen=True)
class Skeleton:
    """A model without its large matrices, the weights it lacks, and the mark of each matrix."""

    model: PreTrainedModel
    kept: KeptWeights
    marks: dict[str, float]


def open_weights(folder: Path, model: PreTrainedModel) -> KeptWeights:
    """Return the weights of the checkpoint in ``folder``, from which ``model`` is made."""
    location = read_json(folder / WEIGHTS_FILE)
    if "checkpoint" in location:
        quantisation = Quantisation(**location["quantisation"])
        return CheckpointWeights(Path(location["checkpoint"]), quantisation, model, location.get("layers"))
    return GgufWeights(read_gguf_headers(Path(location["gguf"])), model, location.get("layers"))


@contextlib.contextmanager
def loading_skeletons(folder: Path) -> Iterator[list[Skeleton]]:
    """Make ``from_pretrained`` return skeletons of the checkpoint in ``folder``, and yield a list of these."""
    from transformers import GenerationConfig, PreTrainedModel

    skeletons: list[Skeleton] = []
    original_load = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def load_skeleton(
        model_class: type[PreTrainedModel], _path: str, *_: Any, config: Any, **options: Any
    ) -> PreTrainedModel:
        config.architectures = [model_class.__name__]
        model_options = {name: options[name] for name in MODEL_OPTIONS if name in options}
        model = make_model_without_data(model_class, config, **model_options)
        kept = open_weights(folder, model)
        marks = fill_skeleton(model, kept, folder.name)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        skeletons.append(Skeleton(model, kept, marks))
        return model

    PreTrainedModel.from_pretrained = classmethod(load_skeleton)  # type: ignore[assignment]
    try:
        yield skeletons
    finally:
        PreTrainedModel.from_pretrained = classmethod(original_load)  # type: ignore[assignment]


@contextlib.contextmanager
def keeping_weights(folder: Path) -> Iterator[None]:
    """Make optimum export the checkpoint in ``folder`` with the weights unchanged, if they are elsewhere."""
    if not has_kept_weights(folder):
        yield
        return
    from optimum.exporters.openvino import convert

    original_save = convert._save_model
    original_check = convert.allow_skip_tracing_check

    @functools.wraps(original_save)
    def fill_and_save(model: ov.Model, path: str, *args: Any, **options: Any) -> None:
        skeleton = skeletons.pop()
        filler = GraphFiller(model, skeleton.kept, find_offset_matrices(skeleton.model, skeleton.kept))
        filler.fill(skeleton.marks)
        filler.forms.write(Path(path).parent)
        original_save(model, path, *args, **options)

    convert._save_model = fill_and_save
    # The IR is compared with the checkpoint later, so torch needn't compare the traced model with itself.
    convert.allow_skip_tracing_check = lambda *_: True
    try:
        with loading_skeletons(folder) as skeletons:
            yield
    finally:
        convert._save_model = original_save
        convert.allow_skip_tracing_check = original_check


def find_offset_matrices(model: PreTrainedModel, kept: KeptWeights) -> frozenset[str]:
    """Return the names of the matrices with offsets allowed in their groups; none if offsets aren't faster here.

    They are all but the embedding and the lm_head, because the graphs of these may be changed later.
    """
    if not are_offsets_faster():
        return frozenset()
    outer_modules = filter(None, (model.get_input_embeddings(), model.get_output_embeddings()))
    outer_parameters = {id(parameter) for module in outer_modules for parameter in module.parameters()}
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if name in kept.list_matrices() and id(parameter) not in outer_parameters
    )


def read_kept_embedding(folder: Path) -> np.ndarray:
    """Return the embedding of the checkpoint in ``folder``, (tokens, width) float32."""
    from transformers import AutoModelForCausalLM

    with loading_skeletons(folder) as skeletons:
        AutoModelForCausalLM.from_pretrained(folder)
    [skeleton] = skeletons
    embedding = next(skeleton.model.get_input_embeddings().parameters())
    name = next(name for name, parameter in skeleton.model.named_parameters() if parameter is embedding)
    return skeleton.kept.read_values(name)


def load_kept_model(
    folder: Path, trust_remote_code: bool, as_exported: bool = False, **options: Any
) -> PreTrainedModel:
    """Return the model of the checkpoint in ``folder``, reading each matrix on use.

    as_exported: round the weights as in this process's export.
    """
    from transformers import AutoModelForCausalLM

    with loading_skeletons(folder) as skeletons:
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust_remote_code, **options)
    [skeleton] = skeletons
    read_values = skeleton.kept.read_values
    if as_exported and isinstance(skeleton.kept, GgufWeights):  # nothing rounds a checkpoint's weights
        offset_matrices = find_offset_matrices(skeleton.model, skeleton.kept)
        read_values = functools.partial(read_rounded_values, skeleton.kept, offset_matrices)
    read_matrices_when_used(skeleton.model, read_values, skeleton.kept)
    return skeleton.model
