"""A model's chat template, rendered in a sandboxed process with limits on time, memory and output.

Nothing else in ovspec renders templates.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_dataclass, read_text
from ovspec.base.sandbox import SandboxLimitExceeded, SandboxPool
from ovspec.text.tokenizer_files import TOKENIZER_CONFIG_FILE, TokenizerConfig, read_special_tokens

Message = dict[str, Any]  # {"role": ..., "content": ...}

MAX_RENDER_SECONDS = 2.0
MAX_RENDERER_BYTES = 1_000_000_000  # memory limit of the rendering process
CHAT_TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES_FOLDER = "additional_chat_templates"  # the folder of further templates
ADDED_BOS = "added_bos_token"  # variable of well-known templates: the tokenizer's text before each text
# Arguments of Hugging Face's apply_chat_template itself, so not variables of templates.
RESERVED_ARGUMENTS = ("messages", "conversation", "add_generation_prompt", "continue_final_message", "chat_template")


class TemplateError(OvspecError):
    """The template can't render its input."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, rendered with Hugging Face's variables and functions.

    ``source_with_tools`` is the template for chats with tools, if different.
    """

    source: str
    special_tokens: dict[str, str]
    source_with_tools: str | None = None

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The variables used by the template."""
        return self._find_variables(self.source_with_tools or self.source)

    @functools.cached_property
    def _variables_without_tools(self) -> frozenset[str]:
        return self._find_variables(self.source) if self.source_with_tools else self.variables

    def unread_variables(self, variables: Mapping[str, Any], has_tools: bool) -> list[str]:
        """Return the names of variables unused by the template, for chats with (``has_tools``) or without tools."""
        known_variables = self.variables if has_tools else self._variables_without_tools
        return [name for name in variables if name not in known_variables and name not in RESERVED_ARGUMENTS]

    def _find_variables(self, source: str) -> frozenset[str]:
        return frozenset(self._ask_renderer({"source": source}).get("reads", ()))

    def render(
        self,
        messages: list[Message],
        opens_answer: bool = True,
        variables: Mapping[str, Any] | None = None,
        strict: bool = True,
    ) -> str:
        """Return the prompt for ``messages``; with ``opens_answer`` it ends at the start of the assistant's answer.

        Args:
            variables: further variables for the template, such as "enable_thinking". "tools" are JSON schemas of
                functions, as in OpenAI's API; "documents" are objects, for models with answers from documents.
            strict: refuse variables unused by the template.

        Raises:
            TemplateError: the template fails, rejects these messages, doesn't use a variable, or takes too much time or
                memory.
            OvspecError: a variable can't be set, or messages aren't JSON.
        """
        all_variables = {"tools": None, "documents": None, **(variables or {})}
        for variable in all_variables.keys() & RESERVED_ARGUMENTS:
            raise OvspecError(f"`chat_template_kwargs` can't set {variable}, a reserved name; leave {variable} out.")
        for variable in ("tools", "documents"):
            list_value = all_variables[variable]
            is_list = isinstance(list_value, (list, tuple)) and all(isinstance(entry, Mapping) for entry in list_value)
            if list_value is not None and not is_list:
                raise OvspecError(f"`chat_template_kwargs`: {variable} must be a list of objects.")
        needed_variables: list[str] = []
        if strict:  # an empty list of tools or documents means none
            needed_variables = [
                variable
                for variable in all_variables
                if all_variables[variable] or variable not in ("tools", "documents")
            ]
        request = {
            "source": self.source if all_variables["tools"] is None else self.source_with_tools or self.source,
            "variables": {
                **self.special_tokens,
                **all_variables,
                "messages": messages,
                "add_generation_prompt": opens_answer,
            },
            "needed": needed_variables,
        }
        renderer_reply = self._ask_renderer(request)
        if "unread" in renderer_reply:
            unread = renderer_reply["unread"]
            reads_clause = (
                f"the template uses {', '.join(renderer_reply['reads'])}"
                if renderer_reply["reads"]
                else "the template uses no variables"
            )
            raise TemplateError(
                f"The model's chat template doesn't use the variable {unread}; leave {unread} out ({reads_clause})."
            )
        if "error" in renderer_reply:
            raise TemplateError(f"The model's chat template cannot render these messages: {renderer_reply['error']}.")
        return renderer_reply["text"]

    def _ask_renderer(self, renderer_request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of the rendering process."""
        try:
            request_json = json.dumps(renderer_request)
        except (TypeError, ValueError) as error:
            raise OvspecError(f"The chat messages cannot be passed to the chat template as JSON: {error}.") from None
        try:
            return RENDERER.ask(request_json)
        except SandboxLimitExceeded as limit_error:
            raise TemplateError(
                f"The model's chat template {limit_error}; give plain text instead of chat messages."
            ) from None


# Templates come from the internet. Jinja's sandbox isolates them, but has no time limit.
RENDERER = SandboxPool(
    "ovspec.text.chat_template_worker", "renders chat templates", MAX_RENDER_SECONDS, MAX_RENDERER_BYTES
)


def read_chat_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of an exported folder or a checkpoint, by name."""
    template_file = folder / CHAT_TEMPLATE_FILE
    templates: dict[str, str] = {}
    if template_file.is_file():
        templates["default"] = read_text(template_file)
    templates |= {
        template_file.stem: read_text(template_file)
        for template_file in sorted((folder / TEMPLATES_FOLDER).glob("*.jinja"))
    }
    return templates or read_dataclass(TokenizerConfig, folder / TOKENIZER_CONFIG_FILE).chat_templates


def load_chat_template(folder: Path, custom_source: str | None = None, bos: str = "") -> ChatTemplate:
    """Return the chat template of an exported folder; raises OvspecError if it has none.

    custom_source: the source of a template to use instead. bos: the tokenizer's text before each text.
    """
    if custom_source is not None:
        return ChatTemplate(custom_source, read_special_tokens(folder) | {ADDED_BOS: bos})
    templates = read_chat_templates(folder)
    source = templates.get("default")
    if not source and templates:
        template_names = ", ".join(sorted(templates))
        problem = f"{folder}: none of its chat templates ({template_names}) is the default"
        raise OvspecError(f"{problem}; choose a template with `chat_template`.")
    if not source:
        advice = "give plain text instead of chat messages, or set `chat_template`"
        raise OvspecError(f"{folder}: this model has no chat template; {advice}.")
    return ChatTemplate(source, read_special_tokens(folder), templates.get("tool_use"))
