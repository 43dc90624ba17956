"""Print tables and draw a picture of what run.py has measured.

    python scripts/bench/peers/report.py FILE.jsonl [...] [--plot FILE]

The tables on stdout are Markdown, one for each file. A ratio is how many times as long as ovspec the peer took in the
same turn.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

NAMES = {"genai": "openvino-genai", "optimum": "optimum-intel", "llamacpp": "llama.cpp", "copy_trim": "copy and trim"}
AUTO = "lookup,draft"  # ovspec's mode with every drafter
HEADS = ("peer", "mode", "properties", "T", "context", "lookahead", "tokens/s", "same mode", "everything on")
HEADS = (*HEADS, "first token", "equal to ovspec", "equal to its own")
PICTURED = 128  # context of the lines in the picture
OURS = {"ours": ", ovspec's properties"}


def name_of(line: dict[str, Any]) -> str:
    peer: str = line["peer"]
    return "PyTorch" if "runtime=torch" in line["mode"] else NAMES.get(peer, peer)


def mode_of(line: dict[str, Any]) -> str:
    words: list[str] = line["mode"].split()
    options = [word.removeprefix("backend=") for word in words[1:] if not word.startswith(("runtime", "dtype"))]
    kind = {"server-draft": "draft", "batch": "batch of 8"}.get(words[0], words[0])
    workload = " on edits" if line["workload"] == "edit" else ""
    return " ".join([kind, *options]) + workload


def table_of(lines: list[dict[str, Any]]) -> str:
    """Return the table of one pair's peers. "same mode" and "everything on" are ratios to ovspec in those modes."""
    rows = [cells_of(line) for line in lines if line["peer"] != "ovspec"]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEADS, ("---",) * len(HEADS), *rows))


def cells_of(line: dict[str, Any]) -> tuple[str, ...]:
    begin = (name_of(line), mode_of(line), line["properties"], f"{line['temperature']:g}", str(line["context"]))
    if line["error"] and not line["ratio"]:
        return (*begin, "", "fails", *[""] * (len(HEADS) - 7))
    alike = alike_of(line)
    k = "" if line["k"] is None else str(line["k"])
    numbers = (line["tokens_per_s"], alike, line["ratio"].get(AUTO), line["ttft_ratio"])
    speed, *ratios = ("" if number is None else f"{number:.2f}" for number in numbers)
    return (*begin, k, speed, *ratios, line["equal"] or "", line["own"] or "")


def alike_of(line: dict[str, Any]) -> float | None:
    """Return the ratio to ovspec in the same mode."""
    mode = line["mode"].split()[0]
    return line["ratio"].get({"batch": "plain", "server-draft": "draft"}.get(mode, mode))


def errors_of(lines: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown item for each error, without repetitions."""
    found = [
        f"- {name_of(line)}, {mode_of(line)}, {line['properties']}: `{line['error']}`"
        for line in lines
        if line["error"]
    ]
    return list(dict.fromkeys(found))


def draw(lines: list[dict[str, Any]], file: Path) -> None:
    """Draw how many times as long as ovspec each peer takes per token, greedy, at the shorter context.

    The ratios are within the same turns, because the machine's speed differs from row to row.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [line for line in lines if line["peer"] != "ovspec" and line["ratio"] and line["context"] == PICTURED]
    shown = [line for line in shown if not line["temperature"] and line["measure"] == "tpot"][::-1]
    labels = [f"{name_of(line)}, {mode_of(line)}{OURS.get(line['properties'], '')}" for line in shown]
    figure, axis = pyplot.subplots(figsize=(8, 0.36 * len(shown) + 1))
    for place, line in enumerate(shown):
        alike, auto = alike_of(line), line["ratio"].get(AUTO)
        axis.barh(place + 0.2, alike or 0, 0.38, color="lightsteelblue")
        axis.barh(place - 0.2, auto or 0, 0.38, color="tab:blue")
    axis.set_yticks(range(len(shown)), labels)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.barh(0, 0, color="lightsteelblue", label="ovspec in the same mode = 1")
    axis.barh(0, 0, color="tab:blue", label="ovspec with everything on = 1")
    axis.set_xlabel("time per token")
    axis.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--plot", type=Path, help="draw the ratios of the first file")
    args = parser.parse_args()
    for file in args.files:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        print(f"{lines[0]['pair']}\n\n{table_of(lines)}\n")
        print("\n".join([*errors_of(lines), ""]))
        if args.plot and file == args.files[0]:
            draw(lines, args.plot)


if __name__ == "__main__":
    main()
