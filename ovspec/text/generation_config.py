"""Generation defaults from a model's own files: EOS and BOS tokens, limits and penalties."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from ovspec.errors import OvspecError, PromptError
from ovspec.files import read_as
from ovspec.ir.config import ModelConfig
from ovspec.options import SamplingParams
from ovspec.text.tokenizer import Tokenizer
from ovspec.text.tokenizer_files import TokenId

DEFAULT_MAX_TOKENS = 256

# Settings of a generation config that Hugging Face's greedy generate applies and ovspec does not; their neutral values.
NOT_APPLIED = {"no_repeat_ngram_size": 0, "min_length": 0} | dict.fromkeys(
    ("bad_words_ids", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias")
)


@dataclass(frozen=True)
class GenerationFile:
    """What ovspec reads of a ``generation_config.json``, and ``NOT_APPLIED``."""

    bos_token_id: TokenId | None = None
    eos_token_id: int | list[int] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    repetition_penalty: float | None = None
    suppress_tokens: list[int] | None = None
    no_repeat_ngram_size: Any = None
    min_length: Any = None
    bad_words_ids: Any = None
    begin_suppress_tokens: Any = None
    forced_bos_token_id: Any = None
    forced_eos_token_id: Any = None
    sequence_bias: Any = None


class GenerationConfig:
    """The generation config in ``folder``; the EOS falls back to ``config``. Warns about settings it can't apply."""

    def __init__(self, folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
        self._file = folder / "generation_config.json"
        self.values = read_as(GenerationFile, self._file)
        self._config, self._tokenizer = config, tokenizer
        asked = [name for name, neutral in NOT_APPLIED.items() if getattr(self.values, name) not in (None, neutral)]
        if asked:
            warning = f"{folder}: its generation config sets {', '.join(asked)}, which ovspec does not apply"
            warnings.warn(warning, stacklevel=4)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The token ids that end a text."""
        files = (self.values, self._config, self._config.text_config)
        said = (file.eos_token_id for file in files if file)
        eos = next((ids for ids in said if ids is not None), [])
        return frozenset(eos if isinstance(eos, list) else [eos])

    @property
    def bos(self) -> np.ndarray:
        """The tokenizer's BOS, else the generation config's, (n,) int64; empty if there is none."""
        special, bos = self._tokenizer.encode(""), self.values.bos_token_id
        if len(special) or bos is None:
            return special
        if bos not in self._tokenizer.known:
            raise OvspecError(f"{self._file}: bos_token_id {bos} is not in the vocabulary; export the model again.")
        return np.array([bos], dtype=np.int64)

    @property
    def beginning(self) -> np.ndarray:
        """The tokens used for an empty prompt, (n,) int64; raises OvspecError if the model has no BOS."""
        if len(bos := self.bos):
            return bos
        raise PromptError("The prompt is empty, and this model has no BOS token to start from; give a prompt.")

    def max_tokens(self, prompt: int, params: SamplingParams, context: int | None) -> int:
        """Return how many tokens to generate after ``prompt`` tokens; raises OvspecError if ``context`` has no room."""
        left = context - prompt if context else sys.maxsize
        if left < 1:
            message = f"The prompt has {prompt} tokens, but the context is {context}; shorten the prompt."
            raise PromptError(message, too_long=True)
        default = self.values.max_new_tokens or DEFAULT_MAX_TOKENS
        return int(min(default if params.max_tokens is None else params.most_tokens, left))

    def complete(self, params: SamplingParams) -> SamplingParams:
        """Return ``params`` with the model's defaults filled in; raises OvspecError for ids outside the vocabulary."""
        config, given = self.values, {}
        if params.repetition_penalty is None:
            given["repetition_penalty"] = config.repetition_penalty
        if params.min_tokens is None and config.min_new_tokens:
            given["min_tokens"] = int(min(config.min_new_tokens, params.most_tokens))
        if config.suppress_tokens:
            given["logit_bias"] = dict.fromkeys(config.suppress_tokens, -np.inf) | dict(params.logit_bias)
        for name, ids in (("logit_bias", params.logit_bias), ("stop_ids", params.stop_ids)):
            unknown = next((token for token in ids if not -(2**63) <= token < 2**63), None)
            if unknown is None and len(ids):
                unknown = self._tokenizer.known.first_unknown(np.array(list(ids), dtype=np.int64))
            if unknown is not None:
                raise OvspecError(f"`{name}`: token id {str(unknown)[:20]} is not in the vocabulary.")
        return replace(params, **given) if given else params
