"""Which decoder runs a model: the stateful one works everywhere, the paged one where it gives the same logits."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import openvino as ov

from ovspec.decoders.base import Rollback, SessionDecoder
from ovspec.decoders.paged import NotPaged, PagedDecoder, attention_windows, to_paged
from ovspec.decoders.recurrent import decoder_of
from ovspec.decoders.stateful import COMPACT_AT, StatefulDecoder
from ovspec.errors import OvspecError
from ovspec.files import read_json, write_atomically
from ovspec.ir.compile import CompiledIR, compile_ir, last_line
from ovspec.ir.device import DeviceOptions, check_device
from ovspec.ir.memory import room_for
from ovspec.setup.probing import UNBOUNDED, Probe, find_probe, mask_bound, memory_file
from ovspec.text.vocabulary import ALL_IDS, KnownIds

EngineName = Literal["stateful", "paged"]
EngineChoice = Literal["auto", "stateful", "paged"]
ENGINES = get_args(EngineChoice)
# A window up to this many slots is passed by the text that compares the engines.
LONGEST_WINDOW = 256
AGREES = "it agrees with the stateful decoder"
# The arithmetic that rounds least, compiled for a moment only.
EXACT = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    "CACHE_DIR": "",
}


@dataclass
class CompiledModel:
    """A compiled model and how it is driven.

    ``reason`` says why this engine. ``compact_at`` is the stateful engine's: dead slots at which it compacts.
    ``profile`` is the setting that a profile chose, ``verify_ms`` what it measured: milliseconds by width, the
    widest reading a prompt.
    """

    ir: CompiledIR
    engine: EngineName
    reason: str
    rollback: Rollback
    compact_at: int = COMPACT_AT
    profile: str | None = None
    verify_ms: dict[int, float] | None = None

    def decoder(self, vocabulary: KnownIds = ALL_IDS) -> SessionDecoder:
        """A decoder with a request and a cache of its own."""
        if self.engine == "paged":
            return PagedDecoder(self.ir, vocabulary)
        return decoder_of(self.ir, self.rollback, vocabulary, self.compact_at)


def load_ir(
    folder: Path,
    options: DeviceOptions,
    wanted: EngineChoice = "auto",
    exported: Probe | None = None,
    compact_at: int = COMPACT_AT,
) -> CompiledModel:
    """Compile the model in ``folder`` for the engine that is ``wanted``.

    "auto" takes the paged one if it agrees with the stateful one, which is tried once for every model and
    remembered beside the compiled models.

    Raises:
        OvspecError: as ``compile_ir``, or the engine that is wanted can't run this model.
    """
    reason = "asked for" if wanted == "stateful" else verdict_on_paged(folder, options)
    if reason == AGREES:
        try:
            ir = compile_paged(folder, options)
            if "KV_CACHE_PRECISION" in options.fixed:
                PagedDecoder(ir).feed([np.zeros(1, dtype=np.int64)], [1])  # not every cache goes with every arithmetic
            return CompiledModel(ir, "paged", "asked for" if wanted == "paged" else AGREES, PagedDecoder.rollback)
        except OvspecError as error:
            reason = last_line(error)
    if wanted == "paged":
        raise OvspecError(f"{folder}: --engine paged is not possible: {reason}.")
    ir = compile_ir(folder, options)
    return CompiledModel(ir, "stateful", reason, find_probe(ir, options.cache_folder, exported).rollback, compact_at)


def compile_paged(folder: Path, options: DeviceOptions) -> CompiledIR:
    """As ``compile_ir``, rewritten for the paged decoder; raises NotPaged where that can't be.

    Not cached: OpenVINO 2026.4 writes a paged model into its cache and can't read it back, because the head sizes
    of paged attention are lost, so each load would compile it and write it again.
    """
    return compile_ir(folder, replace(options, properties=options.properties | {"CACHE_DIR": ""}), to_paged)


# ---------------------------------------------------------------- comparing


def verdict_on_paged(folder: Path, options: DeviceOptions) -> str:
    """AGREES, or why the paged decoder can't be used for the model in ``folder``; remembered."""
    device = check_device(options.device)
    if device != "CPU":
        return f"the paged one is made for the CPU, the device is {device}"
    file = memory_file("engines", folder, f"OpenVINO {ov.get_version()}", options.cache_folder)
    try:
        known = read_json(file) if file else {}
    except OvspecError:  # damaged
        known = {}
    if "paged" in known:
        return str(known["paged"])
    verdict = compare_engines(folder, options)
    if file:
        with contextlib.suppress(OSError):  # a cache that can't be written is no error
            write_atomically(file, json.dumps({"paged": verdict}))
    return verdict


def compare_engines(folder: Path, options: DeviceOptions) -> str:
    """AGREES, or why the paged decoder can't be used for the model in ``folder``.

    Both run in the arithmetic that rounds least, or that of ``options`` where 16-bit weights made to 32 would not
    fit into memory; one after the other, because a model may fit only once.
    """
    ours = EXACT if room_for(folder, 3) else options.fixed | {"CACHE_DIR": ""}
    setting = DeviceOptions(properties=ours)
    stateful = compile_ir(folder, setting)
    if stateful.recurrent_states or not stateful.kv_states:
        return "it has states that are no keys and values"
    window = narrowest_window(stateful)
    text, junk = trial_texts(stateful, window)
    decoder = StatefulDecoder(stateful, Rollback(None))
    expected = decoder.feed([text], [8])[0].copy()
    decoder.reset(1)
    decoder.feed([text[:-8]], [0])
    # What feeding the same text in other pieces does is rounding, and the paged decoder can't be held to less.
    rounding = np.abs(decoder.feed([text[-8:]], [8])[0] - expected).max()
    del decoder, stateful
    windows: set[int | None] = set()

    def rewrite(model: ov.Model) -> None:
        to_paged(model)
        windows.update(attention_windows(model))

    try:
        paged = PagedDecoder(compile_ir(folder, setting, rewrite))
        narrowest = min((found for found in windows if found is not None), default=UNBOUNDED)
        if narrowest != window:
            return f"its attention window is {window} in the model and {narrowest} when paged"
        seen = trial(paged, text, junk)
    except NotPaged as error:
        return str(error)
    except OvspecError as error:
        return f"OpenVINO refuses it ({last_line(error)})"
    allowed = 10 * rounding + 1e-4 * expected.std()
    equal = all(np.abs(logits - expected[-len(logits) :]).max() <= allowed for logits in seen)
    return AGREES if equal else "its logits differ when paged"


def narrowest_window(ir: CompiledIR) -> int:
    """Slots that the narrowest layer sees, by the config and by the IR's own attention mask."""
    return min(bound for bound in (ir.attention_window, mask_bound(ir), UNBOUNDED) if bound)


def trial_texts(ir: CompiledIR, window: int) -> tuple[np.ndarray, np.ndarray]:
    """(text, junk): random ids, more of them than a window holds unless that is long."""
    vocab = ir.compiled.output(0).get_partial_shape()[-1].get_length()
    length = 45 + (window if window <= LONGEST_WINDOW else 0)
    ids = np.random.default_rng(0).integers(0, vocab, length + 40)
    return ids[:length], ids[length:]


def trial(decoder: PagedDecoder, text: np.ndarray, junk: np.ndarray) -> list[np.ndarray]:
    """Logits of the last tokens of ``text``: fed whole, after a rollback, and in forked rows that go on differently."""
    begin = len(text) - 8
    whole = decoder.feed([text], [8])[0].copy()
    decoder.truncate(0, 5)
    decoder.feed([junk], [1])
    decoder.truncate(0, 5)
    decoder.feed([text[5:begin]], [0])
    decoder.reorder([0, 0])
    beside_junk = decoder.feed([text[begin:], junk[:11]], [8, 1])[0].copy()
    decoder.truncate(1, begin)
    nothing = text[:0]
    other_row = decoder.feed([nothing, text[begin:]], [0, 8])[1].copy()
    decoder.truncate(0, len(text) - 3)
    again = decoder.feed([text[-3:], nothing], [3, 0])[0]
    return [whole, beside_junk, other_row, again]
