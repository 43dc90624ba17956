"""The tokenizer of a GGUF file, built from the file's metadata to yield llama.cpp's ids."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec.base.progress import print_note
from ovspec_export.gguf_file import CHECKPOINT_ADVICE
from ovspec_export.gguf_pretokenizers import PRETOKENIZERS, PreTokenizer
from ovspec_export.gguf_vocabulary import (
    NORMAL,
    SPECIAL_TYPES,
    USER_DEFINED,
    GgufVocabulary,
    TokenizerMetadata,
    damaged_tokenizer_error,
    quote_shortened,
    read_tokenizer_metadata,
    read_vocabulary,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

SPACE_SYMBOL = "\N{LOWER ONE EIGHTH BLOCK}"  # represents a space in SentencePiece
NONCHARACTER = "\U0010ffff"  # marks places in a text; meaningless in Unicode, so never in texts
TEMPLATE_KEY = "tokenizer.chat_template"
HF_ROLE_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# Special tokens of Phi-3 without the white space after them.
SPACE_KEEPING_TOKENS = ("<unk>", "<s>", "<|endoftext|>")


def build_gguf_tokenizer(entries: JsonObject, name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer for the metadata entries of the GGUF file ``name``.

    Raises:
        OvspecError: its kind isn't supported, or the metadata is damaged.
    """
    from transformers import PreTrainedTokenizerFast

    metadata = read_tokenizer_metadata(entries, name)
    pre_tokenizer = choose_pre_tokenizer(metadata, name)
    vocabulary = read_vocabulary(metadata, entries, name)
    templates = read_gguf_templates(entries, name)
    if pre_tokenizer:
        tokenizer = build_byte_level_bpe(metadata, vocabulary, pre_tokenizer, name)
    else:
        tokenizer = build_sentencepiece_bpe(metadata, vocabulary, name)
    is_phi3 = any(name_part in metadata.general_name.lower() for name_part in ("phi-3", "phi3"))
    add_special_tokens(tokenizer, vocabulary, is_phi3)
    add_bos_and_eos(tokenizer, metadata, vocabulary, pre_tokenizer.add_bos if pre_tokenizer else True, name)
    role_ids = vocabulary.role_ids
    hf_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{key: vocabulary.tokens[role_ids[role]] for role, key in HF_ROLE_NAMES.items() if role in role_ids},
    )
    hf_tokenizer.chat_template = templates.get("default") if templates.keys() <= {"default"} else templates
    return hf_tokenizer


def read_end_ids(entries: JsonObject, name: str = "the GGUF file") -> list[int]:
    """Return the ids to end a text: EOS first, then the ids of other roles and of known texts."""
    return read_vocabulary(read_tokenizer_metadata(entries, name), entries, name).end_ids


def choose_pre_tokenizer(metadata: TokenizerMetadata, name: str) -> PreTokenizer | None:
    """Return the rules for cutting texts into words; None for SentencePiece, because it doesn't cut texts."""
    if metadata.model == "llama":
        return None
    if metadata.model not in ("gpt2", "gemma4"):
        kind = quote_shortened(metadata.model)
        raise OvspecError(f"{name}: its tokenizer of the type {kind} can't be converted; {CHECKPOINT_ADVICE}.")
    pre_name = "gemma4" if metadata.model == "gemma4" else metadata.pre
    if not pre_name:
        print_note(
            f"{name} doesn't say how its tokenizer cuts texts into words; some may get other tokens than in training."
        )
        pre_name = "default"
    if pre_name not in PRETOKENIZERS:
        raise OvspecError(f"{name}: its pre-tokenizer {quote_shortened(pre_name)} is unknown; {CHECKPOINT_ADVICE}.")
    return PRETOKENIZERS[pre_name]


def build_byte_level_bpe(
    metadata: TokenizerMetadata, vocabulary: GgufVocabulary, pre_tokenizer: PreTokenizer, name: str
) -> Tokenizer:
    """Return BPE of words, spelt in bytes or, with a fallback to bytes, in characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    merges = read_merges(metadata, vocabulary.token_ids, name)
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(regex), "isolated") for regex in pre_tokenizer.regexes
    ]
    if pre_tokenizer.spelt_in_bytes:
        tokenizer = Tokenizer(models.BPE(vocabulary.token_ids, merges, ignore_merges=pre_tokenizer.ignore_merges))
        tokenizer.decoder = decoders.ByteLevel()
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    else:
        tokenizer = build_character_bpe(vocabulary, merges, space_before=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return tokenizer


def build_sentencepiece_bpe(metadata: TokenizerMetadata, vocabulary: GgufVocabulary, name: str) -> Tokenizer:
    """Return SentencePiece's BPE: the two neighbours with the best score as a merged token are merged first."""
    scores = list(metadata.scores or [0.0] * len(vocabulary.tokens))
    if len(scores) < len(vocabulary.tokens):
        raise damaged_tokenizer_error(name, f"only {len(scores)} of {len(vocabulary.tokens)} tokens have a score")
    if not all(map(math.isfinite, scores)):
        raise damaged_tokenizer_error(name, "the score of a token is not a finite number")
    token_types = zip(scores, vocabulary.token_types, strict=False)
    separate_symbols = False
    if len({score for score, token_type in token_types if token_type == NORMAL}) > 1:
        if not metadata.add_space_prefix:
            separate_symbols = make_spaces_normal_tokens(vocabulary, scores)
        merges = list(derive_merges(vocabulary, scores))
    else:  # converted from a checkpoint with merges instead of scores
        merges = read_merges(metadata, vocabulary.token_ids, name)
    tokenizer = build_character_bpe(vocabulary, merges, metadata.add_space_prefix)
    if separate_symbols:
        keep_symbols_apart(tokenizer)
    return tokenizer


def build_character_bpe(vocabulary: GgufVocabulary, merges: list[tuple[str, str]], space_before: bool) -> Tokenizer:
    """Return BPE of characters, with bytes for unknown characters. ``space_before``: texts get a space in front."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown_token = vocabulary.tokens[vocabulary.role_ids["unknown"]] if "unknown" in vocabulary.role_ids else None
    tokenizer = Tokenizer(models.BPE(vocabulary.token_ids, merges, unk_token=unknown_token, byte_fallback=True))
    space_normalizers: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE_SYMBOL)] * space_before
    tokenizer.normalizer = normalizers.Sequence([*space_normalizers, normalizers.Replace(" ", SPACE_SYMBOL)])
    decoder_steps: list[decoders.Decoder] = [
        decoders.Replace(SPACE_SYMBOL, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    tokenizer.decoder = decoders.Sequence([*decoder_steps, *[decoders.Strip(" ", 1, 0)] * space_before])
    return tokenizer


def keep_symbols_apart(tokenizer: Tokenizer) -> None:
    """Cut a text between the symbol for a space itself and a space or another such symbol.

    The tokens for several spaces, spelt with the symbol by ``make_spaces_normal_tokens``, are for spaces alone.
    """
    from tokenizers import Regex, normalizers, pre_tokenizers

    places = Regex(f"(?<={SPACE_SYMBOL})(?=[ {SPACE_SYMBOL}])|(?<= )(?={SPACE_SYMBOL})")
    spell_spaces = tokenizer.normalizer
    assert spell_spaces
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(places, NONCHARACTER), spell_spaces])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(NONCHARACTER, "removed")


def make_spaces_normal_tokens(vocabulary: GgufVocabulary, scores: list[float]) -> bool:
    """Turn user-defined tokens for several spaces, as in Gemma's files, into normal tokens.

    Merged before all others, they are found in the same places of the text. OpenVINO's tokenizer would miss some
    user-defined tokens. Returns whether the file spells them with spaces; they then don't represent symbols.
    """
    are_spelt_with_spaces = False
    token_ids = vocabulary.token_ids
    token_types = vocabulary.token_types
    for length in itertools.count(2):
        spelt_spaces = SPACE_SYMBOL * length
        spellings = [spelling for spelling in (" " * length, spelt_spaces) if spelling in token_ids]
        if (
            len(spellings) != 1
            or token_types[token_ids[spellings[0]]] != USER_DEFINED
            or spelt_spaces[1:] not in token_ids
        ):
            break
        token_id = token_ids.pop(spellings[0])
        token_ids[spelt_spaces] = token_id
        vocabulary.tokens[token_id] = spelt_spaces
        token_types[token_id] = NORMAL
        if spellings[0] != spelt_spaces:
            scores[token_id] = math.inf
            are_spelt_with_spaces = True
    return are_spelt_with_spaces


def derive_merges(vocabulary: GgufVocabulary, scores: list[float]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tokens forming a token, the best token first; of equally good tokens, the longest first.

    So runs of spaces or line ends, with the same score for all lengths, grow from their left end.
    """
    token_ids = vocabulary.token_ids
    scored_tokens = zip(scores, vocabulary.tokens, strict=False)
    for _, token in sorted(
        scored_tokens, key=lambda scored_token: (scored_token[0], len(scored_token[1])), reverse=True
    ):
        # Of two overlapping pairs, SentencePiece merges the left pair: in "ab a ba", the pair cut further right.
        for cut_index in range(len(token) - 1, 0, -1):
            if token[:cut_index] in token_ids and token[cut_index:] in token_ids:
                yield token[:cut_index], token[cut_index:]


def read_merges(metadata: TokenizerMetadata, token_ids: dict[str, int], name: str) -> list[tuple[str, str]]:
    """Return the file's merges in order; raise OvspecError if there are none, or a merge doesn't fit the tokens."""
    if not metadata.merges:
        raise damaged_tokenizer_error(name, "the BPE merges are missing")
    merges = {}
    for merge in metadata.merges:
        space_index = merge.find(" ", 1)
        left = merge[:space_index]
        right = merge[space_index + 1 :]
        if space_index < 0 or not token_ids.keys() >= {left, right, left + right}:
            raise damaged_tokenizer_error(
                name, f"the merge {quote_shortened(merge)} doesn't join two tokens into a token"
            )
        merges[left, right] = None
    return list(merges)


def add_special_tokens(tokenizer: Tokenizer, vocabulary: GgufVocabulary, is_phi3: bool) -> None:
    """Add the tokens to find in a text before it is cut: special and user-defined tokens."""
    from tokenizers import AddedToken

    tokenizer.add_tokens(
        [
            AddedToken(
                text,
                special=token_type in SPECIAL_TYPES,
                normalized=False,
                rstrip=is_phi3 and text not in SPACE_KEEPING_TOKENS,
            )
            for text, token_type in zip(vocabulary.tokens, vocabulary.token_types, strict=False)
            if token_type in (*SPECIAL_TYPES, USER_DEFINED)
        ]
    )


def add_bos_and_eos(
    tokenizer: Tokenizer, metadata: TokenizerMetadata, vocabulary: GgufVocabulary, add_bos: bool, name: str
) -> None:
    """Put BOS before and EOS after every text, as the metadata says; ``add_bos`` is the default."""
    from tokenizers import processors

    if metadata.model != "gemma4" and metadata.add_bos_token is not None:
        add_bos = metadata.add_bos_token
    template_order = ["bos"] * add_bos + ["$A"] + ["eos"] * metadata.add_eos_token
    if missing_role := next(
        (role for role in template_order if role != "$A" and role not in vocabulary.role_ids), None
    ):
        key = f"tokenizer.ggml.{missing_role}_token_id"
        problem = f"a {missing_role.upper()} token is added to every text, but {key} is missing"
        raise damaged_tokenizer_error(name, problem)
    tokens = {role: vocabulary.tokens[vocabulary.role_ids[role]] for role in template_order if role != "$A"}
    if unusable_text := next((text for text in tokens.values() if re.search(r"^\$|:", text)), None):
        # This text has a special meaning in tokenizers' templates.
        raise damaged_tokenizer_error(
            name,
            f"the token {quote_shortened(unusable_text)} is added to every text, but begins with $ or contains a colon",
        )
    if tokens:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens.get(role, role) for role in template_order],
            special_tokens=[(text, vocabulary.token_ids[text]) for text in set(tokens.values())],
        )


def read_gguf_templates(entries: JsonObject, name: str) -> dict[str, str]:
    """Return the chat templates by name; a template without a name is called "default"."""
    templates = {
        key.removeprefix(TEMPLATE_KEY)[1:] or "default": template
        for key, template in entries.items()
        if key == TEMPLATE_KEY or key.startswith(f"{TEMPLATE_KEY}.")
    }
    for key, template in templates.items():
        if not isinstance(template, str) or not re.fullmatch(r"[\w-]+", key):  # the name becomes a file name
            problem = f"the chat template {quote_shortened(key)} is not text, or has an invalid name"
            raise damaged_tokenizer_error(name, problem)
    return templates
