"""Make the decoder that fits a compiled model, and the prefix cache that its decoders share."""

from __future__ import annotations

from ovspec.cache.blocks import BlockTensors
from ovspec.cache.decoder import FAST_RULE, Decoder, FeedRule, PrefixCache, RollbackMethod
from ovspec.cache.hybrid import paged_decoder_class
from ovspec.cache.kept_caches import KeptCaches
from ovspec.cache.stateful import make_stateful_decoder
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
    """Return a decoder, of the paged engine if ``rollback`` is that engine's; arguments as of the decoders."""
    if rollback.kv == "blocks":
        tensors = prefix_cache if isinstance(prefix_cache, BlockTensors) else None
        return paged_decoder_class(ir)(ir, vocabulary, rule, tensors)
    kept_caches = prefix_cache if isinstance(prefix_cache, KeptCaches) else None
    return make_stateful_decoder(ir, rollback, vocabulary, rule, kept_caches)


def make_prefix_cache(ir: CompiledIR, rollback: RollbackMethod, max_cached_tokens: float) -> PrefixCache | None:
    """Return a prefix cache of ``max_cached_tokens`` for ``make_decoder``; None for a head on the stateful engine.

    Such a head reads its text again, with the features that the model's cache has kept.
    """
    if rollback.kv == "blocks":
        return BlockTensors(ir, max_cached_tokens)
    return None if HIDDEN_OUTPUT in ir.outputs else KeptCaches(ir, max_cached_tokens)
