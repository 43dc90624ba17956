"""Actors with a loaded model, for the rows of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ovspec.api.loading import load
from ovspec.base.errors import OvspecError
from ovspec.batch.ray.processors import pin_to_free_processors
from ovspec.batch.requests import parse_row
from ovspec.batch.run import OUTPUT_COLUMNS, BatchThread, lines_to_columns
from ovspec.params import make_params
from ovspec.params.generation import GENERATE_OPTIONS


class Predictor:
    """Generates for the rows of a dataset with a model loaded once per actor, for ``Dataset.map_batches``.

    >>> ds.map_batches(Predictor, fn_constructor_kwargs={"model": "my-pair", "max_tokens": 64}, num_cpus=8, ...)

    Each actor is pinned to ``num_cpus`` processors. Its concurrent batches (``max_concurrent_calls_per_actor``) are
    generated together.

    Args:
        model: a folder made by ``ovspec export``, available under this path on all machines.
        draft: the drafters, as for ``ovspec.load``.
        column: the column of requests: prompts, lists of chat messages, or requests like in a batch file.
        options: options of ``ovspec.load``, and of generating calls, for all rows without their own.

    Raises:
        OvspecError: with the first batch: the model can't be loaded, an option is invalid, or the column is missing.
    """

    def __init__(self, model: str | Path | None = None, draft: Any = None, column: str = "prompt", **options: Any):
        self._column = column
        load_options = {name: value for name, value in options.items() if name not in GENERATE_OPTIONS}
        generate_options = {name: value for name, value in options.items() if name in GENERATE_OPTIONS}
        self._get_batch_thread = make_lazy_thread_loader(
            lambda: BatchThread(load(model, draft, **load_options), make_params(generate_options))
        )

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return ``batch`` with the columns text, finish_reason, error and result, the line of a batch file."""
        if self._column not in batch:
            raise OvspecError(f"`column` is {self._column!r}; it must be a column of the data: {', '.join(batch)}.")
        requests = [parse_row(cell, str(row_index)) for row_index, cell in enumerate(batch[self._column])]
        lines = self._get_batch_thread().run_requests(requests)
        columns = lines_to_columns(lines)
        return {**batch, **{name: columns[name] for name in OUTPUT_COLUMNS[1:]}}


def make_lazy_thread_loader(load_thread: Callable[[], BatchThread]) -> Callable[[], BatchThread]:
    """Pin this actor to its processors; return a function that calls ``load_thread`` on its first call.

    Not in the actor's constructor: Ray would restart the actor again and again after a failure.
    """
    pin_actor()
    cached_load = cache(load_thread)
    lock = Lock()

    def load_or_wait() -> BatchThread:
        with lock:
            return cached_load()

    return load_or_wait


def pin_actor() -> None:
    """Pin this actor to ``num_cpus`` processors, before any other thread starts."""
    import ray

    pin_to_free_processors(max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1))))
