"""Print tables of what run.py has measured.

    python scripts/bench/peers/report.py FILE.jsonl [...]

The tables on stdout are Markdown, one for each file. A ratio is how many times as long as ovspec the peer took in the
same turn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import Table, options

NAMES = {"genai": "openvino-genai", "optimum": "optimum-intel", "llamacpp": "llama.cpp", "copy_trim": "copy and trim"}
AUTO = "lookup,draft"  # ovspec's mode with every drafter
HEADS = ("peer", "mode", "properties", "T", "context", "lookahead", "tokens/s", "same mode", "everything on")
HEADS = (*HEADS, "first token", "equal to ovspec", "equal to its own")


def name_of(line: dict[str, Any]) -> str:
    peer: str = line["peer"]
    return "PyTorch" if "runtime=torch" in line["mode"] else NAMES.get(peer, peer)


def mode_of(line: dict[str, Any]) -> str:
    words: list[str] = line["mode"].split()
    given = [word.removeprefix("backend=") for word in words[1:] if not word.startswith(("runtime", "dtype"))]
    kind = {"server-draft": "draft", "batch": "batch of 8"}.get(words[0], words[0])
    workload = " on edits" if line["workload"] == "edit" else ""
    return " ".join([kind, *given]) + workload


def cells_of(line: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a peer. "same mode" and "everything on" are ratios to ovspec in those modes."""
    begin = (name_of(line), mode_of(line), line["properties"], f"{line['temperature']:g}", str(line["context"]))
    if line["error"] and not line["ratio"]:
        return (*begin, "", "fails")
    k = "" if line["k"] is None else str(line["k"])
    numbers = (line["tokens_per_s"], *ratios_of(line), line["ttft_ratio"])
    speed, *ratios = ("" if number is None else f"{number:.2f}" for number in numbers)
    return (*begin, k, speed, *ratios, line["equal"] or "", line["own"] or "")


def ratios_of(line: dict[str, Any]) -> tuple[float | None, float | None]:
    """Return the ratios to ovspec in the same mode and with everything on."""
    mode = line["mode"].split()[0]
    return line["ratio"].get({"batch": "plain", "server-draft": "draft"}.get(mode, mode)), line["ratio"].get(AUTO)


def errors_of(lines: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown item for each error, without repetitions."""
    names = ((line, f"{name_of(line)}, {mode_of(line)}, {line['properties']}") for line in lines if line["error"])
    return list(dict.fromkeys(f"- {name}: `{line['error']}`" for line, name in names))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    for file in args.files:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        print(f"{lines[0]['pair']}\n")
        table = Table(*HEADS)
        for line in lines:
            if line["peer"] != "ovspec":
                table.row(*cells_of(line))
        print("\n".join(["", *errors_of(lines), ""]))


if __name__ == "__main__":
    main()
