"""ovspec as a worker of ``run.py``, by ``protocol.py``.

Modes: plain, draft, lookup, or any other value for the draft of ``ovspec.load``, such as "lookup,draft". The options
engine, precision, kv_precision, tune and cache_dir are those of ``ovspec.load``.
"""

from __future__ import annotations

from typing import Any

import protocol

import ovspec


def load_model(setup: protocol.Setup) -> ovspec.LanguageModel:
    """Return the model with the drafters of its mode, ready to be timed."""
    parts = [] if setup.mode == "plain" else setup.mode.split(",")
    draft: Any = ",".join(setup.draft_folder if part == "draft" else part for part in parts) or "none"
    lm = ovspec.load(setup.target, draft, properties=setup.properties or None, **setup.options)
    settle(lm)
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
            if piece.token_ids:
                watch.token()
        result = stream.result()
        return protocol.Texts([result.token_ids], result.stats.conditional_acceptance)

    return generate


def settle(lm: ovspec.LanguageModel) -> None:
    """Move the weights into large pages, as ovspec does by itself between requests."""
    lm.generate(
        [0] * 8, max_tokens=4, ignore_eos=True, lookahead=2 if lm.draft else 0
    )  # weights are packed when first used
    lm.use_large_pages()


if __name__ == "__main__":
    protocol.serve(load, ["openvino"])
