"""Marks of a session's text, and sessions on disk: the text and the KV caches of target and draft.

A session file is in NumPy's ``.npz`` format.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ovspec.base.errors import DISK_FULL_ERRNOS, OvspecError, WriteError
from ovspec.base.files import open_replacement
from ovspec.base.json_types import JsonObject
from ovspec.cache.decoder import Decoder
from ovspec.engine.decoders import DecoderSet
from ovspec.engine.prompts import TemplateVariables
from ovspec.engine.runtime import Runtime
from ovspec.ir.heads import FEATURES_OUTPUT
from ovspec.setup.engine_choice import CompiledModel
from ovspec.setup.identity import describe_cache_setting, hash_model_and_tokenizer
from ovspec.text.chat_template import Message

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Mark:
    """The state of a session's text, for ``Session.rewind``.

    tokens: (n,) int64.
    open_from, open_text: the text of the tokens from position ``open_from`` on; it is tokenised again together with
        appended text.
    healable: the first position open to healing; earlier tokens were generated or made by a template.
    heals: whether the end of the text is healed by default.
    messages: the messages of a chat, without the following answer.
    answer_from: the position of the answer's beginning.
    chat_template_kwargs: the variables of the session's chat template, for its file; ``rewind`` leaves them alone.
    """

    tokens: np.ndarray
    open_from: int = 0
    open_text: str = ""
    healable: int = 0
    heals: bool = False
    messages: tuple[Message, ...] = ()
    answer_from: int = 0
    chat_template_kwargs: TemplateVariables | None = None


EMPTY_MARK = Mark(np.empty(0, dtype=np.int64))


@dataclass(frozen=True)
class SavedCacheDescription:
    """The model, the settings and the number of tokens of a saved KV cache."""

    model: str
    setting: str
    tokens: int


@dataclass(frozen=True)
class SessionHeader:
    """The JSON part of a session file: a mark without its tokens, and the caches of "target" and "draft"."""

    text: JsonObject
    caches: dict[str, SavedCacheDescription]
    format: int = FORMAT_VERSION


def save_session(path: Path, runtime: Runtime, decoders: DecoderSet, mark: Mark) -> None:
    """Write ``mark`` and the KV caches of ``decoders`` to the file ``path``.

    Raises:
        OvspecError: the file can't be written.
    """
    if path.is_dir():
        raise OvspecError(f"{path}: is a folder; give a file name for the session.")
    mark_fields = asdict(mark)
    arrays: dict[str, np.ndarray] = {"tokens": mark_fields.pop("tokens")}
    cache_arrays: dict[str, np.ndarray] = {}
    header = SessionHeader(mark_fields, {})
    for decoder_name, model, decoder in list_named_decoders(runtime, decoders):
        tokens = decoder.rows[0].tokens
        layers = decoder.dump() if len(tokens) else {}
        if len(tokens) and not layers:
            warnings.warn(
                f"{path}: the {decoder_name}'s KV cache is left out, because its precision isn't exact", stacklevel=3
            )
        header.caches[decoder_name] = describe_cache(model, tokens)
        arrays[f"{decoder_name}/tokens"] = tokens
        cache_arrays |= {f"{decoder_name}/cache/{layer}": array for layer, array in layers.items()}
    arrays["about"] = np.frombuffer(json.dumps(asdict(header)).encode(), dtype=np.uint8)
    try:
        write_arrays(path, arrays | cache_arrays)
    except WriteError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        write_arrays(path, arrays)
        warnings.warn(f"{path}: the disk is full, so the text is saved without its KV caches", stacklevel=3)


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    with open_replacement(path) as partial_file, partial_file.open("wb") as file:
        np.savez(file, **arrays)


def load_session(path: Path, runtime: Runtime, decoders: DecoderSet, owner: int) -> Mark:
    """Restore the saved caches of ``owner`` into ``decoders``, where they match, and return the text.

    Raises:
        OvspecError: the file doesn't exist, is damaged, or belongs to another model.
    """
    with open_session_file(path) as arrays:
        header = read_session_header(path, arrays, runtime.folder)
        mark = msgspec.convert({**header.text, "tokens": check_token_ids(arrays["tokens"])}, Mark)
        mark_positions = (mark.open_from, mark.healable, mark.answer_from)
        require_valid(all(0 <= position <= len(mark.tokens) for position in mark_positions))
        runtime.prompt_encoder.encode(mark.tokens, at_start=False)  # refuses unknown ids
        cached_ids = {decoder_name: check_token_ids(arrays[f"{decoder_name}/tokens"]) for decoder_name in header.caches}
        cache_arrays = {key: arrays[key] for key in arrays if "/cache/" in key}
    for decoder_name, model, decoder in list_named_decoders(runtime, decoders):
        decoder.reset(1)
        key_prefix = f"{decoder_name}/cache/"
        decoder_cache = {
            key.removeprefix(key_prefix): array for key, array in cache_arrays.items() if key.startswith(key_prefix)
        }
        has_features = FEATURES_OUTPUT in model.ir.outputs
        same_settings = header.caches.get(decoder_name) == describe_cache(model, cached_ids[decoder_name])
        if not has_features:  # saved with a head, loaded without
            decoder_cache.pop(FEATURES_OUTPUT, None)
        if decoder_cache and same_settings:
            try:
                decoder.restore(cached_ids[decoder_name], decoder_cache)
                decoder.rows[0].owner = owner
                continue
            except ValueError:
                decoder.reset(1)
        if decoder_name == "target" and len(cached_ids[decoder_name]):
            missing_part = "without its KV cache"
            if decoder_cache and same_settings and has_features and FEATURES_OUTPUT not in decoder_cache:
                missing_part = "without the head"
            elif decoder_cache:
                missing_part = f"with other settings ({header.caches[decoder_name].setting})"
            warnings.warn(
                f"{path}: saved {missing_part}; the text is read again, and may continue differently at near-ties",
                stacklevel=3,
            )
    return mark


def check_session_model(path: Path, model_folder: Path) -> None:
    """Raise OvspecError unless ``path`` is a session of the model in ``model_folder``; skips the KV caches."""
    with open_session_file(path) as arrays:
        read_session_header(path, arrays, model_folder)


@contextlib.contextmanager
def open_session_file(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """Open a session file; its arrays are read on access.

    Raises OvspecError if the file can't be read, and in place of any error in the block, caused by a damaged file.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays
    except OvspecError:
        raise
    except FileNotFoundError:
        raise OvspecError(f"{path}: no such file; give the file of a saved session.") from None
    except OSError as error:
        raise OvspecError(f"{path}: {(error.strerror or str(error)).lower()}.") from None
    except Exception as error:
        raise OvspecError(f"{path}: not a session file, or damaged; choose another file.") from error


def read_session_header(path: Path, arrays: Mapping[str, np.ndarray], model_folder: Path) -> SessionHeader:
    """Return the JSON part; raises OvspecError for a newer format or another model than in ``model_folder``."""
    header_fields = json.loads(arrays["about"].tobytes())
    if header_fields["format"] != FORMAT_VERSION:
        raise OvspecError(
            f"{path}: a session file of the unknown format {str(header_fields['format'])[:20]}; update ovspec."
        )
    header = msgspec.convert(header_fields, SessionHeader)
    if header.caches["target"].model != hash_model_and_tokenizer(model_folder):
        raise OvspecError(
            f"{path}: the session was saved with another model than {model_folder}; load the model of the session."
        )
    return header


def check_token_ids(array: np.ndarray) -> np.ndarray:
    """Return ``array`` if it has the form of token ids, (n,) int64."""
    require_valid(array.ndim == 1 and array.dtype == np.int64)
    return array


def require_valid(condition: bool) -> None:
    """Raise ValueError unless ``condition``."""
    if not condition:
        raise ValueError


def describe_cache(model: CompiledModel, tokens: np.ndarray) -> SavedCacheDescription:
    """Describe a cache of ``tokens`` (n,); saved caches with another description can't be restored."""
    return SavedCacheDescription(hash_model_and_tokenizer(model.ir.folder), describe_cache_setting(model), len(tokens))


def list_named_decoders(runtime: Runtime, decoders: DecoderSet) -> list[tuple[str, CompiledModel, Decoder]]:
    """Return (name, model, decoder) of the target and of the draft, if any."""
    draft_model = runtime.models.draft
    named_entries = [("target", runtime.models.target, decoders.target)]
    if draft_model and not draft_model.is_head:  # a head reads the target's features
        named_entries.append(("draft", draft_model, decoders.drafts[0]))
    return named_entries
