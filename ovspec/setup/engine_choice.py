"""Choose a model's engine: stateful runs everywhere, paged runs where it gives the same logits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_cached, write_cached
from ovspec.base.progress import print_note
from ovspec.cache.blocks import BlockTensors
from ovspec.cache.decoder import FAST_GPU_RULE, FAST_RULE, Arithmetic, Decoder, FeedRule, Rollback
from ovspec.cache.paged import PagedDecoder
from ovspec.cache.stateful import make_stateful_decoder, with_trimming
from ovspec.ir.compile import MODEL_FILE, CompiledIR, check_weights, compile_ir, last_error_line
from ovspec.ir.crashes import avoid_crash
from ovspec.ir.device import EXACT_KV_PRECISIONS, DeviceOptions, check_device, is_gpu, may_use_gpu, resolve_precision
from ovspec.ir.heads import HIDDEN_OUTPUT, add_features_output
from ovspec.setup.exactness import (
    SHORT_TRIAL,
    Exactness,
    ExactnessTrial,
    find_exactness,
    find_exactness_file,
    find_exactness_on_gpu,
    hash_probe_logits,
    read_exactness,
    wait_for_gpu_kernels,
)
from ovspec.setup.paging import PagedCheck, check_paged, compile_paged
from ovspec.setup.rollback_probing import load_rollback_probe
from ovspec.text.vocabulary import ALL_IDS, KnownIds

EngineName = Literal["stateful", "paged"]
EngineChoice = Literal["auto", "stateful", "paged"]
# Where an inference of two tokens takes at most this many times as long as the narrowest one, lookup is the default.
FREE_PROPOSAL_COST = 1.1
GPU_PROMISE = "fast, not exact on a GPU"  # the promise of a model that a GPU may compute
LONG_PROBE_BYTES = 1e8  # bytes of weights from which probing takes so long that it is told


@dataclass
class CompiledModel:
    """A ``CompiledIR`` and the engine that was chosen to run it."""

    ir: CompiledIR
    engine: EngineName
    engine_reason: str  # why this engine was chosen
    rollback: Rollback
    rule: FeedRule = FAST_RULE  # how tokens are fed
    arithmetic_note: str = "fast"  # or "exact", or that no rule was found for exact arithmetic, in words
    proposals_are_free: bool = (
        False  # whether verifying a token proposed for one text takes little time and changes no bit
    )
    profile: str | None = None  # the setting that a profile chose
    kl_divergence: float | None = None  # its KL divergence from f32 without dynamic quantisation, in nats
    verify_ms: dict[int, float] | None = None  # measured, per inference, by width in tokens; the widest is a prompt
    change_ms: float | None = None  # measured, added to an inference of another width than the one before
    tensors: BlockTensors | None = field(default=None, init=False, repr=False)  # that decoders share

    @property
    def is_head(self) -> bool:
        return HIDDEN_OUTPUT in self.ir.outputs

    @property
    def proposer_name(self) -> str:
        """The name under which it proposes for another model."""
        return "head" if self.is_head else "draft"

    @property
    def arithmetic(self) -> Arithmetic:
        return "exact" if self.arithmetic_note == "exact" else "fast"

    @property
    def is_inexact(self) -> bool:
        """Whether exact arithmetic was asked for, and can't be had."""
        return self.arithmetic_note not in ("exact", "fast")

    @property
    def is_reproducible(self) -> bool:
        """Whether the same inferences give the same bits; a GPU replaces kernels in the background."""
        return self.arithmetic_note == "exact" or not may_use_gpu(self.ir.device)

    def decoder(self, vocabulary: KnownIds = ALL_IDS, rule: FeedRule | None = None, shares: bool = False) -> Decoder:
        """Return a decoder with its own infer request and KV cache; ``rule`` replaces the model's.

        ``shares``: whether its KV cache is in the blocks of ``share_blocks``.
        """
        rule = rule or self.rule
        if self.engine == "paged":
            return PagedDecoder(self.ir, vocabulary, rule, self.tensors if shares else None)
        return make_stateful_decoder(self.ir, self.rollback, vocabulary, rule)

    def share_blocks(self, most_tokens: float) -> None:
        """Make blocks for decoders to share, if the engine has any; those of ended texts are kept for their prefixes.

        Kept blocks give way once ``most_tokens`` are cached.
        """
        if self.engine == "paged":
            self.tensors = BlockTensors(self.ir, most_tokens)

    def limit_cached_tokens(self, most_tokens: float) -> None:
        """Let kept blocks give way once ``most_tokens`` are cached."""
        if self.tensors:
            self.tensors.limit_tokens(most_tokens)

    @property
    def keeps_prefixes(self) -> bool:
        return self.tensors is not None

    @property
    def idle_block_count(self) -> int:
        """The number of blocks that are kept though no text needs them."""
        return self.tensors.pool.idle_count if self.tensors else 0

    @property
    def evicted_block_count(self) -> int:
        """The number of blocks so far that were kept and have given way."""
        return self.tensors.pool.evicted_count if self.tensors else 0

    @property
    def idle_bytes(self) -> float:
        """The bytes of kept blocks."""
        return self.tensors.idle_bytes if self.tensors else 0.0

    def free_idle_blocks(self) -> None:
        """Free the kept blocks."""
        if self.tensors:
            self.tensors.free_idle_blocks()

    def close(self) -> None:
        """Free the model and the blocks that decoders share."""
        self.ir.close()
        self.tensors = None

    def find_exactness(self, trial: ExactnessTrial = SHORT_TRIAL) -> Exactness:
        if is_gpu(self.ir.device):
            return find_exactness_on_gpu(lambda rule: self.decoder(rule=rule), self.ir.logits_width)
        exactness = find_exactness(lambda rule: self.decoder(rule=rule), self.engine, self.ir.logits_width, trial)
        if self.ir.config.rope_switch_length and exactness.rule and exactness.rule.most:
            # A text is computed anew where its frequencies change, in a single inference.
            return replace(exactness, rule=None, differing=exactness.positions)
        return exactness

    def hash_logits(self) -> list[bytes]:
        """Return the bits of the logits after each token of a random text."""
        return hash_probe_logits(self.decoder(), self.ir.logits_width)

    def adopt_exactness(self, found: Exactness) -> None:
        """Feed tokens by the rule that was found; without one, as fast arithmetic does."""
        if not found.rule:
            self.arithmetic_note = (
                f"fast, not exact here ({found.differing} of {found.positions} probed positions differ)"
            )
            return
        self.rule, self.arithmetic_note = found.rule, "exact"
        self.proposals_are_free = self.engine == "paged" and found.guess <= FREE_PROPOSAL_COST
        if found.rule.rows_apart:
            self.rollback = with_trimming(self.rollback)


def load_compiled_model(
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

    ``head``: the folder of a head that the model gives features to; see ``load_model_with_features``.
    """
    if arithmetic != "fast" and may_use_gpu(options.device):
        loaded = load_compiled_model(folder, options, wanted, "fast", head)
        loaded.arithmetic_note = GPU_PROMISE
        if arithmetic == "exact" and loaded.engine == "paged":
            loaded.adopt_exactness(read_exactness(folder, options, "paged") or probe_exactness(loaded, folder, options))
            wait_for_gpu_kernels(loaded.decoder(), loaded.ir.logits_width)
        return loaded
    reason, options = "as requested", avoid_crash(folder, options)
    if wanted != "stateful":
        paged = check_paged(folder, options)
        if paged.usable:
            try:
                return load_paged_model(
                    folder, options, reason if wanted == "paged" else paged.reason, arithmetic, head
                )
            except OvspecError as error:  # not every cache type works with every precision
                paged = PagedCheck(False, last_error_line(error))
        if wanted == "paged":
            raise OvspecError(f"{folder}: `engine='paged'` is not possible: {paged.reason}.")
        reason = paged.reason
    check_stateful_kv_precision(folder, options, reason)

    def compiled(options: DeviceOptions, paired: bool = False) -> CompiledModel:  # noqa: ARG001
        ir = compile_ir(folder, options, partial(add_features_output, target=folder, head=head) if head else None)
        return CompiledModel(ir, "stateful", reason, load_rollback_probe(ir, options.cache_folder).rollback)

    return compiled(options) if arithmetic == "fast" else load_exact_model(folder, options, "stateful", compiled)


def check_stateful_kv_precision(folder: Path, options: DeviceOptions, reason: str) -> None:
    """Raise an OvspecError if a GPU would compress the stateful engine's KV cache, which can't be read then."""
    kind = options.fixed_properties.get("KV_CACHE_PRECISION", "f16")
    if may_use_gpu(options.device) and kind not in EXACT_KV_PRECISIONS:
        raise OvspecError(
            f"{folder}: `kv_precision={kind!r}` needs the paged engine on a GPU, which is not possible here ({reason})."
        )


def load_model_with_features(
    folder: Path, options: DeviceOptions, wanted: EngineChoice, arithmetic: Arithmetic | None, head: Path
) -> CompiledModel:
    """Load a model that gives features to ``head``; it is exact only if that changes no bit.

    A value that is also an output may be computed in other kernels. That is tried once, and remembered.
    """
    if arithmetic == "fast" or (not arithmetic and may_use_gpu(options.device)):
        return load_compiled_model(folder, options, wanted, arithmetic, head)
    graph = hashlib.sha256((head / MODEL_FILE).read_bytes()).hexdigest()
    file = find_exactness_file(folder, options, f"{wanted} with {graph}")
    known = read_cached(Exactness, file)
    if not known and check_weights(folder / MODEL_FILE) > LONG_PROBE_BYTES:
        print_note(f"{folder}: finding out whether its head's features change a bit, once; this loads the model twice.")
    without = [] if known else load_compiled_model(folder, options, wanted, arithmetic).hash_logits()
    loaded = load_compiled_model(folder, options, wanted, "fast" if known and known.differing else arithmetic, head)
    if not known:
        differing = sum(ours != theirs for ours, theirs in zip(loaded.hash_logits(), without, strict=True))
        known = write_cached(file, Exactness(None, len(without), differing))
    if known.differing:
        told = f"features change {known.differing} of {known.positions} probed positions"
        loaded.rule, loaded.proposals_are_free = fast_feed_rule(loaded.engine, loaded.ir.device), False
        loaded.arithmetic_note = f"fast, not exact here ({told})"
    return loaded


def load_paged_model(
    folder: Path, options: DeviceOptions, reason: str, arithmetic: Arithmetic | None, head: Path | None = None
) -> CompiledModel:
    """Compile for the paged engine, rewritten for exact arithmetic only where that is what makes it exact."""

    def compiled(options: DeviceOptions, paired: bool = False) -> CompiledModel:
        ir = compile_paged(folder, options, paired, head)
        loaded = CompiledModel(ir, "paged", reason, PagedDecoder.rollback, fast_feed_rule("paged", ir.device))
        if "KV_CACHE_PRECISION" in options.fixed_properties:
            loaded.decoder().feed([np.zeros(1, dtype=np.int64)], [1])
        return loaded

    return compiled(options) if arithmetic == "fast" else load_exact_model(folder, options, "paged", compiled)


def load_exact_model(
    folder: Path, options: DeviceOptions, engine: EngineName, compiled: Callable[[DeviceOptions, bool], CompiledModel]
) -> CompiledModel:
    """Load by the rule of exact arithmetic: in the default precision or, if it has none, in f32.

    ``compiled`` compiles with these options, and with a second query for a token or without. A model that can't be
    exact is loaded as for fast arithmetic.
    """
    inexact: Exactness | None = None  # in the default precision
    for setting in [options, replace(options, precision="f32")] if f32_may_help(options) else [options]:
        known = read_exactness(folder, setting, engine)
        if not known or known.is_exact:
            paired = engine == "paged" and (not known or known.needs_paired_queries)
            loaded = compiled(setting, paired)
            exactness = known or probe_exactness(loaded, folder, setting)
            if exactness.is_exact:
                if paired != exactness.needs_paired_queries:
                    del loaded  # memory may hold the model only once
                    loaded = compiled(setting, False)
                loaded.adopt_exactness(exactness)
                return loaded
            del loaded
            known = exactness
        inexact = inexact or known
    assert inexact
    loaded = compiled(options, False)
    loaded.adopt_exactness(inexact)
    return loaded


def f32_may_help(options: DeviceOptions) -> bool:
    """Return whether the CPU computes in 16 bits only because nobody has named a precision, or a type of the cache."""
    named = {"INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"} & options.fixed_properties.keys()
    if named or check_device(options.device) != "CPU":
        return False
    return resolve_precision(options) != "f32"


def probe_exactness(loaded: CompiledModel, folder: Path, options: DeviceOptions) -> Exactness:
    """Find the rule of exact arithmetic, and remember it."""
    if check_weights(folder / MODEL_FILE) > LONG_PROBE_BYTES:
        print_note(f"{folder}: finding out how each token gets the same bits, once; `arithmetic='fast'` skips it.")
    return write_cached(find_exactness_file(folder, options, loaded.engine), loaded.find_exactness())


def fast_feed_rule(engine: EngineName, device: str) -> FeedRule:
    """Return how a model feeds tokens in fast arithmetic."""
    return FAST_GPU_RULE if engine == "paged" and is_gpu(device) else FAST_RULE
