"""Choose a model's engine: stateful runs everywhere, paged runs where it gives the same logits."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import openvino as ov

from ovspec.base.errors import OvspecError
from ovspec.base.files import remember, remembered
from ovspec.base.progress import note
from ovspec.cache.blocks import BlockTensors
from ovspec.cache.decoder import FAST, FAST_ON_GPU, Arithmetic, Decoder, FeedRule, Rollback
from ovspec.cache.paged import PagedDecoder
from ovspec.cache.stateful import StatefulDecoder, decoder_of, trimming
from ovspec.ir.attention_mask import UNBOUNDED, narrowest_window
from ovspec.ir.compile import MODEL_FILE, CompiledIR, check_weights, compile_ir, last_line
from ovspec.ir.crashes import fault_of, without_crash
from ovspec.ir.device import (
    EXACT_KV_PRECISIONS,
    DeviceOptions,
    check_device,
    compile_properties,
    is_gpu,
    may_use_gpu,
    precision_of,
)
from ovspec.ir.heads import HIDDEN, give_features
from ovspec.ir.instruction_set import instruction_set
from ovspec.ir.memory import room_for
from ovspec.ir.paged_attention import NotPaged, attention_windows, pair_queries, to_paged
from ovspec.ir.products import CUTTING, cut_products, join_products
from ovspec.setup.exactness import (
    SHORT,
    Exactness,
    Trial,
    exactness_file,
    find_exactness,
    find_exactness_on_gpu,
    known_exactness,
    logits_bits,
    wait_for_kernels,
)
from ovspec.setup.probing import find_probe, memory_file
from ovspec.text.vocabulary import ALL_IDS, KnownIds

EngineName = Literal["stateful", "paged"]
EngineChoice = Literal["auto", "stateful", "paged"]
# If a model's attention window has at most this many slots, the text that compares the engines is longer than it.
LONGEST_WINDOW = 256
# Where an inference of two tokens takes at most this many times as long as the narrowest one, lookup is the default.
FREE = 1.1
# Bytes of weights up to which products are joined: OpenVINO keeps the joined weights in memory beside its own form of
# them, and the more a product has to read, the less it matters how many there are.
JOINED = 5e8
# A GPU computes in 16 bits, so that its logits differ from those in f32 by this share of their standard deviation: seen
# are 0.045, and 0.5 and more where attention reads wrong keys.
GPU_NOISE = 0.1
NOT_PROBED = "fast, not exact on a GPU"  # the promise of a model that a GPU may compute
LONG_PROBE = 1e8  # bytes of weights from which probing takes so long that it is told
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
    rule: FeedRule = FAST  # how tokens are fed
    promise: str = "fast"  # or "exact", or that no rule was found for exact arithmetic, in words
    guess_is_free: bool = False  # whether verifying a token proposed for one text takes little time and changes no bit
    profile: str | None = None  # the setting that a profile chose
    kl: float | None = None  # its KL divergence from f32 without dynamic quantisation, in nats
    verify_ms: dict[int, float] | None = None  # measured, per inference, by width in tokens; the widest is a prompt
    change_ms: float | None = None  # measured, added to an inference of another width than the one before
    tensors: BlockTensors | None = field(default=None, init=False, repr=False)  # that decoders share

    @property
    def is_head(self) -> bool:
        return HIDDEN in self.ir.outputs

    @property
    def drafter(self) -> str:
        """The name under which it proposes for another model."""
        return "head" if self.is_head else "draft"

    @property
    def arithmetic(self) -> Arithmetic:
        return "exact" if self.promise == "exact" else "fast"

    @property
    def is_inexact(self) -> bool:
        """Whether exact arithmetic was asked for, and can't be had."""
        return self.promise not in ("exact", "fast")

    @property
    def is_reproducible(self) -> bool:
        """Whether the same inferences give the same bits; a GPU replaces kernels in the background."""
        return self.promise == "exact" or not may_use_gpu(self.ir.device)

    def decoder(self, vocabulary: KnownIds = ALL_IDS, rule: FeedRule | None = None, shares: bool = False) -> Decoder:
        """Return a decoder with its own infer request and KV cache; ``rule`` replaces the model's.

        ``shares``: whether its KV cache is in the blocks of ``share_blocks``.
        """
        rule = rule or self.rule
        if self.engine == "paged":
            return PagedDecoder(self.ir, vocabulary, rule, self.tensors if shares else None)
        return decoder_of(self.ir, self.rollback, vocabulary, rule)

    def share_blocks(self, most_tokens: float) -> None:
        """Make blocks for decoders to share, if the engine has any; those of ended texts are kept for their prefixes.

        Kept blocks give way once ``most_tokens`` are cached.
        """
        if self.engine == "paged":
            self.tensors = BlockTensors(self.ir, most_tokens)

    def limit_blocks(self, most_tokens: float) -> None:
        """Let kept blocks give way once ``most_tokens`` are cached."""
        if self.tensors:
            self.tensors.limit(most_tokens)

    @property
    def keeps_prefixes(self) -> bool:
        return self.tensors is not None

    @property
    def blocks_kept(self) -> int:
        """The number of blocks that are kept though no text needs them."""
        return self.tensors.pool.idle if self.tensors else 0

    @property
    def blocks_evicted(self) -> int:
        """The number of blocks so far that were kept and have given way."""
        return self.tensors.pool.evicted if self.tensors else 0

    @property
    def spare(self) -> float:
        """The bytes of kept blocks."""
        return self.tensors.spare if self.tensors else 0.0

    def give_way(self) -> None:
        """Free the kept blocks."""
        if self.tensors:
            self.tensors.give_way()

    def close(self) -> None:
        """Free the model and the blocks that decoders share."""
        self.ir.close()
        self.tensors = None

    def find_exactness(self, trial: Trial = SHORT) -> Exactness:
        if is_gpu(self.ir.device):
            return find_exactness_on_gpu(lambda rule: self.decoder(rule=rule), self.ir.logits_width)
        exactness = find_exactness(lambda rule: self.decoder(rule=rule), self.engine, self.ir.logits_width, trial)
        if self.ir.config.rope_switch and exactness.rule and exactness.rule.most:
            # A text is computed anew where its frequencies change, in a single inference.
            return replace(exactness, rule=None, differing=exactness.positions)
        return exactness

    def bits(self) -> list[bytes]:
        """Return the bits of the logits after each token of a random text."""
        return logits_bits(self.decoder(), self.ir.logits_width)

    def keep_to(self, found: Exactness) -> None:
        """Feed tokens by the rule that was found; without one, as fast arithmetic does."""
        if not found.rule:
            self.promise = f"fast, not exact here ({found.differing} of {found.positions} probed positions differ)"
            return
        self.rule, self.promise = found.rule, "exact"
        self.guess_is_free = self.engine == "paged" and found.guess <= FREE
        if found.rule.rows_apart:
            self.rollback = trimming(self.rollback)


@dataclass(frozen=True)
class PagedCheck:
    """Whether the paged decoder can run a model, and why."""

    usable: bool
    reason: str


def load_ir(
    folder: Path,
    options: DeviceOptions,
    wanted: EngineChoice = "auto",
    arithmetic: Arithmetic | None = "fast",
    head: Path | None = None,
) -> CompiledModel:
    """Compile the model in ``folder`` for the ``wanted`` engine; "auto" takes paged if it agrees with stateful.

    With exact arithmetic, the first load probes which rule gives every token the same bits. Raises OvspecError like
    ``compile_ir``, or if the wanted engine can't run this model.

    ``arithmetic``: None is exact on a CPU, and fast where a GPU may compute.

    ``head``: the folder of a head that the model gives features to; see ``load_with_features``.
    """
    if arithmetic != "fast" and may_use_gpu(options.device):
        loaded = load_ir(folder, options, wanted, "fast", head)
        loaded.promise = NOT_PROBED
        if arithmetic == "exact" and loaded.engine == "paged":
            loaded.keep_to(known_exactness(folder, options, "paged") or probed(loaded, folder, options))
            wait_for_kernels(loaded.decoder(), loaded.ir.logits_width)
        return loaded
    reason, options = "as requested", without_crash(folder, options)
    if wanted != "stateful":
        paged = check_paged(folder, options)
        if paged.usable:
            try:
                return load_paged(folder, options, reason if wanted == "paged" else paged.reason, arithmetic, head)
            except OvspecError as error:  # not every cache type works with every precision
                paged = PagedCheck(False, last_line(error))
        if wanted == "paged":
            raise OvspecError(f"{folder}: `engine='paged'` is not possible: {paged.reason}.")
        reason = paged.reason
    check_states(folder, options, reason)

    def compiled(options: DeviceOptions, paired: bool = False) -> CompiledModel:  # noqa: ARG001
        ir = compile_ir(folder, options, partial(give_features, target=folder, head=head) if head else None)
        return CompiledModel(ir, "stateful", reason, find_probe(ir, options.cache_folder).rollback)

    return compiled(options) if arithmetic == "fast" else load_exactly(folder, options, "stateful", compiled)


def check_states(folder: Path, options: DeviceOptions, reason: str) -> None:
    """Raise an OvspecError if a GPU would compress the stateful engine's KV cache, which can't be read then."""
    kind = options.fixed.get("KV_CACHE_PRECISION", "f16")
    if may_use_gpu(options.device) and kind not in EXACT_KV_PRECISIONS:
        raise OvspecError(
            f"{folder}: `kv_precision={kind!r}` needs the paged engine on a GPU, which is not possible here ({reason})."
        )


def load_with_features(
    folder: Path, options: DeviceOptions, wanted: EngineChoice, arithmetic: Arithmetic | None, head: Path
) -> CompiledModel:
    """Load like ``load_ir`` a model that gives features to ``head``; it is exact only if that changes no bit.

    A value that is also an output may be computed in other kernels. That is tried once, and remembered.
    """
    if arithmetic == "fast" or (not arithmetic and may_use_gpu(options.device)):
        return load_ir(folder, options, wanted, arithmetic, head)
    graph = hashlib.sha256((head / MODEL_FILE).read_bytes()).hexdigest()
    file = exactness_file(folder, options, f"{wanted} with {graph}")
    known = remembered(Exactness, file)
    if not known and check_weights(folder / MODEL_FILE) > LONG_PROBE:
        note(f"{folder}: finding out whether its head's features change a bit, once; this loads the model twice.")
    without = [] if known else load_ir(folder, options, wanted, arithmetic).bits()
    loaded = load_ir(folder, options, wanted, "fast" if known and known.differing else arithmetic, head)
    if not known:
        differing = sum(ours != theirs for ours, theirs in zip(loaded.bits(), without, strict=True))
        known = remember(file, Exactness(None, len(without), differing))
    if known.differing:
        told = f"features change {known.differing} of {known.positions} probed positions"
        loaded.rule, loaded.guess_is_free = fast_rule(loaded.engine, loaded.ir.device), False
        loaded.promise = f"fast, not exact here ({told})"
    return loaded


def load_paged(
    folder: Path, options: DeviceOptions, reason: str, arithmetic: Arithmetic | None, head: Path | None = None
) -> CompiledModel:
    """Compile for the paged engine, rewritten for exact arithmetic only where that is what makes it exact."""

    def compiled(options: DeviceOptions, paired: bool = False) -> CompiledModel:
        ir = compile_paged(folder, options, paired, head)
        loaded = CompiledModel(ir, "paged", reason, PagedDecoder.rollback, fast_rule("paged", ir.device))
        if "KV_CACHE_PRECISION" in options.fixed:
            loaded.decoder().feed([np.zeros(1, dtype=np.int64)], [1])
        return loaded

    return compiled(options) if arithmetic == "fast" else load_exactly(folder, options, "paged", compiled)


def load_exactly(
    folder: Path, options: DeviceOptions, engine: EngineName, compiled: Callable[[DeviceOptions, bool], CompiledModel]
) -> CompiledModel:
    """Load by the rule of exact arithmetic: in the default precision or, if it has none, in f32.

    ``compiled`` compiles with these options, and with a second query for a token or without. A model that can't be
    exact is loaded as for fast arithmetic.
    """
    inexact: Exactness | None = None  # in the default precision
    for setting in [options, replace(options, precision="f32")] if f32_may_help(options) else [options]:
        known = known_exactness(folder, setting, engine)
        if not known or known.exact:
            paired = engine == "paged" and (not known or known.needs_pairs)
            loaded = compiled(setting, paired)
            exactness = known or probed(loaded, folder, setting)
            if exactness.exact:
                if paired != exactness.needs_pairs:
                    del loaded  # memory may hold the model only once
                    loaded = compiled(setting, False)
                loaded.keep_to(exactness)
                return loaded
            del loaded
            known = exactness
        inexact = inexact or known
    assert inexact
    loaded = compiled(options, False)
    loaded.keep_to(inexact)
    return loaded


def f32_may_help(options: DeviceOptions) -> bool:
    """Return whether the CPU computes in 16 bits only because nobody has named a precision, or a type of the cache."""
    named = {"INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"} & options.fixed.keys()
    if named or check_device(options.device) != "CPU":
        return False
    return precision_of(options) != "f32"


def probed(loaded: CompiledModel, folder: Path, options: DeviceOptions) -> Exactness:
    """Find the rule of exact arithmetic, and remember it."""
    if check_weights(folder / MODEL_FILE) > LONG_PROBE:
        note(f"{folder}: finding out how each token gets the same bits, once; `arithmetic='fast'` skips it.")
    return remember(exactness_file(folder, options, loaded.engine), loaded.find_exactness())


def compile_paged(folder: Path, options: DeviceOptions, paired: bool = True, head: Path | None = None) -> CompiledIR:
    """Compile like ``compile_ir``, rewritten for the paged decoder by ``to_paged`` and ``join_products``.

    Raises NotPaged if that is impossible.

    ``paired``: whether it is rewritten for exact arithmetic by ``pair_queries`` and, if need be, ``cut_products``.
    ``head``: the folder of a head that the model gives features to.
    """

    on_gpu = is_gpu(check_device(options.device))

    def rewrite(model: ov.Model) -> None:
        if head:
            give_features(model, folder, head)
        to_paged(model)
        if on_gpu:  # which joins products itself
            return
        if check_weights(folder / MODEL_FILE) <= JOINED:
            join_products(model)
        if paired:
            pair_queries(model)
            if instruction_set() in CUTTING:
                cut_products(model)

    if not on_gpu:
        # Not cached: OpenVINO 2026.4 can't read a paged model back for a CPU, because the head sizes are lost.
        options = replace(options, properties=options.properties | {"CACHE_DIR": ""})
    return compile_ir(folder, options, rewrite)


def check_paged(folder: Path, options: DeviceOptions) -> PagedCheck:
    """Return the result of ``compare_engines``, cached on disk; only a CPU and GPUs have a paged engine."""
    device, setting = check_device(options.device), f"OpenVINO {ov.get_version()}"
    if is_gpu(device):
        properties = {name: value for name, value in compile_properties(options).items() if name != "CACHE_DIR"}
        setting = f"{setting} {sorted(properties.items())}"
    elif device != "CPU":
        return PagedCheck(False, f"the paged engine runs on a CPU or a GPU only, and the device is {device}")
    file = memory_file("engines", folder, setting, options.cache_folder, device)
    may_crash = is_gpu(device) and compile_properties(options).get("KV_CACHE_PRECISION") != "f16"
    compare = compare_in_a_process if may_crash else compare_engines
    return remembered(PagedCheck, file) or remember(file, compare(folder, options))


def compare_in_a_process(folder: Path, options: DeviceOptions) -> PagedCheck:
    """Return the result of ``compare_engines``; a GPU's compiler that crashes ends a process of its own only."""
    given = json.dumps(asdict(options) | {"cache_dir": options.cache_dir and str(options.cache_dir)})
    command = [sys.executable, "-P", "-m", "ovspec.setup.engine_trial", str(folder), given]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode == 0:
        return PagedCheck(**json.loads(done.stdout.splitlines()[-1]))
    fault = fault_of(done.returncode) or "an error"
    kind = compile_properties(options).get("KV_CACHE_PRECISION")
    return PagedCheck(False, f"OpenVINO ends with {fault} when it runs it with a {kind} KV cache")


def fast_rule(engine: EngineName, device: str) -> FeedRule:
    """Return how a model feeds tokens in fast arithmetic."""
    return FAST_ON_GPU if engine == "paged" and is_gpu(device) else FAST


def compare_engines(folder: Path, options: DeviceOptions) -> PagedCheck:
    """Return whether the paged decoder gives the same logits as the stateful one for the model in ``folder``.

    Both run with the properties that round least, or with those of ``options`` if 16-bit weights widened to 32 bits
    would not fit into memory; and one after the other, because memory may hold the model only once. A GPU runs the
    paged one with ``options``, and the CPU the stateful one.
    """
    on_gpu = is_gpu(check_device(options.device))
    # Properties of a GPU are none of the CPU's.
    least = EXACT if on_gpu or room_for(folder, 3) else options.fixed | {"CACHE_DIR": ""}
    setting = DeviceOptions(properties=least)
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
        if not on_gpu:
            pair_queries(model)

    try:
        ir = compile_ir(folder, options if on_gpu else setting, rewrite)
        paged = PagedDecoder(ir, rule=fast_rule("paged", ir.device))
        narrowest = min((found for found in windows if found is not None), default=UNBOUNDED)
        if narrowest != window:
            return PagedCheck(False, f"its attention window is {window} in the model and {narrowest} when paged")
        seen = trial(paged, text, junk)
    except NotPaged as error:
        return PagedCheck(False, str(error))
    except OvspecError as error:
        return PagedCheck(False, f"OpenVINO cannot run it paged ({last_line(error)})")
    allowed = GPU_NOISE * expected.std() if on_gpu else 10 * rounding + 1e-4 * expected.std()
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
