"""The sources of models: a checkpoint or an IR, in a folder or on the Hugging Face hub, or a GGUF file."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_dataclass, read_json
from ovspec.base.json_types import JsonObject
from ovspec.ir.compile import MODEL_FILE
from ovspec.ir.config import LAYER_KEYS
from ovspec.setup.identity import list_model_files
from ovspec.text.chat_template import TEMPLATES_FOLDER
from ovspec.text.tokenizer_files import TOKENIZER_CONFIG_FILE
from ovspec_export.families import (
    FLAT_CONFIG_FAMILIES,
    TEXT_MODEL_CLASSES,
    TEXT_ONLY_FAMILIES,
    Family,
    TextOnlyFamily,
    find_family,
)
from ovspec_export.gguf_config import build_config
from ovspec_export.gguf_file import GgufHeaders
from ovspec_export.head_layout import (
    HeadLayout,
    check_head_supported,
    flatten_head_config,
    is_head_config,
    map_to_eagle_head_name,
    read_head_layout,
)
from ovspec_export.mtp_layout import MTP_ARCHITECTURE, find_mtp_layers
from ovspec_export.pickled import read_pickled_tensors
from ovspec_export.quantised import check_quantisation, has_kept_layout

FLOAT_TYPES = {"F32", "F16", "BF16"}  # names in safetensors files
# All files used in an export. Pickled weights are not among them, because loading them could run code.
EXPORT_PATTERNS = ["model*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "openvino_*"]
CODE_PATTERNS = ["*.py"]
# For heads only, and only their tensors are read.
PICKLED_PATTERNS = ["pytorch_model*.bin", "pytorch_model*.json"]
ADAPTER_FILE = "adapter_config.json"
# Small files for deciding on the rest of a download. A graph without weights in its folder belongs to an IR.
CONFIG_PATTERNS = ["config.json", TOKENIZER_CONFIG_FILE, ADAPTER_FILE, MODEL_FILE]
TEMPLATE_PATTERNS = [f"{TEMPLATES_FOLDER}/*.jinja"]
# Excluded files. The hub's ``*`` matches slashes, too, so ``*.json`` alone would match other folders' files.
SUBFOLDER_PATTERN, DEEPER_SUBFOLDER_PATTERN = "*/*", "*/*/*"
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")  # in transformers' order of preference
TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt")  # ends of the names of files next to the weights
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
TOKENIZER_FILES += ("sentencepiece.bpe.model",)

# Prefixes of tensors unused by the text model: for images, sound, and heads for further tokens.
NON_TEXT_TENSORS = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision|embed_audio)\.|mtp\."
)
# Entries of a config about parts other than the text model.
NON_TEXT_ENTRIES = re.compile(r"(vision|image|video)_|(architectures|model_type|text_config|transformers_version)$")

# Numbers under different names in the families' configs.
CONFIG_NUMBERS = {"layers": LAYER_KEYS, "hidden": ("hidden_size", "n_embd", "d_model"), "vocab": ("vocab_size",)}


@dataclass(frozen=True)
class WeightIndex:
    """The part of ``model.safetensors.index.json`` with each tensor's file."""

    weight_map: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """A model on the local disk.

    name: its name in the manifest: the hub id or the folder's name.
    revision: the hub's commit, or a checksum of a folder's files.
    """

    name: str
    path: Path
    is_ir: bool
    revision: str

    def tensor_headers(self) -> dict[str, JsonObject]:
        """Return the entries of each tensor in the headers of a checkpoint's safetensors files."""
        files = sorted(self.path.glob("model*.safetensors"))
        headers = {name: tensor for file in files for name, tensor in read_safetensors_header(file).items()}
        return {name: tensor for name, tensor in headers.items() if name != "__metadata__"}

    def tensor_shapes(self) -> dict[str, list[int]]:
        """Return the shapes of a checkpoint's tensors, without unused parts."""
        headers = self.tensor_headers().items()
        return {name: tensor["shape"] for name, tensor in headers if not NON_TEXT_TENSORS.match(name)}

    @functools.cached_property
    def config(self) -> JsonObject:
        """Its config.json."""
        return read_json(self.path / "config.json")

    @functools.cached_property
    def text_config(self) -> JsonObject | None:
        """The config of a text model among other parts, such as a model for images; None if it is alone.

        Older checkpoints of Qwen have the entries of all parts in a single list.
        """
        if self.is_ir:
            return None
        outer_family = str(self.config.get("model_type"))
        text_config = self.config.get("text_config")
        if outer_family in FLAT_CONFIG_FAMILIES and not text_config:
            text_entries = {name: entry for name, entry in self.config.items() if not NON_TEXT_ENTRIES.match(name)}
            return text_entries | {"model_type": f"{outer_family}_text"}
        return text_config if isinstance(text_config, dict) else None

    def get_config_number(self, name: str) -> int | None:
        """Return a number of ``CONFIG_NUMBERS`` for the text model, or None if it is missing in the config."""
        config = self.text_config or self.config.get("text_config") or self.config
        if self.text_only_family:
            config = self.text_only_family.config_defaults | config
        return next((config[key] for key in CONFIG_NUMBERS[name] if type(config.get(key)) is int), None)

    @property
    def has_non_text_parts(self) -> bool:
        """Whether its text model is a part among others."""
        return self.text_config is not None

    @property
    def text_only_family(self) -> TextOnlyFamily | None:
        """The family equal to its text model, if it has another name."""
        return TEXT_ONLY_FAMILIES.get(str((self.text_config or {}).get("model_type")))

    @property
    def model_type(self) -> str:
        """The name of the text model's family."""
        if self.text_only_family:
            return self.text_only_family.family
        config = self.config if self.text_config is None else self.text_config
        return str(config.get("model_type"))

    @property
    def family(self) -> Family:
        """How its family is exported; raises OvspecError if it can't be."""
        outer_family = self.config.get("model_type")
        if self.has_non_text_parts and self.model_type not in TEXT_MODEL_CLASSES.get(str(outer_family), ()):
            raise OvspecError(
                f"{self.name}: the text part of a {outer_family} model can't be exported; choose a text-only model, "
                f"or one of the families {', '.join(TEXT_MODEL_CLASSES)}."
            )
        return find_family(self.model_type, self.name)

    def runs_own_code(self, is_trusted: bool) -> bool:
        """Return whether its own Python code is run: if it is trusted, and transformers has none for the family."""
        return is_trusted and self.family.remote_code

    @property
    def parameter_count(self) -> int:
        """The number of a checkpoint's parameters; MXFP4 has two in each byte of its blocks."""
        return sum(math.prod(shape) * (1 + name.endswith("_blocks")) for name, shape in self.tensor_shapes().items())

    def weight_widths(self) -> dict[str, int]:
        """Return the number of weights multiplied per input vector, by layer, for layers of the usual names."""
        shapes = self.tensor_shapes().items()
        return {name: shape[-1] for name, shape in shapes if name.endswith("proj.weight") and len(shape) == 2}

    @property
    def is_quantised(self) -> bool:
        """Whether its weights are integers with scales, so an export can keep them."""
        return not self.is_ir and has_kept_layout(self.config)

    @property
    def size_in_bytes(self) -> int:
        """The size of its files in bytes."""
        return sum(path.stat().st_size for path in self.path.iterdir() if path.is_file())


@dataclass(frozen=True)
class GgufSource(Source):
    """A model in the GGUF file ``path``. gguf_headers: its headers, and its other shards' headers."""

    gguf_headers: GgufHeaders

    def tensor_shapes(self) -> dict[str, list[int]]:
        """Return the shapes of its tensors, by ggml's names."""
        return {name: list(info.shape) for name, info in self.gguf_headers.tensors.items()}

    @functools.cached_property
    def config(self) -> JsonObject:
        """The config.json of the file's original checkpoint."""
        return build_config(self.gguf_headers)

    def weight_widths(self) -> dict[str, int]:
        """Return the number of weights multiplied with one vector, by layer."""
        shapes = self.tensor_shapes().items()
        return {name: shape[-1] for name, shape in shapes if name.startswith("blk.") and len(shape) > 1}

    @property
    def is_quantised(self) -> bool:
        """Whether its weights are integers with scales, so an export can keep them."""
        return any(info.is_quantised for info in self.gguf_headers.tensors.values())

    @property
    def size_in_bytes(self) -> int:
        """The size of its files in bytes."""
        return sum(path.stat().st_size for path in list_model_files(self.path))


@dataclass(frozen=True)
class HeadSource(Source):
    """An EAGLE-3 head."""

    @functools.cached_property
    def layout(self) -> HeadLayout:
        """The sizes and options of a checkpoint; raises OvspecError if it can't be exported."""
        return read_head_layout(self.config, self.tensor_shapes(), self.name)

    @functools.cached_property
    def text_config(self) -> JsonObject | None:
        """None: it is never a part among others."""
        return None

    @property
    def is_quantised(self) -> bool:
        """False: its weights aren't kept unchanged."""
        return False

    @property
    def model_type(self) -> str:
        """The family of its layer."""
        return str(flatten_head_config(self.config).get("model_type", "llama"))

    @property
    def family(self) -> Family:
        """How to export it: with this package."""
        return Family()

    def pickled_files(self) -> list[Path]:
        """Return the files of a checkpoint without safetensors."""
        return [] if super().tensor_headers() else sorted(self.path.glob(PICKLED_PATTERNS[0]))

    def tensor_headers(self) -> dict[str, JsonObject]:
        """Return the shapes of a checkpoint's tensors."""
        tensors = {name: tensor for file in self.pickled_files() for name, tensor in read_pickled_tensors(file).items()}
        return super().tensor_headers() or {name: {"shape": list(tensor.shape)} for name, tensor in tensors.items()}

    def read_integers(self, name: str) -> np.ndarray | None:
        """Return the tensor ``d2t`` or ``t2d`` of a checkpoint, or None if it has none."""
        from safetensors import safe_open

        for file in self.pickled_files():
            for stored_name, tensor in read_pickled_tensors(file).items():
                if map_to_eagle_head_name(stored_name) == name and tensor.is_floating_point():
                    raise OvspecError(
                        f"{file}: its tensor {name} must contain integers, not {tensor.dtype}; download the head again."
                    )
                if map_to_eagle_head_name(stored_name) == name:
                    return tensor.numpy()
        for file in self.path.glob("model*.safetensors"):
            for stored_name in read_safetensors_header(file):
                if map_to_eagle_head_name(stored_name) == name:
                    with safe_open(file, "np") as tensors:
                        return tensors.get_tensor(stored_name)
        return None

    def weight_widths(self) -> dict[str, int]:
        """Return the number of weights multiplied with one vector, by layer."""
        shapes = self.tensor_shapes().items()
        fusion_widths = {name: shape[1] for name, shape in shapes if map_to_eagle_head_name(name) == "fc.weight"}
        return super().weight_widths() | fusion_widths


@dataclass(frozen=True)
class MtpSource(HeadSource):
    """The MTP layers in a checkpoint: together with its model, or alone."""

    @functools.cached_property
    def layers(self) -> list[dict[str, str]]:
        """By layer, its tensors' names in this package, by their names in the checkpoint."""
        return find_mtp_layers(super().tensor_headers(), self.config.get("text_config") or self.config)

    def tensor_headers(self) -> dict[str, JsonObject]:
        """Return the headers of the tensors, by this package's names; each further layer has a longer prefix."""
        headers = super().tensor_headers()
        return {
            "next." * depth + new_name: headers[name]
            for depth, names in enumerate(self.layers)
            for name, new_name in names.items()
        }

    @property
    def model_type(self) -> str:
        """The family of its target."""
        return str((self.config.get("text_config") or self.config).get("model_type"))

    @property
    def family(self) -> Family:
        """How to export its target."""
        return find_family(self.model_type, self.name)

    @property
    def size_in_bytes(self) -> int:
        """The size of its tensors in bytes."""
        ranges = [tensor["data_offsets"] for tensor in self.tensor_headers().values()]
        return sum(end - start for start, end in ranges)


def find_own_mtp_layer(target: Source) -> MtpSource | None:
    """Return the MTP layer of a checkpoint; None if it has none, or if the layer's weights are quantised."""
    if target.is_ir or isinstance(target, (GgufSource, HeadSource)):
        return None
    mtp_layer = MtpSource(f"{target.name}, MTP layer", target.path, False, target.revision)
    element_types = {tensor["dtype"] for tensor in mtp_layer.tensor_headers().values()}
    return mtp_layer if element_types and element_types <= FLOAT_TYPES else None


def check_can_be_unpacked(source: Source) -> None:
    """Raise OvspecError if a source has quantised weights and no other export than keeping them is possible."""
    if source.is_quantised and not isinstance(source, GgufSource):
        raise OvspecError(
            f"{source.name}: the weights are already quantised, so ovspec can only keep them; leave `weight_format` "
            "and the other weight options out, or use the unquantised checkpoint."
        )


def make_source(folder: Path, name: str, revision: str) -> Source:
    """Return the model in a folder."""
    is_ir = holds_only_ir(folder)
    config = read_json(folder / "config.json")
    if config.get("architectures") == [MTP_ARCHITECTURE] and not is_ir:
        return MtpSource(name, folder, is_ir, revision)
    if is_head_config(config) or config.get("architectures") == [MTP_ARCHITECTURE]:
        return HeadSource(name, folder, is_ir and not list(folder.glob(PICKLED_PATTERNS[0])), revision)
    return Source(name, folder, is_ir, revision)


def check_source(source: Source, name: str, trust_remote_code: bool) -> None:
    """Raise OvspecError if the folder has no exportable model."""
    folder = source.path
    check_source_config(source, name)
    if source.is_ir:
        return
    if isinstance(source, HeadSource):
        check_head_files(source, name)
        return
    if not any(
        (folder / weight_file).is_file() for weight_file in WEIGHT_FILES
    ):  # or transformers would look for pickled files
        raise OvspecError(
            f"{name} has no {' and no '.join(WEIGHT_FILES)}, and other formats are not loaded because they can run "
            "code; save the model with save_pretrained(..., safe_serialization=True) first."
        )
    for file in folder.glob("model*.safetensors"):
        read_safetensors_header(file)
    if not any((folder / tokenizer_file).is_file() for tokenizer_file in TOKENIZER_FILES) and not trust_remote_code:
        raise OvspecError(
            f"{name} has no tokenizer (none of {', '.join(TOKENIZER_FILES[:4])} ...); add a tokenizer file."
        )
    shards = set(read_dataclass(WeightIndex, folder / WEIGHT_FILES[1]).weight_map.values())
    if pickled_shard := next((shard for shard in shards if not shard.endswith(".safetensors")), None):
        raise OvspecError(
            f"{name}: {WEIGHT_FILES[1]} lists {pickled_shard}, not a safetensors file; download the model again."
        )
    check_shards(folder, WEIGHT_FILES[1], name)
    check_trusted_code(source, name, trust_remote_code)


def check_head_files(source: HeadSource, name: str) -> None:
    """Raise OvspecError if a head's checkpoint has no weights, or a weights file is damaged or missing."""
    files = [*source.path.glob("model*.safetensors"), *source.pickled_files()]
    if not files:
        raise OvspecError(f"{name} has no model.safetensors and no pytorch_model.bin; download the head again.")
    if isinstance(source, MtpSource):
        if not source.layers:
            raise OvspecError(f"{name} has no MTP layer; download the layer again.")
        return
    index_file = f"{'pytorch_model.bin' if source.pickled_files() else 'model.safetensors'}.index.json"
    check_shards(source.path, index_file, name)
    _ = source.layout


def check_shards(folder: Path, index_file: str, name: str) -> None:
    """Raise OvspecError if a file named in the index is missing."""
    shards = set(read_dataclass(WeightIndex, folder / index_file).weight_map.values())
    missing_shards = sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing_shards:
        raise OvspecError(
            f"{name}: lacks {len(missing_shards)} of {len(shards)} files with weights, such as {missing_shards[0]}; "
            "download the model again."
        )


def check_source_config(source: Source, name: str) -> None:
    """Raise OvspecError if a model of this kind can't be exported; its weights need not exist yet."""
    if not (source.path / "config.json").is_file():
        raise OvspecError(f"{name} has no config.json; give a folder with a Hugging Face checkpoint.")
    if source.is_ir:
        return
    if (source.path / ADAPTER_FILE).is_file():
        raise OvspecError(
            f"{name}: an adapter; merge the adapter into its base model with merge_and_unload() of peft, and export "
            "the merged model."
        )
    check_quantisation(source.config, name, can_keep=not isinstance(source, HeadSource))
    if isinstance(source, HeadSource) and not isinstance(source, MtpSource):
        check_head_supported(flatten_head_config(source.config), {}, name)
    if source.config.get("is_encoder_decoder"):
        raise OvspecError(f"{name}: an encoder-decoder model; only decoder-only language models can be exported.")
    _ = source.family


def check_trusted_code(source: Source, name: str, trust_remote_code: bool) -> None:
    """Raise OvspecError if the model needs untrusted Python code, or code from elsewhere."""
    for config_file in ("config.json", TOKENIZER_CONFIG_FILE):
        code_classes = str(read_json(source.path / config_file).get("auto_map", ""))
        if code_classes and not trust_remote_code:
            raise OvspecError(
                f"{name}: the model contains Python code; read the code (revision {source.revision}), and run 'ovspec "
                "export --trust-remote-code' if you trust the code."
            )
        if "--" in code_classes:
            raise OvspecError(
                f"{name}: {config_file} loads code from another repository, where the code could change at any time; "
                f"copy the code into the model's folder, adapt auto_map in {config_file}, and export the folder."
            )


def read_safetensors_header(file: Path) -> JsonObject:
    """Return a safetensors file's header: the names, types and shapes of its tensors.

    Raises:
        OvspecError: it is not a safetensors file, or is truncated.
    """
    file_bytes = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (header_length,) = struct.unpack("<Q", stream.read(8))
            if header_length > min(file_bytes, 100_000_000):
                raise ValueError
            header = json.loads(stream.read(header_length))
        data_end = max(
            (tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0
        )
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        raise OvspecError(f"{file}: not a safetensors file; download the model again.") from None
    if file_bytes < 8 + header_length + data_end:
        raise OvspecError(
            f"{file}: truncated ({file_bytes} of {8 + header_length + data_end} bytes); download the model again."
        )
    return header


def copy_missing_files(checkpoint: Path, folder: Path) -> None:
    """Copy a checkpoint's files except its weights, such as its tokenizer, to ``folder`` if missing there."""
    copy_model_files(
        checkpoint, folder, lambda file: file.suffix in (*TEXT_SUFFIXES, ".py") and not file.name.startswith("model")
    )


def copy_model_files(model_folder: Path, folder: Path, should_copy: Callable[[Path], bool]) -> None:
    """Copy the chosen files of a model, and its further chat templates, to ``folder`` if missing there."""
    for file in [*filter(should_copy, model_folder.iterdir()), *model_folder.glob(f"{TEMPLATES_FOLDER}/*.jinja")]:
        copied_file = folder / file.relative_to(model_folder)
        if file.is_file() and not copied_file.exists():
            copied_file.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copied_file)


def holds_only_ir(folder: Path) -> bool:
    """Return whether the model is only an IR; an IR next to a checkpoint was exported by others, with other options."""
    return (folder / MODEL_FILE).is_file() and not list(folder.glob("model*.safetensors"))
