"""A cluster of Ray: one on this machine alone, or one that runs somewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections.abc import Iterator
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.base.files import scratch_folder
from ovspec.base.progress import drop_native_stderr, show_step
from ovspec.batch.ray.processors import processors
from ovspec.ir.device import default_cache_dir

LOCAL = "local"


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to the cluster at ``address``, or run one on this machine, of which nothing listens beyond loopback."""
    # Read when Ray is imported. Without a cluster of several machines, it binds everything to 127.0.0.1.
    alone = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if address == LOCAL else {}
    os.environ |= alone | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}
    try:
        import pyarrow  # noqa: F401
        import ray.data
    except ImportError:
        raise OvspecError("Ray is missing; run pip install 'ovspec[ray]'.") from None
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.raise_original_map_exception = True
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ways: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    # The path of a socket has at most 107 bytes, of which Ray adds some 70.
    with scratch_folder(default_cache_dir() / "ray" / "sessions", max_bytes=36) as folder:
        if address == LOCAL:
            ways |= {"num_cpus": sum(map(len, processors())), "include_dashboard": False, "_temp_dir": str(folder)}
        try:
            if place := re.search(r"([\w.-]+):(\d+)$", address):  # because Ray would try for minutes
                socket.create_connection((place[1], int(place[2])), timeout=10).close()
            with show_step("Ray: connecting"), drop_native_stderr():
                ray.init(address, **ways)
        except (OSError, ValueError) as error:
            raise OvspecError(f"No cluster of Ray answers at {address} ({str(error).splitlines()[0]}).") from None
        try:
            yield
        finally:
            ray.shutdown()
