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

# Settings of Hugging Face's greedy generate unsupported by ovspec, with their neutral values.
UNSUPPORTED_SETTINGS = {"no_repeat_ngram_size": 0, "min_length": 0} | dict.fromkeys(
    ("bad_words_ids", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias")
)


@dataclass(frozen=True)
class GenerationConfigFile:
    """The settings of a ``generation_config.json`` supported by ovspec."""

    bos_token_id: TokenId | None = None
    eos_token_id: int | list[int] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    repetition_penalty: float | None = None
    suppress_tokens: list[int] | None = None


class GenerationConfig:
    """The generation config in ``folder``; the EOS falls back to ``config``. Warns about unsupported settings."""

    def __init__(self, folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
        self._config_file = folder / GENERATION_CONFIG_FILE
        self.settings = read_dataclass(GenerationConfigFile, self._config_file)
        self._model_config = config
        self._tokenizer = tokenizer
        config_json = read_json(self._config_file)
        unsupported_names = [
            setting
            for setting, neutral_value in UNSUPPORTED_SETTINGS.items()
            if config_json.get(setting) not in (None, neutral_value)
        ]
        if unsupported_names:
            warning = (
                f"{folder}: its generation config sets {', '.join(unsupported_names)}, which ovspec does not apply"
            )
            warnings.warn(warning, stacklevel=5)

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a text."""
        configs = (self.settings, self._model_config, self._model_config.text_config)
        eos = next((config.eos_token_id for config in configs if config and config.eos_token_id is not None), [])
        return frozenset(eos if isinstance(eos, list) else [eos])

    @property
    def bos_ids(self) -> np.ndarray:
        """The tokenizer's BOS, else the generation config's, (n,) int64; empty if there is none."""
        special_ids = self._tokenizer.encode("")
        bos_id = self.settings.bos_token_id
        if len(special_ids) or bos_id is None:
            return special_ids
        if bos_id not in self._tokenizer.known_ids:
            raise OvspecError(
                f"{self._config_file}: bos_token_id {bos_id} is not in the vocabulary; export the model again."
            )
        return np.array([bos_id], dtype=np.int64)

    @property
    def empty_prompt_ids(self) -> np.ndarray:
        """The tokens used for an empty prompt, (n,) int64; raises OvspecError if the model has no BOS."""
        if len(bos_ids := self.bos_ids):
            return bos_ids
        raise PromptError("The prompt is empty, but the model has no BOS token to start with; give a prompt with text.")


def read_recommended_sampling(folder: Path, chosen_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling options recommended by the generation config in ``folder``, except ``chosen_options``.

    Options missing in it are off, as by default; nothing is recommended with a chosen temperature of 0.

    Raises:
        OvspecError: a recommended value is invalid.
    """
    if chosen_options.get("temperature") == 0:
        return {}
    config_file = folder / GENERATION_CONFIG_FILE
    settings = {option: value for option, value in read_json(config_file).items() if value is not None}
    try:
        check_value(settings.get("do_sample", False), DO_SAMPLE_OPTION)
        recommended = {"temperature": 1.0} | {
            option: settings[option] for option in DISTRIBUTION_OPTIONS if option in settings
        }
        if not settings.get("do_sample") or recommended["temperature"] == 0:
            return {}
        applied_settings = {option: value for option, value in recommended.items() if option not in chosen_options}
        make_params({"temperature": 1.0} | applied_settings)
    except OvspecError as error:
        problem = str(error).replace("`", "").rstrip(".")  # without backticks: it isn't an option of the caller
        remedy = "correct this file in the checkpoint and export the model again, or set `temperature=0`"
        raise OvspecError(f"{config_file}: {problem}; {remedy}.") from None
    return {option: value for option, value in applied_settings.items() if value != SAMPLING_OPTIONS[option].default}


def format_sampling(sampling: Mapping[str, Any]) -> str:
    """Return sampling options as in "temperature 0.6, top-p 0.95"."""
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in sampling.items())
