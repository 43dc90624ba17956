"""The layouts of fill-in-the-middle prompts, with small vocabularies of our own."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ovspec.base.errors import PromptError
from ovspec.text.infill import FileChunk, FimTokenIds, InfillPrompt, drop_first_chunks, encode_infill, find_fim_tokens
from ovspec.text.tokenizer import Tokenizer

FIRST = 0x200000  # above all characters, whose own ids are their numbers
BOS = FIRST - 1
INFILL = InfillPrompt("def f():\n", "\nend", (FileChunk("x = 1\n", "a.py"), FileChunk("y\n")), "  ret")
EXTRA = "--- snippet ---"


def vocabulary(*names: str) -> dict[str, int]:
    return {name: FIRST + number for number, name in enumerate(names)}


def encode(text: str, at_text_start: bool = False) -> np.ndarray:
    """Encode characters; one ``at_text_start`` begins with an underscore, as SentencePiece's with a space."""
    return np.array([ord(each) for each in "_" * at_text_start + text], dtype=np.int64)


def written(ids: dict[str, int], infill: InfillPrompt = INFILL, room: float = 1e9) -> str:
    """Return the prompt that a vocabulary makes, spelt."""
    names = {number: name for name, number in ids.items()} | {BOS: "<s>"}
    made = encode_infill(infill, find_fim_tokens(ids), encode, [BOS], room)
    assert "".join(map(chr, made.ids[made.answer_start :].tolist())) == infill.beginning
    return "".join(names.get(token) or chr(token) for token in made.ids.tolist())


QWEN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
STARCODER = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")
GEMMA = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|file_separator|>")
SNIPPETS = f"\n\n{EXTRA}\n\nx = 1\n\n\n{EXTRA}\n\ny\n"
FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "qwen": (
        (*QWEN, "<|endoftext|>"),
        "<s><|repo_name|>myproject\n<|file_sep|>a.py\nx = 1\n<|file_sep|>tmp\ny\n<|file_sep|>filename\n"
        "<|fim_prefix|>_def f():\n<|fim_suffix|>\nend<|fim_middle|>  ret",
    ),
    "codegemma": (GEMMA, f"<s>{SNIPPETS}<|fim_prefix|>_def f():\n<|fim_suffix|>\nend<|fim_middle|>  ret"),
    "starcoder2": (
        (*STARCODER, "<repo_name>", "<file_sep>"),
        "<s><repo_name>myproject\n<file_sep>a.py\nx = 1\n<file_sep>tmp\ny\n<file_sep>filename\n"
        "<fim_prefix>_def f():\n<fim_suffix>\nend<fim_middle>  ret",
    ),
    "granite": (
        (*STARCODER, "<reponame>", "<filename>"),
        "<s><reponame>myproject\n<filename>a.py\nx = 1\n<filename>tmp\ny\n<filename>filename\n"
        "<fim_prefix>_def f():\n<fim_suffix>\nend<fim_middle>  ret",
    ),
    "santacoder": (
        ("<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>"),
        f"<s>{SNIPPETS}<fim-prefix>_def f():\n<fim-suffix>\nend<fim-middle>  ret",
    ),
    "codellama": (
        ("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"),
        f"<s>{SNIPPETS}▁<PRE>_def f():\n▁<SUF>\nend▁<MID>  ret",
    ),
    "deepseek": (
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        f"<s>{SNIPPETS}<｜fim▁begin｜>_def f():\n<｜fim▁hole｜>\nend<｜fim▁end｜>  ret",
    ),
    "codestral": (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), f"<s>{SNIPPETS}[SUFFIX]\nend[PREFIX]_def f():\n  ret"),
    "glm": (
        ("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"),
        f"<s>{SNIPPETS}<|code_prefix|>_def f():\n<|code_suffix|>\nend<|code_middle|>  ret",
    ),
    "seed-coder": (
        ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),
        f"<s>{SNIPPETS}<[fim-suffix]>\nend<[fim-prefix]>_def f():\n<[fim-middle]>  ret",
    ),
    "falcon": (
        ("<|prefix|>", "<|middle|>", "<|suffix|>"),
        f"<s>{SNIPPETS}<|prefix|>_def f():\n<|suffix|>\nend<|middle|>  ret",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_familys_layout(family: str) -> None:
    names, expected = FAMILIES[family]
    ids = vocabulary(*names)
    assert written(ids) == expected
    found = find_fim_tokens(ids)
    assert found and {*found.end_ids} == {*ids.values()}, "each of these tokens ends a text"


def test_of_several_families_the_one_with_most_tokens_is_meant() -> None:
    """General vocabularies have tokens of some that their models haven't learned."""
    both = vocabulary("[PREFIX]", "[SUFFIX]", *QWEN, "<reponame>")
    assert written(both).endswith("<|fim_prefix|>_def f():\n<|fim_suffix|>\nend<|fim_middle|>  ret")


@pytest.mark.parametrize("names", [(), ("<|fim_prefix|>", "<|fim_middle|>"), ("<|repo_name|>", "<|file_sep|>")])
def test_vocabularies_without_the_tokens(names: tuple[str, ...]) -> None:
    with pytest.raises(PromptError, match=r"^The model's vocabulary has no fill-in-the-middle tokens; .*[.]$"):
        written(vocabulary(*names))


def test_chunks_are_left_out_from_the_front() -> None:
    ids = vocabulary(*QWEN)
    whole = written(ids)
    lengths = {room: written(ids, room=room) for room in range(200)}
    size = len(encode_infill(INFILL, find_fim_tokens(ids), encode, [BOS], 1e9).ids)
    assert lengths[size] == whole and lengths[size - 1] == whole.replace("<|file_sep|>a.py\nx = 1\n", "")
    assert lengths[0] == lengths[1] and "tmp" not in lengths[0] and "filename" in lengths[0]
    assert len(set(lengths.values())) == 3


@pytest.mark.parametrize(("characters", "kept"), [(1e9, 2), (28, 2), (27, 1), (20, 0), (0, 0)])
def test_chunks_that_can_never_fit_are_not_encoded(characters: float, kept: int) -> None:
    assert (
        INFILL.needed_characters == 18
        and drop_first_chunks(INFILL, characters).file_chunks == INFILL.file_chunks[2 - kept :]
    )


def test_names_that_a_text_spells_are_no_tokens(pair: Path) -> None:
    tokenizer = Tokenizer(pair)
    assert tokenizer.fim_tokens is None
    special = next(name.decode() for name in tokenizer._special_token_bytes.values() if len(name) > 1)
    text = f"{special}a{special}{special} b"
    plain, spelt = tokenizer.encode(text, special=False), tokenizer.encode_plain_text(text)
    names = {*tokenizer._special_token_bytes}
    assert names & {*plain.tolist()} and not names & {*spelt.tolist()}
    assert tokenizer.decode(spelt) == text
    for each in ("", "a", "def f(x):\n    return x"):
        assert tokenizer.encode_plain_text(each).tolist() == tokenizer.encode(each, special=False).tolist()


def test_the_tokens_are_found_in_the_whole_vocabulary(pair: Path, tmp_path: Path) -> None:
    """Code Llama's aren't among its added tokens."""
    import json
    import shutil

    shutil.copytree(pair, tmp_path / "model", ignore=lambda *_: {"draft"})
    file = tmp_path / "model" / "tokenizer.json"
    content: Any = json.loads(file.read_text(encoding="utf-8"))
    size = max(content["model"]["vocab"].values()) + 1000
    content["model"]["vocab"] |= {name: size + n for n, name in enumerate(("▁<PRE>", "▁<SUF>", "▁<MID>"))}
    file.write_text(json.dumps(content), encoding="utf-8")
    found = Tokenizer(tmp_path / "model").fim_tokens
    assert isinstance(found, FimTokenIds) and (found.prefix, found.suffix, found.middle) == (size, size + 1, size + 2)


def test_many_chunks_are_left_out_at_once() -> None:
    """A square would take minutes."""
    began = time.monotonic()
    many = replace(INFILL, file_chunks=tuple(FileChunk("x") for _ in range(100_000)))
    assert len(encode_infill(many, find_fim_tokens(vocabulary(*QWEN)), encode, [BOS], 100).ids) <= 100
    assert time.monotonic() - began < 20
    assert (
        len(
            drop_first_chunks(
                replace(INFILL, file_chunks=(FileChunk(""),) * 9), INFILL.needed_characters + 8
            ).file_chunks
        )
        == 8
    )
