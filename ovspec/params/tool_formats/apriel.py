"""Apriel 1.5 and 1.6: a list of JSON objects within a tag; only calls rendered by the template have ids."""

from ovspec.params.tool_formats.layout import ToolFormat

CALL_PARTS = ('{"name": "', "NAME", '", "arguments": ', "ARGUMENTS")
APRIEL = ToolFormat(
    name="apriel",
    calls=((*CALL_PARTS, "}"), (*CALL_PARTS, ', "id": "', "ID", '"}')),
    triggers=("<tool_calls>",),
    before_calls="<tool_calls>[",
    between_calls=", ",
    after_calls="]</tool_calls>",
)
