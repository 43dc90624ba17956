"""Functionary 3.1: the name in a tag around a JSON object."""

from ovspec.params.tool_formats.layout import ToolFormat

FUNCTIONARY = ToolFormat(
    name="functionary",
    calls=(("<function=", "NAME", ">", "ARGUMENTS", "</function>"),),
    triggers=("<function=",),
    between_calls="",
)
