"""Prompts (texts, token ids, chats and infills), and their encoding by a model's tokenizer and chat template."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ovspec.base.errors import OvspecError, PromptError
from ovspec.base.files import require_model_path
from ovspec.ir.config import ModelConfig
from ovspec.params import Params
from ovspec.params.generation import CHAT_OPTIONS, DEFAULT_PARAMS
from ovspec.text.answer import AnswerFormat
from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import Message, load_chat_template
from ovspec.text.custom_template import find_answer_end
from ovspec.text.generation_config import GenerationConfig
from ovspec.text.infill import InfillPrompt, drop_first_chunks, encode_infill
from ovspec.text.tokenizer import Tokenizer
from ovspec.text.tokenizer_files import read_special_tokens

# A text, token ids, chat messages, or the text around a place to fill in.
Prompt = str | list[int] | np.ndarray | list[Message] | Message | InfillPrompt
Prompts = list[str] | list[list[int]] | list[np.ndarray] | list[list[Message]]
TemplateVariables = Mapping[str, Any]  # variables for the chat template
MAX_TAG_TOKENS = 32


class EncodedPrompt(NamedTuple):
    """The tokens of a prompt.

    ids: (n,) int64.
    is_chat: whether the generated text is an answer in a chat.
    first_healable: position of the first token open to healing.
    end_ids: ids to end the generated text, besides the model's EOS.
    """

    ids: np.ndarray
    is_chat: bool
    first_healable: int
    end_ids: tuple[int, ...] = ()


class PromptEncoder:
    """Encodes prompts for the model in ``folder``. Thread-safe.

    Args:
        config: the model's config.
        tool_format: name of the model's format for tool calls; None for the format of its chat template.
        custom_template: source of a chat template to use in place of the model's.
    """

    def __init__(
        self, folder: Path, config: ModelConfig, tool_format: str | None = None, custom_template: str | None = None
    ) -> None:
        self.folder = folder
        self.tool_format = tool_format
        self.custom_template = custom_template
        self.tokenizer = Tokenizer(folder)
        self.generation_config = GenerationConfig(folder, config, self.tokenizer)

    @functools.cached_property
    def chat_format(self) -> ChatFormat:
        """The format of the model's chats; raises OvspecError if it has no chat template."""
        bos_text = "".join(map(self.tokenizer.token_text, self.tokenizer.prefix_ids))
        return ChatFormat(
            load_chat_template(require_model_path(self.folder), self.custom_template, bos_text), self.tool_format
        )

    @functools.cached_property
    def special_tokens_by_role(self) -> dict[str, str]:
        """The special tokens by role, such as "bos_token"."""
        return read_special_tokens(require_model_path(self.folder))

    def encode(
        self,
        prompt: Prompt,
        at_start: bool = True,
        template_variables: TemplateVariables | None = None,
        tools: Sequence[Any] = (),
        reasoning_effort: str | None = None,
    ) -> np.ndarray:
        """Return the token ids, (n,) int64.

        at_start: the prompt starts a text, so it gets the model's BOS, if there is one.
        template_variables, tools, reasoning_effort: for chats; see ``ChatFormat.render_prompt``.

        Raises PromptError for a prompt of another type or with unknown token ids.
        """
        if is_chat(prompt):
            messages: Any = [prompt] if isinstance(prompt, dict) else prompt
            return self.tokenizer.encode(
                self.chat_format.render_prompt(messages, tools, reasoning_effort, template_variables), special=False
            )
        if not isinstance(prompt, (str, list, tuple, np.ndarray)):
            raise PromptError(f"A prompt must be a string, token ids or chat messages, not {prompt!r:.80}.")
        refuse_template_variables(template_variables)
        if at_start and not len(prompt):
            return self.generation_config.empty_prompt_ids
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt) if at_start else self.tokenizer.encode_continuation(prompt)
        try:
            prompt_ids = np.asarray(prompt, dtype=np.int64)
        except OverflowError:
            raise PromptError(
                "The prompt has a token id beyond the vocabulary; encode the prompt with the model's own tokenizer."
            ) from None
        except (TypeError, ValueError):
            raise PromptError(f"A prompt must be a string, token ids or chat messages, not {prompt!r:.80}.") from None
        known_ids = self.tokenizer.known_ids
        if (unknown_id := known_ids.first_unknown(prompt_ids)) is not None:
            id_range_text = f" (0 to {known_ids.size - 1})" if known_ids.size else ""
            raise PromptError(f"Token id {unknown_id} is not in the vocabulary{id_range_text}.")
        return prompt_ids

    def encode_prompt(self, prompt: Prompt, params: Params, max_tokens: float = np.inf) -> EncodedPrompt:
        """Encode the prompt of a call; an infill gets as many of its chunks as fit into ``max_tokens``.

        Raises OvspecError if ``params`` has options for chats without a chat, and PromptError if the prompt can't be
        encoded, for example an infill without FIM tokens in the vocabulary.
        """
        prompt_is_chat = is_chat(prompt)
        if not prompt_is_chat:
            refuse_chat_options(params)
        if isinstance(prompt, InfillPrompt):
            tokenizer = self.tokenizer
            fim_tokens = tokenizer.fim_tokens
            if max_tokens < np.inf:  # don't spend time on encoding chunks without a chance to fit
                prompt = drop_first_chunks(prompt, tokenizer.max_characters(int(max_tokens)))
            prompt_ids, first_healable = encode_infill(
                prompt, fim_tokens, tokenizer.encode_plain_text, tokenizer.prefix_ids, max_tokens
            )
            return EncodedPrompt(prompt_ids, prompt_is_chat, first_healable, fim_tokens.end_ids if fim_tokens else ())
        prompt_ids = self.encode(
            prompt,
            template_variables=params.chat_template_kwargs,
            tools=params.tools,
            reasoning_effort=params.reasoning_effort,
        )
        return EncodedPrompt(prompt_ids, prompt_is_chat, len(prompt_ids) if prompt_is_chat else 0)

    @functools.cached_property
    def template_answer_end_ids(self) -> list[int]:
        """The id of the added token at the end of answers in a custom chat template, in a list; [] if there is none."""
        answer_end = find_answer_end(self.chat_format.template)
        added_tokens = self.tokenizer.added_tokens
        end_tokens = [added_token for added_token in added_tokens if answer_end.startswith(added_token)]
        return [added_tokens[max(end_tokens, key=len)]] if end_tokens else []

    def answer_format(self, prompt_ids: np.ndarray, params: Params) -> AnswerFormat | None:
        """Return the format of the answer to a chat with tokens ``prompt_ids`` (n,); None for text without parts."""
        chat_format = self.chat_format
        thinking = chat_format.thinking_format
        if not (thinking or params.tools):
            return None
        prompt_end = (self.tokenizer.decode_with_special(prompt_ids[-MAX_TAG_TOKENS:]) or "").rstrip()
        begins_thinking = thinking is not None and prompt_end.endswith(thinking.open_tag.rstrip())
        return AnswerFormat(
            chat_format.tool_format if params.tools else None,
            thinking,
            params.allowed_calls.tool_names or tuple(tool["function"]["name"] for tool in params.tools),
            "thinking" if begins_thinking else "start",
            not (params.allowed_calls.required or params.grammar_option),
            self.tokenizer.added_tokens,
        )


def refuse_template_variables(template_variables: TemplateVariables | None) -> None:
    """Raise OvspecError if there are ``template_variables``; for prompts other than chats."""
    if template_variables:
        raise OvspecError(
            "`chat_template_kwargs` needs chat messages, but the prompt is text or token ids; leave the option out."
        )


def refuse_chat_options(params: Params) -> None:
    """Raise OvspecError if ``params`` has an option for chats; for prompts other than chats."""
    for option_name in CHAT_OPTIONS:
        if getattr(params, option_name) != getattr(DEFAULT_PARAMS, option_name):
            raise OvspecError(
                f"`{option_name}` needs chat messages, but the prompt is text or token ids; leave the option out."
            )


def is_chat(prompt: object) -> bool:
    """Return whether ``prompt`` consists of chat messages."""
    return isinstance(prompt, dict) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict))


def is_nonempty_prompt_list(prompt: object) -> bool:
    """Return whether ``prompt`` is a list of prompts."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list, np.ndarray))
