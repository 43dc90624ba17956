"""Time the weight formats of one model on this machine, and measure what each loses.

    python scripts/bench/formats.py MODEL [--formats int8,int4/64] [--isa AVX2] [--output .cache/formats]

MODEL is a checkpoint or a GGUF file, exported in each format that isn't in the output folder yet. All formats take
turns: milliseconds for 1, 2, 4 and 8 tokens after 128, in fast arithmetic and f32, with dynamic quantisation in groups
as large as the weights' (int4) or 128. KL is that of the model's next tokens on a text from fp32's.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
from harness import Table, cap, machine, milliseconds, options, several, take_turns
from ovspec_export import Compression, export_pair

from ovspec.cache.decoder import Decoder
from ovspec.ir.device import DeviceOptions
from ovspec.sampling.logprobs import log_softmax
from ovspec.setup.engine_choice import load_compiled_model
from ovspec.setup.tuning import TUNING_TEXT_FILE
from ovspec.text.tokenizer import Tokenizer

FORMATS = {
    "fp32": Compression("fp32"),
    "fp16": Compression("fp16"),
    "int8": Compression("int8"),
    "int8 sym": Compression("int8", sym=True),
    **{f"int4/{size}": Compression("int4", group_size=size, ratio=1.0) for size in (32, 64, 128)},
    **{f"int4/{size} sym": Compression("int4", group_size=size, ratio=1.0, sym=True) for size in (32, 64, 128)},
}
CONTEXT, WIDTHS, TURNS, REPEATS = 128, (1, 2, 4, 8), 5, 6


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("model")
    parser.add_argument("--formats", type=several(choices=FORMATS), default=list(FORMATS))
    parser.add_argument("--isa", help="cap OpenVINO to this instruction set")
    parser.add_argument("--output", type=Path, default=Path(".cache/formats"))
    args = parser.parse_args()
    cap(args.isa)
    folders = {name: exported(args.model, name, args.output) for name in {"fp32": None, **dict.fromkeys(args.formats)}}
    decoders = {name: decoder_of(folder, name) for name, folder in folders.items()}
    text = Tokenizer(folders["fp32"]).encode(TUNING_TEXT_FILE.read_text(encoding="utf-8"))[: CONTEXT + max(WIDTHS)]
    logits = {name: read(decoder, text[:CONTEXT]) for name, decoder in decoders.items()}
    print(f"{machine()}{f', capped to {args.isa}' if args.isa else ''}\n", flush=True)
    table = Table("format", "size, MB", "KL, nats", "same top-1", *(f"{width} tokens, ms" for width in WIDTHS))
    ways = [(name, width) for name in args.formats for width in WIDTHS]
    times = take_turns(ways, lambda way, _: feed_ms(decoders[way[0]], text, way[1]), TURNS)
    reference = log_softmax(logits["fp32"])
    for name in args.formats:
        found = log_softmax(logits[name])
        kl = float((np.exp(reference) * (reference - found)).sum(-1).mean())
        same = float((reference.argmax(-1) == found.argmax(-1)).mean())
        size = (folders[name] / "openvino_model.bin").stat().st_size / 1e6
        measured = [f"{statistics.median(times[name, width]):.1f}" for width in WIDTHS]
        table.row(name, f"{size:.0f}", f"{kl:.1e}", f"{same:.0%}", *measured)


def exported(model: str, name: str, output: Path) -> Path:
    folder = output / f"{Path(model).stem}-{name.replace('/', '-').replace(' ', '-')}"
    if not folder.is_dir():
        export_pair(model, None, folder, FORMATS[name])
    return folder


def decoder_of(folder: Path, name: str) -> Decoder:
    group = min(int(name.split()[0].partition("/")[2] or 128), 128)
    properties = {"CACHE_DIR": "", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0 if name == "fp32" else group}
    loaded = load_compiled_model(
        folder, DeviceOptions(precision="f32", kv_precision="f32", properties=properties), arithmetic="fast"
    )
    return loaded.decoder()


def read(decoder: Decoder, text: np.ndarray) -> np.ndarray:
    decoder.reset(1)
    return decoder.feed([text], [len(text)])[0].copy()


def feed_ms(decoder: Decoder, text: np.ndarray, width: int) -> float:
    def once() -> float:
        decoder.truncate(0, CONTEXT)
        return milliseconds(lambda: decoder.feed([text[CONTEXT : CONTEXT + width]], [width]))

    return statistics.median(once() for _ in range(REPEATS))


if __name__ == "__main__":
    main()
