"""SmolLM3: Hermes' calls, but the template calls tools "xml_tools" and doesn't render calls."""

from dataclasses import replace

from ovspec.params.tool_formats.hermes import HERMES
from ovspec.params.tool_formats.layout import make_calls_writer

SMOLLM3 = replace(
    HERMES,
    name="smollm3",
    tools_variable="xml_tools",
    adapt_messages=make_calls_writer(HERMES),
    template_marks=("xml_tools", "<tool_call>"),
)
