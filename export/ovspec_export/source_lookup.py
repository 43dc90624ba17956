"""Find a model by name: in a folder or GGUF file, or on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from ovspec.base.errors import OvspecError
from ovspec.base.hub_names import HubName, parse_hub_name
from ovspec.setup.identity import compute_files_revision
from ovspec.setup.model_store import name_folder
from ovspec_export.gguf_file import read_gguf_headers
from ovspec_export.hub import choose_gguf_files, download_snapshot, read_repository
from ovspec_export.sources import (
    CODE_PATTERNS,
    CONFIG_PATTERNS,
    DEEPER_SUBFOLDER_PATTERN,
    EXPORT_PATTERNS,
    PICKLED_PATTERNS,
    SUBFOLDER_PATTERN,
    TEMPLATE_PATTERNS,
    GgufSource,
    HeadSource,
    Source,
    check_source,
    check_source_config,
    check_trusted_code,
    make_source,
)


def find_source(name: str, trust_remote_code: bool = False) -> Source:
    """Return the model named ``name``: a folder, a GGUF file, or a hub id, downloaded into the hub's cache.

    A hub id may end in ``@`` and a commit, tag or branch, and in ``:`` and the quantisation of a GGUF file.

    Raises:
        OvspecError: the model doesn't exist, can't be exported or can't be downloaded.
    """
    if not name.strip():
        raise OvspecError("The name of the model to export is empty; give a folder or a hub id.")
    path = Path(name).expanduser()
    if path.is_dir():
        source = make_source(path, Path(name_folder(path.resolve())).name, compute_files_revision(path))
    elif path.is_file():
        return make_gguf_source(path, re.sub(r"-\d{5}-of-\d{5}$", "", path.stem), compute_files_revision(path))
    elif not (hub := parse_hub_name(name)):
        raise OvspecError(f"{name}: no such file or folder, and not a hub id like 'org/model'.")
    elif hub.quantization:
        return download_gguf_file(hub, hub.name_without_commit)
    else:
        source = download_model(hub, hub.name_without_commit, trust_remote_code)
    check_source(source, name, trust_remote_code)
    return source


def download_model(hub: HubName, name: str, trust_remote_code: bool) -> Source:
    """Download a hub model, or find it in the hub's cache.

    Raises:
        OvspecError: it is unavailable, or its config rules out an export; then no weights are downloaded.
    """
    source = download_config(hub, name, trust_remote_code)
    folder = source.path
    is_head = isinstance(source, HeadSource)
    patterns = EXPORT_PATTERNS + CODE_PATTERNS * (trust_remote_code and not is_head)
    download_snapshot(name, hub.repository, source.revision, patterns, SUBFOLDER_PATTERN)
    if is_head and not list(folder.glob("model*.safetensors")):
        download_snapshot(name, hub.repository, source.revision, PICKLED_PATTERNS, SUBFOLDER_PATTERN)
    return make_source(folder, name, source.revision)


def download_config(hub: HubName, name: str, trust_remote_code: bool) -> Source:
    """Download a hub model's small files, enough to see whether it can be exported.

    Raises:
        OvspecError: it is unavailable or can't be exported.
    """
    folder = download_snapshot(
        name, hub.repository, hub.revision, CONFIG_PATTERNS + TEMPLATE_PATTERNS, DEEPER_SUBFOLDER_PATTERN
    )
    source = make_source(folder, name, folder.name)  # the snapshot's folder is named after its commit
    if not (folder / "config.json").is_file():
        repository = read_repository(name, hub)
        if any(path.endswith(".gguf") for path in repository.sizes):
            choose_gguf_files(name, hub, repository)  # raises an error with a list of them
    check_source_config(source, name)
    if not source.is_ir and not isinstance(source, HeadSource):
        check_trusted_code(source, name, trust_remote_code)
    return source


def download_gguf_file(hub: HubName, name: str) -> GgufSource:
    """Download a GGUF file from a repository on the hub, with all its shards, or find it in the hub's cache.

    Raises:
        OvspecError: it is unavailable or unreadable.
    """
    repository = read_repository(name, hub)
    files = choose_gguf_files(name, hub, repository)
    folder = download_snapshot(name, hub.repository, repository.commit, files, "")
    return make_gguf_source(folder / files[0], name, repository.commit)


def make_gguf_source(path: Path, name: str, revision: str) -> GgufSource:
    """Return the model in a GGUF file; raises OvspecError if it is unreadable or can't be exported."""
    source = GgufSource(name, path, False, revision, read_gguf_headers(path))
    _ = source.family
    return source
