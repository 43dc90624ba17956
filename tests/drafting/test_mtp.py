"""MTP layers: what they propose is what torch proposes, and whatever they propose, the text stays the same.

The oracle is transformers' own model with the layer alone, which reads each text anew: of our code, it knows nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from conftest import PROMPTS, Reference
from moves import moving_texts
from mtp_pairs import KEPT_IDS, small_mtp_pairs
from openvino import opset13 as ops
from ovspec_export.mtp import find_tensor_files, load_mtp_layer, read_tensors
from safetensors.torch import load_file
from scipy.stats import chisquare
from torch_heads import FEATURE_BUGS, Proposed, TorchHead, note_proposals

import ovspec
from ovspec.ir import heads as head_graphs

LOOKAHEAD, TOKENS = 3, 16
SLOW = pytest.mark.slow
OPTIONS: dict[str, Any] = {"lookahead": LOOKAHEAD, "max_tokens": TOKENS, "ignore_eos": True}
PLAIN: dict[str, Any] = {**OPTIONS, "lookahead": 0}
CHOICES, DRAWS = [40, 300, 700], 2000  # tokens and texts that are sampled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mtp_pairs(tmp_path_factory)


@pytest.fixture(scope="module")
def load(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ovspec.LanguageModel]:
    cache = tmp_path_factory.mktemp("cache")

    def load(name: str = "own", engine: Any = "paged", draft: str = "mtp") -> ovspec.LanguageModel:
        return ovspec.load(folder / name, draft, precision="f32", cache_dir=cache, engine=engine)

    return load


@pytest.fixture(scope="module")
def torch_layers(folder: Path, reference: Reference) -> TorchHead:
    """Return the oracle of the two layers that one checkpoint has."""
    guesses = [make_guess(folder / name, reference) for name in ("layer", "second-layer")]
    vocabulary = np.arange(reference.model.config.vocab_size)
    return TorchHead(reference.model, lambda states: states[-1], guesses, vocabulary)


@pytest.fixture(scope="module")
def torch_layer(torch_layers: TorchHead) -> TorchHead:
    """Return the oracle of the layer that the other checkpoint has."""
    return TorchHead(torch_layers.target, torch_layers.make_features, torch_layers.guesses[:1], torch_layers.ids)


def make_guess(checkpoint: Path, reference: Reference) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    tensors = load_file(checkpoint / "model.safetensors")
    epsilon = reference.model.config.rms_norm_eps
    only_layer = load_mtp_layer(checkpoint, "layer")[1]

    def normalize(states: torch.Tensor, name: str) -> torch.Tensor:
        weight = tensors[f"mtp.pre_fc_norm_{name}.weight"].float()
        return torch.nn.functional.rms_norm(states, weight.shape, weight, epsilon)

    def guess(embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat((normalize(embedded, "embedding"), normalize(features, "hidden")), -1)
        states = only_layer.model(inputs_embeds=both @ tensors["mtp.fc.weight"].float().T).last_hidden_state
        return reference.model.lm_head(states), states

    return guess


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[Proposed]:
    return note_proposals(monkeypatch)


@pytest.mark.parametrize("engine", ["paged", pytest.param("stateful", marks=SLOW)])
def test_each_proposal_is_that_of_torch(
    load: Callable[..., ovspec.LanguageModel], torch_layer: TorchHead, proposals: list[Proposed], engine: str
) -> None:
    """In a batch, in sessions that are rewound, and in forks."""
    lm = load(engine=engine)
    assert lm.draft and lm.draft.proposer_name == "mtp" and lm.target.engine == engine
    found = moving_texts(lm, PROMPTS, max_tokens=TOKENS, lookahead=LOOKAHEAD)
    assert len(proposals) > len(found) * TOKENS / 2 and torch_layer.agree(proposals)
    assert found == moving_texts(lm, PROMPTS, max_tokens=TOKENS, lookahead=0)


@pytest.mark.parametrize("engine", ["paged", pytest.param("stateful", marks=SLOW)])
def test_each_layer_proposes_one_token_further(
    load: Callable[..., ovspec.LanguageModel],
    torch_layers: TorchHead,
    torch_layer: TorchHead,
    proposals: list[Proposed],
    engine: str,
) -> None:
    """And the last one goes on from its own output. Without the second one, proposals differ."""
    lm = load("deep", engine)
    assert lm.draft and len(lm.draft.list_layers()) == 2 and lm.target.engine == engine
    found = moving_texts(lm, PROMPTS, max_tokens=TOKENS, lookahead=LOOKAHEAD)
    assert len(proposals) > len(found) * TOKENS / 2 and torch_layers.agree(proposals)
    assert not torch_layer.agree(proposals)
    assert found == moving_texts(lm, PROMPTS, max_tokens=TOKENS, lookahead=0)


def test_a_trimmed_vocabulary(
    load: Callable[..., ovspec.LanguageModel], torch_layer: TorchHead, proposals: list[Proposed]
) -> None:
    """The target's lm_head is cut; among the ids that are left, the layer proposes the same."""
    lm = load("pair")
    assert lm.draft and lm.draft.ir.target_ids is not None and lm.draft.ir.logits_width == KEPT_IDS
    ids = lm.draft.ir.target_ids

    def guess(embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, hidden = torch_layer.guesses[0](embedded, features)
        return logits[..., torch.from_numpy(ids)], hidden

    trimmed = TorchHead(torch_layer.target, torch_layer.make_features, [guess], ids)
    text = lm.generate(PROMPTS[0], **OPTIONS)
    assert proposals and trimmed.agree(proposals) and not torch_layer.agree(proposals)
    assert text.token_ids == lm.generate(PROMPTS[0], **PLAIN).token_ids


def before_the_norm(model: ov.Model) -> ov.Output | None:
    """Return what the last norm reads: the sum with the residual."""
    value = FINAL_STATES(model)
    while value and not (value.get_node().get_type_name() == "Add" and value.get_partial_shape()[-1] != 1):
        inputs = [source for source in value.get_node().input_values() if source.get_partial_shape().rank != 0]
        value = next(source for source in inputs if source.get_node().get_type_name() not in ("Constant", "Convert"))
    return value


FINAL_STATES = head_graphs.find_lm_head_input
BUGS = ["pre-norm", "wrong embedding", "rejected token", pytest.param("off by one", marks=SLOW)]


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(
    load: Callable[..., ovspec.LanguageModel],
    torch_layer: TorchHead,
    proposals: list[Proposed],
    bug: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No bug changes the text: only the proposals show it."""
    embedding = head_graphs.find_embedding
    if bug == "pre-norm":
        monkeypatch.setattr(head_graphs, "find_lm_head_input", before_the_norm)
    elif bug == "wrong embedding":

        def roll_rows(model: ov.Model) -> ov.Node:
            table = embedding(model).input_value(0)
            rows = ops.constant(np.roll(np.arange(table.get_partial_shape()[0].get_length()), 1))
            zero = ops.constant(0)
            return ops.gather(ops.gather(table, rows, zero), ops.constant([0]), zero)

        monkeypatch.setattr(head_graphs, "find_embedding", roll_rows)
    else:
        FEATURE_BUGS[bug](monkeypatch)
    lm = load()
    assert lm.generate(PROMPTS[0], **OPTIONS).token_ids == lm.generate(PROMPTS[0], **PLAIN).token_ids
    assert proposals and not torch_layer.agree(proposals)


def test_lookup_comes_first(load: Callable[..., ovspec.LanguageModel], proposals: list[Proposed]) -> None:
    lm = load(draft="lookup,mtp")
    plain, found = (lm.generate(PROMPTS[:2], **{**way, "max_tokens": 48}) for way in (PLAIN, OPTIONS))
    assert [text.token_ids for text in found] == [text.token_ids for text in plain] and proposals
    assert all(text.stats.drafters["mtp"]["proposed"] for text in found)
    assert any(text.stats.drafters.get("lookup", {"proposed": 0})["proposed"] for text in found)


@pytest.mark.parametrize("accept", ["rejection", pytest.param("compare", marks=SLOW)])
def test_sampled_texts_have_the_targets_distribution(load: Callable[..., ovspec.LanguageModel], accept: Any) -> None:
    """Four tokens, each of three; all others are as good as impossible, for the layers, too."""
    lm = load("deep")
    prompt = lm.encode(PROMPTS[0])
    ways: dict[str, Any] = {"temperature": 4.0, "logit_bias": dict.fromkeys(CHOICES, 90.0), "ignore_eos": True}
    texts = lm.samples(prompt, n=DRAWS, seed=1, max_tokens=4, lookahead=2, accept=accept, **ways)
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in expected.items():
            logits = lm.next_logits([*prompt, *text])[CHOICES].astype(float) / ways["temperature"]
            shares = np.exp(logits - logits.max())
            longer |= {(*text, x): probability * y for x, y in zip(CHOICES, shares / shares.sum(), strict=True)}
        expected = longer
    counts = Counter(tuple(text.token_ids) for text in texts)
    assert len(texts) == DRAWS and counts.keys() <= expected.keys()
    used = [text.stats.drafters["mtp"] for text in texts]
    assert sum(each["proposed"] for each in used) > DRAWS and sum(each["accepted"] for each in used) > DRAWS / 5
    is_rare = {text: DRAWS * probability < 5 for text, probability in expected.items()}
    observed, wanted = (
        [*(of[text] for text in expected if not is_rare[text]), sum(of[text] for text in expected if is_rare[text])]
        for of in (counts, expected)
    )
    assert chisquare(observed, np.multiply(wanted, DRAWS)).pvalue > 1e-4


def test_wrong_names_are_refused_in_a_sentence(folder: Path) -> None:
    mtp = folder / "own" / "draft"
    cases = {
        (folder / "own", "head"): "an MTP layer, not an EAGLE-3 head; set `draft='mtp'`",
        (folder / "own", "self"): "not made from the target's layers",
        (mtp, "none"): "an MTP layer, not a model; load the target model",
    }
    for (model, draft), expected in cases.items():
        with pytest.raises(ovspec.OvspecError, match=expected):
            ovspec.load(model, draft)


def test_what_is_stored(folder: Path) -> None:
    """The layer has no copy of the target's embedding or lm_head, and the checkpoint alone all that it needs."""
    model = ov.Core().read_model(folder / "own" / "draft" / "openvino_model.xml")
    assert {name for port in model.outputs for name in port.names} >= {"hidden", "fused"}
    weights = (folder / "own" / "draft" / "openvino_model.bin").stat().st_size
    assert weights < (folder / "layer" / "model.safetensors").stat().st_size * 2.1  # bf16 there, f32 here
    names = find_tensor_files(folder / "layer")
    assert all(name.startswith("mtp.") for name in names) and len(read_tensors(names)) == len(names)
