"""Text to token ids and back: the OpenVINO tokenizer and the byte vocabulary."""

from __future__ import annotations

import codecs
import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_tokenizers

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_dataclass, require_model_path
from ovspec.ir.compile import check_weights_file, last_error_line
from ovspec.ir.device import openvino_core
from ovspec.text.infill import FIM_TOKEN_NAMES, find_fim_tokens
from ovspec.text.tokenizer_files import TOKENIZER_FILE, DecodingStep, TokenizerFile
from ovspec.text.vocabulary import make_known_token_ids

LONG_TEXT_CHARACTERS = 100_000  # characters of a long text, which takes milliseconds to encode
# A text may have this many times the characters of its tokens, because a normaliser may shorten it.
NORMALIZER_MARGIN = 4


@functools.cache
def openvino_core_with_strings() -> ov.Core:
    """Return the OpenVINO core with the string operations for tokenizer IRs."""
    openvino_core().add_extension(str(openvino_tokenizers._ext_path))
    return openvino_core()


def compile_tokenizer(path: Path) -> ov.CompiledModel:
    if not path.is_file():
        raise OvspecError(
            f"{path.parent} has no {path.name}; install the package openvino-tokenizers, and export the model again."
        )
    check_weights_file(path)
    try:
        return openvino_core_with_strings().compile_model(path, "CPU")
    except RuntimeError as error:
        raise OvspecError(f"{path}: cannot be compiled ({last_error_line(error)}); export the model again.") from None


def make_byte_level_alphabet() -> dict[str, int]:
    """Return character -> byte of byte-level BPE (GPT-2): printable bytes are themselves, the others start at 256."""
    printable_bytes = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other_bytes = [byte for byte in range(256) if byte not in printable_bytes]
    return {chr(byte): byte for byte in printable_bytes} | {chr(256 + i): byte for i, byte in enumerate(other_bytes)}


def make_byte_vocabulary(tokenizer: TokenizerFile) -> list[bytes | None] | None:
    """Return the bytes added to the text by each id: b"" for special tokens, None for ids without a token.

    Returns None for the whole vocabulary if a token's bytes depend on other tokens.
    """
    decoder = tokenizer.decoder or DecodingStep()
    piece_ids = tokenizer.model.vocab
    step_types = {decoding_step.type for decoding_step in decoder.decoders or [decoder]}
    if not isinstance(piece_ids, dict):
        return None
    if step_types == {"ByteLevel"}:
        byte_of_character = make_byte_level_alphabet()

        def piece_to_bytes(piece: str) -> bytes:
            if byte_of_character.keys() >= set(piece):
                return bytes(byte_of_character[character] for character in piece)
            return piece.encode()

    elif step_types <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "ByteFallback" in step_types:

        def piece_to_bytes(piece: str) -> bytes:
            if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
                return bytes([int(piece[3:5], 16)])
            return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    else:
        return None
    bytes_by_id = {token_id: piece_to_bytes(piece) for piece, token_id in piece_ids.items()}
    for token in tokenizer.added_tokens:
        bytes_by_id[token.id] = b"" if token.special else token.content.encode()
    return [bytes_by_id.get(token_id) for token_id in range(max(bytes_by_id, default=-1) + 1)]


def look_up_bytes(vocabulary: list[bytes | None], token: int) -> bytes:
    """Return the bytes added to the text by ``token``; empty for an id without a token."""
    if token >= len(vocabulary):
        return b""
    return vocabulary[token] or b""


class Tokenizer:
    """The tokenizer of an exported model; raises OvspecError if a file in ``folder`` is missing or broken.

    The bytes of each token come from ``tokenizer.json``, if there is one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._encoder = compile_tokenizer(folder / "openvino_tokenizer.xml")
        self._idle_requests: list[ov.InferRequest] = []  # as many as threads have encoded at the same time
        tokenizer_file = read_dataclass(TokenizerFile, folder / TOKENIZER_FILE)
        self._special_token_bytes = {token.id: token.content.encode() for token in tokenizer_file.special_tokens}
        self.added_tokens = {token.content: token.id for token in tokenizer_file.added_tokens}
        self.vocabulary = make_byte_vocabulary(tokenizer_file)
        tokens_by_id = tokenizer_file.tokens_by_id()
        self.known_ids = make_known_token_ids(tokens_by_id)
        self.fim_tokens = find_fim_tokens(
            {
                token_text: token_index
                for token_index, token_text in tokens_by_id.items()
                if token_text in FIM_TOKEN_NAMES
            }
        )
        self._longest_token_length = max(map(len, tokens_by_id.values()), default=1)
        empty_ids = self._encode("")
        letter_ids = self._encode("a")
        # Tokens put around every text: BOS before it for some models, EOS after it for a few.
        id_pairs = enumerate(zip(empty_ids, letter_ids, strict=False))
        self._prefix_length = next((token_index for token_index, (a, b) in id_pairs if a != b), len(empty_ids))
        self._suffix_length = len(empty_ids) - self._prefix_length
        # SentencePiece models put a space in front of every text.
        self._adds_space = self.decode(self.encode("a", special=False)) == " a"

    def max_characters(self, token_count: int) -> int:
        """Return an upper limit for the characters of ``token_count`` tokens."""
        return NORMALIZER_MARGIN * self._longest_token_length * token_count

    def encode(self, text: str, special: bool = True) -> np.ndarray:
        """Return the token ids of ``text``, (n,) int64; ``special`` keeps the tokenizer's BOS and EOS.

        Raises OvspecError if ``text`` contains half of a surrogate pair, or ends with a NUL, because OpenVINO drops it.
        """
        if text.endswith("\0"):
            raise OvspecError("The prompt ends with a NUL character, which would be lost; remove this character.")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise OvspecError(
                "The prompt is not valid Unicode: it contains an unpaired surrogate; remove the surrogate."
            ) from None
        ids = self._encode(text)
        return ids if special else ids[self._prefix_length : len(ids) - self._suffix_length]

    def encode_continuation(self, text: str) -> np.ndarray:
        """Return the token ids of ``text`` as the continuation of another text, (n,) int64: no BOS, no added space."""
        ids = self.encode(text, special=False)
        if not self._adds_space:
            return ids
        line_ids = self.encode("\n", special=False)
        joined_ids = self.encode("\n" + text, special=False)
        if np.array_equal(joined_ids[: len(line_ids)], line_ids):
            return joined_ids[len(line_ids) :]
        return ids

    def encode_plain_text(self, text: str, at_text_start: bool = False) -> np.ndarray:
        """Return the token ids of ``text``, (n,) int64; names of special tokens in it are encoded as ordinary text.

        Unless ``at_text_start``, the text continues another text, as in ``encode_continuation``.
        """
        cut_positions = [0, *(name.start() + 1 for name in self._special_name_pattern.finditer(text)), len(text)]
        text_parts = [text[part_start:part_end] for part_start, part_end in itertools.pairwise(cut_positions)]
        encoded_parts: list[np.ndarray] = []
        if at_text_start:
            encoded_parts.append(self.encode(text_parts.pop(0), special=False))
        return np.concatenate([*encoded_parts, *map(self.encode_continuation, text_parts)])

    @functools.cached_property
    def _special_name_pattern(self) -> re.Pattern[str]:
        """Finds the start of the names of special and FIM tokens."""
        special_names = {name.decode() for name in self._special_token_bytes.values()}
        if self.fim_tokens:
            special_names.update(self.fim_tokens.fim_names)
        return re.compile(
            "|".join(f"(?={re.escape(name)})" for name in sorted(special_names) if len(name) > 1) or "(?!)"
        )

    @functools.cached_property
    def prefix_ids(self) -> list[int]:
        """The tokens put in front of every text."""
        return self._encode("")[: self._prefix_length].tolist()

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of ``tokens`` as it reads inside a longer text, without special tokens."""
        detokenizer = self.make_detokenizer()
        return "".join([detokenizer.push(int(token)) for token in tokens]) + detokenizer.flush()

    def decode_with_special(self, tokens: np.ndarray) -> str | None:
        """Return the text of ``tokens`` (n,) with special tokens written out, as in chat templates.

        Returns None without a byte vocabulary, or if the bytes are not valid UTF-8.
        """
        if not self.vocabulary:
            return None
        try:
            return b"".join(self.token_bytes(token) for token in tokens.tolist()).decode()
        except UnicodeDecodeError:
            return None

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; for a special token, its name."""
        if token in self._special_token_bytes:
            return self._special_token_bytes[token]
        if self.vocabulary:
            return look_up_bytes(self.vocabulary, token)
        return self.decode([token]).encode()

    def token_text(self, token: int) -> str:
        """Return the text of a token; a special token is written out, and part of a character as ``\\xe2``."""
        return self.token_bytes(token).decode("utf-8", "backslashreplace")

    def contains_special_name(self, text: str) -> bool:
        """Return whether ``text`` has the name of a special token, as a rendered chat template does."""
        return any(name in text.encode() for name in self._special_token_bytes.values())

    def make_detokenizer(self, mark_by_token_id: Mapping[int, str] | None = None) -> Detokenizer:
        """Return a new detokenizer; ``mark_by_token_id``: texts of tokens in place of their own."""
        if self.vocabulary:
            return ByteDetokenizer(self.vocabulary, mark_by_token_id)
        return WindowDetokenizer(self._detokenizer_model.create_infer_request())

    @functools.cached_property
    def _detokenizer_model(self) -> ov.CompiledModel:
        return compile_tokenizer(require_model_path(self.folder) / "openvino_detokenizer.xml")

    def _encode(self, text: str) -> np.ndarray:
        try:
            infer_request = self._idle_requests.pop()
        except IndexError:
            infer_request = self._encoder.create_infer_request()
        infer_request.set_input_tensor(0, ov.Tensor([text]))
        infer_request.infer()
        ids = infer_request.get_tensor("input_ids").data[0].astype(np.int64)
        if len(text) <= LONG_TEXT_CHARACTERS:  # otherwise it would keep the text's memory in use
            self._idle_requests.append(infer_request)
        return ids


class ByteDetokenizer:
    """Turns tokens into text one at a time, never returning half a character, by their bytes."""

    def __init__(self, vocabulary: list[bytes | None], mark_by_token_id: Mapping[int, str] | None = None) -> None:
        self._vocabulary = vocabulary
        self._mark_by_token_id = mark_by_token_id or {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int, skipped_bytes: int = 0) -> str:
        """Return the text completed by ``token``, possibly empty, without the token's first ``skipped_bytes``."""
        if token in self._mark_by_token_id:
            return self.flush() + self._mark_by_token_id[token]
        return self._utf8.decode(look_up_bytes(self._vocabulary, token)[skipped_bytes:])

    def flush(self) -> str:
        """Return the remaining text at the end; a cut-off character becomes a replacement character."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """A detokenizer without a byte vocabulary: decodes a sliding window of tokens and returns the added text.

    It can't skip bytes of a token: ``skipped_bytes`` must be 0.
    """

    def __init__(self, infer_request: ov.InferRequest) -> None:
        self._infer_request = infer_request
        self._tokens: list[int] = []
        self._window_start = 0  # tokens before this index no longer affect later text
        self._returned_text = ""  # the part of the window's text returned so far

    def _decode_window(self) -> str:
        ids = np.array([self._tokens[self._window_start :]], dtype=np.int64)
        self._infer_request.set_input_tensor(0, ov.Tensor(ids))
        self._infer_request.infer()
        return str(self._infer_request.get_output_tensor(0).str_data[0])

    def push(self, token: int, skipped_bytes: int = 0) -> str:
        assert not skipped_bytes
        self._tokens.append(token)
        window_text = self._decode_window()
        if len(window_text) <= len(self._returned_text) or window_text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new_text = window_text[len(self._returned_text) :]
        self._window_start = max(self._window_start, len(self._tokens) - 8)
        self._returned_text = self._decode_window()
        return new_text

    def flush(self) -> str:
        if not self._tokens:
            return ""
        returned_length = len(self._returned_text)
        self._returned_text = self._decode_window()
        return self._returned_text[returned_length:]


Detokenizer = ByteDetokenizer | WindowDetokenizer
