"""Go on with an EAGLE-3 head of a Llama on an accelerator.

    python scripts/train/head_on_gpu.py encode CHECKPOINT prompts.jsonl prompts.npz
    python scripts/train/head_on_gpu.py write CHECKPOINT prompts.npz ROWS --minutes 5
    python scripts/train/head_on_gpu.py train CHECKPOINT ROWS HEAD -o HEADS --minutes 20
    python scripts/train/head_on_gpu.py train CHECKPOINT ROWS HEADS/head -o LESS --minutes 0 --draft-vocabulary 10240

'ovspec distill' makes a head on any processor. This is its recipe for a machine with an accelerator, which needs torch
and transformers only. 'encode' makes ids of the prompts of smollm2_prompts.py, where ovspec is installed. 'write' lets
the model answer them, and what it asks itself. 'train' teaches HEAD, which 'ovspec distill' began; the same command
goes on from its state. Features are computed again for each batch, so ROWS holds only ids. In no minutes, as in the
last line, a head keeps only its most frequent ids.

All rows of a file have the same length, and chats go on until it is full: nothing is padded, and no mask is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

ANSWER, QUESTION = 320, 160  # tokens, at most
SHORT = 576  # tokens of a row of chats that the model begins itself
CACHE = 36e9  # bytes of keys and values
ROUND = 64  # lengths of rows are multiples of it
LEAST_LIKELY = 0.03  # of a question's tokens, as a share of the likeliest
HELD_OUT = 40  # every 40th row
MATRICES, VECTORS, FC, LM_HEAD = 1.5e-3, 1e-3, 1e-3, 4e-4  # the highest rates: by Muon, and by AdamW of all else
WARM_UP, LAST = 100, 0.35  # steps until the rate is the highest; share of the time in which it falls to nothing
FEATURE_WEIGHT, FADING = 0.5, 0.8  # of the distance from what the lm_head reads; of each later step
AVERAGED = 12  # the larger, the shorter the average of the weights
STEP_TOKENS = 8192


# ---------------------------------------------------------------- prompts


def encode(checkpoint: Path, prompts: Path, output: Path) -> None:
    """Write the prompts' ids, and those with which the model asks and answers; needs ovspec."""
    from ovspec_export.distill.texts import SAID, SYSTEMS
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, gguf_file=gguf_in(checkpoint))

    def ids_of(messages: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False).input_ids

    chats = [json.loads(line)["messages"] for line in prompts.read_text("utf-8").splitlines()]
    leads = list[list[int]]()
    for system in SYSTEMS:
        said = [{"role": "system", "content": system}] if system else []
        whole = tokenizer.apply_chat_template([*said, {"role": "user", "content": SAID}], tokenize=False)
        leads.append(tokenizer(whole.partition(SAID)[0], add_special_tokens=False).input_ids)
    said = [("user", SAID), ("assistant", SAID), ("user", SAID)]
    chat = [{"role": role, "content": content} for role, content in said]
    turns = tokenizer.apply_chat_template(chat, tokenize=False).split(SAID)[1:3]
    turns_ids = [tokenizer(turn, add_special_tokens=False).input_ids for turn in turns]
    arrays = {}
    for name, lists in {"prompts": [ids_of(chat) for chat in chats], "leads": leads, "turns": turns_ids}.items():
        arrays[name] = np.concatenate([np.array(each, np.int32) for each in lists])
        arrays[f"{name}_lengths"] = np.array([len(each) for each in lists], np.int32)
    np.savez_compressed(output, **arrays)


def lists_in(file: Path) -> dict[str, list[list[int]]]:
    with np.load(file) as arrays:
        return {
            name: [each.tolist() for each in np.split(arrays[name], arrays[f"{name}_lengths"].cumsum()[:-1])]
            for name in ("prompts", "leads", "turns")
        }


# ---------------------------------------------------------------- what the model writes


@torch.no_grad()
def write_rows(
    model: Any, starts: Sequence[list[int]], asks: Tensor, greedy: Tensor, length: int, turns: Any
) -> Tensor:
    """Return ids [rows, length]: chats that begin with ``starts`` and go on, question by answer, until they are full.

    asks [rows]: whether the model goes on with a question. greedy [rows]: how it answers.
    turns: the ids that end a question and begin its answer, and those that end an answer and begin a question; the
        first of each is the token that ends a turn.
    """
    device, config, layers, base = model.device, model.config, model.model.layers, model.model
    rows, width = len(starts), config.head_dim
    groups = config.num_attention_heads // config.num_key_value_heads
    end = turns[0][0]
    rest = max(len(turn) for turn in turns) - 1
    forced = torch.full((rows, length + rest), -1)
    for row, ids in enumerate(starts):
        forced[row, : len(ids)] = torch.tensor(ids)
    forced = forced.to(device)
    following = torch.full((2, rest), -1, device=device)
    for kind, turn in enumerate(turns):
        following[kind, : len(turn) - 1] = torch.tensor(turn[1:])
    most = torch.tensor([ANSWER, QUESTION], device=device)
    asks, greedy, count = asks.to(device), greedy.to(device), torch.zeros(rows, dtype=torch.long, device=device)
    shape = (rows, config.num_key_value_heads, length, width)
    caches = [[torch.empty(shape, dtype=model.dtype, device=device) for _ in "kv"] for _ in layers]
    weights = [torch.cat([getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv"]) for layer in layers]
    ups = [torch.cat((layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight)) for layer in layers]
    cosines, sines = base.rotary_emb(base.embed_tokens.weight, torch.arange(length, device=device)[None])
    ids, sizes = forced[:, 0], [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
    written = [ids]
    for place in range(length - 1):
        states = base.embed_tokens(ids)
        rotary = cosines[:, place : place + 1], sines[:, place : place + 1]
        for layer, (keys, values), qkv, up in zip(layers, caches, weights, ups, strict=True):
            heads = F.linear(layer.input_layernorm(states), qkv).view(rows, -1, 1, width)
            query, key, value = heads.split(sizes, 1)
            query, key = apply_rotary_pos_emb(query, key, *rotary)
            keys[:, :, place : place + 1], values[:, :, place : place + 1] = key, value
            # The queries of a group take the place of a sequence: all of them see all that was written.
            query = query.reshape(rows, -1, groups, width)
            seen = F.scaled_dot_product_attention(query, keys[:, :, : place + 1], values[:, :, : place + 1])
            states = states + layer.self_attn.o_proj(seen.reshape(rows, -1))
            gate, other = F.linear(layer.post_attention_layernorm(states), up).chunk(2, -1)
            states = states + layer.mlp.down_proj(F.silu(gate) * other)
        logits = model.lm_head(base.norm(states)).float()
        floor = logits.amax(-1, keepdim=True) + math.log(LEAST_LIKELY)
        logits = logits.masked_fill((logits < floor) & asks[:, None], -torch.inf)
        noise = -torch.empty_like(logits).exponential_().log()
        drawn = (logits + noise * (asks | ~greedy)[:, None]).argmax(-1)
        given = forced[:, place + 1]
        own = given < 0
        count = count + own
        ends = own & ((drawn == end) | (count >= most[asks.long()]))
        drawn = drawn.masked_fill(ends, end)
        # What a turn begins with is said for the model.
        soon = forced[:, place + 2 : place + 2 + rest]
        soon.copy_(torch.where(ends[:, None], following[(~asks).long(), : soon.shape[1]], soon))
        count, asks = count.masked_fill(ends, 0), asks ^ ends
        ids = torch.where(own, drawn, given)
        written.append(ids)
    return torch.stack(written, 1)


def varied(rows: Tensor) -> Tensor:
    """Return which rows are no loops: at least half of their runs of 8 tokens differ from each other."""
    powers = torch.tensor([31**power for power in range(8)], device=rows.device)
    runs = (rows.long().unfold(1, 8, 1) * powers).sum(-1).sort(-1).values
    return (runs[:, 1:] != runs[:, :-1]).float().mean(-1) > 0.5


def write(checkpoint: Path, prompts: Path, output: Path, seconds: float, device: str, share: float) -> None:
    """Write files of rows: chats after the prompts, then for the rest of the time chats that the model begins.

    share: of the prompts that are answered.
    """
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        raise ValueError(f"{output}: isn't empty; give another folder")
    model, draws, given = load_model(checkpoint, device), np.random.default_rng(0), lists_in(prompts)
    config, total, number, began = model.config, 0, 0, time.monotonic()
    torch.manual_seed(int(time.time()))
    bytes_of_token = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim

    def keep(starts: list[list[int]], asks: bool, length: int) -> None:
        nonlocal total, number
        greedy = torch.rand(len(starts)) < 0.5
        rows = write_rows(model, starts, torch.full((len(starts),), asks), greedy, length, given["turns"])
        fine = varied(rows)
        torch.save(rows[fine].to(torch.int32).cpu(), output / f"{number:04}-{length}.pt")
        total, number = total + int(fine.sum()) * length, number + 1
        spent = time.monotonic() - began
        print(
            f"{spent:.0f} s: {total:,} tokens, {len(starts)} rows of {length}, {fine.float().mean():.2f} varied",
            flush=True,
        )

    chosen = [ids for ids in given["prompts"] if len(ids) < 1200 and draws.random() < share]
    chosen.sort(key=len)
    place = 0
    while place < len(chosen) and time.monotonic() - began < seconds:
        count = int(CACHE / bytes_of_token / (len(chosen[min(place + 1500, len(chosen) - 1)]) + ANSWER))
        part = chosen[place : place + count]
        keep(part, False, math.ceil((len(part[-1]) + ANSWER - ROUND) / ROUND) * ROUND)
        place += count
    count = int(CACHE / bytes_of_token / SHORT)
    while time.monotonic() - began < seconds:
        keep([given["leads"][number] for number in draws.integers(len(given["leads"]), size=count)], True, SHORT)


def load_model(checkpoint: Path, device: str) -> Any:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    models: Any = AutoModelForCausalLM
    usual = {"dtype": dtype, "attn_implementation": "sdpa", "local_files_only": True}
    model = models.from_pretrained(checkpoint, gguf_file=gguf_in(checkpoint), **usual)
    return model.to(device).eval().requires_grad_(False)


def gguf_in(checkpoint: Path) -> str | None:
    return next((file.name for file in checkpoint.glob("*.gguf")), None)


# ---------------------------------------------------------------- a head


def taps(config: Any) -> tuple[int, ...]:
    """Return the target's layers whose inputs a head reads: EAGLE-3's usual ones."""
    return 2, config.num_hidden_layers // 2, config.num_hidden_layers - 3


class Layer(nn.Module):
    """A decoder layer that guesses for all entries of a row at once, several steps deep."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, self.heads, self.kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.width, eps, width = config.head_dim, config.rms_norm_eps, 2 * hidden
        attention = {
            "q_proj": nn.Linear(width, self.heads * self.width, bias=False),
            "k_proj": nn.Linear(width, self.kv_heads * self.width, bias=False),
            "v_proj": nn.Linear(width, self.kv_heads * self.width, bias=False),
            "o_proj": nn.Linear(self.heads * self.width, hidden, bias=False),
        }
        mlp = {
            "gate_proj": nn.Linear(hidden, config.intermediate_size, bias=False),
            "up_proj": nn.Linear(hidden, config.intermediate_size, bias=False),
            "down_proj": nn.Linear(config.intermediate_size, hidden, bias=False),
        }
        self.self_attn, self.mlp = nn.ModuleDict(attention), nn.ModuleDict(mlp)
        self.input_layernorm, self.hidden_norm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)

    def forward(self, embedded: Tensor, states: Tensor, rotary: Any, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the output [rows, entries, hidden] of the next step, and add its keys and values to ``past``."""
        read = torch.cat((self.input_layernorm(embedded), self.hidden_norm(states)), -1)
        rows, entries = read.shape[:2]
        heads = [
            self.self_attn[f"{name}_proj"](read).view(rows, entries, -1, self.width).transpose(1, 2) for name in "qkv"
        ]
        query, key = apply_rotary_pos_emb(heads[0], heads[1], *rotary)
        past.append((key, heads[2]))
        states = states + self.self_attn["o_proj"](self.seen(query, past).transpose(1, 2).reshape(rows, entries, -1))
        read = self.post_attention_layernorm(states)
        return states + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](read)) * self.mlp["up_proj"](read))

    def seen(self, query: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return what entries see: the text up to their own place, and of later steps what came of themselves."""
        (keys, values), *guessed = [
            [each.repeat_interleave(self.heads // self.kv_heads, 1) for each in pair] for pair in past
        ]
        if not guessed:
            return F.scaled_dot_product_attention(query, keys, values, is_causal=True)
        entries = query.shape[2]
        later = torch.ones(entries, keys.shape[2], dtype=torch.bool, device=query.device).triu(1)
        scores = (query @ keys.mT).masked_fill(later, -torch.inf)
        own = [(query * key[:, :, :entries]).sum(-1, keepdim=True) for key, _ in guessed]
        shares = (torch.cat((scores, *own), -1).float() * self.width**-0.5).softmax(-1).to(query.dtype)
        found = shares[..., : keys.shape[2]] @ values
        for step, (_, value) in enumerate(guessed):
            found = found + shares[..., keys.shape[2] + step, None] * value[:, :, :entries]
        return found


class Head(nn.Module):
    """A head with the names of AngelSlim's format, in units of the features' usual sizes."""

    def __init__(self, config: Any, ids: Tensor) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(len(taps(config)) * hidden, hidden, bias=False)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(ids), bias=False)
        self.ids: Tensor
        self.register_buffer("ids", ids, persistent=False)

    def steps(self, embedded: Tensor, features: Tensor, rotary: Any, steps: int) -> Iterator[Tensor]:
        """Yield each step's output, which has an entry fewer than the one before. embedded: of the entries' tokens."""
        states, entries = self.fc(features), embedded.shape[1]
        past: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            places = slice(step, entries)
            turned = tuple(each[:, places] for each in rotary)
            states = self.midlayer(embedded[:, places], states[:, : entries - step], turned, past)
            yield states

    def begin(self, folder: Path, rows: Tensor, usual: Tensor) -> None:
        """Take the weights of a head; ids that it couldn't propose begin as the target's ``rows``."""
        tensors = {name: tensor.to(rows.device) for name, tensor in load_file(folder / "model.safetensors").items()}
        old = torch.arange(len(tensors["d2t"]), device=rows.device) + tensors["d2t"]
        whole = rows.float().clone()
        whole[old] = tensors.pop("lm_head.weight").float()
        weights = {name: tensor.float() for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
        weights |= {"lm_head.weight": whole[self.ids], "fc.weight": weights["fc.weight"] * usual}
        self.load_state_dict(weights)


@torch.no_grad()
def read(model: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the features [rows, n, taps * hidden], what the lm_head reads [rows, n, hidden], and its probabilities."""
    states = model.model(input_ids=rows, use_cache=False, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in taps(model.config)], -1)
    return features, states[-1], model.lm_head(states[-1]).float().softmax(-1)


def losses(head: Head, batch: Any, steps: int, accepted_weight: float) -> Tensor:
    """Return the cross-entropy with what the target expects, and a distance, over all steps.

    accepted_weight: of what rejection sampling would reject, in place of as much of the cross-entropy.
    """
    embedded, features, final, expected, rotary = batch
    loss = features.new_zeros((), dtype=torch.float32)
    size = final[:, 1:].float().square().mean()
    for step, states in enumerate(head.steps(embedded, features, rotary, steps)):
        with torch.autocast(states.device.type, torch.bfloat16, enabled=states.device.type == "cuda"):
            normed = head.norm(states)
            logits = head.lm_head(normed).float()
        wanted = expected[:, 1 + step :]
        cross = wanted.sum(-1, dtype=torch.float32) * logits.logsumexp(-1) - (wanted * logits).sum(-1)
        part = cross.mean()
        if accepted_weight:
            rejected = 1 - torch.minimum(wanted.float(), logits.softmax(-1)).sum(-1)
            part = (1 - accepted_weight) * part + 2 * accepted_weight * rejected.mean()
        distance = F.mse_loss(normed.float(), final[:, 1 + step :].float()) / size
        loss = loss + FADING**step * (part + FEATURE_WEIGHT * distance)
    return loss


@torch.no_grad()
def judged(head: Head, model: Any, files: list[Tensor], usual: Tensor, steps: int) -> dict[str, Any]:
    """Return by depth how often the guess is the target's, alone, in a row and among two, and what T=1 accepts."""
    sums, count = torch.zeros(4, steps, device=usual.device), 0
    for rows in files:
        for part in rows.split(8):
            part = part.to(usual.device).long()
            embedded, features, _, _, rotary = prepared(model, part, head.ids, usual)
            _, _, probabilities = read(model, part)
            best, right = probabilities.argmax(-1), None
            for step, states in enumerate(head.steps(embedded, features, rotary, steps)):
                logits = head.lm_head(head.norm(states)).float()
                logits, kept = logits[:, : logits.shape[1] - (steps - 1 - step)], part.shape[1] - steps
                first, second = head.ids[logits.topk(2).indices].unbind(-1)
                wanted = best[:, 1 + step : 1 + step + kept]
                hit = first == wanted
                right = hit if right is None else right & hit
                target = probabilities[:, 1 + step : 1 + step + kept][..., head.ids]
                overlap = torch.minimum(target, logits.softmax(-1)).sum(-1)
                found = (hit, right, hit | (second == wanted), overlap)
                sums[:, step] += torch.stack([each.float().sum() for each in found])
            count += part.shape[0] * (part.shape[1] - steps)
    names = ("agreement", "in_a_row", "among_two", "overlap")
    return dict(zip(names, (sums / max(count, 1)).round(decimals=4).tolist(), strict=True))


def prepared(model: Any, rows: Tensor, ids: Tensor, usual: Tensor) -> Any:
    """Return what a head learns from rows. An entry has a token, the features one place before it, and its place."""
    features, final, probabilities = read(model, rows)
    embedded = model.model.embed_tokens(rows[:, 1:])
    places = torch.arange(rows.shape[1] - 1, device=rows.device)[None]
    rotary = model.model.rotary_emb(embedded, places)
    return embedded, features[:, :-1] / usual, final, probabilities[..., ids].to(embedded.dtype), rotary


# ---------------------------------------------------------------- training


class Muon:
    """Makes all singular values of a matrix's step about equal (Jordan et al., 2024); scaled as arXiv 2502.16982."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.weights, self.averages = weights, [torch.zeros_like(weight) for weight in weights]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for weight, average in zip(self.weights, self.averages, strict=True):
            assert weight.grad is not None
            average.lerp_(weight.grad, 0.05)
            step = orthogonal(weight.grad.lerp(average, 0.95))
            weight.mul_(1 - 0.01 * rate).add_(step, alpha=-0.2 * rate * max(weight.shape) ** 0.5)
            weight.grad = None


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix with about equal singular values, near 1."""
    if len(matrix) > matrix.shape[1]:
        return orthogonal(matrix.T).T
    each = (matrix / (matrix.norm() + 1e-12)).bfloat16()
    for _ in range(5):
        products = each @ each.T
        each = 3.4445 * each + (-4.7750 * products + 2.0315 * products @ products) @ each
    return each.float()


class Student:
    """A head that learns, with its optimizers and the running average of its weights."""

    def __init__(self, name: str, head: Head, steps: int, accepted_weight: float) -> None:
        self.name, self.head, self.steps, self.accepted_weight = name, head, steps, accepted_weight
        named = dict(head.named_parameters())
        inner = [
            name for name, weight in named.items() if weight.ndim > 1 and name not in ("fc.weight", "lm_head.weight")
        ]
        self.muon = Muon([named[name] for name in inner])
        groups = [
            {"params": [named["fc.weight"]], "most": FC},
            {"params": [named["lm_head.weight"]], "most": LM_HEAD},
            {"params": [weight for weight in named.values() if weight.ndim == 1], "most": VECTORS},
        ]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=named["fc.weight"].is_cuda)
        self.averaged = {name: weight.detach().clone() for name, weight in named.items()}
        self.count = 0

    def learn(self, batch: Any, rate: float) -> Tensor:
        with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=batch[0].device.type == "cuda"):
            loss = losses(self.head, batch, self.steps, self.accepted_weight)
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.muon.step(MATRICES * rate)
        for group in self.adam.param_groups:
            group["lr"] = group["most"] * rate
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.count += 1
        share = (AVERAGED + 1) / (self.count + AVERAGED)
        for name, weight in self.head.named_parameters():
            self.averaged[name].lerp_(weight.detach(), share)
        return loss.detach()

    def judge(self, *arguments: Any) -> dict[str, Any]:
        own = {name: weight.detach().clone() for name, weight in self.head.named_parameters()}
        self.head.load_state_dict(self.averaged)
        try:
            return judged(self.head, *arguments)
        finally:
            self.head.load_state_dict(own)

    def write(self, folder: Path, start: Path, vocabulary: int, usual: Tensor) -> None:
        """Write the averaged weights as a checkpoint in AngelSlim's format."""
        folder.mkdir(parents=True, exist_ok=True)
        ids = self.head.ids
        weights = dict(self.averaged)
        weights["fc.weight"] = weights["fc.weight"] / usual
        tensors = {name: weight.bfloat16().contiguous().cpu() for name, weight in weights.items()}
        tensors["d2t"] = (ids - torch.arange(len(ids), device=ids.device)).cpu()
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids.cpu(), True)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((start / "config.json").read_text("utf-8")) | {"draft_vocab_size": len(ids)}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def batches(files: list[Tensor], device: str) -> Iterator[Tensor]:
    """Yield rows of a file, about ``STEP_TOKENS`` tokens, in random order, without end."""
    while True:
        parts = [
            (number, part)
            for number, rows in enumerate(files)
            for part in torch.randperm(len(rows)).split(max(1, STEP_TOKENS // rows.shape[1]))
        ]
        for place in torch.randperm(len(parts)).tolist():
            number, part = parts[place]
            yield files[number][part].to(device, non_blocking=True).long()


def train(checkpoint: Path, folder: Path, start: Path, output: Path, args: argparse.Namespace) -> None:
    """Teach heads that all begin with ``start`` on the same batches, and judge them on rows that were held out."""
    began, device = time.monotonic(), args.torch_device
    torch.backends.cuda.matmul.allow_tf32 = True
    model = load_model(checkpoint, device)
    written = [torch.load(file) for file in sorted(folder.glob("*.pt"))]
    lengths = sorted({rows.shape[1] for rows in written})
    files = [torch.cat([rows for rows in written if rows.shape[1] == length]) for length in lengths]
    held_out = [rows[::HELD_OUT][: max(1, 20000 // rows.shape[1])] for rows in files]
    files = [rows[torch.arange(len(rows)) % HELD_OUT > 0] for rows in files if len(rows) > 1]
    ids_of_all = torch.cat([rows.flatten().long() for rows in files])
    counts = torch.bincount(ids_of_all, minlength=model.config.vocab_size)
    state = output / "state.pt"
    saved = torch.load(state, device) if state.is_file() else {}
    if saved:
        ids, usual = saved["ids"], saved["usual"]
    else:
        ids = counts.topk(args.draft_vocabulary).indices.sort().values.to(device)
        features, _, _ = read(model, files[0][:16].to(device).long())
        usual = features[:, 1:].float().square().mean((0, 1)).sqrt().clamp(min=1e-6)
    if len(ids) != args.draft_vocabulary:
        raise ValueError(f"{state}: its heads propose {len(ids)} ids, not {args.draft_vocabulary}; give another folder")
    total = sum(rows.numel() for rows in files)
    print(
        f"{total:,} tokens in {sum(map(len, files)):,} rows; {counts[ids.cpu()].sum() / total:.4f} can be proposed",
        flush=True,
    )
    students = list[Student]()
    for variant in args.variants.split(","):
        name, steps, accepted_weight = variant.split(":")
        with torch.device(device):
            head = Head(model.config, ids)
        head.begin(start, model.lm_head.weight, usual)
        students.append(student := Student(name, head, int(steps), float(accepted_weight)))
        if name in saved:
            own = saved[name]
            student.head.load_state_dict(own["weights"])
            student.averaged, student.muon.averages, student.count = own["averaged"], own["muon"], own["count"]
            student.adam.load_state_dict(own["adam"])
    torch.manual_seed(max(student.count for student in students))  # each run has an order of its own
    seconds, seen, step, reported = args.minutes * 60, 0, 0, time.monotonic()
    loop = time.monotonic()
    for rows in batches(files, device):
        spent = time.monotonic() - loop
        if spent > seconds:
            break
        left = (1 - spent / seconds) / LAST if args.fall else 1.0
        batch = prepared(model, rows, ids, usual)
        found = [student.learn(batch, min(1.0, (step + 1) / WARM_UP, left)) for student in students]
        seen, step = seen + rows.numel(), step + 1
        if time.monotonic() - reported > 20:
            reported = time.monotonic()
            texts = [f"{student.name} {loss.item():.3f}" for student, loss in zip(students, found, strict=True)]
            print(f"{spent:.0f} s: {step} steps, {seen / spent:,.0f} tokens/s; {', '.join(texts)}", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    for student in students:
        print(student.name, json.dumps(student.judge(model, held_out, usual, 6)), flush=True)
        student.write(output / student.name, start, model.config.vocab_size, usual)
    torch.save(
        {"ids": ids, "usual": usual}
        | {
            each.name: {
                "weights": each.head.state_dict(),
                "averaged": each.averaged,
                "muon": each.muon.averages,
                "adam": each.adam.state_dict(),
                "count": each.count,
            }
            for each in students
        },
        state,
    )
    print(f"{seen:,} tokens in {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    encoding, writing, training = (commands.add_parser(name) for name in ("encode", "write", "train"))
    for command, arguments in {
        encoding: ("checkpoint", "prompts", "output"),
        writing: ("checkpoint", "prompts", "output"),
        training: ("checkpoint", "rows", "head"),
    }.items():
        for name in arguments:
            command.add_argument(name, type=Path, metavar=name.upper())
    for command in (writing, training):
        command.add_argument("--minutes", type=float, default=5)
        command.add_argument("--torch-device", default="cuda")
    writing.add_argument("--share", type=float, default=1.0, help="of the prompts that are answered")
    training.add_argument("-o", "--output", type=Path, required=True, metavar="HEADS")
    training.add_argument("--variants", default="head:5:0.3", help="name:steps:weight of what is accepted, ...")
    training.add_argument("--fall", action="store_true", help="let the rate fall to nothing at the end")
    training.add_argument("--draft-vocabulary", type=int, default=16384, help="tokens that the head can propose")
    args = parser.parse_args()
    if args.command == "encode":
        encode(args.checkpoint, args.prompts, args.output)
    elif args.command == "write":
        write(args.checkpoint, args.prompts, args.output, 60 * args.minutes, args.torch_device, args.share)
    else:
        train(args.checkpoint, args.rows, args.head, args.output, args)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")
