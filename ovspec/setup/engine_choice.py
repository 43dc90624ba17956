"""Choose a model's engine: stateful runs everywhere, paged runs where it yields the same logits."""

from __future__ import annotations

import functools
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
from ovspec.cache.decoder import (
    FAST_GPU_RULE,
    FAST_RULE,
    Arithmetic,
    Decoder,
    FeedRule,
    PrefixCache,
    RollbackMethod,
    replace_masking_by_trimming,
)
from ovspec.cache.decoder_maker import make_decoder, make_prefix_cache
from ovspec.cache.hybrid import paged_decoder_class
from ovspec.ir.compile import MODEL_FILE, CompiledIR, check_weights_file, compile_ir, last_error_line
from ovspec.ir.crashes import choose_crash_free_options
from ovspec.ir.device import (
    EXACT_KV_PRECISIONS,
    DeviceOptions,
    is_gpu,
    may_use_gpu,
    parse_device_option,
    resolve_precision,
)
from ovspec.ir.heads import HIDDEN_OUTPUT, add_features_output, is_mtp_folder
from ovspec.setup.exactness import (
    SHORT_TRIAL,
    Exactness,
    ExactnessTrial,
    find_exactness,
    find_exactness_file,
    find_exactness_on_gpu,
    hash_probe_logits,
    read_saved_exactness,
    wait_for_gpu_kernels,
)
from ovspec.setup.paging import PagedCheck, check_paged, compile_paged
from ovspec.setup.rollback_probing import load_or_probe_rollback
from ovspec.text.vocabulary import ALL_IDS, KnownTokenIds

EngineName = Literal["stateful", "paged"]
EngineChoice = Literal["auto", "stateful", "paged"]
# If a forward pass over two tokens takes at most this many times as long as the narrowest, lookup is the default.
MAX_FREE_PROPOSAL_COST = 1.1
GPU_ARITHMETIC_NOTE = "fast, not exact on a GPU"
LONG_PROBE_BYTES = 1e8  # bytes of weights from which probing is slow and announced in a note


@dataclass
class CompiledModel:
    """A ``CompiledIR`` and the engine chosen to run it."""

    ir: CompiledIR
    engine: EngineName
    engine_reason: str  # reason for choosing this engine
    rollback: RollbackMethod
    feed_rule: FeedRule = FAST_RULE  # how to feed tokens
    arithmetic_note: str = "fast"  # or "exact", or a sentence: why requested exact arithmetic is impossible
    proposals_are_free: bool = False  # verifying a token proposed for one text is almost free and changes no bit
    profile: str | None = None  # the setting chosen from a profile
    kl_divergence: float | None = None  # its KL divergence from f32 without dynamic quantisation, in nats
    verify_ms: dict[int, float] | None = None  # measured, per forward pass, by width in tokens; the largest: a prompt
    change_ms: float | None = None  # measured, the additional time of a pass after a pass of another width
    next_layer: CompiledModel | None = None  # for a head, the layer for the token after its own
    prefix_cache: PrefixCache | None = field(default=None, init=False, repr=False)  # shared by all decoders

    @property
    def is_head(self) -> bool:
        return HIDDEN_OUTPUT in self.ir.outputs

    def list_layers(self) -> list[CompiledModel]:
        """Return a head's layers in order, or the model alone."""
        return [self, *(self.next_layer.list_layers() if self.next_layer else [])]

    @functools.cached_property
    def proposer_name(self) -> str:
        """The name of this model as a proposer."""
        if not self.is_head:
            return "draft"
        return "mtp" if is_mtp_folder(self.ir.folder) else "head"

    @property
    def arithmetic(self) -> Arithmetic:
        return "exact" if self.arithmetic_note == "exact" else "fast"

    @property
    def lacks_requested_exactness(self) -> bool:
        """Whether exact arithmetic was requested, but is unavailable."""
        return self.arithmetic_note not in ("exact", "fast")

    @property
    def is_reproducible(self) -> bool:
        """Whether repeated forward passes yield the same bits; on a GPU they may not: it replaces kernels meanwhile."""
        return self.arithmetic_note == "exact" or not may_use_gpu(self.ir.device)

    def make_decoder(
        self, vocabulary: KnownTokenIds = ALL_IDS, feed_rule: FeedRule | None = None, shares_prefixes: bool = False
    ) -> Decoder:
        """Return a decoder with its own infer request and KV cache; ``feed_rule`` replaces the model's.

        ``shares_prefixes``: whether it uses the prefix cache.
        """
        prefix_cache = self.prefix_cache if shares_prefixes else None
        return make_decoder(self.ir, self.rollback, vocabulary, feed_rule or self.feed_rule, prefix_cache)

    def share_prefixes(self, max_cached_tokens: float) -> None:
        """Keep the KV caches of finished texts for texts with the same prefix, up to ``max_cached_tokens``."""
        self.prefix_cache = make_prefix_cache(self.ir, self.rollback, max_cached_tokens)

    def close(self) -> None:
        """Free the model and its prefix cache."""
        self.ir.close()
        self.prefix_cache = None

    def find_exactness(self, trial: ExactnessTrial = SHORT_TRIAL) -> Exactness:
        if is_gpu(self.ir.device):
            return find_exactness_on_gpu(lambda feed_rule: self.make_decoder(feed_rule=feed_rule), self.ir.logits_width)
        exactness = find_exactness(
            lambda feed_rule: self.make_decoder(feed_rule=feed_rule), self.engine, self.ir.logits_width, trial
        )
        if self.ir.config.rope_switch_length and exactness.rule and exactness.rule.most:
            # At the change of frequencies a text is recomputed in a single forward pass, against the rule.
            return replace(exactness, rule=None, differing=exactness.positions)
        return exactness

    def hash_logits(self) -> list[bytes]:
        """Return hashes, of 8 bytes, of the logits after each token of a random text."""
        return hash_probe_logits(self.make_decoder(), self.ir.logits_width)

    def adopt_exactness(self, exactness: Exactness) -> None:
        """Feed tokens by the rule found by probing; without a rule, as in fast arithmetic."""
        if not exactness.rule:
            differing_text = f"{exactness.differing} of {exactness.positions} probed positions differ"
            self.arithmetic_note = f"fast, not exact here ({differing_text})"
            return
        self.feed_rule = exactness.rule
        self.arithmetic_note = "exact"
        self.proposals_are_free = self.engine == "paged" and exactness.guess <= MAX_FREE_PROPOSAL_COST
        if exactness.rule.rows_apart:
            self.rollback = replace_masking_by_trimming(self.rollback)


def load_compiled_model(
    folder: Path,
    options: DeviceOptions,
    engine: EngineChoice = "auto",
    arithmetic: Arithmetic | None = "fast",
    head: Path | None = None,
) -> CompiledModel:
    """Compile the model in ``folder`` for an engine; "auto" takes paged if it agrees with stateful.

    With exact arithmetic, the first load probes for a ``FeedRule``. Raises OvspecError like ``compile_ir``, or if the
    engine can't run this model.

    ``arithmetic``: None is exact on a CPU, and fast if a GPU may be used.

    ``head``: the folder of a head on the model's features; see ``load_model_giving_features``.
    """
    if arithmetic != "fast" and may_use_gpu(options.device):
        model = load_compiled_model(folder, options, engine, "fast", head)
        model.arithmetic_note = GPU_ARITHMETIC_NOTE
        if arithmetic == "exact" and model.engine == "paged":
            model.adopt_exactness(
                read_saved_exactness(folder, options, "paged") or probe_and_save_exactness(model, folder, options)
            )
            wait_for_gpu_kernels(model.make_decoder(), model.ir.logits_width)
        return model
    options = choose_crash_free_options(folder, options)
    engine_reason = "as requested"
    if engine != "stateful":
        paged_check = check_paged(folder, options)
        if engine == "auto":
            engine_reason = paged_check.reason
        if paged_check.usable:
            try:
                return load_paged_model(folder, options, engine_reason, arithmetic, head)
            except OvspecError as error:  # not every cache type works with every precision
                paged_check = PagedCheck(False, last_error_line(error))
        if engine == "paged":
            raise OvspecError(f"{folder}: `engine='paged'` can't be used ({paged_check.reason}); leave `engine` out.")
        engine_reason = paged_check.reason
    check_stateful_kv_precision(folder, options, engine_reason)

    def compile_stateful_model(options: DeviceOptions, two_queries: bool = False) -> CompiledModel:  # noqa: ARG001
        rewrite = None
        if head:
            rewrite = partial(add_features_output, target=folder, head=head)
        ir = compile_ir(folder, options, rewrite)
        return CompiledModel(ir, "stateful", engine_reason, load_or_probe_rollback(ir, options.cache_folder).rollback)

    return load_with_arithmetic(folder, options, "stateful", arithmetic, compile_stateful_model)


def check_stateful_kv_precision(folder: Path, options: DeviceOptions, reason: str) -> None:
    """Raise an OvspecError if a GPU would compress the stateful engine's KV cache, making it unreadable."""
    precision = options.fixed_properties.get("KV_CACHE_PRECISION", "f16")
    if may_use_gpu(options.device) and precision not in EXACT_KV_PRECISIONS:
        problem = f"works on a GPU only with the paged engine, but the engine is stateful ({reason})"
        raise OvspecError(f"{folder}: `kv_precision={precision!r}` {problem}; leave `kv_precision` out.")


def load_model_giving_features(
    folder: Path, options: DeviceOptions, engine: EngineChoice, arithmetic: Arithmetic | None, head: Path
) -> CompiledModel:
    """Load a model that computes features for ``head``; it is exact only if the features change no bit.

    As an output, a value may be computed by other kernels. This is tested once, and cached.
    """
    if arithmetic == "fast" or (not arithmetic and may_use_gpu(options.device)):
        return load_compiled_model(folder, options, engine, arithmetic, head)
    head_hash = hashlib.sha256((head / MODEL_FILE).read_bytes()).hexdigest()
    exactness_file = find_exactness_file(folder, options, f"{engine} with {head_hash}")
    exactness = read_cached(Exactness, exactness_file)
    hashes_without_head: list[bytes] = []
    if not exactness:
        if check_weights_file(folder / MODEL_FILE) > LONG_PROBE_BYTES:
            probe_task = "finding out whether its head's features change a bit, once; this loads the model twice"
            print_note(f"{folder}: {probe_task}.")
        hashes_without_head = load_compiled_model(folder, options, engine, arithmetic).hash_logits()
    elif exactness.differing:
        arithmetic = "fast"
    model = load_compiled_model(folder, options, engine, arithmetic, head)
    if not exactness:
        hash_pairs = zip(model.hash_logits(), hashes_without_head, strict=True)
        differing_count = sum(hash_with_head != hash_without_head for hash_with_head, hash_without_head in hash_pairs)
        exactness = write_cached(exactness_file, Exactness(None, len(hashes_without_head), differing_count))
    if exactness.differing:
        model.feed_rule = fast_arithmetic_rule(model.engine, model.ir.device)
        model.proposals_are_free = False
        change_text = f"features change {exactness.differing} of {exactness.positions} probed positions"
        model.arithmetic_note = f"fast, not exact here ({change_text})"
    return model


def load_paged_model(
    folder: Path, options: DeviceOptions, engine_reason: str, arithmetic: Arithmetic | None, head: Path | None = None
) -> CompiledModel:
    """Compile for the paged engine, rewritten for exact arithmetic only if the rewrite makes it exact."""

    def compile_paged_model(options: DeviceOptions, two_queries: bool = False) -> CompiledModel:
        ir = compile_paged(folder, options, two_queries, head)
        rollback = paged_decoder_class(ir).rollback
        model = CompiledModel(ir, "paged", engine_reason, rollback, fast_arithmetic_rule("paged", ir.device))
        if "KV_CACHE_PRECISION" in options.fixed_properties:
            model.make_decoder().feed([np.zeros(1, dtype=np.int64)], [1])
        return model

    return load_with_arithmetic(folder, options, "paged", arithmetic, compile_paged_model)


def load_with_arithmetic(
    folder: Path,
    options: DeviceOptions,
    engine: EngineName,
    arithmetic: Arithmetic | None,
    compile_model: Callable[[DeviceOptions, bool], CompiledModel],
) -> CompiledModel:
    """Load by the rule of exact arithmetic: in the default precision or, if it has none, in f32.

    ``compile_model``: (options, whether to add a second query per token) -> compiled model. A model without an exact
    rule is loaded as for fast arithmetic.
    """
    if arithmetic == "fast":
        return compile_model(options, False)
    options_by_precision = [options]
    if is_16_bit_by_default(options):
        options_by_precision.append(replace(options, precision="f32"))
    default_exactness: Exactness | None = None  # in the default precision
    for tried_options in options_by_precision:
        saved_exactness = read_saved_exactness(folder, tried_options, engine)
        if not saved_exactness or saved_exactness.is_exact:
            two_queries = engine == "paged" and (not saved_exactness or saved_exactness.needs_two_queries)
            model = compile_model(tried_options, two_queries)
            exactness = saved_exactness or probe_and_save_exactness(model, folder, tried_options)
            if exactness.is_exact:
                if two_queries != exactness.needs_two_queries:
                    del model  # memory may be too small for two copies of the model
                    model = compile_model(tried_options, False)
                model.adopt_exactness(exactness)
                return model
            del model
            saved_exactness = exactness
        default_exactness = default_exactness or saved_exactness
    assert default_exactness
    model = compile_model(options, False)
    model.adopt_exactness(default_exactness)
    return model


def is_16_bit_by_default(options: DeviceOptions) -> bool:
    """Return whether the CPU computes in 16 bits only by default: neither a precision nor a cache type was chosen."""
    fixed_properties = {"INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"} & options.fixed_properties.keys()
    if fixed_properties or parse_device_option(options.device) != "CPU":
        return False
    return resolve_precision(options) != "f32"


def probe_and_save_exactness(model: CompiledModel, folder: Path, options: DeviceOptions) -> Exactness:
    """Find the rule of exact arithmetic, and cache it."""
    if check_weights_file(folder / MODEL_FILE) > LONG_PROBE_BYTES:
        print_note(f"{folder}: finding out how each token gets the same bits, once; `arithmetic='fast'` skips it.")
    return write_cached(find_exactness_file(folder, options, model.engine), model.find_exactness())


def fast_arithmetic_rule(engine: EngineName, device: str) -> FeedRule:
    """Return a model's feed rule in fast arithmetic."""
    return FAST_GPU_RULE if engine == "paged" and is_gpu(device) else FAST_RULE
