"""The JSON schemas that ``schemas.py`` measures, chosen by a rule that was written down before anything was measured.

The rule: of each package below, in that version, every .json file of its wheel that

- is a JSON object and has "$schema" with a draft of json-schema.org, or an object as "properties", at its top,
- refers to no other file: each "$ref" begins with "#" or with the file's own "$id" or "id",
- differs from every file before it;

and of these at most 40 a package: those for which the SHA-256 of "package/path" is smallest. A schema is held out if
the last byte of that SHA-256 is divisible by three; nobody looks at those while the code is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import pkgutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import ROOT

CACHE = ROOT / ".cache" / "bench" / "schemas"
MOST = 40
PACKAGES = {
    "altair": "6.3.0",
    "ansible-lint": "26.10.1",
    "cfn-lint": "1.58.0",
    "check-jsonschema": "0.39.0",
    "cyclonedx-python-lib": "11.12.0",
    "jupyterlab": "4.6.6",
    "kubernetes-validate": "1.37.0",
    "nbformat": "5.11.1",
    "sphinx-needs": "9.1.0",
    "validate-pyproject-schema-store": "2026.10.23",
}


@dataclass(frozen=True)
class SchemaFile:
    package: str
    path: str
    schema: dict[str, Any]
    held_out: bool

    @property
    def name(self) -> str:
        return f"{self.package}/{self.path}"


def schema_files() -> list[SchemaFile]:
    """Return the schemas that the rule chooses; wheels that are missing in the cache are downloaded."""
    return [each for package, version in PACKAGES.items() for each in chosen(package, version)]


def chosen(package: str, version: str) -> list[SchemaFile]:
    found, seen = [], set[str]()
    for path, text in sorted(json_files(wheel(package, version))):
        try:
            schema = json.loads(text)
        except ValueError:
            continue
        digest = hashlib.sha256(text).hexdigest()
        if digest not in seen and is_schema(schema) and is_whole(schema):
            order = hashlib.sha256(f"{package}/{path}".encode()).digest()
            found.append((order, SchemaFile(package, path, schema, order[-1] % 3 == 0)))
        seen.add(digest)
    return [file for _, file in sorted(found, key=lambda pair: pair[0])[:MOST]]


def wheel(package: str, version: str) -> Path:
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if not list(CACHE.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(CACHE), f"{package}=={version}"], check=True)
    return next(CACHE.glob(pattern))


def json_files(archive: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as files:
        for path in files.namelist():
            if path.endswith(".json"):
                yield path, files.read(path)


def is_schema(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return "json-schema.org" in str(value.get("$schema", "")) or isinstance(value.get("properties"), dict)


def is_whole(schema: dict[str, Any]) -> bool:
    own = [each for key in ("$id", "id") if isinstance(each := schema.get(key), str) and each]
    waiting: list[Any] = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            target = value.get("$ref")
            if isinstance(target, str) and not target.startswith(("#", *own)):
                return False
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return True


def pydantic_schemas() -> list[SchemaFile]:
    """Return the schemas of at most 200 pydantic models of the openai package, chosen in the same way."""
    import openai.types
    from pydantic import BaseModel, PydanticInvalidForJsonSchema, PydanticUserError

    for module in pkgutil.walk_packages(openai.types.__path__, "openai.types."):
        importlib.import_module(module.name)
    models, waiting = dict[str, SchemaFile](), [BaseModel]
    while waiting:
        each = waiting.pop()
        waiting += each.__subclasses__()
        if each.__module__.startswith("openai.types.") and each.model_fields:
            name = f"{each.__module__}.{each.__qualname__}"
            with contextlib.suppress(PydanticInvalidForJsonSchema, PydanticUserError):
                models[name] = SchemaFile("pydantic", name, each.model_json_schema(), False)
    order = sorted(models, key=lambda name: hashlib.sha256(f"openai/{name}".encode()).digest())
    return [models[name] for name in order[:200]]
