"""Let SmolLM2-135M-Instruct write the chats that its EAGLE-3 head learns from, and record what it computes on them.

It invents questions, sampled from an empty user turn of its chat template (Magpie, arXiv 2406.08464), and answers them:
greedily in every second chunk, at T=1 in the others. Without a system message it invents more noise than questions, so
the chunks take turns with a few. Then it reads each chat again, and its hidden states and likeliest tokens are kept.
Writes ``chats.jsonl`` and ``features/``; the same command goes on where an earlier one ended.

    python scripts/train/smollm2_data.py --minutes 15
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

import ovspec
from ovspec import LanguageModel
from ovspec.ir.compile import compile_ir, model_states
from ovspec.ir.device import DeviceOptions
from ovspec.ir.hidden_states import layer_inputs

ROOT = Path(__file__).resolve().parent.parent.parent
WORK = ROOT / ".cache-train"
CHUNK = 128  # chats
BATCH = 64
MOST_QUESTION, MOST_ANSWER = 160, 320  # tokens
LAYERS = (2, 15, 27)  # whose inputs are the head's features
TOP = 16  # of the likeliest tokens that are kept
SYSTEM = (
    None,  # the template's own
    "You are a programmer. You write code and explain it.",
    None,
    "You are a helpful assistant. Answer briefly.",
    None,
    "You are a writer who edits and corrects texts.",
)


# ---------------------------------------------------------------- chats


def messages(system: str | None, question: str) -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": question}]


def questions(lm: LanguageModel, system: str | None, seed: int, seen: set[str]) -> list[str]:
    """Return the questions of a chunk, without those that begin like an earlier one."""
    empty = lm.encode(messages(system, "")).tolist()
    prompt = empty[: empty.index(lm.tokenizer.encode("user", False)[0]) + 2]  # up to the newline after the role
    found = list[str]()
    for result in lm.samples(
        prompt, n=CHUNK, temperature=1.0, top_p=0.95, seed=seed, max_tokens=MOST_QUESTION, batch_size=BATCH
    ):
        text = result.text.strip()
        if result.finish_reason == "eos" and len(text) > 8 and text[:40] not in seen:
            seen.add(text[:40])
            found.append(text)
    return found


def repeats(ids: list[int]) -> bool:
    """Return whether an answer has got into a loop: half of its runs of eight tokens were there before."""
    runs = [tuple(ids[i : i + 8]) for i in range(len(ids) - 8)]
    return len(set(runs)) < len(runs) / 2


def write_chats(lm: LanguageModel, minutes: float, output: Path) -> None:
    """Append chats to ``output``, a JSON object a line, for about ``minutes``."""
    written = read_chats(output)
    seen = {chat["question"][:40] for chat in written}
    chunk = written[-1]["chunk"] + 1 if written else 0
    tokens, began = sum(len(chat["ids"]) for chat in written), time.monotonic()
    while time.monotonic() - began < minutes * 60:
        system, seed = SYSTEM[chunk // 2 % len(SYSTEM)], chunk * CHUNK
        asked = questions(lm, system, seed, seen)
        prompts = [lm.encode(messages(system, text)).tolist() for text in asked]
        temperature = float(chunk % 2)
        answers = lm.generate(prompts, temperature=temperature, seed=seed, max_tokens=MOST_ANSWER, batch_size=BATCH)
        with output.open("a") as file:
            for question, prompt, answer in zip(asked, prompts, answers, strict=True):
                if not repeats(answer.token_ids):
                    ids = [*prompt, *answer.token_ids]
                    chat = {"chunk": chunk, "question": question, "prompt": len(prompt), "ids": ids}
                    file.write(json.dumps(chat) + "\n")
                    tokens += len(ids)
        print(f"{(time.monotonic() - began) / 60:.1f} min, chunk {chunk}: {tokens:,} tokens", flush=True)
        chunk += 1


def read_chats(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# ---------------------------------------------------------------- features


def add_outputs(model: ov.Model) -> None:
    """Add the outputs features (the inputs of ``LAYERS``), final (what the lm_head reads) and the likeliest tokens."""
    inputs = layer_inputs(model, model_states(model))
    lm_head = model.output("logits").get_node().input_value(0)
    likeliest = ops.topk(ops.log_softmax(lm_head, -1), ops.constant(TOP, dtype=ov.Type.i64), -1, "max", "value")
    outputs = {
        "features": ops.concat([inputs[layer] for layer in LAYERS], -1).output(0),
        "final": lm_head.get_node().input_value(0),
        "logprobs": likeliest.output(0),
        "choices": likeliest.output(1),
    }
    for name, value in outputs.items():
        result = ops.result(value)
        result.output(0).set_names({name})
        model.add_results([result])


def computed(compiled: ov.CompiledModel, chats: list[dict[str, Any]]) -> Iterator[dict[str, np.ndarray]]:
    """Yield the added outputs for each chat, (n, width) each, in 16 bits."""
    request = compiled.create_infer_request()
    for chat in chats:
        ids, count = np.array([chat["ids"]]), len(chat["ids"])
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(count)[None]}
        inputs |= {"beam_idx": np.zeros(1, np.int32), "logits_idx": np.arange(count)}
        request.reset_state()
        request.infer({port: inputs[port.get_any_name()] for port in compiled.inputs})
        outputs = {name: request.get_tensor(name).data[0] for name in ("features", "final", "logprobs", "choices")}
        yield {name: each.astype(np.uint16 if name == "choices" else np.float16) for name, each in outputs.items()}


def write_features(model: Path, chats: list[dict[str, Any]], folder: Path) -> None:
    """Write a file for each chunk of chats that has none in ``folder``."""
    compiled = compile_ir(model, DeviceOptions(precision="f32"), add_outputs).compiled
    for chunk, group in groupby(chats, key=lambda chat: chat["chunk"]):
        file, documents = folder / f"{chunk:05}.npz", list(group)
        if file.exists():
            continue
        parts = list(computed(compiled, documents))
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        arrays["ids"] = np.concatenate([chat["ids"] for chat in documents]).astype(np.uint16)
        arrays["lengths"] = np.array([len(chat["ids"]) for chat in documents])
        arrays["prompts"] = np.array([chat["prompt"] for chat in documents])
        partial = file.with_suffix(".partial.npz")
        np.savez(partial, **arrays)  # pyright: ignore
        partial.rename(file)
        print(f"chunk {chunk}: features of {len(arrays['ids']):,} tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15, help="for writing chats; features take half as long again")
    parser.add_argument("--model", type=Path, default=ROOT / "smollm2", help="the exported model")
    parser.add_argument("-o", "--output", type=Path, default=WORK)
    args = parser.parse_args()
    (args.output / "features").mkdir(parents=True, exist_ok=True)
    if args.minutes:
        write_chats(ovspec.load(args.model, draft="none", precision="f32"), args.minutes, args.output / "chats.jsonl")
    write_features(args.model, read_chats(args.output / "chats.jsonl"), args.output / "features")


if __name__ == "__main__":
    main()
