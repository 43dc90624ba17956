"""Test whether a peer's text, sampled with a draft, has the target's distribution.

    python scripts/bench/distribution.py [--texts 3000] [--k 2,4]

With the demo pair, three tokens are sampled at temperature 1; their exact probabilities come from the target's logits
after every prefix. With top_k 3 there are 27 outcomes, and any other text is impossible. Without top_k, all tokens
except the three likeliest are one outcome, which ends the text. Everything runs in f32 without dynamic quantisation, to
test only the sampling. A p-value below 1e-4 means: the distribution differs. Plain sampling and ovspec are controls.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
from figures import Table
from harness import CODE, ROOT, Worker, arguments
from scipy.stats import chisquare

import ovspec

PAIR = ROOT / "models" / "demo"
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "KV_CACHE_PRECISION": "f32"}
TOP, LENGTH = 3, 3
OTHER = -1  # any token except the likeliest
LEAST_EXPECTED = 5  # minimum expected texts per outcome; rarer outcomes are merged

Outcome = tuple[int, ...]
Exact = dict[Outcome, float]


def exact_probabilities(lm: ovspec.LanguageModel, prompt: list[int], top_k: int | None) -> Exact:
    """Return the probability of every outcome after ``prompt``: ``LENGTH`` tokens, or fewer and then ``OTHER``."""
    known: Exact = {(): 1.0}
    for _ in range(LENGTH):
        longer = {text: probability for text, probability in known.items() if text[-1:] == (OTHER,)}
        for text, probability in known.items():
            if text in longer:
                continue
            logits = lm.next_logits([*prompt, *text]).astype(np.float64)
            weights = np.exp(logits - logits.max())
            best = np.argsort(logits)[-TOP:]
            whole = weights[best].sum() if top_k else weights.sum()
            longer |= {(*text, int(token)): probability * float(weights[token] / whole) for token in best}
            if not top_k:
                longer[*text, OTHER] = probability * float(1 - weights[best].sum() / whole)
        known = longer
    return known


def outcome_of(tokens: list[int], exact: Exact) -> Outcome | None:
    """Return the outcome for ``tokens``; None if they are impossible."""
    for end, token in enumerate(tokens):
        begin = tuple(tokens[:end])
        possible = {outcome[end] for outcome in exact if len(outcome) > end and outcome[:end] == begin}
        if token not in possible:
            return (*begin, OTHER) if OTHER in possible else None
    return tuple(tokens)


def even_prompt(lm: ovspec.LanguageModel, top_k: int | None) -> list[int]:
    """Return the prefix of a held-out prompt with the most likely rarest outcome."""
    ids = [lm.encode(text).tolist() for text in CODE[:8]]
    cut = [prompt[:end] for prompt, end in itertools.product(ids, (12, 20, 28)) if len(prompt) >= end]
    return max(cut, key=lambda prompt: min(exact_probabilities(lm, prompt, top_k).values()))


def p_value(counts: Counter[Outcome | None], exact: Exact, texts: int) -> float:
    common = [outcome for outcome, probability in exact.items() if probability * texts >= LEAST_EXPECTED]
    seen = [counts[outcome] for outcome in common]
    expected = [exact[outcome] * texts for outcome in common]
    if texts - sum(expected) >= 1:  # the rarer outcomes together
        seen.append(sum(counts[outcome] for outcome in exact) - sum(seen))
        expected.append(texts - sum(expected))
    scale = sum(seen) / sum(expected)
    return float(chisquare(seen, [number * scale for number in expected]).pvalue)


def test_texts(worker: str, setup: dict[str, Any], request: dict[str, Any], exact: Exact, texts: int) -> list[Any]:
    """Sample ``texts`` texts from a worker; return the number of texts, of impossible texts, p-value and error."""
    counts: Counter[Outcome | None] = Counter()
    with Worker(worker, setup) as running:
        for seed in range(1, texts + 1):
            answer = running.ask(request | {"seed": seed})
            if "error" in answer:
                return [counts.total(), None, None, answer["error"]]
            counts[outcome_of(answer["tokens"][0], exact)] += 1
    return [texts, counts[None], f"{p_value(counts, exact, texts):.2g}"]


def main() -> None:
    args = arguments(__doc__, texts=3000, k=[2, 4])
    lm = ovspec.load(PAIR, precision="f32", properties=EXACT, tune=False)
    for top_k in (TOP, None):
        prompt = even_prompt(lm, top_k)
        exact = exact_probabilities(lm, prompt, top_k)
        print(f"\ntop_k {top_k}: {len(exact)} outcomes, from {min(exact.values()):.4f} to {max(exact.values()):.4f}\n")
        table = Table("peer and mode", "texts", "impossible", "p-value", "error")
        request = {"prompts": [prompt], "max_tokens": LENGTH, "temperature": 1.0, "top_k": top_k}
        for worker, options in (("ovspec", {"tune": False}), ("genai", {})):
            setup = {"target": str(PAIR), "properties": EXACT, "draft_properties": EXACT, "options": options}
            table.row(f"{worker}, plain", *test_texts(worker, setup, request, exact, args.texts))
            setup |= {"mode": "draft", "draft": str(PAIR / "draft")}
            for k in args.k:
                row = test_texts(worker, setup, request | {"k": k}, exact, args.texts)
                table.row(f"{worker}, draft, k={k}", *row)


if __name__ == "__main__":
    main()
