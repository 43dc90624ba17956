"""The results of an unfinished batch, to resume from after an interruption."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock, Timeout

from ovspec.base.errors import OvspecError
from ovspec.base.files import check_file_name, name_write_errors
from ovspec.base.json_types import JsonObject
from ovspec.batch.requests import BatchRequest


class PartialResults:
    """The results so far, in a file next to the output: a resumed run doesn't generate them again.

    Each result is stored under its ``result_fingerprint``: after a change of the line, the model or an option, it is
    generated again.
    """

    def __init__(self, output: Path) -> None:
        check_file_name(output)
        self.file = output.with_name(output.name + ".partial")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(output.with_name(f".{output.name}.lock"))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise OvspecError(
                f"{output}: another batch is writing this file; wait until that batch ends, or choose another output."
            ) from None
        self._lines = dict[str, JsonObject]()
        self._stream = self.file.open("a", encoding="utf-8", newline="\n")
        *lines, cut_off_line = self.file.read_text(encoding="utf-8", errors="replace").split("\n")
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a line truncated by an interruption
                entry = json.loads(line)
                self._lines[entry["key"]] = entry["line"]
        if cut_off_line:
            self._stream.write("\n")

    def __contains__(self, key: str) -> bool:
        return key in self._lines

    def keys(self) -> frozenset[str]:
        return frozenset(self._lines)

    def store_line(self, key: str, line: JsonObject) -> None:
        self._lines[key] = line
        with name_write_errors(self.file):
            self._stream.write(json.dumps({"key": key, "line": line}, ensure_ascii=False) + "\n")
            self._stream.flush()

    def select_lines(self, keys: Iterable[str]) -> list[JsonObject]:
        return [self._lines[key] for key in keys]

    def delete_file(self) -> None:
        """Delete the file; all its results are in the output now."""
        self._stream.close()
        self.file.unlink()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, already reported by ``store_line``
            self._stream.close()
        with contextlib.suppress(OSError):  # Windows can't delete an open file
            Path(self._lock.lock_file).unlink()
        self._lock.release()


def result_fingerprint(request: BatchRequest, run_identity: str) -> str:
    """Return a key for the result of ``request``: a hash of everything with an effect on the result."""
    prompts = repr((request.text_request.prompts, request.error))  # a command's options may change these
    identity_text = "\0".join((run_identity, request.id, request.source, prompts))
    return hashlib.sha256(identity_text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def lines_to_text(lines: list[JsonObject]) -> str:
    """Return output lines as the text of an output file."""
    return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
