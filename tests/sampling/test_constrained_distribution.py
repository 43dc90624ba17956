"""Sampled constrained text follows the locally masked distribution: exact probabilities, chi-square."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bigrams import Bigrams
from llguidance import LLMatcher

import ovspec.sampling.samplers as sampler_module
from ovspec.cache.sequence import Sequence
from ovspec.drafting.draft_model import ModelDrafter
from ovspec.drafting.drafter import Drafter, RowToDraft
from ovspec.drafting.lookahead import Lookahead
from ovspec.engine.round import run_round
from ovspec.grammars.sources import convert_regex
from ovspec.params import Params
from ovspec.params.generation import AcceptRule
from ovspec.sampling.constraint import Constraints
from ovspec.sampling.grammar_constraint import GrammarCompiler
from ovspec.sampling.samplers import DraftedToken, TrimmedVocabulary, make_sampler
from ovspec.sampling.warp import softmax, warp_logits

UNLIKELY = 1e-4
DRAWS = 1200  # which find each planted bug, below
END = 5
# Five tokens, one of them with two letters, and one that ends the text. The logits depend only on the last token.
VOCABULARY: list[bytes | None] = [b"a", b"b", b"ab", b"c", b"d", b""]
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "model": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2, "c": 3, "d": 4},
        "merges": [["a", "b"]],
    },
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    "added_tokens": [
        {
            "id": END,
            "content": "<end>",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    ],
}
# It has two spellings of the same letters, forced tokens, and ends that the model chooses or that are forced.
GRAMMAR = convert_regex("(ab|a|b){1,2}(cdc|d)?")
GRAMMARS = GrammarCompiler(TOKENIZER, VOCABULARY)
RANDOM = np.random.default_rng(11)
TARGET = (1.1 * RANDOM.standard_normal((6, 6))).astype(np.float32)
DRAFT = (TARGET + 0.7 * RANDOM.standard_normal((6, 6))).astype(np.float32)
HEAD = TrimmedVocabulary(np.array([5, 1, 3, 2]), 6)  # a head's: it can't propose every token


class Cyclic(Drafter):
    """Proposes the next numbers, most of which the grammar forbids."""

    def guess(self, tokens: np.ndarray, budget: int) -> Iterable[int]:
        return [(int(tokens[-1]) + 1 + i) % 6 for i in range(budget)]


def exact(params: Params) -> dict[tuple[int, ...], float]:
    """Return the probability of each text, using masks from matchers that read it from the start."""
    found: dict[tuple[int, ...], float] = {}

    def go(text: tuple[int, ...], probability: float) -> None:
        matcher = LLMatcher(GRAMMARS._tokenizer, GRAMMAR)
        assert matcher.consume_tokens(list(text))
        if matcher.is_stopped():
            found[text] = probability
            return
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:6]
        logits = np.where(mask, TARGET[text[-1] if text else 0], -np.inf).astype(np.float32)
        p = warp_logits(logits, params).probabilities(6)
        if not params.truncating_options:
            np.testing.assert_allclose(p, softmax(logits.astype(float) / params.temperature), rtol=1e-4)
        for token in np.flatnonzero(p).tolist():
            if token == END:
                found[(*text, END)] = probability * p[token]
            else:
                go((*text, token), probability * p[token])

    go((), 1.0)
    return found


def draw_texts(accept: AcceptRule, drafter: str, params: Params, draws: int) -> tuple[Counter[Any], Counter[str]]:
    """Return how often each text was drawn, and how many tokens were forced, proposed and accepted."""
    target = Bigrams(TARGET)
    drafters: dict[str, Any] = {"model": ModelDrafter(Bigrams(DRAFT)), "cyclic": Cyclic(), "none": None}
    drafters["head"] = ModelDrafter(Bigrams(DRAFT, HEAD.target_ids), HEAD)  # type: ignore[arg-type]
    counts, done = Counter[Any](), Counter[str]()
    ends = frozenset({END})
    constraints = Constraints([GRAMMARS.make_constraint(GRAMMAR, 1, ends)], ends)  # whose state is the text alone
    for seed in range(draws):
        sequence = Sequence([0])
        target.reset(1)
        if drafters[drafter]:
            drafters[drafter].reset(1)
        sampler = make_sampler(replace(params, seed=seed, accept=accept), 0, constraints)
        while len(sequence) == 1 or not constraints.has_ended(sequence.tokens):
            outcomes, _ = run_round(target, drafters[drafter], Lookahead(3), [RowToDraft(sequence, sampler, 9)])
            done["forced"] += outcomes[0].forced_count
            done["proposed"] += len(outcomes[0].proposal.tokens)
            done["accepted"] += outcomes[0].accepted_count
        counts[tuple(sequence.tokens[1:].tolist())] += 1
    return counts, done


def fits(counts: Counter[Any], params: Params) -> float:
    """Return the p-value of a chi-square test that counts rare texts together."""
    from scipy import stats

    expected, draws = exact(params), sum(counts.values())
    assert abs(sum(expected.values()) - 1) < 1e-6
    assert set(counts) <= set(expected)
    often = [text for text, p in expected.items() if p * draws >= 8]
    seen, wanted = [counts[text] for text in often], [expected[text] * draws for text in often]
    rest = draws - sum(wanted)
    if rest >= 1:
        seen, wanted = [*seen, draws - sum(seen)], [*wanted, rest]
    return float(stats.chisquare(seen, np.array(wanted) * sum(seen) / sum(wanted)).pvalue)


PLAIN, WARPED = Params(temperature=1.0), Params(temperature=0.8, top_k=2, min_p=0.05)


def check(accept: AcceptRule, drafter: str, params: Params, draws: int) -> None:
    counts, done = draw_texts(accept, drafter, params, draws)
    if drafter == "none" or params is PLAIN:  # the draft model also proposes the forced tokens after its guesses
        assert done["forced"] > draws / 50
    if drafter != "none":
        assert done["proposed"] > done["accepted"] > draws / 20
    assert fits(counts, params) > UNLIKELY


@pytest.mark.parametrize("draws", [DRAWS, pytest.param(3 * DRAWS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("accept", ["compare", "rejection"])
@pytest.mark.parametrize("drafter", ["model", pytest.param("head", marks=pytest.mark.slow)])
def test_constrained_speculation_keeps_the_distribution(accept: AcceptRule, drafter: str, draws: int) -> None:
    check(accept, drafter, PLAIN, draws)


@pytest.mark.soak
@pytest.mark.parametrize("params", [PLAIN, WARPED], ids=["T=1", "T=0.8, top-k"])
@pytest.mark.parametrize(
    ("accept", "drafter"),
    [
        *[("compare", drafter) for drafter in ("model", "head", "none")],
        *[("rejection", drafter) for drafter in ("model", "head", "cyclic")],
    ],
)
def test_with_many_draws(accept: AcceptRule, drafter: str, params: Params) -> None:
    check(accept, drafter, params, 50_000)


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["a masked draw is replaced by the likeliest", "the draft's q isn't masked"])
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug.startswith("a masked"):
        accept: AcceptRule = "compare"

        def choose(self: Any, logits: np.ndarray, tokens: np.ndarray, _: Any = None) -> DraftedToken:
            guess = self._draw_token(logits, len(tokens))
            if self.constraints.allows_token(guess.token, tokens):
                return guess
            return DraftedToken(int(self.constraints.mask_logits(logits, tokens).argmax()), 1.0)

        monkeypatch.setattr(sampler_module.SharedNoiseSampler, "choose_draft_token", choose)
    else:
        accept = "rejection"
        real = sampler_module.RejectionSampler.choose_draft_token

        def guess(self: Any, logits: np.ndarray, tokens: np.ndarray, vocabulary: Any) -> DraftedToken | None:
            found = real(self, logits, tokens, vocabulary)
            return found and found._replace(distribution=warp_logits(logits, self._params))

        monkeypatch.setattr(sampler_module.RejectionSampler, "choose_draft_token", guess)
    counts, _ = draw_texts(accept, "model", PLAIN, DRAWS)
    assert fits(counts, PLAIN) < UNLIKELY
