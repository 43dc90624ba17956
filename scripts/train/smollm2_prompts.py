"""Write prompts for 'ovspec distill --text' from installed files: code to change, texts to read, other questions.

    python scripts/train/smollm2_prompts.py prompts.jsonl [--count 12000]

A small model asks itself short questions; a head trained only on these proposes badly for pasted code or documents. So
functions, docstrings, manuals and package metadata of the Python installation become chats of the kinds in
scripts/bench/chats.json, without its texts. The model writes all answers.
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
from typing import Any

Chat = list[dict[str, str]]
CODE_LINES = (6, 45)
PROSE_WORDS = (120, 600)  # minimum and maximum length of a long text
TEMPLATES: dict[str, list[Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
ASKED_FIRST = 0.25  # share of prompts with the task before the text


@dataclass(frozen=True)
class Function:
    """A function of an installed module. ``summary``: the first sentence of its docstring."""

    name: str
    arguments: list[str]
    source: str
    summary: str
    names: list[str]  # names of its variables


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


# ---------------------------------------------------------------- installed files


def folders() -> list[Path]:
    return [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]


def functions(draws: random.Random) -> Iterator[Function]:
    """Yield functions of installed modules, in a random order of files."""
    files = sorted(file for folder in folders() for file in folder.rglob("*.py") if "test" not in str(file).lower())
    draws.shuffle(files)
    for file in files:
        try:
            source = file.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError):
            continue
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for node in draws.sample(nodes, min(len(nodes), 4)):
            text = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
            if CODE_LINES[0] <= text.count("\n") + 1 <= CODE_LINES[1] and len(text) < 2500:
                yield function_of(node, text)


def function_of(node: ast.FunctionDef, source: str) -> Function:
    doc = " ".join((ast.get_docstring(node) or "").split())
    summary = re.split(r"(?<=[a-z)`])\. |:(?: |$)", doc)[0].rstrip(".")
    variables = [name for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)]
    names = {variable.id for variable in variables}
    arguments = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")]
    return Function(node.name, arguments, source, summary if 20 < len(summary) < 200 else "", sorted(names))


def pages(draws: random.Random) -> Iterator[str]:
    """Yield pieces of manuals and descriptions of installed packages, at the borders of paragraphs."""
    roots = [*folders(), Path("/usr/share/doc"), Path("/usr/share/perl")]
    ends = {".md", ".rst", ".txt", ".pod", "METADATA"}
    files = sorted(file for root in roots for file in root.rglob("*") if {file.suffix, file.name} & {*ends, ""})
    draws.shuffle(files)
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        text = text.partition("\n\n")[2] if file.name == "METADATA" else text
        paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if is_prose(part)]
        for _ in range(min(3, len(paragraphs) // 4)):
            start, words, piece = draws.randrange(len(paragraphs)), draws.randint(*PROSE_WORDS), ""
            for paragraph in paragraphs[start:]:
                if len(piece.split()) < words:
                    piece += f"{paragraph}\n\n"
            if PROSE_WORDS[0] < len(piece.split()) < 800:
                yield piece.strip()


def is_prose(text: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in text)
    return 30 < len(text) < 2000 and "copyright" not in text.lower() and letters > 0.75 * len(text)


def metadata(draws: random.Random) -> Iterator[str]:
    """Yield the fields of installed packages' metadata."""
    files = sorted(folders()[1].glob("*.dist-info/METADATA"))
    while files:
        lines = draws.choice(files).read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
        fields = [line for line in lines if re.match(r"[A-Z][\w-]+: \S", line) and len(line) < 160]
        if len(fields) > 4:
            yield "\n".join(draws.sample(fields, min(len(fields), draws.randint(5, 14))))


# ---------------------------------------------------------------- kinds of chats


def with_task(task: str, text: str, draws: random.Random) -> str:
    return f"{task}\n\n{text}" if draws.random() < ASKED_FIRST else f"{text}\n\n{task}"


def on_code(function: Function, draws: random.Random) -> Chat:
    task = draws.choice(TEMPLATES["changes"] if draws.random() < 0.7 else TEMPLATES["about_code"])
    old = draws.choice(function.names) if function.names else function.name
    code = f"```python\n{function.source}\n```"
    text = task.format(old=old, new=draws.choice(TEMPLATES["new_names"]))
    return [message("user", f"{text}\n\n{code}" if draws.random() < 0.8 else f"{code}\n\n{text}")]


def to_write(function: Function, draws: random.Random) -> Chat | None:
    if not function.summary:
        return None
    arguments = ", ".join(function.arguments)
    fields = {"name": function.name, "summary": function.summary, "arguments": arguments or "it needs"}
    return [message("user", draws.choice(TEMPLATES["to_write"]).format(call=f"{function.name}({arguments})", **fields))]


def follow_up(function: Function, draws: random.Random) -> Chat | None:
    """Return a chat with an earlier answer."""
    if not function.summary:
        return None
    question = draws.choice(("What does `{}` do?", "I found `{}` in a program. What is it for?", "Explain `{}` to me."))
    chat = [message("user", question.format(function.name)), message("assistant", f"{function.summary}.")]
    if draws.random() < 0.5:
        code = f"Here is the code:\n\n```python\n{function.source}\n```"
        chat += [message("user", "Can you show me how it is written?"), message("assistant", code)]
    return [*chat, message("user", draws.choice(TEMPLATES["follow_ups"]))]


def on_text(text: str, draws: random.Random) -> Chat:
    words = re.findall(r"[A-Za-z][a-z]{5,}", text) or ["it"]
    tasks = TEMPLATES["about_text"] if draws.random() < 0.75 else TEMPLATES["extract_text"]
    task = draws.choice(tasks).replace("{word}", draws.choice(words))
    return [message("user", with_task(task, text, draws))]


def chats(draws: random.Random) -> Iterator[Chat]:
    """Yield chats, of each kind in turns, until a kind has no more."""
    sources = functions(draws)
    code: list[Callable[[Function, random.Random], Chat | None]] = [on_code, to_write, on_code, follow_up]
    texts, fields = pages(draws), metadata(draws)
    while True:
        for make in code:
            chat = next((chat for function in sources if (chat := make(function, draws))), None)
            if chat is None:
                return
            yield chat
        piece = next(texts, None)
        if piece is None:
            return
        yield on_text(piece, draws)
        if draws.random() < 0.5:
            yield [message("user", with_task(draws.choice(TEMPLATES["extract"]), next(fields), draws))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--count", type=int, default=12000, help="number of prompts, at most")
    args = parser.parse_args()
    draws, count = random.Random(0), 0
    warnings.simplefilter("ignore")  # warnings about the parsed sources
    with args.output.open("w", encoding="utf-8", newline="\n") as out:
        for chat in islice(chats(draws), args.count):
            system = draws.choice(TEMPLATES["systems"])
            messages = [message("system", system), *chat] if system else chat
            out.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
            count += 1
    print(f"{args.output}: {count} prompts", file=sys.stderr)


if __name__ == "__main__":
    main()
