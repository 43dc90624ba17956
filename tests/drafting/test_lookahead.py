"""The lookahead on recorded traces: replays what drafting and verifying cost, and which guesses were accepted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ovspec.drafting.costs import Costs
from ovspec.drafting.lookahead import Lookahead, RoundOutcome
from ovspec.drafting.proposal import NOTHING, Proposal
from ovspec.sampling.samplers import Guess

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json"))
PROMPT = 80  # tokens of the prompt, which the draft reads before its first step


@dataclass
class Machine:
    """Measured times with the scatter of a real machine: 8 % on each, and an occasional hiccup."""

    verify_ms: dict[int, float]
    draft_ms: dict[int, float]
    random: np.random.Generator

    def time(self, curve: dict[int, float], width: int) -> float:
        widths = sorted(curve)
        ms = float(np.interp(width, widths, [curve[w] for w in widths]))
        if width > widths[-1]:
            ms += (curve[widths[-1]] - curve[1]) / widths[-1] * (width - widths[-1])
        hiccup = 3.0 if self.random.random() < 0.01 else 1.0
        return ms * float(np.exp(0.08 * self.random.standard_normal())) * hiccup


def replay(lookahead: Lookahead, mode: str, text: dict[str, Any], machine: Machine) -> tuple[float, int]:
    """Return (milliseconds, rounds) for all tokens of a text except the first; ``mode``: draft, lookup or chain."""
    end, place, total, rounds, seen = len(text["draft"]), 1, 0.0, 0, 0
    while place < end:
        remaining = end - place - 1
        proposal, drafting_ms, right = NOTHING, 0.0, 0
        if mode != "draft" and remaining > 0:
            confidence, right = text["lookup"][place]
            confidence = confidence[: min(remaining, lookahead.most)]
            found = Proposal(np.zeros(len(confidence), np.int64), np.array(confidence), source="lookup")
            proposal = lookahead.cut(found, 1)
            if len(proposal.tokens) and mode == "chain" and lookahead.prefers("draft", proposal, 1):
                proposal = NOTHING
        if mode != "lookup" and not len(proposal.tokens) and remaining > 0:
            confidence, right = text["draft"][place]
            most = min(remaining, lookahead.most, len(confidence))
            guesses: list[Guess] = []
            if most and lookahead.starts("draft", PROMPT + place - seen, [remaining]):
                width = PROMPT + place - seen
                while True:
                    ms = machine.time(machine.draft_ms, width)
                    drafting_ms += ms
                    lookahead.note_draft(width, ms / 1e3)
                    guesses.append(Guess(0, confidence[len(guesses)]))
                    width = 1
                    if len(guesses) == most or not lookahead.going_on("draft", [0], [guesses]):
                        break
                proposal = Proposal(
                    np.zeros(len(guesses), np.int64), np.array([g.confidence for g in guesses]), source="draft"
                )
                seen = PROMPT + place + min(right, len(guesses) - 1)
        accepted = min(right, len(proposal.tokens))
        verify = machine.time(machine.verify_ms, len(proposal.tokens) + 1)
        outcome = RoundOutcome(
            [(proposal, accepted)], len(proposal.tokens) + 1, 0, False, drafting_ms / 1e3, verify / 1e3
        )
        lookahead.learn(outcome)
        place += accepted + 1
        total += drafting_ms + verify
        rounds += 1
    return total, rounds


def ms_a_token(found: dict[str, Any], mode: str, fixed: int | None, profile: bool = False, seed: int = 0) -> float:
    """Return the milliseconds per token when all texts of a trace are replayed, one after the other."""
    verify, draft = ({int(width): ms for width, ms in found[name].items()} for name in ("verify_ms", "draft_ms"))
    machine = Machine(verify, draft, np.random.default_rng(seed))
    target, drafting = (Costs({w: curve[w] for w in (1, 2, 4, 8)} if profile else None) for curve in (verify, draft))
    lookahead = Lookahead(fixed, target, drafting)
    times = [replay(lookahead, mode, text, machine)[0] for text in found["texts"]]
    return sum(times) / sum(len(text["draft"]) - 1 for text in found["texts"])


def load(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def mean(found: dict[str, Any], mode: str, fixed: int | None, profile: bool = False, runs: int = 3) -> float:
    return sum(ms_a_token(found, mode, fixed, profile, seed) for seed in range(runs)) / runs


FIXED = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12)


@pytest.mark.parametrize("profile", [False, True], ids=["learning", "profile"])
@pytest.mark.parametrize("mode", ["draft", "lookup", "chain"])
@pytest.mark.parametrize("file", TRACES, ids=lambda file: file.stem)
def test_within_five_percent_of_the_best_in_hindsight(file: Path, mode: str, profile: bool) -> None:
    found = load(file)
    best = min(mean(found, mode, fixed) for fixed in FIXED)
    assert mean(found, mode, None, profile) <= 1.05 * best


@pytest.mark.parametrize("file", [file for file in TRACES if "useless" in file.stem], ids=lambda file: file.stem)
def test_a_useless_draft_hardly_costs_anything(file: Path) -> None:
    """Each text alone, with nothing learned before, reaches at least 0.95 of the speed of plain decoding."""
    found = load(file)
    for text in found["texts"]:
        alone = found | {"texts": [text]}
        assert mean(alone, "draft", None) <= mean(alone, "draft", 0) / 0.95


def test_a_draft_that_is_good_again_is_used_again() -> None:
    good, useless = load(TRACES[0].with_name("demo-f32-T0.json")), load(TRACES[0].with_name("useless-T0.json"))
    curves = [{int(w): ms for w, ms in good[name].items()} for name in ("verify_ms", "draft_ms")]
    machine, lookahead = Machine(curves[0], curves[1], np.random.default_rng(0)), Lookahead()
    long = len(good["texts"][0]["draft"])
    before, _ = replay(lookahead, "draft", good["texts"][0], machine)
    lost, rounds = [replay(lookahead, "draft", text, machine) for text in useless["texts"]][-1]
    assert rounds > 0.9 * long, "almost nothing was accepted"
    assert lost < 1.05 * (long - 1) * machine.verify_ms[1], "by now, little is tried; hiccups cost 2 %"
    after, _ = [replay(lookahead, "draft", text, machine) for text in good["texts"] * 2][-1]
    again, _ = replay(lookahead, "draft", good["texts"][0], machine)
    assert again < 1.1 * before
    assert after < 0.8 * lost


def test_costs_are_learned() -> None:
    costs = Costs()
    assert not costs.known
    costs.learn(1, 50.0)
    assert costs(1) == 50.0
    random = np.random.default_rng(0)
    truth = {1: 40.0, 2: 44.0, 5: 70.0}
    for i in range(200):
        width = (1, 2, 5)[i % 3]
        costs.learn(width, truth[width] * float(np.exp(0.1 * random.standard_normal())))
    for width, ms in truth.items():
        assert abs(costs(width) / ms - 1) < 0.1
    before = costs(1)
    costs.learn(100, 1e6)  # a prompt, which must not change the costs of rounds
    costs.learn(1, 1e4)  # a hiccup
    assert costs(1) < 1.2 * before
    costs.learn(1064, costs(64) + 400.0)
    assert costs(564) == pytest.approx(costs(64) + 200.0), "but it shows what reading a prompt costs"


def test_costs_from_a_profile_and_beyond_it() -> None:
    costs = Costs({1: 10.0, 2: 12.0, 4: 14.0, 8: 22.0})
    assert (costs(1), costs(3), costs(8)) == (10.0, 13.0, 22.0)
    assert costs(10) == pytest.approx(26.0)
    assert costs(100) > costs(64) > costs(10)


def test_a_fixed_lookahead_proposes_just_that() -> None:
    lookahead = Lookahead(3)
    proposal = Proposal(np.arange(9), np.full(9, 0.01), source="lookup")
    assert len(lookahead.cut(proposal, 1).tokens) == 3
    assert lookahead.starts("draft", 10_000, [5])
    assert lookahead.going_on("draft", [0], [[Guess(0, 0.0)]]) == [0]


def test_nothing_is_cut_off_that_is_sure() -> None:
    lookahead = Lookahead(None, Costs({1: 10.0, 2: 10.5, 16: 14.0}))
    sure = Proposal(np.arange(12), np.full(12, 0.999), source="lookup")
    assert len(lookahead.cut(sure, 1).tokens) == 12
    unsure = Proposal(np.arange(12), np.full(12, 0.01), source="lookup")
    assert len(lookahead.cut(unsure, 1).tokens) == 0


def test_reading_a_long_prompt_does_not_count_against_the_draft() -> None:
    lookahead = Lookahead(None, Costs({1: 40.0, 2: 44.0, 16: 80.0}), Costs({1: 4.0, 2: 4.1, 16: 8.0}))
    guesses = [Proposal(np.arange(2), np.array([0.9, 0.9]), source="draft")]
    assert lookahead.starts("draft", 2000, [200])
    lookahead.note_draft(2000, 0.5)
    lookahead.note_draft(1, 0.004)
    lookahead.learn(RoundOutcome([(guesses[0], 2)], 3, 0, False, 0.504, 0.048))
    assert lookahead.gain("draft", 1) > 0
    assert lookahead._records["draft"].ms == pytest.approx(4 + 4 + 48)
    fresh = Lookahead(None, *lookahead.costs)
    for _ in range(20):
        assert not fresh.starts("draft", 2000, [3]), "reading isn't worth it for three tokens"
    assert fresh.starts("draft", 2000, [200]), "but it is for a longer text"


def test_a_prompt_says_nothing_about_rounds() -> None:
    lookahead = Lookahead()
    lookahead.learn(RoundOutcome([(NOTHING, 0)], 20, 0, True, 0.0, 1.0))
    assert not lookahead.costs[0].known
    assert not lookahead.starts("draft", 5, [100]), "first, a plain round must show what it costs"
    lookahead.learn(RoundOutcome([(NOTHING, 0)], 1, 0, False, 0.0, 0.04))
    assert lookahead.costs[0](1) == pytest.approx(40.0)
    assert lookahead.starts("draft", 5, [100])
