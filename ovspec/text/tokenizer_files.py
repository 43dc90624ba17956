"""The parts of ``tokenizer.json`` and ``tokenizer_config.json`` used by ovspec."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from ovspec.base.files import read_json

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TokenId = Annotated[int, Meta(ge=0, lt=2**24)]  # many times the largest vocabulary


@dataclass(frozen=True)
class AddedToken:
    """A token outside the model's own vocabulary; a ``special`` token adds nothing to the text."""

    id: TokenId
    content: str
    special: bool = False


@dataclass(frozen=True)
class ModelVocabulary:
    """The tokens of a BPE or WordPiece model with their ids, or, by id, a Unigram model's tokens with their scores."""

    vocab: dict[str, TokenId] | list[tuple[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class DecodingStep:
    """A step from tokens to text, or a sequence of steps."""

    type: str | None = None
    decoders: list[DecodingStep] | None = None


@dataclass(frozen=True)
class TokenizerFile:
    """A ``tokenizer.json`` of Hugging Face's tokenizers."""

    model: ModelVocabulary = ModelVocabulary()
    decoder: DecodingStep | None = None
    added_tokens: list[AddedToken] = field(default_factory=list)

    @property
    def special_tokens(self) -> list[AddedToken]:
        return [token for token in self.added_tokens if token.special]

    def tokens_by_id(self) -> dict[int, str]:
        """Return id -> token for every token, spelt as in the file."""
        vocab = self.model.vocab
        if isinstance(vocab, dict):
            tokens = {token_id: piece for piece, token_id in vocab.items()}
        else:
            tokens = {token_id: piece for token_id, (piece, _) in enumerate(vocab)}
        return tokens | {token.id: token.content for token in self.added_tokens}


@dataclass(frozen=True)
class NamedChatTemplate:
    name: str
    template: str


@dataclass(frozen=True)
class TokenizerConfig:
    """A ``tokenizer_config.json`` with a chat template, or several templates by name."""

    chat_template: str | list[NamedChatTemplate] | dict[str, str] | None = None

    @property
    def chat_templates(self) -> dict[str, str]:
        """The chat templates by name; a single template is called "default"."""
        templates = self.chat_template
        if isinstance(templates, list):
            return {template.name: template.template for template in templates}
        if isinstance(templates, dict):
            return templates
        return {"default": templates} if templates else {}


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Return the text of each special token in ``tokenizer_config.json``, by its role, as in "bos_token".

    Models may have further roles, such as "image_token", next to the usual roles or in an object.
    """
    config_entries = read_json(folder / TOKENIZER_CONFIG_FILE)
    special_tokens: dict[str, str] = {}
    named_tokens = {role: token for role, token in config_entries.items() if role.endswith("_token")}
    for token_group in (
        config_entries.get("model_specific_special_tokens"),
        named_tokens,
        config_entries.get("extra_special_tokens"),
    ):
        if not isinstance(token_group, dict):
            continue
        for role, token in token_group.items():
            token_text = token.get("content") if isinstance(token, dict) else token
            if isinstance(token_text, str):
                special_tokens[role] = token_text
    return special_tokens
