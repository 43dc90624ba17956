"""Time forward passes of a model: by both engines, in weight formats and sizes of pages, and in a bare loop.

    python scripts/bench/inferences.py engines MODEL [--cache-dir DIR] [--contexts 128,1024,4096]
    python scripts/bench/inferences.py formats MODEL [--formats int8,int4/64] [--isa AVX2] [--output .cache/formats]
    python scripts/bench/inferences.py pages MODEL
    python scripts/bench/inferences.py rollbacks MODEL [--isa AVX2]
    python scripts/bench/inferences.py loop MODEL [--tokens 96] [--rounds 8]

Everything compared takes turns. Times of formats and pages are milliseconds for each width after 128 tokens of text.
Use an idle machine.

engines: both engines, OpenVINO's default and the profile from 'ovspec tune', on an exported model of real size, such as
    from scripts/train/bench_pair.py: prompts, widths at several contexts, and the memory's speed.
formats: MODEL, a checkpoint or a GGUF file, in each format; the output folder keeps the exports. In fast arithmetic and
    f32, with dynamic quantisation in groups as large as the weights' or 128; for a GGUF file also "llama.cpp". KL is
    the divergence of a text's next tokens from fp32's.
pages: an IR is loaded twice, and the weights of one copy are moved into large pages.
rollbacks: rounds with rejected tokens, by both engines, in exact arithmetic and f32; for models with recurrent states.
    A round feeds some tokens and keeps the first; the next round feeds the forgotten tokens again.
loop: plain decoding beside a bare loop over the same compiled model, with arrays bound once, start_async, wait and
    argmax. The loop leaves out sampling, stop strings, text, statistics and drafters.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from figures import Table, machine, median, median_and_range, milliseconds, ratios, take_turns
from harness import ISA, Option, Worker, arguments, bytes_a_step, cap, read_bandwidth
from ovspec_export import Compression, export_pair
from ovspec_export.compression import KEEP

import ovspec
from ovspec.base.files import read_text
from ovspec.cache.decoder import Decoder, RollbackMethod
from ovspec.cache.hybrid import paged_decoder_class
from ovspec.cache.paged import PagedDecoder
from ovspec.cache.stateful import StatefulDecoder
from ovspec.ir.compile import MODEL_FILE, compile_ir
from ovspec.ir.device import DeviceOptions
from ovspec.ir.memory import kv_bytes_per_token
from ovspec.sampling.logprobs import log_softmax
from ovspec.setup.engine_choice import CompiledModel, EngineName, load_compiled_model
from ovspec.setup.paging import compile_paged
from ovspec.setup.profile import EngineSetting, read_profile
from ovspec.setup.tuning import TUNING_TEXT_FILE
from ovspec.text.tokenizer import Tokenizer

CONTEXT = 128
LOOP_PROMPT = "import os\nimport sys\n\n\ndef find_executable(name, path=None):\n    "  # for the loops
FORMATS = {
    "fp32": Compression("fp32"),
    "fp16": Compression("fp16"),
    "int8": Compression("int8"),
    "int8 sym": Compression("int8", sym=True),
    KEEP: Compression(KEEP),  # for a quantised MODEL
    **{f"int4/{size}": Compression("int4", group_size=size, ratio=1.0) for size in (32, 64, 128)},
    **{f"int4/{size} sym": Compression("int4", group_size=size, ratio=1.0, sym=True) for size in (32, 64, 128)},
}
LLAMA_CPP = "llama.cpp"


class WidthTimes:
    """Decoders with the same text, and their milliseconds for forward passes of some widths at its end.

    A pass after a pass of another width takes longer; the median of ``repeats`` passes is for an unchanged width.
    """

    def __init__(
        self,
        decoders: Mapping[str, Decoder | Worker],
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
        self.times = take_turns(product(decoders, widths), self.time_width, turns)

    def read_text(self, decoder: Decoder | Worker) -> np.ndarray:
        if isinstance(decoder, Worker):
            with tempfile.NamedTemporaryFile(suffix=".npy") as file:
                self.time_in_worker(decoder, 1, 0, file.name)
                return np.load(file.name)
        decoder.reset(1)
        return decoder.feed([self.text[:CONTEXT]], [CONTEXT])[0].copy()

    def time_width(self, way: tuple[str, int], _: int) -> float:
        decoder = self.decoders[way[0]]
        if isinstance(decoder, Worker):
            return statistics.median(self.time_in_worker(decoder, way[1], self.repeats))
        ids = self.text[CONTEXT : CONTEXT + way[1]]
        times = []
        for _ in range(self.repeats):
            decoder.truncate(0, CONTEXT)
            times.append(milliseconds(lambda: decoder.feed([ids], [len(ids)])))
        return statistics.median(times)

    def time_in_worker(self, worker: Worker, width: int, repeats: int, logits: str | None = None) -> list[float]:
        ids = self.text[: CONTEXT + width].tolist()
        return worker.answer({"ids": ids, "context": CONTEXT, "repeats": repeats, "logits": logits})["ms"]

    @property
    def heads(self) -> list[str]:
        return [f"{width} tokens, ms" for width in self.widths]

    def row(self, name: str) -> list[str]:
        return [median(self.times[name, width]) for width in self.widths]


def load_decoder(folder: Path, properties: dict[str, Any], engine: Any = "auto") -> Decoder:
    device = DeviceOptions(precision="f32", kv_precision="f32", properties={"CACHE_DIR": "", **properties})
    return load_compiled_model(folder, device, engine, "fast").make_decoder()


def compare_formats(args: Namespace) -> None:
    exported = [name for name in dict.fromkeys(["fp32", *args.formats]) if name != LLAMA_CPP]
    folders = {name: export_format(args.model, name, args.output) for name in exported}
    groups = {name: min(int(name.split()[0].partition("/")[2] or 128), 128) for name in folders} | {"fp32": 0, KEEP: 32}
    key = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
    decoders: dict[str, Any] = {name: load_decoder(folder, {key: groups[name]}) for name, folder in folders.items()}
    files = {name: folder / MODEL_FILE.replace(".xml", ".bin") for name, folder in folders.items()}
    with contextlib.ExitStack() as stack:
        if LLAMA_CPP in args.formats:
            worker = Worker("llamacpp", {"task": "widths", "target": str(args.model)})
            decoders[LLAMA_CPP] = stack.enter_context(worker)
            files[LLAMA_CPP] = args.model
        times = WidthTimes(decoders, Tokenizer(folders["fp32"]), (1, 2, 4, 8, 16))
    print(f"{machine(args.isa)}\n")
    table = Table("format", "size, MB", "KL, nats", "same top-1", *times.heads)
    reference = log_softmax(times.logits["fp32"])
    for name in args.formats:
        logprobs = log_softmax(times.logits[name])
        kl = (np.exp(reference) * (reference - logprobs)).sum(-1).mean()
        same = (reference.argmax(-1) == logprobs.argmax(-1)).mean()
        table.row(name, f"{files[name].stat().st_size / 1e6:.0f}", f"{kl:.1e}", f"{same:.0%}", *times.row(name))


def export_format(model: Path, name: str, output: Path) -> Path:
    folder = output / f"{model.stem}-{name.replace('/', '-').replace(' ', '-')}"
    if not folder.is_dir():
        export_pair(str(model), None, folder, FORMATS[name])
    return folder


def compare_pages(args: Namespace) -> None:
    models = {pages: ovspec.load(args.model) for pages in ("small", "large")}
    decoders: dict[str, Decoder] = {pages: lm.target.make_decoder() for pages, lm in models.items()}
    widths = (1, 2, 5, 9)
    WidthTimes(decoders, models["small"].tokenizer, widths, 1, 1)  # weights are packed at their first use
    seconds = milliseconds(lambda: models["large"].target.ir.large_page_mover.move_weights_for(600.0)) / 1e3
    times = WidthTimes(decoders, models["small"].tokenizer, widths, 20, 1)
    print(f"{machine(args.isa)}; moved in {seconds:.1f} s\n")
    table = Table("pages", *times.heads)
    for pages in decoders:
        table.row(pages, *times.row(pages))


def compare_rollbacks(args: Namespace) -> None:
    device = DeviceOptions(precision="f32", kv_precision="f32", properties={"CACHE_DIR": ""})
    engines: tuple[EngineName, ...] = ("stateful", "paged")
    models = {engine: load_compiled_model(args.model, device, engine, "exact") for engine in engines}
    decoders = {engine: model.make_decoder() for engine, model in models.items()}
    text = np.resize(Tokenizer(args.model).encode(read_text(TUNING_TEXT_FILE)), 4 * CONTEXT)

    def time_round(way: tuple[EngineName, tuple[int, int]], _: int) -> float:
        decoder = decoders[way[0]]
        width, kept = way[1]
        decoder.reset(1)
        decoder.feed([text[:CONTEXT]], [1])

        def run_round(length: int) -> None:
            unread = text[len(decoder.rows[0]) : length + width]
            decoder.feed([unread], [width])
            decoder.truncate(0, length + kept)

        lengths = range(CONTEXT, CONTEXT + 8 * kept, kept)
        return statistics.median([milliseconds(lambda length=length: run_round(length)) for length in lengths][2:])

    rounds = ((1, 1), (5, 5), (5, 3), (5, 1), (16, 16), (16, 4))
    times = take_turns(product(engines, rounds), time_round, 12)
    print(f"{machine(args.isa)}; {', '.join(f'{name}: {model.arithmetic_note}' for name, model in models.items())}\n")
    table = Table("tokens", "kept", *(f"{engine}, ms" for engine in engines), "paged / stateful with all kept")
    for width, kept in rounds:
        ways = [times[engine, (width, kept)] for engine in engines]
        all_kept = times["stateful", (width, width)]
        table.row(width, kept, *map(median, ways), median_and_range(ratios(ways[1], all_kept)))
    decoder = decoders["paged"]
    decoder.reset(8)
    decoder.feed([text[row : row + CONTEXT] for row in range(8)], [1] * 8)
    rows_ms = [milliseconds(lambda: decoder.feed([text[:1]] * 8, [1] * 8)) for _ in range(12)]
    state_bytes = sum(tensor.size for name, tensor in decoder.dump().items() if "state" in name) * 4
    token_kilobytes = kv_bytes_per_token(models["paged"].ir) / 1e3
    print(
        f"\n8 rows: {median(rows_ms[2:])} ms; a token: {token_kilobytes:.1f} kB, a snapshot: {state_bytes / 1e6:.1f} MB"
    )


def bare_loop(loaded: CompiledModel, ids: np.ndarray, tokens: int) -> tuple[float, list[int]]:
    """Return the median milliseconds per token after the second, and the generated tokens."""
    decoder = PagedDecoder(loaded.ir)
    text = [int(decoder.feed([ids], [1])[0][0].argmax())]
    decoder._tables.extend(0, len(ids), tokens)  # get all blocks now, to avoid binding again
    text.append(int(decoder.feed([np.array(text)], [1])[0][0].argmax()))
    request, (token_ids, positions) = decoder._request.openvino_request, decoder._token_arrays[(1,)]
    past, _ = decoder._reused_length_arrays[1]

    def infer_next(length: int) -> None:
        token_ids[0], positions[0], past[0] = text[-1], length, length
        decoder._longest_context[...] = length + 1
        request.start_async()
        request.wait()
        text.append(int(request.get_output_tensor(0).data.reshape(-1).argmax()))

    lengths = range(len(ids) + 1, len(ids) + tokens - 1)
    return statistics.median(milliseconds(lambda length=length: infer_next(length)) for length in lengths), text


def stream_loop(lm: ovspec.LanguageModel, ids: np.ndarray, tokens: int) -> tuple[float, list[int]]:
    """Return the same for ``stream``, including the work for the text."""
    moments = list[float]()
    text = list[int]()
    for piece in lm.stream(ids, max_tokens=tokens, ignore_eos=True):
        moments.append(time.perf_counter())
        text += piece.token_ids
    return statistics.median(np.diff(moments[1:])) * 1e3, text


def compare_loops(args: Namespace) -> None:
    lm = ovspec.load(args.model, "none", arithmetic="fast")  # the bare loop has no feed rule
    assert lm.target.engine == "paged", "the bare loop needs the paged engine"
    ids = lm.encode(LOOP_PROMPT)
    tokens = args.tokens
    loops = {"ovspec": lambda: stream_loop(lm, ids, tokens), "bare": lambda: bare_loop(lm.target, ids, tokens)}
    by_loop = take_turns(loops, lambda name, _: loops[name](), args.rounds)
    assert all(a[1] == b[1] for a, b in zip(*by_loop.values(), strict=True)), "both must generate the same text"
    ours, bare = ([ms for ms, _ in turns] for turns in by_loop.values())
    print(f"{machine()}\nmedian ms per token: ovspec {median(ours, 3)}, bare loop {median(bare, 3)}; ", end="")
    print(f"{median_and_range(ratios(bare, ours), 3)} of its speed in {len(ours)} turns")


# ---------------------------------------------------------------- engines

ENGINE_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
REPEATS = 5
CHUNK = 128
PROMPT_TOKENS = 1024
GROUP = 128  # of dynamic quantisation
ENGINE_SETTINGS = {
    "OpenVINO's default": EngineSetting("stateful"),
    "stateful f32": EngineSetting("stateful", "f32", GROUP),
    "paged f32": EngineSetting("paged", "f32", GROUP),
    "paged bf16": EngineSetting("paged", "bf16", GROUP),
}
CACHES = {"OpenVINO's default": "u8"}  # KV cache types other than the arithmetic's


def decoder_for(folder: Path, setting: EngineSetting, kv_precision: str | None) -> Decoder:
    device = DeviceOptions(kv_precision=kv_precision, properties=setting.properties | {"CACHE_DIR": ""})
    if setting.engine == "paged":
        ir = compile_paged(folder, device, two_queries=False)  # no additional queries
        return paged_decoder_class(ir)(ir)
    return StatefulDecoder(compile_ir(folder, device), RollbackMethod("mask"), compaction_threshold=10**9)


def verify_curves(decoders: dict[str, Decoder], text: np.ndarray, context: int) -> dict[str, list[float]]:
    """Return each decoder's milliseconds of a forward pass by width, at a context of ``context`` tokens."""
    for decoder in decoders.values():
        decoder.reset(1)
        decoder.feed([text[:context]], [1])

    def curve(name: str, _: int) -> list[float]:
        decoder = decoders[name]
        times = []
        for width in (1, *ENGINE_WIDTHS):  # width 1 is a warm-up: the first pass after another model's is slower
            times.append(milliseconds(lambda: decoder.feed([text[:width]], [width])))  # noqa: B023
            decoder.truncate(0, context)
        if isinstance(decoder, StatefulDecoder):
            decoder.compact()  # dead slots of truncated tokens would cost time
        return times[1:]

    curves = take_turns(decoders, curve, REPEATS)
    return {name: list(map(statistics.median, zip(*turns, strict=True))) for name, turns in curves.items()}


def prefills(decoders: dict[str, Decoder], text: np.ndarray) -> dict[tuple[str, int], float]:
    """Return the seconds of prefill, by decoder and chunk size."""

    def read(way: tuple[str, int], _: int) -> float:
        name, chunk = way
        began = time.perf_counter()
        decoders[name].reset(1)
        for start in range(0, PROMPT_TOKENS, chunk):
            decoders[name].feed([text[start : start + chunk]], [1])
        return time.perf_counter() - began

    times = take_turns(product(decoders, (PROMPT_TOKENS, CHUNK)), read, 2)
    return {way: statistics.median(seconds) for way, seconds in times.items()}


def compare_engines(args: Namespace) -> None:
    settings = dict(ENGINE_SETTINGS)
    print(f"{args.model.name} of {args.model.parent.name}, {machine()}; dynamic quantisation in groups of {GROUP}")
    profile = read_profile(args.model, DeviceOptions(cache_dir=args.cache_dir))
    if profile and (best := profile.choose_measurement(DeviceOptions(), "auto")):
        print(f"profile: {best.setting}; measured in {profile.seconds:.0f} s")
        if best.setting not in settings.values():
            settings["profile"] = best.setting
    ids = Tokenizer(args.model).encode(read_text(TUNING_TEXT_FILE))[:512]
    text = np.resize(ids, max(args.contexts) + PROMPT_TOKENS)
    decoders = {name: decoder_for(args.model, setting, CACHES.get(name)) for name, setting in settings.items()}
    seconds = prefills(decoders, text)
    print(f"\nSeconds to read a prompt of {PROMPT_TOKENS} tokens\n")
    table = Table("setting", "whole prompt at once", f"in chunks of {CHUNK}")
    for name in settings:
        table.row(name, f"{seconds[name, PROMPT_TOKENS]:.2f}", f"{seconds[name, CHUNK]:.2f}")
    curves = {}
    for context in args.contexts:
        curves[context] = verify_curves(decoders, text, context)
        print(f"\nMilliseconds for an inference of m tokens at a context of {context} tokens\n")
        table = Table("setting", *(f"m={width}" for width in ENGINE_WIDTHS), "m=8 / m=1")
        for name, curve in curves[context].items():
            table.row(name, *(f"{ms:.1f}" for ms in curve), f"{curve[ENGINE_WIDTHS.index(8)] / curve[0]:.2f}")
    weights = bytes_a_step(args.model)
    bandwidth = read_bandwidth(1 << 30)
    decoders.clear()
    print(f"\nA step reads {weights / 1e6:.0f} MB of weights; memory is read at {bandwidth / 1e9:.1f} GB/s\n")
    table = Table("setting", "context", "weights read, GB/s", "share of the bandwidth")
    for name in settings:
        for context in args.contexts[:2]:
            speed = weights / (curves[context][name][0] / 1e3)
            table.row(name, context, f"{speed / 1e9:.1f}", f"{speed / bandwidth:.0%}")


# ---------------------------------------------------------------- the command


def main() -> None:
    compare = {"engines": compare_engines, "formats": compare_formats, "pages": compare_pages}
    compare |= {"rollbacks": compare_rollbacks, "loop": compare_loops}
    args = arguments(
        __doc__,
        tuple(compare),
        "model",
        formats=Option([name for name in FORMATS if name != KEEP], choices=[*FORMATS, LLAMA_CPP]),
        output=Option(Path(".cache/formats"), "the folder of the formats"),
        isa=ISA,
        contexts=[128, 1024, 4096],
        cache_dir=Option(Path, "folder in which the profile is kept"),
        tokens=Option(96, "of a loop"),
        rounds=Option(8, "of the loops"),
    )
    cap(args.isa)
    compare[args.what](args)


if __name__ == "__main__":
    main()
