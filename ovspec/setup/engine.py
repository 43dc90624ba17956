"""Choose a model's engine: stateful runs everywhere, paged runs where it gives the same logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import openvino as ov

from ovspec.decoders.base import Arithmetic, Rollback, SessionDecoder
from ovspec.decoders.paged import PagedDecoder
from ovspec.decoders.recurrent import decoder_of, trimming
from ovspec.decoders.stateful import StatefulDecoder
from ovspec.errors import OvspecError
from ovspec.files import remember, remembered
from ovspec.ir.attention_mask import UNBOUNDED, narrowest_window
from ovspec.ir.compile import CompiledIR, compile_ir, last_line
from ovspec.ir.device import DeviceOptions, check_device
from ovspec.ir.memory import room_for
from ovspec.ir.paged_attention import NotPaged, attention_windows, pair_queries, to_paged
from ovspec.setup.exactness import find_exactness
from ovspec.setup.probing import Probe, find_probe, memory_file
from ovspec.text.vocabulary import ALL_IDS, KnownIds

EngineName = Literal["stateful", "paged"]
EngineChoice = Literal["auto", "stateful", "paged"]
# If a model's attention window has at most this many slots, the text that compares the engines is longer than it.
LONGEST_WINDOW = 256
# The properties that round least. Models compiled with them are needed only briefly, so they are not cached.
EXACT = {
    "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "CACHE_DIR": "",
}  # fmt: skip


@dataclass
class CompiledModel:
    """A ``CompiledIR`` and the engine that was chosen to run it."""

    ir: CompiledIR
    engine: EngineName
    reason: str  # why this engine was chosen
    rollback: Rollback
    arithmetic: Arithmetic = "fast"
    promise: str = "fast"  # "exact" only if the probe found no difference; otherwise what it found, in words
    profile: str | None = None  # the setting that a profile chose
    verify_ms: dict[int, float] | None = None  # measured per inference, by width in tokens; the widest is a prompt
    change_ms: float | None = None  # measured, added to an inference of another width than the one before

    @property
    def guess_is_free(self) -> bool:
        """Whether one token proposed for a single text costs nothing, because two are computed, and changes no bit."""
        return self.engine == "paged" and self.promise == "exact"

    def decoder(self, vocabulary: KnownIds = ALL_IDS) -> SessionDecoder:
        """Return a decoder with its own infer request and KV cache."""
        if self.engine == "paged":
            return PagedDecoder(self.ir, vocabulary, self.arithmetic)
        return decoder_of(self.ir, self.rollback, vocabulary, self.arithmetic)


@dataclass(frozen=True)
class PagedCheck:
    """Whether the paged decoder can run a model, and the reason."""

    usable: bool
    reason: str


def load_ir(
    folder: Path,
    options: DeviceOptions,
    wanted: EngineChoice = "auto",
    exported: Probe | None = None,
    arithmetic: Arithmetic = "fast",
) -> CompiledModel:
    """Compile the model in ``folder`` for the ``wanted`` engine; "auto" takes paged if it agrees with stateful.

    Raises OvspecError like ``compile_ir``, or if the wanted engine can't run this model.
    """
    loaded = load_engine(folder, options, wanted, exported, arithmetic)
    if arithmetic == "fast":
        return loaded
    loaded.arithmetic = loaded.promise = "exact"
    found = find_exactness(loaded.ir, loaded.decoder, loaded.engine, options.cache_folder)
    if not found.exact:
        loaded.promise = f"inexact ({found.differing} of {found.positions} probed positions differ)"
        if loaded.engine == "stateful":
            loaded.arithmetic = "fast"  # cutting, and a request for each row, would cost time and gain nothing
    elif loaded.engine == "stateful":
        loaded.rollback = trimming(loaded.rollback)
    return loaded


def load_engine(
    folder: Path, options: DeviceOptions, wanted: EngineChoice, exported: Probe | None, arithmetic: Arithmetic
) -> CompiledModel:
    """Compile the model for the engine that runs it, see ``load_ir``."""
    paged = PagedCheck(False, "as requested") if wanted == "stateful" else check_paged(folder, options)
    reason = paged.reason
    if paged.usable:
        try:
            ir = compile_paged(folder, options, arithmetic)
            if "KV_CACHE_PRECISION" in options.fixed:
                # Not every cache type works with every precision.
                PagedDecoder(ir, arithmetic=arithmetic).feed([np.zeros(1, dtype=np.int64)], [1])
            return CompiledModel(ir, "paged", "as requested" if wanted == "paged" else reason, PagedDecoder.rollback)
        except OvspecError as error:
            reason = last_line(error)
    if wanted == "paged":
        raise OvspecError(f"{folder}: `engine='paged'` is not possible: {reason}.")
    ir = compile_ir(folder, options)
    return CompiledModel(ir, "stateful", reason, find_probe(ir, options.cache_folder, exported).rollback)


def compile_paged(folder: Path, options: DeviceOptions, arithmetic: Arithmetic = "exact") -> CompiledIR:
    """Compile like ``compile_ir``, rewritten for the paged decoder; raises NotPaged if that is impossible."""

    def rewrite(model: ov.Model) -> None:
        to_paged(model)
        if arithmetic == "exact":
            pair_queries(model)

    # Not cached: OpenVINO 2026.4 can't read a paged model back, because the head sizes are lost.
    return compile_ir(folder, replace(options, properties=options.properties | {"CACHE_DIR": ""}), rewrite)


def check_paged(folder: Path, options: DeviceOptions) -> PagedCheck:
    """Return the result of ``compare_engines``, cached on disk; other devices than the CPU have no paged engine."""
    if (device := check_device(options.device)) != "CPU":
        return PagedCheck(False, f"the paged engine runs on the CPU only, and the device is {device}")
    file = memory_file("engines", folder, f"OpenVINO {ov.get_version()}", options.cache_folder)
    found = remembered(PagedCheck, file)
    if not found:
        found = compare_engines(folder, options)
        remember(file, found)
    return found


def compare_engines(folder: Path, options: DeviceOptions) -> PagedCheck:
    """Return whether the paged decoder gives the same logits as the stateful one for the model in ``folder``.

    Both run with the properties that round least, or with those of ``options`` if 16-bit weights widened to 32 bits
    would not fit into memory. They run one after the other, because memory may hold the model only once.
    """
    setting = DeviceOptions(properties=EXACT if room_for(folder, 3) else options.fixed | {"CACHE_DIR": ""})
    stateful = compile_ir(folder, setting)
    if stateful.recurrent_states or not stateful.kv_states:
        return PagedCheck(False, "it has states other than keys and values")
    if stateful.config.rope_switch:
        return PagedCheck(False, "its rotary frequencies change with the length of the text")
    window = narrowest_window(stateful)
    # Random ids, more than the window holds unless the window is longer than LONGEST_WINDOW.
    length = 45 + (window if window <= LONGEST_WINDOW else 0)
    text, junk = np.split(np.random.default_rng(0).integers(0, stateful.logits_width, length + 40), [length])
    decoder = StatefulDecoder(stateful, Rollback(None))
    expected = decoder.feed([text], [8])[0].copy()
    decoder.reset(1)
    decoder.feed([text[:-8]], [0])
    # Feeding the same text in other pieces changes the logits by rounding; the paged decoder may differ as much.
    rounding = np.abs(decoder.feed([text[-8:]], [8])[0] - expected).max()
    del decoder, stateful
    windows: set[int | None] = set()

    def rewrite(model: ov.Model) -> None:
        to_paged(model)
        windows.update(attention_windows(model))
        pair_queries(model)

    try:
        paged = PagedDecoder(compile_ir(folder, setting, rewrite))
        narrowest = min((found for found in windows if found is not None), default=UNBOUNDED)
        if narrowest != window:
            return PagedCheck(False, f"its attention window is {window} in the model and {narrowest} when paged")
        seen = trial(paged, text, junk)
    except NotPaged as error:
        return PagedCheck(False, str(error))
    except OvspecError as error:
        return PagedCheck(False, f"OpenVINO cannot run it paged ({last_line(error)})")
    allowed = 10 * rounding + 1e-4 * expected.std()
    equal = all(np.abs(logits - expected[-len(logits) :]).max() <= allowed for logits in seen)
    return PagedCheck(equal, "it agrees with the stateful decoder" if equal else "its logits differ when paged")


def trial(decoder: PagedDecoder, text: np.ndarray, junk: np.ndarray) -> list[np.ndarray]:
    """Return the last logits of ``text``: fed whole, beside a forked row with other text, and after rollbacks."""
    begin, nothing = len(text) - 8, text[:0]
    whole = decoder.feed([text], [8])[0].copy()
    decoder.truncate(0, 5)
    decoder.feed([junk], [1])
    decoder.truncate(0, 5)
    decoder.feed([text[5:begin]], [0])
    decoder.reorder([0, 0])
    beside_junk = decoder.feed([text[begin:], junk[:11]], [8, 1])[0].copy()
    decoder.truncate(1, begin)
    other_row = decoder.feed([nothing, text[begin:]], [0, 8])[1].copy()
    decoder.truncate(0, len(text) - 3)
    again = decoder.feed([text[-3:], nothing], [3, 0])[0]
    return [whole, beside_junk, other_row, again]
