"""The one exception type whose message is meant for the user."""


class OvspecError(Exception):
    """Something the user can act on; the message is one sentence that says what to do."""
