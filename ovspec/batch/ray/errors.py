"""Errors of a cluster without Ray's and the workers' stacks."""

import contextlib
from collections.abc import Iterator
from typing import Any

from ray.exceptions import RayError

from ovspec.base.errors import OvspecError


@contextlib.contextmanager
def plain_ray_errors() -> Iterator[None]:
    """Raise a worker's OvspecError without Ray's and the worker's stack, and Ray's own errors as OvspecErrors."""
    try:
        yield
    except RayError as error:
        cause: Any = error
        while inner_error := getattr(cause, "cause", None) or cause.__cause__:
            cause = inner_error
        if isinstance(cause, OvspecError):
            raise OvspecError(str(cause)) from None
        if isinstance(cause, RayError):
            raise OvspecError(f"Ray reported an error: {str(cause).strip().splitlines()[0]}") from None
        raise
