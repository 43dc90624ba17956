"""llama.cpp as a worker: greedy texts, and forward passes over several tokens.

Modes: plain runs in llama-cpp-python; lookup (n-grams) and head (an EAGLE-3 head) run in llama-server.
Options: server, the path of llama-server; threads; prefix_caching, for plain. ``target`` and ``draft`` are GGUF files,
see ``gguf_writer.py``.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import numpy as np
import protocol
from http_server import Server

CONTEXT = 4096  # maximum tokens of a prompt and its text
KINDS = {"lookup": "ngram-simple", "head": "draft-eagle3"}  # of its --spec-type


def threads_of(setup: protocol.Setup) -> int:
    # Its own default is half of the processors, because of hyper-threading.
    return int(setup.options.get("threads") or os.cpu_count() or 1)


def load_texts(setup: protocol.Setup) -> protocol.Generate:
    return (server_generate if setup.mode in KINDS else library_generate)(setup, threads_of(setup))


# ---------------------------------------------------------------- in this process


def load_model(setup: protocol.Setup, threads: int, **options: Any) -> Any:
    from llama_cpp import Llama  # type: ignore[import-not-found]

    return Llama(setup.target, n_threads=threads, n_threads_batch=threads, verbose=False, **options)


def library_generate(setup: protocol.Setup, threads: int) -> protocol.Generate:
    llama = load_model(setup, threads, n_ctx=CONTEXT)

    def generate(request: protocol.Request, watch: protocol.Watch) -> protocol.TokenLists:
        if not setup.options.get("prefix_caching"):
            llama.reset()  # prevents reuse of a common prefix with the last prompt
        tokens: list[int] = []
        for token in llama.generate(request.prompt, temp=0.0):
            watch.tokens()
            tokens.append(int(token))
            if len(tokens) == request.max_tokens:
                break
        return [tokens]

    return generate


def load_widths(setup: protocol.Setup) -> protocol.Infer:
    llama = load_model(setup, threads_of(setup), n_ctx=512, logits_all=True)

    def infer(task: protocol.Inference) -> list[float]:
        llama.reset()
        llama.eval(task.ids[: task.context])
        if task.logits:
            np.save(task.logits, llama.scores[: task.context])
        times = []
        for _ in range(task.repeats):
            llama._ctx.kv_cache_seq_rm(-1, task.context, -1)
            llama._batch.set_batch(batch=task.ids[task.context :], n_past=task.context, logits_all=True)
            began = time.perf_counter()
            llama._ctx.decode(llama._batch)
            times.append((time.perf_counter() - began) * 1e3)
        return times

    return infer


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
    protocol.serve(["llama-cpp-python"], texts=load_texts, widths=load_widths)
