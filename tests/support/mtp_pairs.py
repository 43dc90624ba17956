"""The small target of the tests with random MTP layers in its checkpoint, exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TARGET
from family_models import warm_jobs
from kept import kept_model
from ovspec_export import Compression, export_pair
from ovspec_export.draft_vocabulary import DRAFT_VOCABULARY_FILE
from ovspec_export.mtp import make_new_mtp_layer, save_mtp_layer
from safetensors.torch import load_file, save_file

KEPT_IDS = 900  # that the layer of "pair" proposes
# As DeepSeek names them.
APPENDED = {"mtp.fc.": "eh_proj.", "mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm."}
APPENDED |= {"mtp.norm.": "shared_head.norm."}


def small_mtp_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ``own``, ``deep`` and ``pair``; see ``make_folder``."""
    return kept_model(tmp_path_factory, "small-mtp", make_folder)


def add_tensors(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = checkpoint / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def make_folder(place: Path) -> None:
    """Write the small target with random MTP layers in its checkpoint, exported in f32, to ``place``.

    "own" has one layer, by Qwen's names, and "deep" two, appended to the target's own.
    """
    config = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))
    checkpoint, deep = (shutil.copytree(TARGET, place / name) for name in ("checkpoint", "deep-checkpoint"))
    torch.manual_seed(0)
    for depth, name in enumerate(("layer", "second-layer")):
        layer = make_new_mtp_layer(config)
        for weights in layer.parameters():
            if weights.ndim > 1:
                torch.nn.init.normal_(weights, std=weights.shape[-1] ** -0.5)
            else:
                torch.nn.init.normal_(weights, mean=1.0, std=0.2)
        save_mtp_layer(layer, config, place / name)
        tensors = load_file(place / name / "model.safetensors")
        if not depth:
            add_tensors(checkpoint, tensors)
        number = config["num_hidden_layers"] + depth
        names = {"mtp.layers.0.": f"model.layers.{number}."}
        names |= {old: f"model.layers.{number}.{new}" for old, new in APPENDED.items()}
        add_tensors(
            deep, {names[old] + x.removeprefix(old): tensors[x] for x in tensors for old in names if x.startswith(old)}
        )
    ids = np.sort(np.random.default_rng(0).permutation(config["vocab_size"])[:KEPT_IDS])
    shutil.copytree(place / "layer", place / "trimmed-layer")
    (place / "trimmed-layer" / DRAFT_VOCABULARY_FILE).write_text(json.dumps({"ids": ids.tolist()}))
    with pytest.MonkeyPatch.context() as patched:
        warm_jobs(patched)
        export_pair(str(checkpoint), None, place / "own", Compression("fp32"))
        export_pair(str(deep), None, place / "deep", Compression("fp32"))
        export_pair(
            str(place / "own"), str(place / "trimmed-layer"), place / "pair", draft_compression=Compression("fp32")
        )
