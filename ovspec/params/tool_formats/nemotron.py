"""Nemotron Nano 2: a list of JSON objects within one tag."""

from ovspec.params.tool_formats.layout import ToolFormat

NEMOTRON = ToolFormat(
    name="nemotron",
    calls=(('{"name": "', "NAME", '", "arguments": ', "ARGUMENTS", "}"),),
    triggers=("<TOOLCALL>",),
    begin="<TOOLCALL>[",
    between=", ",
    end="]</TOOLCALL>",
)
