"""Time an EAGLE-3 head on real chats: plain decoding, the head alone and behind lookup, and openvino-genai, in turns.

    python scripts/bench/head_speed.py MODEL HEAD [--genai DIR] [--ks 1,2,3,4] [--prompts 1] [--turns 3] [--tokens 96]

MODEL is an exported model with a chat template, HEAD the folder of its exported head. DIR is the same head, exported by
'optimum-cli export openvino --task text-generation-with-past --trust-remote-code', for openvino-genai, with each of
--ks. genai reads the outputs of the layers 2, N/2 and N-3, heads are trained on their inputs, so it is also told those.
Chats are those for judging in chats.json, answered greedily; texts don't end before --tokens. For each way, a line
shows its speed beside plain decoding's in the same turn with its 95 % interval, tokens per round, and what was
accepted. Then follows what a step of the head takes, beside the time in which its weights can be read. Use an idle
machine.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from harness import (
    Table,
    Worker,
    chats,
    machine,
    median_interval,
    milliseconds,
    options,
    read_bandwidth,
    several,
    weight_bytes,
)

import ovspec
from ovspec.api.comparison import rotated
from ovspec.cache.sequence import Sequence
from ovspec.drafting.choice import DraftChoice
from ovspec.drafting.head import Head
from ovspec.ir.compile import MODEL_FILE
from ovspec.ir.heads import read_head, read_model, target_layers

STEPS = 40  # timed steps of the head
CONTEXT = 128  # tokens before them


def genai_worker(model: Path, head: Path, layers: list[int] | None, scratch: Path) -> Worker:
    """Start openvino-genai; ``layers``: those whose outputs it reads."""
    if layers:
        changed = read_model(head)
        changed.set_rt_info(layers, ["hidden_layers_list"])
        copy = scratch / "head"
        shutil.copytree(head, copy, ignore=shutil.ignore_patterns("openvino_model.*"))
        ov.save_model(changed, copy / MODEL_FILE, compress_to_fp16=False)
        head = copy
    return Worker("genai", {"target": str(model), "draft": str(head), "mode": "draft"})


def step_ms(lm: ovspec.LanguageModel) -> float:
    """Return the median milliseconds of a step of the head."""
    decoders = lm.runtime.pool.take()
    assert isinstance(decoders.drafter, Head)
    reader = decoders.drafter.decoder
    text = np.random.default_rng(0).integers(0, lm.target.ir.logits_width, CONTEXT)
    decoders.reset(1)
    decoders.target.feed([text], [1])
    reader.adopt([Sequence(text)])
    reader.feed([text], [1])
    times = [milliseconds(lambda: reader.feed([text[:1]], [1])) for _ in range(STEPS)]
    return statistics.median(times)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("head", type=Path, metavar="HEAD")
    parser.add_argument("--genai", type=Path, metavar="DIR", help="the same head, as optimum-cli exports it")
    parser.add_argument("--ks", type=several(int), default="1,2,3,4", help="lookaheads of openvino-genai")
    parser.add_argument("--fixed", type=several(int), default="1,2,4", help="fixed lookaheads of ovspec")
    parser.add_argument("--prompts", type=int, default=1, help="of each kind")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    lm = ovspec.load(args.model, ["lookup", args.head], cache_memory=0)
    plain, lookup = lm.with_drafters(None), lm.with_drafters(DraftChoice(lookup=True))
    head = lm.with_drafters(DraftChoice(model=args.head))
    # Without the head, the target has no further output.
    ways: dict[str, Any] = {
        "plain": (plain, {"lookahead": 0}),
        "plain, without a head": (ovspec.load(args.model, "none", cache_memory=0), {"lookahead": 0}),
        "lookup": (lookup, {}),
        "head": (head, {}),
        "lookup,head": (lm, {}),
        **{f"head, {k}": (head, {"lookahead": k}) for k in args.fixed},
    }
    with ExitStack() as stack:
        if args.genai:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            outputs = [layer - 1 for layer in target_layers(read_model(args.head))]
            for name, layers in (("genai", None), ("genai, its layers", outputs)):
                worker = stack.enter_context(genai_worker(args.model, args.genai, layers, scratch))
                if "error" in worker.ready:
                    sys.exit(f"Error: {worker.ready['error']}")
                ways |= {f"{name}, {k}": (worker, {"k": k}) for k in args.ks}
        chosen = [chat for chat in chats() if chat.judge and chat.number <= args.prompts]
        found: dict[str, list[tuple[float, int, int, int]]] = {way: [] for way in ways}
        same = dict.fromkeys(ways, 0)
        for turn in range(-1, args.turns):
            for chat in chosen if turn >= 0 else chosen[:1]:
                prompt, texts = plain.encode(chat.messages).tolist(), dict[str, list[int]]()
                for way in rotated(list(ways), turn + 1 + chat.number):
                    runner, given = ways[way]
                    if isinstance(runner, Worker):
                        answer = runner.answer({"prompts": [prompt], "max_tokens": args.tokens, **given})
                        texts[way], row = answer["tokens"][0], (answer["tpot_ms"], 0, 0, 0)
                    else:
                        result = runner.generate(prompt, max_tokens=args.tokens, ignore_eos=True, **given)
                        stats = result.stats
                        texts[way], row = (
                            result.token_ids,
                            (stats.tpot_ms, stats.rounds, stats.proposed, stats.accepted),
                        )
                    if turn >= 0:
                        found[way].append(row)
                for way, tokens in texts.items() if turn >= 0 else ():
                    same[way] += tokens == texts["plain"]
                print(f"turn {turn + 1}, {chat.name}", file=sys.stderr, flush=True)
            if turn < 0:
                for model in {
                    id(runner): runner for runner, _ in ways.values() if not isinstance(runner, Worker)
                }.values():
                    model.use_large_pages()
        step = step_ms(head)
    print(
        f"{args.model.name} with the head {args.head.name} on {machine()}; speeds are multiples of plain decoding's\n"
    )
    table = Table("way", "ms a token", "speed", "tokens a round", "accepted", "equal texts")
    for way, rows in found.items():
        speeds = [ours[0] / row[0] for ours, row in zip(found["plain"], rows, strict=True)]
        rounds, proposed, accepted = (sum(row[i] for row in rows) for i in (1, 2, 3))
        speed = "{:.2f} ({:.2f} to {:.2f})".format(statistics.median(speeds), *median_interval(speeds))
        rate = f"{len(rows) * args.tokens / rounds:.2f}" if rounds else None
        ms = f"{statistics.median(row[0] for row in rows):.2f}"
        table.row(
            way, ms, speed, rate, f"{accepted} of {proposed}" if proposed else None, f"{same[way]} of {len(rows)}"
        )
    size = weight_bytes(read_head(args.head, args.model).model)
    reading = 1e3 * size / read_bandwidth()
    print(
        f"\nA step of the head takes {step:.2f} ms; its {size / 1e6:.1f} MB of weights can be read in {reading:.2f} ms."
    )


if __name__ == "__main__":
    main()
