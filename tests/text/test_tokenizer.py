"""Encoding and decoding against Hugging Face's tokenizer."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import PROMPTS, Reference
from hypothesis import given, settings
from hypothesis import strategies as st

from ovspec.base.errors import OvspecError
from ovspec.text.pairing import SAMPLE_TEXTS
from ovspec.text.tokenizer import Tokenizer, WindowDetokenizer, compile_tokenizer, make_byte_vocabulary
from ovspec.text.tokenizer_files import DecodingStep, ModelVocabulary, TokenizerFile


@pytest.fixture(scope="module")
def tokenizer(pair: Path) -> Tokenizer:
    return Tokenizer(pair)


def test_encodes_like_hugging_face(tokenizer: Tokenizer, reference: Reference) -> None:
    for text in [*SAMPLE_TEXTS, *PROMPTS]:
        assert tokenizer.encode(text).tolist() == reference.tokenizer(text)["input_ids"]


TEXT = st.text(max_size=40).filter(lambda text: not text.endswith("\0"))


@settings(max_examples=300, deadline=None)
@given(text=TEXT)
def test_encodes_any_text_like_hugging_face(tokenizer: Tokenizer, reference: Reference, text: str) -> None:
    assert tokenizer.encode(text).tolist() == reference.tokenizer(text)["input_ids"]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 4095), max_size=30))
def test_decodes_any_tokens_like_hugging_face(tokenizer: Tokenizer, reference: Reference, ids: list[int]) -> None:
    assert tokenizer.decode(ids) == reference.tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(text=TEXT)
def test_streams_whole_characters_only(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = tokenizer.make_detokenizer()
    pieces = [detokenizer.push(int(token)) for token in tokenizer.encode(text, special=False)]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces) or "\N{REPLACEMENT CHARACTER}" in text
    assert "".join(pieces) + detokenizer.flush() == text


def test_the_text_of_each_token(tokenizer: Tokenizer, reference: Reference, pair: Path) -> None:
    """Special tokens are written out, and bytes of a part of a character are told apart."""
    ids = tokenizer.encode("def f(\N{SNOWMAN}\N{GRINNING FACE}):").tolist()
    whole = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert whole == reference.tokenizer.decode(ids)
    assert "\\x" in "".join(map(tokenizer.token_text, ids)), "no character is split into tokens here"
    eos = reference.tokenizer.eos_token_id
    assert tokenizer.token_text(eos) == reference.tokenizer.decode([eos]) != ""
    window = Tokenizer(pair)
    window.vocabulary = None
    assert [window.token_text(token) for token in ids[:2]] == [tokenizer.token_text(token) for token in ids[:2]]


def test_window_detokenizer_agrees(tokenizer: Tokenizer, pair: Path) -> None:
    """The window detokenizer is used if the bytes of a vocabulary's tokens aren't known."""
    for text in [*SAMPLE_TEXTS[:11], *PROMPTS[:3]]:
        ids = tokenizer.encode(text).tolist()
        window = WindowDetokenizer(compile_tokenizer(pair / "openvino_detokenizer.xml").create_infer_request())
        pieces = [window.push(token) for token in ids]
        assert "".join(pieces) + window.flush() == tokenizer.decode(ids) == text


def test_sentencepiece_vocabulary_is_bytes() -> None:
    data: dict[str, Any] = {
        "model": {"vocab": {"<unk>": 0, "<s>": 1, "<0xE2>": 2, "▁the": 3, "é": 4}},
        "added_tokens": [{"id": 1, "content": "<s>", "special": True}],
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip"}],
        },
    }
    assert make_byte_vocabulary(msgspec.convert(data, TokenizerFile)) == [b"<unk>", b"", b"\xe2", b" the", "é".encode()]
    assert make_byte_vocabulary(TokenizerFile(ModelVocabulary({"a": 0}), DecodingStep("WordPiece"))) is None


def test_byte_vocabulary_covers_every_byte(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocabulary
    singles = {token for token in tokenizer.vocabulary if token is not None and len(token) == 1}
    assert singles == {bytes([b]) for b in range(256)}


def test_no_text_is_longer_than_its_tokens_can_spell(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocabulary
    longest = max(filter(None, tokenizer.vocabulary), key=len).decode()
    for text in [*SAMPLE_TEXTS, *PROMPTS, 100 * longest]:
        assert len(text) <= tokenizer.max_characters(len(tokenizer.encode(text)))


def test_a_text_that_takes_long_holds_up_no_other(pair: Path) -> None:
    tokenizer, encoding, may_end = Tokenizer(pair), threading.Event(), threading.Event()

    class Slow:
        def set_input_tensor(self, *_: Any) -> None: ...

        def infer(self) -> None:
            encoding.set()
            may_end.wait(60)

        def get_tensor(self, _: str) -> Any:
            return SimpleNamespace(data=np.zeros((1, 1)))

    tokenizer._idle_requests = [Slow()]  # type: ignore[list-item]
    thread = threading.Thread(target=tokenizer.encode, args=("a",))
    thread.start()
    assert encoding.wait(60) and len(tokenizer.encode("b"))
    may_end.set()
    thread.join()


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(OvspecError, match="not valid Unicode"):
        tokenizer.encode("a\ud800")


def test_a_nul_at_the_end_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(OvspecError, match="NUL"):
        tokenizer.encode("a\0")
