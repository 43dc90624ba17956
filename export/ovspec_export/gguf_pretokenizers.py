"""The rules of a GGUF file's byte-level BPE for cutting texts into words, by their names in ``tokenizer.ggml.pre``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """Regular expressions, each cutting the pieces left by the last; matches and the rest become words.

    ``ignore_merges``: a word in the vocabulary stays whole. ``add_bos``: unless the file says otherwise.
    ``spelt_in_bytes``: False for words of characters, with U+2581 for spaces, as in SentencePiece.
    """

    regexes: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    spelt_in_bytes: bool = True


CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SYMBOLS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
SYMBOLS_AND_SLASHES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
# A word in camel case is cut before a capital; letters outside ASCII count as both small and capital, as in llama.cpp.
CAPITAL_LETTER = r"(?:(?=\p{L})[^a-z])"
SMALL_LETTER = r"(?:(?=\p{L})[^A-Z])"
CAMEL_CASE = [
    rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITAL_LETTER}*{SMALL_LETTER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITAL_LETTER}+{SMALL_LETTER}*",
]
CAMEL_CASE_CONTRACTED = "|".join(rf"{part}(?:{CONTRACTION})?" for part in CAMEL_CASE)
# Digits in groups of three, counted from the last digit; the first group includes the text before it, as in llama.cpp.
THOUSANDS = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
# The same for ASCII digits, among others: each match begins with a multiple of three digits left.
DIGIT_TRIPLES_LEFT = r"(?:[0-9]{3})+(?![0-9])"
SUPERBPE = (r"\p{N}+", rf"(?={DIGIT_TRIPLES_LEFT})\p{{N}}(?:(?!{DIGIT_TRIPLES_LEFT})\p{{N}})*")
HAN_RANGES = (
    "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b820-\U0002ceaf\U0002ceb0-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"
)
CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
CJK_AND_HANGUL = r"(?:(?!\s)[一-龥ࠀ-一가-" "\ud7ff])+"  # and everything between them except white space
ASIAN = "[一-\u9fff㐀-\u4dbf豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
ASCII_SYMBOL = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
DEEPSEEK_WORDS = rf"{ASCII_SYMBOL}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
DEEPSEEK_SPLITS = rf"{DEEPSEEK_WORDS}[\r\n]*|{SPACES}"
# Letters with case of Latin, Greek, Cyrillic, Armenian, Georgian, Cherokee, Coptic, Deseret and more.
CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-"
    "Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{SYMBOLS}"
QWEN2 = rf"{CONTRACTION}|{WORD}|\p{{N}}|{SYMBOLS}"
QWEN35 = rf"{CONTRACTION}|{MARKED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
JAIS2_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
JAIS2 = rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{JAIS2_SPACES}|\s"
GPT4O = rf"{CAMEL_CASE_CONTRACTED}|\p{{N}}{{1,3}}|{SYMBOLS_AND_SLASHES}"
# As in llama.cpp, the first half of the original expression matches every letter, so the second never matches.
TINY_AYA = rf"{MARKED_WORD}(?:{CONTRACTION})?|\p{{N}}{{1,3}}|{SYMBOLS_AND_SLASHES}"
YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u303f︰-﹏]+|[ㄅ-ㄯ]+|" + CJK,
    rf"{MARKED_WORD}(?:{CONTRACTION})?|\p{{N}}|{SYMBOLS_AND_SLASHES}",
)
KIMI_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?(?:(?![{HAN_RANGES}])\p{{L}})+(?:{CONTRACTION})?"
KIMI = rf"[{HAN_RANGES}]+|{KIMI_WORD}|\p{{N}}{{1,3}}|{SYMBOLS}"
BAILING = rf"{CONTRACTION}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
SEED_CODER = rf"{CONTRACTION}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
EXAONE_WORDS = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
EXAONE_MOE = rf"{CONTRACTION}|{EXAONE_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
MINICPM5 = rf"{CONTRACTION}|{WORD}|\p{{N}}+|{SYMBOLS}"
LINES = r"[^\n]+|\n+"

# Names in the same row are separated by spaces.
PRETOKENIZERS_BY_NAMES = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9]{3}")),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling": PreTokenizer((GPT2,)),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", GPT2)),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer((LLAMA3,), True, True),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((LLAMA3,)),
    "glm4 glm5": PreTokenizer((LLAMA3,), ignore_merges=True),
    "qwen2 deepseek-r1-qwen f2llmv2 kormo megrez stablelm2 hunyuan solar-open grok-2": PreTokenizer((QWEN2,)),
    "qwen35": PreTokenizer((QWEN35,)),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9]{3}")),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?[{CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟、-。]+", r"\s+$", CJK_AND_HANGUL, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_AND_HANGUL, r"\p{N}")),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": PreTokenizer((r"\p{N}{1,3}", CJK, DEEPSEEK_SPLITS)),
    "spark2_5": PreTokenizer((r"\p{N}{1,3}", CJK, rf"{DEEPSEEK_WORDS}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "afmoe": PreTokenizer((THOUSANDS, ASIAN, DEEPSEEK_SPLITS)),
    "poro-chat bloom gpt3-finnish": PreTokenizer((BLOOM,)),
    "viking": PreTokenizer((BLOOM, r"\p{N}")),
    "jais-2": PreTokenizer((JAIS2,)),
    "tekken": PreTokenizer((rf"{'|'.join(CAMEL_CASE)}|\p{{N}}|{SYMBOLS_AND_SLASHES}",), True, True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((GPT4O,)),
    "tiny_aya cohere2moe": PreTokenizer((THOUSANDS, TINY_AYA)),
    "youtu": PreTokenizer(YOUTU, ignore_merges=True),
    "kimi-k2": PreTokenizer((KIMI,)),
    "superbpe": PreTokenizer(SUPERBPE),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((BAILING,)),
    "seed-coder": PreTokenizer((SEED_CODER,)),
    "exaone-moe": PreTokenizer((EXAONE_MOE,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", MINICPM5), ignore_merges=True),
    "ufakzeka": PreTokenizer((rf"{WORD}|\p{{N}}|{SYMBOLS}",)),
    "laguna": PreTokenizer((LINES, QWEN2)),
    "gemma4": PreTokenizer((LINES,), add_bos=True, spelt_in_bytes=False),
    "sarvam-moe": PreTokenizer((LINES,), spelt_in_bytes=False),
}
PRETOKENIZERS = {name: row for names, row in PRETOKENIZERS_BY_NAMES.items() for name in names.split()}
