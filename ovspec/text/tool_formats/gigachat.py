"""GigaChat 3.1: one call as a JSON object after a special token."""

from ovspec.text.tool_formats.layout import ToolFormat, one_call_each

GIGACHAT = ToolFormat(
    name="gigachat",
    calls=(('<|function_call|>{"name": "', "NAME", '", "arguments": ', "ARGUMENTS", "}"),),
    triggers=("<|function_call|>",),
    history=one_call_each,
)
