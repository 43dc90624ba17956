"""Random models with real tokenizers, which are fetched."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import USERS_CACHE

DOWNLOADS = USERS_CACHE / "downloads"
TEMPLATES = DOWNLOADS / "llama.cpp" / "models" / "templates"


@dataclass(frozen=True)
class Family:
    """Where a tokenizer is, its template (by default its own), its ids that end texts, and what to expect.

    opens: the token that begins a call; closes: the one that ends thinking.
    """

    tokenizer: str
    template: str | None
    size: int
    ends: tuple[int, ...]
    format: str
    opens: str | None
    thinks: tuple[str, str] | None = None


FAMILIES = {
    "qwen3": Family("qwen3", None, 151936, (151645, 151643), "hermes", "<tool_call>", ("<think>", "</think>")),
    "qwen3.5": Family(
        "qwen3", "Qwen3.5-4B", 151936, (151645, 151643), "qwen-xml", "<tool_call>", ("<think>", "</think>")
    ),
    "gpt-oss": Family("gptoss", "openai-gpt-oss-120b", 201088, (200002, 200012, 199999), "harmony", None),
    "llama": Family("llama3_1", "meta-llama-Llama-3.1-8B-Instruct", 128256, (128009, 128008), "llama3", None),
}


def export(family: Family, folder: Path) -> None:
    """Export a random model with the family's tokenizer."""
    import torch
    import transformers
    from family_models import warm_jobs
    from ovspec_export import Compression, export_pair

    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "vocab_size": family.size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
    }
    others: dict[str, Any] = {"tie_word_embeddings": True, "eos_token_id": family.ends[0]}
    config = transformers.Qwen3Config(**sizes, **heads, **others)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weights in model.parameters():
        if weights.ndim > 1:
            torch.nn.init.normal_(weights, std=0.3)
    source = folder.with_name(f"{folder.name}-checkpoint")
    model.save_pretrained(source)
    for file in (DOWNLOADS / "tokenizers" / family.tokenizer).iterdir():
        shutil.copy(file, source)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": list(family.ends)}), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patched:
        if hasattr(os, "fork"):
            warm_jobs(patched)
        export_pair(str(source), None, folder, Compression("fp32"))
    shutil.rmtree(source)
