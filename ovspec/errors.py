"""The exceptions whose messages are meant for the user."""


class OvspecError(Exception):
    """A problem that the user can act on. The message is one sentence that says what to do.

    It names options as Python does, in backticks, as `draft` or `draft='lookup'`; the command line makes flags of them.
    """


class InferenceError(OvspecError):
    """The model couldn't be computed, through no fault of the text."""
