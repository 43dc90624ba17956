"""``BranchPool`` serves logits to a caller that chooses the tokens: those of plain inferences, with fewer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hybrid
import numpy as np
import pytest
from conftest import PROMPTS, ROOT

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.drafting.costs import InferenceCosts
from ovspec.integrations.branches import MAX_BRANCHES, BranchPool
from ovspec.integrations.roles import find_role_texts
from ovspec.text.chat_template import ChatTemplate

Load = Callable[..., ovspec.LanguageModel]
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "model": {"draft": True},
    "model, fixed": {"draft": True, "lookahead": 2},
    "chain, fixed": {"draft": "lookup,draft", "lookahead": 4},
    "stateful": {"draft": "lookup,draft", "rollback": "mask", "lookahead": 3},
    "trimmed": {"draft": True, "rollback": "trim", "lookahead": 3},
}


def ids_of(lm: ovspec.LanguageModel, number: int, length: int) -> list[int]:
    return lm.encode(PROMPTS[number]).tolist()[:length]


def next_token(branches: BranchPool, text: list[int]) -> int:
    return int(branches.request_logits(text)[0][-1].argmax())


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_logits_of_texts_that_grow_part_and_shrink(load: Load, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load(**DRAFTERS[drafter])
    # Whether the automatic lookahead proposes anything must not depend on how busy this machine is.
    monkeypatch.setattr(lm.runtime.decoder_pool, "_idle_sets", [])
    monkeypatch.setattr(lm.target, "verify_ms", {2: 10.0, 16: 11.0})
    if lm.draft:
        monkeypatch.setattr(lm.draft, "verify_ms", {1: 1.0, 16: 1.0})
    monkeypatch.setattr(InferenceCosts, "learn_inference", lambda costs, width, *_: costs(width))
    branches, rng = BranchPool(lm), np.random.default_rng(0)
    texts = [ids_of(lm, number, 40) for number in range(3)]
    for _ in range(120):
        number = int(rng.integers(len(texts)))
        text = texts[number]
        what = rng.random()
        if what < 0.7:
            text.append(next_token(branches, text))
        elif what < 0.8:
            text += rng.integers(3, 4000, size=rng.integers(1, 4)).tolist()
        elif what < 0.9:
            del text[-int(rng.integers(1, 12)) :]
        else:
            texts[number] = list(texts[rng.integers(len(texts))])
    for text in texts:
        found, _ = branches.request_logits(text)
        np.testing.assert_allclose(found, lm.next_logits(text)[None], atol=1e-3)
    served = branches.counts
    assert served.requests == served.inferences + served.answered
    if drafter != "none":
        assert served.proposed > served.accepted > 0
        assert served.answered > 0


@pytest.mark.parametrize("draft", [pytest.param(True, marks=pytest.mark.slow), "lookup,draft"])
def test_guesses_change_no_bit(draft: bool | str, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token alone would round differently from several."""
    drafting = ovspec.load(ROOT / "models" / "demo", draft, precision="bf16", cache_dir=cache_dir, lookahead=4)
    lm = drafting.with_drafters(None)
    monkeypatch.setattr(lm.runtime, "row_maker", replace(lm.runtime.row_maker, lookahead=None))
    assert drafting.runtime.row_maker.lookahead == 4
    plain, drafted = BranchPool(lm), BranchPool(drafting)
    text = lm.encode(PROMPTS[0]).tolist()[:50]
    for _ in range(60):
        ours, theirs = drafted.request_logits(text)[0], plain.request_logits(text)[0]
        assert (ours == theirs).all()
        text.append(int(ours[-1].argmax()))
        for _ in range(3 if len(text) % 7 == 0 else 0):  # as if a grammar forced what the model would generate anyway
            text.append(int(lm.next_logits(text).argmax()))
    assert drafted.counts.answered > plain.counts.answered == 0


def test_branches_keep_their_caches_and_are_bounded(load: Load) -> None:
    lm = load()
    branches, begin = BranchPool(lm), ids_of(lm, 0, 60)
    branches.request_logits(begin)
    texts = [[*begin, *ids_of(lm, number, 12)] for number in range(1, 4)]
    for text in texts:
        branches.request_logits(text)
    assert branches.counts.forks == 2  # the first text continues the branch of the shared prefix
    read = branches.counts.read
    for _ in range(3):
        for text in texts:
            text.append(next_token(branches, text))
    assert branches.counts.read == read + 2 * len(texts)  # each new token is read once; the first round has none
    for number in range(3 * MAX_BRANCHES):
        branches.request_logits([*begin, *([number + 9] * 10)])
    assert len(branches._branches) == MAX_BRANCHES
    blocks = {id(branch.decoders.target): branch.decoders.target for branch in branches._branches}
    assert len(blocks) == MAX_BRANCHES


def test_logits_of_another_text_are_forgotten(load: Load) -> None:
    lm = load()
    branches, ids = BranchPool(lm), list(range(300, 350))
    for length in range(40, 51):
        branches.request_logits(ids[:length])
    other = [*ids[:47], *range(500, 525)]  # read like a prompt: only the last logits are computed
    branches.request_logits(other)
    np.testing.assert_allclose(branches.request_logits(other[:49])[0][0], lm.next_logits(other[:49]), atol=1e-3)


def test_branches_make_room_for_a_prompt(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load()
    branches = BranchPool(lm)
    for number in range(3):
        branches.request_logits(ids_of(lm, number, 40))
    assert len(branches._branches) == 3

    def check_memory(_: Any, tokens: int, spare: float) -> None:  # noqa: ARG001
        if len(branches._branches) > 2 or tokens > 200:
            raise OvspecError(f"no room for {tokens}")

    monkeypatch.setattr("ovspec.engine.decoders.check_memory_for_tokens", check_memory)
    monkeypatch.setattr("ovspec.engine.decoders.LEAST_CHECKED_BYTES", 0)
    branches.request_logits([*ids_of(lm, 2, 40), *ids_of(lm, 3, 40)])
    assert len(branches._branches) == 2
    with pytest.raises(OvspecError, match="no room"):
        branches.request_logits(ids_of(lm, 4, 40) * 10)
    assert len(branches._branches) == 1


@pytest.mark.parametrize("attention", [pytest.param("mask", marks=pytest.mark.slow), None])
def test_recurrent_states_are_taken_back(attention: str | None, tmp_path: Path, cache_dir: Path) -> None:
    model = hybrid.Hybrid(4096, attention)
    folder = hybrid.export(model, tmp_path / "ir", ROOT / "models" / "demo")
    lm = ovspec.load(folder, "lookup", lookahead=3, precision="f32", cache_dir=cache_dir)
    branches, rng = BranchPool(lm), np.random.default_rng(1)
    texts = [rng.integers(3, 4000, size=40).tolist() * 2 for _ in range(2)]
    for step in range(40):
        text = texts[step % 2]
        if step % 9 == 8:
            del text[-int(rng.integers(2, 20)) :]
        text.append(next_token(branches, text))
        if step % 5 == 0:
            np.testing.assert_allclose(branches.request_logits(text)[0][0], model.logits(text)[-1], atol=1e-3)
    assert branches.counts.proposed > 0


def test_all_new_places(load: Load) -> None:
    lm = load(**DRAFTERS["chain, fixed"])
    branches, ids = BranchPool(lm), ids_of(lm, 2, 80)
    for length in (20, 21, 40, 40, 60, 50, 80):
        known, _ = branches.request_logits(ids[:length], all_new_positions=True)
        for back in range(1, min(len(known), 12) + 1):
            np.testing.assert_allclose(known[-back], lm.next_logits(ids[: length - back + 1]), atol=1e-3)
    assert len(branches.request_logits(ids, all_new_positions=True)[0]) == 1


def test_an_inference_that_fails_leaves_nothing_wrong(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load(**DRAFTERS["chain, fixed"])
    branches, text = BranchPool(lm), ids_of(lm, 0, 40)
    branches.request_logits(text)
    target = branches._branches[-1].decoders.target
    with monkeypatch.context() as patched:
        patched.setattr(target._request, "infer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))  # type: ignore
        with pytest.raises(KeyboardInterrupt):
            branches.request_logits([*text, 9])
    np.testing.assert_allclose(branches.request_logits([*text, 9])[0][0], lm.next_logits([*text, 9]), atol=1e-3)
    np.testing.assert_allclose(branches.request_logits(text)[0][0], lm.next_logits(text), atol=1e-3)


def test_what_is_refused(load: Load) -> None:
    lm = load()
    branches = BranchPool(lm)
    for tokens, message in (
        ([], "no BOS token to start with"),
        ([5] * 2049, "the context is 2048"),
        ([5, 99_999], "Token id 99999 is not in the vocabulary"),
    ):
        with pytest.raises(OvspecError, match=message):
            branches.request_logits(tokens)
    full = branches.request_logits([5] * 2048)[0]
    assert full.shape == (1, 4096)


# ---------------------------------------------------------------- chat templates

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WITH_BOS = """{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}[end]{% endfor %}
{%- if add_generation_prompt %}[assistant] {% endif %}"""
SYSTEM_BY_DEFAULT = """{% if messages[0].role != 'system' %}<s>system
Be kind.<e>
{% endif %}{% for m in messages %}<s>{{ m.role }}
{{ m.content }}<e>
{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""
INSTRUCTION = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]
{%- elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}{{ raise_exception('no ' ~ m.role) }}{% endif %}
{%- endfor %}"""
NUMBERED = "{% for m in messages %}{{ loop.index }}: {{ m.content }} {% endfor %}"


@pytest.mark.parametrize("source", [CHATML, WITH_BOS, SYSTEM_BY_DEFAULT, INSTRUCTION])
def test_roles_write_what_the_template_writes(source: str) -> None:
    template = ChatTemplate(source, {"bos_token": "<bos>"})
    roles = find_role_texts(template)
    assert roles
    chat = [(role, f"This is {role} {i}.") for i, role in enumerate(("user", "assistant", "user", "assistant", "user"))]
    if "system" in roles:
        chat.insert(0, ("system", "Say little."))
    assert ("system" in roles) == (source != INSTRUCTION)
    written = "".join(roles[role][0] + text + roles[role][1] for role, text in chat) + roles["assistant"][0]
    rendered = template.render([{"role": role, "content": text} for role, text in chat])
    # The model generates the space before an answer itself.
    assert rendered.removeprefix("<bos>").replace("[/INST] ", "[/INST]") == written


@pytest.mark.parametrize("source", [NUMBERED, "{{ messages[0].content }}", "{{ 1 / 0 }}", "{{ messages | length }}"])
def test_roles_that_a_template_does_not_have(source: str) -> None:
    assert find_role_texts(ChatTemplate(source, {})) is None


# ---------------------------------------------------------------- the guidance library


def test_guidance_is_imported_by_nobody_who_does_not_ask() -> None:
    code = "import sys, ovspec; ovspec.load; print('guidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"


@pytest.mark.skipif(importlib.util.find_spec("guidance.models") is not None, reason="guidance is installed")
def test_without_guidance_it_says_what_to_install() -> None:
    with pytest.raises(OvspecError, match=r"pip install '\.\[guidance\]'"):
        import ovspec.guidance  # noqa: F401
