"""Environments for families unsupported by the installed transformers: overlay folders in the user's cache.

An overlay has other versions of a few packages, installed with ``pip install --no-deps --target`` from wheels with
fixed checksums. Only the exporting process sees it, at the front of its ``PYTHONPATH``. Nothing is installed into the
user's own environment.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from ovspec.base.errors import OvspecError
from ovspec.base.files import rename_with_retries
from ovspec.base.progress import format_size, print_note, show_step
from ovspec.ir.device import default_cache_dir
from ovspec_export.folders import check_disk_space

NEEDED_BYTES = 130_000_000  # of disk for making an overlay, wheels included
# Scripts are unused. Wheels may overwrite each other's, and pip lists them outside the folder.
SCRIPT_PREFIXES = ("../", "/", "bin/", "Scripts/")
WRONG_CHECKSUM = "a downloaded package has the wrong checksum; try again, or set another package index for pip"
# Text in pip's or uv's output -> why the packages are unavailable.
INSTALL_FAILURES = {
    "No space left on device": "the disk is full; free some space",
    "DO NOT MATCH THE HASHES": WRONG_CHECKSUM,
    "Long Path support": "a path is too long for Windows; see https://pip.pypa.io/warnings/enable-long-paths",
    "Hash mismatch": WRONG_CHECKSUM,
}
NETWORK_FAILURES = {
    "No matching distribution": "the package index cannot be reached, or doesn't have these packages",
    "NewConnectionError": "the package index cannot be reached",
    "Failed to fetch": "the package index cannot be reached",
}


@dataclass(frozen=True)
class Environment:
    """An overlay: its name and its wheels, each as name, version and SHA-256."""

    name: str
    wheels: tuple[tuple[str, str, str], ...]

    @property
    def overlay_folder(self) -> Path:
        """The folder for the finished overlay; its name changes with the versions."""
        versions = "-".join(f"{name}-{version}" for name, version, _ in self.wheels)
        return default_cache_dir() / "environments" / versions

    @property
    def partial_prefix(self) -> str:
        """The prefix of folders for unfinished overlays: short, as Windows' paths end at 259 characters."""
        return f".{zlib.crc32(self.overlay_folder.name.encode()):08x}-"

    @property
    def is_prepared(self) -> bool:
        """Whether the overlay is there and complete; a copy made by hand may not be."""
        dist_info_names = (f"{name.replace('-', '_')}-{version}.dist-info" for name, version, _ in self.wheels)
        return all(is_wheel_complete(self.overlay_folder / dist_info_name) for dist_info_name in dist_info_names)


TRANSFORMERS_5_2 = Environment(
    "transformers 5.2",
    (("transformers", "5.2.0", "9ecaf243dc45bee11a7d93f8caf03746accc0cb069181bbf4ad8566c53e854b4"),),
)
TRANSFORMERS_4_57 = Environment(
    "transformers 4.57",
    (
        ("transformers", "4.57.6", "4c9e9de11333ddfe5114bc872c9f370509198acf0b87a832a0ab9458e2bd0550"),
        ("huggingface-hub", "0.36.2", "48f0c8eac16145dfce371e9d2d7772854a4f591bcb56c9cf548accf531d54270"),
    ),
)
OPTIMUM_INTEL_2_2 = Environment(
    "optimum-intel 2.2",
    (
        ("optimum-intel", "2.2.0", "ba3c1c5995912fa10717dd76c07a60eff636fec0293e0e64b331bb24bc4d6d65"),
        ("optimum", "2.3.0", "3e9b217b4ab21fd4cf894a987002ee7d3626114e009592babf084c2f1a0f3b5f"),
    ),
)
OVERLAYS = (TRANSFORMERS_5_2, TRANSFORMERS_4_57, OPTIMUM_INTEL_2_2)


def is_wheel_complete(dist_info: Path) -> bool:
    """Return whether every file listed in the RECORD of a wheel's ``.dist-info`` is there, with the listed size."""
    folder = str(dist_info.parent)
    file_count = 0
    try:
        with (dist_info / "RECORD").open(encoding="utf-8", newline="") as record:
            for file_name, _, recorded_size in csv.reader(record):
                if file_name.startswith(SCRIPT_PREFIXES):
                    continue
                file_count += 1
                actual_size = os.stat(f"{folder}/{file_name}").st_size  # noqa: PTH116, as pathlib takes twice as long
                if recorded_size and actual_size != int(recorded_size):
                    return False
    except (OSError, ValueError, csv.Error):
        return False
    return file_count > 0


def prepare_environment(environment: Environment, families: str) -> Path:
    """Make the overlay unless it exists, and return its folder.

    Args:
        families: the families exported with it, for messages.

    Raises:
        OvspecError: the packages can't be downloaded or installed, or the disk is full.
    """
    folder = environment.overlay_folder
    if environment.is_prepared:
        return folder
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        check_disk_space(folder, NEEDED_BYTES, f"the environment for {families}", "free some space")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print_note(f"{environment.name}: waiting for another export, which is preparing it")
            lock.acquire()
        try:
            if not environment.is_prepared:
                # A killed process leaves such folders.
                for partial_folder in folder.parent.glob(f"{environment.partial_prefix}*"):
                    shutil.rmtree(partial_folder, ignore_errors=True)
                if folder.exists():
                    print_note(f"{folder}: incomplete, so it is made anew")
                with show_step(f"{environment.name}: preparing it for {families}", keep_line=True) as preparing:
                    preparing.result = format_size(install_wheels(environment, families))
        finally:
            lock.release()
    except OSError as error:
        raise OvspecError(
            f"{folder}: the packages for exporting {families} cannot be written ({error.strerror or error}); free some "
            f"space, or make {folder.parent} writable."
        ) from None
    return folder


def install_wheels(environment: Environment, families: str) -> int:
    """Install the wheels next to the overlay's place, and move the result there; return its size in bytes."""
    folder = environment.overlay_folder
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=environment.partial_prefix, ignore_cleanup_errors=True
    ) as temporary_folder:
        packages_folder = Path(temporary_folder) / "packages"
        requirements_file = Path(temporary_folder) / "requirements.txt"
        requirement_lines = [
            f"{name}=={version} --hash=sha256:{checksum}\n" for name, version, checksum in environment.wheels
        ]
        requirements_file.write_text("".join(requirement_lines), encoding="utf-8", newline="\n")
        install_options = [
            "--no-deps",
            "--target",
            str(packages_folder),
            "--require-hashes",
            "-r",
            str(requirements_file),
        ]
        # pip unpacks in the temporary folder first, and its disk may be too small.
        temporary_variables = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), temporary_folder)
        installer_variables = dict.fromkeys(("PIP_CONSTRAINT", "PIP_PREFIX", "PIP_ROOT", "UV_CONSTRAINT"), "")
        installer_variables |= dict.fromkeys(("PIP_DRY_RUN", "PIP_USER", "PIP_REQUIRE_VIRTUALENV"), "0")
        installer_variables |= {"PIP_NO_INPUT": "1", "PYTHONUTF8": "1"}
        process = subprocess.run(
            [*find_installer_command(), *install_options],
            env={**os.environ, **installer_variables, **temporary_variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
        if process.returncode:
            offline_advice = (
                f"check the network and try again, or run 'ovspec export --prepare {families}' on a machine with "
                f"network, and copy the folder printed there to {folder.parent} on this machine"
            )
            reason = describe_install_failure(process, offline_advice)
            wheel_names = " and ".join(f"{name} {version}" for name, version, _ in environment.wheels)
            place = (
                f"{folder} is incomplete, and installing the packages again"
                if folder.exists()
                else f"installing the packages into {folder}"
            )
            raise OvspecError(f"Exporting {families} needs {wheel_names}, but {place} failed ({reason}).")
        size = sum(path.stat().st_size for path in packages_folder.rglob("*") if path.is_file())
        if folder.exists():  # incomplete; it is deleted with the temporary folder
            rename_with_retries(folder, Path(temporary_folder) / "incomplete")
        rename_with_retries(packages_folder, folder)
    return size


def describe_install_failure(process: subprocess.CompletedProcess[str], offline_advice: str) -> str:
    """Return why the packages are unavailable, from the output of pip or uv, and an advice."""
    output = process.stdout + process.stderr
    for pattern, reason in INSTALL_FAILURES.items():
        if pattern in output:
            return reason
    for pattern, network_reason in NETWORK_FAILURES.items():
        if pattern in output:
            return f"{network_reason}; {offline_advice}"
    lines = output.strip().splitlines() or [f"the installer ended with exit code {process.returncode}"]
    return f"{lines[-1].removeprefix('ERROR: ')}; {offline_advice}"


def find_installer_command() -> list[str]:
    """Return the command for installing packages: this Python's pip, or uv."""
    if importlib.util.find_spec("pip"):
        pip_command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        return [*pip_command, "--only-binary", ":all:"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--quiet", "--python", sys.executable, "--only-binary", ":all:"]
    raise OvspecError(
        "Preparing an environment needs pip or uv, but neither is installed; install pip, for example with ensurepip."
    )


def prepare_environments(families_by_environment: dict[Environment, str]) -> None:
    """Make these overlays, each for its families, and print their folders."""
    if not families_by_environment:
        print_note("nothing to prepare: these families need only what is installed")
    for environment, families in families_by_environment.items():
        print_note(f"{environment.name}: {prepare_environment(environment, families)}")


def prepare_environment_variables(environment: Environment | None, families: str) -> dict[str, str]:
    """Prepare an environment, and return the variables for a process to use it; {} for our own environment."""
    if environment is None:
        return {}
    search_paths = [str(prepare_environment(environment, families)), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, search_paths))}
