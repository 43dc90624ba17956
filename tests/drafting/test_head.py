"""EAGLE-3 heads: what they propose is what torch proposes, and whatever they propose, the text stays the same.

A wrong feature changes no text, only what is accepted. So each proposal is compared with torch's, which knows nothing
of caches, and planted bugs must be found.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as AnySequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiling import compile_once, trust_paged
from conftest import PROMPTS, ROOT, TARGET, Reference
from family_models import warm_jobs
from heads import write_head
from kept import kept_model
from moves import moving_texts
from ovspec_export import Compression, export_pair
from ovspec_export.heads import load_head_checkpoint
from torch_heads import FEATURE_BUGS, Proposed, TorchHead, note_proposals

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.cache.blocks import BlockTensors
from ovspec.cache.decoder import FeedRule
from ovspec.cache.head import HeadDecoder
from ovspec.cache.paged import PagedDecoder
from ovspec.cache.sequence import EMPTY_ROW, Sequence, catch_up
from ovspec.cache.stateful import RowByRowDecoder
from ovspec.ir import heads as head_graphs
from ovspec.ir.compile import CompiledIR
from ovspec.ir.device import DeviceOptions
from ovspec.ir.heads import FEATURES_OUTPUT
from ovspec.setup import proposers
from ovspec.setup.engine_choice import CompiledModel

LAYERS = [1, 0, 1]
LOOKAHEAD = 3
TOKENS = 16
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a random head of the small target, exported in f32, as "pair", and its "checkpoint"."""

    def make(place: Path) -> None:
        config = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))
        options: dict[str, Any] = {"draft_vocab": 900, "embedding": False, "layer_ids": LAYERS}
        write_head(place / "checkpoint", "speculators", target=config, **options)
        with pytest.MonkeyPatch.context() as patched:
            warm_jobs(patched)
            export_pair(str(TARGET), str(place / "checkpoint"), place / "pair", Compression("fp32"))

    return kept_model(tmp_path_factory, "small-head", make)


@pytest.fixture(scope="module")
def load_headed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ovspec.LanguageModel]:
    cache = tmp_path_factory.mktemp("cache")

    def load(engine: Any = "paged") -> ovspec.LanguageModel:
        return ovspec.load(folder / "pair", "head", precision="f32", cache_dir=cache, engine=engine)

    return load


@pytest.fixture(scope="module")
def headed(load_headed: Callable[..., ovspec.LanguageModel]) -> ovspec.LanguageModel:
    """Return a model for tests that change nothing in it."""
    return load_headed()


@pytest.fixture(scope="module")
def torch_head(folder: Path, reference: Reference) -> TorchHead:
    model = reference.model
    head = load_head_checkpoint(folder / "checkpoint", embedding=model.get_input_embeddings().weight)

    def features(states: AnySequence[torch.Tensor]) -> torch.Tensor:
        return head.fuse_target_states(torch.cat([states[layer] for layer in LAYERS], -1))

    def guess(embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ones = torch.ones(embedded.shape[:2], dtype=torch.int64)
        taps = torch.zeros((1, 0, len(LAYERS) * embedded.shape[-1]))  # fused above
        logits, hidden, *_ = head(embedded, features, ones, ones.cumsum(1) - 1, taps, *head.make_empty_cache())
        return logits, hidden

    return TorchHead(model, features, [guess], head.target_ids)


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[Proposed]:
    return note_proposals(monkeypatch)


@pytest.mark.parametrize(
    ("engine", "fewest"), [pytest.param("paged", 1, marks=SLOW), ("paged", 2), pytest.param("stateful", 1, marks=SLOW)]
)
def test_each_proposal_is_that_of_torch(
    load_headed: Callable[..., ovspec.LanguageModel],
    torch_head: TorchHead,
    proposals: list[Proposed],
    engine: str,
    fewest: int,
) -> None:
    """On either engine, and where a token comes twice because that is faster."""
    headed = load_headed(engine)
    assert headed.draft
    headed.draft.feed_rule = FeedRule(fewest=fewest)
    found = moving_texts(headed, PROMPTS, max_tokens=TOKENS, lookahead=LOOKAHEAD)
    assert len(proposals) > len(found) * TOKENS / 2 and torch_head.agree(proposals)
    assert found == moving_texts(headed, PROMPTS, max_tokens=TOKENS, lookahead=0)


def test_rows_with_requests_of_their_own(
    load_headed: Callable[..., ovspec.LanguageModel],
    torch_head: TorchHead,
    proposals: list[Proposed],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU's stateful engine."""
    monkeypatch.setattr(CompiledIR, "needs_single_rows", True)
    headed = load_headed("stateful")
    assert headed.draft and isinstance(headed.draft.make_decoder(), RowByRowDecoder)
    found = [text.token_ids for text in headed.generate(PROMPTS[:2], max_tokens=12, lookahead=LOOKAHEAD)]
    assert len(proposals) > 12 and torch_head.agree(proposals)
    assert found == [text.token_ids for text in headed.generate(PROMPTS[:2], max_tokens=12, lookahead=0)]


def test_a_copied_cache_keeps_its_features(load_headed: Callable[..., ovspec.LanguageModel]) -> None:
    """What the row reads afterwards, in place of its last tokens, doesn't change the copy."""
    decoder = load_headed("stateful").target.make_decoder()
    decoder.feed([np.arange(10, 60)], [1])
    copied_features = decoder.dump()[FEATURES_OUTPUT]
    expected = copied_features.copy()
    decoder.truncate(0, 20)
    decoder.feed([np.arange(70, 110)], [1])
    assert copied_features.shape[0] == 50 and np.array_equal(copied_features, expected)


@pytest.fixture(scope="module")
def plain(headed: ovspec.LanguageModel) -> list[int]:
    """Return the tokens of a text without a head."""
    options: dict[str, Any] = {"lookahead": 0, "max_tokens": TOKENS, "ignore_eos": True}
    return headed.with_drafters(None).generate(PROMPTS[0], **options).token_ids


BUGS = ["wrong layer", pytest.param("off by one", marks=SLOW), "rejected token", "no d2t"]


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(
    load_headed: Callable[..., ovspec.LanguageModel],
    plain: list[int],
    torch_head: TorchHead,
    proposals: list[Proposed],
    bug: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No bug changes the text: only the proposals show it."""
    inputs = head_graphs.find_layer_inputs
    if bug == "wrong layer":
        monkeypatch.setattr(head_graphs, "find_layer_inputs", lambda *given: inputs(*given)[::-1])
    elif bug in FEATURE_BUGS:
        FEATURE_BUGS[bug](monkeypatch)
    lm = load_headed()
    if bug == "no d2t":
        assert lm.draft and lm.draft.ir.target_ids is not None
        lm.draft.ir.target_ids = np.arange(len(lm.draft.ir.target_ids))
    options: dict[str, Any] = {"lookahead": LOOKAHEAD, "max_tokens": TOKENS, "ignore_eos": True}
    assert lm.generate(PROMPTS[0], **options).token_ids == plain
    assert proposals and not torch_head.agree(proposals)


def test_entries_outlast_a_pause(headed: ovspec.LanguageModel) -> None:
    """What a head has read remains when rows join or a text forks, even if nothing is proposed then."""
    lm, text = headed, Sequence(range(1, 50))
    assert lm.draft
    target, entries = lm.target.make_decoder(), lm.draft.make_decoder()
    head = HeadDecoder([entries], target)
    target.feed([text.tokens[:-1]], [0])
    head.reuse_prefixes([text])
    head.feed([catch_up(head, 0, text)], [1])
    head.drop_guessed_entries()
    head.reorder([0, EMPTY_ROW])
    head.drop_guessed_entries()
    HeadDecoder([other := entries.fork()], target.fork()).drop_guessed_entries()
    assert [len(row) for row in entries.rows] == [len(row) for row in other.rows] == [len(text) - 1, 0]


def test_no_text_finds_entries_without_features(headed: ovspec.LanguageModel) -> None:
    lm, text = headed, Sequence(range(1, 50))
    assert lm.draft
    tensors = BlockTensors(lm.draft.ir, max_cached_tokens=1000)
    target, entries = lm.target.make_decoder(), PagedDecoder(lm.draft.ir, rule=lm.draft.feed_rule, tensors=tensors)
    head = HeadDecoder([entries], target)
    target.feed([text.tokens[:9]], [0])
    head.reuse_prefixes([text])
    head.feed([catch_up(head, 0, text)], [1])
    owner = entries.rows[0].owner
    head.drop_guessed_entries()
    head.reset(1)
    assert tensors.pool.find_prefix(text.tokens[1:], owner)[1] == 9


def test_a_head_with_more_tokens_than_its_target_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, headed: ovspec.LanguageModel
) -> None:
    lm = headed
    read = proposers.read_head_graph(folder / "pair" / "draft", folder / "pair")
    assert read.target_ids is not None
    beyond = read.target_ids + lm.target.ir.logits_width
    monkeypatch.setattr(proposers, "read_head_graph", lambda *_: replace(read, target_ids=beyond))
    with pytest.raises(ovspec.OvspecError, match=r"proposes token .* but the target has"):
        proposers.load_compiled_head(folder / "pair" / "draft", lm.target, DeviceOptions())


def test_wrong_heads_are_refused_in_a_sentence(folder: Path, pair: Path) -> None:
    head = folder / "pair" / "draft"
    cases = {
        (pair, "head"): "a draft model, not an EAGLE-3 head",
        (ROOT / "models" / "demo" / "draft", "head"): "exported without a head",
        (head, "none"): "an EAGLE-3 head, not a model; load the target model",
        (ROOT / "models" / "demo", head): "use the head with the model it was trained for",
    }
    for (model, draft), expected in cases.items():
        with pytest.raises(OvspecError, match=expected):
            ovspec.load(model, draft)
    with pytest.raises(OvspecError, match="must come first in a chain"):
        ovspec.load(folder / "pair", "head,lookup")


def test_features_that_change_bits_are_told(
    folder: Path, headed: ovspec.LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then texts may differ from those without a head, and arithmetic isn't called exact; the answer is remembered."""
    assert headed.target.arithmetic_note == "exact"
    compile_once(monkeypatch)
    trust_paged(monkeypatch)
    bits = CompiledModel.hash_logits
    monkeypatch.setattr(
        CompiledModel, "hash_logits", lambda self: [bytes(FEATURES_OUTPUT in self.ir.outputs), *bits(self)[1:]]
    )
    for _ in range(2):
        lm = ovspec.load(folder / "pair", "head", precision="f32", cache_dir=tmp_path)
        assert "features change 1 of" in lm.target.arithmetic_note and lm.target.arithmetic == "fast"
        monkeypatch.setattr(CompiledModel, "hash_logits", bits)


def test_a_draft_computes_two_tokens_where_that_is_faster(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_once(monkeypatch)
    trust_paged(monkeypatch)
    for cost, fewest in ((1.1, 1), (0.9, 2)):
        monkeypatch.setattr(proposers, "measure_two_token_cost", lambda _, cost=cost: cost)
        cache = tmp_path / str(fewest)
        lm = ovspec.load(folder / "pair", "head", precision="f32", arithmetic="fast", cache_dir=cache)
        assert lm.draft and lm.draft.feed_rule.fewest == fewest
