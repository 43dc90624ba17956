"""System messages behind others, as agents send them, reach the model whatever its chat template thinks of them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from chat_templates import SPECIAL, TEMPLATES

from ovspec.base.errors import OvspecError
from ovspec.params.tool_formats.layout import (
    append_user_text_to_results,
    join_consecutive_messages,
    move_results_to_user,
)
from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import ChatTemplate

FIRST = {"deepseek"}  # templates that put all system messages first
CHATS = ("user system", "user system user", "user assistant system user", "user assistant user system system")
# Some of those that don't take them.
REFUSING = {"command_r", "gemma2", "gemma3", "gpt_oss", "mistral_v3", "qwen35", "smollm3"}


def chat_of(roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"It is {number} o'clock."} for number, role in enumerate(roles.split())]


@pytest.mark.parametrize("name", TEMPLATES)
def test_late_system_messages_are_rendered(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    format, plain = ChatFormat(template), chat_of("user assistant user")
    try:
        expected = template.render(plain)
    except OvspecError:
        pytest.skip("the template needs more than messages")
    assert format.render_prompt(plain) == expected
    for roles in CHATS:
        chat = chat_of(roles)
        prompt = format.render_prompt(chat)
        places = [prompt.find(message["content"]) for message in chat]
        assert min(places) >= 0 and (name in FIRST or places == sorted(places)), prompt
        try:
            same = template.render(chat) == prompt
        except OvspecError:
            same = False
        assert not (same and name in REFUSING)


def test_they_are_one_with_the_users_messages_beside_them() -> None:
    format = ChatFormat(ChatTemplate(TEMPLATES["gemma3"], SPECIAL))
    joined = [{"role": "user", "content": "a\n\nb\n\nc"}, {"role": "assistant", "content": "d"}]
    chat = [{"role": role, "content": text} for role, text in zip(("user", "system", "user"), "abc", strict=True)]
    end = {"role": "user", "content": "e"}
    assert format.render_prompt([*chat, joined[1], end]) == format.render_prompt([*joined, end])
    with pytest.raises(OvspecError, match="alternate"):
        format.template.render([chat[0], chat[2]])
    assert format.render_prompt([chat[0], chat[2]]) == format.render_prompt([{"role": "user", "content": "a\n\nc"}])


def test_a_first_system_message_stays_one() -> None:
    format = ChatFormat(ChatTemplate(TEMPLATES["qwen35"], SPECIAL))
    chat = chat_of("system user system")
    assert format.render_prompt(chat).startswith(format.template.render(chat[:2], opens_answer=False)[:40])
    assert format.render_prompt(chat[:2]) == format.template.render(chat[:2])


TOOL = {"type": "function", "function": {"name": "go", "description": "Go.", "parameters": {"type": "object"}}}
CALL = {"id": "123456789", "type": "function", "function": {"name": "go", "arguments": "{}"}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "123456789", "content": "Done."}
ASKED, THOUGHT = {"role": "user", "content": "Go?"}, {"role": "assistant", "content": "", "reasoning_content": "Hm."}
HISTORIES = {
    "a user after a result": [ASKED, CALLS, RESULT, {"role": "user", "content": "And now?"}],
    "a system message after a result": [ASKED, CALLS, RESULT, {"role": "system", "content": "Hurry."}],
    "two answers": [ASKED, *({"role": "assistant", "content": text} for text in ("Yes.", "No.")), ASKED],
    "a call after a text": [ASKED, {"role": "assistant", "content": "Yes."}, CALLS, RESULT],
    "an answer that was cut off while thinking": [ASKED, THOUGHT, {"role": "user", "content": "Well?"}],
}


@pytest.mark.parametrize("chat", HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "command_r_tools"])  # has tools of its own kind
def test_what_agents_send_is_rendered(name: str, chat: list[dict[str, Any]]) -> None:
    prompt = ChatFormat(ChatTemplate(TEMPLATES[name], SPECIAL)).render_prompt(chat, [TOOL])
    assert all(message["content"] in prompt for message in chat)


def test_the_time_of_repairs_grows_with_the_chat() -> None:
    """A square would take minutes."""
    many = [*([ASKED] * 50_000), CALLS, *([RESULT] * 50_000), ASKED]
    began = time.monotonic()
    assert len(join_consecutive_messages(many)) == 50_003 and len(move_results_to_user(many)) == 50_003
    assert len(append_user_text_to_results(many)) == len(many) - 1
    assert time.monotonic() - began < 10
