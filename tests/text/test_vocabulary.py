"""Logits wider than the vocabulary, vocabularies with gaps, and pairs of different widths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import GROUPED, VOCAB, Family
from family_models import export

import ovspec
from ovspec.text.vocabulary import ALL_IDS, make_known_token_ids

PROMPT = [*range(100, 112)]
TOKENS = 40
pytestmark = pytest.mark.filterwarnings("ignore")


def wide_model(folder: Path, width: int) -> Any:
    """Make a random model in which padding ids would win every choice."""
    import torch

    model = export(Family("LlamaConfig", GROUPED | {"vocab_size": width}), folder, spread_of_padding=8.0)
    with torch.no_grad():
        assert model(torch.tensor([PROMPT])).logits[0, -1].argmax() >= VOCAB
    return model


def expected(model: Any, never: list[int]) -> list[int]:
    import torch

    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0, suppress_tokens=never
    )
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.slow
def test_ids_without_a_token_never_come_out(tmp_path: Path, cache_dir: Path) -> None:
    target = wide_model(tmp_path / "target", VOCAB + 64)
    wide_model(tmp_path / "draft", VOCAB + 160)
    target_ir, draft_ir = tmp_path / "target" / "ir", tmp_path / "draft" / "ir"
    padding = list(range(VOCAB, VOCAB + 64))
    tokens = expected(target, padding)
    lm = ovspec.load(target_ir, draft_ir, precision="f32", cache_dir=cache_dir)
    for lookahead in (0, 3):
        result = lm.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, lookahead=lookahead)
        assert result.token_ids == tokens
    assert result.stats.proposed > 0

    # A gap in the middle: ids that the model chooses, but that the tokenizer doesn't have.
    gaps = sorted(set(tokens))[:5]
    for folder in (target_ir, draft_ir):
        file = folder / "tokenizer.json"
        data = json.loads(file.read_text(encoding="utf-8"))
        data["model"]["vocab"] = {piece: i for piece, i in data["model"]["vocab"].items() if i not in gaps}
        data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] not in gaps]
        file.write_text(json.dumps(data), encoding="utf-8")
    lm = ovspec.load(target_ir, draft_ir, precision="f32", cache_dir=cache_dir)
    without = expected(target, padding + gaps)
    assert without != tokens
    for lookahead in (0, 3):
        result = lm.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, lookahead=lookahead)
        assert result.token_ids == without
    with pytest.raises(ovspec.OvspecError, match=f"Token id {gaps[0]} is not in the vocabulary"):
        lm.generate([5, gaps[0]])


def test_known_ids() -> None:
    known = make_known_token_ids([0, 1, 4, 6])
    assert (known.size, known.missing_ids.tolist()) == (7, [2, 3, 5])
    restricted = known.restrict_logits(np.zeros((2, 9), dtype=np.float32))
    assert np.isneginf(restricted).tolist() == [[False, False, True, True, False, True, False]] * 2
    assert known.restrict_logits(np.zeros((1, 3), dtype=np.float32)).shape == (1, 3)
    assert known.first_unknown(np.array([1, 4, 5, 9])) == 5
    assert known.first_unknown(np.array([0, 6])) is None
    assert make_known_token_ids([]) is ALL_IDS
    assert ALL_IDS.first_unknown(np.array([3, -1])) == -1
