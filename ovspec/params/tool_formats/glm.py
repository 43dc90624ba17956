"""GLM 4.5 to 4.7 and Ling 3: the arguments as pairs of XML elements, with new lines between them or without."""

from ovspec.params.tool_formats.layout import ParameterLayout, ToolFormat

GLM = ToolFormat(
    name="glm",
    calls=(("<tool_call>", "NAME", "\n", "ARGUMENTS", "</tool_call>"),),
    triggers=("<tool_call>",),
    between_calls="\n",
    parameters=ParameterLayout("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
GLM_DENSE = ToolFormat(
    name="glm-dense",
    calls=(("<tool_call>", "NAME", "ARGUMENTS", "</tool_call>"),),
    triggers=("<tool_call>",),
    between_calls="",
    parameters=ParameterLayout("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
)
LING = ToolFormat(
    name="ling",
    calls=(("<tool_call>", "NAME", "\n", "ARGUMENTS", "\n</tool_call>"),),
    triggers=("<tool_call>",),
    between_calls="\n",
    parameters=ParameterLayout("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
)
