"""Generation defaults from a model's own files: EOS and BOS tokens, limits, penalties and recommended sampling."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from ovspec.base.errors import OvspecError, PromptError
from ovspec.base.files import read_dataclass, read_json
from ovspec.ir.config import ModelConfig
from ovspec.params import make_params
from ovspec.params.option import Option
from ovspec.params.sampling import DISTRIBUTION_OPTIONS, SAMPLING_OPTIONS
from ovspec.params.values import check_value
from ovspec.text.tokenizer import Tokenizer
from ovspec.text.tokenizer_files import TokenId

DEFAULT_MAX_TOKENS = 256
GENERATION_CONFIG_FILE = "generation_config.json"
DO_SAMPLE_OPTION = Option("Whether texts are sampled.", name="do_sample", value_type=bool)

# Settings of a generation config that Hugging Face's greedy generate applies and ovspec doesn't; their neutral values.
UNSUPPORTED_SETTINGS = {"no_repeat_ngram_size": 0, "min_length": 0} | dict.fromkeys(
    ("bad_words_ids", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias")
)


@dataclass(frozen=True)
class GenerationFile:
    """What ovspec applies of a ``generation_config.json``."""

    bos_token_id: TokenId | None = None
    eos_token_id: int | list[int] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    repetition_penalty: float | None = None
    suppress_tokens: list[int] | None = None


class GenerationConfig:
    """The generation config in ``folder``; the EOS falls back to ``config``. Warns about settings it can't apply."""

    def __init__(self, folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
        self._file = folder / GENERATION_CONFIG_FILE
        self.settings = read_dataclass(GenerationFile, self._file)
        self._config = config
        self._tokenizer = tokenizer
        content = read_json(self._file)
        names = [name for name, neutral in UNSUPPORTED_SETTINGS.items() if content.get(name) not in (None, neutral)]
        if names:
            warning = f"{folder}: its generation config sets {', '.join(names)}, which ovspec does not apply"
            warnings.warn(warning, stacklevel=5)

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """The token ids that end a text."""
        files = (self.settings, self._config, self._config.text_config)
        eos = next((file.eos_token_id for file in files if file and file.eos_token_id is not None), [])
        return frozenset(eos if isinstance(eos, list) else [eos])

    @property
    def bos_ids(self) -> np.ndarray:
        """The tokenizer's BOS, else the generation config's, (n,) int64; empty if there is none."""
        special_ids = self._tokenizer.encode("")
        bos = self.settings.bos_token_id
        if len(special_ids) or bos is None:
            return special_ids
        if bos not in self._tokenizer.known_ids:
            raise OvspecError(f"{self._file}: bos_token_id {bos} is not in the vocabulary; export the model again.")
        return np.array([bos], dtype=np.int64)

    @property
    def empty_prompt_ids(self) -> np.ndarray:
        """The tokens used for an empty prompt, (n,) int64; raises OvspecError if the model has no BOS."""
        if len(bos_ids := self.bos_ids):
            return bos_ids
        raise PromptError("The prompt is empty, and this model has no BOS token to start from; give a prompt.")


def read_recommended_sampling(folder: Path, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the generation config in ``folder`` recommends for the sampling options that aren't ``chosen``.

    What it leaves out is off, as it is if not given; nothing is recommended for a ``chosen`` temperature of 0.

    Raises:
        OvspecError: a value that would be taken is invalid.
    """
    if chosen.get("temperature") == 0:
        return {}
    file = folder / GENERATION_CONFIG_FILE
    settings = {name: value for name, value in read_json(file).items() if value is not None}
    try:
        check_value(settings.get("do_sample", False), DO_SAMPLE_OPTION)
        recommended = {"temperature": 1.0} | {name: settings[name] for name in DISTRIBUTION_OPTIONS if name in settings}
        if not settings.get("do_sample") or recommended["temperature"] == 0:
            return {}
        applied = {name: value for name, value in recommended.items() if name not in chosen}
        make_params({"temperature": 1.0} | applied)
    except OvspecError as error:
        problem = str(error).replace("`", "").rstrip(".")  # it is about no option of the caller
        remedy = "correct it in the checkpoint and export that again, or give `temperature=0`"
        raise OvspecError(f"{file}: {problem}; {remedy}.") from None
    return {name: value for name, value in applied.items() if value != SAMPLING_OPTIONS[name].default}


def format_sampling(sampling: Mapping[str, Any]) -> str:
    """Return sampling options as in "temperature 0.6, top-p 0.95"."""
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in sampling.items())
