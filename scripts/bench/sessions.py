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

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import CODE, Table, machine, milliseconds, options, picture, ratios, take_turns

import ovspec

PIECE = 36  # tokens
PLAIN: dict[str, Any] = {"ignore_eos": True, "lookahead": 0}


def cut(lm: ovspec.LanguageModel, tokens: int, count: int) -> list[str]:
    """Return ``count`` pieces of real text of about ``tokens`` tokens each, cut anywhere."""
    ids = np.concatenate([lm.tokenizer.encode(text + "\n") for text in CODE])
    return [lm.tokenizer.decode(piece) for piece in np.resize(ids, (count, tokens))]


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
    """Return (ms to read a piece and choose a token, ms of a step) in the middle of ``length`` tokens."""
    with lm.session() as session:
        while len(session) < length // 2 - PIECE:
            session.append(pieces[0])
        session.generate(max_tokens=8, **PLAIN)
        reads = []
        for piece in pieces[1:8]:  # a new piece each time: one that was read isn't read again, even after a rewind
            mark = session.mark()
            session.append(piece)
            reads.append(session.generate(max_tokens=1, heal=False, **PLAIN).stats.ttft_ms)
            session.rewind(mark)
        return statistics.median(reads), session.generate(max_tokens=32, heal=False, **PLAIN).stats.tpot_ms


def program(lm: ovspec.LanguageModel, steps: int, tokens: int, rounds: int) -> None:
    pieces = cut(lm, PIECE, steps)
    length = in_a_session(lm, pieces, tokens, False)
    ways: dict[str, Callable[[], int]] = {
        "(a) session, healed": lambda: in_a_session(lm, pieces, tokens, True),
        "(b) session": lambda: in_a_session(lm, pieces, tokens, False),
        "(c) each step from scratch": lambda: from_scratch(lm, pieces, tokens),
        "(d) one generation": lambda: in_one(lm, pieces[0], length),
    }
    predicted: list[float] = []

    def run(way: str, _: int) -> float:
        ms = milliseconds(ways[way])
        if way.startswith("(d)"):
            read, step = costs(lm, pieces, length)
            predicted.append((read + (length - PIECE - 1) * step) / (steps * (read + (tokens - 1) * step)))
        return ms

    times = take_turns(ways, run, rounds, warm_up=0)
    print(f"{machine()}\n{steps} steps of {PIECE} + {tokens} tokens, {length} in all; {rounds} rounds, medians\n")
    table = Table("", "s")
    for name, each in times.items():
        table.row(name, f"{statistics.median(each) / 1e3:.2f}")
    a, b, c, d = times.values()
    to_b = {name: statistics.median(ratios(each, b)) for name, each in (("c", c), ("a", a), ("d", d))}
    found = statistics.median(predicted)
    print("\n" + "; ".join(f"({name})/(b) {ratio:.2f}" for name, ratio in to_b.items()), end=", ")
    print(f"predicted {found:.2f} ({to_b['d'] / found:.2f} of the prediction)")


# ---------------------------------------------------------------- chat


def chat(lm: ovspec.LanguageModel, turns: int, answer: int, plot: Path | None) -> None:
    given: dict[str, Any] = {"max_tokens": answer, **PLAIN}
    lm.generate("a", **given)  # warm
    reused, anew, lengths, equal = [], [], [], 0
    with lm.session() as session:
        for piece in cut(lm, 60, turns):
            session.append({"role": "user", "content": piece})
            prompt = session.tokens
            result = session.generate(**given)
            fresh = lm.generate(prompt, **given)
            lengths.append(len(prompt))
            reused.append(result.stats.ttft_ms)
            anew.append(fresh.stats.ttft_ms)
            equal += fresh.token_ids == result.token_ids
    print(f"{machine()}\n")
    table = Table("turn", "tokens", "first token in a session, ms", "with the chat read again, ms")
    for turn in sorted({0, *range(4, turns, 5), turns - 1}):
        table.row(turn + 1, lengths[turn], f"{reused[turn]:.0f}", f"{anew[turn]:.0f}")
    print(f"\n{equal} of {turns} answers are the same, token for token")
    if plot:
        with picture(plot, size=(6, 3.6)) as [axis]:
            for times, label in ((anew, "with the whole chat read again"), (reused, "in a session")):
                axis.plot(range(1, turns + 1), [ms / 1e3 for ms in times], "o-", markersize=3, label=label)
            axis.set_xlabel(f"turn of the chat (the last has {lengths[-1]} tokens)")
            axis.set_ylabel("seconds to the first token")
            axis.set_ylim(bottom=0)
            axis.set_xticks(range(0, turns + 1, 5))
            axis.grid(alpha=0.3)
            axis.legend()


def main() -> None:
    parser = options(__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    steps, talk = what.add_parser("program"), what.add_parser("chat")
    for each, counts in ((steps, {"steps": 20, "tokens": 2, "rounds": 3}), (talk, {"turns": 20, "answer": 40})):
        each.add_argument("folder", type=Path)
        for name, usual in counts.items():
            each.add_argument(f"--{name}", type=int, default=usual)
    talk.add_argument("--plot", type=Path)
    args = parser.parse_args()
    lm = ovspec.load(args.folder, cache_memory=0)
    if args.what == "program":
        program(lm, args.steps, args.tokens, args.rounds)
    else:
        chat(lm, args.turns, args.answer, args.plot)


if __name__ == "__main__":
    main()
