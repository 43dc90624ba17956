"""Tokenizers built from GGUF metadata give llama.cpp's ids, in Hugging Face's tokenizers and in OpenVINO's."""

from __future__ import annotations

import json
import random
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import USERS_CACHE
from install import python_of
from openvino_tokenizers.tokenizer_pipeline import BPETokenizationStep, TokenizerPipeline
from ovspec_export import gguf_tokenizer, worker
from ovspec_export.gguf_file import read_shard_header
from ovspec_export.gguf_pretokenizers import PRETOKENIZERS_BY_NAMES
from ovspec_export.gguf_tokenizer import read_end_ids
from transformers import AutoTokenizer

from ovspec.base.errors import OvspecError
from ovspec.text.tokenizer import Tokenizer, make_byte_level_alphabet

MODELS = USERS_CACHE / "downloads" / "llama.cpp" / "models"
QUICK = ["deepseek-coder"]
SLOW = [
    "llama-spm",
    "falcon",
    "mpt",
    "refact",
    "starcoder",
    "phi-3",
    "deepseek-llm",
    "qwen2",
    "qwen35",
    "llama-bpe",
    "command-r",
]
SLOW += ["gemma-4", "gpt-2"]
OWN_PRE = [(name, None) for name in ("llama-spm", "baichuan", "gemma-4", "aquila", "deepseek-llm", "llama-bpe")]
OTHER_PRE = [("gpt-2", names.split()[0]) for names, row in PRETOKENIZERS_BY_NAMES.items() if row.spelt_in_bytes]
LLAMA_CPP = """
import json, sys
from llama_cpp import Llama, llama_vocab_is_eog
texts, llama = json.load(sys.stdin), Llama(sys.argv[1], vocab_only=True, verbose=False)
ends = [i for i in range(llama.n_vocab()) if llama_vocab_is_eog(llama._model.vocab, i)]
print(json.dumps([ends, [llama.tokenize(text.encode(), True, True) for text in texts]]))
"""
PIECES = (
    "the Hello WORLD camelCase HTTPServer it's IT'S we'Ve I'D '' CAFÉ aÉb Größe нещо НА Ελληνικά עברית العربية हिन्दी "
    "ไทย ភាសា 中文字 日本語カタカナ 한국어 ㄅㄆ 12 123 1234 12345678 3.14 1,000,000 ²³ ½ Ⅷ ٣٤٥ １２３ http://a.b/c?d=e "
    "foo_bar += /*c*/ --- ... ?! `x` ~^ <tag> {[(1)]} 🚀 👨\u200d👩\u200d👧 e\u0301 “q” » – 、 ！ ： ﬁ Ａｂ 𝒜 𐐀"
)
SPACES = [" ", " ", " ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\x85", "\xa0", "\u2003", "\u2028", "\u3000", " \n"]

# Words that are tokens which no merges make; OpenVINO's BPE doesn't take such words whole (588 of Llama 3's 128,000).
NOT_IN_OPENVINO = {"llama-bpe": ["Cửa Việt"]}

BYTES = list(make_byte_level_alphabet())
BYTE_LEVEL: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": [*BYTES, "ab", "11", "<|im_start|>", "<|im_end|>", "<tool>"],
    "tokenizer.ggml.token_type": [1] * 258 + [3, 3, 4],
    "tokenizer.ggml.merges": ["a b", "1 1"],
    "tokenizer.ggml.eos_token_id": 259,
}
SENTENCEPIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab", "ab", "▁a"],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 5,
    "tokenizer.ggml.scores": [0.0] * 259 + [-9.0, -9.0, -9.0, -2.0, -1.0],
}


# What the worker changes of OpenVINO's tokenizers.
PATCHED = {
    TokenizerPipeline: ["merge_regex_split_steps"],
    BPETokenizationStep: ["from_hf_json", "get_ov_subgraph", "finalize"],
}


def metadata(name: str) -> dict[str, Any]:
    file = MODELS / f"ggml-vocab-{name}.gguf"
    if not file.is_file():
        pytest.skip(f"{file} isn't there: llama.cpp's vocabularies")
    return read_shard_header(file)[0]


def build_tokenizer(read: dict[str, Any], name: str) -> Any:
    return gguf_tokenizer.build_gguf_tokenizer(read, name)


def vectors(name: str) -> list[tuple[str, list[int]]]:
    """Return texts with llama.cpp's ids, without BOS."""
    file = MODELS / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{file}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    rows = [[int(index) for index in line.split()] for line in Path(f"{file}.out").read_text().splitlines()]
    return list(zip(texts, rows, strict=False))


def converted(tokenizer: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """Return OpenVINO's tokenizer, made of ``tokenizer`` as an export makes it."""
    tokenizer.save_pretrained(folder)
    for kind, names in PATCHED.items():
        for name in names:  # restored after the worker's changes
            monkeypatch.setattr(kind, name, vars(kind)[name])
    worker.convert_tokenizer(str(folder), str(folder), False)
    return Tokenizer(folder)


def test_ids_of_sentencepiece_equal_llama_cpps() -> None:
    """Of the tokenizer from which an export makes OpenVINO's, which takes longer."""
    made = build_tokenizer(metadata("llama-spm"), "llama-spm")
    cases = vectors("llama-spm")
    assert len(cases) > 40
    assert [made(text, add_special_tokens=False)["input_ids"] for text, _ in cases] == [ids for _, ids in cases]


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_ids_equal_llama_cpps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build_tokenizer(metadata(name), name)
    cases = vectors(name)
    assert len(cases) > 40
    assert [made(text, add_special_tokens=False)["input_ids"] for text, _ in cases] == [ids for _, ids in cases]
    ours = converted(made, tmp_path, monkeypatch)
    differ = [text for text, ids in cases if ours.encode(text, special=False).tolist() != ids]
    assert differ == NOT_IN_OPENVINO.get(name, [])
    assert ours.vocabulary
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert [again(text)["input_ids"] for text, _ in cases] == [made(text)["input_ids"] for text, _ in cases]
    assert not again.clean_up_tokenization_spaces
    assert (again.bos_token, again.eos_token) == (made.bos_token, made.eos_token)
    assert len(again) == len(made)


def test_joined_digits_are_noticed() -> None:
    made = build_tokenizer(metadata("starcoder") | {"tokenizer.ggml.pre": "gpt-2"}, "starcoder")
    assert any(made(text, add_special_tokens=False)["input_ids"] != ids for text, ids in vectors("starcoder"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pre"), [*OWN_PRE, *OTHER_PRE])
def test_random_texts(name: str, pre: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with other pre-tokenizers than the vocabulary's own, for which there are no test vectors."""
    python = python_of("llamacpp")
    if not python.is_file():
        pytest.skip("llama.cpp isn't installed; run scripts/bench/peers/install.py llamacpp")
    read = metadata(name)
    file = MODELS / f"ggml-vocab-{name}.gguf"
    if pre:
        key, old = b"tokenizer.ggml.pre", read["tokenizer.ggml.pre"].encode()
        data = file.read_bytes()
        parts = [
            struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(text)) + text for text in (old, pre.encode())
        ]
        assert data.count(parts[0]) == 1
        file = tmp_path / "patched.gguf"
        file.write_bytes(data.replace(parts[0], parts[1]))
        read["tokenizer.ggml.pre"] = pre
    draw = random.Random(f"{name} {pre}")
    texts = [
        "".join(draw.choice(draw.choice((PIECES.split(), SPACES))) for _ in range(draw.randint(1, 16)))
        for _ in range(1500)
    ]
    command = [str(python), "-c", LLAMA_CPP, str(file)]
    told = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True).stdout
    ends, expected = json.loads(told)
    made = build_tokenizer(read, name)
    assert sorted(read_end_ids(read)) == ends
    assert [text for text, ids in zip(texts, expected, strict=True) if made(text)["input_ids"] != ids] == []
    ours = converted(made, tmp_path / "made", monkeypatch)
    assert [text for text, ids in zip(texts, expected, strict=True) if ours.encode(text).tolist() != ids] == []


def test_words_are_cut_one_expression_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO's conversion alone would make one expression of all."""
    made = build_tokenizer(BYTE_LEVEL, "small")
    assert made.convert_ids_to_tokens(made("ab 11<tool>ab<|im_end|>")["input_ids"]) == [
        *("ab", "Ġ", "1", "1", "<tool>", "ab", "<|im_end|>")
    ]
    texts = ["ab 11", " ab<tool> 1<|im_end|>ab", "é 1 1\n\n11"]
    ours = converted(made, tmp_path / "apart", monkeypatch)
    assert [ours.encode(text).tolist() for text in texts] == [made(text)["input_ids"] for text in texts]
    ids = made("ab<tool><|im_end|>é")["input_ids"]
    assert ours.decode(ids) == made.decode(ids, skip_special_tokens=True) == "ab<tool>é"


def test_sentencepiece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build_tokenizer(SENTENCEPIECE, "small")
    assert made.convert_ids_to_tokens(made("abab</s>b")["input_ids"]) == ["<s>", "▁a", "b", "ab", "</s>", "▁", "b"]
    assert made.convert_ids_to_tokens(made("é")["input_ids"]) == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    ours = converted(made, tmp_path, monkeypatch)
    for text in ("abab</s>b", " é a\n", "a  b"):
        assert ours.encode(text).tolist() == made(text)["input_ids"]
    bare = build_tokenizer(
        SENTENCEPIECE | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}, "small"
    )
    assert bare.convert_ids_to_tokens(bare("ab")["input_ids"]) == ["ab"]


def with_pieces(*pieces: tuple[str, int, float], **changes: Any) -> dict[str, Any]:
    """Return SENTENCEPIECE with more tokens, each with its type and score."""
    level = SENTENCEPIECE | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    for key, values in zip(("tokens", "token_type", "scores"), zip(*pieces, strict=True), strict=True):
        level[f"tokenizer.ggml.{key}"] = [*SENTENCEPIECE[f"tokenizer.ggml.{key}"], *values]
    return level


@pytest.mark.parametrize(("space", "score"), [(" ", -1000.0), ("▁", 0.0)])
def test_runs_of_spaces_are_cut_from_the_left(
    space: str, score: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Gemma's files, tokens of many spaces share a score; newer files spell them with spaces."""
    runs = [(space * length, 4, score) for length in range(2, 32)]
    made = build_tokenizer(with_pieces(*runs, add_space_prefix=False, add_bos_token=False), "small")
    ours = converted(made, tmp_path, monkeypatch)
    for length in range(1, 100):
        text = "b" + " " * length + "a"
        # llama.cpp takes the longest run first; what is left over may go with the next letter.
        wanted = [31] * (length // 31) + [length % 31] * (length % 31 > 0)
        last = ["▁a"] if wanted[-1] == 1 else ["▁" * wanted[-1], "a"]
        assert made.tokenize(text) == ["b", *("▁" * run for run in wanted[:-1]), *last]
        assert ours.encode(text).tolist() == made(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == made.decode(made(text)["input_ids"]) == text


def test_symbols_for_spaces_are_no_runs_of_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp finds tokens of several spaces before it spells spaces, so U+2581 in a text is not one of them."""
    runs = [(" " * length, 4, -1000.0) for length in range(2, 5)]
    made = build_tokenizer(with_pieces(*runs, add_space_prefix=False, add_bos_token=False), "small")
    ours = converted(made, tmp_path, monkeypatch)
    cases = {
        "b▁▁a": ["b", "▁", "▁a"],
        "b ▁a": ["b", "▁", "▁a"],
        "b▁ a": ["b", "▁", "▁a"],
        "b▁  a": ["b", "▁", "▁▁", "a"],
        "b   ▁a": ["b", "▁▁▁", "▁a"],
        "▁▁▁": ["▁", "▁", "▁"],
        "b   a▁b": ["b", "▁▁▁", "a", "▁", "b"],
        "▁a": ["▁a"],
    }
    for text, tokens in cases.items():
        assert made.tokenize(text) == tokens
        assert ours.encode(text).tolist() == made(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == text.replace("▁", " ")


def test_normal_tokens_that_no_merge_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO would find them in every text."""
    made = build_tokenizer(with_pieces(("abba", 1, -1.5), ("aab", 4, -1000.0)), "small")
    ours = converted(made, tmp_path, monkeypatch)
    assert made.tokenize("abba") == ["▁a", "b", "b", "a"]
    for text in ("abba", "babba aab", "aabbaab"):
        assert ours.encode(text).tolist() == made(text)["input_ids"]


def test_added_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek's files have letters as tokens, which are bytes in the alphabet of byte-level BPE."""
    level = with_tokens("Ã¶", "ö")
    tokens, types = list(level["tokenizer.ggml.tokens"]), list(level["tokenizer.ggml.token_type"])
    tokens[BYTES.index("ö")], types[-1] = "unused", 4
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    made = build_tokenizer(level | changed | {"tokenizer.ggml.merges": ["Ã ¶"]}, "small")
    ours = converted(made, tmp_path, monkeypatch)
    assert made.tokenize("ö") == ["ö"]
    for text in ("ö", "Köln ö", "ö<|im_end|>é"):
        assert ours.encode(text).tolist() == made(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == text.replace("<|im_end|>", "")


def test_ids_of_roles_out_of_range() -> None:
    """llama.cpp's own test model has a padding id of 2**32 - 1."""
    made = build_tokenizer(BYTE_LEVEL | {"tokenizer.ggml.padding_token_id": 2**32 - 1}, "small")
    assert made.pad_token is None
    assert read_end_ids(BYTE_LEVEL | {"tokenizer.ggml.eot_token_id": 5000}) == [259]


def test_merges_replace_scores_that_say_nothing() -> None:
    level = SENTENCEPIECE | {"tokenizer.ggml.scores": [-1000.0] * 264}
    made = build_tokenizer(level | {"tokenizer.ggml.merges": ["a b", "▁ a"]}, "small")
    assert made.convert_ids_to_tokens(made("abab")["input_ids"]) == ["<s>", "▁", "ab", "ab"]
    with pytest.raises(OvspecError, match="the BPE merges are missing"):
        build_tokenizer(level, "small")


def test_chat_templates(tmp_path: Path) -> None:
    read = BYTE_LEVEL | {"tokenizer.chat_template": "{{ messages }}"}
    assert build_tokenizer(read, "small").chat_template == "{{ messages }}"
    build_tokenizer(read | {"tokenizer.chat_template.tool_use": "{{ tools }}"}, "small").save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}


def with_tokens(*tokens: str) -> dict[str, Any]:
    return BYTE_LEVEL | {
        "tokenizer.ggml.tokens": [*BYTE_LEVEL["tokenizer.ggml.tokens"], *tokens],
        "tokenizer.ggml.token_type": [*BYTE_LEVEL["tokenizer.ggml.token_type"], *[1] * len(tokens)],
    }


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<|endoftext|>", "<|eot_id|>"], ["<|eot_id|>", "<|endoftext|>"]),
        (["<|return|>", "<|call|>", "<|end|>"], ["<|return|>", "<|call|>"]),
        (["<|end|>"], ["<|end|>"]),
        (["<|tool_response>", "</s>"], ["<|tool_response>"]),
        (["<|fim_pad|>", "<|file_sep|>", "<|fim_prefix|>"], ["<|fim_pad|>", "<|file_sep|>"]),
    ],
)
def test_ends(tokens: list[str], ends: list[str]) -> None:
    read = with_tokens(*tokens)
    found = [read["tokenizer.ggml.tokens"][index] for index in read_end_ids(read)]
    assert found[0] == "<|im_end|>"
    assert set(found[1:]) == set(ends)
    special = set(build_tokenizer(read, "small").all_special_tokens) | {
        token.content for token in build_tokenizer(read, "small").added_tokens_decoder.values() if token.special
    }
    assert special >= set(ends)  # although the file calls them normal


@pytest.mark.parametrize(
    ("kind", "role", "ends"), [(4, None, False), (1, None, True), (3, None, True), (4, "eot", True)]
)
def test_html_does_not_end_a_text(kind: int, role: str | None, ends: bool) -> None:
    """Gemma 3 has the tags of HTML as user-defined tokens, and </s> is one of them."""
    read = with_tokens("<s>", "</s>", "</u>")
    read["tokenizer.ggml.token_type"] = [*BYTE_LEVEL["tokenizer.ggml.token_type"], 4, kind, 4]
    tag = read["tokenizer.ggml.tokens"].index("</s>")
    if role:
        read |= {f"tokenizer.ggml.{role}_token_id": tag}
    assert (tag in read_end_ids(read)) == ends
    made = build_tokenizer(read, "small")
    assert made.decode(made("ab</s>ab")["input_ids"], skip_special_tokens=True) == ("abab" if ends else "ab</s>ab")


def test_a_file_without_a_pre_tokenizer_is_noted(capfd: pytest.CaptureFixture[str]) -> None:
    build_tokenizer({key: value for key, value in BYTE_LEVEL.items() if not key.endswith("pre")}, "old.gguf")
    assert capfd.readouterr().err.startswith("old.gguf doesn't say how its tokenizer cuts texts into words")


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "plamo2", "hybriddna", "whitespace", "new"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    with pytest.raises(OvspecError, match=f"^x.gguf: its tokenizer of the type '{kind}' can't be converted;"):
        build_tokenizer(BYTE_LEVEL | {"tokenizer.ggml.model": kind}, "x.gguf")


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("pre", "new-pre", "pre-tokenizer 'new-pre' is unknown"),
        ("tokens", None, "Expected array, got null"),
        ("tokens", [], "length >= 1"),
        ("tokens", 7, "Expected array, got int"),
        ("tokens", ["a", b"b"], "Expected str, got bytes"),
        ("tokens", ["a", "b", "a"], "'a' is a duplicate"),
        ("tokens", ["a", "b" * 5000], "has 5000 characters"),
        ("tokens", [""] * (2**20 + 1), "length <= 1048576"),
        ("token_type", [1, 1], "only 2 of 261 tokens have a type"),
        ("token_type", ["control"], "Expected int, got str"),
        ("merges", ["a b", "ab"], "merge 'ab' doesn't join"),
        ("merges", ["a b", "a zz"], "merge 'a zz' doesn't join"),
        ("merges", ["b a"], "merge 'b a' doesn't join"),
        ("merges", None, "the BPE merges are missing"),
        ("eos_token_id", 261, "eos_token_id is 261, but the vocabulary has 261 tokens"),
        ("eos_token_id", -1, "eos_token_id is -1"),
        ("eos_token_id", "2", "eos_token_id is 2"),
        ("padding_token_id", "2", "padding_token_id is 2"),
        ("add_bos_token", True, "a BOS token is added to every text"),
        ("add_bos_token", "yes", "Expected bool"),
    ],
)
def test_damage_is_told_in_a_sentence(key: str, value: Any, problem: str) -> None:
    with pytest.raises(OvspecError) as error:
        build_tokenizer(BYTE_LEVEL | {f"tokenizer.ggml.{key}": value}, "x.gguf")
    assert problem in str(error.value)
    assert str(error.value).startswith("x.gguf: its ")
    assert str(error.value).count(". ") == 0


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ({"tokenizer.ggml.scores": [1.0]}, "only 1 of 264 tokens have a score"),
        ({"tokenizer.ggml.scores": [float("nan")] * 264}, "the score of a token is not a finite number"),
        ({"tokenizer.chat_template": 3}, "'default' is not text"),
        ({"tokenizer.chat_template.../../x": "{{ messages }}"}, "an invalid name"),
    ],
)
def test_damage_of_other_kinds(damage: dict[str, Any], problem: str) -> None:
    with pytest.raises(OvspecError, match=problem):
        build_tokenizer(SENTENCEPIECE | damage, "x.gguf")


def test_words_are_cut_as_the_file_says() -> None:
    """SmolLM's pre-tokenizer cuts each digit off, GPT-2's takes numbers whole."""
    cut = {pre: build_tokenizer(BYTE_LEVEL | {"tokenizer.ggml.pre": pre}, "small") for pre in ("smollm", "gpt-2")}
    assert cut["smollm"].tokenize("ab11") == ["ab", "1", "1"]
    assert cut["gpt-2"].tokenize("ab11") == ["ab", "11"]


def test_only_the_beginning_of_a_text_has_a_bos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build_tokenizer(SENTENCEPIECE, "small")
    ours = converted(made, tmp_path, monkeypatch)
    assert made.convert_ids_to_tokens(ours.encode("abb")) == ["<s>", "▁a", "b", "b"]
    assert made.convert_ids_to_tokens(ours.encode("abb", special=False)) == ["▁a", "b", "b"]
    assert made.convert_ids_to_tokens(ours.encode_continuation("abb")) == ["ab", "b"], "nor a space of its own"
