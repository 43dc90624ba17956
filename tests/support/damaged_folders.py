"""Uses a model's folder again and again, each time with one value in a JSON file or one whole file damaged.

Run as a program by ``tests/test_damaged_folders.py``, under a memory limit: reads cases, prints what came of each.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ovspec.setup.manifest import MANIFEST_FILE, hash_file

MEMORY = 3_000_000_000  # bytes of address space that a case may use beyond what the first use of the folder needs
Case = tuple[str, list[str | int], str]  # a file, the keys that lead to a value, and the name of a damage

DEEP: Any = "x"
for _ in range(300):
    DEEP = [DEEP]

VALUES: dict[str, Any] = {
    "null": None, "true": True, "zero": 0, "minus one": -1, "two to the 32": 2**32, "two to the 64": 2**64,
    "200 digits": 10**200, "huge": 1e300, "minus huge": -1e300, "a half": 0.5, "NaN": float("nan"),
    "infinity": float("inf"), "no text": "", "a text": "x", "a long text": "ab" * 500_000, "a surrogate": "\ud800",
    "no list": [], "numbers": [1, -5], "a nested list": DEEP, "no object": {}, "an object": {"id": "x", "type": []},
}  # fmt: skip
BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "all but one byte": lambda whole: whole[:-1],
    "not UTF-8": lambda whole: b"\xff\xfe" + whole,
    "zeros": lambda whole: bytes(len(whole)),
    "brackets": lambda _: b"[" * 100_000,
}


def places(value: Any, most: int = 6) -> Iterator[list[str | int]]:
    """Yield where each value in ``value`` is; of long lists and objects, ``most`` entries."""
    entries = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    if len(entries) > 5 * most:
        entries = entries[: most // 2] + entries[-most // 2 :]
    for key, inner in entries:
        yield [key]
        yield from ([key, *place] for place in places(inner, most))


def values_of(folder: Path) -> list[Case]:
    """Return a case for each value in each JSON file, and each of ``VALUES``."""
    files = sorted(path.name for path in folder.glob("*.json"))
    found = [(file, place) for file in files for place in places(json.loads((folder / file).read_text("utf-8")))]
    return [(file, place, name) for file, place in [*((file, []) for file in files), *found] for name in VALUES]


def files_of(folder: Path) -> list[Case]:
    """Return a case for each file and each of ``BYTES``."""
    return [(path.name, [], name) for path in sorted(folder.iterdir()) if path.is_file() for name in BYTES]


def with_value(whole: Any, place: list[str | int], new: Any) -> Any:
    """Return a copy of ``whole`` with ``new`` at ``place``."""
    if not place:
        return new
    key: Any = place[0]
    changed = copy.copy(whole)
    changed[key] = with_value(whole[key], place[1:], new)
    return changed


def damaged(whole: bytes, case: Case) -> bytes:
    """Return what a file with the content ``whole`` holds in ``case``."""
    _, place, name = case
    if name in BYTES:
        return BYTES[name](whole)
    return json.dumps(with_value(json.loads(whole), place, VALUES[name])).encode()


def use(folder: Path, inspected: bool = True) -> None:
    """Load ``folder`` and generate with all that depends on its files."""
    import ovspec
    from ovspec.ir.device import DeviceOptions
    from ovspec.setup.inspection import inspect_models

    cache = Path(os.environ["CASES_CACHE"])
    lm = ovspec.load(folder, engine="stateful", arithmetic="fast", cache_dir=cache)
    lm.generate("def f(x):", max_tokens=4)
    lm.generate("", max_tokens=2)
    lm.generate("def f(x):", max_tokens=4, regex="[0-9]+", temperature=1.0, seed=1)
    lm.generate([{"role": "user", "content": "Hello"}], max_tokens=2)
    if inspected:
        inspect_models(folder, DeviceOptions(cache_dir=cache), verify=True)


def outcome(folder: Path, inspected: bool) -> str:
    """Return "used", "refused: ..." or, for what must not happen, "failed: ..."."""
    from ovspec import OvspecError

    try:
        use(folder, inspected)
        return "used"
    except OvspecError as error:
        said = str(error)
        return f"refused: {said[:300]}" if len(said) < 1000 else f"failed: a message of {len(said)} characters"
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/ovspec/" in frame.filename]
        where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        return f"failed: {type(error).__name__}: {str(error)[:200]}{where}"


def tried(work: Path, case: Case) -> str:
    """Damage ``work`` as ``case`` says, with a manifest that fits, use it, and mend it again."""
    path, manifest = work / case[0], work / MANIFEST_FILE
    whole, listed = path.read_bytes(), manifest.read_bytes()
    path.write_bytes(damaged(whole, case))
    if path != manifest:
        data = json.loads(listed)
        data["files"][path.name] = {"size": path.stat().st_size, "sha256": hash_file(path)}
        manifest.write_text(json.dumps(data), encoding="utf-8")
    result = outcome(work, inspected=path.name in ("config.json", MANIFEST_FILE))
    manifest.write_bytes(listed)
    path.write_bytes(whole)
    return result


def main(source: Path, work: Path) -> None:
    warnings.simplefilter("ignore")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(source, work)
    use(work)
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin:
        print(json.dumps(tried(work, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
