"""The interface of GPTFast (github.com/MDK8888/GPTFast), for existing code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ovspec.api.loading import DraftArgument, load
from ovspec.api.model import LanguageModel
from ovspec.base.errors import OvspecError
from ovspec.params.option import OptionValue
from ovspec.sampling.samplers import SampleFunction


class GPTFastModel:
    """A loaded model with GPTFast's ``generate``; made by ``gpt_fast``."""

    def __init__(self, model: LanguageModel, sample_function: SampleFunction | None) -> None:
        self.model = model
        self._sample_function = sample_function

    def generate(
        self, cur_tokens: np.ndarray, max_tokens: int, speculate_k: int | None = None, **sampling_kwargs: Any
    ) -> np.ndarray:
        """Return the prompt and ``max_tokens`` more tokens, (1, n + max_tokens) int64.

        Args:
            cur_tokens: the prompt, (1, n) or (n,) token ids.
            max_tokens: number of tokens to generate.
            speculate_k: tokens proposed per round; by default chosen automatically.
            sampling_kwargs: keyword arguments for the sample function.

        Raises:
            OvspecError: ``cur_tokens`` has another shape, or there is no sample function for ``sampling_kwargs``.
        """
        prompt = np.asarray(cur_tokens, dtype=np.int64)
        if prompt.ndim == 2 and len(prompt) == 1:
            prompt = prompt[0]
        if prompt.ndim != 1:
            raise OvspecError(f"cur_tokens has the shape {prompt.shape}; it must be (1, n) or (n,).")
        if sampling_kwargs and not self._sample_function:
            raise OvspecError(
                f"{', '.join(sampling_kwargs)}: to use these options, pass a sample_function to gpt_fast()."
            )
        result = self.model.generate(
            prompt,
            max_tokens=max_tokens,
            ignore_eos=True,
            lookahead=speculate_k,
            sampler=self._sample_function,
            sampler_options=sampling_kwargs,
        )
        return np.concatenate((prompt, result.token_ids))[None]


def gpt_fast(
    target: str | Path,
    draft: DraftArgument | Sequence[DraftArgument] | None = None,
    sample_function: SampleFunction | None = None,
    **options: OptionValue,
) -> GPTFastModel:
    """Load a model with the interface of GPTFast (github.com/MDK8888/GPTFast), on NumPy arrays.

    Args:
        target, draft, options: as for ``ovspec.load``.
        sample_function: ``sample(logits (1, vocab), tokens so far (n,), **sampling_kwargs) -> token id``; by default
            greedy. As in GPTFast, only ``max_tokens`` ends a text.
    """
    return GPTFastModel(load(target, draft, **options), sample_function)
