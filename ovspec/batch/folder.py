"""Files and folders of requests, on this machine or in object storage, and where their answers go."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import pyarrow
from pyarrow import fs, parquet

from ovspec.base.errors import OvspecError
from ovspec.base.files import write_atomically
from ovspec.batch.file import as_text
from ovspec.batch.requests import BatchRequest, requests_of, requests_of_rows
from ovspec.batch.run import COLUMNS, columns_of
from ovspec.ir.device import default_cache_dir

SCHEMA = pyarrow.schema([(name, pyarrow.string()) for name in COLUMNS])
ENDINGS = (".jsonl", ".parquet", ".txt")


@dataclass(frozen=True)
class BatchFile:
    """A file of requests, and where its answers go."""

    source: str  # its path on its filesystem
    target: str  # a path or URI
    part: Path | None = None  # of a folder: the path beside which its answers so far are
    version: str = ""  # of a file of a folder: its size and time

    @property
    def state(self) -> Path:
        """The path beside which the answers so far are."""
        return self.part or state_of(self.target)


def located(name: str) -> tuple[fs.FileSystem, fs.FileInfo]:
    """Return the filesystem of a path or URI, and what is there; raises OvspecError if it can't be reached."""
    try:
        local = fs.LocalFileSystem(), Path(name).absolute().as_posix()
        filesystem, path = fs.FileSystem.from_uri(name) if "://" in name else local
        return filesystem, filesystem.get_file_info(path.rstrip("/"))
    except (OSError, ValueError) as error:
        raise OvspecError(f"{name}: {error}") from None


def state_of(output: str) -> Path:
    """Return the path beside which the answers so far are: ``output``, or one in the cache for object storage."""
    if "://" not in output:
        return Path(output).absolute()
    return default_cache_dir() / "ray" / "outputs" / hashlib.sha256(output.encode()).hexdigest()[:16]


def beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def inside(folder: str, name: str) -> str:
    """Return the path or URI of what is called ``name`` in ``folder``."""
    if "://" not in folder:
        return str(Path(folder) / name)
    place, query, options = folder.partition("?")
    return f"{place.rstrip('/')}/{quote(name)}{query}{options}"


def forget(output: str) -> None:
    """Delete the folder of answers so far, all of which are in ``output`` now."""
    shutil.rmtree(beside(state_of(output), ".partial"), ignore_errors=True)


def find_files(source: str | None, output: str, overwrite: bool) -> tuple[fs.FileSystem, list[BatchFile]]:
    """Return the files to read, and their filesystem. The answers to those in a folder go to files in ``output``.

    Names that begin with a dot or an underscore are left out. Without a source, that is one file, which isn't read.

    Raises OvspecError if there is nothing to read, if the answers would be beside the requests, or if ``output`` exists
    and is neither to be replaced nor a folder that an earlier run left unfinished.
    """
    other, place = located(output)
    partial = beside(state_of(output), ".partial")
    if place.type is not fs.FileType.NotFound and not overwrite and not partial.is_dir():
        raise OvspecError(f"{output} already exists; name another `output`, or set `overwrite=True`.")
    if source is None:
        return fs.LocalFileSystem(), [BatchFile("", output)]
    filesystem, found = located(source)
    if found.type is fs.FileType.Directory:
        if other == filesystem and f"{place.path}/".startswith(f"{found.path}/"):
            raise OvspecError(f"{output} is in the folder of the requests; name another `output`.")
        there = filesystem.get_file_info(fs.FileSelector(found.path, recursive=True))
        names = [PurePosixPath(each.path).relative_to(found.path) for each in there]
        files = [
            BatchFile(each.path, inside(output, answers), partial / answers, f"{each.size} {each.mtime_ns}")
            for name, each in sorted(zip(names, there, strict=True), key=lambda pair: pair[0])
            if name.suffix in ENDINGS and not any(part[0] in "._" for part in name.parts)
            for answers in [f"{name}.jsonl" if name.suffix == ".txt" else str(name)]
        ]
    else:
        files = [BatchFile(found.path, output)] if found.is_file and found.path.endswith(ENDINGS) else []
    if not files:
        raise OvspecError(f"{source}: there is no file whose name ends in {', '.join(ENDINGS)}.")
    return filesystem, files


def read(path: str, data: bytes | None) -> list[BatchRequest]:
    """Return the requests in a file, of which ``data`` was read, or that is here; raises OvspecError if it can't be."""
    try:
        data = Path(path).read_bytes() if data is None else data
        if path.endswith(".parquet"):
            return requests_of_rows(parquet.read_table(pyarrow.BufferReader(data)).to_pylist())
        return requests_of(data.decode("utf-8-sig"), prompts=path.endswith(".txt"))
    except (OSError, ValueError) as error:
        raise OvspecError(f"{path}: {error}") from None


def write(target: str, lines: list[dict[str, Any]]) -> None:
    """Write output lines, in a ``.parquet`` file as the columns of ``columns_of``, whole or not at all."""
    buffer = pyarrow.BufferOutputStream()
    if target.endswith(".parquet"):
        parquet.write_table(pyarrow.Table.from_pydict(columns_of(lines), SCHEMA), buffer)
    else:
        buffer.write(as_text(lines).encode())
    data = buffer.getvalue()
    if "://" in target:
        filesystem, there = located(target)
        with filesystem.open_output_stream(there.path) as stream:
            stream.write(data)
    else:
        write_atomically(Path(target), data.to_pybytes())
