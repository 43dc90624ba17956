"""Measure the time saved by the KV cache of earlier text: in sessions, and in the prefix cache.

    python scripts/bench/sessions.py program DIR [--steps 20] [--tokens 2] [--turns 3]
    python scripts/bench/sessions.py chat DIR [--steps 20] [--tokens 40]
    python scripts/bench/sessions.py prefixes DIR [--checkpoint DIR] [--peers genai,llamacpp] [--prompt 1000] [--new 20]

program: appends a piece of 36 tokens and generates 2, twenty times (after the experiment in guidance's document on
    "guidance acceleration"): in a session with healing at the end of each piece, in a session without, and with each
    step from scratch. There is no draft and no lookup.
chat: each turn has a message of about 60 tokens. Measures the time to the first token of each answer, in a session and
    with the whole chat prefilled again.
prefixes: a prompt of --prompt tokens is answered with 8 tokens; then the same again, followed by its answer and --new
    tokens: in turns with the peers, each time with another prompt. The share is the next turn's time divided by the
    whole prompt's. Then a chat of --steps turns grows by --new tokens and an answer each. Use an idle machine.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from figures import Table, machine, median, median_and_range, milliseconds, ratios, take_turns
from harness import CODE, Option, Worker, arguments
from peers.install import gguf_of

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.setup.tuning import TUNING_TEXT_FILE

PIECE = 36  # tokens of the program's pieces
MESSAGE = 60  # tokens of the chat's messages
ANSWER = 8  # tokens, after a prefix
PLAIN: dict[str, Any] = {"ignore_eos": True, "lookahead": 0}


def cut_pieces(lm: ovspec.LanguageModel, tokens: int, count: int) -> list[str]:
    """Return ``count`` pieces of real text of about ``tokens`` tokens each, cut anywhere."""
    ids = np.concatenate([lm.tokenizer.encode(text + "\n") for text in CODE])
    return [lm.tokenizer.decode(piece) for piece in np.resize(ids, (count, tokens))]


# ---------------------------------------------------------------- sessions


def run_in_session(lm: ovspec.LanguageModel, pieces: list[str], tokens: int, heal: bool) -> None:
    with lm.session() as session:
        for piece in pieces:
            session.append(piece)
            session.generate(max_tokens=tokens, heal=heal, **PLAIN)


def run_from_scratch(lm: ovspec.LanguageModel, pieces: list[str], tokens: int) -> None:
    text: list[int] = []
    for piece in pieces:
        text += lm.tokenizer.encode_continuation(piece).tolist()
        text += lm.generate(text, max_tokens=tokens, **PLAIN).token_ids


def time_program(args: Namespace) -> None:
    lm = ovspec.load(args.folder, cache_memory=0)
    tokens = args.tokens or 2
    pieces = cut_pieces(lm, PIECE, args.steps)
    ways = {
        "session, healed": lambda: run_in_session(lm, pieces, tokens, True),
        "session": lambda: run_in_session(lm, pieces, tokens, False),
        "each step from scratch": lambda: run_from_scratch(lm, pieces, tokens),
    }
    times = take_turns(ways, lambda way, _: milliseconds(ways[way]) / 1e3, args.turns)
    print(f"{args.steps} steps of {PIECE} + {tokens} tokens; medians of {args.turns} turns\n")
    table = Table("", "s")
    for way, seconds in times.items():
        table.row(way, median(seconds, 2))


def time_chat(args: Namespace) -> None:
    lm = ovspec.load(args.folder, cache_memory=0)
    options: dict[str, Any] = {"max_tokens": args.tokens or 40, **PLAIN}
    lm.generate("a", **options)  # warm-up
    equal = 0
    table = Table("turn", "tokens", "first token in a session, ms", "with the chat read again, ms")
    with lm.session() as session:
        for turn, piece in enumerate(cut_pieces(lm, MESSAGE, args.steps), 1):
            session.append({"role": "user", "content": piece})
            prompt = session.tokens
            answer = session.generate(**options)
            again = lm.generate(prompt, **options)
            equal += again.token_ids == answer.token_ids
            if turn in (1, args.steps) or turn % 5 == 0:
                table.row(turn, len(prompt), f"{answer.stats.ttft_ms:.0f}", f"{again.stats.ttft_ms:.0f}")
    print(f"\n{equal} of {args.steps} answers are the same, token for token")


# ---------------------------------------------------------------- the prefix cache


def start_peer(peer: str, model: Path, checkpoint: Path | None) -> Worker:
    """Start a peer's process; raises RuntimeError if it can't be used here."""
    setup = {"target": str(model), "options": {"prefix_caching": True}}
    if peer == "llamacpp":
        if not checkpoint:
            raise RuntimeError("llamacpp needs --checkpoint, what DIR was exported from; or leave it out of --peers")
        setup["target"] = str(gguf_of(checkpoint))
        setup["options"] |= {"threads": psutil.cpu_count(logical=False)}  # type: ignore[operator]
    worker = Worker(peer, setup)
    if "error" in worker.ready:
        raise RuntimeError(f"{peer}: {worker.ready['error']}; or leave it out of --peers")
    return worker


def time_prefixes(args: Namespace) -> None:
    lm = ovspec.load(args.folder, "none")
    text = np.resize(lm.encode(TUNING_TEXT_FILE.read_text(encoding="utf-8")), 8 * args.prompt).tolist()
    random = np.random.default_rng(0)

    def new_text(count: int) -> list[int]:
        begin = int(random.integers(0, len(text) - count))
        return random.integers(100, 1000, 4).tolist() + text[begin : begin + count - 4]

    with ExitStack() as stack:
        peers = [peer for peer in args.peers if peer != "none"]
        workers = {peer: stack.enter_context(start_peer(peer, args.folder, args.checkpoint)) for peer in peers}

        def ask(system: str, prompt: list[int]) -> tuple[list[int], float]:
            """Return the answer, and the milliseconds until its first token."""
            if system in workers:
                answer = workers[system].answer({"prompts": [prompt], "max_tokens": ANSWER})
                return answer["tokens"][0], answer["ttft_ms"]
            result = lm.generate(prompt, max_tokens=ANSWER, **PLAIN)
            return result.token_ids, result.stats.ttft_ms

        def time_both(system: str, _: int) -> tuple[float, float]:
            prompt = new_text(args.prompt)
            answer, whole_ms = ask(system, prompt)
            return whole_ms, ask(system, [*prompt, *answer, *new_text(args.new)])[1]

        by_system = take_turns(["ovspec", *peers], time_both, args.turns)
    table = Table("system", f"{args.prompt} tokens, ms", f"{args.new} more, ms", "share")
    for system, times in by_system.items():
        whole, more = zip(*times, strict=True)
        table.row(system, median(whole, 0), median(more, 0), median_and_range(ratios(more, whole)))
    print("\nA chat:\n")
    table = Table("turn", "tokens", "cached", "first token, ms")
    chat = new_text(args.new)
    for turn in range(1, args.steps + 1):
        answer = lm.generate(chat, max_tokens=ANSWER, **PLAIN)
        if turn in (1, args.steps) or turn % 10 == 0:
            table.row(turn, len(chat), answer.stats.cached_tokens, f"{answer.stats.ttft_ms:.0f}")
        chat += [*answer.token_ids, *new_text(args.new)]


def main() -> None:
    measure = {"program": time_program, "chat": time_chat, "prefixes": time_prefixes}
    args = arguments(
        __doc__,
        tuple(measure),
        "folder",
        steps=Option(20, "of the program, or turns of the chat"),
        tokens=Option(int, "generated in each step: 2 by the program, 40 in the chat"),
        turns=3,
        checkpoint=Option(Path, "what DIR was exported from, for llamacpp"),
        peers=Option(["genai", "llamacpp"], choices=("genai", "llamacpp", "none")),
        prompt=Option(1000, "tokens of a prompt"),
        new=Option(20, "tokens of the next turn"),
    )
    print(f"{args.folder.name} on {machine()}\n")
    measure[args.what](args)


if __name__ == "__main__":
    try:
        main()
    except (OvspecError, OSError, RuntimeError) as error:
        sys.exit(f"Error: {error}")
