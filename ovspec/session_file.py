"""Marks of a session's text, and sessions on disk: the text and the KV caches of target and draft.

A session file is in NumPy's ``.npz`` format.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ovspec.decoders.base import SessionDecoder
from ovspec.errors import OvspecError
from ovspec.files import replaced
from ovspec.setup.engine import CompiledModel
from ovspec.setup.identity import cache_setting, model_identity
from ovspec.text.chat_template import Message
from ovspec.workspace import Decoders, Variables, Workspace

FORMAT = 1
# What reading a damaged file may raise.
DAMAGED = (
    ValueError, KeyError, TypeError, AttributeError, IndexError, EOFError, OverflowError, NotImplementedError,
    RecursionError, MemoryError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """The state of a session's text at some moment, for ``Session.rewind``.

    tokens: (n,) int64.
    open_from, open_text: the text of the tokens from position ``open_from`` on; it is tokenised again together with
        text that is appended.
    healable: the first position that healing may take back; tokens before it were generated or made by a template.
    heals: whether the end of the text is healed by default.
    messages: the messages of a chat, without the answer that follows them.
    answer_from: the position where that answer begins.
    chat_template_kwargs: the variables of the session's chat template, for its file; ``rewind`` leaves them alone.
    """

    tokens: np.ndarray
    open_from: int = 0
    open_text: str = ""
    healable: int = 0
    heals: bool = False
    messages: tuple[Message, ...] = ()
    answer_from: int = 0
    chat_template_kwargs: Variables | None = None


EMPTY_TEXT = Mark(np.empty(0, dtype=np.int64))


def save_session(path: Path, workspace: Workspace, decoders: Decoders, mark: Mark) -> None:
    """Write ``mark`` and the KV caches of ``decoders`` to the file ``path``.

    Raises:
        OvspecError: the file can't be written.
    """
    if path.is_dir():
        raise OvspecError(f"{path} is a folder; name a file for the session.")
    described = {name: value for name, value in asdict(mark).items() if value is not None}
    arrays = {"tokens": described.pop("tokens")}
    caches: dict[str, Any] = {}
    for name, loaded, decoder in parts(workspace, decoders):
        tokens = decoder.rows[0].tokens
        held = decoder.dump() if len(tokens) else {}
        if len(tokens) and not held:
            warnings.warn(f"{path}: the {name}'s KV cache is left out, because its precision isn't exact", stacklevel=3)
        caches[name] = {**described_cache(loaded), "tokens": len(tokens)}
        arrays[f"{name}/tokens"] = tokens
        arrays |= {f"{name}/cache/{layer}": values for layer, values in held.items()}
    text = json.dumps({"format": FORMAT, "text": described, "caches": caches})
    arrays["about"] = np.frombuffer(text.encode(), dtype=np.uint8)
    try:
        try:
            write_arrays(path, arrays)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            small = {name: values for name, values in arrays.items() if "/cache/" not in name}
            write_arrays(path, small)
            warnings.warn(f"{path}: the disk is full, so the text is saved without its KV caches", stacklevel=3)
    except OSError as error:
        raise OvspecError(f"{path}: the session can't be written ({error.strerror or error}).") from None


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    with replaced(path) as partial, partial.open("wb") as file:
        np.savez(file, **arrays)


def load_session(path: Path, workspace: Workspace, decoders: Decoders) -> Mark:
    """Fill ``decoders`` with the saved caches, as far as they fit, and return the text.

    Raises:
        OvspecError: the file doesn't exist, is damaged, or belongs to another model.
    """
    saved = read_session(path)
    check_model(path, saved.caches["target"].model, workspace.folder)
    mark = saved.mark
    workspace.encode(mark.tokens, begins=False)  # refuses unknown ids
    for name, loaded, decoder in parts(workspace, decoders):
        cache = saved.caches.get(name, SavedCache())
        decoder.reset(1)
        if cache.arrays and {"model": cache.model, "setting": cache.setting} == described_cache(loaded):
            try:
                decoder.restore(cache.tokens, cache.arrays)
                continue
            except ValueError:
                decoder.reset(1)
        if name == "target" and len(cache.tokens):
            why = f"with other settings ({cache.setting})" if cache.arrays else "without its KV cache"
            text = f"{path}: saved {why}; the text is read again, and may continue differently at near-ties"
            warnings.warn(text, stacklevel=3)
    return mark


def check_session(path: Path, folder: Path) -> None:
    """Raise OvspecError if ``path`` holds no session of the model in ``folder``; its KV caches are not read."""
    with readable(path):
        about = json.loads(read_arrays(path, ["about"])["about"].tobytes())
        model = about["caches"]["target"]["model"]
    check_model(path, model, folder)


def check_model(path: Path, model: str, folder: Path) -> None:
    """Raise OvspecError if ``model``, in the session file ``path``, isn't the identity of the model in ``folder``."""
    if model != model_identity(folder):
        raise OvspecError(f"{path}: a session of another model than {folder}; load it with its own.")


@dataclass
class SavedCache:
    """A model's KV cache in a session file. ``model``, ``setting``: what it was computed with."""

    model: str = ""
    setting: str = ""
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class SavedSession:
    mark: Mark
    caches: dict[str, SavedCache]  # by "target" and "draft"


def read_session(path: Path) -> SavedSession:
    """Return what a session file holds; raises OvspecError if it can't be read, is damaged or too new."""
    with readable(path):
        arrays = read_arrays(path)
        about = json.loads(arrays["about"].tobytes())
        if about["format"] != FORMAT:
            raise OvspecError(f"{path}: format {str(about['format'])[:20]} is not known; update ovspec.")
        mark = read_mark(about["text"], ids_in(arrays["tokens"]))
        caches = {}
        for name, entry in about["caches"].items():
            begin = f"{name}/cache/"
            held = {key.removeprefix(begin): values for key, values in arrays.items() if key.startswith(begin)}
            tokens = ids_in(arrays[f"{name}/tokens"])
            expect(len(tokens) == entry["tokens"])
            caches[name] = SavedCache(str(entry["model"]), str(entry["setting"]), tokens, held)
        expect("target" in caches)
        return SavedSession(mark, caches)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise OvspecError for what reading a missing or damaged file raises."""
    try:
        yield
    except FileNotFoundError:
        raise OvspecError(f"{path}: no such file; name a file that a session was saved to.") from None
    except OSError as error:
        raise OvspecError(f"{path}: {(error.strerror or str(error)).lower()}.") from None
    except DAMAGED:
        raise OvspecError(f"{path}: not a session file of ovspec, or damaged.") from None


def read_arrays(path: Path, names: Iterable[str] = ()) -> dict[str, np.ndarray]:
    """Return the named arrays in a session file, or all; they are as large in memory as they are in the file."""
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        expect(sum(member.file_size for member in members) <= path.stat().st_size)
        for member in members:
            expect(member.compress_type == zipfile.ZIP_STORED)
            with archive.open(member) as stream:
                np.lib.format.read_magic(stream)
                shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
                expect(not dtype.hasobject and math.prod(shape) * dtype.itemsize <= member.file_size)
        file.seek(0)
        with np.load(file, allow_pickle=False) as saved:
            return {name: saved[name] for name in names or saved.files}


def ids_in(array: np.ndarray) -> np.ndarray:
    """Return ``array`` if it can be token ids, (n,) int64."""
    expect(array.ndim == 1 and array.dtype == np.int64)
    return array


def read_mark(text: dict[str, Any], tokens: np.ndarray) -> Mark:
    """Return the mark that ``save_session`` wrote as JSON."""
    for name in ("open_from", "healable", "answer_from"):
        expect(type(text[name]) is int and 0 <= text[name] <= len(tokens))
    expect(isinstance(text["open_text"], str) and isinstance(text["heals"], bool))
    expect(isinstance(text["messages"], list))
    for message in text["messages"]:
        expect(isinstance(message, dict) and isinstance(message.get("role"), str))
    expect(isinstance(text.setdefault("chat_template_kwargs", None), dict | None))
    return Mark(tokens, **{**text, "messages": tuple(text["messages"])})


def expect(right: object) -> None:
    """Raise ValueError unless ``right``."""
    if not right:
        raise ValueError


def described_cache(loaded: CompiledModel) -> dict[str, str]:
    """Return what must match for a saved cache to be restored."""
    return {"model": model_identity(loaded.ir.folder), "setting": cache_setting(loaded)}


def parts(workspace: Workspace, decoders: Decoders) -> list[tuple[str, CompiledModel, SessionDecoder]]:
    """Return (name, model, decoder) of the target and, if there is one, the draft."""
    found = [("target", workspace.target, decoders.target)]
    return [*found, ("draft", workspace.draft, decoders.draft)] if workspace.draft and decoders.draft else found
