"""MiniMax M2: the arguments as XML elements, strings without quotes, all calls within a single tag."""

from ovspec.params.tool_formats.layout import ParameterLayout, ToolFormat

MINIMAX = ToolFormat(
    name="minimax",
    calls=(('<invoke name="', "NAME", '">\n', "ARGUMENTS", "</invoke>\n"),),
    triggers=("<minimax:tool_call>",),
    before_calls="<minimax:tool_call>\n",
    between_calls="",
    after_calls="</minimax:tool_call>",
    parameters=ParameterLayout('<parameter name="', '">', "</parameter>\n"),
)
