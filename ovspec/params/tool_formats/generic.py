"""The format for chat templates without tools or with an unknown format, described in the system prompt."""

from dataclasses import replace

from ovspec.params.tool_formats.hermes import HERMES
from ovspec.params.tool_formats.layout import Message, make_calls_writer, move_results_to_user


def write_calls_and_results_as_text(messages: list[Message]) -> list[Message]:
    """Write calls and their results as text."""
    return move_results_to_user(make_calls_writer(HERMES)(messages))


GENERIC = replace(HERMES, name="generic", adapt_messages=write_calls_and_results_as_text, template_has_tools=False)
