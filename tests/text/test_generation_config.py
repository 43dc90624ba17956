"""The tokens that end a text, and the recommended sampling, are those that Hugging Face reads from the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ovspec.base.errors import OvspecError
from ovspec.ir.config import read_model_config
from ovspec.text.generation_config import GenerationConfig, format_sampling, read_recommended_sampling

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
    ids = GenerationConfig(tmp_path, read_model_config(tmp_path), tokenizer).eos_ids
    assert ids == frozenset(expected if isinstance(expected, list) else [] if expected is None else [expected])


def test_a_generation_config_without_eos_leaves_that_to_the_config(tmp_path: Path) -> None:
    """Hugging Face would never end such a text."""
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": [3, 4]}}', "utf-8")
    (tmp_path / "generation_config.json").write_text('{"bos_token_id": 1}', "utf-8")
    tokenizer: Any = None
    assert GenerationConfig(tmp_path, read_model_config(tmp_path), tokenizer).eos_ids == {3, 4}


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


def saved(folder: Path, generation: dict[str, Any]) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(generation), "utf-8")
    return folder


@pytest.mark.parametrize(
    "given", [{}, {"temperature": 0}, {"temperature": 0.9}, {"top_p": 1.0}, {"top_k": 3, "seed": 1}, {"max_tokens": 5}]
)
@pytest.mark.parametrize(
    "generation",
    [
        {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
        {"do_sample": True, "temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0.0},
        {"do_sample": True, "temperature": None, "min_p": 0.1, "typical_p": 0.9},
        {"do_sample": True},
        {"do_sample": False, "temperature": 0.6, "top_p": 0.95},
        {"do_sample": None, "temperature": 0.6},
        {"temperature": 0.6, "top_p": 0.95},
        {"repetition_penalty": 1.1},
    ],
)
def test_recommended_sampling_is_that_of_hugging_face(
    tmp_path: Path, generation: dict[str, Any], given: dict[str, Any]
) -> None:
    from transformers import GenerationConfig as Theirs

    theirs = Theirs.from_pretrained(saved(tmp_path, generation))
    expected = dict(given)
    if theirs.do_sample and given.get("temperature") != 0:
        says = {name: value for name in SAMPLING if (value := getattr(theirs, name, None)) is not None}
        expected = {"temperature": Theirs._get_default_generation_params()["temperature"]} | says | given
    found = {**given, **read_recommended_sampling(tmp_path, given)}
    assert not read_recommended_sampling(tmp_path, given).keys() & given.keys()
    assert OFF | found == OFF | expected


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"do_sample": 1}, "do_sample must be true or false, not 1"),
        ({"temperature": -1}, "temperature is -1; it must be 0 .greedy. or more"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"top_k": -1}, "top_k is -1; it must be 0 .all. or more"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be above 0 and at most 1"),
        ({"min_p": [0.1]}, "min_p must be a number, not .0.1."),
    ],
)
def test_a_wrong_recommendation_is_refused_where_it_is_used(tmp_path: Path, wrong: dict[str, Any], told: str) -> None:
    saved(tmp_path, {"do_sample": True} | wrong)
    with pytest.raises(OvspecError, match=f"generation_config.json: {told}.*again, or set `temperature=0`"):
        read_recommended_sampling(tmp_path, {"typical_p": 0.5})
    assert read_recommended_sampling(tmp_path, {"temperature": 0.0}) == {}


def test_a_wrong_recommendation_is_no_matter_where_another_value_is_given(tmp_path: Path) -> None:
    saved(tmp_path, {"do_sample": True, "temperature": 0.6, "top_p": 1.5})
    assert read_recommended_sampling(tmp_path, {"top_p": 0.5}) == {"temperature": 0.6}
    saved(tmp_path, {"do_sample": True, "temperature": -1, "top_p": 0.9})
    assert read_recommended_sampling(tmp_path, {"temperature": 0.7}) == {"top_p": 0.9}


def test_greedy_is_recommended_by_a_temperature_of_0(tmp_path: Path) -> None:
    assert read_recommended_sampling(saved(tmp_path, {"do_sample": True, "temperature": 0.0, "top_p": 0.9}), {}) == {}
    assert read_recommended_sampling(saved(tmp_path, {"do_sample": False, "temperature": 7, "top_p": 9}), {}) == {}
    (tmp_path / "generation_config.json").unlink()
    assert read_recommended_sampling(tmp_path, {}) == {}


def test_sampling_in_words() -> None:
    assert format_sampling({"temperature": 1.0, "top_k": 20, "min_p": 0.05}) == "temperature 1, top-k 20, min-p 0.05"
