"""Hermes: Nous Hermes 2 and 3, Qwen 2.5 and 3, Granite 4, and many successors."""

from dataclasses import replace

from ovspec.params.tool_formats.layout import ToolFormat

CALL_PARTS = ('<tool_call>\n{"name": "', "NAME", '", "arguments": ', "ARGUMENTS", "}\n</tool_call>")
HERMES = ToolFormat(
    name="hermes",
    calls=(CALL_PARTS,),
    triggers=("<tool_call>",),
    between_calls="\n",
)
HERMES_DENSE = replace(HERMES, name="hermes-dense", between_calls="")  # Reka Edge
