"""The tokens that end a text are those that Hugging Face reads from the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ovspec.ir.config import model_config
from ovspec.text.generation_config import GenerationConfig

LLAMA = {"model_type": "llama"}


@pytest.mark.parametrize(
    ("config", "generation"),
    [
        (LLAMA | {"eos_token_id": 5}, None),
        (LLAMA | {"eos_token_id": [5, 7]}, None),
        (LLAMA | {"eos_token_id": 5}, {"eos_token_id": [6, 7, 9]}),
        (LLAMA | {"eos_token_id": [5, 7]}, {"eos_token_id": 6}),
        (LLAMA | {"text_config": {"eos_token_id": [3, 4]}}, None),
        (LLAMA | {"eos_token_id": None, "text_config": {"eos_token_id": 3}}, None),
        (LLAMA | {"eos_token_id": [5, 8], "text_config": {"eos_token_id": 3}}, None),
        (LLAMA | {"eos_token_id": 5, "text_config": {"eos_token_id": 3}}, {"eos_token_id": [0, 1]}),
        (LLAMA, None),
    ],
)
def test_eos_ids_are_those_of_hugging_face(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None
) -> None:
    from transformers import GenerationConfig as Theirs

    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    if generation:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation), "utf-8")
        expected = Theirs.from_pretrained(tmp_path).eos_token_id
    else:
        expected = Theirs.from_model_config(config).eos_token_id  # type: ignore[arg-type]
    tokenizer: Any = None
    ids = GenerationConfig(tmp_path, model_config(tmp_path), tokenizer).eos_ids
    assert ids == frozenset(expected if isinstance(expected, list) else [] if expected is None else [expected])


def test_a_generation_config_without_eos_leaves_that_to_the_config(tmp_path: Path) -> None:
    """Hugging Face would never end such a text."""
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": [3, 4]}}', "utf-8")
    (tmp_path / "generation_config.json").write_text('{"bos_token_id": 1}', "utf-8")
    tokenizer: Any = None
    assert GenerationConfig(tmp_path, model_config(tmp_path), tokenizer).eos_ids == {3, 4}
