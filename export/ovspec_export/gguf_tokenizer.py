"""The tokenizer of a GGUF file, built from the file's metadata so that it gives the ids that llama.cpp gives."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ovspec.base.errors import OvspecError
from ovspec.base.progress import note
from ovspec_export.gguf_file import INSTEAD
from ovspec_export.gguf_pretokenizers import PRETOKENIZERS, PreTokenizer
from ovspec_export.gguf_vocabulary import (
    NORMAL,
    SPECIAL,
    USER_DEFINED,
    Metadata,
    Vocabulary,
    damaged,
    read_metadata,
    read_vocabulary,
    shown,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece
TEMPLATE = "tokenizer.chat_template"
NAMES_IN_TRANSFORMERS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # special tokens of Phi-3 that don't take the white space after them


def build_tokenizer(metadata: Mapping[str, Any], name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer that the metadata of the GGUF file ``name`` describes.

    Raises:
        OvspecError: it is of a kind that can't be built, or the metadata is damaged.
    """
    from transformers import PreTrainedTokenizerFast

    read = read_metadata(metadata, name)
    pre = pre_tokenizer(read, name)
    vocabulary = read_vocabulary(read, metadata, name)
    roles = vocabulary.roles
    templates = chat_templates(metadata, name)
    tokenizer = byte_level(read, vocabulary, pre, name) if pre else sentencepiece(read, vocabulary, name)
    add_tokens(tokenizer, vocabulary, of_phi3=any(sign in read.general_name.lower() for sign in ("phi-3", "phi3")))
    add_bos_and_eos(tokenizer, read, vocabulary, pre.add_bos if pre else True, name)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{ours: vocabulary.tokens[roles[role]] for role, ours in NAMES_IN_TRANSFORMERS.items() if role in roles},
    )
    made.chat_template = templates.get("default") if templates.keys() <= {"default"} else templates
    return made


def end_ids(metadata: Mapping[str, Any], name: str = "the GGUF file") -> list[int]:
    """Return the ids that end a text: EOS first, then those of other roles, and those that are known by their text."""
    return read_vocabulary(read_metadata(metadata, name), metadata, name).ends


def pre_tokenizer(read: Metadata, name: str) -> PreTokenizer | None:
    """Return how texts are cut into words; None for SentencePiece, which doesn't cut them."""
    if read.model == "llama":
        return None
    if read.model not in ("gpt2", "gemma4"):
        kind = shown(read.model)
        raise OvspecError(f"{name}: its tokenizer is of the kind {kind}, which can't be converted; {INSTEAD}.")
    pre = "gemma4" if read.model == "gemma4" else read.pre
    if not pre:
        note(f"{name} doesn't say how its tokenizer cuts texts into words; some may get other tokens than in training.")
        pre = "default"
    if pre not in PRETOKENIZERS:
        raise OvspecError(f"{name}: its pre-tokenizer {shown(pre)} is unknown; {INSTEAD}.")
    return PRETOKENIZERS[pre]


def byte_level(read: Metadata, vocabulary: Vocabulary, pre: PreTokenizer, name: str) -> Tokenizer:
    """Return BPE of words, which are spelt in bytes or, with a fallback to bytes, in characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    merges = read_merges(read, vocabulary.ids, name)
    cuts: list[Any] = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in pre.regexes]
    if pre.spelt_in_bytes:
        tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=pre.ignore_merges))
        tokenizer.decoder = decoders.ByteLevel()
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    else:
        tokenizer = of_characters(vocabulary, merges, space_before=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    return tokenizer


def sentencepiece(read: Metadata, vocabulary: Vocabulary, name: str) -> Tokenizer:
    """Return SentencePiece's BPE: the two neighbours that make the token with the best score are merged first."""
    scores = read.scores or [0.0] * len(vocabulary.tokens)
    if len(scores) < len(vocabulary.tokens):
        raise damaged(name, f"{len(vocabulary.tokens)} tokens have {len(scores)} scores")
    if not all(map(math.isfinite, scores)):
        raise damaged(name, "a score is not a number")
    if len({score for score, kind in zip(scores, vocabulary.types, strict=False) if kind == NORMAL}) > 1:
        if not read.add_space_prefix:
            spell_spaces(vocabulary, scores := list(scores))
        merges = list(merges_by_score(vocabulary, scores))
    else:  # converted from a checkpoint that has merges instead
        merges = read_merges(read, vocabulary.ids, name)
    return of_characters(vocabulary, merges, read.add_space_prefix)


def of_characters(vocabulary: Vocabulary, merges: list[tuple[str, str]], space_before: bool) -> Tokenizer:
    """Return BPE of characters, with bytes for unknown ones. ``space_before``: texts get a space in front."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = vocabulary.tokens[vocabulary.roles["unknown"]] if "unknown" in vocabulary.roles else None
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, unk_token=unknown, byte_fallback=True))
    spaces: list[Any] = [normalizers.Prepend(SPACE)] * space_before
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *[decoders.Strip(" ", 1, 0)] * space_before])
    return tokenizer


def spell_spaces(vocabulary: Vocabulary, scores: list[float]) -> None:
    """Make normal tokens of those that users defined for several spaces, as in Gemma's files.

    Merged before all others, they are found where they would be found in the text. OpenVINO's tokenizer would miss
    some of those.
    """
    ids, types = vocabulary.ids, vocabulary.types
    for length in itertools.count(2):
        spelt = SPACE * length
        found = [run for run in (" " * length, spelt) if run in ids]
        if len(found) != 1 or types[ids[found[0]]] != USER_DEFINED or spelt[1:] not in ids:
            return
        index = ids.pop(found[0])
        ids[spelt], vocabulary.tokens[index], types[index] = index, spelt, NORMAL
        if found[0] != spelt:
            scores[index] = math.inf


def merges_by_score(vocabulary: Vocabulary, scores: list[float]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tokens that make a token, the best token first; of equally good ones, the longest first.

    So a run of spaces or of line ends, whose tokens share a score, grows from its left end.
    """
    ids = vocabulary.ids
    order = sorted(zip(scores, vocabulary.tokens, strict=False), key=lambda it: (it[0], len(it[1])), reverse=True)
    for _, token in order:
        # Of two pairs that overlap, SentencePiece merges the left one: in "ab a ba", that is the one cut further right.
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in ids and token[cut:] in ids:
                yield token[:cut], token[cut:]


def read_merges(read: Metadata, ids: dict[str, int], name: str) -> list[tuple[str, str]]:
    """Return the file's merges, the first first; raise OvspecError if there are none or one doesn't fit the tokens."""
    if not read.merges:
        raise damaged(name, "it has no merges")
    merges = {}
    for merge in read.merges:
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or not ids.keys() >= {left, right, left + right}:
            raise damaged(name, f"the merge {shown(merge)} doesn't fit its tokens")
        merges[left, right] = None
    return list(merges)


def add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary, of_phi3: bool) -> None:
    """Make the tokens that are found in a text before it is cut: special ones, and those that users defined."""
    from tokenizers import AddedToken

    tokenizer.add_tokens(
        [
            AddedToken(text, special=kind in SPECIAL, normalized=False, rstrip=of_phi3 and text not in KEEP_SPACES)
            for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=False)
            if kind in (*SPECIAL, USER_DEFINED)
        ]
    )


def add_bos_and_eos(tokenizer: Tokenizer, read: Metadata, vocabulary: Vocabulary, add_bos: bool, name: str) -> None:
    """Put BOS before and EOS after every text, as the metadata says; ``add_bos`` holds where it doesn't."""
    from tokenizers import processors

    if read.model != "gemma4" and read.add_bos_token is not None:
        add_bos = read.add_bos_token
    order = ["bos"] * add_bos + ["$A"] + ["eos"] * read.add_eos_token
    if missing := next((role for role in order if role != "$A" and role not in vocabulary.roles), None):
        raise damaged(name, f"it adds {missing.upper()} to every text but doesn't say which token that is")
    tokens = {role: vocabulary.tokens[vocabulary.roles[role]] for role in order if role != "$A"}
    if wrong := next((text for text in tokens.values() if re.search(r"^\$|:", text)), None):
        raise damaged(name, f"{shown(wrong)} can't be added to every text")  # it means something to tokenizers
    if tokens:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens.get(role, role) for role in order],
            special_tokens=[(text, vocabulary.ids[text]) for text in set(tokens.values())],
        )


def chat_templates(metadata: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return the chat templates by name; one without a name is called "default"."""
    found = {key: value for key, value in metadata.items() if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")}
    templates = {key.removeprefix(TEMPLATE)[1:] or "default": value for key, value in found.items()}
    for key, value in templates.items():
        if not isinstance(value, str) or not re.fullmatch(r"[\w-]+", key):  # the name becomes that of a file
            raise damaged(name, f"the chat template {shown(key)} is not a text, or has a name that can't be used")
    return templates
