"""Qwen3-Coder and Qwen3.5: the arguments as XML elements, strings without quotes."""

from dataclasses import replace

from ovspec.params.tool_formats.layout import ParameterLayout, ToolFormat

QWEN_XML = ToolFormat(
    name="qwen-xml",
    calls=(("<tool_call>\n<function=", "NAME", ">\n", "ARGUMENTS", "</function>\n</tool_call>"),),
    triggers=("<tool_call>",),
    between_calls="\n",
    parameters=ParameterLayout("<parameter=", ">\n", "\n</parameter>\n"),
)
QWEN_XML_DENSE = replace(QWEN_XML, name="qwen-xml-dense", between_calls="")  # Step 3.5
