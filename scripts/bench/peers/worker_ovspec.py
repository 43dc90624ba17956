"""ovspec as a worker that generates texts.

Modes: plain, default (ovspec's own choice), draft, lookup, or any other value for the draft of ``ovspec.load``, such as
"lookup,draft". Options: those of ``ovspec.load``, and settle=False to leave weights in small pages.
"""

from __future__ import annotations

from typing import Any

import protocol

import ovspec


def load_model(setup: protocol.Setup) -> ovspec.LanguageModel:
    """Return the model with the drafters of its mode, ready to be timed."""
    named = {"plain": "none", "default": None}.get(setup.mode, setup.mode)
    draft: Any = named and ",".join(setup.draft_folder if part == "draft" else part for part in named.split(","))
    options: dict[str, Any] = {"cache_memory": 0, **setup.options}  # each turn reads its prompt
    settle = options.pop("settle", True)
    lm = ovspec.load(setup.target, draft, properties=setup.properties or None, **options)
    if settle:  # as ovspec does by itself between requests; weights are packed when they are first used
        lm.generate([0] * 8, max_tokens=4, ignore_eos=True, lookahead=2 if lm.draft else 0)
        lm.use_large_pages()
    return lm


def load(setup: protocol.Setup) -> protocol.Generate:
    lm = load_model(setup)

    def generate(request: protocol.Request, watch: protocol.Watch) -> protocol.Texts:
        lookahead: Any = "auto" if request.k is None else request.k
        options: dict[str, Any] = {"max_tokens": request.max_tokens, "ignore_eos": True, "lookahead": lookahead}
        options |= {"temperature": request.temperature, "seed": request.seed, "top_k": request.top_k or 0}
        if len(request.prompts) > 1:
            results = lm.generate(request.prompts, **options)
            return protocol.Texts([result.token_ids for result in results])
        stream = lm.stream(request.prompt, **options)
        for piece in stream:
            watch.tokens(len(piece.token_ids))
        result = stream.result()
        return protocol.Texts([result.token_ids], result.stats.conditional_acceptance)

    return generate


if __name__ == "__main__":
    protocol.serve_texts(load, ["openvino"])
