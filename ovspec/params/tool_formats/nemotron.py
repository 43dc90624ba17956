"""Nemotron Nano 2: a list of JSON objects within a tag."""

from ovspec.params.tool_formats.layout import ToolFormat

NEMOTRON = ToolFormat(
    name="nemotron",
    calls=(('{"name": "', "NAME", '", "arguments": ', "ARGUMENTS", "}"),),
    triggers=("<TOOLCALL>",),
    before_calls="<TOOLCALL>[",
    between_calls=", ",
    after_calls="]</TOOLCALL>",
)
