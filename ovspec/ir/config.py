"""The parts of a model's ``config.json`` used by ovspec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ovspec.base.files import read_dataclass, read_json
from ovspec.base.json_types import JsonObject

MODEL_FILE = "openvino_model.xml"
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
WINDOW_KEYS = ("sliding_window", "window_size", "attention_chunk_size")


@dataclass(frozen=True)
class ModelConfig:
    """A ``config.json``, and its content as JSON. Models write lengths in several ways: only ints count."""

    model_type: str | None = None
    eos_token_id: int | list[int] | None = None
    text_config: ModelConfig | None = None
    json_object: JsonObject = field(default_factory=dict)

    @property
    def language_config(self) -> ModelConfig:
        """The part about the language model."""
        return self.text_config or self

    @property
    def context_length(self) -> int | None:
        """Number of positions the model was trained for; None if the config doesn't say."""
        return next(self.language_config._read_positive_integers(CONTEXT_KEYS), None)

    @property
    def layer_count(self) -> int | None:
        """Number of layers; None if the config doesn't say."""
        return next(self.language_config._read_positive_integers(LAYER_KEYS), None)

    @property
    def attention_window(self) -> int | None:
        """Number of slots seen by the narrowest attention layer; None for full attention."""
        keys = WINDOW_KEYS
        if self.language_config.json_object.get("use_sliding_window") is False:
            keys = keys[1:]
        return min(self.language_config._read_positive_integers(keys), default=None)

    @property
    def has_chunked_attention(self) -> bool:
        """Whether some layers see only their chunk of the text. The IR counts chunks in slots, from the first slot."""
        return any(True for _ in self.language_config._read_positive_integers(("attention_chunk_size",)))

    @property
    def rope_switch_length(self) -> int | None:
        """Length in tokens beyond which all tokens get other rotary frequencies (LongRoPE); None for never."""
        config = self.language_config.json_object
        for rope_parameters in (config.get("rope_parameters"), config.get("rope_scaling")):
            if isinstance(rope_parameters, dict) and "longrope" in (
                rope_parameters.get("rope_type"),
                rope_parameters.get("type"),
            ):
                lengths = (json_part.get("original_max_position_embeddings") for json_part in (rope_parameters, config))
                return next((length for length in lengths if type(length) is int and length > 0), None)
        return None

    @property
    def convolution_width(self) -> int:
        """Number of inputs of Mamba's convolution."""
        return next(self.language_config._read_positive_integers(("conv_kernel",)), 4)

    def _read_positive_integers(self, keys: tuple[str, ...]) -> Iterator[int]:
        values = (self.json_object.get(key) for key in keys)
        return (
            positive_integer
            for positive_integer in values
            if type(positive_integer) is int and 0 < positive_integer < 2**31
        )


def read_model_config(folder: Path) -> ModelConfig:
    """Return the config in ``folder``, empty if it has none; raises OvspecError if it is damaged."""
    config = read_dataclass(ModelConfig, folder / "config.json")
    json_object = read_json(folder / "config.json")
    text_config = config.text_config and replace(config.text_config, json_object=json_object["text_config"])
    return replace(config, text_config=text_config, json_object=json_object)
