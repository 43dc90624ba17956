"""What a draft model learns from: documents packed without padding, and the target's likeliest tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ovspec_export.distill.documents import Document
from ovspec_export.distill.draft import DraftStudent, can_pack_documents, compute_draft_logits, train_draft
from ovspec_export.distill.features import Example, write_shard
from ovspec_export.distill.packing import Batch, pack_examples
from ovspec_export.distill.work_folder import CHECKPOINT_FOLDER, DOCUMENTS_FILE, FEATURES_FOLDER, TRAINING_STATE_FILE
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening

ROOT = Path(__file__).parent.parent.parent.parent
DRAFT = ROOT / "models" / "demo-hf" / "draft"
VOCAB, TOP = 40, 5
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS: dict[str, dict[str, object]] = {
    "llama": {"intermediate_size": 64},
    "gpt2": {"n_positions": 64},  # which are learned
    "mistral": {"intermediate_size": 64, "num_key_value_heads": 1, "sliding_window": 4},
}


def random_examples(lengths: tuple[int, ...] = (9, 14, 6), vocab: int = VOCAB) -> list[Example]:
    draws, found = torch.Generator().manual_seed(1), list[Example]()
    for length in lengths:
        ids = torch.randint(0, vocab, (length,), generator=draws)
        choices = torch.stack([torch.randperm(vocab, generator=draws)[:TOP] for _ in range(length)])
        logprobs, empty = torch.randn(length, TOP, generator=draws).log_softmax(-1).half(), torch.empty(length, 0)
        document = Document(ids.tolist(), length // 2, "own", True, False)
        found.append(Example(document, ids.int(), empty, empty, choices.int(), logprobs))
    return found


def random_model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SIZES, initializer_range=0.3, **MODELS[name])
    return AutoModelForCausalLM.from_config(config).eval()


def test_positions_are_those_of_hugging_faces_collation() -> None:
    examples = random_examples()
    theirs = DataCollatorWithFlattening()([{"input_ids": example.ids.tolist()} for example in examples])
    batch = pack_examples(examples, 1, 0, token_offset=0)
    assert batch.ids.tolist() == theirs["input_ids"][0].tolist()
    assert batch.positions.tolist() == theirs["position_ids"][0].tolist()
    # A head's entry has the token after its position.
    assert pack_examples(examples, 1, 0).positions.tolist() == [*range(8), *range(13), *range(5)]


def continued(batch: Batch) -> Batch:
    return replace(batch, positions=torch.arange(len(batch)))


def labels_shifted(batch: Batch) -> Batch:
    return replace(batch, choices=batch.choices.roll(1, 0), logprobs=batch.logprobs.roll(1, 0))


def labels_of_another_document(batch: Batch) -> Batch:
    return replace(batch, choices=batch.choices.roll(9, 0), logprobs=batch.logprobs.roll(9, 0))


@torch.no_grad()
def loss_alone(model: torch.nn.Module, examples: list[Example]) -> float:
    """Return the loss of documents that transformers reads one by one."""
    losses = list[torch.Tensor]()
    for example in examples:
        logprobs = model(input_ids=example.ids.long()[None]).logits[0].log_softmax(-1)
        likely = logprobs.gather(1, example.choices.long())
        losses.append(-(example.logprobs.float().exp() * likely).sum(-1))
    return float(torch.cat(losses).mean())


@torch.no_grad()
def loss_packed(model: torch.nn.Module, examples: list[Example], change: Callable[[Batch], Batch]) -> float:
    return float(DraftStudent(model, True).compute_loss(change(pack_examples(examples, 1, 0, token_offset=0))))


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_have_the_loss_of_each_alone(name: str) -> None:
    model, examples = random_model(name), random_examples()
    assert can_pack_documents(model, examples)
    expected = loss_alone(model, examples)
    assert loss_packed(model, examples, lambda batch: batch) == pytest.approx(expected, rel=1e-4)
    for bug in (continued, labels_shifted, labels_of_another_document):
        assert loss_packed(model, examples, bug) != pytest.approx(expected, rel=1e-4)


def test_models_that_cannot_be_packed_are_noticed() -> None:
    """A recurrent state goes on from one document to the next."""

    class Recurrent(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, **_: object) -> object:
            return type("Output", (), {"logits": torch.nn.functional.one_hot(input_ids, VOCAB).float().cumsum(1)})

    assert not can_pack_documents(Recurrent(), random_examples())


def test_a_draft_learns_and_goes_on(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(DRAFT)
    examples = random_examples((40,) * 12, model.config.vocab_size)
    lines = [json.dumps({**vars(example.document), "held_out": i % 4 == 0}) for i, example in enumerate(examples)]
    (tmp_path / DOCUMENTS_FILE).write_text("\n".join(lines) + "\n")
    (tmp_path / FEATURES_FOLDER).mkdir()
    parts = [{"ids": each.ids, "choices": each.choices, "logprobs": each.logprobs} for each in examples]
    write_shard(tmp_path / FEATURES_FOLDER / "0000000.safetensors", 0, parts)
    for limit in (1000, 2000):
        train_draft(str(DRAFT), "llama", str(tmp_path), 60, limit, False)
        state = torch.load(tmp_path / TRAINING_STATE_FILE, weights_only=True)
        assert limit <= state["seen"] < limit + 400
    assert state["step"] == 2 * (state["step"] // 2) > 0
    taught = AutoModelForCausalLM.from_pretrained(tmp_path / CHECKPOINT_FOLDER, dtype=torch.float32)
    with torch.no_grad():
        before, after = (loss_packed(each.float(), examples, lambda batch: batch) for each in (model, taught))
    assert after < before
    assert compute_draft_logits(taught, pack_examples(examples[:1], 1, 0, token_offset=0)).shape == (
        40,
        model.config.vocab_size,
    )
