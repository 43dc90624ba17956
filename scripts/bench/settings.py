"""Time what could make an IR's plain decoding faster: threads, pinning, and matrix products that are joined.

    python scripts/bench/settings.py MODEL [--isa AVX2]

All settings take turns on the stateful engine: milliseconds for 1, 2, 4 and 8 tokens after 128, in fast arithmetic and
f32. "joined" is the IR with the products q, k and v of a layer as one, and gate and up as one, as the paged engine has
them in models of up to 500 MB. The last column says whether the logits have the same bits as those of the first row.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from formats import CONTEXT, TURNS, WIDTHS, feed_ms, read
from harness import Table, cap, machine, options, take_turns

from ovspec.cache.decoder import Decoder
from ovspec.ir.device import DeviceOptions
from ovspec.ir.matrix_products import join_products
from ovspec.setup.engine_choice import load_compiled_model
from ovspec.setup.tuning import TUNING_TEXT_FILE
from ovspec.text.tokenizer import Tokenizer

SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one thread": {"INFERENCE_NUM_THREADS": 1},
    "not pinned": {"ENABLE_CPU_PINNING": False},
    "hyper-threads too": {"ENABLE_HYPER_THREADING": True},
    "joined": {},
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--isa", help="cap OpenVINO to this instruction set")
    args = parser.parse_args()
    cap(args.isa)
    with tempfile.TemporaryDirectory(dir=args.model.parent) as scratch:
        folder = Path(scratch) / "joined"
        products = write_joined(args.model, folder)
        decoders = {
            name: decoder_of(folder if name == "joined" else args.model, more) for name, more in SETTINGS.items()
        }
        text = Tokenizer(args.model).encode(TUNING_TEXT_FILE.read_text(encoding="utf-8"))[: CONTEXT + max(WIDTHS)]
        logits = {name: read(decoder, text[:CONTEXT]) for name, decoder in decoders.items()}
        print(f"{machine()}{f', capped to {args.isa}' if args.isa else ''}; {products} products joined\n", flush=True)
        table = Table("setting", *(f"{width} tokens, ms" for width in WIDTHS), "same bits")
        ways = [(name, width) for name in decoders for width in WIDTHS]
        times = take_turns(ways, lambda way, _: feed_ms(decoders[way[0]], text, way[1]), TURNS)
        for name in decoders:
            measured = [f"{statistics.median(times[name, width]):.1f}" for width in WIDTHS]
            table.row(name, *measured, "yes" if np.array_equal(logits[name], logits["as it is"]) else "no")


def decoder_of(folder: Path, properties: dict[str, Any]) -> Decoder:
    chosen = DeviceOptions(precision="f32", kv_precision="f32", properties={"CACHE_DIR": "", **properties})
    return load_compiled_model(folder, chosen, "stateful", "fast").decoder()


def write_joined(source: Path, folder: Path) -> int:
    """Write ``source`` with joined products; return how many were."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("openvino_model.*", "ovspec.json"))
    model = ov.Core().read_model(source / "openvino_model.xml")
    joined = join_products(model)
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    return joined


if __name__ == "__main__":
    main()
