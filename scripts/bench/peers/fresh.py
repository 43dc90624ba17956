"""Time a fresh process, from its start to the 32nd and the 400th token, against openvino-genai in turns.

    python scripts/bench/peers/install.py genai
    python scripts/bench/peers/fresh.py PAIR [--turns 9] [--tokens 32,400]

Greedy, without a draft; "default" is ovspec with lookup, as it is without any option. Every process imports, loads and
reads the prompt anew; the first turn, which fills compile caches and the page cache, is left out. Prints the median
seconds until each token, and openvino-genai's time as a multiple, turn by turn. Use an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from install import python_of

PROMPT = "It was late in the evening when she came home, and"
OVSPEC = """
import sys, time
folder, wanted, prompt, options = sys.argv[1], [int(n) for n in sys.argv[2].split(",")], sys.argv[3], eval(sys.argv[4])
import ovspec
lm = ovspec.load(folder, **options)
count = 0
for piece in lm.stream(prompt, max_tokens=max(wanted), ignore_eos=True):
    before, count = count, count + len(piece.token_ids)
    for n in wanted:
        if before < n <= count:
            print(time.time(), flush=True)
"""
GENAI = """
import sys, time
folder, wanted, prompt = sys.argv[1], [int(n) for n in sys.argv[2].split(",")], sys.argv[3]
import openvino_genai as genai
pipe = genai.LLMPipeline(folder, "CPU")
count = 0
class Watch(genai.StreamerBase):
    def write(self, tokens):
        global count
        before, count = count, count + (1 if isinstance(tokens, int) else len(tokens))
        for n in wanted:
            if before < n <= count:
                print(time.time(), flush=True)
        return genai.StreamingStatus.RUNNING
    def end(self):
        pass
config = genai.GenerationConfig()
config.max_new_tokens, config.ignore_eos, config.apply_chat_template = max(wanted), True, False
pipe.generate(prompt, config, Watch())
"""


def seconds(command: list[str], count: int) -> list[float]:
    began = time.time()
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    found = [float(line) - began for line in told]
    assert len(found) == count, told
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--tokens", default="32,400")
    args = parser.parse_args()
    ours: dict[str, dict[str, object]] = {
        "ovspec": {"draft": "none"},
        "ovspec, fast": {"draft": "none", "arithmetic": "fast"},
        "ovspec, default": {},
    }
    commands = {
        name: [sys.executable, "-c", OVSPEC, args.pair, args.tokens, PROMPT, repr(options)]
        for name, options in ours.items()
    }
    commands["openvino-genai"] = [str(python_of("genai")), "-c", GENAI, args.pair, args.tokens, PROMPT]
    wanted = args.tokens.split(",")
    times: dict[str, list[list[float]]] = {name: [] for name in commands}
    for turn in range(args.turns + 1):
        names = list(commands)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found = seconds(commands[name], len(wanted))
            if turn:
                times[name].append(found)
                print(json.dumps({"turn": turn, "name": name, "seconds": found}), file=sys.stderr, flush=True)
    print(f"| | {' | '.join(f'{n} tokens, s | genai as a multiple' for n in wanted)} |")
    print("|---" * (1 + 2 * len(wanted)) + "|")
    for name, turns in times.items():
        cells = []
        for index in range(len(wanted)):
            ratios = sorted(g[index] / t[index] for g, t in zip(times["openvino-genai"], turns, strict=True))
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
            cells.append(f"{statistics.median(t[index] for t in turns):.1f} | {spread}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
