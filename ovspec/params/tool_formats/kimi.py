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
    before_calls="<|tool_calls_section_begin|>",
    between_calls="",
    after_calls="<|tool_calls_section_end|>",
)
