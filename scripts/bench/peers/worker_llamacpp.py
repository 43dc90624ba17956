"""llama.cpp as a worker: greedy texts.

Modes: plain runs in llama-cpp-python; lookup, which looks n-grams up, and head, an EAGLE-3 head, run in llama-server.
Options: server, the path of llama-server; threads; prefix_caching, for plain. ``target`` and ``draft`` are GGUF files,
see ``gguf_writer.py``.
"""

from __future__ import annotations

import json
import os
from typing import Any

import protocol
from http_server import Server

CONTEXT = 4096  # tokens of a prompt and its text, at most
KINDS = {"lookup": "ngram-simple", "head": "draft-eagle3"}  # of its --spec-type


def load_texts(setup: protocol.Setup) -> protocol.Generate:
    # Its own default is half of the processors, because of hyper-threading.
    threads = int(setup.options.get("threads") or os.cpu_count() or 1)
    return (server_generate if setup.mode in KINDS else library_generate)(setup, threads)


# ---------------------------------------------------------------- in this process


def library_generate(setup: protocol.Setup, threads: int) -> protocol.Generate:
    from llama_cpp import Llama  # type: ignore[import-not-found]

    llama = Llama(setup.target, n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False)

    def generate(request: protocol.Request, watch: protocol.Watch) -> protocol.TokenLists:
        if not setup.options.get("prefix_caching"):
            llama.reset()  # otherwise it would reuse what the last prompt and this one share
        tokens: list[int] = []
        for token in llama.generate(request.prompt, temp=0.0):
            watch.tokens()
            tokens.append(int(token))
            if len(tokens) == request.max_tokens:
                break
        return [tokens]

    return generate


# ---------------------------------------------------------------- llama-server


def server_generate(setup: protocol.Setup, threads: int) -> protocol.Generate:
    running: dict[int | None, Server] = {None: start_server(setup, threads, None)}

    def generate(request: protocol.Request, watch: protocol.Watch) -> protocol.TokenLists:
        prompt, k = request.prompt, request.k if setup.mode == "head" else None
        if k not in running:  # a server's lookahead is fixed when it starts
            running.popitem()[1].stop()
            running[k] = start_server(setup, threads, k)
        watch.restart()
        body: dict[str, Any] = {"prompt": prompt, "n_predict": request.max_tokens, "ignore_eos": True}
        body |= {"cache_prompt": False, "stream": True, "return_tokens": True, "temperature": 0.0}
        tokens: list[int] = []
        with running[k].post("/completion", body) as lines:
            for line in lines:
                if line.startswith(b"data: "):
                    new = json.loads(line.removeprefix(b"data: ")).get("tokens", [])
                    watch.tokens(len(new))
                    tokens += new
        return [tokens]

    return generate


def start_server(setup: protocol.Setup, threads: int, k: int | None, context: int = CONTEXT) -> Server:
    program = setup.options.get("server")
    if not program:
        raise protocol.Refusal("llama-server is not installed")
    command = [program, "-m", setup.target, "-c", str(context), "-t", str(threads), "-np", "1"]
    command += ["--spec-type", KINDS[setup.mode]]
    if setup.mode == "head":
        command += ["-md", setup.draft_folder, "-td", str(threads)]
        command += ["--spec-draft-n-max", str(k)] if k is not None else []
    try:
        return Server(command)
    except RuntimeError as error:
        raise protocol.Refusal(str(error)) from None


if __name__ == "__main__":
    protocol.serve(["llama-cpp-python"], texts=load_texts)
