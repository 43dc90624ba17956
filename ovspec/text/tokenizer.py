"""Text to token ids and back: the OpenVINO tokenizer and the byte vocabulary."""

from __future__ import annotations

import codecs
import functools
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import openvino as ov
import openvino_tokenizers

from ovspec.errors import OvspecError
from ovspec.files import read_json
from ovspec.ir.compile import check_weights, last_line
from ovspec.ir.device import core
from ovspec.text.vocabulary import TOKENIZER_FILE, known_ids, tokens_by_id


@functools.cache
def _string_ops() -> ov.Core:
    """The core, knowing the string operations that tokenizer IRs are made of."""
    core().add_extension(str(openvino_tokenizers._ext_path))
    return core()


def _request(path: Path) -> ov.InferRequest:
    if not path.is_file():
        raise OvspecError(f"{path.parent}: no {path.name} in it; export the model again with openvino-tokenizers.")
    check_weights(path)
    try:
        return _string_ops().compile_model(path, "CPU").create_infer_request()
    except RuntimeError as error:
        raise OvspecError(f"{path}: cannot be compiled ({last_line(error)}); export it again.") from None


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable bytes stand for themselves, the others follow at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def byte_vocabulary(tokenizer_json: dict[str, Any]) -> list[bytes | None] | None:
    """What each id adds to the text, from a ``tokenizer.json``; None for ids that have no token.

    Special tokens add nothing. Returns None for kinds of decoder that do not map tokens to bytes one by one.
    """
    model, decoder = tokenizer_json.get("model", {}), tokenizer_json.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    pieces = model.get("vocab")
    if not isinstance(pieces, dict):
        return None
    if kinds == {"ByteLevel"}:
        alphabet = byte_level_alphabet()

        def to_bytes(piece: str) -> bytes:
            return bytes(alphabet[c] for c in piece) if alphabet.keys() >= set(piece) else piece.encode()

    elif kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "ByteFallback" in kinds:

        def to_bytes(piece: str) -> bytes:
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    else:
        return None
    spelt = {index: to_bytes(piece) for piece, index in pieces.items()}
    for token in tokenizer_json.get("added_tokens", []):
        spelt[token["id"]] = b"" if token.get("special") else token["content"].encode()
    return [spelt.get(index) for index in range(max(spelt) + 1)]


def bytes_of(vocabulary: list[bytes | None], token: int) -> bytes:
    """What ``token`` adds to the text; nothing for an id without a token."""
    return (vocabulary[token] if token < len(vocabulary) else None) or b""


class Tokenizer:
    """The tokenizer of an exported model; ``folder`` holds OpenVINO's and mostly ``tokenizer.json``, for the bytes.

    Raises OvspecError where a file is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._encoder = _request(folder / "openvino_tokenizer.xml")
        self._lock = threading.Lock()  # one request serves all threads
        tokenizer_json = read_json(folder / TOKENIZER_FILE)
        added = tokenizer_json.get("added_tokens", [])
        self._special = {token["id"]: token["content"].encode() for token in added if token.get("special")}
        self.vocabulary = byte_vocabulary(tokenizer_json)
        self.known = known_ids(tokens_by_id(tokenizer_json))
        empty, one = self._encode(""), self._encode("a")
        # What encoding puts around every text (BOS before it for some models, EOS after it for few).
        self._prefix = next((i for i, (a, b) in enumerate(zip(empty, one, strict=False)) if a != b), len(empty))
        self._suffix = len(empty) - self._prefix
        # SentencePiece models put a space in front of every text they encode.
        self._adds_space = self.decode(self.encode("a", special=False)) == " a"

    def encode(self, text: str, special: bool = True) -> np.ndarray:
        """(n,) int64; ``special``: with the BOS and EOS that the model's tokenizer adds.

        Raises OvspecError for half of a surrogate pair, or a NUL at the end, which OpenVINO's strings lose.
        """
        if text.endswith("\0"):
            raise OvspecError("The prompt ends with a NUL character, which would be lost; remove it.")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise OvspecError("The prompt is not valid Unicode: it holds half of a surrogate pair.") from None
        ids = self._encode(text)
        return ids if special else ids[self._prefix : len(ids) - self._suffix]

    def encode_more(self, text: str) -> np.ndarray:
        """(n,) int64: ``text`` as it goes on from another one, without BOS and without a space in front."""
        ids = self.encode(text, special=False)
        if not self._adds_space:
            return ids
        before, both = self.encode("\n", special=False), self.encode("\n" + text, special=False)
        return both[len(before) :] if np.array_equal(both[: len(before)], before) else ids

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ``tokens`` as it stands inside a longer one; special tokens left out."""
        detokenizer = self.detokenizer()
        return "".join([detokenizer.push(int(token)) for token in tokens]) + detokenizer.flush()

    def spell(self, tokens: np.ndarray) -> str | None:
        """The text of ``tokens`` (n,) with special tokens written out, as in chat templates; None if unknown."""
        vocabulary = self.vocabulary
        if not vocabulary:
            return None
        try:
            return b"".join(self._special.get(t) or bytes_of(vocabulary, t) for t in tokens.tolist()).decode()
        except UnicodeDecodeError:
            return None

    def detokenizer(self) -> Detokenizer:
        if self.vocabulary:
            return ByteDetokenizer(self.vocabulary)
        return WindowDetokenizer(_request(self.folder / "openvino_detokenizer.xml"))

    def _encode(self, text: str) -> np.ndarray:
        with self._lock:
            self._encoder.set_input_tensor(0, ov.Tensor([text]))
            self._encoder.infer()
            return self._encoder.get_tensor("input_ids").data[0].astype(np.int64)


class Detokenizer(Protocol):
    """Text as it grows; never half a character."""

    def push(self, token: int, without: int = 0) -> str:
        """The text that ``token`` completes, which may be none; ``without`` its first bytes."""
        ...

    def flush(self) -> str:
        """What is left at the end: a replacement character for a character that was cut off."""
        ...


class ByteDetokenizer:
    """Tokens are bytes; UTF-8 says where a character ends."""

    def __init__(self, vocabulary: list[bytes | None]) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int, without: int = 0) -> str:
        return self._utf8.decode(bytes_of(self._vocabulary, token)[without:])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For vocabularies that are not bytes: decode a window that slides, print what it adds.

    Nothing can be left out of a token.
    """

    def __init__(self, request: ov.InferRequest) -> None:
        self._request = request
        self._tokens: list[int] = []
        self._start = 0  # tokens before it can't change the text of later ones
        self._shown = ""  # text of the window that was returned

    def _window(self) -> str:
        ids = np.array([self._tokens[self._start :]], dtype=np.int64)
        self._request.set_input_tensor(0, ov.Tensor(ids))
        self._request.infer()
        return str(self._request.get_output_tensor(0).str_data[0])

    def push(self, token: int, without: int = 0) -> str:
        assert not without
        self._tokens.append(token)
        text = self._window()
        if len(text) <= len(self._shown) or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new = text[len(self._shown) :]
        self._start = max(self._start, len(self._tokens) - 8)
        self._shown = self._window()
        return new

    def flush(self) -> str:
        text = self._window() if self._tokens else ""
        new, self._shown = text[len(self._shown) :], text
        return new
