"""What a chat template writes in front of and behind the messages of each role, found by rendering a few chats."""

from __future__ import annotations

from ovspec.errors import OvspecError
from ovspec.text.chat_template import ChatTemplate

Roles = dict[str, tuple[str, str]]  # role -> (what stands in front of a message, what stands behind it)

SAID = ("Alpha7one", "Bravo7two", "Delta7three")  # nothing a template would write, trim or change


def roles_of(template: ChatTemplate) -> Roles | None:
    """For "user", "assistant" and, if a system message is one like the others, "system"; without a BOS in front.

    None where the template doesn't join messages that begin and end the same wherever they stand.
    """
    try:
        chat = around(template, ["user", "assistant", "user"])
        answered = around(template, ["user", "assistant"])
        opened = around(template, ["user"], open=True)
    except OvspecError:
        return None
    user_end, assistant_end = chat[-1], answered[-1]
    if not (chat[1].startswith(user_end) and chat[2].startswith(assistant_end) and opened[1].startswith(user_end)):
        return None
    user_start = chat[2][len(assistant_end) :]
    if not chat[0].endswith(user_start):
        return None
    # A prompt for the answer may hold more than the beginning of an earlier one: an open thought, say.
    roles = {"user": (user_start, user_end), "assistant": (opened[1][len(user_end) :], assistant_end)}
    try:
        before, between, behind = around(template, ["system", "user"])
    except OvspecError:
        return roles
    if between.endswith(user_start) and behind == user_end:
        start = before.removeprefix(template.special_tokens.get("bos_token", ""))
        roles["system"] = (start, between.removesuffix(user_start))
    return roles


def around(template: ChatTemplate, roles: list[str], open: bool = False) -> list[str]:
    """The text in front of, between and behind messages of these roles; raises OvspecError where one isn't whole."""
    messages = [{"role": role, "content": text} for role, text in zip(roles, SAID, strict=False)]
    rest, parts = template.render(messages, open), []
    for message in messages:
        before, found, rest = rest.partition(message["content"])
        if not found:
            raise OvspecError("The chat template leaves a message out.")
        parts.append(before)
    return [*parts, rest]
