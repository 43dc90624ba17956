"""The format for models whose chat template has no tools, or a format of its own: told in the system prompt."""

from dataclasses import replace

from ovspec.text.tool_formats.hermes import HERMES
from ovspec.text.tool_formats.layout import Message, in_content, results_as_user


def history(messages: list[Message]) -> list[Message]:
    """Write calls and their results as text."""
    return results_as_user(in_content(HERMES)(messages))


GENERIC = replace(HERMES, name="generic", history=history, native=False)
