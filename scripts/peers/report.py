"""Tables and a picture of what run.py has measured.

    python scripts/peers/report.py FILE.jsonl [...] [--plot FILE]

Markdown on stdout, a table for each pair. A ratio is how many times as long the peer took in the same turn.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

NAMES = {"genai": "openvino-genai", "optimum": "optimum-intel", "llamacpp": "llama.cpp", "copy_trim": "copy and trim"}
AUTO = "lookup,draft"  # ovspec's mode with everything that proposes
HEADS = ("peer", "mode", "properties", "T", "context", "k", "tokens/s", "ovspec alike", "ovspec auto", "first token")
HEADS = (*HEADS, "equal", "its own text")
PICTURED = 128  # context


def name_of(line: dict[str, Any]) -> str:
    return "PyTorch" if "runtime=torch" in line["mode"] else NAMES.get(line["peer"], line["peer"])


def mode_of(line: dict[str, Any]) -> str:
    words = line["mode"].split()
    options = [word.removeprefix("backend=") for word in words[1:] if not word.startswith(("runtime", "dtype"))]
    kind = {"server-draft": "draft", "batch": "batch of 8"}.get(words[0], words[0])
    workload = " on edits" if line["workload"] == "edit" else ""
    return " ".join([kind, *options]) + workload


def table_of(lines: list[dict[str, Any]]) -> str:
    """Of one pair's peers; what ovspec reached alone is in the ratios."""
    rows = [cells_of(line) for line in lines if line["peer"] != "ovspec"]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEADS, ("---",) * len(HEADS), *rows))


def cells_of(line: dict[str, Any]) -> tuple[str, ...]:
    begin = (name_of(line), mode_of(line), line["properties"], f"{line['temperature']:g}", str(line["context"]))
    if line["error"] and not line["ratio"]:
        return (*begin, "", "fails", "", "", "", "", "")
    alike = [ratio for mode, ratio in line["ratio"].items() if mode != AUTO]
    k = "" if line["k"] is None else str(line["k"])
    numbers = (line["tokens_per_s"], *alike[:1], line["ratio"].get(AUTO), line["ttft_ratio"])
    speed, *ratios = ("" if number is None else f"{number:.2f}" for number in numbers)
    return (*begin, k, speed, *ratios, line["equal"] or "", line["own"] or "")


def errors_of(lines: list[dict[str, Any]]) -> list[str]:
    """What went wrong, once each."""
    found = [
        f"- {name_of(line)}, {mode_of(line)}, {line['properties']}: `{line['error']}`"
        for line in lines
        if line["error"]
    ]
    return list(dict.fromkeys(found))


def draw(lines: list[dict[str, Any]], file: Path) -> None:
    """Tokens a second at batch 1, greedy, behind the shorter context: a bar for each, ovspec's darker."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    best: dict[str, tuple[float, bool]] = {}
    for line in lines:
        if (
            line["context"] != PICTURED
            or line["temperature"]
            or line["measure"] != "tpot"
            or line["workload"] == "edit"
        ):
            continue
        if line["tokens_per_s"]:
            ours = line["peer"] == "ovspec"
            mode = {AUTO: "auto"}.get(line["mode"], mode_of(line))
            properties = ", our properties" if line["properties"] == "ours" else ""
            label = f"{name_of(line)}, {mode}{properties}"
            if label not in best or best[label][0] < line["tokens_per_s"]:
                best[label] = line["tokens_per_s"], ours
    ranked = sorted(best.items(), key=lambda item: item[1][0])
    figure, axis = pyplot.subplots(figsize=(8, 0.28 * len(ranked) + 1))
    colors = ["tab:blue" if ours else "lightsteelblue" for _, (_, ours) in ranked]
    axis.barh([label for label, _ in ranked], [speed for _, (speed, _) in ranked], color=colors)
    axis.set_xlabel("tokens a second, greedy, one text")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--plot", type=Path, help="a picture of the first file")
    args = parser.parse_args()
    for file in args.files:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        print(f"{lines[0]['pair']}\n\n{table_of(lines)}\n")
        print("\n".join([*errors_of(lines), ""]))
        if args.plot and file == args.files[0]:
            draw(lines, args.plot)


if __name__ == "__main__":
    main()
