"""Write prompts for 'ovspec distill --text' from what is installed: code to change, texts to read, more to ask.

    python scripts/train/smollm2_prompts.py prompts.jsonl [--count 12000]

What a small model asks itself are short questions. A head that has only seen those guesses badly where people paste
code or a document. So functions, docstrings, manuals and package metadata of the Python installation become chats of
the kinds of scripts/bench/chats.json, whose texts are ours and play no part here. The model writes all answers.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

Chat = list[dict[str, str]]
CODE_LINES = (6, 45)
PROSE_WORDS = (120, 600)  # of a long text
ASKED_FIRST = 0.25  # share of the prompts in which the task comes before the text


@dataclass(frozen=True)
class Function:
    """A function of an installed module. ``summary``: the first sentence of its docstring."""

    name: str
    arguments: list[str]
    source: str
    summary: str
    names: list[str]  # of its variables


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


# ---------------------------------------------------------------- what is installed


def folders() -> list[Path]:
    return [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]


def functions(draws: random.Random) -> Iterator[Function]:
    """Yield functions of installed modules, in a random order of files."""
    files = sorted(file for folder in folders() for file in folder.rglob("*.py") if "test" not in str(file).lower())
    draws.shuffle(files)
    for file in files:
        try:
            source = file.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError):
            continue
        found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for node in draws.sample(found, min(len(found), 4)):
            text = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
            if CODE_LINES[0] <= text.count("\n") + 1 <= CODE_LINES[1] and len(text) < 2500:
                yield described(node, text)


def described(node: ast.FunctionDef, source: str) -> Function:
    doc = " ".join((ast.get_docstring(node) or "").split())
    summary = re.split(r"(?<=[a-z)`])\. |:(?: |$)", doc)[0].rstrip(".")
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    arguments = [each.arg for each in node.args.args if each.arg not in ("self", "cls")]
    return Function(node.name, arguments, source, summary if 20 < len(summary) < 200 else "", sorted(names))


def pages(draws: random.Random) -> Iterator[str]:
    """Yield pieces of manuals and descriptions of installed packages, at the borders of paragraphs."""
    roots = [*folders(), Path("/usr/share/doc"), Path("/usr/share/perl")]
    ends = {".md", ".rst", ".txt", ".pod", "METADATA"}
    files = sorted(
        file
        for root in roots
        for file in root.rglob("*")
        if file.suffix in ends or file.name in ends or not file.suffix
    )
    draws.shuffle(files)
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        text = text.partition("\n\n")[2] if file.name == "METADATA" else text
        paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if is_prose(part)]
        for _ in range(min(3, len(paragraphs) // 4)):
            start, wanted, piece = draws.randrange(len(paragraphs)), draws.randint(*PROSE_WORDS), list[str]()
            while start < len(paragraphs) and sum(len(part.split()) for part in piece) < wanted:
                piece.append(paragraphs[start])
                start += 1
            if PROSE_WORDS[0] < len(" ".join(piece).split()) < 800:
                yield "\n\n".join(piece)


def is_prose(text: str) -> bool:
    return (
        30 < len(text) < 2000
        and "copyright" not in text.lower()
        and sum(c.isalpha() or c == " " for c in text) > 0.75 * len(text)
    )


def metadata(draws: random.Random) -> Iterator[str]:
    """Yield the fields of installed packages' metadata."""
    files = sorted(folders()[1].glob("*.dist-info/METADATA"))
    while files:
        lines = draws.choice(files).read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
        fields = [line for line in lines if re.match(r"[A-Z][\w-]+: \S", line) and len(line) < 160]
        if len(fields) > 4:
            yield "\n".join(draws.sample(fields, min(len(fields), draws.randint(5, 14))))


# ---------------------------------------------------------------- kinds of chats


CHANGES = (
    "Add type hints to this function.",
    "Write a docstring for this function and leave the code as it is.",
    "Add comments to this code. Don't change anything else.",
    "Remove the docstring and all comments. Return the whole function.",
    "Make this function log what it does with the logging module.",
    "Add a parameter `verbose` (False by default) that prints what happens. Show the complete new code.",
    "Rename the function to `{new}` and leave everything else as it is.",
    "Rename the variable `{old}` to `{new}`. Give me the whole function.",
    "Make it raise a ValueError with a clear message if an argument is None. Show all of the code.",
    "Use f-strings wherever strings are formatted. Return only the code.",
    "Rewrite this in a simpler way.",
    "Turn this function into a class with one method.",
    "Fix the style so that it follows PEP 8 and return the complete function.",
    "Translate this function to JavaScript.",
)
NEW_NAMES = ("result", "items", "current", "entries", "source", "target", "values", "buffer", "found", "process_data")
ABOUT_CODE = (
    "What does this function do?",
    "Explain this code step by step.",
    "Are there any bugs in this function?",
    "Write three unit tests for this function with pytest.",
    "Which errors can this code raise, and when?",
    "Review this code. What would you improve?",
)
TO_WRITE = (
    "Write a Python function `{call}` with this description: {summary}.",
    "I need a function in Python. {summary}. Call it `{name}` and give it the arguments {arguments}.",
    "Write a JavaScript function `{name}`: {summary}. Add a short example.",
    "Please implement `{call}` in Python. {summary}. Add a docstring and an example.",
    "How would you write this in Python? {summary}.",
)
ABOUT_TEXT = (
    "Summarise this text in three sentences.",
    "List the most important points of this text.",
    "What is this text about? Answer in one paragraph.",
    "Explain this to someone who has never heard of it.",
    "Which steps does the reader have to take, according to this text? Number them.",
    "Rewrite this text so that it is shorter and easier to read.",
    "Correct the spelling and grammar of this text and return all of it.",
    "Write five questions about this text, with their answers.",
    "What does the text say about {word}?",
    "Copy the sentences of the text that mention {word}.",
)
EXTRACT = (
    "Extract these fields as JSON. Use the field names in lower case as keys.",
    "Return the name, the version and all requirements from this text as JSON.",
    "Convert this to YAML.",
    "Make a Markdown table with two columns, field and value, of this.",
    'Extract all names, numbers and links from this text as JSON with the keys "names", "numbers" and "links".',
)
EXTRACT_TEXT = (
    'Extract all names of people, products and companies from this text as JSON with the key "names".',
    "List all technical terms in this text as a JSON array.",
    "Extract every number in this text and what it counts, as JSON.",
    'Return the title, the topic and three keywords of this text as JSON with the keys "title", "topic", "keywords".',
)
FOLLOW_UPS = (
    "Can you give me an example?",
    "Please explain that in simpler words.",
    "Thanks. How do I use it in a program?",
    "What are the disadvantages of that?",
    "Make your answer shorter.",
    "What should I do if it doesn't work?",
    "And how does that differ from what other languages do?",
    "Give me the same as a numbered list.",
)
SYSTEMS = (
    None,
    None,
    None,
    "You are a helpful assistant. Answer briefly.",
    "You are a programmer. You write code and explain it.",
    "You are a writer who edits and corrects texts.",
)


def with_task(task: str, text: str, draws: random.Random) -> str:
    return f"{task}\n\n{text}" if draws.random() < ASKED_FIRST else f"{text}\n\n{task}"


def on_code(function: Function, draws: random.Random) -> Chat:
    task = draws.choice(CHANGES if draws.random() < 0.7 else ABOUT_CODE)
    old = draws.choice(function.names) if function.names else function.name
    code = f"```python\n{function.source}\n```"
    text = task.format(old=old, new=draws.choice(NEW_NAMES))
    return [said("user", f"{text}\n\n{code}" if draws.random() < 0.8 else f"{code}\n\n{text}")]


def to_write(function: Function, draws: random.Random) -> Chat | None:
    if not function.summary:
        return None
    listed = ", ".join(function.arguments)
    given = {"name": function.name, "summary": function.summary, "arguments": listed or "it needs"}
    return [said("user", draws.choice(TO_WRITE).format(call=f"{function.name}({listed})", **given))]


def follow_up(function: Function, draws: random.Random) -> Chat | None:
    """Return a chat with an answer that was given before."""
    if not function.summary:
        return None
    asked = draws.choice(("What does `{}` do?", "I found `{}` in a program. What is it for?", "Explain `{}` to me."))
    chat = [said("user", asked.format(function.name)), said("assistant", f"{function.summary}.")]
    if draws.random() < 0.5:
        code = f"Here is the code:\n\n```python\n{function.source}\n```"
        chat += [said("user", "Can you show me how it is written?"), said("assistant", code)]
    return [*chat, said("user", draws.choice(FOLLOW_UPS))]


def on_text(text: str, draws: random.Random) -> Chat:
    words = re.findall(r"[A-Za-z][a-z]{5,}", text) or ["it"]
    tasks = ABOUT_TEXT if draws.random() < 0.75 else EXTRACT_TEXT
    task = draws.choice(tasks).replace("{word}", draws.choice(words))
    return [said("user", with_task(task, text, draws))]


def on_fields(text: str, draws: random.Random) -> Chat:
    return [said("user", with_task(draws.choice(EXTRACT), text, draws))]


def chats(draws: random.Random) -> Iterator[Chat]:
    """Yield chats, of each kind in turns, until there is nothing left of one."""
    made = functions(draws)
    code: list[Callable[[Function, random.Random], Chat | None]] = [on_code, to_write, on_code, follow_up]
    texts, fields = pages(draws), metadata(draws)
    while True:
        for make in code:
            chat = next((chat for chat in (make(each, draws) for each in made) if chat), None)
            if chat is None:
                return
            yield chat
        piece = next(texts, None)
        if piece is None:
            return
        yield on_text(piece, draws)
        if draws.random() < 0.5:
            yield on_fields(next(fields), draws)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--count", type=int, default=12000, help="number of prompts, at most")
    args = parser.parse_args()
    draws, count = random.Random(0), 0
    with args.output.open("w", encoding="utf-8") as out:
        for chat in islice(chats(draws), args.count):
            system = draws.choice(SYSTEMS)
            messages = [said("system", system), *chat] if system else chat
            out.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
            count += 1
    print(f"{args.output}: {count} prompts", file=sys.stderr)


if __name__ == "__main__":
    main()
