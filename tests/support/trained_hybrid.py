"""A tiny hybrid that learns Python's standard library together with its MTP layer, as published models do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from conftest import CHECKPOINTS
from demo_pair import batches_of, corpus_of, optimizers, rate, training_files
from ovspec_export.distill.training import autocast_bf16
from ovspec_export.mtp import make_new_mtp_layer, save_mtp_layer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3_5TextConfig

STEPS, ROWS, WINDOW = 240, 8, 256
MTP_SHARE = 0.3  # of its loss
SIZES = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
SIZES |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "max_position_embeddings": 2048}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LAYERS = ["linear_attention"] * 3 + ["full_attention"]


def train_hybrid(folder: Path) -> None:
    """Write the checkpoint of a trained hybrid with its MTP layer into ``folder``, after some three minutes."""
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(CHECKPOINTS / "target")
    entries: dict[str, Any] = {**SIZES, **TOKENS, "layer_types": LAYERS, "tie_word_embeddings": True}
    config = Qwen3_5TextConfig(**entries)
    model = AutoModelForCausalLM.from_config(config).float()
    layer = make_new_mtp_layer(config.to_dict())
    steps = optimizers(torch.nn.ModuleDict({"model": model, "mtp": layer}))
    groups = [group for optimizer in steps for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]
    mask = torch.full((WINDOW - 1, WINDOW - 1), -1e9).triu(1)[None, None]
    positions = torch.arange(WINDOW - 1).expand(ROWS, -1)
    batches = batches_of(corpus_of(training_files(), tokenizer), 0, ROWS, WINDOW)
    for step, batch in zip(range(STEPS), batches, strict=False):
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * rate((step + 1) / (STEPS + 1))
        with autocast_bf16("cpu"):
            states = model.model(input_ids=batch["ids"], use_cache=False).last_hidden_state
            logits = model.lm_head(states).float()
            embedded = model.model.embed_tokens(batch["ids"][:, 1:])
            past = layer.make_empty_cache(ROWS)
            guessed = model.lm_head(layer.norm(layer.run_layer(embedded, states[:, :-1], mask, positions, past)[0]))
        text_loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        aims = F.log_softmax(logits[:, 1:].detach(), -1).flatten(0, 1)
        guesses = F.log_softmax(guessed.float(), -1).flatten(0, 1)
        mtp_loss = F.kl_div(guesses, aims, log_target=True, reduction="batchmean")
        (text_loss + MTP_SHARE * mtp_loss).backward()
        torch.nn.utils.clip_grad_norm_([weight for group in groups for weight in group["params"]], 1.0)
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_mtp_layer(layer, json.loads((folder / "config.json").read_text("utf-8")), folder / "mtp")
    tensors = load_file(folder / "model.safetensors") | load_file(folder / "mtp" / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
