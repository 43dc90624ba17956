"""Finds a chat template's text before and after messages of each role, by rendering a few chats."""

from __future__ import annotations

from ovspec.base.errors import OvspecError
from ovspec.text.chat_template import ChatTemplate

RoleTexts = dict[str, tuple[str, str]]  # role -> (text before a message, text after it)

SAMPLE_CONTENTS = ("Alpha7one", "Bravo7two", "Delta7three")  # no template has, trims or changes these


def find_role_texts(template: ChatTemplate) -> RoleTexts | None:
    """Return the texts around messages of "user", "assistant" and, where it is a message like the others, "system".

    They leave out a BOS. Return None if the template begins or ends messages differently at different positions.
    """
    try:
        chat_texts = split_rendered_chat(template, ["user", "assistant", "user"])
        answered_texts = split_rendered_chat(template, ["user", "assistant"])
        opened_texts = split_rendered_chat(template, ["user"], opens_answer=True)
    except OvspecError:
        return None
    user_end = chat_texts[-1]
    assistant_end = answered_texts[-1]
    if not (
        chat_texts[1].startswith(user_end)
        and chat_texts[2].startswith(assistant_end)
        and opened_texts[1].startswith(user_end)
    ):
        return None
    user_start = chat_texts[2][len(assistant_end) :]
    if not chat_texts[0].endswith(user_start):
        return None
    # The prompt for an answer may hold more than the start of an earlier answer, such as an opened thinking block.
    role_texts = {"user": (user_start, user_end), "assistant": (opened_texts[1][len(user_end) :], assistant_end)}
    try:
        text_before_system, text_between_turns, text_after_user = split_rendered_chat(template, ["system", "user"])
    except OvspecError:
        return role_texts
    if text_between_turns.endswith(user_start) and text_after_user == user_end:
        system_start = text_before_system.removeprefix(template.special_tokens.get("bos_token", ""))
        role_texts["system"] = (system_start, text_between_turns.removesuffix(user_start))
    return role_texts


def split_rendered_chat(template: ChatTemplate, roles: list[str], opens_answer: bool = False) -> list[str]:
    """Return the texts before, between and after messages of ``roles``; raises OvspecError if a message is left out.

    opens_answer: render the beginning of an answer, too.
    """
    messages = [{"role": role, "content": text} for role, text in zip(roles, SAMPLE_CONTENTS, strict=False)]
    unsplit_text = template.render(messages, opens_answer)
    texts_around = []
    for message in messages:
        text_before, matched_content, unsplit_text = unsplit_text.partition(message["content"])
        if not matched_content:
            raise OvspecError(f"The chat template leaves out {message['role']} messages; set another `chat_template`.")
        texts_around.append(text_before)
    return [*texts_around, unsplit_text]
