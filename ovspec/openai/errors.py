"""Requests that can't be met."""

from __future__ import annotations

from ovspec.errors import OvspecError


class RequestError(OvspecError):
    """A request can't be met.

    param: the field that is wrong.
    code: a word for programs, such as "context_length_exceeded".
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code
