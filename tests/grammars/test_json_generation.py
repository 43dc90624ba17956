"""Texts of small models under JSON schemas, with drafts: every finished text is valid, and most are finished."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from schema_strategy import Schema, is_linked_list, schemas
from test_json_schema import SCHEMAS, prove

import ovspec

# The kind of text that the model writes, with an example of JSON first.
PROMPT = 'import json\n\nfirst = json.loads(\'{"name": "x", "size": 3}\')\nsecond = json.loads(\''
FINISHED = 0.9


def write(lm: ovspec.LanguageModel, schema: Any, count: int, seed: int = 0) -> tuple[int, int]:
    """Generate ``count`` texts, check that the finished ones are valid, and return (number finished, number of all)."""
    results = lm.samples(PROMPT, n=count, temperature=1.0, top_p=0.95, seed=seed, max_tokens=400, json_schema=schema)
    finished = [result.text.encode() for result in results if result.finish_reason != "length"]
    prove(schema, finished)
    return len(finished), len(results)


def check_share(counts: list[tuple[int, int]]) -> None:
    finished, written = map(sum, zip(*counts, strict=True))
    assert finished >= FINISHED * written, f"{finished} of {written} finished"


@pytest.mark.parametrize("apart", [9, pytest.param(3, marks=pytest.mark.slow)])
def test_written_schemas(load: Callable[..., ovspec.LanguageModel], apart: int) -> None:
    lm = load(draft="lookup,draft")
    check_share([write(lm, json.loads(path.read_text(encoding="utf-8")), 4) for path in SCHEMAS[::apart]])


@pytest.mark.soak
def test_written_schemas_often(load: Callable[..., ovspec.LanguageModel]) -> None:
    """Ten thousand texts; each schema has its own seed."""
    lm = load(draft=True)
    counts = [write(lm, json.loads(path.read_text(encoding="utf-8")), 200, i) for i, path in enumerate(SCHEMAS)]
    check_share(counts)


@pytest.mark.slow
def test_schemas_of_hypothesis(cache_dir: Path) -> None:
    """Uses the demo pair, because the tests' own pair rarely ends a text.

    Whether a linked list ends is up to the model, which may go on with it to the limit of tokens, so the share of
    finished texts is that of the other schemas.
    """
    lm = ovspec.load(ROOT / "models" / "demo", "lookup,draft", precision="f32", cache_dir=cache_dir)
    counts, lists = list[tuple[int, int]](), list[tuple[int, int]]()

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
    @given(schemas())
    def each(schema: Schema) -> None:
        try:
            (lists if is_linked_list(schema) else counts).append(write(lm, schema, 8))
        except ovspec.OvspecError as error:
            assert re.search(
                "no JSON text satisfies|a string in the schema can't have|may overlap|can't be enforced", str(error)
            ), error

    each()
    check_share(counts)
    assert len(counts) > 15
    assert len(counts) + len(lists) > 30
