"""GigaChat 3.1: a single call as a JSON object after a special token."""

from ovspec.params.tool_formats.layout import ToolFormat, split_calls

GIGACHAT = ToolFormat(
    name="gigachat",
    calls=(('<|function_call|>{"name": "', "NAME", '", "arguments": ', "ARGUMENTS", "}"),),
    triggers=("<|function_call|>",),
    adapt_messages=split_calls,
)
