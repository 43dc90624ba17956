"""Train an EAGLE-3 head for SmolLM2-135M-Instruct on what ``smollm2_data.py`` wrote.

Writes a checkpoint in AngelSlim's format. Entry i of the head has the token after position i and the target's features
at i, and guesses the token after that. A later step has the true next token and the head's own output of the step
before, so the head learns to go on from its own guesses (training-time test). The state is saved every two minutes, and
the same command goes on from there, also with more data.

    MALLOC_MMAP_MAX_=0 OMP_WAIT_POLICY=passive \
        python scripts/train/smollm2_head.py "$(python scripts/fetch.py model)" --minutes 36

On 2 cores of a Xeon with AVX-512 VNNI, which others used too: 30 minutes for 906 chats of 262,000 tokens, 15 for their
features, 36 of training (2,833 steps, 2.3 million tokens, 600 to 2,400 a second), partly at the same time, so 70 in
all. The first 22 minutes of training and the draft vocabulary had two thirds of the chats. On held-out answers, the
head's guess is the target's first choice at depth 1, 2 and 3 in 0.468, 0.430 and 0.388 of the positions of greedy texts
(0.82 guesses in a row) and 0.394, 0.343 and 0.322 at T=1. Before any training, the linear guess that it starts from has
0.25 to 0.28 at depth 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from smollm2_data import ROOT, WORK
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

DRAFT_VOCAB = 8192
SPECIAL = 17  # ids below are tokens of the chat template and the like
STEPS = 3  # of the unroll
SHARE = 0.25  # of the positions, for which the unroll goes beyond its first step
STEP_TOKENS = 640
RATE = 7e-4  # the highest
FEATURE_WEIGHT = 0.5  # of the distance from what the target's lm_head reads, in the loss
SAMPLE = 1024  # of the unlikely tokens, for which a step computes logits
HELD_OUT = 20  # every 20th document


@dataclass
class Document:
    """A chat and what the target makes of it: features (n, 3 * hidden), final (n, hidden) and its likeliest tokens."""

    ids: Tensor
    features: Tensor
    final: Tensor
    choices: Tensor
    logprobs: Tensor
    greedy: bool
    prompt: int


@dataclass
class Batch:
    """Documents one after another. An entry is a position with two tokens after it.

    start: index of each document's first entry, and the number of entries. deep: indices of the entries whose unroll
    goes on.
    """

    documents: list[Document]
    start: list[int]
    deep: Tensor


def read_documents(folder: Path) -> list[Document]:
    documents = []
    for file in sorted(folder.glob("?????.npz")):
        with np.load(file) as saved:
            arrays = {name: torch.from_numpy(saved[name]) for name in ("features", "final", "logprobs")}
            arrays |= {name: torch.from_numpy(saved[name].astype(np.int32)) for name in ("ids", "choices")}
            lengths, prompts = saved["lengths"].tolist(), saved["prompts"].tolist()
        parts = {name: array.split(lengths) for name, array in arrays.items()}
        for i, prompt in enumerate(prompts):
            own = {name: part[i] for name, part in parts.items()}
            documents.append(Document(**own, greedy=int(file.stem) % 2 == 0, prompt=prompt))
    return documents


def draft_vocabulary(documents: list[Document], vocab: int) -> Tensor:
    """Return the ids (DRAFT_VOCAB,) that the target expects most often, with all special ones that occur, sorted."""
    counts = torch.zeros(vocab)
    for document in documents:
        counts.index_add_(0, document.choices.flatten(), document.logprobs.float().exp().flatten())
        counts.index_add_(0, document.ids, torch.ones(len(document.ids)))
    counts[:SPECIAL] *= 1e9
    return counts.topk(DRAFT_VOCAB).indices.sort().values


def linear_guess(
    documents: list[Document], embedding: Tensor, norm: nn.RMSNorm, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit what the lm_head reads, before the weights of ``norm``, to the features and the normalised next embedding.

    Returns the weights of the features, those of the embedding, and the ``rank`` directions in which these matter most.
    """
    hidden = len(embedding[0])
    squares, products = torch.zeros(4 * hidden, 4 * hidden), torch.zeros(4 * hidden, hidden)
    for document in documents[:300]:
        token = F.rms_norm(embedding[document.ids[2:-1]], [hidden])
        x = torch.cat((document.features[1:-2].float(), token), -1)
        squares += x.T @ x
        products += x.T @ (document.final[2:-1].float() / norm.weight)
    squares = squares.double()
    squares += torch.diag(1e-3 * squares.diagonal())
    weights = torch.linalg.solve(squares, products.double()).T
    of_token = weights[:, 3 * hidden :]
    effect = of_token @ squares[3 * hidden :, 3 * hidden :] @ of_token.T
    directions = torch.linalg.eigh(effect).eigenvectors[:, -rank:]
    return weights[:, : 3 * hidden].float(), of_token.float(), directions.float()


class Head(nn.Module):
    """An EAGLE-3 head with the names of AngelSlim's checkpoints."""

    # Some features are a thousand times as large as others, so fc learns in units of each one's usual size.
    usual: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, mlp = config.hidden_size, config.intermediate_size
        self.heads, self.kv_heads, self.width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        base = config.rope_parameters["rope_theta"]
        self.frequencies = base ** -(torch.arange(0, self.width, 2) / self.width)

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(hidden, config.rms_norm_eps)

        attention = {
            "q_proj": linear(2 * hidden, self.heads * self.width),
            "k_proj": linear(2 * hidden, self.kv_heads * self.width),
            "v_proj": linear(2 * hidden, self.kv_heads * self.width),
            "o_proj": linear(self.heads * self.width, hidden),
        }
        gated = {"gate_proj": linear(hidden, mlp), "up_proj": linear(hidden, mlp), "down_proj": linear(mlp, hidden)}
        norms = {name: norm() for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        self.register_buffer("usual", torch.ones(3 * hidden))
        self.fc = linear(3 * hidden, hidden)
        layer = {"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(gated), **norms}
        self.midlayer: Any = nn.ModuleDict(layer)
        self.norm = norm()
        self.lm_head = linear(hidden, DRAFT_VOCAB)

    def start_from(self, target: Any, vocabulary: Tensor, documents: list[Document], embedding: Tensor) -> None:
        """Take what has a counterpart from the target's end, and the best linear guess of what its lm_head will read.

        The features go into that guess through fc, and the next token's embedding through one attention head of each
        group, which begins by looking at its own position.
        """
        attention, mlp, width, hidden = self.midlayer["self_attn"], self.midlayer["mlp"], self.width, len(embedding[0])
        group = self.heads // self.kv_heads
        with torch.no_grad():
            self.norm.weight.copy_(target.model.norm.weight)
            of_features, of_token, directions = linear_guess(documents, embedding, self.norm, self.kv_heads * width)
            some = torch.cat([document.features[1:] for document in documents[:50]]).float()
            self.usual.copy_(some.square().mean(0).sqrt())
            self.fc.weight.copy_(of_features * self.usual)
            q, k, v, o = (attention[name].weight for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
            for weight in (q, k, v, o):
                weight.normal_(std=0.01)
            own = torch.randn(self.kv_heads, width, hidden) / math.sqrt(hidden)
            k[:, :hidden] = own.flatten(0, 1)
            q.view(self.kv_heads, group, width, -1)[:, 0, :, :hidden] = own
            v[:, :hidden] = directions.T @ of_token
            o.view(hidden, self.kv_heads, group, width)[:, :, 0] = directions.view(hidden, self.kv_heads, width)
            last = target.model.layers[-1]
            for name in ("gate_proj", "up_proj"):
                mlp[name].weight.copy_(getattr(last.mlp, name).weight)
            mlp["down_proj"].weight.zero_()
            self.midlayer["post_attention_layernorm"].weight.copy_(last.post_attention_layernorm.weight)
            self.lm_head.weight.copy_(embedding[vocabulary])
            self.norm.weight.mul_(0.6)  # a guess is less sure than what it guesses

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def project(self, embedded: Tensor, feature: Tensor, positions: Tensor) -> list[Tensor]:
        """Return queries, keys and values, (heads, n, width) each."""
        layer = self.midlayer
        x = torch.cat((layer["input_layernorm"](embedded), layer["hidden_norm"](feature)), -1)
        q, k, v = (
            layer["self_attn"][name](x).view(len(x), -1, self.width).transpose(0, 1)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        more = self.heads // self.kv_heads
        k, v = self.rotate(k, positions).repeat_interleave(more, 0), v.repeat_interleave(more, 0)
        return [self.rotate(q, positions), k, v]

    def finish(self, feature: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output from what its attention found, (heads, n, width)."""
        mlp = self.midlayer["mlp"]
        x = feature + self.midlayer["self_attn"]["o_proj"](attended.transpose(0, 1).flatten(1))
        y = self.midlayer["post_attention_layernorm"](x)
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))

    def forward(self, batch: Batch, embedding: Tensor) -> list[Tensor]:
        """Return the output of each step of the unroll: for all entries, then for the deep ones."""
        ids = torch.cat([document.ids[1:-1] for document in batch.documents])
        positions = torch.cat([torch.arange(len(document.ids) - 2) for document in batch.documents])
        features = torch.cat([document.features[:-2] for document in batch.documents])
        feature = self.fc(features.float() / self.usual)
        query, keys, values = self.project(embedding[ids], feature, positions)
        spans = list(zip(batch.start, batch.start[1:], strict=False))
        attended = [
            F.scaled_dot_product_attention(query[:, a:b], keys[:, a:b], values[:, a:b], is_causal=True)
            for a, b in spans
        ]
        outputs = [self.finish(feature, torch.cat(attended, 1))]
        document_of = torch.repeat_interleave(torch.tensor([b - a for a, b in spans]))
        deep = batch.deep
        seen = (document_of[deep, None] == document_of) & (torch.arange(len(ids)) <= deep[:, None])
        hide = torch.zeros(seen.shape).masked_fill(~seen, -math.inf)
        own_keys, own_values, feature = list[Tensor](), list[Tensor](), outputs[0][deep]
        for step in range(1, STEPS):
            query, key, value = self.project(embedding[ids[deep + step]], feature, positions[deep] + step)
            own_keys.append(key)
            own_values.append(value)
            scores = [query @ keys.transpose(1, 2), *((query * own).sum(-1, keepdim=True) for own in own_keys)]
            scores[0] = scores[0] + hide * math.sqrt(self.width)
            shares = (torch.cat(scores, -1) / math.sqrt(self.width)).softmax(-1)
            attended = shares[..., : len(ids)] @ values
            for i, own in enumerate(own_values):
                attended = attended + shares[..., len(ids) + i, None] * own
            feature = self.finish(feature, attended)
            outputs.append(feature)
        return outputs


def batch_of(documents: list[Document], share: float) -> Batch:
    lengths = [len(document.ids) - 2 for document in documents]
    start = [0, *np.cumsum(lengths).tolist()]
    # The last entries of a document have no tokens left for later steps.
    able = torch.cat([torch.arange(a, b - STEPS + 1) for a, b in itertools.pairwise(start)])
    chosen = torch.randperm(len(able))[: max(1, int(share * len(able)))].sort().values
    return Batch(documents, start, able[chosen])


def batches(documents: list[Document]) -> Iterator[Batch]:
    """Yield batches of about ``STEP_TOKENS`` entries without end."""
    while True:
        taken, tokens = list[Document](), 0
        for i in torch.randperm(len(documents)).tolist():
            taken.append(documents[i])
            tokens += len(documents[i].ids)
            if tokens >= STEP_TOKENS:
                yield batch_of(taken, SHARE)
                taken, tokens = [], 0


def wanted(batch: Batch, name: str, step: int) -> Tensor:
    """Return the target's ``name`` for what a step of the unroll guesses."""
    values = torch.cat([getattr(document, name)[1:-1] for document in batch.documents])
    return values if step == 0 else values[batch.deep + step]


def loss_of(head: Head, batch: Batch, embedding: Tensor, draft_ids: Tensor) -> Tensor:
    """Return the cross-entropy with the target's distribution, as far as it is in the draft vocabulary, and a distance.

    The distance is that from what the target's lm_head reads. Later steps of the unroll count less.
    """
    hidden = [head.norm(output) for output in head(batch, embedding)]
    choices = torch.cat([draft_ids[wanted(batch, "choices", step)] for step in range(STEPS)])
    probabilities = torch.cat([wanted(batch, "logprobs", step) for step in range(STEPS)]).float().exp()
    probabilities *= (choices >= 0) & (probabilities > 1e-3)
    # Logits are computed for all that is likely anywhere in the batch, and a sample of the rest that stands for it.
    likely = choices[probabilities > 0].unique()
    rest = torch.ones(DRAFT_VOCAB, dtype=torch.bool).index_fill_(0, likely, False).nonzero()[:, 0]
    columns = torch.cat((likely, rest[torch.randperm(len(rest))[:SAMPLE]]))
    column_of = torch.zeros(DRAFT_VOCAB, dtype=torch.long).index_put_((columns,), torch.arange(len(columns)))
    weight = torch.ones(len(columns))
    weight[len(likely) :] = len(rest) / SAMPLE
    logits = torch.cat(hidden) @ head.lm_head.weight[columns].T
    expected = (probabilities * logits.gather(1, column_of[choices.clamp(min=0)])).sum(-1)
    cross = probabilities.sum(-1) * (logits + weight.log()).logsumexp(-1) - expected
    loss = torch.zeros(())
    for step, (own, part) in enumerate(zip(hidden, cross.split([len(each) for each in hidden]), strict=True)):
        final = wanted(batch, "final", step).float()
        distance = F.mse_loss(own, final) / final.square().mean()
        loss = loss + 0.8**step * (part.mean() + FEATURE_WEIGHT * distance)
    return loss


def parameter_groups(head: Head) -> list[dict[str, Any]]:
    """Return AdamW's groups. The lm_head begins near its goal and has inputs above 1, so it learns slower."""
    matrices = [weight for name, weight in head.named_parameters() if weight.ndim == 2 and name != "lm_head.weight"]
    norms = [weight for weight in head.parameters() if weight.ndim == 1]
    return [
        {"params": matrices, "most": RATE, "weight_decay": 0.01},
        {"params": norms, "most": RATE, "weight_decay": 0.0},
        {"params": [head.lm_head.weight], "most": RATE / 5, "weight_decay": 0.0},
    ]


@torch.no_grad()
def agreement(head: Head, documents: list[Document], embedding: Tensor, vocabulary: Tensor) -> str:
    """Say how often the head's guess is the target's first choice, at each depth, within answers.

    The length is the mean number of guesses that are right before the first wrong one, on greedy answers.
    """
    right = {greedy: list[Tensor]() for greedy in (True, False)}
    for document in documents:
        batch = batch_of([document], 1.0)
        agree = []
        for step, output in enumerate(head(batch, embedding)):
            guess = vocabulary[head.lm_head(head.norm(output)).argmax(-1)]
            agree.append((guess == wanted(batch, "choices", step)[:, 0])[: len(batch.deep)])
        right[document.greedy].append(torch.stack(agree, 1)[document.prompt - 2 :].float())
    greedy, sampled = torch.cat(right[True]), torch.cat(right[False])
    rates = [", ".join(f"{rate:.3f}" for rate in answers.mean(0).tolist()) for answers in (greedy, sampled)]
    return f"agreement {rates[0]} on greedy answers, {rates[1]} at T=1; length {greedy.cumprod(1).sum(1).mean():.2f}"


def write_checkpoint(head: Head, config: Any, vocabulary: Tensor, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    kept += ("rms_norm_eps", "hidden_act", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "rope_theta": config.rope_parameters["rope_theta"],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    entries = {name: getattr(config, name) for name in kept} | own
    (folder / "config.json").write_text(json.dumps(entries, indent=2) + "\n")
    weights = head.state_dict()
    weights["fc.weight"] = weights["fc.weight"] / weights.pop("usual")
    tensors = {name: weight.bfloat16().contiguous() for name, weight in weights.items()}
    tensors["d2t"] = vocabulary - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, vocabulary, True)
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, {"format": "pt"})
    partial.rename(folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="the folder with the model's GGUF file, for the embedding")
    parser.add_argument("--minutes", type=float, default=36, help="of training, over all runs (default 36)")
    parser.add_argument("--model", type=Path, default=ROOT / "smollm2", help="the exported model")
    parser.add_argument("--data", type=Path, default=WORK / "features")
    parser.add_argument("-o", "--output", type=Path, default=WORK / "head")
    args = parser.parse_args()
    torch.manual_seed(0)
    config: Any = AutoConfig.from_pretrained(args.model)
    file = next(args.gguf.glob("*.gguf")).name
    target: Any = AutoModelForCausalLM.from_pretrained(args.gguf, gguf_file=file, dtype=torch.float32)
    embedding = target.get_input_embeddings().weight.detach()
    documents = read_documents(args.data)
    held_out = documents[::HELD_OUT]
    documents = [document for i, document in enumerate(documents) if i % HELD_OUT]
    tokens = sum(len(document.ids) for document in documents)
    print(f"{len(documents)} documents, {tokens:,} tokens; held out {len(held_out)}", flush=True)
    state_file = args.output.with_suffix(".training.pt")
    state = torch.load(state_file, weights_only=True) if state_file.exists() else None
    vocabulary = state["vocabulary"] if state else draft_vocabulary(documents, len(embedding))
    draft_ids = torch.full((len(embedding),), -1).index_put_((vocabulary,), torch.arange(DRAFT_VOCAB))
    covered = torch.cat([draft_ids[document.choices[:, 0]] >= 0 for document in held_out]).float().mean()
    print(f"the draft vocabulary has {covered:.3f} of the target's choices on held-out chats", flush=True)

    head = Head(config)
    if not state:
        head.start_from(target, vocabulary, documents, embedding)
    del target
    optimizer = torch.optim.AdamW(parameter_groups(head), betas=(0.9, 0.95), fused=True)
    step, elapsed, seen = 0, 0.0, 0
    if state:
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        step, elapsed, seen = state["step"], state["elapsed"], state["seen"]
        torch.manual_seed(step)

    def save() -> None:
        partial = state_file.with_suffix(".partial")
        saved = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "vocabulary": vocabulary}
        torch.save(saved | {"step": step, "elapsed": elapsed, "seen": seen}, partial)
        partial.replace(state_file)
        write_checkpoint(head, config, vocabulary, args.output)

    budget, mean, stream = args.minutes * 60, 0.0, batches(documents)
    last_report = last_save = began = time.monotonic()
    since = seen
    while elapsed < budget:
        progress = elapsed / budget
        rate = min((step + 1) / 100, 0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["most"]
        batch = next(stream)
        loss = loss_of(head, batch, embedding, draft_ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + batch.start[-1]
        mean = loss.item() if mean == 0.0 else 0.98 * mean + 0.02 * loss.item()
        now = time.monotonic()
        elapsed, began = elapsed + now - began, now
        if now - last_report > 60:
            speed = (seen - since) / (now - last_report)
            shown = agreement(head, held_out[::4], embedding, vocabulary)
            print(f"{elapsed / 60:.1f} min, step {step}, {speed:.0f} tokens/s, loss {mean:.3f}, {shown}", flush=True)
            last_report, since = time.monotonic(), seen
        if now - last_save > 120:
            save()
            last_save = time.monotonic()
    save()
    shown = agreement(head, held_out, embedding, vocabulary)
    print(f"{elapsed / 60:.1f} min, {step} steps, {seen:,} tokens, {shown}")


if __name__ == "__main__":
    main()
