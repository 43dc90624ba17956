"""The Hugging Face tokenizer of a checkpoint, and whether OpenVINO's agrees with it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ovspec.errors import OvspecError
from ovspec.tokenizer import Tokenizer

# Code, several scripts, emoji with joiners, odd whitespace, digits, text that looks like special tokens.
TEXTS = (
    "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "if x:\n\tfor y in z:\n\t\tprint(f'{y!r:>10}', end=\"\\n\")\r\n",
    "SELECT * FROM t WHERE a <> 'b' AND c >= 1e-9; -- done",
    "The quick brown fox doesn't jump; it's 3.14159 past 12:30, isn't it?",
    "Größe, naïve café, Ærøskøbing, œuvre, ﬁne e\u0301",
    "Привет, мир! Ελληνικά עברית العربية हिन्दी ไทย 한국어",
    "日本語の文章です。中文字符，没有空格。",
    "👍🏽 👩‍👩‍👧‍👦 🇺🇳 ❤️ 🎉🎉",
    "  two  spaces   three\t\ttabs\n\n\nlines \r\n end ",
    "no\u00a0break\u2003em\u3000ideographic\u200bzero\u2028line",
    "1 22 333 4444 1234567890 0x1F 1_000",
    "<s> </s> <|endoftext|> [INST] <unk>",
    "",
    " ",
    "\n",
    "a",
)


def load_tokenizer(source: str) -> Any:
    """A checkpoint's tokenizer, from a folder or the hub.

    Raises:
        OvspecError: there is no such checkpoint, or none with a tokenizer.
    """
    folder = Path(source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise OvspecError(f"{source}: no config.json in it; name a folder with a Hugging Face checkpoint.")
    if not folder.is_dir() and (source.startswith((".", "/", "~")) or source.count("/") > 1 or "\\" in source):
        raise OvspecError(f"{source}: no such folder.")
    from transformers import AutoTokenizer

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries are not news
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # the hub, transformers and tokenizers raise a dozen kinds of their own
        if folder.is_dir():
            raise OvspecError(f"{source}: its tokenizer cannot be loaded ({first_line(error)}).") from None
        raise OvspecError(
            f"{source}: neither a folder here nor a model that can be reached on the Hugging Face hub; "
            "check the name and the network, or log in with 'hf auth login' if the model is gated."
        ) from None


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:") if lines else type(error).__name__


def differing_texts(reference: Any, folder: Path) -> list[str]:
    """The ``TEXTS`` that the exported tokenizer in ``folder`` encodes differently from ``reference``."""
    tokenizer = Tokenizer(folder)
    return [text for text in TEXTS if tokenizer.encode(text).tolist() != reference(text)["input_ids"]]
