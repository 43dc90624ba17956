"""The bodies of requests to encode texts and chats, and to decode tokens."""

from typing import Any

from pydantic import Field, create_model

from ovspec.protocols.bodies import CHAT_MESSAGES, TOKEN_IDS, ChatEndingFields, RequestBody, define_refused_fields
from ovspec.protocols.unsupported import REFUSED_PROMPT_FIELDS, REFUSED_TOKENIZE_FIELDS


class TokenizeRequest(
    ChatEndingFields,
    create_model(
        "Prompts", __base__=RequestBody, **define_refused_fields(REFUSED_PROMPT_FIELDS | REFUSED_TOKENIZE_FIELDS)
    ),
):
    """A text or chat to be encoded."""

    model: str | None = Field(None, description="The model's name.")
    prompt: str | None = Field(None, description="The text to encode.")
    content: str | None = Field(None, description="Same as prompt (llama.cpp's name).")
    messages: CHAT_MESSAGES | None = Field(None, description="A chat to encode, rendered with the chat template.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template. Only with messages."
    )
    tools: list[dict[str, Any]] | None = Field(None, description="The chat's tools. Only with messages.")
    add_special_tokens: bool | None = Field(
        None, description="Add the model's BOS token at the beginning. Not with messages. Default: true."
    )
    add_special: bool | None = Field(None, description="Same as add_special_tokens (llama.cpp's name).")
    with_pieces: bool | None = Field(None, description="Return each token as an object with id and piece (its text).")


class DetokenizeRequest(RequestBody):
    """Tokens to be decoded."""

    model: str | None = Field(None, description="The model's name.")
    tokens: TOKEN_IDS = Field(description="Token ids.")
