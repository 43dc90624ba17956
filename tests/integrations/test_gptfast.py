"""The interface of gpt-fast."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import PROMPTS, Reference

import ovspec
from ovspec.integrations.gptfast import gpt_fast


def among_the_best(logits: np.ndarray, tokens: np.ndarray, temperature: float = 1.0, k: int = 5) -> np.ndarray:
    assert logits.shape == (1, 4096)
    best = np.argsort(-logits[0] / temperature)[:k]
    return best[[len(tokens) % k]]


def test_gpt_fast(pair: Path, cache_dir: Path, reference: Reference) -> None:
    model = gpt_fast(pair, True, precision="f32", cache_dir=cache_dir)
    prompt = reference.tokenizer(PROMPTS[0], return_tensors="np")["input_ids"]
    expected = reference.generate(PROMPTS[0], 20, ignore_eos=True)
    for speculate_k in (None, 0, 6):
        tokens = model.generate(cur_tokens=prompt, max_tokens=20, speculate_k=speculate_k)
        assert tokens.shape == (1, prompt.shape[1] + 20)
        assert tokens[0].tolist() == prompt[0].tolist() + expected
    with pytest.raises(ovspec.OvspecError, match="must be"):
        model.generate(np.zeros((2, 3)), 5)
    with pytest.raises(ovspec.OvspecError, match="pass a sample_function"):
        model.generate(prompt, 5, temperature=1.0)


def test_gpt_fast_with_a_sample_function(pair: Path, cache_dir: Path, reference: Reference) -> None:
    """The same function, called on Hugging Face's logits, gives the same tokens."""
    model = gpt_fast(pair, True, among_the_best, precision="f32", cache_dir=cache_dir)
    tokens = reference.tokenizer(PROMPTS[1])["input_ids"]
    prompt = np.array([tokens])
    for _ in range(12):
        logits = reference.logits(tokens)[-1:]
        tokens = [*tokens, int(among_the_best(logits, np.array(tokens), k=3)[0])]
    assert model.generate(prompt, 12, 4, k=3)[0].tolist() == tokens
