"""Chat templates that the user gives in place of the model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_templates import TEMPLATES

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.batch.resumable_run import make_run_identity
from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import ADDED_BOS, ChatTemplate, load_chat_template, read_chat_templates
from ovspec.text.custom_template import KNOWN_TURNS, find_answer_end, make_well_known_template, resolve_custom_template

CHAT = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "Who are you"},
    {"role": "assistant", "content": "   I am an assistant   "},
    {"role": "user", "content": "Another question"},
]
# What llama.cpp's own test (tests/test-chat-template.cpp) expects of each for this chat. Of llama2, we put an
# empty line behind what the system says.
EXPECTED = {
    "chatml": "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    "<|im_start|>assistant\nHi there<|im_end|>\n<|im_start|>user\nWho are you<|im_end|>\n<|im_start|>assistant\n"
    "   I am an assistant   <|im_end|>\n<|im_start|>user\nAnother question<|im_end|>\n<|im_start|>assistant\n",
    "llama2": "[INST] You are a helpful assistant\n\nHello [/INST]Hi there</s>[INST] Who are you [/INST]"
    "   I am an assistant   </s>[INST] Another question [/INST]",
    "gemma": "<start_of_turn>user\nYou are a helpful assistant\n\nHello<end_of_turn>\n<start_of_turn>model\n"
    "Hi there<end_of_turn>\n<start_of_turn>user\nWho are you<end_of_turn>\n<start_of_turn>model\n"
    "I am an assistant<end_of_turn>\n<start_of_turn>user\nAnother question<end_of_turn>\n<start_of_turn>model\n",
    "deepseek": "You are a helpful assistant### Instruction:\nHello\n### Response:\nHi there\n<|EOT|>\n"
    "### Instruction:\nWho are you\n### Response:\n   I am an assistant   \n<|EOT|>\n### Instruction:\n"
    "Another question\n### Response:\n",
    "vicuna": "You are a helpful assistant\n\nUSER: Hello\nASSISTANT: Hi there</s>\nUSER: Who are you\n"
    "ASSISTANT:    I am an assistant   </s>\nUSER: Another question\nASSISTANT:",
    "vicuna-orca": "SYSTEM: You are a helpful assistant\nUSER: Hello\nASSISTANT: Hi there</s>\nUSER: Who are you\n"
    "ASSISTANT:    I am an assistant   </s>\nUSER: Another question\nASSISTANT:",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\nYou are a helpful assistant<|eot_id|><|start_header_id|>"
    "user<|end_header_id|>\n\nHello<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHi there<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWho are you<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "I am an assistant<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nAnother question<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "phi3": "<|system|>\nYou are a helpful assistant<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\nHi there<|end|>\n"
    "<|user|>\nWho are you<|end|>\n<|assistant|>\n   I am an assistant   <|end|>\n<|user|>\nAnother question<|end|>\n"
    "<|assistant|>\n",
    "deepseek2": "You are a helpful assistant\n\nUser: Hello\n\nAssistant: Hi there<｜end▁of▁sentence｜>User: Who are "
    "you\n\nAssistant:    I am an assistant   <｜end▁of▁sentence｜>User: Another question\n\nAssistant:",
    "granite": "<|start_of_role|>system<|end_of_role|>You are a helpful assistant<|end_of_text|>\n<|start_of_role|>user"
    "<|end_of_role|>Hello<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>Hi there<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>Who are you<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>   I am "
    "an assistant   <|end_of_text|>\n<|start_of_role|>user<|end_of_role|>Another question<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>",
    "mistral-v1": " [INST] You are a helpful assistant\n\nHello [/INST] Hi there</s> [INST] Who are you [/INST]    I "
    "am an assistant   </s> [INST] Another question [/INST]",
}
ASK = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("name", EXPECTED)
def test_names_give_what_llama_cpp_gives(name: str) -> None:
    format = ChatFormat(ChatTemplate(make_well_known_template(name), {ADDED_BOS: ""}))
    assert format.render_prompt(CHAT) == EXPECTED[name]


@pytest.mark.parametrize("name", KNOWN_TURNS)
def test_every_well_known_template_says_everything_and_ends_its_turns(name: str) -> None:
    template = ChatTemplate(make_well_known_template(name), {ADDED_BOS: "<s>"})
    said = ChatFormat(template).render_prompt(CHAT)
    assert said.startswith("<s>") and all(message["content"].strip() in said for message in CHAT)
    end = find_answer_end(template)
    assert (end and said.count(end) >= 2) or name == "falcon3", "whose turns end with a line break"
    with pytest.raises(OvspecError, match="it has no role robot"):
        template.render([{"role": "robot", "content": "?"}])
    late = [*CHAT[1:3], CHAT[0], CHAT[5]]
    assert CHAT[0]["content"] in ChatFormat(template).render_prompt(late), "said late, it is said at the beginning"


def test_what_can_be_given(tmp_path: Path) -> None:
    file, source = tmp_path / "mine.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}"
    file.write_text(source, "utf-8")
    named = {"tool_use": source + "!", "chatml": source + "?"}
    for given, expected in (
        (source, source),
        (file, source),
        (str(file), source),
        ("tool_use", named["tool_use"]),
        ("chatml", named["chatml"]),  # the model's own goes first
        ("gemma", make_well_known_template("gemma")),
    ):
        assert resolve_custom_template(given, named) == expected


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            "chatlm",
            r"`chat_template` is 'chatlm'; it must be a template's file or text, or one of tool_use, chatml, deep",
        ),
        ("a\0b", "it must be a template's file or text, or one of"),
        ("a" * 5000, "it must be a template's file or text, or one of"),
        (Path("no/where.jinja"), r"'no[/\\]where.jinja'; it must be a template's file or text, or one of"),
        ("{% for", "`chat_template`: the given text cannot render these messages: "),
        ("{{ raise_exception('only tools') }}", "the given text cannot render these messages: only tools."),
        ("{{ bos_token }}", "the given text doesn't render the user's message; is it a chat template"),
        (Path(__file__), "test_custom_template.py (doesn't render the user's message|cannot render)"),
    ],
)
def test_what_cannot_be_rendered_is_refused(given: str | Path, told: str) -> None:
    with pytest.raises(OvspecError, match=told):
        resolve_custom_template(given, {"tool_use": "x"})


def test_a_template_has_its_own_tool_format(pair: Path) -> None:
    for name in ("qwen3", "llama31"):
        own = ChatFormat(ChatTemplate(TEMPLATES[name], {}))
        given = ChatFormat(
            load_chat_template(pair, resolve_custom_template(TEMPLATES[name], read_chat_templates(pair)))
        )
        assert given.tool_format is own.tool_format and given.thinking_format == own.thinking_format
    assert ChatFormat(load_chat_template(pair, make_well_known_template("chatml"))).tool_format.name == "generic"


def test_a_model_speaks_in_a_custom_template(load: Callable[..., ovspec.LanguageModel]) -> None:
    """What it writes after an answer ends the answers of the model, too, which has another EOS."""
    source = "{% for m in messages %}{{ m.role ~ ':' ~ m.content }} <|im_start|>{% endfor %}"
    options: Any = {"engine": "stateful", "arithmetic": "fast"}
    lm, own = load(chat_template=source, **options), load(**options)
    assert lm.tokenizer.decode_with_special(lm.encode(ASK)) == "user:hi <|im_start|>"
    end = lm.tokenizer.added_tokens["<|im_start|>"]
    assert end not in lm.generation_config.eos_ids
    forced: Any = {"logit_bias": {end: 100.0}, "max_tokens": 4}
    result = lm.generate(ASK, **forced)
    assert (result.token_ids, result.text, result.finish_reason) == ([end], "", "stop")
    assert own.verify(result).ok, "which needs no template"
    params = lm.runtime.row_maker.make_complete_params({})
    assert make_run_identity(lm, params) != make_run_identity(own, params), (
        "a batch doesn't go on with the other's answers"
    )
    assert len(own.generate(ASK, **forced).token_ids) == len(lm.generate(ASK, **forced, ignore_eos=True).token_ids) == 4
    with lm.session() as session:
        session.append(ASK)
        assert session.generate(**forced).finish_reason == "stop"
        assert [message["content"] for message in session.messages] == ["hi", ""]


def test_a_well_known_template_begins_with_the_bos_of_the_tokenizer(
    load: Callable[..., ovspec.LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = copy.copy(load(chat_template="phi3", engine="stateful", arithmetic="fast").runtime.prompt_encoder)
    without, bos = prompts.encode(ASK), prompts.tokenizer.added_tokens["<|endoftext|>"]
    monkeypatch.setitem(vars(prompts.tokenizer), "prefix_ids", [bos])  # as if encoding put it there, as Llama's does
    monkeypatch.delitem(vars(prompts), "chat_format")
    assert prompts.encode(ASK).tolist() == [bos, *without]
