"""Generation defaults from a model's own files: EOS and BOS tokens, limits and penalties."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ovspec.errors import OvspecError
from ovspec.files import read_json
from ovspec.options import SamplingParams
from ovspec.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 256

# Settings of a generation config that Hugging Face's greedy generate applies and ovspec does not; their neutral values.
NOT_APPLIED = {"no_repeat_ngram_size": 0, "min_length": 0} | dict.fromkeys(
    ("bad_words_ids", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias")
)


class GenerationConfig:
    """The generation config in ``folder``; the EOS falls back to ``config``. Warns about settings it can't apply."""

    def __init__(self, folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> None:
        self.values = read_json(folder / "generation_config.json")
        self._config, self._tokenizer = config, tokenizer
        asked = [name for name, neutral in NOT_APPLIED.items() if self.values.get(name) not in (None, neutral)]
        if asked:
            warning = f"{folder}: its generation config sets {', '.join(asked)}, which ovspec does not apply"
            warnings.warn(warning, stacklevel=4)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The token ids that end a text."""
        said = (config.get("eos_token_id") for config in (self.values, self._config))
        eos = next((ids for ids in said if ids is not None), [])
        return frozenset(eos if isinstance(eos, list) else [eos])

    @property
    def bos(self) -> np.ndarray:
        """The tokenizer's BOS, else the generation config's, (n,) int64; empty if there is none."""
        special, bos = self._tokenizer.encode(""), self.values.get("bos_token_id")
        return special if len(special) or bos is None else np.array([bos], dtype=np.int64)

    @property
    def beginning(self) -> np.ndarray:
        """The tokens used for an empty prompt, (n,) int64; raises OvspecError if the model has no BOS."""
        if len(bos := self.bos):
            return bos
        raise OvspecError("The prompt is empty, and this model has no BOS token to start from; give a prompt.")

    def max_tokens(self, prompt: int, wanted: int | None, context: int | None) -> int:
        """Return how many tokens to generate after ``prompt`` tokens; raises OvspecError if ``context`` has no room."""
        if wanted is not None and wanted < 1:
            raise OvspecError(f"max_tokens is {wanted}; it must be at least 1.")
        left = context - prompt if context else math.inf
        if left < (wanted or 1):
            sizes = f"{prompt} tokens and {wanted or 1} more are requested, but the context is {context}"
            raise OvspecError(f"The prompt has {sizes}; shorten the prompt or lower max_tokens.")
        return wanted or int(min(self.values.get("max_new_tokens") or DEFAULT_MAX_TOKENS, left))

    def complete(self, params: SamplingParams) -> SamplingParams:
        """Return ``params`` with the model's defaults filled in; raises OvspecError for ids outside the vocabulary."""
        config, given = self.values, {}
        if params.repetition_penalty is None:
            given["repetition_penalty"] = config.get("repetition_penalty")
        if params.min_tokens is None and config.get("min_new_tokens"):
            given["min_tokens"] = min(config["min_new_tokens"], params.max_tokens or config["min_new_tokens"])
        if config.get("suppress_tokens"):
            given["logit_bias"] = dict.fromkeys(config["suppress_tokens"], -np.inf) | dict(params.logit_bias)
        for name, ids in (("logit_bias", params.logit_bias), ("stop_ids", params.stop_ids)):
            unknown = next((token for token in ids if not -(2**63) <= token < 2**63), None)
            if unknown is None and len(ids):
                unknown = self._tokenizer.known.first_unknown(np.array(list(ids), dtype=np.int64))
            if unknown is not None:
                raise OvspecError(f"{name}: token id {str(unknown)[:20]} is not in the vocabulary.")
        return replace(params, **given) if given else params
