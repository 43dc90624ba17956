"""Time inferences of a model: in several weight formats, settings or sizes of memory pages, and in a bare loop.

    python scripts/bench/inferences.py formats MODEL [--formats int8,int4/64] [--isa AVX2] [--output .cache/formats]
    python scripts/bench/inferences.py settings MODEL [--isa AVX2]
    python scripts/bench/inferences.py pages MODEL
    python scripts/bench/inferences.py loop MODEL [--tokens 96] [--rounds 8]

Everything that is compared takes turns. The first three: milliseconds for each width after 128 tokens of text.

formats: MODEL is a checkpoint or a GGUF file, exported in each format that isn't in the output folder yet. In fast
    arithmetic and f32, with dynamic quantisation in groups as large as the weights' (int4) or 128. KL is that of the
    model's next tokens on a text from fp32's.
settings: an IR's threads, pinning, and matrix products that are joined, on the stateful engine, in fast arithmetic and
    f32. "joined" is the IR with the products q, k and v of a layer as one, and gate and up as one, as the paged engine
    has them in models of up to 500 MB. The last column says whether the logits have the bits of the first row.
pages: an IR is loaded twice, and the weights of one copy are moved into large pages.
loop: plain decoding beside a loop over the same compiled model, which writes a token, its position and the length into
    arrays that are bound once, calls start_async and wait, and takes the argmax. It leaves out sampling, stop strings,
    text, statistics and drafters.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from harness import (
    Option,
    Table,
    arguments,
    cap,
    isa_option,
    machine,
    median,
    median_and_range,
    milliseconds,
    ratios,
    take_turns,
)
from ovspec_export import Compression, export_pair

import ovspec
from ovspec.cache.decoder import Decoder
from ovspec.cache.paged import PagedDecoder
from ovspec.ir.compile import MODEL_FILE
from ovspec.ir.device import DeviceOptions
from ovspec.ir.matrix_products import join_products
from ovspec.sampling.logprobs import log_softmax
from ovspec.setup.engine_choice import CompiledModel, load_compiled_model
from ovspec.setup.tuning import TUNING_TEXT_FILE
from ovspec.text.tokenizer import Tokenizer

CONTEXT = 128
PROMPT = "import os\nimport sys\n\n\ndef find_executable(name, path=None):\n    "  # of the loops
FORMATS = {
    "fp32": Compression("fp32"),
    "fp16": Compression("fp16"),
    "int8": Compression("int8"),
    "int8 sym": Compression("int8", sym=True),
    **{f"int4/{size}": Compression("int4", group_size=size, ratio=1.0) for size in (32, 64, 128)},
    **{f"int4/{size} sym": Compression("int4", group_size=size, ratio=1.0, sym=True) for size in (32, 64, 128)},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one thread": {"INFERENCE_NUM_THREADS": 1},
    "not pinned": {"ENABLE_CPU_PINNING": False},
    "hyper-threads too": {"ENABLE_HYPER_THREADING": True},
    "joined": {},
}


class WidthTimes:
    """Decoders that read the same text, and their milliseconds for inferences of some widths at its end.

    An inference of another width than the one before takes longer; the median of ``repeats`` is one of the same width.
    """

    def __init__(
        self,
        decoders: dict[str, Decoder],
        tokenizer: Tokenizer,
        widths: tuple[int, ...] = (1, 2, 4, 8),
        turns: int = 5,
        repeats: int = 6,
    ) -> None:
        self.decoders = decoders
        self.widths = widths
        self.repeats = repeats
        self.text = tokenizer.encode(TUNING_TEXT_FILE.read_text(encoding="utf-8"))[: CONTEXT + max(widths)]
        self.logits = {name: self.read_text(decoder) for name, decoder in decoders.items()}
        self.times = take_turns([(name, width) for name in decoders for width in widths], self.time_width, turns)

    def read_text(self, decoder: Decoder) -> np.ndarray:
        decoder.reset(1)
        return decoder.feed([self.text[:CONTEXT]], [CONTEXT])[0].copy()

    def time_width(self, way: tuple[str, int], _: int) -> float:
        decoder = self.decoders[way[0]]
        ids = self.text[CONTEXT : CONTEXT + way[1]]
        times = []
        for _ in range(self.repeats):
            decoder.truncate(0, CONTEXT)
            times.append(milliseconds(lambda: decoder.feed([ids], [len(ids)])))
        return statistics.median(times)

    @property
    def heads(self) -> list[str]:
        return [f"{width} tokens, ms" for width in self.widths]

    def row(self, name: str) -> list[str]:
        return [median(self.times[name, width]) for width in self.widths]


def load_decoder(folder: Path, properties: dict[str, Any], engine: Any = "auto") -> Decoder:
    device = DeviceOptions(precision="f32", kv_precision="f32", properties={"CACHE_DIR": "", **properties})
    return load_compiled_model(folder, device, engine, "fast").make_decoder()


def compare_formats(model: str, names: list[str], output: Path, isa: str | None) -> None:
    folders = {name: export_format(model, name, output) for name in dict.fromkeys(["fp32", *names])}
    decoders = {}
    for name, folder in folders.items():
        group = 0 if name == "fp32" else min(int(name.split()[0].partition("/")[2] or 128), 128)
        decoders[name] = load_decoder(folder, {"DYNAMIC_QUANTIZATION_GROUP_SIZE": group})
    times = WidthTimes(decoders, Tokenizer(folders["fp32"]))
    print(f"{machine(isa)}\n")
    table = Table("format", "size, MB", "KL, nats", "same top-1", *times.heads)
    reference = log_softmax(times.logits["fp32"])
    for name in names:
        logprobs = log_softmax(times.logits[name])
        kl = (np.exp(reference) * (reference - logprobs)).sum(-1).mean()
        same = (reference.argmax(-1) == logprobs.argmax(-1)).mean()
        megabytes = (folders[name] / "openvino_model.bin").stat().st_size / 1e6
        table.row(name, f"{megabytes:.0f}", f"{kl:.1e}", f"{same:.0%}", *times.row(name))


def export_format(model: str, name: str, output: Path) -> Path:
    folder = output / f"{Path(model).stem}-{name.replace('/', '-').replace(' ', '-')}"
    if not folder.is_dir():
        export_pair(model, None, folder, FORMATS[name])
    return folder


def compare_settings(folder: Path, isa: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        joined = Path(scratch) / "joined"
        products = write_joined(folder, joined)
        folders = dict.fromkeys(SETTINGS, folder) | {"joined": joined}
        decoders = {name: load_decoder(folders[name], SETTINGS[name], "stateful") for name in SETTINGS}
        times = WidthTimes(decoders, Tokenizer(folder))
        print(f"{machine(isa)}; {products} products joined\n")
        table = Table("setting", *times.heads, "same bits")
        for name, logits in times.logits.items():
            table.row(name, *times.row(name), "yes" if np.array_equal(logits, times.logits["as it is"]) else "no")


def write_joined(source: Path, folder: Path) -> int:
    """Write ``source`` with joined products; return how many were."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("openvino_model.*", "ovspec.json"))
    model = ov.Core().read_model(source / MODEL_FILE)
    joined = join_products(model)
    ov.save_model(model, folder / MODEL_FILE, compress_to_fp16=False)
    return joined


def compare_pages(folder: Path, isa: str | None) -> None:
    models = {pages: ovspec.load(folder) for pages in ("small", "large")}
    decoders: dict[str, Decoder] = {pages: lm.target.make_decoder() for pages, lm in models.items()}
    widths = (1, 2, 5, 9)
    WidthTimes(decoders, models["small"].tokenizer, widths, 1, 1)  # weights are packed when they are first used
    seconds = milliseconds(lambda: models["large"].target.ir.large_pages.move_pages(600.0)) / 1e3
    times = WidthTimes(decoders, models["small"].tokenizer, widths, 20, 1)
    print(f"{machine(isa)}; moved in {seconds:.1f} s\n")
    table = Table("pages", *times.heads)
    for pages in decoders:
        table.row(pages, *times.row(pages))


def bare_loop(loaded: CompiledModel, ids: np.ndarray, tokens: int) -> tuple[float, list[int]]:
    """Return the median milliseconds per token after the second, and the generated tokens."""
    decoder = PagedDecoder(loaded.ir)
    text = [int(decoder.feed([ids], [1])[0][0].argmax())]
    decoder._tables.extend(0, len(ids), tokens)  # get all blocks now, so that nothing is bound again
    text.append(int(decoder.feed([np.array(text)], [1])[0][0].argmax()))
    request, (token_ids, positions) = decoder._request.openvino_request, decoder._token_arrays[(1,)]
    past, _ = decoder._kept_lengths[1]

    def infer_next(length: int) -> None:
        token_ids[0], positions[0], past[0] = text[-1], length, length
        decoder._longest[...] = length + 1
        request.start_async()
        request.wait()
        text.append(int(request.get_output_tensor(0).data.reshape(-1).argmax()))

    lengths = range(len(ids) + 1, len(ids) + tokens - 1)
    return statistics.median(milliseconds(lambda length=length: infer_next(length)) for length in lengths), text


def stream_loop(lm: ovspec.LanguageModel, ids: np.ndarray, tokens: int) -> tuple[float, list[int]]:
    """Return the same for ``stream``, which includes the text."""
    moments = list[float]()
    text = list[int]()
    for piece in lm.stream(ids, max_tokens=tokens, ignore_eos=True):
        moments.append(time.perf_counter())
        text += piece.token_ids
    return statistics.median(np.diff(moments[1:])) * 1e3, text


def compare_loops(folder: Path, tokens: int, rounds: int) -> None:
    lm = ovspec.load(folder, "none", arithmetic="fast")  # the bare loop keeps to no rule
    assert lm.target.engine == "paged", "the bare loop needs the paged engine"
    ids = lm.encode(PROMPT)
    loops = {"ovspec": lambda: stream_loop(lm, ids, tokens), "bare": lambda: bare_loop(lm.target, ids, tokens)}
    by_loop = take_turns(loops, lambda name, _: loops[name](), rounds)
    assert all(a[1] == b[1] for a, b in zip(*by_loop.values(), strict=True)), "both must generate the same text"
    ours, bare = ([ms for ms, _ in turns] for turns in by_loop.values())
    print(f"{machine()}\nmedian ms per token: ovspec {median(ours, 3)}, bare loop {median(bare, 3)}; ", end="")
    print(f"{median_and_range(ratios(bare, ours), 3)} of its speed in {len(ours)} turns")


def main() -> None:
    args = arguments(
        __doc__,
        ("formats", "settings", "pages", "loop"),
        "model",
        formats=Option(list(FORMATS), choices=FORMATS),
        output=Option(Path(".cache/formats"), "the folder of the formats"),
        isa=isa_option(),
        tokens=Option(96, "of a loop"),
        rounds=Option(8, "of the loops"),
    )
    cap(args.isa)
    match args.what:
        case "formats":
            compare_formats(str(args.model), args.formats, args.output, args.isa)
        case "settings":
            compare_settings(args.model, args.isa)
        case "pages":
            compare_pages(args.model, args.isa)
        case _:
            compare_loops(args.model, args.tokens, args.rounds)


if __name__ == "__main__":
    main()
