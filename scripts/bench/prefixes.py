"""Time the first token of a chat's next turn, most of which is in the prefix cache, beside that of reading it all.

    python scripts/bench/prefixes.py MODEL [--checkpoint DIR] [--peers genai,llamacpp] [--prompt 1000] [--new 20]

A prompt of --prompt tokens is answered with 8 tokens, and then once more, followed by its answer and --new tokens: in
turns with the peers, each time another prompt. Then a chat of --chat turns grows by --new tokens and an answer each.
The share is that of the next turn's time in that of the whole prompt's. Use an idle machine.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
from harness import Table, Worker, machine, options, ratios, several, shown, take_turns
from peers.install import gguf_of

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.setup.tuning import TUNING_TEXT_FILE

ANSWER = 8
Ask = Callable[[list[int]], tuple[list[int], float]]  # a prompt -> its answer, and ms until the first token


def ask_ovspec(lm: ovspec.LanguageModel) -> Ask:
    def ask(prompt: list[int]) -> tuple[list[int], float]:
        result = lm.generate(prompt, max_tokens=ANSWER, ignore_eos=True, lookahead=0)
        return result.token_ids, result.stats.ttft_ms

    return ask


def ask_peer(worker: Worker) -> Ask:
    def ask(prompt: list[int]) -> tuple[list[int], float]:
        answer = worker.answer({"prompts": [prompt], "max_tokens": ANSWER})
        return answer["tokens"][0], answer["ttft_ms"]

    return ask


def start(peer: str, model: Path, checkpoint: Path | None) -> Worker:
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
    parser = options(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="what MODEL was exported from, for llamacpp")
    parser.add_argument("--peers", type=several(choices=("genai", "llamacpp", "none")), default="genai,llamacpp")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--new", type=int, default=20)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--chat", type=int, default=50)
    args = parser.parse_args()
    lm = ovspec.load(args.model, "none")
    text = np.resize(lm.encode(TUNING_TEXT_FILE.read_text(encoding="utf-8")), 8 * args.prompt).tolist()
    random = np.random.default_rng(0)

    def prompt(count: int) -> list[int]:
        begin = int(random.integers(0, len(text) - count))
        return random.integers(100, 1000, 4).tolist() + text[begin : begin + count - 4]

    with ExitStack() as stack:
        peers = {peer: start(peer, args.model, args.checkpoint) for peer in args.peers if peer != "none"}
        ways: dict[str, Ask] = {"ovspec": ask_ovspec(lm)}
        ways |= {name: ask_peer(stack.enter_context(worker)) for name, worker in peers.items()}

        def both(way: str, _: int) -> tuple[float, float]:
            begin = prompt(args.prompt)
            answer, whole = ways[way](begin)
            return whole, ways[way]([*begin, *answer, *prompt(args.new)])[1]

        found = take_turns(ways, both, args.turns)
        print(f"{args.model.name} on {machine()}\n")
        table = Table("system", f"{args.prompt} tokens, ms", f"{args.new} more, ms", "share")
        for way, times in found.items():
            whole, more = zip(*times, strict=True)
            table.row(way, *(f"{statistics.median(ms):.0f}" for ms in (whole, more)), shown(ratios(more, whole)))
    print("\nA chat:\n")
    table = Table("turn", "tokens", "cached", "first token, ms")
    chat = prompt(args.new)
    for turn in range(1, args.chat + 1):
        result = lm.generate(chat, max_tokens=ANSWER, ignore_eos=True, lookahead=0)
        if turn == 1 or turn % 10 == 0 or turn == args.chat:
            table.row(turn, len(chat), result.stats.cached_tokens, f"{result.stats.ttft_ms:.0f}")
        chat += [*result.token_ids, *prompt(args.new)]


if __name__ == "__main__":
    try:
        main()
    except (OvspecError, OSError, RuntimeError) as error:
        sys.exit(f"Error: {error}")
