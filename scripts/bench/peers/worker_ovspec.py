"""ovspec as a worker: texts, and loads of a single client by ``lm.stream``.

Modes: plain, or a value for the draft of ``ovspec.load``, such as "lookup,draft". Options: those of ``ovspec.load``,
and settle=False to leave weights in small pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import protocol

import ovspec


def load_model(setup: protocol.Setup) -> ovspec.LanguageModel:
    """Return the model with the drafters of its mode, ready to be timed."""
    drafters = "none" if setup.mode == "plain" else setup.mode
    draft = ",".join(setup.draft_folder if name == "draft" else name for name in drafters.split(","))
    options: dict[str, Any] = {"cache_memory": 0, **setup.options}  # each turn reads its prompt
    settle = options.pop("settle", True)
    lm = ovspec.load(setup.target, draft, properties=setup.properties or None, **options)
    if settle:  # otherwise done by ovspec itself between requests; weights are packed at their first use
        lm.generate([0] * 8, max_tokens=4, ignore_eos=True, lookahead=2 if lm.draft else 0)
        lm.use_large_pages()
    return lm


def load_texts(setup: protocol.Setup) -> protocol.Generate:
    lm = load_model(setup)

    def generate(request: protocol.Request, watch: protocol.Watch) -> protocol.TokenLists:
        lookahead: Any = "auto" if request.k is None else request.k
        options: dict[str, Any] = {"max_tokens": request.max_tokens, "ignore_eos": True, "lookahead": lookahead}
        options |= {"temperature": request.temperature, "seed": request.seed, "top_k": request.top_k or 0}
        if len(request.prompts) > 1:
            return [text.token_ids for text in lm.generate(request.prompts, batch_size=len(request.prompts), **options)]
        stream = lm.stream(request.prompt, **options)
        for piece in stream:
            watch.tokens(len(piece.token_ids))
        return [stream.result().token_ids]

    return generate


def load_stream(setup: protocol.Setup) -> protocol.RunLoad:
    lm = load_model(setup)

    def run(load: protocol.Load) -> list[protocol.Timeline]:
        if load.clients != 1:
            raise protocol.Refusal("it has one client")
        timelines = []
        while numbers := load.due():
            timelines.append(protocol.Timeline(load.now))
            prompt = np.array(load.prompts[numbers[0]])
            for piece in lm.stream(prompt, max_tokens=load.tokens[numbers[0]], ignore_eos=True):
                if piece.token_ids:
                    timelines[-1].pieces.append(load.now)
            load.answered()
        return timelines

    return run


if __name__ == "__main__":
    protocol.serve(["openvino"], texts=load_texts, loads=load_stream)
