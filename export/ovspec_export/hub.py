"""The Hugging Face hub: huggingface_hub fetches files into its own cache; errors here include the remedy."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.base.hub_names import MAIN_REVISION, HubName
from ovspec.base.progress import format_size, show_step

FIRST_SHARD = re.compile(r"-00001-of-\d{5}$")
QUANTIZATION_SUFFIX = re.compile(r"[.-]((?:UD-)?[A-Z0-9_]+)$", re.IGNORECASE)
LATER_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
NETWORK_ERRORS = (ConnectionError, TimeoutError, socket.gaierror)  # OSErrors not caused by the disk
PROJECTOR_PREFIX = "mmproj"  # prefix of the names of GGUF files for images


@dataclass(frozen=True)
class Repository:
    """The files of a repository at a commit. sizes: their sizes in bytes, by path; 0 if unknown."""

    commit: str
    sizes: dict[str, int]


def download_snapshot(name: str, hub_id: str, revision: str | None, patterns: list[str], ignored_patterns: str) -> Path:
    """Download a hub model's files matching ``patterns`` but not ``ignored_patterns``; return their folder.

    Files in the hub's cache aren't downloaded again. ``name`` is for messages.

    Raises:
        OvspecError: they are unavailable.
    """
    from huggingface_hub import snapshot_download

    with name_hub_errors(name, revision), show_step(f"{name}: looking at the hub") as fetching_step:
        show_bytes = make_bytes_shower(lambda text: setattr(fetching_step, "text", f"{name}: fetching {text}"))
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=ignored_patterns,
                tqdm_class=show_bytes,
            )
        )


def read_repository(name: str, hub: HubName) -> Repository:
    """Return the files of a repository; without a network, its files in the hub's cache.

    ``name`` is for messages.

    Raises:
        OvspecError: the repository or revision doesn't exist, or is neither reachable nor in the cache.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub import errors as hub_errors

    refusals = (hub_errors.RepositoryNotFoundError, hub_errors.RevisionNotFoundError, hub_errors.HFValidationError)
    with name_hub_errors(name, hub.revision):
        try:
            answer = HfApi().model_info(hub.repository, revision=hub.revision, files_metadata=True)
        except refusals:  # a gated repository raises RepositoryNotFoundError
            raise
        except Exception:  # no network, or offline mode
            folder = Path(snapshot_download(hub.repository, revision=hub.revision, local_files_only=True))
            files = [path for path in folder.rglob("*") if path.is_file()]
            return Repository(folder.name, {path.relative_to(folder).as_posix(): path.stat().st_size for path in files})
        sizes = {file.rfilename: file.size or 0 for file in answer.siblings or ()}
        return Repository(answer.sha or hub.revision or MAIN_REVISION, sizes)


def sum_missing_bytes(hub: HubName, repository: Repository, patterns: list[str], ignored_patterns: str = "") -> int:
    """Return the size of the files to fetch by ``download_snapshot``, without files in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    return sum(
        size
        for file, size in repository.sizes.items()
        if any(fnmatch.fnmatch(file, pattern) for pattern in patterns)
        and not fnmatch.fnmatch(file, ignored_patterns)
        and not isinstance(try_to_load_from_cache(hub.repository, file, revision=repository.commit), str)
    )


def choose_gguf_files(name: str, hub: HubName, repository: Repository) -> list[str]:
    """Return the GGUF file named by a hub id in a repository, with all its shards in order.

    Raises:
        OvspecError: there is none of this quantisation; the message lists the others.
    """
    first_files = {
        read_quantization(path): path
        for path in sorted(repository.sizes)
        if path.lower().endswith(".gguf")
        and not Path(path).name.lower().startswith(PROJECTOR_PREFIX)
        and (FIRST_SHARD.search(path[:-5]) or not LATER_SHARD.search(path[:-5]))
    }
    if not first_files:
        raise OvspecError(
            f"{name}: the repository has no GGUF file; leave out ':{hub.quantization}' to export the checkpoint."
        )
    wanted_quantization = (hub.quantization or "").lower()
    first_file = next(
        (path for quantization, path in first_files.items() if quantization.lower() == wanted_quantization), None
    )
    if first_file is None:
        example = HubName(hub.repository, hub.revision, next(iter(first_files)))
        raise OvspecError(
            f"{name}: the repository has the GGUF files {', '.join(first_files)}; add a colon and a file to the name, "
            f"as in {example}."
        )
    shard_pattern = FIRST_SHARD.sub("-*-of-*", first_file[:-5]) + ".gguf"
    return sorted(path for path in repository.sizes if fnmatch.fnmatchcase(path, shard_pattern))


def read_quantization(path: str) -> str:
    """Return the quantisation in a GGUF file's name, such as Q4_K_M in model-Q4_K_M-00001-of-00002.gguf."""
    stem = FIRST_SHARD.sub("", Path(path).stem)
    match = QUANTIZATION_SUFFIX.search(stem)
    return match[1] if match else stem


@contextlib.contextmanager
def name_hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Turn errors of huggingface_hub into sentences about the model ``name``."""
    from huggingface_hub import constants, get_token
    from huggingface_hub import errors as hub

    log_in = "log in with 'hf auth login'" if get_token() is None else "check your token's access"
    try:
        yield
    except hub.GatedRepoError:
        raise OvspecError(f"{name}: the model is gated; accept the terms on its page and {log_in}.") from None
    except hub.RevisionNotFoundError:
        raise OvspecError(f"{name}: the model has no revision {revision}; give a commit, a tag or a branch.") from None
    except hub.RepositoryNotFoundError:
        raise OvspecError(
            f"{name}: no such folder, and no such model on the Hugging Face hub; check the spelling, or {log_in} if it "
            "is private."
        ) from None
    except hub.HFValidationError:
        raise OvspecError(f"{name}: no such folder, and not a valid hub id like 'org/model'.") from None
    except OvspecError:
        raise
    except Exception as error:  # offline, timeouts, proxies, a full disk: each library raises its own errors
        if isinstance(error, OSError) and error.errno and not isinstance(error, NETWORK_ERRORS):
            raise
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise OvspecError(f"{name}: the hub denies access (status {status}); {log_in}.") from None
        advice = "check the network, and run the same command to resume the download"
        if constants.HF_HUB_OFFLINE:
            advice = "unset the variable HF_HUB_OFFLINE to download the model"
        raise OvspecError(
            f"{name}: no such folder, no complete copy in the hub's cache, and the hub cannot be reached; {advice}."
        ) from None


def make_bytes_shower(show: Callable[[str], object]) -> type[Any]:
    """Return a class for huggingface_hub's progress bars, to call ``show`` with the bytes instead of drawing."""
    from tqdm import tqdm

    class BytesShower(tqdm):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options |= {"file": io.StringIO(), "leave": False, "disable": False}
            super().__init__(*arguments, **options)

        def display(self, *_: Any, **__: Any) -> None:
            if self.unit == "B" and self.total:
                show(f"{format_size(self.n)} of {format_size(self.total)}")

    return BytesShower
