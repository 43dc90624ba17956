"""Chat templates with the tags and the Jinja features of current model families, and conversations for them.

The templates in ``chat_templates/`` were written for these tests; none is a model's own.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

TEMPLATES = {
    file.stem: file.read_text("utf-8") for file in sorted(Path(__file__, "../chat_templates").resolve().glob("*"))
}

SPECIAL = {"bos_token": "<bos>", "eos_token": "</eos>", "sep_token": "<sep>", "cls_token": "<cls>"}
SPECIAL |= {"image_token": "<img>", "boi_token": "<start_of_image>"}


@functools.cache
def template_tokenizer() -> Any:
    """Return a tokenizer of Hugging Face that renders templates, with special tokens of its own."""
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokens: dict[str, Any] = {**SPECIAL, "eos_token": AddedToken(SPECIAL["eos_token"], special=True)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **tokens)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place, now or later – for any place on earth & beyond.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A city's name"},
                "unit": {"type": "string", "enum": ["°C", "°F"], "default": "°C"},
                "days": {"type": "array", "items": {"type": "integer"}},
                "near": {"type": ["string", "null"]},
                "options": {
                    "type": "object",
                    "properties": {"wind": {"type": "boolean"}, "deep": {"type": "array", "items": {"type": "object"}}},
                    "required": ["wind"],
                },
                "either": {"anyOf": [{"type": "string"}, {"type": "number", "description": "a height"}]},
            },
            "required": ["place"],
        },
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
TOOLS = [WEATHER, TIME]
DOCUMENTS = [{"title": "Zürich", "text": "It rains <often>."}, {"title": "Oslo", "text": "It snows."}]


def system(text: Any) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, arguments: Any, number: int = 1) -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: Any, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": "get_weather", "content": text}


ARGUMENTS = {"place": "Zürich", "days": [1, 2], "options": {"wind": True}, "near": None}
CALLED = [user("Weather in Zürich?"), answer(None, tool_calls=[call("get_weather", ARGUMENTS)]), result('{"°C": 7}')]
TWICE = answer("", tool_calls=[call("get_weather", {"place": "Bern"}), call("get_time", {}, 2)])
THOUGHT = [user("2+2?"), answer("4", reasoning_content="\nTwo and two.\n"), user("And 3+3?")]

CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [user("  What is a monad?\n")],
    "system": [system("Be <brief> & kind."), user("Hi")],
    "turns": [system("S"), user("One"), answer(" Two\n"), user("Three"), answer("Four"), user("Five")],
    "answered": [user("One"), answer("Two")],
    "unicode": [system("Grüße, 你好 🙂"), user("\u200bнаïve \u202e\t\"quoted\" 'too' </s> {{ x }}")],
    "parts": [system([{"type": "text", "text": "S"}]), user([{"type": "image"}, {"type": "text", "text": " Look "}])],
    "called": CALLED,
    "called_twice": [system("S"), user("Both?"), TWICE, result("rain"), result("noon", 2), answer("Rain."), user("Oh")],
    "called_in_text": [
        user("W?"),
        answer("I look.", tool_calls=[call("get_weather", '{"place": "x"}')]),
        result("sun"),
    ],
    "thoughtful_call": [
        user("W?"),
        answer("", reasoning_content="Hm", thinking="Hm", tool_calls=CALLED[1]["tool_calls"]),
        CALLED[2],
    ],
    "no_content": [user("W?"), {"role": "assistant", "tool_calls": CALLED[1]["tool_calls"]}, CALLED[2]],
    "bad_id": [user("W?"), answer("", tool_calls=[{**call("get_time", {}), "id": "1"}]), result("noon")],
    "reasoning": THOUGHT,
    "thinking": [user("2+2?"), answer("4", thinking="Two and two."), user("And 3+3?"), answer("6", thinking="Three")],
    "inline": [user("2+2?"), answer("<think>\nTwo\n</think>\n\n4"), user("/no_think And 3+3?")],
    "two_users": [user("One"), user("Two")],
    "developer": [{"role": "developer", "content": "Be brief."}, user("Hi")],
    "tool_first": [result("lost")],
    "unknown_role": [user("Hi"), {"role": "critic", "content": "No."}],
    "late_system": [user("Hi"), system("Late")],
    "prefix": [user("Hi"), answer("Well", prefix=True)],
}

# What is passed beside the messages; ``open`` is whether an answer follows.
WAYS: dict[str, dict[str, Any]] = {
    "open": {},
    "closed": {"open": False},
    "tools": {"tools": TOOLS},
    "no_tools": {"tools": []},
    "documents": {"documents": DOCUMENTS},
    "documents_and_tools": {"documents": DOCUMENTS, "tools": [TIME]},
    "think": {
        "variables": {"enable_thinking": True, "thinking": True, "reasoning_effort": "high", "thinking_budget": 900}
    },
    "no_think": {"tools": TOOLS, "variables": {"enable_thinking": False, "thinking": False, "thinking_budget": 0}},
    "llama": {
        "tools": TOOLS,
        "variables": {"tools_in_user_message": False, "date_string": "1 May", "builtin_tools": ["get_weather"]},
    },
    "others": {
        "variables": {
            "keep_past_thinking": True,
            "skip_think": False,
            "add_vision_id": True,
            "model_identity": "Me.",
            "python_tools": ["f"],
        }
    },
}
