"""Llama 3.1 to 3.3: an answer consists of a single call as a JSON object."""

from ovspec.params.tool_formats.layout import ToolFormat, split_calls

CALL_PARTS = ('{"name": "', "NAME", '", "parameters": ', "ARGUMENTS", "}")
LLAMA3 = ToolFormat(
    name="llama3",
    calls=(CALL_PARTS, ("<|python_tag|>" + CALL_PARTS[0], *CALL_PARTS[1:])),
    triggers=('{"name": "{NAME}"', '<|python_tag|>{"name": "{NAME}"'),
    calls_within_text=False,  # elsewhere it may be JSON for the user
    adapt_messages=split_calls,
)
