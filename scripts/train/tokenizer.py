"""Train a byte-level BPE tokenizer as large as those of today's models, to measure grammars on.

    python scripts/train/tokenizer.py [--tokens 131072] [--megabytes 200] [-o .cache/bench/tokenizer-128k]

It learns from the text that comes with this Python: the standard library and the installed packages. Files are read in
an order that depends only on their names, so the same installation gives the same tokenizer. ``tokenizers`` reads
OUT/tokenizer.json; OUT/about.json describes what it was trained on. 200 MB take a minute or two and 0.6 GB of memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = ROOT / ".cache" / "bench" / "tokenizer-128k"
TOKENS = 131072  # including the end of a text, which is the last one
MEGABYTES = 200
END = "<|endoftext|>"
KINDS = (".py", ".md", ".rst", ".txt", ".json")
LARGEST = 1_000_000  # bytes of a file: larger ones are tables
LONGEST = 128  # bytes of a token
# A word with one sign before it, up to three digits, signs with the line breaks after them, or white space: what the
# tokenizers of GPT-4, Llama 3 and Qwen have in common.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def files_of(folders: list[Path]) -> list[Path]:
    """Return the text files, ordered by hashes of their names, so that any part of the list mixes all packages."""
    named: dict[str, Path] = {}
    for folder in folders:
        for file in folder.rglob("*"):
            if file.suffix in KINDS and file.is_file() and file.stat().st_size <= LARGEST:
                named.setdefault(file.relative_to(folder).as_posix(), file)
    # The standard library's folder may contain the site-packages of another installation.
    own = {name: file for name, file in named.items() if not name.startswith("site-packages/")}
    return [own[name] for name in sorted(own, key=lambda name: hashlib.sha256(name.encode()).digest())]


def texts_of(files: list[Path], limit: int, used: dict[str, int]) -> Iterator[str]:
    """Yield UTF-8 texts of at most ``limit`` bytes in total. ``used`` counts files and bytes."""
    said = time.monotonic()
    for file in files:
        content = file.read_bytes()
        if used["bytes"] + len(content) > limit:
            return
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        used["files"] += 1
        used["bytes"] += len(content)
        if time.monotonic() - said > 5:
            said = time.monotonic()
            print(f"read {used['bytes'] / 1e6:,.0f} of {limit / 1e6:,.0f} MB", file=sys.stderr, flush=True)
        yield text


def byte_level(pattern: str) -> Tokenizer:
    """Return an untrained byte-level BPE tokenizer that splits text by ``pattern`` first."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(files: list[Path], tokens: int, limit: int) -> tuple[Tokenizer, dict[str, Any]]:
    """Train a tokenizer; return it and a description of what it was trained on.

    Raises:
        SystemExit: there is too little text for ``tokens`` tokens.
    """
    tokenizer = byte_level(PATTERN)
    trainer = trainers.BpeTrainer(
        vocab_size=tokens - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=LONGEST,
        show_progress=True,  # on stderr
    )
    used = {"files": 0, "bytes": 0}
    began = time.monotonic()
    tokenizer.train_from_iterator(texts_of(files, limit, used), trainer)
    tokenizer.add_special_tokens([END])  # after the others and outside the model's own, as in Llama 3
    found = tokenizer.get_vocab_size()
    if found != tokens:
        told = f"{used['files']} files with {used['bytes'] / 1e6:,.1f} MB"
        raise SystemExit(f"{told} give {found} tokens, not {tokens}: install more packages or raise --megabytes")
    versions = {"python": sysconfig.get_python_version(), "tokenizers": version("tokenizers")}
    about = {"tokens": tokens, **used, "seconds": round(time.monotonic() - began), "versions": versions}
    return tokenizer, about


def write(tokenizer: Tokenizer, about: dict[str, Any], out: Path) -> None:
    """Write the folder under another name and rename it, so that an existing folder is complete."""
    unfinished = out.with_name(out.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tokenizer.save(str(unfinished / "tokenizer.json"))
    (unfinished / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8", newline="\n")
    shutil.rmtree(out, ignore_errors=True)
    unfinished.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--megabytes", type=float, default=MEGABYTES, help=f"MB of text to read (default {MEGABYTES})")
    parser.add_argument("-o", "--output", type=Path, default=OUT)
    args = parser.parse_args()
    files = files_of([Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")])
    tokenizer, about = train(files, args.tokens, int(args.megabytes * 1e6))
    write(tokenizer, about, args.output)
    print(f"{args.output}: {json.dumps(about)}")


if __name__ == "__main__":
    main()
