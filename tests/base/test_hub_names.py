"""Names of models on the hub, and the paths that aren't taken for them."""

from __future__ import annotations

import pytest

from ovspec.base.errors import OvspecError
from ovspec.base.hub_names import HubName, parse_hub_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/model", HubName("org/model")),
        ("org/model-1.5@v2.0", HubName("org/model-1.5", "v2.0")),
        ("org/model@refs/pr/1", HubName("org/model", "refs/pr/1")),
        ("org/model:Q4_K_M", HubName("org/model", None, "Q4_K_M")),
        ("org/model@main:Q4_K_M", HubName("org/model", "main", "Q4_K_M")),
    ],
)
def test_parts_of_a_name(name: str, expected: HubName) -> None:
    assert parse_hub_name(name) == expected
    assert str(expected) == name


@pytest.mark.parametrize(
    "name",
    ["model", "./model", "../org/model", "/org/model", "~/model", "a/b/c", r"C:\a/b", "org/model.gguf", "a b/c", ""],
)
def test_paths_are_no_hub_ids(name: str) -> None:
    assert parse_hub_name(name) is None


@pytest.mark.parametrize(("name", "problem"), [("org/model@", "no revision after the @"), ("org/model:", "the colon")])
def test_empty_parts_are_refused(name: str, problem: str) -> None:
    with pytest.raises(OvspecError, match=problem):
        parse_hub_name(name)


def test_commits_are_left_out_of_messages() -> None:
    assert HubName("org/model", "a" * 40, "Q8_0").name_without_commit == "org/model:Q8_0"
    assert HubName("org/model", "v1").name_without_commit == "org/model@v1"
