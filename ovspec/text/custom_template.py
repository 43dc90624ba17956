"""Chat templates from the user in place of the model's: a file, a text, or a name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_text
from ovspec.text.chat_template import ADDED_BOS, ChatTemplate, TemplateError

PROBE_TEXT = "Xq7zv"  # placeholder for the content
TURN_ROLES = ("user", "assistant", "system")
# The format of each role's turn, by llama.cpp's names; {} is the content. Without a turn for the system, its content
# goes into the user's turn (see ``ChatFormat``).
KNOWN_TURNS: dict[str, str | tuple[str, ...]] = {
    "chatml": "<|im_start|>{role}\n{}<|im_end|>\n",
    "deepseek": ("### Instruction:\n{}\n", "### Response:\n{}\n<|EOT|>\n", "{}"),
    "deepseek2": ("User: {}\n\n", "Assistant: {}<｜end▁of▁sentence｜>", "{}\n\n"),
    "deepseek3": ("<｜User｜>{}", "<｜Assistant｜>{}<｜end▁of▁sentence｜>", "{}\n\n"),
    "exaone3": ("[|user|]{}\n", "[|assistant|]{}[|endofturn|]\n", "[|system|]{}[|endofturn|]\n"),
    "falcon3": "<|{role}|>\n{}\n",
    "gemma": ("<start_of_turn>user\n{}<end_of_turn>\n", "<start_of_turn>model\n{}<end_of_turn>\n"),
    "granite": "<|start_of_role|>{role}<|end_of_role|>{}<|end_of_text|>\n",
    "llama2": ("[INST] {} [/INST]", "{}</s>"),
    "llama3": "<|start_header_id|>{role}<|end_header_id|>\n\n{}<|eot_id|>",
    "llama4": "<|header_start|>{role}<|header_end|>\n\n{}<|eot|>",
    "mistral-v1": (" [INST] {} [/INST]", " {}</s>"),
    "mistral-v3": ("[INST] {}[/INST]", " {}</s>"),
    "mistral-v3-tekken": ("[INST]{}[/INST]", "{}</s>"),
    "mistral-v7": ("[INST] {}[/INST]", " {}</s>", "[SYSTEM_PROMPT] {}[/SYSTEM_PROMPT]"),
    "mistral-v7-tekken": ("[INST]{}[/INST]", "{}</s>", "[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]"),
    "phi3": "<|{role}|>\n{}<|end|>\n",
    "phi4": "<|im_start|>{role}<|im_sep|>{}<|im_end|>",
    "vicuna": ("USER: {}\n", "ASSISTANT: {}</s>\n", "{}\n\n"),
    "vicuna-orca": ("USER: {}\n", "ASSISTANT: {}</s>\n", "SYSTEM: {}\n"),
    "zephyr": "<|{role}|>\n{}<|endoftext|>\n",
}
TRIMMED_TEMPLATES = ("exaone3", "gemma", "llama3", "llama4")  # strip the white space around the content


def make_well_known_template(name: str) -> str:
    """Return the Jinja source of a well-known template; it begins with the tokenizer's BOS."""
    turns = KNOWN_TURNS[name]
    if isinstance(turns, str):
        turns = tuple(turns.replace("{role}", role) for role in TURN_ROLES)
    content_expression = (
        " ~ (message['content'] | trim) ~ " if name in TRIMMED_TEMPLATES else " ~ message['content'] ~ "
    )
    expressions = [
        content_expression.join(json.dumps(turn_part, ensure_ascii=False) for turn_part in turn.split("{}"))
        for turn in turns
    ]
    branches = "".join(
        f"{{% elif message['role'] == '{role}' %}}{{{{ {expression} }}}}"
        for role, expression in zip(TURN_ROLES, expressions, strict=False)
    )
    answer_opening = json.dumps(turns[1].partition("{}")[0].rstrip(" "), ensure_ascii=False)
    return (
        f"{{{{ {ADDED_BOS} }}}}{{% for message in messages %}}{{% if false %}}{branches}"
        "{% else %}{{ raise_exception('it has no role ' ~ message['role']) }}{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ {answer_opening} }}}}{{% endif %}}"
    )


def resolve_custom_template(template: str | Path, model_templates: Mapping[str, str]) -> str:
    """Return the Jinja source of the user's chat template, checked to render a chat.

    Args:
        template: a file, a source, or a name: of one of the model's own templates, or a well-known template.
        model_templates: the sources of the model's own templates, by name.

    Raises:
        OvspecError: there is no such file or name, or the template can't render a chat.
    """
    shown_name = str(template)
    source = ""
    if isinstance(template, str):
        if template in KNOWN_TURNS:
            source = make_well_known_template(template)
        source = model_templates.get(template) or source
        if "{{" in template or "{%" in template:
            source = source or template
            shown_name = "the given text"
    with contextlib.suppress(OSError, ValueError):  # the text may not be a valid path
        if not source and Path(template).is_file():
            source = read_text(Path(template))
    if not source:
        known_names = ", ".join(dict.fromkeys((*model_templates, *KNOWN_TURNS)))
        quoted_name = (
            f"'{shown_name}'" if isinstance(template, Path) else repr(shown_name)
        )  # Path's repr would double Windows' backslashes
        raise OvspecError(
            f"`chat_template` is {quoted_name:.80}; it must be a template's file or text, or one of {known_names}."
        )
    try:
        prompt = ChatTemplate(source, {}).render([{"role": "user", "content": PROBE_TEXT}])
    except TemplateError as error:
        problem = str(error).removeprefix("The model's chat template ")
        raise OvspecError(f"`chat_template`: {shown_name:.80} {problem}") from None
    if PROBE_TEXT not in prompt:
        raise OvspecError(
            f"`chat_template`: {shown_name:.80} doesn't render the user's message; is it a chat template?"
        )
    return source


def find_answer_end(template: ChatTemplate) -> str:
    """Return a template's text after an answer, without the white space around it."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE_TEXT}]
    try:
        return template.render(chat, opens_answer=False).partition(PROBE_TEXT)[2].strip()
    except TemplateError:
        return ""
