"""The messages of all errors are listed in one file, are sentences, and have no literal translations."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

import english
import pytest
import sentences

# Phrases of literal translations and of pronouns in place of nouns, with better ones.
CALQUES = {
    r"(?<!there )\bis no (call|draft|head|model|file|folder|text|token|list)\b": "is not a …",
    r"\bcomes? to an end\b": "ends, or is infinitely recursive",
    r"\bhas waited\b|\bturn has\b": "timed out in the queue",
    r"\b(tells?|told|says?) (what|which|that|so|how|of)\b": "reveals, reports, contains",
    r"\bcan(not|'t) be (told|met|taught|called)\b": "is unknown, is not supported, can't be trained",
    r"\b(are|is) (there|given|named) twice\b|\bhas \S+ twice\b": "is a duplicate",
    r"\b(goes|go|going|gone) on\b": "continues, resumes",
    r"\b(begun|taught|teach|learn)\b": "started, trained",
    r"\bcut off\b": "truncated",
    r"\bother (bits|logits|weights) than\b": "differ from",
    r"\b(those|that) of\b|\b(those|that|one) (that|which|with|whose)\b": "the noun",
    r"\bwhat (is|was|were|it|they|others|you|a|the|ovspec|must|can)\b": "the noun",
    r"\bwhose\b|, which (is|are|can|has|have|needs)\b": "a main clause, or an adjective",
    r"\b(its|their|your|one's) own kind\b|\bof (its|their|your|one's) own\b": "its own …",
    r"(^|[;,:]|\bor|\band) name (another|one|it|some|its|a|the)\b": "choose another, give a …",
    r"\b(does not|doesn't|don't) (know|understand|belong)\b": "unknown, not supported, unexpected",
    r"\b(isn't|not|aren't) (known|understood)\b": "unknown, not supported",
    r"\bno place in\b": "is unknown in",
    r"\b(half|part) of an? (character|pair|surrogate)\b|\bhalf a\b": "an unpaired surrogate",
    r"\bas (it is|they are|it was|they were)\b": "unchanged, already",
    r"\b(nothing|none|no \w+) may\b": "nothing can",
    r"\bthe most that\b|\bin any case\b|\bjust as\b": "at most, always",
    r"\b(isn't|is not|aren't) here\b|\bknown here\b": "was not found",
    r"\bbecomes? too\b|\bbecame\b": "is too",
    r"\b(made|make) of\b": "made from",
    r"(^|[;,:]|\bor|\band) take (another|part|one|a|at)\b": "choose, use",
    r"\b(holds|holding) (files|what|more|no|half|a)\b": "contains",
    r"\bmake room for\b|\bsee that\b|\bhand\w* (it )?out\b|\blet it\b": "free some space, check, deny, enable",
    r"\b(each|one|some|none) (needs|has|must|is)\b": "the noun: each message, a tool",
    r"\bthe process that checks\b|\bto judge\b": "the check, to validate",
}
WORDED_LIKE_A_SENTENCE = re.compile(r"[A-Z`{]|--")
SENTENCE_END = re.compile(r"[.?}]$")
MAKERS_OF_PARTS = {"NotPaged", "PagedCheck", "ValueError"}  # their messages go into others


def raised_sentences() -> Iterator[tuple[str, str]]:
    """Yield (place, message) of the messages with which errors are made, without the parts of others."""
    for package in ("ovspec", "export/ovspec_export"):
        for file in sorted((english.ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                name = sentences.called_name(node)
                if name not in MAKERS_OF_PARTS and english.ERROR_CLASS.search(name):
                    assert isinstance(node, ast.Call)
                    texts = [" ".join(english.render(argument).split()) for argument in node.args]
                    yield from (
                        (f"{file.relative_to(english.ROOT).as_posix()}:{node.lineno}", text)
                        for text in texts
                        if english.is_message(text) and WORDED_LIKE_A_SENTENCE.match(text)
                    )


@pytest.fixture(scope="module")
def messages() -> set[str]:
    return {text for texts in english.messages().values() for text in texts}


def test_the_file_of_messages_is_up_to_date() -> None:
    written = english.MESSAGES_FILE.read_text(encoding="utf-8")
    assert written == english.listing(), "run: python tests/support/english.py --messages"


def test_most_messages_are_found(messages: set[str]) -> None:
    assert len(messages) > 800
    assert {"{path}: not UTF-8 text; save the file as UTF-8.", "--logprobs needs --json."} <= messages


def literals(node: ast.AST) -> Iterator[str]:
    """Yield the text of a message between its placeholders, without numbers of groups and without a bare "#"."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from re.split(r"\\\d|^#", " ".join(node.value.replace("\\\\", "\\").split()))
    elif isinstance(node, ast.JoinedStr | ast.BinOp):
        yield from itertools.chain(*map(literals, ast.iter_child_nodes(node)))


def test_each_message_and_each_part_is_listed() -> None:
    listing = english.listing().replace("\\\\", "\\")
    nodes = itertools.chain(*english.message_nodes(english.parse_code()).values())
    parts = {part.strip() for node in nodes if english.is_message(english.render(node)) for part in literals(node)}
    assert len(parts) > 1000
    missing = [part for part in parts if part not in listing]
    assert not missing, "\n".join(missing)


def test_most_listed_messages_are_whole_sentences() -> None:
    texts = [line.strip() for line in english.listing().splitlines() if line.startswith("  ")]
    unfinished = [text for text in texts if not SENTENCE_END.search(text)]
    assert len(unfinished) < 0.02 * len(texts), "\n".join(unfinished)


def test_frames_are_messages(messages: set[str]) -> None:
    texts = "\n".join(messages)
    for frame in english.FRAMES.values():
        assert all(piece.strip() in texts for piece in re.split(r"\{[^{}]*\}", frame)), frame


def test_few_words_point_at_things() -> None:
    assert english.rate("Those that nobody names, which is what I mean.") > 40
    assert english.rate("\n".join(english.texts_for_users().values())) <= english.MAX_RELATIVE_WORDS


def test_sentences_end_with_a_full_stop() -> None:
    sentences = list(raised_sentences())
    assert len(sentences) > 400
    unfinished = [f"{place}: {text}" for place, text in sentences if not SENTENCE_END.search(text)]
    assert not unfinished, "\n".join(unfinished)


@pytest.mark.parametrize("calque", CALQUES)
def test_no_message_has_a_calque(calque: str, messages: set[str]) -> None:
    found = [text for text in messages if re.search(calque, re.sub(r"\{[^{}]*\}", "{}", text), re.IGNORECASE)]
    assert not found, f"instead: {CALQUES[calque]}"


def test_messages_in_all_their_forms_are_found() -> None:
    source = """
KEEP_ADVICE = "keep the old file"
NO_TOY = "There is no toy."
WORDINGS_FAILURES = {"no space left": "the disk is full"}
class ToyError(Exception):
    def __init__(self):
        super().__init__("The toy is broken.")
def check(size):
    problem = f"has {size} parts"
    if size:
        raise ToyError(f"The toy {problem}; remove one.")
    raise_usage_error_if(size, "--size needs --toy.")
    raise ToyError(NO_TOY)
    return re.sub("a pattern of words", "", size)
"""
    tree = ast.parse(source)
    nodes = english.messages_in(tree, set(english.constants_in_errors(tree)))
    assert {english.render(node) for node in nodes} == {
        "keep the old file",
        "There is no toy.",
        "the disk is full",
        "The toy is broken.",
        "has {size} parts",
        "The toy {problem}; remove one.",
        "--size needs --toy.",
    }


def test_parts_are_joined_to_sentences() -> None:
    source = """
ADVICE = "download the model again"
class PartError(Exception): ...
class ToyError(Exception): ...
def read(sizes):
    if sizes:
        raise PartError(f"it has {len(sizes)} parts")
    raise PartError("it is empty")
def describe_problem():
    return "a broken wheel"
def refuse(problem):
    raise ToyError(f"The toy {problem}; use another.")
def check(source, sizes):
    reason = "no such file" if sizes else describe_problem()
    try:
        read(sizes)
    except PartError as error:
        raise ToyError(f"{source.name}: {error}; {ADVICE}.")
    if sizes:
        refuse("is too small")
    raise ToyError(f"{source.name}: found {reason}; see {', '.join(sizes)}.")
"""
    trees = {"toy.py": ast.parse(source)}
    code = sentences.index_code(trees.values())
    found = sentences.sentences(english.message_nodes(trees), code, english.is_message)
    assert sorted(found["toy.py"]) == [
        "The toy is too small; use another.",
        "{source}: found a broken wheel; see {sizes}.",
        "{source}: found no such file; see {sizes}.",
        "{source}: it has {number of sizes} parts; download the model again.",
        "{source}: it is empty; download the model again.",
    ]
