"""Text parts of messages reach the model, whatever its chat template thinks of them."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import SPECIAL, TEMPLATES, TIME
from test_tool_formats import FOLDER

from ovspec.base.errors import PromptError
from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import ChatTemplate

PUBLISHED = {file.stem: file.read_text("utf-8") for file in sorted(FOLDER.glob("*.jinja"))}
# Published templates that lose what the user says in parts, write parts as Python does, lose all but the first, or take
# them. The others are for slow runs.
QUICK = ("HuggingFaceTB-SmolLM3-3B", "openai-gpt-oss-120b", "Mistral-Small-3.2-24B-Instruct-2506", "Qwen3.5-4B")
WITH_TOOLS: dict[str, Any] = {"tools": [TIME]}
# Of templates that render nothing without them.
VARIABLES: dict[str, dict[str, Any]] = {
    "command_r_tools": WITH_TOOLS,
    "CohereForAI-c4ai-command-r-plus-tool_use": WITH_TOOLS,
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": WITH_TOOLS,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": WITH_TOOLS,
    "fireworks-ai-llama-3-firefunction-v2": {"functions": "[]", "datetime": "now"},
}
CASES = TEMPLATES | PUBLISHED
ROLES = ("system", "user", "assistant", "user")


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def chat_of(contents: list[Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in zip(ROLES, contents, strict=True)]


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK or name in TEMPLATES else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_text_parts_are_rendered(name: str) -> None:
    format = ChatFormat(ChatTemplate(CASES[name], SPECIAL))
    texts, variables = [f"It is {hour} o'clock." for hour in range(8)], VARIABLES.get(name)
    plain = format.render_prompt(chat_of(texts[:4]), variables=variables)
    assert format.render_prompt(chat_of([parts(text) for text in texts[:4]]), variables=variables) == plain
    prompt = format.render_prompt(chat_of([parts(*texts[i : i + 2]) for i in range(0, 8, 2)]), variables=variables)
    places = [prompt.find(text) for text in texts]
    assert min(places) >= 0 and all(places[i] < places[i + 1] for i in range(0, 8, 2)), prompt
    assert "'text'" not in prompt and '"text"' not in prompt


def test_templates_that_take_parts_get_them() -> None:
    """As Hugging Face gives them, other parts, too; other templates would lose those."""
    chat = [{"role": "user", "content": [{"type": "image"}, *parts("One.", "Two.")]}]
    gemma, qwen = (ChatFormat(ChatTemplate(TEMPLATES[name], SPECIAL)) for name in ("gemma3", "qwen3"))
    assert gemma.render_prompt(chat) == gemma.template.render(chat)
    assert "One.Two." in gemma.render_prompt(chat)
    assert "One.\nTwo." in qwen.render_prompt([{"role": "user", "content": parts("One.", "Two.")}])
    for wrong in ([{"type": "image"}], ["text"], [{"type": "text", "text": 1}]):
        with pytest.raises(PromptError, match="is not supported; send text"):
            qwen.render_prompt([{"role": "user", "content": wrong}])
    untyped = [{"role": "user", "content": [{"text": "One."}]}]
    assert "One." in gemma.render_prompt(untyped) and "One." in qwen.render_prompt(untyped)
