"""Finds the text that a chat template writes before and after messages of each role, by rendering a few chats."""

from __future__ import annotations

from ovspec.base.errors import OvspecError
from ovspec.text.chat_template import ChatTemplate

RoleTexts = dict[str, tuple[str, str]]  # role -> (text before a message, text after it)

SAMPLE_CONTENTS = ("Alpha7one", "Bravo7two", "Delta7three")  # which no template would write, trim or change


def find_role_texts(template: ChatTemplate) -> RoleTexts | None:
    """Return the texts around messages of "user", "assistant" and, where it is a message like the others, "system".

    They leave out a BOS. Return None if the template begins or ends messages differently at different positions.
    """
    try:
        chat = split_rendered_chat(template, ["user", "assistant", "user"])
        answered = split_rendered_chat(template, ["user", "assistant"])
        opened = split_rendered_chat(template, ["user"], open=True)
    except OvspecError:
        return None
    user_end = chat[-1]
    assistant_end = answered[-1]
    if not (chat[1].startswith(user_end) and chat[2].startswith(assistant_end) and opened[1].startswith(user_end)):
        return None
    user_start = chat[2][len(assistant_end) :]
    if not chat[0].endswith(user_start):
        return None
    # The prompt for an answer may hold more than an earlier answer begins with, such as an opened thinking block.
    role_texts = {"user": (user_start, user_end), "assistant": (opened[1][len(user_end) :], assistant_end)}
    try:
        before, between, after = split_rendered_chat(template, ["system", "user"])
    except OvspecError:
        return role_texts
    if between.endswith(user_start) and after == user_end:
        start = before.removeprefix(template.special_tokens.get("bos_token", ""))
        role_texts["system"] = (start, between.removesuffix(user_start))
    return role_texts


def split_rendered_chat(template: ChatTemplate, roles: list[str], open: bool = False) -> list[str]:
    """Return the texts before, between and after messages of ``roles``; raises OvspecError if one is left out.

    open: render the beginning of an answer, too.
    """
    messages = [{"role": role, "content": text} for role, text in zip(roles, SAMPLE_CONTENTS, strict=False)]
    rest = template.render(messages, open)
    texts = []
    for message in messages:
        before, content, rest = rest.partition(message["content"])
        if not content:
            raise OvspecError("The chat template leaves a message out.")
        texts.append(before)
    return [*texts, rest]
