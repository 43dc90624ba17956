"""Time the first token of a chat's next turn, most of which is in the prefix cache, beside that of reading it all.

    python scripts/bench/prefixes.py MODEL [--checkpoint DIR] [--peers genai,llamacpp] [--prompt 1000] [--new 20]

A prompt of --prompt tokens is answered with 8 tokens, and then once more, followed by its answer and --new tokens: in
turns with the peers, each time another prompt. Then a chat of --chat turns grows by --new tokens and an answer each.
The share is that of the next turn's time in that of the whole prompt's. Use an idle machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
from harness import Option, Table, Worker, arguments, machine, median, median_and_range, ratios, take_turns
from peers.install import gguf_of

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.setup.tuning import TUNING_TEXT_FILE

ANSWER = 8  # tokens
Ask = Callable[[list[int]], tuple[list[int], float]]  # a prompt -> its answer, and ms until the first token


def ask_ovspec(lm: ovspec.LanguageModel) -> Ask:
    def ask(prompt: list[int]) -> tuple[list[int], float]:
        answer = lm.generate(prompt, max_tokens=ANSWER, ignore_eos=True, lookahead=0)
        return answer.token_ids, answer.stats.ttft_ms

    return ask


def ask_peer(worker: Worker) -> Ask:
    def ask(prompt: list[int]) -> tuple[list[int], float]:
        answer = worker.answer({"prompts": [prompt], "max_tokens": ANSWER})
        return answer["tokens"][0], answer["ttft_ms"]

    return ask


def start_peer(peer: str, model: Path, checkpoint: Path | None) -> Worker:
    """Start a peer's process; raises RuntimeError if it can't be used here."""
    setup = {"target": str(model), "options": {"prefix_caching": True}}
    if peer == "llamacpp":
        if not checkpoint:
            raise RuntimeError("llamacpp needs --checkpoint, what MODEL was exported from; or leave it out of --peers")
        setup["target"] = str(gguf_of(checkpoint, "q8_0"))
        setup["options"] |= {"threads": psutil.cpu_count(logical=False)}  # type: ignore[operator]
    worker = Worker(peer, setup)
    if "error" in worker.ready:
        raise RuntimeError(f"{peer}: {worker.ready['error']}; or leave it out of --peers")
    return worker


def main() -> None:
    args = arguments(
        __doc__,
        "model",
        checkpoint=Option(Path, "what MODEL was exported from, for llamacpp"),
        peers=Option(["genai", "llamacpp"], choices=("genai", "llamacpp", "none")),
        prompt=Option(1000, "tokens of a prompt"),
        new=Option(20, "tokens of the next turn"),
        turns=5,
        chat=Option(50, "turns of the chat"),
    )
    lm = ovspec.load(args.model, "none")
    text = np.resize(lm.encode(TUNING_TEXT_FILE.read_text(encoding="utf-8")), 8 * args.prompt).tolist()
    random = np.random.default_rng(0)

    def new_text(count: int) -> list[int]:
        begin = int(random.integers(0, len(text) - count))
        return random.integers(100, 1000, 4).tolist() + text[begin : begin + count - 4]

    with ExitStack() as stack:
        ways: dict[str, Ask] = {"ovspec": ask_ovspec(lm)}
        for peer in args.peers:
            if peer != "none":
                ways[peer] = ask_peer(stack.enter_context(start_peer(peer, args.model, args.checkpoint)))

        def time_both(way: str, _: int) -> tuple[float, float]:
            prompt = new_text(args.prompt)
            answer, whole_ms = ways[way](prompt)
            return whole_ms, ways[way]([*prompt, *answer, *new_text(args.new)])[1]

        by_way = take_turns(ways, time_both, args.turns)
    print(f"{args.model.name} on {machine()}\n")
    table = Table("system", f"{args.prompt} tokens, ms", f"{args.new} more, ms", "share")
    for way, times in by_way.items():
        whole, more = zip(*times, strict=True)
        table.row(way, median(whole, 0), median(more, 0), median_and_range(ratios(more, whole)))
    print("\nA chat:\n")
    table = Table("turn", "tokens", "cached", "first token, ms")
    chat = new_text(args.new)
    for turn in range(1, args.chat + 1):
        answer = lm.generate(chat, max_tokens=ANSWER, ignore_eos=True, lookahead=0)
        if turn in (1, args.chat) or turn % 10 == 0:
            table.row(turn, len(chat), answer.stats.cached_tokens, f"{answer.stats.ttft_ms:.0f}")
        chat += [*answer.token_ids, *new_text(args.new)]


if __name__ == "__main__":
    try:
        main()
    except (OvspecError, OSError, RuntimeError) as error:
        sys.exit(f"Error: {error}")
