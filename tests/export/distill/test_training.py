"""What a head learns from: the target's hidden states, and entries packed without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ovspec_export.distill import training, unroll
from ovspec_export.distill.documents import Document, write_first_documents
from ovspec_export.distill.features import (
    Example,
    Examples,
    list_shards,
    make_openvino_computation,
    make_torch_computation,
    read_examples,
    write_embedding_and_lm_head,
    write_shard,
)
from ovspec_export.distill.head import change_draft_vocabulary, choose_draft_ids
from ovspec_export.distill.head_initialization import initialize_head
from ovspec_export.distill.new_head import make_head_config, make_head_layout
from ovspec_export.distill.packing import Batch, pack_examples
from ovspec_export.distill.training import move_vocabulary_rows
from ovspec_export.distill.unroll import compare_guesses, compute_unrolled_loss, unroll_head
from ovspec_export.distill.work_folder import DOCUMENTS_FILE, FEATURES_FOLDER
from ovspec_export.head_layout import choose_default_tap_layers, choose_new_head_tap_layers
from ovspec_export.heads import EagleHead
from safetensors.torch import load_file

from ovspec.base.errors import OvspecError

ROOT = Path(__file__).parent.parent.parent.parent
DEMO, CHECKPOINT = ROOT / "models" / "demo", ROOT / "models" / "demo-hf" / "target"
VOCAB, HIDDEN, LAYERS, STEPS, TOP = 40, 32, [1, 2, 4], 3, 5


# ---------------------------------------------------------------- the target's part


@pytest.fixture(scope="module")
def checkpoint():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return how far two matrices are apart, as a share of the second's size."""
    return float((ours.float() - theirs).norm() / theirs.norm())


ROADS = {
    "OpenVINO": lambda: make_openvino_computation(DEMO, LAYERS),
    "torch": lambda: make_torch_computation(str(CHECKPOINT), "llama", LAYERS, "cpu", False),
}


@pytest.mark.parametrize("road", ROADS)
@torch.no_grad()
def test_features_are_what_the_checkpoint_computes(checkpoint, road: str) -> None:
    compute = ROADS[road]()
    ids = torch.randint(1, 4096, (60,), generator=torch.Generator().manual_seed(0))
    found = compute(ids.tolist())
    theirs = checkpoint(ids[None], output_hidden_states=True)
    states = [state[0] for state in theirs.hidden_states]
    expected = torch.cat([states[layer] for layer in LAYERS], -1)
    assert apart(found["features"], expected) < 0.05  # the IR has int8 weights
    assert apart(found["features"][:-1], expected[1:]) > 0.3
    assert apart(found["final"], states[-1]) < 0.08
    logprobs = theirs.logits[0].log_softmax(-1)
    assert apart(found["logprobs"], logprobs.gather(1, found["choices"].long())) < 0.05
    assert (found["choices"][:, 0] == logprobs.argmax(-1)).float().mean() > 0.8
    assert found["ids"].tolist() == ids.tolist()


def test_the_tables_are_those_of_the_checkpoint(checkpoint, tmp_path: Path) -> None:
    write_embedding_and_lm_head(DEMO, tmp_path / "target.safetensors")
    found = load_file(tmp_path / "target.safetensors")
    table = checkpoint.get_input_embeddings().weight.detach()
    assert apart(found["embedding"], table) < 0.02
    assert apart(found["embedding"][:-1], table[1:]) > 0.5
    assert set(found) == {"embedding"}  # tied


# ---------------------------------------------------------------- packing and the unroll


def random_examples(lengths: tuple[int, ...] = (9, 14, 5)) -> list[Example]:
    draws = torch.Generator().manual_seed(1)
    found = []
    for length in lengths:
        ids = torch.randint(0, VOCAB, (length,), generator=draws)
        choices = torch.stack([torch.randperm(VOCAB, generator=draws)[:TOP] for _ in range(length)])
        found.append(
            Example(
                Document(ids.tolist(), length // 2, "own", True, False),
                ids.int(),
                torch.randn(length, len(LAYERS) * HIDDEN, generator=draws).bfloat16(),
                torch.randn(length, HIDDEN, generator=draws).bfloat16(),
                choices.int(),
                torch.randn(length, TOP, generator=draws).log_softmax(-1).half(),
            )
        )
    return found


@pytest.fixture(scope="module")
def embedding() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def head(embedding: torch.Tensor) -> EagleHead:
    torch.manual_seed(3)
    config = make_head_config({"num_attention_heads": 4, "num_key_value_heads": 2}, VOCAB, HIDDEN, LAYERS, 24)
    made = EagleHead(make_head_layout(config, LAYERS))
    initialize_head(made, random_examples(), embedding, torch.randn(24, HIDDEN))
    for weight in made.parameters():
        weight.data += 0.2 * torch.randn_like(weight)
    return made.eval().requires_grad_(False)


@torch.no_grad()
def proposed(head: EagleHead, example: Example, embedding: torch.Tensor, position: int) -> list[torch.Tensor]:
    """Return the logits of each step as a runtime gets them that knows features up to ``position``."""
    features = head.fuse_target_states(example.features[None, : position + 1].float())
    found = []
    for step in range(min(STEPS, len(example.ids) - 1 - position)):
        tokens = embedding[example.ids[1 : position + 2 + step].long()][None]
        ones = torch.ones(tokens.shape[:2], dtype=torch.int64)
        taps = torch.zeros(1, 1, head.fc.in_features)
        logits, hidden, *_ = head(tokens, features, ones, ones.cumsum(1) - 1, taps, *head.make_empty_cache())
        found.append(logits[0, -1])
        features = torch.cat((features, hidden[:, -1:]), 1)
    return found


def reference_loss(head: EagleHead, examples: list[Example], embedding: torch.Tensor, draft_ids: torch.Tensor) -> float:
    """Return the loss without distance, each position of each document on its own, as the runtime drafts."""
    losses = [list[torch.Tensor]() for _ in range(STEPS)]
    for example in examples:
        for position in range(len(example.ids) - 1):
            deep = position + STEPS < len(example.ids)  # else it has too few tokens after it
            for step, logits in enumerate(proposed(head, example, embedding, position)[: STEPS if deep else 1]):
                wanted, goal = position + 1 + step, torch.zeros(len(head.lm_head.weight))
                likely = zip(example.choices[wanted].tolist(), example.logprobs[wanted].float().exp(), strict=True)
                for choice, probability in likely:
                    if draft_ids[choice] >= 0 and probability > unroll.MIN_PROBABILITY:
                        goal[draft_ids[choice]] = probability
                losses[step].append(-(goal * logits.log_softmax(-1)).sum())
    return sum(unroll.STEP_DECAY**step * float(torch.stack(each).mean()) for step, each in enumerate(losses))


def shifted(batch: Batch) -> Batch:
    return replace(batch, features=batch.features.roll(1, 0))


def of_another_document(batch: Batch) -> Batch:
    length = int((batch.document_indices == 0).sum())
    return replace(batch, choices=batch.choices.roll(length, 0), logprobs=batch.logprobs.roll(length, 0))


def labels_shifted(batch: Batch) -> Batch:
    return replace(batch, choices=batch.choices.roll(1, 0), logprobs=batch.logprobs.roll(1, 0))


def one_document(batch: Batch) -> Batch:
    return replace(batch, document_indices=torch.zeros_like(batch.document_indices))


def padded(batch: Batch) -> Batch:
    more = {
        name: torch.cat(
            (getattr(batch, name), getattr(batch, name)[-1:].repeat(4, *[1] * (getattr(batch, name).ndim - 1)))
        )
        for name in (
            "ids",
            "positions",
            "document_indices",
            "features",
            "choices",
            "logprobs",
            "final_states",
            "in_answers",
        )
    }
    return replace(batch, **more)


def packed_loss(
    head: EagleHead, embedding: torch.Tensor, change: Callable[[Batch], Batch] | None, examples: list[Example]
) -> float:
    batch = pack_examples(examples, STEPS, 1.0)
    return loss_without_distance(head, change(batch) if change else batch, embedding)


@torch.no_grad()
def loss_without_distance(head: EagleHead, batch: Batch, embedding: torch.Tensor) -> float:
    draft_ids = torch.full((VOCAB,), -1).index_put_((torch.arange(0, 24),), torch.arange(24))
    return float(
        compute_unrolled_loss(
            head, replace(batch, final_states=torch.zeros(len(batch), 0)), embedding, draft_ids, STEPS
        )
    )


def test_the_loss_is_that_of_drafting_each_document_alone(head: EagleHead, embedding: torch.Tensor) -> None:
    examples = random_examples()
    draft_ids = torch.full((VOCAB,), -1).index_put_((torch.arange(0, 24),), torch.arange(24))
    expected = reference_loss(head, examples, embedding, draft_ids)
    assert packed_loss(head, embedding, None, examples) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("bug", [shifted, of_another_document, labels_shifted, one_document, padded])
def test_bugs_of_the_data_are_found(head: EagleHead, embedding: torch.Tensor, bug: Callable[[Batch], Batch]) -> None:
    examples = random_examples()
    draft_ids = torch.full((VOCAB,), -1).index_put_((torch.arange(0, 24),), torch.arange(24))
    expected = reference_loss(head, examples, embedding, draft_ids)
    assert packed_loss(head, embedding, bug, examples) != pytest.approx(expected, rel=1e-4)


def test_products_in_bf16_are_close(head: EagleHead, embedding: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pack_examples(random_examples(), STEPS, 1.0)
    exact, found = loss_without_distance(head, batch, embedding), list[float]()
    for levels in ((), (training.BF16_INSTRUCTIONS,)):
        monkeypatch.setattr(training, "list_instruction_sets", lambda levels=levels: levels)
        with training.autocast_bf16("cpu"):
            found.append(loss_without_distance(head, batch, embedding))
    assert found[0] == exact
    assert found[1] == pytest.approx(exact, rel=0.02) and found[1] != exact


def test_each_step_of_the_unroll_is_what_the_runtime_drafts(head: EagleHead, embedding: torch.Tensor) -> None:
    examples = random_examples()
    batch = pack_examples(examples, STEPS, 0.5)
    with torch.no_grad():
        outputs = unroll_head(head, batch, embedding, STEPS)
    begins = [0, 8, 21]
    for row, entry in enumerate(batch.deep_entries.tolist()):
        document = int(batch.document_indices[entry])
        expected = proposed(head, examples[document], embedding, entry - begins[document])
        ours = [head.compute_logits(outputs[0][entry]), *(head.compute_logits(output[row]) for output in outputs[1:])]
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_deep_entries_have_tokens_after_them(head: EagleHead, embedding: torch.Tensor) -> None:
    examples = random_examples((2, 3, 4, 5))
    batch = pack_examples(examples, STEPS, 1.0)
    assert batch.deep_entries.tolist() == [3, 6, 7]  # of 1, 2, 3 and 4 entries those with two more after them
    assert len(unroll_head(head, pack_examples(examples[:1], STEPS, 1.0), embedding, STEPS)[1]) == 0
    assert len(compare_guesses(head, pack_examples(examples[:1], STEPS, 1.0), embedding, torch.arange(24), STEPS)) == 0


def test_only_guesses_of_answers_are_judged() -> None:
    example = replace(random_examples((6,))[0], document=Document([0] * 6, 3, "own", True, False))
    # Entry i guesses token i + 2.
    assert pack_examples([example], STEPS, 1.0).in_answers.tolist() == [False, True, True, True, True]
    assert pack_examples([example], STEPS, 1.0, token_offset=0).in_answers.tolist() == [
        False,
        False,
        True,
        True,
        True,
        True,
    ]


# ---------------------------------------------------------------- vocabulary and layers


def stored(examples: list[Example], work: Path) -> Examples:
    """Write examples into a work folder, and read them."""
    write_first_documents(work / DOCUMENTS_FILE, [example.document for example in examples])
    (work / FEATURES_FOLDER).mkdir()
    fields = {
        "ids": "ids",
        "features": "features",
        "final": "final_states",
        "choices": "choices",
        "logprobs": "logprobs",
    }
    parts = [{name: getattr(example, field) for name, field in fields.items()} for example in examples]
    write_shard(work / FEATURES_FOLDER / "0000000.safetensors", 0, parts[:1])
    write_shard(work / FEATURES_FOLDER / "0000001.safetensors", 1, parts[1:])
    return read_examples(work, held_out=False)


def test_examples_come_back_from_their_shards(tmp_path: Path) -> None:
    examples = random_examples()
    examples[1] = replace(examples[1], document=replace(examples[1].document, held_out=True))
    found = stored(examples, tmp_path)
    for kept, example in zip(
        [*found, *read_examples(tmp_path, held_out=True)], [*examples[::2], examples[1]], strict=True
    ):
        assert kept.document == example.document
        assert torch.equal(kept.features, example.features) and torch.equal(kept.choices, example.choices)
    assert [shard.first_document for shard in list_shards(tmp_path / FEATURES_FOLDER)] == [0, 1]
    (tmp_path / FEATURES_FOLDER / "0000000.safetensors").unlink()
    assert list_shards(tmp_path / FEATURES_FOLDER) == [], "after a gap, all are written again"
    write_first_documents(tmp_path / DOCUMENTS_FILE, [example.document for example in examples[::-1]])
    write_shard(tmp_path / FEATURES_FOLDER / "0000000.safetensors", 0, [{"ids": examples[0].ids}])
    with pytest.raises(OvspecError, match="other texts"):
        read_examples(tmp_path, held_out=False)


def test_the_likeliest_ids_are_proposed_and_then_the_smallest(tmp_path: Path) -> None:
    examples = random_examples()
    kept = stored(examples, tmp_path)
    counts = dict.fromkeys(range(VOCAB), 0.0)
    for example in examples:
        for token in example.ids.tolist():
            counts[token] += 1
        for token, value in zip(example.choices.flatten().tolist(), example.logprobs.flatten().tolist(), strict=True):
            counts[token] += float(torch.tensor(value).double().exp())
    wanted = sorted(counts, key=lambda token: (-counts[token], token))
    assert choose_draft_ids(kept, VOCAB, 12).tolist() == sorted(wanted[:12])
    assert choose_draft_ids(Examples([]), VOCAB, 7).tolist() == list(range(7))
    assert choose_draft_ids(kept, VOCAB, 1000).tolist() == list(range(VOCAB))


def test_rows_move_with_their_ids() -> None:
    old, new = torch.tensor([1, 4, 7]), torch.tensor([0, 4, 5, 7, 30])
    rows, fresh = torch.tensor([[1.0], [4.0], [7.0]]), torch.full((5, 1), -1.0)
    assert move_vocabulary_rows(rows, old, new, fresh)[:, 0].tolist() == [-1.0, 4.0, -1.0, 7.0, -1.0]


def test_an_lm_head_gets_other_ids_with_all_that_belongs_to_it() -> None:
    old, new, rows = torch.tensor([1, 4]), torch.tensor([2, 4]), torch.arange(6.0)[:, None]
    weight, bias = rows[old], 10 * old.float()
    moments = {
        name: {moment: values.clone() for moment in ("exp_avg", "exp_avg_sq")}
        for name, values in {"lm_head.weight": weight, "lm_head.bias": bias}.items()
    }
    both = [{"lm_head.weight": weight.clone(), "lm_head.bias": bias.clone()} for _ in range(2)]
    state = {"ids": old, "config": {}, "weights": both[0], "averaged": both[1], "optimizer": moments}
    change_draft_vocabulary(state, new, 100 + rows)
    for values in both:
        assert values["lm_head.weight"][:, 0].tolist() == [102.0, 4.0]
        assert values["lm_head.bias"].tolist() == [0.0, 40.0]
    assert moments["lm_head.weight"]["exp_avg"][:, 0].tolist() == [0.0, 4.0]
    assert moments["lm_head.bias"]["exp_avg_sq"].tolist() == [0.0, 40.0]
    assert state["ids"].tolist() == [2, 4] and state["config"] == {"draft_vocab_size": 2}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 12, 30])
def test_layers_are_different_ones_of_the_target(count: int) -> None:
    layers = choose_new_head_tap_layers(count)
    assert layers == sorted(set(layers)) and layers[0] >= 0 and layers[-1] < count
    assert count < 7 or layers == choose_default_tap_layers(count)


def test_begin_is_the_best_linear_guess() -> None:
    """With a target that computes linearly, the new head's guess is what its lm_head reads."""
    draws = torch.Generator().manual_seed(5)
    embedding = torch.randn(VOCAB, HIDDEN, generator=draws)
    mix, effect = torch.randn(96, HIDDEN, generator=draws) / 10, torch.randn(HIDDEN, HIDDEN, generator=draws) / 6
    examples = []
    for example in random_examples((80,) * 12):
        token = F.rms_norm(embedding[example.ids.long()], [HIDDEN])
        final = torch.zeros(len(example.ids), HIDDEN)
        final[1:] = F.rms_norm(example.features[:-1].float() @ mix + token[1:] @ effect, [HIDDEN])
        examples.append(replace(example, final_states=final.bfloat16()))
    config = make_head_config({"num_attention_heads": 4, "num_key_value_heads": 2}, VOCAB, HIDDEN, LAYERS, 24)
    torch.manual_seed(0)
    head = EagleHead(make_head_layout(config, LAYERS))
    divisor = initialize_head(head, examples, embedding, torch.randn(24, HIDDEN))
    batch = pack_examples(examples[:3], STEPS, 0.0)
    with torch.no_grad():
        guess = head.norm(unroll_head(head, replace(batch, features=batch.features / divisor), embedding, 1)[0])
    alike = F.cosine_similarity(guess, batch.final_states, dim=-1).mean()
    assert alike > 0.6
