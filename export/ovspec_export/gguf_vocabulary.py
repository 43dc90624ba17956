"""The tokens of a GGUF file: their texts, types and roles, and the tokens to end a text.

llama.cpp corrects a file's data about special tokens, by the tokens' texts. So does this module, with an exception
(``HTML_TOKENS``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct, ValidationError, convert, field
from msgspec.structs import fields

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject

MAX_TOKENS = 2**20  # four times the largest vocabulary
MAX_TOKEN_CHARACTERS = 2**12  # characters
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens
SPECIAL_TYPES = (UNKNOWN, CONTROL)  # add nothing to the text
# Ids assumed by llama.cpp if the metadata has none; here only if the token is a special token.
ASSUMED_ROLE_IDS = {"gpt2": {"bos": 11, "eos": 11}, "llama": {"bos": 1, "eos": 2, "unknown": 0}}
ROLES = ("bos", "eos", "unknown", "padding")
# Tokens, separated by spaces, of roles missing in the metadata. They are special tokens.
ROLE_TOKENS = {
    "eot": "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] "
    "<｜end▁of▁sentence｜> <end_of_utterance>",
    "eom": "<|eom_id|>",
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
ENDING_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Tokens to end a text, in every vocabulary with them. They are special tokens, too.
ENDING_TOKENS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> "
    "[e~["
)
# A text-ending token may also be HTML: if it is user-defined in the file, as in Gemma 3, it is only HTML and doesn't
# end a text. In llama.cpp it does.
HTML_TOKENS = ("</s>",)
VISIBLE_TOKENS = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"]  # of gpt-oss; they are part of the text
# In a vocabulary with all tokens of an entry, its last token doesn't end a text, and gets this type.
NOT_ENDING_TOKENS = {
    ("<|return|>", "<|call|>", "<|end|>"): USER_DEFINED,
    ("<|call|>", "<|flush|>", "<|end|>"): USER_DEFINED,
    ("<|calls|>", "<|flush|>", "<|end|>"): USER_DEFINED,
    ("<|tool_response>", "</s>"): NORMAL,
}


class TokenizerMetadata(Struct, rename=lambda name: f"tokenizer.ggml.{name}"):
    """The entries of a file's metadata about its tokenizer, except chat templates and the ids of roles."""

    model: str
    tokens: Annotated[list[str], Meta(min_length=1, max_length=MAX_TOKENS)]
    pre: str | None = None
    token_type: list[int] | None = None
    scores: list[float] | None = None
    merges: list[str] | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool = False
    add_space_prefix: bool = True
    general_name: str = field(default="", name="general.name")


@dataclass
class GgufVocabulary:
    """Tokens and their types by id; ``role_ids``: by the role, a member of ``ROLES`` or ``ROLE_TOKENS``."""

    tokens: list[str]
    token_types: list[int]
    token_ids: dict[str, int]
    role_ids: dict[str, int]
    end_ids: list[int]


def read_tokenizer_metadata(entries: JsonObject, name: str) -> TokenizerMetadata:
    """Return the metadata of the file ``name``; raise OvspecError if an entry is missing or has another type."""
    keys = [metadata_field.encode_name for metadata_field in fields(TokenizerMetadata)]
    try:
        return convert({key: entries[key] for key in keys if key in entries}, TokenizerMetadata)
    except ValidationError as error:
        problem = str(error).replace("`", "").replace(" - at $.", ": ")
        raise damaged_tokenizer_error(name, problem[:200]) from None


def read_vocabulary(metadata: TokenizerMetadata, entries: JsonObject, name: str) -> GgufVocabulary:
    """Return the tokens; raise OvspecError if two are equal, any is too long, or lists or ids don't fit them."""
    tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(metadata.tokens)]
    token_ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(token_ids) < len(tokens):
        repeated_token = next(token for token_id, token in enumerate(tokens) if token_ids[token] != token_id)
        raise damaged_tokenizer_error(name, f"the token {quote_shortened(repeated_token)} is a duplicate")
    longest_token = max(tokens, key=len)
    if len(longest_token) > MAX_TOKEN_CHARACTERS:
        raise damaged_tokenizer_error(
            name,
            f"the token {quote_shortened(longest_token)} has {len(longest_token)} characters, "
            f"but at most {MAX_TOKEN_CHARACTERS} are possible",
        )
    token_types = list(metadata.token_type or [NORMAL] * len(tokens))
    if len(token_types) < len(tokens):
        raise damaged_tokenizer_error(name, f"only {len(token_types)} of {len(tokens)} tokens have a type")
    ids_by_role = {role: read_role_id(role, entries, len(tokens), name) for role in (*ROLES, *ROLE_TOKENS)}
    role_ids = {role: token_id for role, token_id in ids_by_role.items() if token_id is not None}
    for role, token_id in ASSUMED_ROLE_IDS.get(metadata.model, {}).items():
        if token_id < len(tokens) and token_types[token_id] in SPECIAL_TYPES:
            role_ids.setdefault(role, token_id)
    for role, texts in ROLE_TOKENS.items():
        token_id = next((token_ids[text] for text in texts.split() if text in token_ids), None)
        if role not in role_ids and token_id is not None:
            role_ids[role] = token_id
            token_types[token_id] = CONTROL
    end_ids = dict.fromkeys(role_ids[role] for role in ENDING_ROLES if role in role_ids)  # in this order
    for text in ENDING_TOKENS.split():
        if (token_id := token_ids.get(text)) is None:
            continue
        if text in HTML_TOKENS and token_types[token_id] == USER_DEFINED and token_id not in role_ids.values():
            continue
        end_ids[token_id] = None
        token_types[token_id] = CONTROL
    for text in VISIBLE_TOKENS:
        if text in token_ids:
            token_types[token_ids[text]] = USER_DEFINED
    for texts, token_type in NOT_ENDING_TOKENS.items():
        if token_ids.keys() >= set(texts):
            end_ids.pop(token_ids[texts[-1]], None)
            token_types[token_ids[texts[-1]]] = token_type
    return GgufVocabulary(tokens, token_types, token_ids, role_ids, list(end_ids))


def read_role_id(role: str, entries: JsonObject, token_count: int, name: str) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    token_id = entries.get(key)
    if token_id is None or (type(token_id) is int and 0 <= token_id < token_count):
        return token_id
    if type(token_id) is int and role not in ("bos", "eos"):
        return None  # such as 2**32 - 1 for padding, in real files
    raise damaged_tokenizer_error(name, f"{key} is {str(token_id)[:50]}, but the vocabulary has {token_count} tokens")


def damaged_tokenizer_error(name: str, problem: str) -> OvspecError:
    return OvspecError(f"{name}: its tokenizer is damaged ({problem}); download the file again, or use another file.")


def quote_shortened(text: str) -> str:
    """Return the text in quotes for a message, shortened if it is long."""
    return repr(text if len(text) <= 50 else text[:50] + "…")
