"""Time ``ovspec serve`` under load, beside ``lm.stream``, openvino-genai and llama.cpp's server, in turns.

    python scripts/bench/peers/install.py genai llamacpp
    .cache/peers/llamacpp/bin/python scripts/bench/peers/gguf_writer.py .cache/bench/1b-gqa/hf/target OUT.gguf
    python scripts/bench/serve.py .cache/bench/1b-gqa/int8 [--gguf OUT.gguf] [--clients 1,4,8,16] [--turns 3]
        [--loops closed,open] [--every 10] [--prompts completion,chat] [--systems "NAME; ..."] [--json FILE]

All servers are loaded at once and take turns with the same requests; a first turn, in which kernels are made, is left
out. "completion": the beginning of a program, 64 tokens are asked for. "chat": a conversation of 64 to 256 tokens, 24
to 72 tokens are asked for. "turns": five turns of a conversation of each client, with one system prompt. In a closed
loop each client sends its next request when the last one is answered; in an open loop each sends one every ten seconds
on average (--every), at random times. Texts are greedy. genai runs in its own process without HTTP, with its own
defaults, or with ovspec's properties ("genai, exact"). "256 at a time": with --prefill-chunk 256, as genai reads
prompts; "no cache": with --cache-memory 0. TTFT is the time to the first piece, a gap that between two pieces of a
text; a piece has the tokens of one round. Ratios are of tokens/s, turn by turn.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import CODE, PROSE, Table, Worker, machine, options, ratios, several, shown, take_turns
from peers.arrivals import Load, Timeline
from peers.http_server import Server
from peers.install import server_of_llamacpp

import ovspec
from ovspec.text.tokenizer import Tokenizer

PERCENTILES = (50, 95, 99)
STREAM, GENAI, EXACT = "lm.stream", "genai", "genai, exact"
# Name: the worker, or the server, and its mode or options.
SYSTEMS: dict[str, tuple[str, Any]] = {
    STREAM: ("stream", "plain"),
    f"{STREAM}, lookup,draft": ("stream", "lookup,draft"),
    "serve": ("serve", ["none"]),
    "serve, no cache": ("serve", ["none", "--cache-memory", "0"]),
    "serve, lookup,draft": ("serve", ["lookup,draft"]),
    "serve, 256 at a time": ("serve", ["none", "--prefill-chunk", "256"]),
    "serve, lookup,draft, 256 at a time": ("serve", ["lookup,draft", "--prefill-chunk", "256"]),
    GENAI: ("genai_serving", "plain"),
    EXACT: ("genai_serving", "plain"),
    "genai, draft": ("genai_serving", "draft"),
    "llama.cpp": ("llamacpp", "plain"),
}
HEADS = ("loop", "prompts", "clients", "system", "tokens/s", "to lm.stream", "to genai", "TTFT, ms", "gap, ms")
Run = Callable[[Load], list[Timeline]]


@dataclass(frozen=True)
class Cell:
    loop: str
    prompts: str
    clients: int


# ---------------------------------------------------------------- requests


def load_of(cell: Cell, turn: int, tokenizer: Tokenizer, every: float) -> Load:
    """Return the requests of a cell's turn: the same for every system, others in every turn.

    ``every``: seconds between two requests of a client in an open loop, on average.
    """
    chance = random.Random(f"{cell} {turn}")
    if cell.prompts == "turns":
        return Load(*conversations(chance, tokenizer, cell.clients), cell.clients)
    prompts, tokens = list[list[int]](), list[int]()
    for number in range(4 + 2 * cell.clients):
        if cell.prompts == "completion":
            text = f"# File {chance.randrange(10**6)}\n{CODE[(number + 7 * turn) % len(CODE)]}"
            prompts.append(tokenizer.encode(text).tolist())
            tokens.append(64)
        else:
            wanted, text = chance.randint(64, 256), f"User {chance.randrange(10**6)}:"
            while len(tokenizer.encode(text)) < wanted:
                text += f" {chance.choice(PROSE)}\nAssistant: {chance.choice(CODE)}\nUser:"
            prompts.append(tokenizer.encode(text)[:wanted].tolist())
            tokens.append(chance.randint(24, 72))
    if cell.loop == "closed":
        return Load(prompts, tokens, cell.clients)
    starts = np.cumsum([chance.expovariate(cell.clients / every) for _ in prompts])
    return Load(prompts, tokens, starts=[float(start - starts[0]) for start in starts])


def conversations(chance: random.Random, tokenizer: Tokenizer, count: int) -> tuple[list[list[int]], list[int]]:
    """Return the prompts of conversations that take turns, and how many tokens to ask for: a system prompt, 5 turns."""
    prompts, tokens = list[list[int]](), list[int]()
    system = tokenizer.encode(f"System {chance.randrange(10**6)}: " + " ".join(PROSE + CODE)).tolist()[:300]
    said = [system + tokenizer.encode(f"User {number}:").tolist() for number in range(count)]
    for _ in range(5):
        for number in range(count):
            said[number] = (
                said[number] + tokenizer.encode(f" {chance.choice(PROSE)}\nAssistant: {chance.choice(CODE)}").tolist()
            )
            prompts.append(said[number])
            tokens.append(chance.randint(24, 72))
    return prompts, tokens


# ---------------------------------------------------------------- systems


def over_http(port: int, path: str, limit: str, **more: Any) -> Run:
    """Return the function that sends a load's requests to a server and reads the streams.

    ``limit``: the server's name for the number of tokens; ``more``: further fields of each request.
    """

    async def ask(load: Load, number: int, line: Timeline) -> None:
        asked = {"prompt": load.prompts[number], limit: load.tokens[number], "ignore_eos": True, "stream": True}
        body = json.dumps(asked | more).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r} {await reader.read(2000)!r}")
        async for part in reader:
            if part.startswith(b"data: {"):
                now, piece = load.now, json.loads(part[6:])
                if "error" in piece:
                    raise RuntimeError(part)
                if piece["content"] if "content" in piece else piece["choices"][0]["text"]:
                    line.pieces.append(now)
        writer.close()

    async def run(load: Load) -> list[Timeline]:
        lines, waiting = list[Timeline](), set[asyncio.Task[None]]()
        load.restart()
        while waiting or not load.sent_all:
            for number in load.due():
                lines.append(load.sent(number))
                waiting.add(asyncio.create_task(ask(load, number, lines[-1])))
            if not waiting:
                await asyncio.sleep(load.wait() or 0.0)
                continue
            done, waiting = await asyncio.wait(waiting, timeout=load.wait(), return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
                load.answered()
        return lines

    return lambda load: asyncio.run(run(load))


def started(name: str, args: argparse.Namespace, properties: dict[str, str], ends: ExitStack) -> Run:
    """Start a system, which ``ends`` will end, and return the function that runs loads on it."""
    kind, mode = SYSTEMS[name]
    folder, most = str(args.folder), max(args.clients)
    if kind == "serve":
        command = [sys.executable, "-m", "ovspec", "serve", folder, "--draft", *mode]
        port = served([*command, "--batch-size", str(max(16, most))], ends)
        return over_http(port, "/v1/completions", "max_tokens", temperature=0.0)
    if kind == "llamacpp":
        size = ["-c", str(most * 1024), "-np", str(most), "-t", str(os.cpu_count())]
        port = served([str(server_of_llamacpp()), "-m", str(args.gguf), *size], ends)
        return over_http(port, "/completion", "n_predict", temperature=0.0, cache_prompt=False)
    given: dict[str, Any] = {"target": folder, "draft": f"{folder}/draft", "mode": mode}
    given["properties"] = properties if name == EXACT else {}
    worker = ends.enter_context(Worker(kind, given))
    if "error" in worker.ready:
        raise SystemExit(f"{name}: {worker.ready['error']}")
    return lambda load: [Timeline(**line) for line in worker.answer(load.as_json())["timelines"]]


def served(command: list[str], ends: ExitStack) -> int:
    """Start an HTTP server and return its port."""
    server = Server(command, quiet=True)
    ends.callback(server.stop)
    return server.port


# ---------------------------------------------------------------- the benchmark


def can_take(name: str, cell: Cell) -> bool:
    return not name.startswith(STREAM) or (cell.loop == "closed" and cell.clients == 1)


def figures_of(turns: list[tuple[Load, list[Timeline]]]) -> dict[str, list[float]]:
    """Return the tokens/s of each turn, and the milliseconds to the first piece of all texts and between pieces."""
    speeds = []
    for load, lines in turns:
        seconds = max(line.pieces[-1] for line in lines) - min(line.sent for line in lines)
        speeds.append(sum(load.tokens) / seconds)
    texts = [line for _, lines in turns for line in lines]
    ttft = [1e3 * (line.pieces[0] - line.sent) for line in texts]
    return {
        "speeds": speeds,
        "ttft": ttft,
        "gaps": [1e3 * float(gap) for line in texts for gap in np.diff(line.pieces)],
    }


def cells_of(name: str, found: dict[str, dict[str, list[float]]]) -> list[str | None]:
    """Return a row's figures: ratios are to lm.stream with the same drafters, and to genai's defaults."""
    speeds = found[name]["speeds"]
    others = (f"{STREAM}, lookup,draft" if "lookup" in name else STREAM, GENAI)
    to_others = [
        shown(ratios(speeds, found[each]["speeds"])) if each in found and each != name else None for each in others
    ]
    times = [
        " / ".join(f"{np.percentile(found[name][each], p):.0f}" for p in PERCENTILES) if found[name][each] else None
        for each in ("ttft", "gaps")
    ]
    return [f"{statistics.median(speeds):.1f}", *to_others, *times]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, help="the target for llama.cpp")
    parser.add_argument("--clients", type=several(int), default="1,4,8,16")
    parser.add_argument("--loops", type=several(choices=("closed", "open")), default="closed,open")
    parser.add_argument("--prompts", type=several(choices=("completion", "chat", "turns")), default="completion,chat")
    parser.add_argument("--systems", type=several(choices=SYSTEMS, separator=";"), default=";".join(SYSTEMS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between requests of a client, open loop")
    parser.add_argument("--json", type=Path, help="also write the figures of every turn to this file")
    args = parser.parse_args()
    names = [name for name in args.systems if args.gguf or name != "llama.cpp"]
    cells = [Cell(*each) for each in itertools.product(args.loops, args.prompts, args.clients)]
    lm = ovspec.load(args.folder)
    tokenizer, properties = lm.tokenizer, {k: str(v) for k, v in lm.target.ir.properties.items()}
    del lm
    print(f"{machine()}\n")
    table, kept = Table(*HEADS), []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end, too
    with ExitStack() as ends:
        runs = {name: started(name, args, properties, ends) for name in names}
        for cell in cells:

            def run(name: str, turn: int, cell: Cell = cell) -> tuple[Load, list[Timeline]]:
                load = load_of(cell, turn, tokenizer, args.every)
                return load, runs[name](load)

            takers = [name for name in names if can_take(name, cell)]
            turns = take_turns(takers, run, args.turns, warm_up=1 if cell == cells[0] else 0)
            found = {name: figures_of(each) for name, each in turns.items()}
            for name in takers:
                table.row(*vars(cell).values(), name, *cells_of(name, found))
                kept.append({**vars(cell), "system": name, **found[name]})
    if args.json:
        args.json.write_text(json.dumps(kept), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
