"""Exceptions with messages for the user."""

import errno


class OvspecError(Exception):
    """A problem for the user to fix; the message is a single sentence, with the remedy.

    Messages name options in Python's form, in backticks: `draft` or `draft='lookup'`. The command line shows flags.
    """


class PromptError(OvspecError):
    """A prompt is unusable. ``too_long``: it has more tokens than the context."""

    def __init__(self, message: str, too_long: bool = False) -> None:
        super().__init__(message)
        self.too_long = too_long


class UnavailableError(OvspecError):
    """A required resource is unavailable for now; the request itself is valid."""


DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)  # errno of an OSError: a disk or a quota is full


class WriteError(OvspecError, OSError):
    """A file couldn't be written: the disk is full, or another error of the system."""

    def __init__(self, file: object, error: OSError) -> None:
        reason = error.strerror or str(error)
        super().__init__(f"{file}: can't be written ({reason}); free some space, or choose another folder.")
        self.errno = error.errno


class InferenceError(OvspecError):
    """Inference failed, through no fault of the text."""
