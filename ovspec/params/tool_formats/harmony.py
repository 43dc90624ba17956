"""Harmony, the format of gpt-oss: a call is a message to functions.NAME, in the channel commentary.

See https://github.com/openai/harmony.
"""

from ovspec.params.tool_formats.layout import Message, ToolFormat, split_calls


def move_text_into_thinking(messages: list[Message]) -> list[Message]:
    """Move the text before a call into "thinking", where the template reads it."""
    converted = list[Message]()
    for message in split_calls(messages):
        if message.get("tool_calls") and (reasoning := message.get("reasoning_content")):
            thinking_text = "\n\n".join(filter(None, (reasoning, message["content"])))
            message = {**message, "thinking": thinking_text, "content": ""}
        converted.append(message)
    return converted


HARMONY = ToolFormat(
    name="harmony",
    calls=(
        ("<|channel|>commentary to=functions.", "NAME", " <|constrain|>json<|message|>", "ARGUMENTS"),
        (" to=functions.", "NAME", "<|channel|>commentary json<|message|>", "ARGUMENTS"),
        (" to=functions.", "NAME", "<|channel|>commentary <|constrain|>json<|message|>", "ARGUMENTS"),
    ),
    triggers=("<|channel|>commentary to=functions.", " to=functions."),
    calls_within_text=False,  # after a text, a call begins another message
    adapt_messages=move_text_into_thinking,
)
