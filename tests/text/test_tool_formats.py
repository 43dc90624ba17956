"""Tool formats are found in real chat templates, whose prompts with calls are those of Hugging Face."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_templates import SPECIAL, TEMPLATES, answer, result, system, template_tokenizer, user
from conftest import ROOT, USERS_CACHE
from jinja2.exceptions import SecurityError

from ovspec.base.errors import OvspecError
from ovspec.params.tool_formats import TOOL_FORMATS_BY_NAME
from ovspec.params.tool_formats.layout import describe_tools, shorten_call_id
from ovspec.params.tools import parse_tools
from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import ChatTemplate

FOLDER = USERS_CACHE / "downloads" / "llama.cpp" / "models" / "templates"
needs_templates = pytest.mark.skipif(not FOLDER.is_dir(), reason="llama.cpp's templates could not be fetched")
UNKNOWN = "generic: its own format isn't known"
UNUSABLE = "generic: its own calls can't be rendered"  # in Jinja's sandbox, in which Hugging Face renders, too
NO_TOOLS = "generic: it has no tools"

# Of each template of llama.cpp.
FOUND = {
    "Apertus-8B-Instruct": UNKNOWN,
    "Apriel-1.6-15b-Thinker-fixed": "apriel",
    "Bielik-11B-v3.0-Instruct": "hermes",
    "ByteDance-Seed-OSS": "seed-oss",
    "Cohere2MoE": "command-r7b",
    "CohereForAI-c4ai-command-r-plus-tool_use": UNKNOWN,
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "command-r7b",
    "GLM-4.6": "glm",
    "GLM-4.7-Flash": "glm-dense",
    "GigaChat3-10B-A1.8B": UNKNOWN,
    "GigaChat3.1-10B-A1.8B": "gigachat",
    "HuggingFaceTB-SmolLM3-3B": NO_TOOLS,  # cut down; the published one has them
    "Kimi-K2-Instruct": UNUSABLE,
    "Kimi-K2-Thinking": UNUSABLE,
    "Kimi-K3": UNKNOWN,
    "LFM2-8B-A1B": UNKNOWN,
    "LFM2.5-8B-A1B": UNKNOWN,
    "LFM2.5-Instruct": UNKNOWN,
    "MiMo-VL": "hermes",
    "MiniMax-M1": UNKNOWN,
    "MiniMax-M2": "minimax",
    "MiniMax-M3": UNKNOWN,
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen-xml",
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen-xml",
    "Qwen3.5-4B": "qwen-xml",
    "Reka-Edge": "hermes-dense",
    "Spark2.5": "glm-dense",
    "StepFun3.5-Flash": "qwen-xml-dense",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek-r1",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek-r1",
    "deepseek-ai-DeepSeek-V3.1": "deepseek",
    "deepseek-ai-DeepSeek-V3.2": UNKNOWN,
    "deepseek-ai-DeepSeek-V4": UNKNOWN,
    "deepseek-ai-DeepSeek-V4-Flash-0731": UNKNOWN,
    "fireworks-ai-llama-3-firefunction-v2": UNKNOWN,
    "google-gemma-2-2b-it": NO_TOOLS,
    "google-gemma-4-31B-it": UNKNOWN,
    "google-gemma-4-31B-it-interleaved": UNKNOWN,
    "ibm-granite-granite-3.3-2B-Instruct": "granite3",
    "ibm-granite-granite-4.0": "hermes",
    "ibm-granite-granite-4.1": "hermes",
    "inclusionai-ling-3.0-flash": "ling",
    "llama-cpp-deepseek-r1": UNUSABLE,
    "llama-cpp-rwkv-world": NO_TOOLS,
    "meetkai-functionary-medium-v3.1": "functionary",
    "meetkai-functionary-medium-v3.2": UNKNOWN,
    "meta-llama-Llama-3.1-8B-Instruct": "llama3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3",
    "microsoft-Phi-3.5-mini-instruct": NO_TOOLS,
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral-list",
    "moonshotai-Kimi-K2": "kimi",
    "muse-glimmer": UNKNOWN,
    "openai-gpt-oss-120b": "harmony",
    "openbmb-MiniCPM5-1B": UNKNOWN,
    "poolside-Laguna-S-2.1": "glm-dense",
    "poolside-Laguna-XS-2.1": "glm",
    "poolside-Laguna-XS.2": "glm",
    "tencent-Hy3": UNKNOWN,
    "unsloth-Apriel-1.5": "apriel",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
    "upstage-Solar-Open-100B": UNKNOWN,
}
# Of those in tests/support that have what the others lack.
OWN = {"smollm3": "smollm3", "mistral_v3": "mistral-v3"}
KNOWN = {name: format for name, format in (FOUND | OWN).items() if not format.startswith("generic")}

TOOLS = parse_tools(
    [
        {
            "name": "get_weather",
            "description": 'The weather at a "place" – for any on earth & beyond.',
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "A city's name"},
                    "unit": {"type": "string", "description": "Of the degrees", "enum": ["°C", "°F"]},
                    "days": {"type": "integer", "description": "How many"},
                },
                "required": ["place"],
            },
        },
        {
            "name": "get_time",
            "description": "The time.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    ]
)
CALLS: list[tuple[str, Any]] = [
    ("get_weather", {"place": "Zürich\n\"Höngg\" <am 'Berg'>", "at": [1, {"x": None, "y": False}], "days": 2}),
    ("get_time", {}),
]
# These templates write lists as Python does, or escape letters: not what is asked of their models.
PLAIN_CALLS: list[tuple[str, Any]] = [("get_weather", {"place": "Bern", "days": 2}), ("get_time", {})]
PLAIN = ("ByteDance-Seed-OSS", "Reka-Edge")


def template_of(name: str) -> ChatTemplate:
    source = TEMPLATES[name] if name in OWN else (FOLDER / f"{name}.jinja").read_text("utf-8")
    return ChatTemplate(source, SPECIAL)


def called(calls: list[tuple[str, Any]], as_text: bool, begin: int = 1) -> list[dict[str, Any]]:
    """Return calls as a message has them, their ids numbered from ``begin``."""
    texts = [json.dumps(arguments, ensure_ascii=False) if as_text else arguments for _, arguments in calls]
    return [
        {"id": f"call0000{index}", "type": "function", "function": {"name": name, "arguments": text}}
        for index, ((name, _), text) in enumerate(zip(calls, texts, strict=True), begin)
    ]


def chat_of(calls: list[tuple[str, Any]], text: str, thought: str) -> list[dict[str, Any]]:
    """Return a chat with two calls as OpenAI's clients send it."""
    said = {"content": text or None, **({"reasoning_content": thought} if thought else {})}
    results = [{"role": "tool", "tool_call_id": f"call0000{index}", "content": f"{index}0"} for index in (1, 2)]
    message = {"role": "assistant", **said, "tool_calls": called(calls, True)}
    return [system("Be brief."), user("Both?"), message, *results]


def chat_for_template(
    format: str, arguments: str, calls: list[tuple[str, Any]], text: str, thought: str
) -> list[dict[str, Any]]:
    """Return the same chat as this format's templates take it; ``arguments``: how those of DeepSeek R1 want them."""
    more: dict[str, Any] = {"reasoning_content": thought} if thought else {}
    one_each = [called(calls[:1], False), called(calls[1:], False, 2)]
    results = [result("10") | {"name": calls[0][0]}, result("20", 2) | {"name": calls[1][0]}]
    begin = [system("Be brief."), user("Both?")]
    if format == "harmony":
        first = answer(text, tool_calls=one_each[0])
        if thought:
            first = answer("", thinking="\n\n".join(filter(None, (thought, text))), tool_calls=one_each[0])
        return [*begin, first | more, results[0], answer("", tool_calls=one_each[1]), results[1]]
    if format in ("llama3", "gigachat"):
        first = answer(text, tool_calls=one_each[0], **more)
        return [*begin, first, results[0], answer("", tool_calls=one_each[1]), results[1]]
    if format in ("granite3", "smollm3"):
        written = "\n".join(filter(None, (text, TOOL_FORMATS_BY_NAME[format].write_calls(calls))))
        return [*begin, answer(written, **more), *results]
    if format == "deepseek-r1":  # text before calls would be lost
        apart = [answer(text)] if text else []
        return [*begin, *apart, answer(None, tool_calls=called(calls, arguments == "text"), **more), *results]
    return [*begin, answer(text, tool_calls=called(calls, False), **more), *results]


@needs_templates
def test_every_template_is_listed() -> None:
    assert {file.stem for file in FOLDER.glob("*.jinja")} == FOUND.keys()


@needs_templates
@pytest.mark.parametrize("name", FOUND | OWN)
def test_the_format_is_found(name: str) -> None:
    template, expected = template_of(name), (FOUND | OWN)[name]
    assert ChatFormat(template).tool_format.name == expected.partition(":")[0]
    if expected == NO_TOOLS:
        assert not {"tools", "functions"} & template.variables


@needs_templates
@pytest.mark.parametrize(  # quick runs have a template of each format
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (KNOWN[name] in [*KNOWN.values()][:at]))
        for at, name in enumerate(KNOWN)
    ],
)
def test_prompts_with_calls_are_those_of_hugging_face(name: str) -> None:
    template, calls = template_of(name), PLAIN_CALLS if name in PLAIN else CALLS
    format = ChatFormat(template)
    arguments = "text" if name.endswith("R1-Distill-Llama-8B") else "object"
    for text, thought in itertools.product(("", "I look."), ("", "Hm.")):
        chat = chat_of(calls, text, thought)
        theirs = chat_for_template(format.tool_format.name, arguments, calls, text, thought)
        given: dict[str, Any] = {"xml_tools" if name == "smollm3" else "tools": TOOLS}
        if "tools" not in template.variables:
            theirs[0] = system(f"{theirs[0]['content']}\n\n{describe_tools(format.tool_format, TOOLS)}")
            given = {}
        for more in ([], [answer("Rain."), user("Oh")]):
            prompt = format.render_prompt([*chat, *more], TOOLS)
            expected = template_tokenizer().apply_chat_template(
                [*theirs, *more], chat_template=template.source, add_generation_prompt=True, tokenize=False, **given
            )
            assert prompt == expected
            assert_calls_are_in(prompt, format, calls)


def assert_calls_are_in(prompt: str, format: ChatFormat, calls: list[tuple[str, Any]]) -> None:
    """Check that a prompt has the calls as the format writes them."""
    prompt = prompt.replace("call00001", "0" * 9).replace("call00002", "0" * 9)
    together = [calls] if format.tool_format.between_calls is not None else [[call] for call in calls]
    for group in together:
        assert any(format.tool_format.write_calls(group, way) in prompt for way in range(len(format.tool_format.calls)))


@needs_templates
@pytest.mark.parametrize("name", [name for name in FOUND if name not in KNOWN])
def test_other_templates_are_told_of_tools_and_calls(name: str) -> None:
    format, chat = ChatFormat(template_of(name)), [*chat_of(CALLS, "I look.", ""), answer("Rain."), user("Oh")]
    if name in ("CohereForAI-c4ai-command-r-plus-tool_use", "fireworks-ai-llama-3-firefunction-v2"):
        with pytest.raises(OvspecError, match=r"cannot render these messages: 'NoneType'|'functions' is undefined"):
            format.render_prompt(chat, TOOLS)  # they have no chats without tools of their own kind
        return
    prompt = format.render_prompt(chat, TOOLS)
    assert describe_tools(format.tool_format, TOOLS) in prompt
    assert format.tool_format.write_calls(CALLS) in prompt
    assert "I look." in prompt
    assert "<tool_response>\n10\n</tool_response>\n<tool_response>\n20\n</tool_response>" in prompt


AGENTS = [
    system("One."), system("Two."), user("Three?"), user("Four?"), answer("Five."), system("Six."), user("Seven?"),
]  # fmt: skip


@needs_templates
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (at % 2)) for at, name in enumerate(FOUND)]
)
def test_system_messages_may_be_anywhere(name: str) -> None:
    template = template_of(name)
    try:
        template.render(AGENTS[2:3])
    except OvspecError:
        pytest.skip("the template renders no chats without tools of its own kind")
    format = ChatFormat(template)
    theirs: Any = {"chat_template": template.source, "add_generation_prompt": True, "tokenize": False}
    for chat in (AGENTS, [AGENTS[0], AGENTS[2]], AGENTS[2:3]):
        prompt = format.render_prompt(chat)
        try:
            expected = template_tokenizer().apply_chat_template(chat, **theirs)
        except Exception:
            expected = ""
        if all(message["content"] in expected for message in chat):
            assert prompt == expected
        else:  # the template can't render them so, or loses some
            assert all(message["content"] in prompt for message in chat)
            said = [prompt.index(message["content"]) for message in chat if message["role"] != "system"]
            assert sorted(said) == said


@needs_templates
def test_ids_have_the_length_that_templates_demand() -> None:
    chat = chat_of(CALLS, "", "")
    for call, message, id in zip(chat[2]["tool_calls"], chat[3:], ("call_a", "call_b"), strict=True):
        call["id"] = message["tool_call_id"] = id
    for name in ("mistralai-Mistral-Nemo-Instruct-2407", "Mistral-Small-3.2-24B-Instruct-2506"):
        prompt = ChatFormat(template_of(name)).render_prompt(chat, TOOLS)
        assert [prompt.count(shorten_call_id(id, 9)) for id in ("call_a", "call_b")] == [2, 2]


@needs_templates
@pytest.mark.parametrize("name", [name for name, format in FOUND.items() if format == UNUSABLE])
def test_hugging_face_refuses_those_too(name: str) -> None:
    chat = chat_for_template("hermes", "object", CALLS, "", "")
    with pytest.raises((SecurityError, TypeError), match=r"unsafe|not JSON serializable"):
        template_tokenizer().apply_chat_template(chat, tools=TOOLS, chat_template=template_of(name).source)


@pytest.mark.parametrize("name", ["qwen3", "llama31", "gpt_oss"])
def test_results_follow_the_order_of_their_calls(name: str) -> None:
    format, chat = ChatFormat(ChatTemplate(TEMPLATES[name], SPECIAL)), chat_of(CALLS, "", "")
    in_order, turned = format.render_prompt(chat, TOOLS), format.render_prompt([*chat[:3], chat[4], chat[3]], TOOLS)
    assert turned == in_order
    assert in_order.rindex("10") < in_order.rindex("20")


@pytest.mark.parametrize("name", ["qwen3", "llama31", "gpt_oss"])
@pytest.mark.parametrize("none", [None, []])
def test_an_answer_may_have_no_calls_in_its_list_of_calls(name: str, none: list[Any] | None) -> None:
    format = ChatFormat(ChatTemplate(TEMPLATES[name], SPECIAL))
    chat = [{"role": role, "content": text} for role, text in (("user", "?"), ("assistant", "!"), ("user", "??"))]
    assert format.render_prompt([chat[0], {**chat[1], "tool_calls": none}, chat[2]], TOOLS) == format.render_prompt(
        chat, TOOLS
    )


QUOTING = ("gpt_oss", "llama31", "llama4", "mistral_v3")  # templates that write JSON of arguments, whatever they are


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "command_r_tools"])
def test_arguments_that_are_no_object_are_rendered_all_the_same(name: str) -> None:
    """As they are where the template takes a text, otherwise within an object; the other call is as before."""
    format = ChatFormat(ChatTemplate(TEMPLATES[name], SPECIAL))
    usual = format.render_prompt(chat_of(CALLS, "", ""), TOOLS)
    for wrong in ('{"place": "Zür', "nowhere", [1, 2]):
        chat = chat_of(CALLS, "", "")
        chat[2]["tool_calls"][0]["function"]["arguments"] = wrong
        text = wrong if isinstance(wrong, str) else json.dumps(wrong)
        prompt = format.render_prompt(chat, TOOLS)
        assert (json.dumps({"arguments": text}, ensure_ascii=False) if name in QUOTING else text) in prompt, prompt
        assert prompt.count("get_time") == usual.count("get_time")
    for nothing in (None, " ", '"{}"'):
        chat = chat_of([("get_weather", nothing), CALLS[1]], "", "")
        chat[2]["tool_calls"][0]["function"]["arguments"] = nothing
        assert format.render_prompt(chat, TOOLS) == format.render_prompt(
            chat_of([("get_weather", {}), CALLS[1]], "", ""), TOOLS
        )
    chat[2]["tool_calls"][0]["function"]["arguments"] = "[" * 100_000
    assert "[" * 1000 in format.render_prompt(chat, TOOLS)


@pytest.mark.parametrize("name", ["llama31", "gpt_oss"])
def test_a_result_follows_its_own_call_where_another_has_none(name: str) -> None:
    """These templates take one call at a time, and don't render to which one a result belongs."""
    format, chat = ChatFormat(ChatTemplate(TEMPLATES[name], SPECIAL)), chat_of(CALLS, "", "")
    said = format.render_prompt([*chat[:3], chat[4]], TOOLS).partition("Both?")[2]
    assert 0 < said.index("get_weather") < said.index("get_time") < said.index("20")


CHECKS = """
import ovspec
from click.testing import CliRunner
from ovspec.cli import cli
from ovspec.params.loading import make_load_params
from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import ChatTemplate

assert "TMP" in ovspec.__file__
assert make_load_params({"tool_format": "example"}).tool_format == "example"
assert "|example|" in CliRunner().invoke(cli, ["serve", "--help"]).output.replace("\\n", "").replace(" ", "")
source = '''{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or () %}<call>{{ c.function.name }}|{{
c.function.arguments | tojson }}</call>{{ "" if loop.last else "\\n" }}{% endfor %}{% endfor %}'''
assert ChatFormat(ChatTemplate(source, {})).tool_format.name == "example"
"""


def test_a_new_format_is_one_file(tmp_path: Path) -> None:
    """Add the file in docs/how-to/add-a-tool-format.md to a copy of the package, and change nothing else."""
    pytest.importorskip("click")
    shutil.copytree(ROOT / "ovspec", tmp_path / "ovspec", ignore=shutil.ignore_patterns("__pycache__"))
    page = (ROOT / "docs" / "how-to" / "add-a-tool-format.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"(?ms)^```python\n(.*?)^```", page)
    file = tmp_path / "ovspec" / "params" / "tool_formats" / "example.py"
    file.write_text(block, encoding="utf-8")
    checks = CHECKS.replace("TMP", tmp_path.as_posix())
    done = subprocess.run([sys.executable, "-c", checks], cwd=tmp_path, env=own_environment(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def own_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
