"""Cohere's Command R7B and A: a list of JSON objects with numbers."""

from ovspec.params.tool_formats.layout import ToolFormat

COMMAND_R7B = ToolFormat(
    name="command-r7b",
    calls=(('{"tool_call_id": "', "INDEX", '", "tool_name": "', "NAME", '", "parameters": ', "ARGUMENTS", "}"),),
    triggers=("<|START_ACTION|>",),
    before_calls="<|START_ACTION|>[\n    ",
    between_calls=",\n    ",
    after_calls="\n]<|END_ACTION|>",
)
