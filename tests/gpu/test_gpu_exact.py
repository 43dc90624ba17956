"""Exact arithmetic on a GPU: it is offered where the probe finds a rule, and then no drafter, batch or cache changes a
bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpu_texts import DEMO, KERNELS, MARKS, PROMPT, PROMPTS, continued, on_gpu

import ovspec
from ovspec.engine.results import Result

pytestmark = MARKS
N = 48
Load = Callable[..., ovspec.LanguageModel]


@pytest.fixture(scope="module")
def load() -> Load:
    load = partial(on_gpu, arithmetic="exact")
    if (promise := load().target.arithmetic_note) != "exact":
        pytest.skip(f"this GPU is {promise}")
    return load


@pytest.fixture(scope="module")
def plain(load: Load) -> Result:
    return load().generate(PROMPT, max_tokens=N, logprobs=2)


def test_it_says_so(plain: Result) -> None:
    assert plain.stats.arithmetic == "exact" and "first tokens apart" in plain.stats.rule


def logprobs(text: Result) -> list[float]:
    return [known.logprob for known in text.logprobs or ()]


@pytest.mark.parametrize("draft", ["lookup", True, "lookup,draft"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_a_drafter_changes_no_bit(load: Load, draft: Any, options: dict[str, Any]) -> None:
    plain = load().generate(PROMPT, max_tokens=N, logprobs=2, **options)
    text = load(draft).generate(PROMPT, max_tokens=N, lookahead=3, logprobs=2, **options)
    assert text.stats.accepted > 0
    assert (text.token_ids, logprobs(text)) == (plain.token_ids, logprobs(plain))


def test_a_batch_changes_no_bit(load: Load, plain: Result) -> None:
    lm = load("lookup")
    for size in (2, 3):
        text = lm.generate(PROMPTS, max_tokens=N, batch_size=size, logprobs=2)[0]
        assert (text.token_ids, logprobs(text)) == (plain.token_ids, logprobs(plain))


def test_sessions_forks_files_and_cached_prompts_change_no_bit(load: Load, plain: Result, tmp_path: Path) -> None:
    lm = load("lookup")
    for text in continued(lm, 4, N - 4, tmp_path / "session.bin"):
        assert text.token_ids == plain.token_ids[4:]
    first, again = (lm.generate(PROMPT * 3, max_tokens=N, logprobs=2) for _ in range(2))
    assert again.stats.cached_tokens > 0
    assert (again.token_ids, logprobs(again)) == (first.token_ids, logprobs(first))


def test_a_fresh_process_writes_the_same_and_verify_certifies_it(plain: Result, tmp_path: Path) -> None:
    """Also its first tokens, which kernels that a GPU replaces in the background would compute otherwise."""
    options = ("--device", "GPU", "--cache-dir", str(KERNELS), "--arithmetic", "exact")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ovspec", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)

    made = run("generate", str(DEMO), PROMPT, "-n", str(N), "--json", "--draft", "lookup", *options)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["token_ids"] == plain.token_ids
    (tmp_path / "text.json").write_text(made.stdout, encoding="utf-8")
    found = run("verify", str(tmp_path / "text.json"), "--cache-dir", str(KERNELS))
    assert (found.returncode, found.stdout) == (0, f"exact: {N} of {N}\n"), found.stderr
