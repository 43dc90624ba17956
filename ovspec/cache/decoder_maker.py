"""Make the right decoder for a compiled model, and the prefix cache of the model's decoders."""

from __future__ import annotations

from ovspec.cache.blocks import BlockTensors
from ovspec.cache.decoder import (
    FAST_RULE,
    Decoder,
    FeedRule,
    PrefixCache,
    RollbackMethod,
    replace_masking_by_trimming,
)
from ovspec.cache.hybrid import paged_decoder_class
from ovspec.cache.kept_caches import KeptCaches
from ovspec.cache.stateful import RowByRowDecoder, StatefulDecoder
from ovspec.ir.compile import CompiledIR
from ovspec.ir.heads import HIDDEN_OUTPUT
from ovspec.text.vocabulary import ALL_IDS, KnownTokenIds


def make_decoder(
    ir: CompiledIR,
    rollback: RollbackMethod,
    vocabulary: KnownTokenIds = ALL_IDS,
    rule: FeedRule = FAST_RULE,
    prefix_cache: PrefixCache | None = None,
) -> Decoder:
    """Return a decoder for the model's states, the rule and the engine; the engine follows from ``rollback``.

    On the stateful engine, a rule with ``rows_apart`` cuts rejected tokens off, because masked slots change bits like
    padding.

    ``prefix_cache``: from ``make_prefix_cache``; None to share no prefixes with other decoders.
    """
    if rollback.kv == "blocks":
        tensors = prefix_cache if isinstance(prefix_cache, BlockTensors) else None
        return paged_decoder_class(ir)(ir, vocabulary, rule, tensors)
    kept_caches = prefix_cache if isinstance(prefix_cache, KeptCaches) else None
    if rule.rows_apart:
        rollback = replace_masking_by_trimming(rollback)

    def make_stateful_decoder() -> StatefulDecoder:
        return StatefulDecoder(ir, rollback, vocabulary, rule=rule, kept_caches=kept_caches)

    if rule.rows_apart or ir.needs_single_rows:
        return RowByRowDecoder(make_stateful_decoder)
    return make_stateful_decoder()


def make_prefix_cache(ir: CompiledIR, rollback: RollbackMethod, max_cached_tokens: float) -> PrefixCache | None:
    """Return a prefix cache of ``max_cached_tokens`` for ``make_decoder``; None for a head on the stateful engine.

    There a head reads its text again, with the features from its target's prefix cache.
    """
    if rollback.kv == "blocks":
        return BlockTensors(ir, max_cached_tokens)
    return None if HIDDEN_OUTPUT in ir.outputs else KeptCaches(ir, max_cached_tokens)
