"""Time ``ovspec serve`` under load, beside ``lm.stream``, openvino-genai and llama.cpp's server, in turns.

    python scripts/bench/peers/install.py genai llamacpp
    .cache/peers/llamacpp/bin/python scripts/bench/peers/gguf_writer.py .cache/bench/1b-gqa/hf/target OUT.gguf
    python scripts/bench/serve.py .cache/bench/1b-gqa/int8 [--gguf OUT.gguf] [--clients 1,4,8,16] [--prompts chat]

All servers are loaded at once and take turns with the same requests, after a turn of warm-up. Prompts: "completion" is
the beginning of a program, with 64 tokens requested; "chat" has 64 to 256 tokens, with 24 to 72 requested; "turns" has
five turns per client, with one system prompt. Each client sends its next request after the last reply. Texts are
greedy. genai runs in its own process without HTTP, with its own defaults or with ovspec's properties ("genai, exact").
"256 at a time": with --prefill-chunk 256, like genai's prefill; "no cache": with --cache-memory 0. TTFT is the time to
the first piece, a gap the time between two pieces; a piece has the tokens of one round. Ratios are of tokens/s, turn by
turn.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from figures import Table, machine, median, median_and_range, ratios, take_turns
from harness import CODE, PROSE, Option, Worker, arguments
from peers.http_server import Server
from peers.install import server_of_llamacpp
from peers.protocol import Load, RunLoad, Timeline

import ovspec
from ovspec.text.tokenizer import Tokenizer

PERCENTILES = (50, 95, 99)
STREAM, GENAI, EXACT = "lm.stream", "genai", "genai, exact"
# Name: the worker, or the server, and its mode or options.
SYSTEMS: dict[str, tuple[str, Any]] = {
    STREAM: ("ovspec", "plain"),
    "serve": ("serve", []),
    "serve, no cache": ("serve", ["--cache-memory", "0"]),
    "serve, 256 at a time": ("serve", ["--prefill-chunk", "256"]),
    GENAI: ("genai", "plain"),
    EXACT: ("genai", "plain"),
    "llama.cpp": ("llamacpp", "plain"),
}
HEADS = ("prompts", "clients", "system", "tokens/s", "to lm.stream", "to genai", "TTFT, ms", "gap, ms")


# ---------------------------------------------------------------- requests


def load_of(kind: str, clients: int, turn: int, tokenizer: Tokenizer) -> Load:
    """Return the requests of a turn, with prompts of a kind: the same for every system, new in every turn."""
    chance = random.Random(f"{kind} {clients} {turn}")
    if kind == "turns":
        return Load(*conversations(chance, tokenizer, clients), clients)
    prompts, tokens = list[list[int]](), list[int]()
    for number in range(4 + 2 * clients):
        if kind == "completion":
            text = f"# File {chance.randrange(10**6)}\n{CODE[(number + 7 * turn) % len(CODE)]}"
            prompts.append(tokenizer.encode(text).tolist())
            tokens.append(64)
        else:
            length = chance.randint(64, 256)
            text = f"User {chance.randrange(10**6)}:"
            while len(tokenizer.encode(text)) < length:
                text += f" {chance.choice(PROSE)}\nAssistant: {chance.choice(CODE)}\nUser:"
            prompts.append(tokenizer.encode(text)[:length].tolist())
            tokens.append(chance.randint(24, 72))
    return Load(prompts, tokens, clients)


def conversations(chance: random.Random, tokenizer: Tokenizer, count: int) -> tuple[list[list[int]], list[int]]:
    """Return the prompts of alternating conversations (a system prompt, 5 turns), and their numbers of tokens."""
    prompts, tokens = list[list[int]](), list[int]()
    system = tokenizer.encode(f"System {chance.randrange(10**6)}: " + " ".join(PROSE + CODE)).tolist()[:300]
    chats = [system + tokenizer.encode(f"User {number}:").tolist() for number in range(count)]
    for _ in range(5):
        for number in range(count):
            answer = f" {chance.choice(PROSE)}\nAssistant: {chance.choice(CODE)}"
            chats[number] = chats[number] + tokenizer.encode(answer).tolist()
            prompts.append(chats[number])
            tokens.append(chance.randint(24, 72))
    return prompts, tokens


# ---------------------------------------------------------------- systems


def over_http(port: int, path: str, limit: str, **more: Any) -> RunLoad:
    """Return the function to send a load's requests to a server and read the streams.

    ``limit``: the server's name for the number of tokens; ``more``: further fields of each request.
    """

    async def ask(load: Load, number: int, timeline: Timeline) -> None:
        request = {"prompt": load.prompts[number], limit: load.tokens[number], "ignore_eos": True, "stream": True}
        body = json.dumps(request | more).encode()
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
                    timeline.pieces.append(now)
        writer.close()

    async def run(load: Load) -> list[Timeline]:
        timelines, waiting = list[Timeline](), set[asyncio.Task[None]]()
        load.restart()
        while waiting or not load.sent_all:
            for number in load.due():
                timelines.append(Timeline(load.now))
                waiting.add(asyncio.create_task(ask(load, number, timelines[-1])))
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
                load.answered()
        return timelines

    return lambda load: asyncio.run(run(load))


def start_system(name: str, args: argparse.Namespace, properties: dict[str, str], ends: ExitStack) -> RunLoad:
    """Start a system, to be ended by ``ends``; return the function to run loads on it."""
    kind, mode = SYSTEMS[name]
    folder = str(args.folder)
    most = max(args.clients)
    if kind == "serve":
        command = [sys.executable, "-m", "ovspec", "serve", folder, "--draft", "none", *mode]
        port = start_server([*command, "--batch-size", str(max(16, most))], ends)
        return over_http(port, "/v1/completions", "max_tokens", temperature=0.0)
    if kind == "llamacpp":
        size = ["-c", str(most * 1024), "-np", str(most), "-t", str(os.cpu_count())]
        port = start_server([str(server_of_llamacpp()), "-m", str(args.gguf), *size], ends)
        return over_http(port, "/completion", "n_predict", temperature=0.0, cache_prompt=False)
    setup: dict[str, Any] = {"task": "loads", "target": folder, "mode": mode}
    setup["properties"] = properties if name == EXACT else {}
    worker = ends.enter_context(Worker(kind, setup))
    if "error" in worker.ready:
        raise SystemExit(f"{name}: {worker.ready['error']}")

    def run(load: Load) -> list[Timeline]:
        request = {"prompts": load.prompts, "tokens": load.tokens, "clients": load.clients}
        return [Timeline(**timeline) for timeline in worker.answer(request)["timelines"]]

    return run


def start_server(command: list[str], ends: ExitStack) -> int:
    """Start an HTTP server and return its port."""
    server = Server(command, quiet=True)
    ends.callback(server.stop)
    return server.port


# ---------------------------------------------------------------- the benchmark


def figures_of(turns: list[tuple[Load, list[Timeline]]]) -> dict[str, list[float]]:
    """Return the tokens/s of each turn, and the milliseconds to the first piece of all texts and between pieces."""
    speeds = []
    for load, timelines in turns:
        seconds = max(text.pieces[-1] for text in timelines) - min(text.sent for text in timelines)
        speeds.append(sum(load.tokens) / seconds)
    texts = [text for _, timelines in turns for text in timelines]
    return {
        "speeds": speeds,
        "ttft": [1e3 * (text.pieces[0] - text.sent) for text in texts],
        "gaps": [1e3 * float(gap) for text in texts for gap in np.diff(text.pieces)],
    }


def cells_of(name: str, by_system: dict[str, dict[str, list[float]]]) -> list[str | None]:
    """Return a row's figures: ratios are to lm.stream, and to genai's defaults."""
    figures = by_system[name]
    cells: list[str | None] = [median(figures["speeds"])]
    for other in (STREAM, GENAI):
        compares = other in by_system and other != name
        ratio = ratios(figures["speeds"], by_system[other]["speeds"]) if compares else []
        cells.append(median_and_range(ratio) if ratio else None)
    for times in (figures["ttft"], figures["gaps"]):
        cells.append(" / ".join(f"{np.percentile(times, p):.0f}" for p in PERCENTILES) if times else None)
    return cells


def main() -> None:
    args = arguments(
        __doc__,
        "folder",
        gguf=Option(Path, "the target for llama.cpp"),
        clients=[1, 4, 8, 16],
        prompts=Option(["completion", "chat"], choices=("completion", "chat", "turns")),
        systems=Option(list(SYSTEMS), choices=SYSTEMS, separator=";"),
        turns=3,
    )
    names = [name for name in args.systems if args.gguf or name != "llama.cpp"]
    lm = ovspec.load(args.folder)
    tokenizer = lm.tokenizer
    properties = {name: str(value) for name, value in lm.target.ir.properties.items()}
    del lm
    print(f"{machine()}\n")
    table = Table(*HEADS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the servers, too
    with ExitStack() as ends:
        systems = {name: start_system(name, args, properties, ends) for name in names}
        for number, (kind, clients) in enumerate(itertools.product(args.prompts, args.clients)):

            def run(name: str, turn: int, kind: str = kind, clients: int = clients) -> tuple[Load, list[Timeline]]:
                load = load_of(kind, clients, turn, tokenizer)
                return load, systems[name](load)

            able = [name for name in names if clients == 1 or name != STREAM]
            turns = take_turns(able, run, args.turns, warm_up=0 if number else 1)
            by_system = {name: figures_of(own_turns) for name, own_turns in turns.items()}
            for name in able:
                table.row(kind, clients, name, *cells_of(name, by_system))


if __name__ == "__main__":
    main()
