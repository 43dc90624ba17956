"""Train a byte-level BPE tokenizer as large as in today's models, for the grammar benchmarks.

    python scripts/train/tokenizer.py

It learns from this Python's standard library and installed packages. The order of files depends only on their names, so
the same installation yields the same tokenizer. It is written to .cache/bench. Training takes a minute or two, and
0.6 GB of memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = ROOT / ".cache" / "bench" / "tokenizer-128k" / "tokenizer.json"
TOKENS = 131072  # including the end of a text, the last token
TEXT_BYTES = 200_000_000
END = "<|endoftext|>"
KINDS = (".py", ".md", ".rst", ".txt", ".json")
LARGEST = 1_000_000  # maximum bytes of a file: larger files are tables
LONGEST = 128  # maximum bytes of a token
# A word with an optional sign before it, up to three digits, signs with the line breaks after them, or white space: the
# common parts of the tokenizers of GPT-4, Llama 3 and Qwen.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def files_of(folders: list[Path]) -> list[Path]:
    """Return the text files, ordered by hashes of their names: any part of the list is a mix of all packages."""
    named: dict[str, Path] = {}
    for folder in folders:
        for file in folder.rglob("*"):
            if file.suffix in KINDS and file.is_file() and file.stat().st_size <= LARGEST:
                named.setdefault(file.relative_to(folder).as_posix(), file)
    # The standard library's folder may contain the site-packages of another installation.
    own = {name: file for name, file in named.items() if not name.startswith("site-packages/")}
    return [own[name] for name in sorted(own, key=lambda name: hashlib.sha256(name.encode()).digest())]


def texts_of(files: list[Path], limit: int) -> Iterator[str]:
    """Yield UTF-8 texts of at most ``limit`` bytes in total."""
    for file in files:
        content = file.read_bytes()
        limit -= len(content)
        if limit < 0:
            return
        with contextlib.suppress(UnicodeDecodeError):
            yield content.decode("utf-8")


def byte_level(pattern: str) -> Tokenizer:
    """Return an untrained byte-level BPE tokenizer; ``pattern`` splits the text before BPE."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def main() -> None:
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    tokenizer = byte_level(PATTERN)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=TOKENS - 1, initial_alphabet=alphabet, max_token_length=LONGEST)
    tokenizer.train_from_iterator(texts_of(files_of(folders), TEXT_BYTES), trainer)
    tokenizer.add_special_tokens([END])  # after the model's own tokens, as in Llama 3
    if (size := tokenizer.get_vocab_size()) != TOKENS:
        sys.exit(f"the texts give {size} tokens, not {TOKENS}: install more packages")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(OUT))
    print(OUT)


if __name__ == "__main__":
    main()
