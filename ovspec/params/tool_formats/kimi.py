"""Kimi K2: calls with numbers."""

from ovspec.params.tool_formats.layout import ToolFormat

KIMI = ToolFormat(
    name="kimi",
    calls=(
        (
            "<|tool_call_begin|>functions.",
            "NAME",
            ":",
            "INDEX",
            "<|tool_call_argument_begin|>",
            "ARGUMENTS",
            "<|tool_call_end|>",
        ),
    ),
    triggers=("<|tool_calls_section_begin|>",),
    begin="<|tool_calls_section_begin|>",
    between="",
    end="<|tool_calls_section_end|>",
)
