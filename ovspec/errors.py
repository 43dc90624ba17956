"""The one exception type whose message is meant for the user."""


class OvspecError(Exception):
    """A problem that the user can act on. The message is one sentence that says what to do."""
