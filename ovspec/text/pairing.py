"""Check that a draft shares its target's vocabulary."""

from __future__ import annotations

from pathlib import Path

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_dataclass
from ovspec.text.tokenizer import Tokenizer
from ovspec.text.tokenizer_files import TOKENIZER_FILE, TokenizerFile
from ovspec.text.vocabulary import describe_id_differences

# Code, several scripts, emoji with joiners, odd whitespace, digits, text similar to special tokens.
SAMPLE_TEXTS = (
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


def check_same_vocabulary(target: Path, draft: Path) -> None:
    """Raise OvspecError, naming the first differences, if two folders' vocabularies differ or can't be compared.

    Compares ``tokenizer.json`` id by id. If a folder lacks this file, like some published drafts, compares the tokens
    of ``SAMPLE_TEXTS``.
    """
    vocabularies = [read_dataclass(TokenizerFile, folder / TOKENIZER_FILE).tokens_by_id() for folder in (target, draft)]
    difference = (
        describe_id_differences(*vocabularies) if all(vocabularies) else describe_tokenization_difference(target, draft)
    )
    if difference:
        raise OvspecError(f"{draft} cannot draft for {target}: {difference}; choose a draft with the same tokenizer.")


def describe_tokenization_difference(target: Path, draft: Path) -> str | None:
    """Describe how the OpenVINO tokenizers in two folders differ on ``SAMPLE_TEXTS``; None if they agree."""
    target_tokenizer = Tokenizer(target)
    draft_tokenizer = Tokenizer(draft)
    for text in SAMPLE_TEXTS:
        target_ids = target_tokenizer.encode(text).tolist()
        draft_ids = draft_tokenizer.encode(text).tolist()
        if target_ids != draft_ids:
            return f"they split {text!r} differently ({target_ids[:6]} and {draft_ids[:6]})"
    return None
