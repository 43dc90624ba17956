"""generate --compare: texts that differ, and Ctrl-C while it times."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import PROMPTS

import ovspec
from ovspec.cli import compare as comparing
from ovspec.cli.generate import generate
from ovspec.params import make_params


class Parting:
    """A model whose speculative texts have another fourth token in the second turn."""

    def __init__(self, lm: ovspec.LanguageModel) -> None:
        self.lm, self.calls = lm, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lm, name)

    def generate(self, prompt: str, **options: Any) -> ovspec.Result:
        result = self.lm.generate(prompt, **options)
        if options.get("lookahead") == 0:
            return result
        self.calls += 1
        tokens = result.token_ids
        return dataclasses.replace(result, token_ids=[*tokens[:3], 7, *tokens[4:]]) if self.calls == 2 else result


@pytest.fixture
def parted(load: Callable[..., ovspec.LanguageModel], monkeypatch: pytest.MonkeyPatch) -> ovspec.LanguageModel:
    lm = load(draft=True)
    monkeypatch.setattr(ovspec, "load", lambda *_, **__: Parting(lm))
    return lm


def test_texts_that_part_end_with_exit_code_1(parted: ovspec.LanguageModel, pair: Path) -> None:
    """One turn is enough, and the report names the place, both tokens and the distance of their logits."""
    done = CliRunner().invoke(generate, [str(pair), PROMPTS[0], "--compare", "-n", "12", "--lookahead", "2"])
    assert done.exit_code == 1
    plain = parted.generate(PROMPTS[0], max_tokens=12, lookahead=0).token_ids
    logits = parted.next_logits([*parted.encode(PROMPTS[0]).tolist(), *plain[:3]])
    gap = abs(float(logits[plain[3]] - logits[7]))
    first, second = (repr(parted.tokenizer.decode([token])) for token in (plain[3], 7))
    sentence = (
        f"the texts differ after 3 tokens: plain decoding continues with {first} (id {plain[3]}), "
        f"speculation with {second} (id 7); their logits are {gap:.4f} apart"
    )
    assert sentence in done.stderr

    done = CliRunner().invoke(generate, [str(pair), PROMPTS[0], "--compare", "-n", "12", "--lookahead", "2", "--json"])
    report = json.loads(done.stdout)
    assert (done.exit_code, report["equal"]) == (1, False)
    assert report["part"]["after"] == 3
    assert report["part"]["plain"] == {"id": plain[3], "text": parted.tokenizer.decode([plain[3]])}
    assert report["part"]["speculative"]["id"] == 7
    assert report["part"]["gap"] == pytest.approx(gap, abs=1e-4)
    assert 0 <= report["top2_gap"] <= report["part"]["gap"] + 1e-6
    assert report["speculative"]["token_ids"][3] == 7


@pytest.mark.parametrize("turns", [0, 2])
def test_ctrl_c_shows_what_was_measured(
    load: Callable[..., ovspec.LanguageModel],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    turns: int,
) -> None:
    def interrupted() -> Iterator[int]:
        yield from range(turns)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "iterate_turns", interrupted)
    with pytest.raises(KeyboardInterrupt):
        comparing.print_comparison(
            load(draft=True), PROMPTS[0], make_params({"max_tokens": 40, "lookahead": 4}), None, False
        )
    shown = capsys.readouterr()
    assert shown.out.count("==>") == 2, "both texts were shown before"
    assert ("both texts are identical: 40 tokens" in shown.err) is (turns > 0)
    assert ("2 turns" in shown.err) is (turns > 0)


def test_statistics_beside_a_comparison(load: Callable[..., ovspec.LanguageModel], capsys: Any) -> None:
    comparing.print_comparison(
        load(draft=True), PROMPTS[0], make_params({"max_tokens": 20, "lookahead": 4}), "full", False
    )
    assert capsys.readouterr().err.count("prompt: ") == 2
