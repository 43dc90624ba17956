"""The export of a target and its draft, whole or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ovspec
from ovspec.device import DeviceOptions
from ovspec.errors import OvspecError
from ovspec.ir import compile_ir
from ovspec.manifest import DRAFT_FOLDER, MANIFEST_FILE, ExportedModel, Manifest
from ovspec.probing import probe_rollback
from ovspec.vocabulary import differing_ids
from ovspec_export.tokenizers import differing_texts, load_tokenizer

WEIGHT_FORMATS = ("fp32", "fp16", "int8", "int4")
VERSIONED = ("openvino", "openvino-tokenizers", "nncf", "optimum-intel", "transformers", "torch")


@dataclass(frozen=True)
class Compression:
    """How weights are stored: a format of optimum-cli and, for int4, nncf's options."""

    weight_format: str = "int8"
    group_size: int | None = None
    ratio: float | None = None
    sym: bool = False

    def check(self) -> None:
        if self.weight_format not in WEIGHT_FORMATS:
            raise OvspecError(f"Weight format {self.weight_format!r} is not one of {', '.join(WEIGHT_FORMATS)}.")
        if self.weight_format != "int4" and (self.group_size is not None or self.ratio is not None):
            raise OvspecError("--group-size and --ratio go with --weight-format int4 only.")
        if self.weight_format not in ("int4", "int8") and self.sym:
            raise OvspecError("--sym goes with --weight-format int8 or int4 only.")
        if self.ratio is not None and not 0 <= self.ratio <= 1:
            raise OvspecError(f"--ratio is {self.ratio}; it must be between 0 and 1.")

    def arguments(self) -> list[str]:
        """For optimum-cli."""
        arguments = ["--weight-format", self.weight_format]
        if self.group_size is not None:
            arguments += ["--group-size", str(self.group_size)]
        if self.ratio is not None:
            arguments += ["--ratio", str(self.ratio)]
        return arguments + ["--sym"] * self.sym


def export_pair(
    target: str,
    draft: str | None,
    output: Path,
    compression: Compression = Compression(),
    draft_compression: Compression | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Export ``target`` and, beside it, ``draft`` into ``output``.

    Args:
        target: a checkpoint folder or a hub id.
        draft: likewise, or None.
        output: is replaced at the very end, and only if it is a folder that ovspec exported before.
        compression: of the target's weights.
        draft_compression: of the draft's; the target's by default.
        report: is told in a line what happens.

    Raises:
        OvspecError: bad options, a pair that does not fit, a model optimum-cli refuses, a folder in the way.
    """
    draft_compression = draft_compression or compression
    for wanted in (compression, draft_compression):
        wanted.check()
    output = output.absolute()
    check_output(output)
    versions = {name: importlib.metadata.version(name) for name in VERSIONED} | {"ovspec": ovspec.__version__}
    tokenizer = load_tokenizer(target)
    if draft:
        check_pair(target, tokenizer.get_vocab(), draft, load_tokenizer(draft).get_vocab())

    work = output.with_name(f".{output.name}.partial-{secrets.token_hex(4)}")
    work.mkdir(parents=True)
    try:
        convert(target, work, compression, report)
        differing = differing_texts(tokenizer, work)
        for text in differing:
            report(f"warning: OpenVINO's tokenizer splits {text!r} differently from Hugging Face's")
        manifest = Manifest(
            target=describe(target, work, compression),
            draft=None,
            versions=versions,
            files={},
            tokenizer_differs_on=differing,
        )
        if draft:
            convert(draft, work / DRAFT_FOLDER, draft_compression, report)
            manifest.draft = describe(draft, work / DRAFT_FOLDER, draft_compression)
        files = sorted(path for path in work.rglob("*") if path.is_file())
        manifest.files = {path.relative_to(work).as_posix(): fingerprint(path) for path in files}
        manifest.write(work)
        replace_folder(work, output)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    size = sum(file["size"] for file in manifest.files.values())
    report(f"{output}: {size / 1e6:.1f} MB in {len(manifest.files)} files")
    return manifest


def check_output(output: Path) -> None:
    """Raises OvspecError where ``output`` holds something that ovspec did not make."""
    if output.exists() and not output.is_dir():
        raise OvspecError(f"{output}: is a file; choose another folder with -o.")
    restore_backup(output)
    if output.exists() and any(output.iterdir()) and not (output / MANIFEST_FILE).is_file():
        raise OvspecError(f"{output}: holds files that ovspec did not export; choose another folder with -o.")


def check_pair(target: str, ours: dict[str, int], draft: str, theirs: dict[str, int]) -> None:
    """Refuse a pair whose vocabularies are not the same, id by id."""
    message = differing_ids({i: t for t, i in ours.items()}, {i: t for t, i in theirs.items()})
    if message:
        raise OvspecError(f"{draft} cannot draft for {target}: {message}; choose a draft with the same tokenizer.")


def convert(source: str, folder: Path, compression: Compression, report: Callable[[str], None]) -> None:
    """Run optimum-cli in a process of its own: it is noisy, and Ctrl-C ends it at once."""
    report(f"{source}: converting to {compression.weight_format}")
    began = time.monotonic()
    command = [sys.executable, "-c", "from optimum.commands.optimum_cli import main; main()", "export", "openvino"]
    command += ["--model", source, "--task", "text-generation-with-past", *compression.arguments(), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise OvspecError(f"{source}: optimum-cli could not export it ({reason.rstrip('.')}).")
    save_tokenizer(source, folder)
    report(f"{source}: converted in {time.monotonic() - began:.0f} s")


def save_tokenizer(source: str, folder: Path) -> None:
    """tokenizer.json for the byte vocabulary, where optimum-cli left it out."""
    if not (folder / "tokenizer.json").is_file():
        load_tokenizer(source).save_pretrained(folder)


def describe(source: str, folder: Path, compression: Compression) -> ExportedModel:
    """The manifest's entry, with the rollback that was probed on the CPU in f32."""
    options = DeviceOptions(precision="f32", properties={"CACHE_DIR": ""})
    ir = compile_ir(folder, options)
    return ExportedModel(
        source=Path(source).name if Path(source).is_dir() else source,
        weight_format=compression.weight_format,
        options={"group_size": compression.group_size, "ratio": compression.ratio, "sym": compression.sym},
        probe=probe_rollback(ir),
        states=[dataclasses.asdict(state) for state in ir.states],
    )


def fingerprint(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


# ---------------------------------------------------------------- replacing a folder


def backup_of(output: Path) -> Path:
    return output.with_name(f".{output.name}.old")


def restore_backup(output: Path) -> None:
    """Undo a replacement that was killed half way; drop a backup that is not needed any more."""
    backup = backup_of(output)
    if not (backup / MANIFEST_FILE).is_file():
        return
    if output.exists():
        shutil.rmtree(backup)
    else:
        backup.rename(output)


def replace_folder(new: Path, output: Path) -> None:
    """Put ``new`` in the place of ``output``. Renames only, which also works on Windows."""
    backup = backup_of(output)
    if output.exists():
        output.rename(backup)
    try:
        new.rename(output)
    except BaseException:
        restore_backup(output)
        raise
    shutil.rmtree(backup, ignore_errors=True)
