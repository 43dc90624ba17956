"""DeepSeek R1 with its distillations, and V3.1."""

from ovspec.params.tool_formats.layout import ToolFormat

CALLS_BEGIN, CALL_BEGIN, CALL_SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CALL_END, CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_R1 = ToolFormat(
    name="deepseek-r1",
    calls=((f"{CALL_BEGIN}function{CALL_SEPARATOR}", "NAME", "\n```json\n", "ARGUMENTS", f"\n```{CALL_END}"),),
    triggers=(CALLS_BEGIN,),
    before_calls=CALLS_BEGIN,
    between_calls="\n",
    after_calls=CALLS_END,
)
DEEPSEEK = ToolFormat(
    name="deepseek",
    calls=((CALL_BEGIN, "NAME", CALL_SEPARATOR, "ARGUMENTS", CALL_END),),
    triggers=(CALLS_BEGIN,),
    before_calls=CALLS_BEGIN,
    between_calls="",
    after_calls=CALLS_END,
)
