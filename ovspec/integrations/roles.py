"""Finds the text that a chat template writes before and after messages of each role, by rendering a few chats."""

from __future__ import annotations

from ovspec.base.errors import OvspecError
from ovspec.text.chat_template import ChatTemplate

Roles = dict[str, tuple[str, str]]  # role -> (text before a message, text after it)

SAID = ("Alpha7one", "Bravo7two", "Delta7three")  # contents that no template would write, trim or change


def find_roles(template: ChatTemplate) -> Roles | None:
    """Return the texts around messages of "user", "assistant" and, where it is a message like the others, "system".

    They leave out a BOS. Return None if the template begins or ends messages differently at different positions.
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
    # The prompt for an answer may hold more than an earlier answer begins with, such as an opened thinking block.
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
    """Return the texts before, between and after messages of ``roles``; raises OvspecError if one is left out."""
    messages = [{"role": role, "content": text} for role, text in zip(roles, SAID, strict=False)]
    rest, parts = template.render(messages, open), []
    for message in messages:
        before, found, rest = rest.partition(message["content"])
        if not found:
            raise OvspecError("The chat template leaves a message out.")
        parts.append(before)
    return [*parts, rest]
