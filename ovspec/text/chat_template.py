"""A model's chat template, rendered in a sandboxed process with limits on time, memory and output.

Nothing else in ovspec renders templates.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ovspec.errors import OvspecError
from ovspec.files import read_as, read_text
from ovspec.sandbox import Stopped, Worker
from ovspec.text.tokenizer_files import TOKENIZER_CONFIG_FILE, TokenizerConfig

Message = dict[str, Any]  # {"role": ..., "content": ...}

MAX_SECONDS = 2.0
MAX_BYTES = 1_000_000_000  # memory that the rendering process may use


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, rendered with the variables and functions that Hugging Face provides."""

    source: str
    special_tokens: dict[str, str]

    def render(self, messages: list[Message], open: bool = True) -> str:
        """Return the prompt for ``messages``; with ``open`` it ends where the assistant's answer begins.

        Raises OvspecError if the template fails, rejects these messages, or takes too much time or memory.
        """
        try:
            request = json.dumps({**asdict(self), "messages": messages, "open": open})
        except (TypeError, ValueError) as error:
            raise OvspecError(f"The chat messages cannot be passed to the chat template as JSON: {error}.") from None
        try:
            answer = RENDERER.ask(request)
        except Stopped as why:
            raise OvspecError(f"The model's chat template {why}; give plain text, not chat messages.") from None
        if "error" in answer:
            raise OvspecError(f"The model's chat template cannot render these messages: {answer['error']}.")
        return answer["text"]


# Templates come from the internet. Jinja's sandbox keeps them from reaching anything, but not from running for hours.
RENDERER = Worker("ovspec.text.chat_template_worker", MAX_SECONDS, MAX_BYTES)


def chat_template(folder: Path) -> ChatTemplate:
    """Return the chat template of an exported folder; raises OvspecError if it has none."""
    config, file = read_as(TokenizerConfig, folder / TOKENIZER_CONFIG_FILE), folder / "chat_template.jinja"
    source = config.chat_template
    if isinstance(source, list):
        source = {template.name: template.template for template in source}
    if isinstance(source, dict):  # several with names
        source = source.get("default")
    if file.is_file():
        source = read_text(file)
    if not source:
        raise OvspecError(f"{folder}: this model has no chat template; give plain text, not chat messages.")
    return ChatTemplate(source, config.special_tokens())
