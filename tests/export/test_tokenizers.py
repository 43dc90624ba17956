"""Tokenizers that come without a tokenizer.json get one where transformers can make it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROMPTS
from ovspec_export import Compression, export_pair
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import ovspec

TEXTS = ["def add(a, b):\n    return a + b", "Größe, 東京, мир, 👋", "  two  spaces ", "\ttab\n\n"]


@pytest.mark.slow
def test_a_sentencepiece_model_alone(tmp_path: Path, cache_dir: Path) -> None:
    from sentencepiece import SentencePieceTrainer

    source = tmp_path / "hf"
    source.mkdir()
    options = {"vocab_size": 400, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2}
    SentencePieceTrainer.train(  # type: ignore[attr-defined]
        sentence_iterator=iter("".join(PROMPTS).splitlines()), model_prefix=str(source / "tokenizer"), **options
    )
    (source / "tokenizer.vocab").unlink()
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    sizes: dict[str, Any] = {
        "vocab_size": 400,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(source)
    export_pair(str(source), None, tmp_path / "pair", Compression("fp32"))
    assert (tmp_path / "pair" / "tokenizer.json").is_file()
    reference = AutoTokenizer.from_pretrained(source)
    lm = ovspec.load(tmp_path / "pair", precision="f32", cache_dir=cache_dir)
    for text in TEXTS:
        assert lm.encode(text).tolist() == reference(text)["input_ids"]
    assert lm.generate("def", max_tokens=8, json_schema={"type": "integer"}).text.strip("-").isdigit()
