"""Granite 3: a list of JSON objects after a special token. Its template doesn't render calls."""

from dataclasses import replace

from ovspec.params.tool_formats.layout import ToolFormat, make_calls_writer

GRANITE3_CALLS = ToolFormat(
    name="granite3",
    template_marks=("<|start_of_role|>", "<|tool_call|>"),
    calls=(('{"name": "', "NAME", '", "arguments": ', "ARGUMENTS", "}"),),
    triggers=("<|tool_call|>",),
    before_calls="<|tool_call|>[",
    between_calls=", ",
    after_calls="]",
)
GRANITE3 = replace(GRANITE3_CALLS, adapt_messages=make_calls_writer(GRANITE3_CALLS))
