"""Exports by name: the format that is chosen, the line on what it costs, and the hub's models and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import DRAFT
from hubs import TOKEN, Repository, StandInHub, folder_files, stand_in_hub
from ovspec_export import named_export
from ovspec_export.compression import INT8, Compression
from ovspec_export.hub import read_quantization
from ovspec_export.named_export import ModelSize, choose_compression, describe_cost

from ovspec.base.errors import OvspecError

CHECKPOINT = folder_files(DRAFT)
GGUF = {"a/m-UD-Q4_K_XL.gguf": b"1234", "m-q8_0-00002-of-00002.gguf": b"56", "m-q8_0-00001-of-00002.gguf": b"789"}
GGUF |= {"m-f16.gguf": b"1", "mmproj-m-f16.gguf": b"", "README.md": b""}


@pytest.mark.parametrize(
    ("parameters", "keeps", "instruction_set", "expected"),
    [
        (1e9, False, "AVX512_CORE_VNNI", INT8),
        (1e9, False, "AVX2_VNNI", INT8),
        (1e9, False, "AVX2", Compression("int8", sym=True)),
        (1e9, False, "aarch64", INT8),
        (8e9, False, "AVX2_VNNI", Compression("int4")),
        (8e9, True, "AVX2_VNNI", None),
    ],
)
def test_the_format_is_chosen_by_size_and_processor(
    parameters: float, keeps: bool, instruction_set: str, expected: Compression | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_export, "describe_instruction_set", lambda: instruction_set)
    monkeypatch.setattr(named_export.psutil, "virtual_memory", lambda: SimpleNamespace(total=16e9))
    assert choose_compression(ModelSize("m", 0, 2 * parameters, parameters, keeps)) == expected


def test_the_line_says_what_is_fetched_and_how_long_it_takes() -> None:
    large = ModelSize("org/large", 16e9, 16e9, 8e9, False)
    line = "org/large: an export in int4 is made once: 16.00 GB to fetch, 5.02 GB of disk, about 62 minutes"
    assert describe_cost("org/large", [large], "int4") == f"{line} (at 100 Mbit/s)"
    file = ModelSize("file.gguf", 0, 100e6, 50e6, True)
    line = "file: an export with its own weights is made once: 130.0 MB of disk, about a minute"
    assert describe_cost("file", [file], "keep") == line


def test_a_full_disk_is_noticed_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1e9))
    with pytest.raises(OvspecError, match=r"fetching org/large needs about 16.00 GB there, but only 1.00 GB is free"):
        named_export.check_room_for_files([ModelSize("org/large", 16e9, 16e9, 8e9, False)])


@pytest.mark.parametrize(
    ("path", "quantization"),
    [
        ("m-Q4_K_M.gguf", "Q4_K_M"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("IQ4_XS/qwen2.5-iq4_xs-00001-of-00002.gguf", "iq4_xs"),
    ],
)
def test_quantisation_in_a_file_name(path: str, quantization: str) -> None:
    assert read_quantization(path) == quantization


MEASURE = """
import contextlib, io, json, sys
from dataclasses import asdict
from ovspec.base.errors import OvspecError
from ovspec_export.named_export import measure_model

answers = []
for name in sys.argv[1:]:
    try:
        answers.append(asdict(measure_model(name)))
    except OvspecError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


def measure(names: Sequence[str], hub: StandInHub, home: Path, **variables: str) -> list[Any]:
    """Return what is found out about models in a process of its own, or why they can't be had."""
    environment = {**os.environ, **hub.environment(home), **variables}
    command = [sys.executable, "-c", MEASURE, *names]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_models_of_the_hub_are_measured_before_their_weights_come(tmp_path: Path) -> None:
    repositories = {"model": Repository(CHECKPOINT), "gguf": Repository(GGUF)}
    repositories |= {"gated": Repository(CHECKPOINT, gated=True), "private": Repository(CHECKPOINT, private=True)}
    with stand_in_hub(**repositories) as hub:
        names = ["org/model", "org/gguf:Q8_0", "org/gguf:ud-q4_k_xl", "org/gguf:F16", "org/gguf", "org/model:Q4"]
        model, shards, in_folder, f16, *refusals = measure([*names, "org/gated", "org/private"], hub, tmp_path / "home")
        commits = {name: repository.commit for name, repository in hub.repositories.items()}
        weight_bytes = len(CHECKPOINT["model.safetensors"])
        assert model["name"] == f"org/model@{commits['org/model']}"
        assert weight_bytes < model["fetched_bytes"] < weight_bytes + 600_000
        assert model["parameter_count"] == weight_bytes / 2 and not model["keeps_weights"]
        assert shards["name"] == f"org/gguf@{commits['org/gguf']}:Q8_0"
        assert (shards["fetched_bytes"], shards["keeps_weights"]) == (5, True)
        assert (f16["weight_bytes"], f16["keeps_weights"]) == (1, False)
        listed = "the repository has the GGUF files UD-Q4_K_XL, f16, q8_0; add a colon and a file to the name, as in "
        assert in_folder["fetched_bytes"] == 4
        assert refusals[0] == f"org/gguf: {listed}org/gguf:UD-Q4_K_XL."
        assert "has no GGUF file; leave out ':" in refusals[1]
        assert "accept the terms on its page and log in with 'hf auth login'" in refusals[2]
        assert "or log in with 'hf auth login' if it is private" in refusals[3]
        assert not hub.fetched(".safetensors") and not hub.fetched(".gguf")
        with_token = measure(["org/gated", "org/private"], hub, tmp_path / "home", HF_TOKEN=TOKEN)
        assert [answer["name"].partition("@")[0] for answer in with_token] == ["org/gated", "org/private"]
        other_token = measure(["org/gated"], hub, tmp_path / "other", HF_TOKEN="hf_other")
        assert other_token[0].endswith("accept the terms on its page and check your token's access.")
        requests = len(hub.requested)
        offline = measure(["org/model"], hub, tmp_path / "nothing", HF_HUB_OFFLINE="1")
        assert offline[0].endswith(
            "the hub cannot be reached; unset the variable HF_HUB_OFFLINE to download the model."
        )
        assert len(hub.requested) == requests
