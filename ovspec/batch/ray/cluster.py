"""A cluster of Ray: on this machine alone, or a running one."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from ovspec.base.errors import OvspecError
from ovspec.base.files import HOST_CODE
from ovspec.base.json_types import JsonObject
from ovspec.base.progress import show_step
from ovspec.batch.ray.processors import usable_processors
from ovspec.ir.device import default_cache_dir

LOCAL_ADDRESS = "local"


@contextlib.contextmanager
def cluster_connection(address: str) -> Iterator[None]:
    """Connect to the cluster at ``address``, or run a cluster on this machine, on loopback only."""
    # Read when Ray is imported. Without a cluster of several machines, it binds everything to 127.0.0.1.
    loopback_environment = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if address == LOCAL_ADDRESS else {}
    os.environ |= loopback_environment | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}
    try:
        import pyarrow  # noqa: F401
        import ray.data
    except ImportError:
        raise OvspecError("Ray is not installed; run pip install 'ovspec[ray]'.") from None
    data_context = ray.data.DataContext.get_current()
    data_context.enable_progress_bars = data_context.print_on_execution_start = False
    data_context.raise_original_map_exception = True
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    init_options: JsonObject = {"log_to_driver": False, "logging_level": logging.ERROR}
    # A socket's path has at most 107 bytes, with some 70 added by Ray.
    with scratch_folder(default_cache_dir() / "ray" / "sessions", max_path_bytes=36) as folder:
        if address == LOCAL_ADDRESS:
            processor_count = sum(map(len, usable_processors()))
            init_options |= {"num_cpus": processor_count, "include_dashboard": False, "_temp_dir": str(folder)}
        try:
            if host_and_port := re.search(r"([\w.-]+):(\d+)$", address):  # try first: Ray would retry for minutes
                host, port = host_and_port.groups()
                socket.create_connection((host, int(port)), timeout=10).close()
            with show_step("Ray: connecting"), drop_native_stderr():
                ray.init(address, **init_options)
        except (OSError, ValueError) as error:
            raise OvspecError(
                f"No Ray cluster answers at {address} ({str(error).splitlines()[0]}); check the address."
            ) from None
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def drop_native_stderr() -> Iterator[None]:
    """Drop the output of libraries in other languages on stderr."""
    python_stderr = sys.stderr
    stderr_copy = os.dup(2)
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 2)
    os.close(null_device)
    try:
        with os.fdopen(os.dup(stderr_copy), "w", encoding="utf-8", errors="replace", newline="\n") as sys.stderr:
            yield
    finally:
        sys.stderr = python_stderr
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)


@contextlib.contextmanager
def scratch_folder(parent_folder: Path, max_path_bytes: int) -> Iterator[Path]:
    """Yield a new folder in ``parent_folder`` under a path of at most ``max_path_bytes`` bytes; delete it in the end.

    If its own path is longer, a link among the temporary files is yielded. Folders of killed processes are deleted,
    too.
    """
    for abandoned_folder in parent_folder.glob(f"{HOST_CODE}-*"):
        if not psutil.pid_exists(int(abandoned_folder.name.rpartition("-")[2])):
            shutil.rmtree(abandoned_folder, ignore_errors=True)
    folder = parent_folder / f"{HOST_CODE}-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if sys.platform == "win32" or len(os.fsencode(folder)) <= max_path_bytes:  # Windows has no socket paths
            yield folder
            return
        temporary_folder = tempfile.gettempdir()
        if len(temporary_folder) >= max_path_bytes - 20:
            temporary_folder = "/tmp"
        with tempfile.TemporaryDirectory(prefix="ovspec-", dir=temporary_folder) as link_folder:
            link = Path(link_folder) / "link"
            link.symlink_to(folder)
            yield link
    finally:
        shutil.rmtree(folder, ignore_errors=True)
