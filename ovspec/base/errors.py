"""The exceptions whose messages are meant for the user."""

import errno


class OvspecError(Exception):
    """A problem that the user can act on. The message is one sentence that says what to do.

    It names options as Python does, in backticks, as `draft` or `draft='lookup'`; the command line makes flags of them.
    """


class PromptError(OvspecError):
    """A prompt can't be used. ``too_long``: it has more tokens than the context."""

    def __init__(self, message: str, too_long: bool = False) -> None:
        super().__init__(message)
        self.too_long = too_long


class UnavailableError(OvspecError):
    """Something that was needed is missing for now, through no fault of what was asked."""


DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)  # of an OSError: a disk or a quota is full


class WriteError(OvspecError, OSError):
    """A file couldn't be written, because its disk is full or for another reason of the system's."""

    def __init__(self, file: object, error: OSError) -> None:
        reason = error.strerror or str(error)
        super().__init__(f"{file}: can't be written ({reason}); make room for it, or name another place.")
        self.errno = error.errno


class InferenceError(OvspecError):
    """The model couldn't be computed, through no fault of the text."""
