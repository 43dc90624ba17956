"""Marks of a session's text, and sessions on disk: the text and the KV caches of target and draft.

A session file is in NumPy's ``.npz`` format.
"""

from __future__ import annotations

import json
import warnings
import zipfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ovspec.decoders.base import SessionDecoder
from ovspec.errors import OvspecError
from ovspec.files import replaced
from ovspec.setup.engine import CompiledModel
from ovspec.setup.identity import cache_setting, model_identity
from ovspec.text.chat_template import Message
from ovspec.workspace import Decoders, Workspace

FORMAT = 1


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
    """

    tokens: np.ndarray
    open_from: int = 0
    open_text: str = ""
    healable: int = 0
    heals: bool = False
    messages: tuple[Message, ...] = ()
    answer_from: int = 0


EMPTY_TEXT = Mark(np.empty(0, dtype=np.int64))


def save_session(path: Path, workspace: Workspace, decoders: Decoders, mark: Mark) -> None:
    """Write ``mark`` and the KV caches of ``decoders`` to the file ``path``.

    Raises:
        OvspecError: the file can't be written.
    """
    if path.is_dir():
        raise OvspecError(f"{path} is a folder; name a file for the session.")
    described = asdict(mark)
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
        with replaced(path) as partial, partial.open("wb") as file:
            np.savez(file, **arrays)
    except OSError as error:
        raise OvspecError(f"{path}: the session can't be written ({error.strerror or error}).") from None


def load_session(path: Path, workspace: Workspace, decoders: Decoders) -> Mark:
    """Fill ``decoders`` with the saved caches, as far as they fit, and return the text.

    Raises:
        OvspecError: the file doesn't exist, is damaged, or belongs to another model.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            arrays = {name: saved[name] for name in saved.files}
        about = json.loads(arrays["about"].tobytes())
        known_format = about["format"] == FORMAT
        mark = Mark(arrays["tokens"], **about["text"]) if known_format else None
        caches = about.get("caches", {})
    except FileNotFoundError:
        raise OvspecError(f"{path}: no such file; name a file that a session was saved to.") from None
    except OSError as error:
        raise OvspecError(f"{path}: {(error.strerror or str(error)).lower()}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error):
        raise OvspecError(f"{path}: not a session file of ovspec, or damaged.") from None
    if not mark:
        raise OvspecError(f"{path}: format {about['format']} is not known; update ovspec.")
    if caches["target"]["model"] != model_identity(workspace.folder):
        raise OvspecError(f"{path}: a session of another model than {workspace.folder}; load it with its own.")
    workspace.encode(mark.tokens, begins=False)  # refuses unknown ids
    for name, loaded, decoder in parts(workspace, decoders):
        begin, saved_as = f"{name}/cache/", caches.get(name, {"tokens": 0})
        cache = {key.removeprefix(begin): values for key, values in arrays.items() if key.startswith(begin)}
        decoder.reset(1)
        if cache and saved_as.items() >= described_cache(loaded).items():
            try:
                decoder.restore(arrays[f"{name}/tokens"], cache)
                continue
            except ValueError:
                pass
        if name == "target" and saved_as["tokens"]:
            why = f"with other settings ({saved_as['setting']})" if cache else "without its KV cache"
            text = f"{path}: saved {why}; the text is read again, and may continue differently at near-ties"
            warnings.warn(text, stacklevel=3)
    return mark


def described_cache(loaded: CompiledModel) -> dict[str, str]:
    """Return what must match for a saved cache to be restored."""
    return {"model": model_identity(loaded.ir.folder), "setting": cache_setting(loaded)}


def parts(workspace: Workspace, decoders: Decoders) -> list[tuple[str, CompiledModel, SessionDecoder]]:
    """Return (name, model, decoder) of the target and, if there is one, the draft."""
    found = [("target", workspace.target, decoders.target)]
    return [*found, ("draft", workspace.draft, decoders.draft)] if workspace.draft and decoders.draft else found
