"""Measure what sessions save: a program of many short steps and a chat of many turns, with and without a session.

    python scripts/bench/sessions.py program DIR [--steps 20] [--tokens 2] [--rounds 3]
    python scripts/bench/sessions.py chat DIR [--steps 20] [--tokens 40]

The program appends a piece of 36 tokens and generates 2, twenty times (after the experiment in guidance's document on
"guidance acceleration"): in a session that heals the end of each piece, in one that doesn't, and with each step from
scratch. There is no draft and no lookup.

The chat has a message of about 60 tokens in each turn. It measures the time to the first token of each answer, in a
session and with the whole chat read again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from harness import CODE, Option, Table, arguments, machine, median, milliseconds, take_turns

import ovspec

PIECE = 36  # tokens of the program's pieces
MESSAGE = 60  # tokens of the chat's messages
PLAIN: dict[str, Any] = {"ignore_eos": True, "lookahead": 0}


def cut_pieces(lm: ovspec.LanguageModel, tokens: int, count: int) -> list[str]:
    """Return ``count`` pieces of real text of about ``tokens`` tokens each, cut anywhere."""
    ids = np.concatenate([lm.tokenizer.encode(text + "\n") for text in CODE])
    return [lm.tokenizer.decode(piece) for piece in np.resize(ids, (count, tokens))]


def run_in_session(lm: ovspec.LanguageModel, pieces: list[str], tokens: int, heal: bool) -> None:
    with lm.session() as session:
        for piece in pieces:
            session.append(piece)
            session.generate(max_tokens=tokens, heal=heal, **PLAIN)


def run_from_scratch(lm: ovspec.LanguageModel, pieces: list[str], tokens: int) -> None:
    text: list[int] = []
    for piece in pieces:
        text += lm.tokenizer.encode_more(piece).tolist()
        text += lm.generate(text, max_tokens=tokens, **PLAIN).token_ids


def time_program(lm: ovspec.LanguageModel, steps: int, tokens: int, rounds: int) -> None:
    pieces = cut_pieces(lm, PIECE, steps)
    ways = {
        "session, healed": lambda: run_in_session(lm, pieces, tokens, True),
        "session": lambda: run_in_session(lm, pieces, tokens, False),
        "each step from scratch": lambda: run_from_scratch(lm, pieces, tokens),
    }
    times = take_turns(ways, lambda way, _: milliseconds(ways[way]) / 1e3, rounds)
    print(f"{machine()}\n{steps} steps of {PIECE} + {tokens} tokens; medians of {rounds} rounds\n")
    table = Table("", "s")
    for way, seconds in times.items():
        table.row(way, median(seconds, 2))


def time_chat(lm: ovspec.LanguageModel, turns: int, tokens: int) -> None:
    options: dict[str, Any] = {"max_tokens": tokens, **PLAIN}
    lm.generate("a", **options)  # warm
    equal = 0
    print(f"{machine()}\n")
    table = Table("turn", "tokens", "first token in a session, ms", "with the chat read again, ms")
    with lm.session() as session:
        for turn, piece in enumerate(cut_pieces(lm, MESSAGE, turns), 1):
            session.append({"role": "user", "content": piece})
            prompt = session.tokens
            answer = session.generate(**options)
            again = lm.generate(prompt, **options)
            equal += again.token_ids == answer.token_ids
            if turn in (1, turns) or turn % 5 == 0:
                table.row(turn, len(prompt), f"{answer.stats.ttft_ms:.0f}", f"{again.stats.ttft_ms:.0f}")
    print(f"\n{equal} of {turns} answers are the same, token for token")


def main() -> None:
    tokens = Option(int, "generated in each step: 2 by the program, 40 in the chat")
    args = arguments(__doc__, ("program", "chat"), "folder", steps=20, tokens=tokens, rounds=3)
    lm = ovspec.load(args.folder, cache_memory=0)
    if args.what == "program":
        time_program(lm, args.steps, args.tokens or 2, args.rounds)
    else:
        time_chat(lm, args.steps, args.tokens or 40)


if __name__ == "__main__":
    main()
