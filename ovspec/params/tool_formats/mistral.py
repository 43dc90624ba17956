"""Mistral: up to Nemo a list of JSON objects; from Small 3.2, Devstral and Magistral on a name and its arguments."""

from dataclasses import replace

from ovspec.params.tool_formats.layout import ToolFormat

MISTRAL_LIST = ToolFormat(
    name="mistral-list",
    calls=(('{"name": "', "NAME", '", "arguments": ', "ARGUMENTS", ', "id": "', "ID", '"}'),),
    triggers=("[TOOL_CALLS]",),
    before_calls="[TOOL_CALLS][",
    between_calls=", ",
    after_calls="]",
    id_length=9,
)
MISTRAL_V3 = replace(MISTRAL_LIST, name="mistral-v3", before_calls="[TOOL_CALLS] [")  # 7B v0.3 and 8x22B
MISTRAL = ToolFormat(
    name="mistral",
    calls=(
        ("[TOOL_CALLS]", "NAME", "[ARGS]", "ARGUMENTS"),
        ("[TOOL_CALLS]", "NAME", "[CALL_ID]", "ID", "[ARGS]", "ARGUMENTS"),
    ),
    triggers=("[TOOL_CALLS]",),
    between_calls="",
    id_length=9,
)
