"""Prompts: texts, token ids, chats and infills, and how a model's tokenizer and chat template encode them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ovspec.base.errors import OvspecError, PromptError
from ovspec.base.files import require_present
from ovspec.ir.config import ModelConfig
from ovspec.params import Params
from ovspec.params.generation import CHAT_OPTIONS, DEFAULT_PARAMS
from ovspec.text.answer import AnswerFormat
from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import Message, load_chat_template
from ovspec.text.custom_template import find_answer_end
from ovspec.text.generation_config import GenerationConfig
from ovspec.text.infill import Infill, encode_infill, trim_chunks
from ovspec.text.tokenizer import Tokenizer
from ovspec.text.tokenizer_files import read_special_tokens

# A text, token ids, chat messages for the model's chat template, or what is around the text.
Prompt = str | list[int] | np.ndarray | list[Message] | Message | Infill
Prompts = list[str] | list[list[int]] | list[np.ndarray] | list[list[Message]]
TemplateVariables = Mapping[str, Any]  # of the chat template
MAX_TAG_TOKENS = 32  # tokens


class EncodedPrompt(NamedTuple):
    """The tokens of a prompt, (n,) int64.

    chat: whether the text after it is the answer in a chat.
    healable: position of the first token that healing may take back.
    ends: ids that end the text after it, besides the model's EOS.
    """

    ids: np.ndarray
    is_chat: bool
    first_healable: int
    end_ids: tuple[int, ...] = ()


class PromptEncoder:
    """Encodes prompts for the model in ``folder``. Threads may share it.

    Args:
        config: the model's.
        tool_format: the name of the format in which the model writes tool calls; by default that of its chat template.
        template: the source of a chat template to use in place of the model's.
    """

    def __init__(
        self, folder: Path, config: ModelConfig, tool_format: str | None = None, template: str | None = None
    ) -> None:
        self.folder, self.tool_format, self.template = folder, tool_format, template
        self.tokenizer = Tokenizer(folder)
        self.generation_config = GenerationConfig(folder, config, self.tokenizer)

    @functools.cached_property
    def chat_format(self) -> ChatFormat:
        """How the model's chats are written; raises OvspecError if it has no chat template."""
        bos = "".join(map(self.tokenizer.token_text, self.tokenizer.bos))
        return ChatFormat(load_chat_template(require_present(self.folder), self.template, bos), self.tool_format)

    @functools.cached_property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens that have a role, by role."""
        return read_special_tokens(require_present(self.folder))

    def encode(
        self,
        prompt: Prompt,
        at_start: bool = True,
        variables: TemplateVariables | None = None,
        tools: Sequence[Any] = (),
        effort: str | None = None,
    ) -> np.ndarray:
        """Return the token ids, (n,) int64. A prompt that ``begins`` a text gets the model's BOS if it has one.

        The last three are for chats; see ``ChatFormat.render_prompt``.
        """
        if is_chat(prompt):
            messages: Any = [prompt] if isinstance(prompt, dict) else prompt
            return self.tokenizer.encode(
                self.chat_format.render_prompt(messages, tools, effort, variables), special=False
            )
        if not isinstance(prompt, (str, list, tuple, np.ndarray)):
            raise PromptError(f"A prompt must be a string, token ids or chat messages, not {prompt!r:.80}.")
        refuse_template_variables(variables)
        if at_start and not len(prompt):
            return self.generation_config.empty_prompt_ids
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt) if at_start else self.tokenizer.encode_continuation(prompt)
        try:
            ids = np.asarray(prompt, dtype=np.int64)
        except OverflowError:
            raise PromptError("A token id is too large to be in the vocabulary.") from None
        except (TypeError, ValueError):
            raise PromptError(f"A prompt must be a string, token ids or chat messages, not {prompt!r:.80}.") from None
        known = self.tokenizer.known
        if (unknown := known.first_unknown(ids)) is not None:
            upto = f" (0 to {known.size - 1})" if known.size else ""
            raise PromptError(f"Token id {unknown} is not in the vocabulary{upto}.")
        return ids

    def encode_prompt(self, prompt: Prompt, params: Params, max_tokens: float = np.inf) -> EncodedPrompt:
        """Encode the prompt of a call; of one for infilling, as many chunks as ``room`` tokens hold.

        Raises OvspecError if ``params`` have options of chats and the prompt is none, and PromptError if it can't be
        encoded, as one for infilling without FIM tokens.
        """
        chat = is_chat(prompt)
        if not chat:
            refuse_chat_options(params)
        if isinstance(prompt, Infill):
            fim, tokenizer = self.tokenizer.fim_tokens, self.tokenizer
            if max_tokens < np.inf:  # chunks that can't fit aren't encoded, which would take long
                prompt = trim_chunks(prompt, tokenizer.max_characters(int(max_tokens)))
            ids, begins = encode_infill(prompt, fim, tokenizer.encode_plain_text, tokenizer.bos, max_tokens)
            return EncodedPrompt(ids, chat, begins, fim.end_ids if fim else ())
        ids = self.encode(
            prompt, variables=params.chat_template_kwargs, tools=params.tools, effort=params.reasoning_effort
        )
        return EncodedPrompt(ids, chat, len(ids) if chat else 0)

    @functools.cached_property
    def answer_end_ids(self) -> list[int]:
        """The id that a chat template in place of the model's writes after an answer, if it is one token."""
        end, added = find_answer_end(self.chat_format.template), self.tokenizer.added
        names = [name for name in added if end.startswith(name)]
        return [added[max(names, key=len)]] if names else []

    def answer_format(self, prompt: np.ndarray, params: Params) -> AnswerFormat | None:
        """Return how the answer to a chat, whose tokens are ``prompt`` (n,), is written; None if it is only text."""
        format, tokenizer, use = self.chat_format, self.tokenizer, params.allowed_calls
        if not (format.thinking or params.tools):
            return None
        end = (tokenizer.decode_with_special(prompt[-MAX_TAG_TOKENS:]) or "").rstrip()
        opened = format.thinking is not None and end.endswith(format.thinking.open.rstrip())
        return AnswerFormat(
            format.tools if params.tools else None,
            format.thinking,
            use.names or tuple(tool["function"]["name"] for tool in params.tools),
            "thinking" if opened else "start",
            not (use.required or params.grammar_option),
            tokenizer.added,
        )


def refuse_template_variables(variables: TemplateVariables | None) -> None:
    """Raise OvspecError for variables of a chat template if there are any, because the prompt isn't a chat."""
    if variables:
        raise OvspecError("`chat_template_kwargs` needs chat messages, and the prompt is a text or ids; leave it out.")


def refuse_chat_options(params: Params) -> None:
    """Raise OvspecError if ``params`` have an option that only chats can meet, for a prompt that isn't one."""
    for name in CHAT_OPTIONS:
        if getattr(params, name) != getattr(DEFAULT_PARAMS, name):
            raise OvspecError(f"`{name}` needs chat messages, and the prompt is a text or ids; leave it out.")


def is_chat(prompt: Any) -> bool:
    """Return whether ``prompt`` is messages for the chat template."""
    return isinstance(prompt, dict) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict))


def is_batch(prompt: Any) -> bool:
    """Return whether ``prompt`` is a list of prompts."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list, np.ndarray))
