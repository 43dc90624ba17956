"""A pair with all its drafters, which answers in any mode; for ``arithmetic.py`` and ``batches.py``.

The set-up has the pair's ``folder``, ``load``, options of ``ovspec.load``, and ``filler``, the text before prompts of
less than ``context`` tokens. It must run with older checkouts of ovspec, too.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import protocol

import ovspec
from ovspec.drafting.choice import parse_draft

MODES = {"plain": "none", "lookup": "lookup", "draft": "draft", "chain": "lookup,draft"}


def load(setup: dict[str, Any]) -> protocol.Answer:
    base = ovspec.load(setup["folder"], "lookup,draft", cache_memory=0, **setup["load"])
    assert base.draft
    model = str(base.draft.ir.folder)
    named = MODES | {"default": "lookup" if getattr(base.target, "guess_is_free", False) else "none"}
    filler = base.encode(setup["filler"])
    models: dict[str, ovspec.LanguageModel] = {}
    sessions: dict[tuple[str, int, str], ovspec.Session] = {}

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        draft, context, texts = named[asked["mode"]], asked["context"], asked["prompts"]
        if draft not in models:
            models[draft] = base.with_drafters(parse_draft(draft.replace("draft", model)))
        lm, encoded = models[draft], [base.encode(text) for text in texts]
        prompts = [np.concatenate((filler[: max(0, context - len(ids))], ids)).tolist() for ids in encoded]
        # A seed of its own for each turn: sampled texts differ, as texts do.
        options: dict[str, Any] = {"max_tokens": asked["tokens"], "ignore_eos": True, "seed": asked["turn"]}
        options |= {"temperature": asked["temperature"]} if asked["temperature"] else {}
        if len(prompts) == 1:  # a session keeps the prompt's KV cache for the next turn
            key = (draft, context, texts[0])
            if key not in sessions:
                sessions[key] = lm.session()
                sessions[key].append(prompts[0])
            mark = sessions[key].mark()
            results = [sessions[key].generate(heal=False, **options)]
            sessions[key].rewind(mark)
            ms = results[0].stats.tpot_ms
        else:
            began = time.perf_counter()
            results = lm.generate(prompts, batch_size=len(prompts), **options)
            # From the first token of the last row on, so that prompts take no part.
            ms = 1e3 * (time.perf_counter() - began) - max(result.stats.ttft_ms for result in results)
            ms /= sum(result.stats.generated_tokens - 1 for result in results)
        stats = [result.stats for result in results]
        return {"ms": ms, "proposed": sum(s.proposed for s in stats), "accepted": sum(s.accepted for s in stats)}

    return answer


if __name__ == "__main__":
    protocol.serve(load, ["openvino"])
