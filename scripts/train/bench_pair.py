"""Make a model of real size with the same output as a small model, for measuring speed.

    python scripts/train/bench_pair.py OUT [--size 1b|moe] [--vocab 32000] [--weight-format F]
    python scripts/train/bench_pair.py OUT --of CHECKPOINT [--head HEAD]

There are no weights of real size in the repository, so small models are widened without changing their function: the
demo pair, or with --of another Llama checkpoint, such as SmolLM2-135M-Instruct, for the text of a real model:

- Hidden units and heads are repeated r times, MLP units to fill the width, and the weights reading them are divided by
  the number of copies. Noise, cancelling between two copies, makes all copies of a weight different. The number is a
  power of two and the noise a multiple of the last bit, so all values are exact in bf16.
- Added layers have random output projections of about 1e-6 (all-zero projections would be stored only once).
- Added MLP units have outputs of almost zero.
- Added ids have means of real rows in the lm_head, because a mean of logits is never the largest logit.

With --of, the checkpoint of an EAGLE-3 head or MTP layer is widened with its model, and its proposals stay the same.

OUT/hf/target and OUT/hf/draft are the checkpoints, OUT/FORMAT the exported pairs; with --of, the draft is the head, if
any. The logits are compared with the small model's, with weights rounded to bf16, and every export with its checkpoint.
1b takes 2.1 GB of disk for the checkpoints, 1.1 for int8 and 0.6 for int4, and about 8 GB of memory. In moe, the target
is a mixture of experts (Mixtral): all experts compute the same as the MLP, so a random router's choice doesn't matter.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO = ROOT / "models" / "demo-hf"
CONTEXT = 8192  # of the widened models; texts beyond the demo pair's training length still have realistic times
TINY = 1e-6
LAYER = r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj|input_layernorm|post_attention_layernorm)"
LLAMA_WEIGHTS = rf"(model\.(embed_tokens|norm|layers\.\d+\.{LAYER})|lm_head)\.weight"
MTP_WEIGHTS = rf"mtp\.(fc|norm|pre_fc_norm_(embedding|hidden)|layers\.0\.{LAYER})\.weight"
HEAD_WEIGHTS = rf"{MTP_WEIGHTS}|d2t|t2d|(fc|norm|lm_head|midlayer\.(hidden_norm|{LAYER}))\.weight"
PROMPTS = [entry["text"] for entry in json.loads((ROOT / "models" / "prompts.json").read_text("utf-8"))["prompts"]]


@dataclass(frozen=True)
class Shape:
    """A widened model.

    repeat: copies of each hidden unit and head, a power of two.
    mlp: MLP units per layer; the small model's units are copied at least twice, up to this number.
    experts: number of MLPs per layer, two of them active for a token; 0 for a model without experts.
    """

    repeat: int
    mlp: int
    layers: int
    experts: int = 0


SIZES = {
    "1b": {"target": Shape(4, 6144, 26), "draft": Shape(4, 2048, 16)},
    "moe": {"target": Shape(2, 2048, 12, experts=16), "draft": Shape(2, 1024, 5)},
}


def spread(weights: torch.Tensor, repeat: int, generator: torch.Generator) -> torch.Tensor:
    """Widen (out, in) bf16 to (out, repeat * in) bf16; the copies of each input add up to ``weights`` exactly.

    Half of the copies get +d and the other half -d. d is a multiple of the last bit of the significand and
    small enough to leave the exponent alone, so nothing is rounded.
    """
    share = weights.to(torch.bfloat16) / repeat
    bits = share.view(torch.int16).to(torch.int32)
    significand = bits & 0x7F  # the 7 stored bits
    room = torch.minimum(significand, 0x7F - significand)
    copies: list[torch.Tensor] = []
    for _ in range(repeat // 2):
        drawn = torch.rand(share.shape, generator=generator) * 2 - 1
        step = (drawn * room).round().to(torch.int32)  # in units of the last bit
        copies += [(bits + step).to(torch.int16), (bits - step).to(torch.int16)]
    return torch.cat(copies, dim=1).view(torch.bfloat16)


def widen(weights: dict[str, torch.Tensor], config: dict[str, Any], shape: Shape, vocab: int) -> Any:
    """Return (weights, config) of a wider Llama model with the same logits for the same ids.

    Args:
        weights: a Llama checkpoint's; they are rounded to bf16.
        vocab: number of ids, at least the checkpoint's.

    Raises:
        ValueError: the shape isn't wider, or the model has other weights than Llama's.
    """
    r, generator = shape.repeat, torch.Generator().manual_seed(0)
    hidden, heads, mlp = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    if math.log2(r) % 1 or r < 2 or shape.mlp < 2 * mlp or vocab < config["vocab_size"]:
        raise ValueError("a model can only be made wider, by a power of two, with at least twice the MLP units")
    if unknown := [name for name in weights if not re.fullmatch(LLAMA_WEIGHTS, name)]:
        raise ValueError(f"{unknown[0]} is not a weight of Llama; give a checkpoint with Llama's layers and no biases")
    copies = mlp_copies(shape, config)

    def read(name: str, layer: int) -> torch.Tensor:
        return weights[f"model.layers.{layer}.{name}.weight"].to(torch.bfloat16)

    def rows(matrix: torch.Tensor, outputs: int = r, inputs: int = r) -> torch.Tensor:
        """Widen (out, in) to (outputs * out, inputs * in); each copy of an output has its own noise."""
        return torch.cat([spread(matrix, inputs, generator) for _ in range(outputs)])

    def random(out: int, inputs: int, scale: float) -> torch.Tensor:
        return (torch.randn(out, inputs, generator=generator) * scale).to(torch.bfloat16)

    def mlp_of(layer: int) -> list[torch.Tensor]:
        """Return the gate, up and down projections of a layer, or of any of its experts."""
        if layer >= config["num_hidden_layers"]:
            return [random(shape.mlp, wide, usual), random(shape.mlp, wide, usual), random(wide, shape.mlp, TINY)]
        gate, up, down = (read(f"mlp.{part}_proj", layer) for part in ("gate", "up", "down"))
        inward = [torch.cat([rows(part, outputs=copies), random(inert, wide, usual)]) for part in (gate, up)]
        return [*inward, torch.cat([rows(down, inputs=copies), random(wide, inert, TINY)], dim=1)]

    def feed_forward(layer: int) -> dict[str, torch.Tensor]:
        if not shape.experts:
            return dict(zip(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), mlp_of(layer), strict=True))
        moe = {"block_sparse_moe.gate": random(shape.experts, wide, usual)}
        for expert in range(shape.experts):
            names = [f"block_sparse_moe.experts.{expert}.{part}" for part in ("w1", "w3", "w2")]
            moe |= dict(zip(names, mlp_of(layer), strict=True))
        return moe

    wide = r * hidden
    inert = shape.mlp - copies * mlp
    usual = 1 / math.sqrt(wide)
    embedding = weights["model.embed_tokens.weight"].to(torch.bfloat16)
    known = weights.get("lm_head.weight", embedding).to(torch.bfloat16)
    picked = torch.randint(len(embedding), (vocab - len(embedding), 8), generator=generator)

    def with_means(matrix: torch.Tensor) -> torch.Tensor:
        """Add the rows of the added ids."""
        return torch.cat([matrix, *(matrix[part].float().mean(1).to(torch.bfloat16) for part in picked.split(4096))])

    tensors = {
        "model.embed_tokens.weight": with_means(embedding).repeat(1, r),
        "model.norm.weight": weights["model.norm.weight"].to(torch.bfloat16).repeat(r),
        "lm_head.weight": torch.cat([spread(part, r, generator) for part in with_means(known).split(4096)]),
    }
    for layer in range(shape.layers):
        name = f"model.layers.{layer}."
        if layer < config["num_hidden_layers"]:
            norms = [read(norm, layer).repeat(r) for norm in ("input_layernorm", "post_attention_layernorm")]
            parts = [rows(read(f"self_attn.{part}_proj", layer)) for part in "qkvo"]
        else:
            q_width, kv_width = r * heads * head, r * kv_heads * head
            norms = [torch.ones(wide, dtype=torch.bfloat16) for _ in range(2)]
            parts = [random(out, wide, usual) for out in (q_width, kv_width, kv_width)]
            parts += [random(wide, q_width, TINY)]
        names = [f"self_attn.{part}_proj" for part in "qkvo"] + ["input_layernorm", "post_attention_layernorm"]
        tensors |= {f"{name}{part}.weight": tensor for part, tensor in zip(names, [*parts, *norms], strict=True)}
        tensors |= {f"{name}{part}.weight": tensor for part, tensor in feed_forward(layer).items()}
    sizes = {
        "hidden_size": wide,
        "num_attention_heads": r * heads,
        "num_key_value_heads": r * kv_heads,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "vocab_size": vocab,
        "max_position_embeddings": max(CONTEXT, config["max_position_embeddings"]),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if shape.experts:
        sizes |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
        sizes |= {"num_local_experts": shape.experts, "num_experts_per_tok": 2}
    return tensors, config | sizes


def widen_head(weights: dict[str, torch.Tensor], config: dict[str, Any], repeat: int, copies: int) -> Any:
    """Return (weights, config) of a wider MTP layer or EAGLE-3 head (without an embedding) for a widened model.

    Args:
        weights: a checkpoint's, in the format of 'ovspec distill'; they are rounded to bf16.
        repeat: copies of each hidden unit and head, as in the model.
        copies: copies of each MLP unit, a power of two.

    Raises:
        ValueError: the head has other weights.
    """
    generator, hidden = torch.Generator().manual_seed(0), config["hidden_size"]
    outputs = {"gate_proj": copies, "up_proj": copies, "lm_head": 1}  # copies of outputs; others have ``repeat``

    def widened(name: str, matrix: torch.Tensor) -> torch.Tensor:
        if name in ("d2t", "t2d"):
            return matrix
        if matrix.ndim == 1:
            return matrix.to(torch.bfloat16).repeat(repeat)
        part = name.split(".")[-2]
        inputs = copies if part == "down_proj" else repeat
        # Concatenated inputs (features of several layers, or embedding and feature) are widened separately.
        apart = matrix.split(matrix.shape[1] if part in ("o_proj", "down_proj") else hidden, dim=1)
        rows = range(outputs.get(part, repeat))
        return torch.cat([torch.cat([spread(block, inputs, generator) for block in apart], 1) for _ in rows])

    if unknown := [name for name in weights if not re.fullmatch(HEAD_WEIGHTS, name)]:
        raise ValueError(f"{unknown[0]} is not a weight of a head that can be widened; give one that ovspec distilled")
    sizes = {name: repeat * config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")}
    sizes["intermediate_size"] = copies * config["intermediate_size"]
    return {name: widened(name, matrix) for name, matrix in weights.items()}, config | sizes


def make_head(source: Path, folder: Path, repeat: int, copies: int) -> float:
    """Write the widened checkpoint of a head; return the largest change of a logit, in standard deviations.

    As for models, the comparison is with the weights rounded to bf16. For an MTP layer its output is compared, because
    its target computes the logits.
    """
    from ovspec_export.heads import load_head_checkpoint
    from ovspec_export.mtp import load_mtp_layer

    config = read_config(source)
    original = load_file(source / "model.safetensors")
    weights, wide = widen_head(original, config, repeat, copies)
    write_checkpoint(weights, wide, folder)
    is_mtp = "mtp.fc.weight" in original
    load: Any = (lambda path: load_mtp_layer(path, path.name)[0]) if is_mtp else load_head_checkpoint
    if (ids := source / "draft_vocabulary.json").is_file():
        shutil.copy(ids, folder)
    generator, hidden, tokens = torch.Generator().manual_seed(1), config["hidden_size"], 32
    states, embedded = (torch.randn(1, tokens, n * hidden, generator=generator) for n in (1 if is_mtp else 3, 1))

    @torch.no_grad()
    def logits_of_head(head: Any, copies: int) -> torch.Tensor:
        taps = torch.cat([part.repeat(1, 1, copies) for part in states.split(hidden, dim=2)], 2)
        ones = torch.ones((1, tokens), dtype=torch.int64)
        inputs = (embedded.repeat(1, 1, copies), head.fuse_target_states(taps), ones, ones.cumsum(1) - 1, taps)
        return head(*inputs, *head.make_empty_cache())[0]

    rounded = load(source)
    rounded.load_state_dict({name: weight.bfloat16().float() for name, weight in rounded.state_dict().items()})
    before, after = logits_of_head(rounded, 1), logits_of_head(load(folder), repeat)
    return float((after[..., : before.shape[-1]] - before).abs().max() / before.std())


def write_checkpoint(weights: dict[str, torch.Tensor], config: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8", newline="\n")


def mlp_copies(shape: Shape, config: dict[str, Any]) -> int:
    """Return the number of copies of each MLP unit, a power of two."""
    return 2 ** int(math.log2(shape.mlp // config["intermediate_size"]))


def read_config(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))


def shape_of(source: Path) -> Shape:
    """Return the shape of a widened checkpoint with all its layers, four times as wide and with twice the MLP units."""
    config = read_config(source)
    return Shape(4, 2 * config["intermediate_size"], config["num_hidden_layers"])


def make_checkpoint(source: Path, folder: Path, shape: Shape, vocab: int) -> int:
    """Write the widened checkpoint of ``source``; return its number of parameters.

    Args:
        vocab: as in ``widen``, but never below the number of ids of ``source``.
    """
    config = read_config(source)
    vocab = max(vocab, config["vocab_size"])
    weights, config = widen(load_file(source / "model.safetensors"), config, shape, vocab)
    write_checkpoint(weights, config, folder)
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder)
    return sum(tensor.numel() for tensor in weights.values())


@torch.no_grad()
def logits_of(folder: Path, text: str) -> torch.Tensor:
    """Return the logits of Hugging Face's model in f32, (tokens, vocab), with the weights rounded to bf16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(text[:1200], return_tensors="pt")["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()
    return model(input_ids=ids).logits[0]


def check(source: Path, folder: Path) -> float:
    """Return the largest change of a logit, in standard deviations of the logits.

    Raises:
        ValueError: an added id has the largest logit at some position.
    """
    before, after = (logits_of(checkpoint, "".join(PROMPTS)) for checkpoint in (source, folder))
    known = before.shape[1]
    if after.shape[1] > known and (after[:, known:].amax(1) >= after[:, :known].amax(1)).any():
        raise ValueError(f"{folder}: an added id has the largest logit")
    return float((after[:, :known] - before).abs().max() / before.std())


def report_change(name: str, change: float) -> None:
    print(f"{name}, logits moved by {change:.0e} of their spread", flush=True)
    if change > 1e-3:
        sys.exit(f"{name}: widening changed its logits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=SIZES, default="1b", help="of the demo pair's widened models")
    parser.add_argument("--of", type=Path, metavar="CHECKPOINT", help="widen this Llama checkpoint, without a draft")
    parser.add_argument("--head", type=Path, metavar="HEAD", help="with --of: widen its head or MTP layer, too")
    parser.add_argument("--vocab", type=int, default=32000, help="number of ids, unless the checkpoint has more")
    parser.add_argument("--weight-format", nargs="+", default=["int8"], help="as in 'ovspec export'")
    args = parser.parse_args()
    if args.head and not args.of:
        parser.error("--head needs --of")
    checkpoints = args.out / "hf"
    target, draft = checkpoints / "target", checkpoints / "draft"
    models = [(DEMO / name, checkpoints / name, shape) for name, shape in SIZES[args.size].items()]
    if args.of:
        models = [(args.of, target, shape_of(args.of))]
    for source, folder, shape in models:
        count = make_checkpoint(source, folder, shape, args.vocab)
        report_change(f"{folder.name}: {count / 1e6:,.0f} M parameters", check(source, folder))
        if args.head:
            report_change("head", make_head(args.head, draft, shape.repeat, mlp_copies(shape, read_config(source))))
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch) / "text.txt"
        text.write_text("".join(PROMPTS), encoding="utf-8", newline="\n")
        for weight_format in args.weight_format:
            command = [sys.executable, "-m", "ovspec", "export", target, "-o", args.out / weight_format]
            command += ["--overwrite", *(["--draft", draft] if args.head or not args.of else [])]
            command += ["--weight-format", weight_format, "--evaluate", text]
            subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")
