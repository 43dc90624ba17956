"""Seed-OSS: the arguments as XML elements, strings without quotes."""

from ovspec.params.tool_formats.layout import ParameterLayout, ToolFormat

SEED_OSS = ToolFormat(
    name="seed-oss",
    calls=(("<seed:tool_call>\n<function=", "NAME", ">\n", "ARGUMENTS", "</function>\n</seed:tool_call>"),),
    triggers=("<seed:tool_call>",),
    between_calls="\n",
    parameters=ParameterLayout("<parameter=", ">", "</parameter>\n"),
)
