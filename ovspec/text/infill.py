"""Fill-in-the-middle (FIM): the vocabularies' tokens for it, and the prompts made with them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from ovspec.base.errors import PromptError


@dataclass(frozen=True)
class FimTokenNames:
    """A model family's names for its FIM tokens.

    prefix, suffix, middle: the token before each part; without ``middle``, the prompt ends with the prefix.
    repository, file: the tokens before the names of a repository and of a file.
    end_names: tokens at the end of a text, besides all of the above.
    suffix_first: whether the suffix comes before the prefix.
    """

    prefix: str
    suffix: str
    middle: str | None
    repository: str | None = None
    file: str | None = None
    end_names: tuple[str, ...] = ()
    suffix_first: bool = False

    @property
    def required_names(self) -> list[str]:
        """The tokens needed in a prompt."""
        return [name for name in (self.prefix, self.suffix, self.middle) if name]

    @property
    def all_names(self) -> list[str]:
        return [*self.required_names, *(name for name in (self.repository, self.file) if name), *self.end_names]


FIM_FAMILIES = (
    # Qwen2.5-Coder and later, CodeGemma
    FimTokenNames(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>",
        ("<|fim_pad|>", "<|file_separator|>"),
    ),
    # StarCoder 2
    FimTokenNames("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>", ("<fim_pad>",)),
    # StarCoder, Granite
    FimTokenNames("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>", "<filename>", ("<fim_pad>",)),
    # SantaCoder
    FimTokenNames("<fim-prefix>", "<fim-suffix>", "<fim-middle>", end_names=("<fim-pad>",)),
    # Code Llama, in both spellings
    FimTokenNames("▁<PRE>", "▁<SUF>", "▁<MID>", end_names=("▁<EOT>",)),
    FimTokenNames("<PRE>", "<SUF>", "<MID>", end_names=("<EOT>",)),
    # DeepSeek Coder
    FimTokenNames("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # Codestral
    FimTokenNames("[PREFIX]", "[SUFFIX]", None, end_names=("[MIDDLE]",), suffix_first=True),
    # GLM 4
    FimTokenNames("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    # Seed-Coder
    FimTokenNames("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    # Falcon-H1 Coder
    FimTokenNames("<|prefix|>", "<|suffix|>", "<|middle|>"),
)  # fmt: skip
# Further tokens at the end of a middle, for models with an incomplete config.
COMMON_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>")
FIM_TOKEN_NAMES = {name for family in FIM_FAMILIES for name in family.all_names} | {*COMMON_END_NAMES}
NO_FIM_ERROR = "The model's vocabulary has no fill-in-the-middle tokens; use a code model, such as Qwen2.5-Coder."
# llama.cpp's texts for missing names, and between chunks for a missing token.
DEFAULT_REPOSITORY = "myproject\n"
DEFAULT_FILE = "filename\n"
DEFAULT_CHUNK_FILE = "tmp"
CHUNK_SEPARATOR = "\n\n--- snippet ---\n\n"


@dataclass(frozen=True)
class FimTokenIds:
    """The ids of a vocabulary's FIM tokens, and of all tokens at the end of a text; see ``FimTokenNames``."""

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    file: int | None
    end_ids: tuple[int, ...]
    suffix_first: bool
    fim_names: tuple[str, ...]  # tokens used only in infills


def find_fim_tokens(token_ids: Mapping[str, int]) -> FimTokenIds | None:
    """Return the FIM tokens among ``token_ids``, name -> id, or None; of several families, the family with the most."""
    matching_families = [
        fim_family for fim_family in FIM_FAMILIES if all(name in token_ids for name in fim_family.required_names)
    ]
    if not matching_families:
        return None
    best_family = max(matching_families, key=lambda fim_family: sum(name in token_ids for name in fim_family.all_names))
    present_names = [name for name in best_family.all_names if name in token_ids]
    return FimTokenIds(
        prefix=token_ids[best_family.prefix],
        suffix=token_ids[best_family.suffix],
        middle=token_ids.get(best_family.middle or ""),
        repository=token_ids.get(best_family.repository or ""),
        file=token_ids.get(best_family.file or ""),
        end_ids=tuple(sorted({token_ids[name] for name in (*present_names, *COMMON_END_NAMES) if name in token_ids})),
        suffix_first=best_family.suffix_first,
        fim_names=tuple(present_names),
    )


class FileChunk(NamedTuple):
    """A part of another file."""

    text: str
    filename: str = DEFAULT_CHUNK_FILE


@dataclass(frozen=True)
class InfillPrompt:
    """A prompt for the text between ``prefix`` and ``suffix``.

    file_chunks: parts of other files; if they don't fit, the first chunks are left out.
    beginning: the beginning of the text.
    """

    prefix: str
    suffix: str
    file_chunks: tuple[FileChunk, ...] = ()
    beginning: str = ""

    def __len__(self) -> int:
        """Return the number of characters."""
        return self.needed_characters + sum(len(chunk.text) + len(chunk.filename) for chunk in self.file_chunks)

    @property
    def needed_characters(self) -> int:
        """The length of the required parts in characters."""
        return len(self.prefix) + len(self.suffix) + len(self.beginning)


class PartEncoder(Protocol):
    """Encodes a part of a prompt without special tokens; ``at_text_start``: as the beginning of a text."""

    def __call__(self, text: str, at_text_start: bool = False) -> np.ndarray: ...


class InfillTokens(NamedTuple):
    """The tokens of an infill prompt, (n,) int64; from ``answer_start`` on, they are the beginning of the answer."""

    ids: np.ndarray
    answer_start: int


def encode_infill(
    infill: InfillPrompt, fim: FimTokenIds | None, encode: PartEncoder, prefix_ids: Sequence[int], max_tokens: float
) -> InfillTokens:
    """Return the prompt in llama.cpp's layout; raises PromptError if the vocabulary has no FIM tokens.

    Args:
        prefix_ids: the tokens at the start of every text.
        max_tokens: maximum length of the prompt in tokens; chunks are left out until it fits.
    """
    if not fim:
        raise PromptError(NO_FIM_ERROR)
    leading_ids = [*prefix_ids]
    if fim.repository is not None:
        leading_ids += [fim.repository, *encode(DEFAULT_REPOSITORY)]
    encoded_chunks = list[list[int]]()
    for file_chunk in infill.file_chunks:
        chunk_header = (
            [*encode(CHUNK_SEPARATOR)] if fim.file is None else [fim.file, *encode(f"{file_chunk.filename}\n")]
        )
        encoded_chunks.append([*chunk_header, *encode(file_chunk.text)])
    # Some tokenizers put a space in front of a text; models are trained with this space before the prefix.
    fim_prefix_ids = [fim.prefix, *encode(infill.prefix, at_text_start=True)]
    fim_suffix_ids = [fim.suffix, *encode(infill.suffix)]
    prompt_parts = [*fim_suffix_ids, *fim_prefix_ids] if fim.suffix_first else [*fim_prefix_ids, *fim_suffix_ids]
    if fim.file is not None:
        prompt_parts = [fim.file, *encode(DEFAULT_FILE), *prompt_parts]
    if fim.middle is not None:
        prompt_parts.append(fim.middle)
    beginning_ids = encode(infill.beginning)
    chunk_room = max_tokens - len(leading_ids) - len(prompt_parts) - len(beginning_ids)
    chunk_sizes = itertools.accumulate(map(len, reversed(encoded_chunks)))
    dropped_chunks = sum(chunk_size > chunk_room for chunk_size in chunk_sizes)
    prompt_ids = [*leading_ids, *itertools.chain(*encoded_chunks[dropped_chunks:]), *prompt_parts]
    return InfillTokens(np.array([*prompt_ids, *beginning_ids], dtype=np.int64), len(prompt_ids))


def drop_first_chunks(infill: InfillPrompt, max_characters: float) -> InfillPrompt:
    """Return a prompt without the first chunks, as far as needed to fit into ``max_characters``."""
    # The separator of chunks takes at least a token.
    chunk_sizes = itertools.accumulate(len(file_chunk.text) + 1 for file_chunk in reversed(infill.file_chunks))
    dropped_chunks = sum(chunk_size > max_characters - infill.needed_characters for chunk_size in chunk_sizes)
    return replace(infill, file_chunks=infill.file_chunks[dropped_chunks:])
