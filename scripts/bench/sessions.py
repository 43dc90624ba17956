"""Measure what sessions save: a program of many short steps and a chat of many turns, with and without a session.

    python scripts/bench/sessions.py program DIR [--steps 20] [--tokens 2] [--rounds 3]
    python scripts/bench/sessions.py chat DIR [--turns 20] [--answer 40] [--plot FILE]

The program appends a piece of 36 tokens and generates 2, twenty times (after the experiment in guidance's document on
"guidance acceleration"): (a) in a session that heals the end of each piece, (b) in one that doesn't, (c) with each step
from scratch, (d) as one generation of the same length. There is no draft and no lookup. The ratio (d)/(b) is compared
with a prediction from the costs of a step and of reading a piece, measured alone in the middle of that text.

The chat has a message of about 60 tokens in each turn. It measures the time to the first token of each answer, in a
session and with the whole chat read again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ovspec
from ovspec.text.chat_template import Message

TEXTS = json.loads(
    (Path(__file__).resolve().parent.parent.parent / "models" / "prompts.json").read_text(encoding="utf-8")
)
JOINING_CHUNK = 36
PLAIN: dict[str, Any] = {"ignore_eos": True, "lookahead": 0}


def cut(lm: ovspec.LanguageModel, tokens: int, count: int) -> list[str]:
    """Return ``count`` pieces of real text of about ``tokens`` tokens each, cut anywhere."""
    ids = np.concatenate([lm.tokenizer.encode(entry["text"] + "\n") for entry in TEXTS["prompts"]])
    ids = np.tile(ids, -(-tokens * count // len(ids)))
    return [lm.tokenizer.decode(ids[start * tokens : (start + 1) * tokens]) for start in range(count)]


# ---------------------------------------------------------------- program


def in_a_session(lm: ovspec.LanguageModel, pieces: list[str], tokens: int, heal: bool) -> int:
    """Run the program in a session; return the number of tokens of the whole text."""
    with lm.session() as session:
        for piece in pieces:
            session.append(piece)
            session.generate(max_tokens=tokens, heal=heal, **PLAIN)
        return len(session)


def from_scratch(lm: ovspec.LanguageModel, pieces: list[str], tokens: int) -> int:
    text: list[int] = []
    for piece in pieces:
        text += lm.tokenizer.encode_more(piece).tolist()
        text += lm.generate(text, max_tokens=tokens, **PLAIN).token_ids
    return len(text)


def in_one(lm: ovspec.LanguageModel, piece: str, length: int) -> int:
    prompt = lm.tokenizer.encode(piece)
    return len(prompt) + len(lm.generate(prompt, max_tokens=length - len(prompt), **PLAIN).token_ids)


def costs(lm: ovspec.LanguageModel, pieces: list[str], length: int) -> tuple[float, float]:
    """Return (seconds to read a piece and choose a token, seconds of a step) in the middle of ``length`` tokens."""
    with lm.session() as session:
        while len(session) < length // 2 - JOINING_CHUNK:
            session.append(pieces[0])
        session.generate(max_tokens=8, **PLAIN)
        reads = []
        for piece in pieces[1:8]:  # a new piece each time: one that was read isn't read again, even after a rewind
            mark = session.mark()
            session.append(piece)
            reads.append(session.generate(max_tokens=1, heal=False, **PLAIN).stats.ttft_ms / 1e3)
            session.rewind(mark)
        step = session.generate(max_tokens=32, heal=False, **PLAIN).stats.tpot_ms / 1e3
    return statistics.median(reads), step


def program(lm: ovspec.LanguageModel, steps: int, tokens: int, rounds: int) -> None:
    pieces = cut(lm, JOINING_CHUNK, steps)
    length = in_a_session(lm, pieces, tokens, False)  # warm
    ways: dict[str, Callable[[], int]] = {
        "(a) session, healed": lambda: in_a_session(lm, pieces, tokens, True),
        "(b) session": lambda: in_a_session(lm, pieces, tokens, False),
        "(c) each step from scratch": lambda: from_scratch(lm, pieces, tokens),
        "(d) one generation": lambda: in_one(lm, pieces[0], length),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    lengths: dict[str, int] = {}
    predicted = []
    for _ in range(rounds):
        for name, run in ways.items():
            began = time.perf_counter()
            lengths[name] = run()
            seconds[name].append(time.perf_counter() - began)
        read, step = costs(lm, pieces, length)
        predicted.append((read + (length - JOINING_CHUNK - 1) * step) / (steps * (read + (tokens - 1) * step)))
    a, b, c, d = seconds.values()

    def ratio(over: list[float], under: list[float]) -> float:
        return statistics.median(x / y for x, y in zip(over, under, strict=True))

    print(f"{steps} steps of {JOINING_CHUNK} + {tokens} tokens, {rounds} rounds in turns, medians")
    print("\n| | s | tokens |\n|---|---|---|")
    for name, times in seconds.items():
        print(f"| {name} | {statistics.median(times):.2f} | {lengths[name]} |")
    found = statistics.median(predicted)
    print(
        f"\n(c)/(b) {ratio(c, b):.2f}; (a)/(b) {ratio(a, b):.2f}; (d)/(b) {ratio(d, b):.2f}, predicted {found:.2f}",
        end=" ",
    )
    print(f"({ratio(d, b) / found:.2f} of the prediction)")


# ---------------------------------------------------------------- chat


def chat(lm: ovspec.LanguageModel, turns: int, answer: int, plot_file: Path | None) -> None:
    options: dict[str, Any] = {"max_tokens": answer, **PLAIN}
    lm.generate("a", **options)  # warm
    reused, anew, lengths, equal = [], [], [], 0
    with lm.session() as session:
        for piece in cut(lm, 60, turns):
            message: Message = {"role": "user", "content": piece}
            session.append(message)
            prompt = session.tokens
            result = session.generate(**options)
            fresh = lm.generate(prompt, **options)
            lengths.append(len(prompt))
            reused.append(result.stats.ttft_ms)
            anew.append(fresh.stats.ttft_ms)
            equal += fresh.token_ids == result.token_ids
    print("| turn | tokens | first token in a session, ms | with the chat read again, ms |\n|---|---|---|---|")
    for turn in sorted({0, *range(4, turns, 5), turns - 1}):
        print(f"| {turn + 1} | {lengths[turn]} | {reused[turn]:.0f} | {anew[turn]:.0f} |")
    print(f"\n{equal} of {turns} answers are the same, token for token")
    if plot_file:
        plot(lengths, reused, anew, plot_file)


def plot(lengths: list[int], reused: list[float], anew: list[float], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    turns = range(1, len(lengths) + 1)
    figure, axis = pyplot.subplots(figsize=(6, 3.6))
    axis.plot(turns, [ms / 1e3 for ms in anew], marker="o", markersize=3, label="with the whole chat read again")
    axis.plot(turns, [ms / 1e3 for ms in reused], marker="o", markersize=3, label="in a session")
    axis.set_xlabel(f"turn of the chat (the last has {lengths[-1]} tokens)")
    axis.set_ylabel("seconds to the first token")
    axis.set_ylim(bottom=0)
    axis.set_xticks(range(0, len(lengths) + 1, 5))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    steps = what.add_parser("program")
    steps.add_argument("folder", type=Path)
    steps.add_argument("--steps", type=int, default=20)
    steps.add_argument("--tokens", type=int, default=2)
    steps.add_argument("--rounds", type=int, default=3)
    talk = what.add_parser("chat")
    talk.add_argument("folder", type=Path)
    talk.add_argument("--turns", type=int, default=20)
    talk.add_argument("--answer", type=int, default=40)
    talk.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    lm = ovspec.load(arguments.folder)
    if arguments.what == "program":
        program(lm, arguments.steps, arguments.tokens, arguments.rounds)
    else:
        chat(lm, arguments.turns, arguments.answer, arguments.plot)


if __name__ == "__main__":
    main()
