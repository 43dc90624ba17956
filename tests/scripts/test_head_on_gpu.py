"""scripts/train/head_on_gpu.py on the CPU: it writes what the model says, and learns as 'ovspec distill' does."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from conftest import ROOT
from distilling import made_head
from head_checkpoint import write_checkpoint
from head_on_gpu import Head, encode, lists_in, losses, prepared, train, varied, write, write_rows
from heads import write_head
from ovspec_export.distill.packing import Batch
from ovspec_export.distill.unroll import unrolled
from ovspec_export.heads import load_head_checkpoint
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ovspec.base.errors import OvspecError
from ovspec.ir.compile import read_model, read_target_ids

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "vocab_size": 600}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
TURNS = [[7, 8, 9, 10], [7, 11, 12]]  # 7 ends a turn


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    more: dict[str, Any] = {"initializer_range": 0.3, "tie_word_embeddings": True, "eos_token_id": 7}
    config = LlamaConfig(**SIZES, **HEADS, **more)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def head_for(model: Any, folder: Path) -> Path:
    target = model.config.to_dict()
    rope = {"rms_norm_eps": model.config.rms_norm_eps, "intermediate_size": 96}
    return write_head(folder, "specforge", target=target, embedding=False, draft_vocab=200, **rope)


def test_rows_are_what_the_model_says(model: Any) -> None:
    starts = [[5, 6, 30], [40, 41, 42, 43, 44, 45]]
    rows = write_rows(model, starts, torch.tensor([False, False]), torch.tensor([True, True]), 48, TURNS)
    for row, start in zip(rows, starts, strict=True):
        [said] = model.generate(torch.tensor([start]), max_new_tokens=48 - len(start), do_sample=False, pad_token_id=7)
        ended = said.tolist().index(7) + 1 if 7 in said else len(said)
        assert row[:ended].tolist() == said[:ended].tolist()
    assert (rows >= 0).all()


def test_turns_follow_each_other(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question ends after two tokens and an answer after three, if the model doesn't end them."""
    for name, most in {"QUESTION": 2, "ANSWER": 3}.items():
        monkeypatch.setattr(f"head_on_gpu.{name}", most)
    torch.manual_seed(1)
    [row] = write_rows(model, [[5, 6]], torch.tensor([True]), torch.tensor([False]), 30, TURNS).tolist()
    text = ",".join(map(str, row[2:]))
    turns = [part.split(",") for part in text.replace(",7,8,9,10,", "|").replace(",7,11,12,", "|").split("|")]
    assert len(turns) > 3
    assert all(len(turn) <= (2, 3)[number % 2] for number, turn in enumerate(turns[:-1]))


def test_loops_are_known() -> None:
    rows = torch.stack([torch.arange(90), torch.arange(90) % 9])
    assert varied(rows).tolist() == [True, False]


def test_a_head_guesses_as_ours(model: Any, tmp_path: Path) -> None:
    ours = load_head_checkpoint(head_for(model, tmp_path / "head"))
    ids = torch.arange(len(ours.d2t)) + ours.d2t
    head = Head(model.config, ids)
    usual = torch.linspace(0.5, 2, 192)
    with torch.no_grad():
        # A rotary embedding's base is the target's here, and the head's there.
        ours.rotary = model.model.rotary_emb
        head.begin(tmp_path / "head", model.lm_head.weight, usual)
        rows = torch.randint(600, (2, 40))
        batch = prepared(model, rows, ids, usual)
        found = list(head.steps(batch[0], batch[1], batch[4], 4))
        for row in range(2):
            zeros, entries = torch.zeros(39), torch.arange(39)
            features = batch[1][row] * usual
            packed = Batch(
                rows[row, 1:], entries, zeros.long(), features, zeros, zeros, zeros, entries[:36], zeros.bool()
            )
            for states, theirs in zip(found, unrolled(ours, packed, model.lm_head.weight, 4), strict=True):
                torch.testing.assert_close(states[row, :36], theirs[:36], rtol=1e-3, atol=1e-4)
        logits = ours.compute_logits(found[0])
        expected = batch[3][:, 1:]
        cross = -(expected * logits.log_softmax(-1)).sum(-1).mean()
        distance = torch.nn.functional.mse_loss(ours.norm(found[0]), batch[2][:, 1:]) / batch[2][:, 1:].square().mean()
        assert losses(head, batch, 1, 0.0).item() == pytest.approx((cross + 0.5 * distance).item(), rel=1e-4)


@pytest.mark.slow
def test_a_head_learns_and_goes_on(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From prompts to a checkpoint that load_head takes."""
    for name, value in {"HELD_OUT": 6, "SHORT": 48, "ROUND": 16, "ANSWER": 40, "STEP_TOKENS": 256}.items():
        monkeypatch.setattr(f"head_on_gpu.{name}", value)
    monkeypatch.setattr("head_on_gpu.CACHE", 24 * 48 * 4 * 6 * 2 * 16)
    monkeypatch.setattr("head_on_gpu.time.monotonic", itertools.count(0, 0.05).__next__)
    model.save_pretrained(tmp_path / "model")
    start = head_for(model, tmp_path / "head")
    one = {"prompts": [[3, 4, 5]], "leads": [[5, 6]], "turns": TURNS}
    arrays: dict[str, Any] = {
        name: np.concatenate([np.array(each, np.int32) for each in lists]) for name, lists in one.items()
    }
    arrays |= {f"{name}_lengths": np.array([len(each) for each in lists]) for name, lists in one.items()}
    np.savez(tmp_path / "prompts.npz", **arrays)
    assert lists_in(tmp_path / "prompts.npz") == one
    write(tmp_path / "model", tmp_path / "prompts.npz", tmp_path / "rows", 0.5, "cpu", 1.0)
    with pytest.raises(ValueError, match="isn't empty"):
        write(tmp_path / "model", tmp_path / "prompts.npz", tmp_path / "rows", 0.5, "cpu", 1.0)
    args = argparse.Namespace(
        variants="a:3:0,b:2:0.3", minutes=0.05, fall=True, torch_device="cpu", draft_vocabulary=200
    )
    judged = list[list[float]]()
    for _ in range(2):
        train(tmp_path / "model", tmp_path / "rows", start, tmp_path / "heads", args)
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a {")]
        judged.append(json.loads(lines[-1][2:])["overlap"])
    assert judged[1][0] > judged[0][0]
    made = load_head_checkpoint(tmp_path / "heads" / "a")
    assert made.lm_head.weight.shape == (200, 64)
    args.variants, args.minutes, args.draft_vocabulary = "less:3:0", 0, 50
    with pytest.raises(ValueError, match="propose 200 ids, not 50"):
        train(tmp_path / "model", tmp_path / "rows", start, tmp_path / "heads", args)
    train(tmp_path / "model", tmp_path / "rows", tmp_path / "heads" / "a", tmp_path / "trimmed", args)
    less = load_head_checkpoint(tmp_path / "trimmed" / "less")
    kept = torch.isin(torch.arange(200) + made.d2t, torch.arange(50) + less.d2t)
    assert kept.sum() == 50
    assert torch.equal(less.lm_head.weight, made.lm_head.weight[kept])
    torch.testing.assert_close(less.fc.weight, made.fc.weight, rtol=0.02, atol=1e-4)


def test_prompts_are_chats_in_the_models_format(tmp_path: Path) -> None:
    checkpoint = ROOT / "models" / "demo-hf" / "target"
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    chat += [{"role": "user", "content": "Bye"}]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": chat}) + "\n", "utf-8")
    encode(checkpoint, tmp_path / "prompts.jsonl", tmp_path / "prompts.npz")
    found, tokenizer = lists_in(tmp_path / "prompts.npz"), AutoTokenizer.from_pretrained(checkpoint)
    whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert [tokenizer.decode(ids) for ids in found["prompts"]] == [whole]
    question, answer = (tokenizer.decode(ids) for ids in found["turns"])
    leads = [tokenizer.decode(ids) for ids in found["leads"]]
    assert whole.startswith(f"{leads[0]}Hello{question}Hi{answer}Bye")
    assert leads[0] == leads[2] != leads[1]


def test_only_a_head_in_int8_gives_back_its_checkpoint(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(OvspecError, match=r"ir: its weights aren't in int8; export it with --draft-weight-format int8"):
        write_checkpoint(made_head(tmp_path_factory) / "ir", tmp_path / "head")
    with pytest.raises(OvspecError, match="draft: not a head"):
        write_checkpoint(ROOT / "models" / "demo" / "draft", tmp_path / "head")
    assert not (tmp_path / "head").exists()


def test_an_ir_gives_back_its_checkpoint(tmp_path: Path) -> None:
    """The head in torch computes what the IR computes in f32."""
    shipped = ROOT / "models" / "smollm2-head"
    write_checkpoint(shipped, tmp_path / "head")
    head, model = load_head_checkpoint(tmp_path / "head"), read_model(shipped)
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "KV_CACHE_PRECISION": "f32"}
    request = ov.Core().compile_model(model, "CPU", exact).create_infer_request()
    tokens, states, taps = torch.randn(1, 5, 576), torch.randn(1, 5, 576), torch.randn(1, 5, 3 * 576)
    ones = torch.ones(1, 5, dtype=torch.int64)
    given = {"inputs_embeds": tokens, "hidden_states": states, "target_hidden_states": taps, "attention_mask": ones}
    given |= {"position_ids": ones.cumsum(1) - 1, "beam_idx": torch.zeros(1, dtype=torch.int32)}
    request.infer({name: value.numpy() for name, value in given.items()})
    logits, hidden, fused, *_ = head(tokens, states, ones, ones.cumsum(1) - 1, taps, *head.make_empty_cache())
    for name, expected in {"logits": logits, "hidden": hidden, "fused": fused}.items():
        found = torch.from_numpy(request.get_tensor(name).data.copy())
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert read_target_ids(model).tolist() == (torch.arange(len(head.d2t)) + head.d2t).tolist()  # type: ignore[union-attr]
