"""Models by name: folders, GGUF files, hub ids, short names of known pairs, and names in the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ovspec.base.errors import OvspecError
from ovspec.base.hub_names import MAIN_REVISION, HubName, parse_hub_name
from ovspec.ir.compile import MODEL_FILE, check_ir_folder
from ovspec.setup.identity import compute_files_revision, list_model_files
from ovspec.setup.known_pairs import read_known_pairs
from ovspec.setup.model_store import StoredModel, list_stored_models

CHECKPOINT_PATTERNS = ("config.json", "*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class ModelSource:
    """A source to export a model from.

    name: the absolute path of a folder or GGUF file, or a hub id without its revision.
    revision: the requested revision of a hub id, None for its main branch; for a path, a checksum of its files.
    """

    name: str
    revision: str | None

    @property
    def is_local(self) -> bool:
        """Whether it is a path."""
        return Path(self.name).is_absolute()

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, without a head or an MTP layer."""
        hub = None if self.is_local else parse_hub_name(self.name)
        return bool(hub.quantization if hub else Path(self.name).is_file())

    @property
    def full_name(self) -> str:
        """The name to export it by, with the revision of a hub id."""
        hub = None if self.is_local else parse_hub_name(self.name)
        return str(HubName(hub.repository, self.revision, hub.quantization)) if hub else self.name

    @property
    def short_name(self) -> str:
        """The name of the folder, file or model, without its location."""
        return Path(self.name).name.removesuffix(".gguf").replace(":", "-")


def is_ir(model: str | Path) -> bool:
    """Return whether ``model`` is the folder of an IR."""
    return (Path(model) / MODEL_FILE).is_file()


def find_model_source(model: str | Path) -> ModelSource | None:
    """Return the source of this name; None for an unknown name.

    An existing path takes precedence over a short name of ``ovspec export --list``, and a short name over a hub id.

    Raises:
        OvspecError: the name is the path of something else.
    """
    path = Path(model).expanduser()
    if path.exists():
        is_checkpoint = path.is_dir() and any(True for pattern in CHECKPOINT_PATTERNS for _ in path.glob(pattern))
        if not is_ir(path) and not is_checkpoint and path.suffix.lower() != ".gguf":
            check_ir_folder(path)
        if path.is_file():
            path = list_model_files(path)[0]
        return ModelSource(str(path.resolve()), compute_files_revision(path))
    name = Path(model).as_posix()
    pair = read_known_pairs().get(name)
    hub = parse_hub_name(pair.target if pair else name)
    if not hub:
        return None
    revision = None if hub.revision == MAIN_REVISION else hub.revision
    return ModelSource(str(HubName(hub.repository, None, hub.quantization)), revision)


def require_model_source(model: str | Path) -> ModelSource:
    """Return the source of this name; raises OvspecError for an unknown name."""
    if source := find_model_source(model):
        return source
    raise OvspecError(
        f"{model}: no such folder or file; give a folder, a GGUF file, a hub id like 'org/model', or a name from "
        "'ovspec models'."
    )


def find_model_named_in_store(model: str | Path) -> StoredModel | None:
    """Return the model of this name in the store; an existing path takes precedence."""
    if Path(model).exists():
        return None
    return next((stored for stored in list_stored_models() if stored.name == str(model)), None)
