"""Load the draft model or head of a target, and find its fastest way to compute a token."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_cached, write_cached
from ovspec.cache.decoder import FAST_RULE, FeedRule, RollbackMethod
from ovspec.cache.paged import PagedDecoder
from ovspec.ir.compile import compile_graph
from ovspec.ir.crashes import choose_crash_free_options
from ovspec.ir.device import DeviceOptions, is_gpu, parse_device_option
from ovspec.ir.heads import HIDDEN_OUTPUT, list_head_layers, read_head_graph
from ovspec.ir.matrix_products import join_products
from ovspec.ir.paged_attention import rewrite_to_paged
from ovspec.setup.engine_choice import CompiledModel, EngineChoice, fast_arithmetic_rule
from ovspec.setup.profile import Profile, load_model_with_profile
from ovspec.setup.rollback_probing import find_findings_file

# For a head's proposals speed matters more than rounding, so the quantisation groups of activations are larger.
HEAD_PROPERTIES = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "128"}
# A draft computes each token twice if this takes at most this share of the time of a single computation.
MAX_TWO_TOKEN_COST = 0.97
TIMING_REPEATS = 12
TIMING_CONTEXT_LENGTH = 16  # tokens in the cache during timing
TWO_TOKEN_RULE = FeedRule(fewest=2, fewest_logits=2)


def load_compiled_head(folder: Path, target: CompiledModel, options: DeviceOptions) -> CompiledModel:
    """Compile the head in ``folder``, all its layers, like its ``target``, on the device of ``options``.

    Raises OvspecError if the device can't compile it, or it was made for another model.
    """
    device = parse_device_option(options.device)
    on_target_device = device == target.ir.device
    on_gpu = is_gpu(device)
    properties: dict[str, str] = {}
    if on_target_device:
        excluded_names = ("KV_CACHE_PRECISION", "CACHE_DIR")  # a head has its own precision and cache
        properties = {
            name: property_value for name, property_value in target.ir.properties.items() if name not in excluded_names
        }
        if not on_gpu:
            properties |= HEAD_PROPERTIES
    properties |= options.fixed_properties
    head_graph = read_head_graph(folder, target.ir.folder)
    refuse_ids_missing_in_target(head_graph.target_ids, folder, target)
    is_paged = on_target_device and target.engine == "paged"
    if is_paged:
        rewrite_to_paged(head_graph.model)
    if not on_gpu:  # the GPU plugin joins products itself, and can read cached models back
        join_products(head_graph.model)
        properties["CACHE_DIR"] = ""
    ir = compile_graph(head_graph, folder, choose_crash_free_options(folder, replace(options, properties=properties)))
    if is_paged:
        feed_rule = fast_arithmetic_rule("paged", ir.device)
        model = CompiledModel(ir, "paged", "as its target", PagedDecoder.rollback, feed_rule)
        choose_two_token_rule(model, options)
    else:
        model = CompiledModel(ir, "stateful", "as its target", RollbackMethod("mask"))
    for next_folder in list_head_layers(folder)[1:2]:
        model.next_layer = load_compiled_head(next_folder, target, options)
    return model


def load_compiled_draft(
    folder: Path, target: CompiledModel, options: DeviceOptions, engine: EngineChoice, profile: Profile | None
) -> CompiledModel:
    """Load the draft model in ``folder``; its proposals are verified, so they needn't be exact.

    Raises OvspecError like ``compile_ir``, or if it was made for another target.
    """
    model = load_model_with_profile(profile, folder, options, engine)
    refuse_ids_missing_in_target(model.ir.target_ids, folder, target)
    return choose_two_token_rule(model, options)


def refuse_ids_missing_in_target(draft_ids: np.ndarray | None, folder: Path, target: CompiledModel) -> None:
    """Raise OvspecError if the draft or head in ``folder`` proposes ``draft_ids`` (n,) missing in its ``target``."""
    target_width = target.ir.logits_width
    if draft_ids is not None and (len(missing_ids := draft_ids[(draft_ids < 0) | (draft_ids >= target_width)])):
        problem = f"proposes token id {missing_ids[0]}, but the target has {target_width} tokens"
        raise OvspecError(f"{folder}: the draft {problem}; use the draft only with its own target.")


def choose_two_token_rule(proposing_model: CompiledModel, options: DeviceOptions) -> CompiledModel:
    """Let a draft model or head compute at least two tokens if this is faster: products of a single row may be slower.

    Timed once, and cached. On a GPU, token counts are rounded in any case.
    """
    if proposing_model.engine == "paged" and not is_gpu(proposing_model.ir.device):
        timing_setting = repr(("pairs", sorted(proposing_model.ir.properties.items())))
        timing_file = find_findings_file("pairs", proposing_model.ir.folder, timing_setting, options.cache_folder)
        timing = read_cached(TwoTokenCost, timing_file) or write_cached(
            timing_file, TwoTokenCost(measure_two_token_cost(proposing_model))
        )
        proposing_model.feed_rule = TWO_TOKEN_RULE if timing.cost < MAX_TWO_TOKEN_COST else FAST_RULE
    return proposing_model


@dataclass(frozen=True)
class TwoTokenCost:
    """The time of a forward pass over two tokens, relative to a single token."""

    cost: float


def measure_two_token_cost(proposing_model: CompiledModel) -> float:
    context_ids = np.zeros(TIMING_CONTEXT_LENGTH, dtype=np.int64)
    features = np.ones((len(context_ids), proposing_model.ir.output_width(HIDDEN_OUTPUT)), dtype=np.float32)
    decoders = {
        feed_rule: proposing_model.make_decoder(feed_rule=feed_rule) for feed_rule in (FAST_RULE, TWO_TOKEN_RULE)
    }
    min_seconds = dict.fromkeys(decoders, math.inf)
    for decoder in decoders.values():
        decoder.feed([context_ids], [1], 0, [features])
    for _ in range(TIMING_REPEATS):
        for feed_rule, decoder in decoders.items():
            decoder.truncate(0, len(context_ids))
            start_time = time.perf_counter()
            decoder.feed([context_ids[:1]], [1], 0, [features[:1]])
            min_seconds[feed_rule] = min(min_seconds[feed_rule], time.perf_counter() - start_time)
    return min_seconds[TWO_TOKEN_RULE] / min_seconds[FAST_RULE]
