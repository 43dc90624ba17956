"""Common parts of the tests on a GPU, which are skipped where OpenVINO finds none."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ovspec
from ovspec.engine.results import Result
from ovspec.ir.device import openvino_core

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO = ROOT / "models" / "demo"
# Kernels take minutes to compile on a stand-in, so what is compiled is kept between runs.
KERNELS = ROOT / ".cache" / "gpu"
NOISE = 0.1  # between the logits of the two most likely tokens, up to which a text may go either way in 16 bits
PROMPT = "import os\nimport sys\n\n\ndef main():\n    return os.path.join(sys.path[0], 'a')\n\n\ndef main2():\n"
PROMPTS = [PROMPT, "class A:\n    def __init__(self, first, second):\n", "for line in open(path):\n    print("]
HAS_GPU = any(name.startswith("GPU") for name in openvino_core().available_devices)
MARKS = [
    pytest.mark.gpu,
    pytest.mark.limit(900),
    pytest.mark.skipif(not HAS_GPU, reason="OpenVINO finds no GPU; see CONTRIBUTING.md for a stand-in"),
]


@functools.cache
def on_gpu(draft: Any = "none", **options: Any) -> ovspec.LanguageModel:
    """Load the demo pair on the GPU, once for each set of options."""
    return ovspec.load(DEMO, draft, **{"device": "GPU", "cache_dir": KERNELS} | options)


def assert_same_where_decided(plain: Result, other: Result) -> None:
    """Assert that two greedy texts are equal, or part only where the two most likely tokens are as good as equal.

    ``plain`` has log-probabilities, at least of two tokens.
    """
    assert plain.logprobs
    ours, theirs = plain.token_ids, other.token_ids
    for index, (token, known) in enumerate(zip(ours, plain.logprobs, strict=True)):
        if theirs[index : index + 1] != [token]:
            best, second = (logprob for _, logprob in known.top[:2])
            assert best - second <= NOISE, f"token {index}: {best - second:.2f} apart, {plain.text!r} {other.text!r}"
            return
    assert len(ours) == len(theirs)


def after(text: Result, tokens: int) -> Result:
    """Return ``text`` without its first tokens."""
    assert text.logprobs
    return replace(text, token_ids=text.token_ids[tokens:], logprobs=text.logprobs[tokens:])


def continued(lm: ovspec.LanguageModel, first: int, more: int, file: Path) -> list[Result]:
    """Return the ``more`` tokens after the ``first`` of ``PROMPT``: in a session, in its fork, and from its file."""
    with lm.session() as session:
        session.append(PROMPT)
        session.generate(max_tokens=first)
        session.save(file)
        fork = session.fork()
        texts = [each.generate(max_tokens=more) for each in (session, fork)]
        fork.close()
    with lm.session() as other:
        other.load(file)
        return [*texts, other.generate(max_tokens=more)]
