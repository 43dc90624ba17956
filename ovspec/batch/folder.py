"""Files and folders of requests, on this machine or in object storage, and the places of their results."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import pyarrow
from pyarrow import fs, parquet

from ovspec.base.errors import OvspecError
from ovspec.base.files import write_atomically
from ovspec.base.json_types import JsonObject
from ovspec.batch.partial_results import lines_to_text
from ovspec.batch.requests import BatchRequest, parse_lines, parse_rows
from ovspec.batch.run import OUTPUT_COLUMNS, lines_to_columns
from ovspec.ir.device import default_cache_dir

PARQUET_SCHEMA = pyarrow.schema([(name, pyarrow.string()) for name in OUTPUT_COLUMNS])
REQUEST_FILE_ENDINGS = (".jsonl", ".parquet", ".txt")


@dataclass(frozen=True)
class BatchFile:
    """A file of requests, and the place of its results.

    requests_path: its path on its filesystem.
    results_path: the path or URI of the results.
    partial_path: for a file in a folder, the path to store its partial results next to.
    size_and_time: for a file in a folder, its size and modification time.
    """

    requests_path: str
    results_path: str
    partial_path: Path | None = None
    size_and_time: str = ""

    @property
    def partial_results_path(self) -> Path:
        """The path to store partial results next to."""
        return self.partial_path or find_partial_results_path(self.results_path)


def find_file_info(path_or_uri: str) -> tuple[fs.FileSystem, fs.FileInfo]:
    """Return the filesystem of a path or URI, and its file's info; raises OvspecError if it is unreachable."""
    try:
        if "://" in path_or_uri:
            filesystem, path = fs.FileSystem.from_uri(path_or_uri)
        else:
            filesystem = fs.LocalFileSystem()
            path = Path(path_or_uri).absolute().as_posix()
        return filesystem, filesystem.get_file_info(path.rstrip("/"))
    except (OSError, ValueError) as error:
        raise OvspecError(f"{path_or_uri}: {error}") from None


def find_partial_results_path(output: str) -> Path:
    """Return the path to store partial results next to: ``output``, or a path in the cache for object storage."""
    if "://" not in output:
        return Path(output).absolute()
    return default_cache_dir() / "ray" / "outputs" / hashlib.sha256(output.encode()).hexdigest()[:16]


def append_ending(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def join_path(folder: str, file_name: str) -> str:
    """Return the path or URI of the file ``file_name`` in ``folder``."""
    if "://" not in folder:
        return str(Path(folder) / file_name)
    base_uri, question_mark, query = folder.partition("?")
    return f"{base_uri.rstrip('/')}/{quote(file_name)}{question_mark}{query}"


def delete_partial_results(output: str) -> None:
    """Delete the folder of partial results, now complete in ``output``."""
    shutil.rmtree(append_ending(find_partial_results_path(output), ".partial"), ignore_errors=True)


def find_batch_files(source: str | None, output: str, overwrite: bool) -> tuple[fs.FileSystem, list[BatchFile]]:
    """Return the files to read, and their filesystem. The results of files in a folder go to files in ``output``.

    Names starting with a dot or an underscore are left out. Without a source, there is one file, and it isn't read.

    Raises OvspecError if there is nothing to read, if the results would be among the requests, or if ``output`` exists
    and is neither to be replaced nor a folder left unfinished by an earlier run.
    """
    output_filesystem, output_info = find_file_info(output)
    partial_folder = append_ending(find_partial_results_path(output), ".partial")
    if output_info.type is not fs.FileType.NotFound and not overwrite and not partial_folder.is_dir():
        raise OvspecError(f"{output} already exists; choose another `output`, or set `overwrite=True`.")
    if source is None:
        return fs.LocalFileSystem(), [BatchFile("", output)]
    filesystem, source_info = find_file_info(source)
    files = list[BatchFile]()
    if source_info.type is fs.FileType.Directory:
        if output_filesystem == filesystem and f"{output_info.path}/".startswith(f"{source_info.path}/"):
            raise OvspecError(f"{output} is inside the input folder; choose another `output`.")
        files = list_batch_files(filesystem, source_info.path, output, partial_folder)
    elif source_info.is_file and source_info.path.endswith(REQUEST_FILE_ENDINGS):
        files = [BatchFile(source_info.path, output)]
    if not files:
        raise OvspecError(f"{source}: contains no request files ({', '.join(REQUEST_FILE_ENDINGS)}).")
    return filesystem, files


def list_batch_files(filesystem: fs.FileSystem, folder: str, output: str, partial_folder: Path) -> list[BatchFile]:
    """Return the files of requests in a folder, sorted; see ``find_batch_files``."""
    files = list[BatchFile]()
    infos = filesystem.get_file_info(fs.FileSelector(folder, recursive=True))
    infos_by_path = {PurePosixPath(info.path).relative_to(folder): info for info in infos}
    for relative_path, info in sorted(infos_by_path.items(), key=lambda path_and_info: path_and_info[0]):
        is_hidden = any(path_part[0] in "._" for path_part in relative_path.parts)
        if relative_path.suffix in REQUEST_FILE_ENDINGS and not is_hidden:
            result_name = f"{relative_path}.jsonl" if relative_path.suffix == ".txt" else str(relative_path)
            size_and_time = f"{info.size} {info.mtime_ns}"
            files.append(
                BatchFile(info.path, join_path(output, result_name), partial_folder / result_name, size_and_time)
            )
    return files


def read_file_requests(path: str, content: bytes | None) -> list[BatchRequest]:
    """Return the requests in a file's ``content`` (None: read the local file); raises OvspecError if unreadable."""
    try:
        content = Path(path).read_bytes() if content is None else content
        if path.endswith(".parquet"):
            return parse_rows(parquet.read_table(pyarrow.BufferReader(content)).to_pylist())
        return parse_lines(content.decode("utf-8-sig"), are_prompts=path.endswith(".txt"))
    except (OSError, ValueError) as error:
        raise OvspecError(f"{path}: {error}") from None


def write_results(results_path: str, lines: list[JsonObject]) -> None:
    """Write output lines, atomically; a ``.parquet`` file gets the columns of ``lines_to_columns``."""
    buffer = pyarrow.BufferOutputStream()
    if results_path.endswith(".parquet"):
        parquet.write_table(pyarrow.Table.from_pydict(lines_to_columns(lines), PARQUET_SCHEMA), buffer)
    else:
        buffer.write(lines_to_text(lines).encode())
    content = buffer.getvalue()
    if "://" in results_path:
        filesystem, info = find_file_info(results_path)
        with filesystem.open_output_stream(info.path) as output_stream:
            output_stream.write(content)
    else:
        write_atomically(Path(results_path), content.to_pybytes())
