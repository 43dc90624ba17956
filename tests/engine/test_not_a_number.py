"""Logits that are not numbers end a text with a sentence, whatever chooses and proposes its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import PROMPTS

import ovspec
from ovspec.base.errors import InferenceError
from ovspec.ir.request import InferenceRequest


class Broken:
    """An infer request whose logits are ``value`` from its ``after``-th inference on."""

    def __init__(self, raw: Any, after: int, value: float) -> None:
        self._raw, self._left, self._value = raw, after, value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def get_output_tensor(self, index: int) -> Any:
        self._left -= 1
        tensor = self._raw.get_output_tensor(index)
        if self._left < 0:
            tensor.data.reshape(-1)[:: 7 if np.isnan(self._value) else 1] = self._value
        return tensor


DRAFTS = (False, "lookup", True, "lookup,draft")
# Quick runs combine each setting with each other one once.
PAIRWISE = {
    (False, np.nan, 0, 1, 0.0),
    (False, np.inf, 3, 3, 1.0),
    (False, -np.inf, 0, 3, 1.0),
    ("lookup", np.nan, 3, 1, 1.0),
    ("lookup", np.inf, 0, 3, 0.0),
    ("lookup", -np.inf, 3, 1, 0.0),
    (True, np.nan, 0, 3, 1.0),
    (True, np.inf, 3, 1, 0.0),
    (True, -np.inf, 0, 1, 0.0),
    ("lookup,draft", np.nan, 3, 3, 0.0),
    ("lookup,draft", np.inf, 0, 1, 1.0),
    ("lookup,draft", -np.inf, 3, 3, 1.0),
}
CASES = itertools.product(DRAFTS, (np.nan, np.inf, -np.inf), (0, 3), (1, 3), (0.0, 1.0))


@pytest.mark.parametrize(
    ("draft", "value", "after", "batch", "temperature"),
    [pytest.param(*case, marks=() if case in PAIRWISE else pytest.mark.slow) for case in CASES],
)
def test_a_sentence_instead_of_a_token(
    load: Callable[..., ovspec.LanguageModel],
    temperature: float,
    draft: bool | str,
    batch: int,
    after: int,
    value: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm, renew = load(draft=draft), InferenceRequest.replace_openvino_request

    def broken(request: InferenceRequest) -> None:
        renew(request)
        request.openvino_request = Broken(request.openvino_request, after, value)  # type: ignore[assignment]

    monkeypatch.setattr(InferenceRequest, "replace_openvino_request", broken)
    monkeypatch.setattr(lm.runtime.decoder_pool, "_idle_sets", [])
    lookahead: dict[str, Any] = {"lookahead": 2} if draft else {}
    with pytest.raises(InferenceError, match="the model computed NaN or infinite logits"):
        lm.generate(PROMPTS[:batch], max_tokens=20, temperature=temperature, seed=1, ignore_eos=True, **lookahead)
    monkeypatch.undo()
    assert lm.generate(PROMPTS[0], max_tokens=3, ignore_eos=True).stats.generated_tokens == 3
