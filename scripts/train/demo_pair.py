"""Train the embedded demo pair, and the small draft of the tests, from the source of CPython's standard library.

    python scripts/train/demo_pair.py pair --minutes 90
    python scripts/train/demo_pair.py small --minutes 9

All text is from the ``.py`` files shipped with the Python running this script (PSF licence). A run is bounded by wall
clock and seeded.

pair: writes ``models/demo-hf/{target,draft}`` (bf16 safetensors, tokenizer, chat template). The target learns the text;
    the draft (about 1M parameters) learns the target's distributions.
small: writes ``models/small-hf``, a single layer, distilled from the demo pair's draft. The tests' pair has the demo
    draft as its target (five times cheaper than the demo target) and this model as its draft.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizer import byte_level
from tokenizers import pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent.parent
VOCAB = 4096
EOT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MAX_POSITIONS = 2048
# The last part of each training run sees windows of the full context.
SHORT, LONG, LONG_FROM = 512, MAX_POSITIONS, 0.75
TARGET_SHARE = 0.58  # of the wall clock; the remaining time distils the draft
# transformers' own annotations are too narrow for its models.
Model = Any
Loss = Callable[[dict[str, torch.Tensor]], torch.Tensor]  # batch -> loss
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Hidden units, MLP units, layers, heads and key heads; "small" is the draft of the tests' pair.
SHAPES = {"target": (384, 1024, 5, 6, 2), "draft": (128, 512, 2, 2, 1), "small": (64, 192, 1, 4, 2)}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# ---------------------------------------------------------------- text


def stdlib_files() -> list[tuple[str, str]]:
    """Return (relative path, text) of every usable source file, sorted, without tables and odd encodings."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        is_table = name.startswith(("site-packages/", "encodings/", "pydoc_data/"))
        if not is_table and 400 <= path.stat().st_size <= 150_000:
            with contextlib.suppress(UnicodeDecodeError):
                files.append((name, path.read_text(encoding="utf-8")))
    return files


def is_held_out(name: str) -> bool:
    """Return whether a file is held out: a fixed 2.5 % of the files, chosen by name."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 40 == 0


def shingles(text: str, size: int = 4) -> set[int]:
    """Return the hashes of every run of ``size`` non-blank lines, for finding near-duplicates."""
    lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
    runs = ("\n".join(lines[i : i + size]) for i in range(max(1, len(lines) - size + 1)))
    return {int.from_bytes(hashlib.blake2b(r.encode(), digest_size=8).digest(), "big") for r in runs}


def training_files() -> list[tuple[str, str]]:
    """Return the files not held out, except files sharing >= 10 % with a held-out file."""
    files = stdlib_files()
    held_shingles = [shingles(text) for name, text in files if is_held_out(name)]
    everything = set().union(*held_shingles)

    def is_near_duplicate(text: str) -> bool:
        own = shingles(text)
        if len(own & everything) >= 0.1 * len(own):
            return True
        return any(len(own & other) >= 0.1 * len(other) for other in held_shingles)

    return [(name, text) for name, text in files if not is_held_out(name) and not is_near_duplicate(text)]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; the split pattern keeps indentation together and digits apart."""
    tokenizer = byte_level(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[EOT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOT,
        pad_token=EOT,
        additional_special_tokens=[IM_START, IM_END],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def batches_of(corpus: list[np.ndarray], seed: int, rows: int, window: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of ``rows`` windows of the documents without end; the remainder of an epoch is left out."""
    for epoch in itertools.count():
        order = np.random.default_rng(seed * 1000 + epoch).permutation(len(corpus))
        tokens = np.concatenate([corpus[i] for i in order])
        doc = np.repeat(np.arange(len(order)), [len(corpus[i]) for i in order])
        count = (len(tokens) - 1) // window
        starts = np.random.default_rng(seed + epoch).permutation(count) * window
        for at in range(0, count - rows + 1, rows):
            yield pack_windows(tokens, doc, starts[at : at + rows], window)


def pack_windows(tokens: np.ndarray, doc: np.ndarray, starts: np.ndarray, window: int) -> dict[str, torch.Tensor]:
    """Return a batch of windows; attention and positions stop at the borders of documents.

    doc: the number of each token's document.
    """
    index = starts[:, None] + np.arange(window)
    ids, docs = tokens[index], doc[index]
    fresh = np.concatenate([np.ones((len(starts), 1), bool), docs[:, 1:] != docs[:, :-1]], axis=1)
    place = np.arange(window)
    positions = place - np.maximum.accumulate(np.where(fresh, place, 0), axis=1)
    labels = np.where(doc[index + 1] == docs, tokens[index + 1].astype(np.int64), -100)
    mask = (docs[:, :, None] == docs[:, None, :]) & np.tri(window, dtype=bool)
    return {
        "ids": torch.from_numpy(ids.astype(np.int64)).to(DEVICE),
        "positions": torch.from_numpy(positions).to(DEVICE),
        "mask": torch.from_numpy(mask[:, None]).to(DEVICE),
        "labels": torch.from_numpy(labels).to(DEVICE),
    }


# ---------------------------------------------------------------- models


def new_model(kind: str) -> Model:
    """Return an untrained target (9.4 million parameters), draft (1.0 million) or small draft, with tied embeddings."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes: dict[str, Any] = dict(zip(names, SHAPES[kind], strict=True))
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": MAX_POSITIONS, "rms_norm_eps": 1e-5}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": True}
    model: Model = LlamaForCausalLM(LlamaConfig(**sizes))
    return model.to(DEVICE)


def logits_of(model: Model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits, (rows, window, VOCAB)."""
    inputs = {"input_ids": batch["ids"], "attention_mask": batch["mask"], "position_ids": batch["positions"]}
    return model(**inputs, use_cache=False).logits


def text_loss(model: Model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(logits_of(model, batch).flatten(0, 1).float(), batch["labels"].flatten())


def distillation_loss(draft: Model, target: Model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return KL(target || draft) plus a loss on the target's first choice, because greedy acceptance counts most."""
    with torch.no_grad():
        target_logits = logits_of(target, batch).flatten(0, 1).float()
    own = F.log_softmax(logits_of(draft, batch).flatten(0, 1).float(), dim=-1)
    kl = F.kl_div(own, F.log_softmax(target_logits, dim=-1), log_target=True, reduction="batchmean")
    return kl + 0.5 * F.nll_loss(own, target_logits.argmax(-1))


def optimizers(model: Model) -> list[torch.optim.Optimizer]:
    """Return Muon (Jordan et al. 2024) for the matrices of the layers and AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01)
    return [muon, torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)]


def rate(progress: float) -> float:
    """Return the factor of the learning rate: a short warm-up, a plateau, then linear decay to zero."""
    return min(1.0, progress / 0.01 + 0.02, (1.0 - progress) / 0.45)


# ---------------------------------------------------------------- training


def train(kind: str, model: Model, loss_of: Loss, corpus: list[np.ndarray], minutes: float, seed: int) -> None:
    """Train until ``minutes`` of wall clock are over."""
    opts = optimizers(model)
    groups = [group for opt in opts for group in opt.param_groups]
    rates = [group["lr"] for group in groups]
    began = time.monotonic()
    step, mean = 0, 0.0
    window, batches = SHORT, batches_of(corpus, seed, 6144 // SHORT, SHORT)
    while (progress := (time.monotonic() - began) / (60 * minutes)) < 1:
        if progress >= LONG_FROM and window == SHORT:
            window, batches = LONG, batches_of(corpus, seed + step, 6144 // LONG, LONG)
        for group, highest in zip(groups, rates, strict=True):
            group["lr"] = highest * rate(progress)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = loss_of(next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        mean = 0.95 * mean + 0.05 * loss.item() if step else loss.item()
        step += 1
        if step % 100 == 0:
            print(f"{kind}: {progress:.1%}, step {step}, loss {mean:.3f}, window {window}", flush=True)


# ---------------------------------------------------------------- the commands


def write_model(model: Model, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=[0, 2], pad_token_id=0, max_new_tokens=None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_pair(args: argparse.Namespace) -> None:
    files = training_files()
    tokenizer = train_tokenizer([text for _, text in files])
    corpus = corpus_of(files, tokenizer)
    target = new_model("target")
    loss = torch.compile(lambda batch: text_loss(target, batch), dynamic=False)
    train("target", target, loss, corpus, args.minutes * TARGET_SHARE, args.seed)
    target.requires_grad_(False).eval()
    draft = new_model("draft")
    loss = torch.compile(lambda batch: distillation_loss(draft, target, batch), dynamic=False)
    train("draft", draft, loss, corpus, args.minutes * (1 - TARGET_SHARE), args.seed + 1)
    write_model(target, tokenizer, args.output / "target")
    write_model(draft, tokenizer, args.output / "draft")


def make_small_draft(args: argparse.Namespace) -> None:
    source = ROOT / "models" / "demo-hf" / "draft"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    target: Model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    target = target.eval().to(DEVICE)
    draft = new_model("small")
    corpus = corpus_of(training_files(), tokenizer)
    train("small", draft, lambda batch: distillation_loss(draft, target, batch), corpus, args.minutes, args.seed)
    write_model(draft, tokenizer, args.output)


def corpus_of(files: list[tuple[str, str]], tokenizer: Any) -> list[np.ndarray]:
    """Return the token ids of each file, with the end of the text."""
    print(f"{len(files)} files", flush=True)
    encoded = tokenizer([text for _, text in files], add_special_tokens=False)["input_ids"]
    return [np.array([*ids, 0], dtype=np.uint16) for ids in encoded]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pair", "small"))
    parser.add_argument("--minutes", type=float, default=90, help="wall clock for all models together (default 90)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, help="[default: models/demo-hf or models/small-hf]")
    args = parser.parse_args()
    args.output = args.output or ROOT / "models" / {"pair": "demo-hf", "small": "small-hf"}[args.what]
    torch.manual_seed(args.seed)
    {"pair": make_pair, "small": make_small_draft}[args.what](args)


if __name__ == "__main__":
    main()
