"""The paged engine: compiling a model for it, and checking its logits against the stateful engine's."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import openvino as ov

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_cached, write_cached
from ovspec.cache.decoder import FAST_GPU_RULE, FAST_RULE, Decoder, RollbackMethod
from ovspec.cache.hybrid import paged_decoder_class
from ovspec.cache.stateful import StatefulDecoder
from ovspec.ir.attention_mask import UNBOUNDED, find_narrowest_window
from ovspec.ir.compile import MODEL_FILE, AdvanceGraph, CompiledIR, check_weights_file, compile_ir, last_error_line
from ovspec.ir.crashes import name_fault_signal
from ovspec.ir.device import DeviceOptions, is_gpu, make_compile_properties, parse_device_option
from ovspec.ir.heads import add_features_output
from ovspec.ir.matrix_products import join_products, needs_split_products, split_wide_products
from ovspec.ir.memory import weights_fit_into_memory
from ovspec.ir.paged_attention import NotPaged, allow_several_queries_per_token, read_attention_windows
from ovspec.ir.recurrent_states import rewrite_states_to_paged
from ovspec.setup.rollback_probing import find_findings_file

# If a model's attention window has at most this many slots, the text for comparing the engines is longer than it.
LONGEST_TESTED_WINDOW = 256
# Products are joined in models up to this size: OpenVINO keeps the joined weights and its own form of them in memory,
# and the larger a product, the less the number of products matters.
MAX_JOINED_BYTES = 5e8
# A GPU computes in 16 bits, so its logits differ from f32: by 0.045 of their standard deviation in tests, but by 0.5
# and more if attention reads wrong keys.
MAX_GPU_NOISE = 0.1
ENGINE_CHECK_VERSION = "2"  # a new version invalidates cached checks
# The properties with the least rounding. Models compiled with them are needed only briefly, so they are not cached.
EXACT_PROPERTIES = {
    "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "CACHE_DIR": "",
}  # fmt: skip


@dataclass(frozen=True)
class PagedCheck:
    """Whether the paged decoder can run a model, and the reason."""

    usable: bool
    reason: str


def compile_paged(
    folder: Path, options: DeviceOptions, two_queries: bool = True, head: Path | None = None
) -> CompiledIR:
    """Compile like ``compile_ir``, rewritten for the paged decoder by ``rewrite_to_paged`` and ``join_products``.

    Raises NotPaged if the rewrite is impossible.

    ``two_queries``: whether to rewrite it for exact arithmetic by ``allow_several_queries_per_token`` and, if needed,
    ``split_wide_products``.
    ``head``: the folder of a head on the model's features.
    """

    on_gpu = is_gpu(parse_device_option(options.device))

    def rewrite(model: ov.Model) -> AdvanceGraph | None:
        if head:
            add_features_output(model, folder, head)
        advance_graph = rewrite_states_to_paged(model, on_gpu)
        if on_gpu:  # the GPU plugin joins products itself
            return advance_graph
        if check_weights_file(folder / MODEL_FILE) <= MAX_JOINED_BYTES:
            join_products(model)
        if two_queries:
            allow_several_queries_per_token(model)
            if needs_split_products():
                split_wide_products(model)
        return advance_graph

    if not on_gpu:
        # Not cached: OpenVINO 2026.4 can't load a cached paged model on a CPU, because the head sizes are lost.
        options = replace(options, properties=options.properties | {"CACHE_DIR": ""})
    return compile_ir(folder, options, rewrite)


def check_paged(folder: Path, options: DeviceOptions) -> PagedCheck:
    """Return the result of ``check_paged_logits``, cached on disk; only a CPU and GPUs have a paged engine."""
    device = parse_device_option(options.device)
    check_setting = f"{ENGINE_CHECK_VERSION} OpenVINO {ov.get_version()}"
    if is_gpu(device):
        properties = [
            property_pair
            for property_pair in sorted(make_compile_properties(options).items())
            if property_pair[0] != "CACHE_DIR"
        ]
        check_setting = f"{check_setting} {properties}"
    elif device != "CPU":
        return PagedCheck(False, f"the paged engine needs a CPU or a GPU, but the device is {device}")
    check_file = find_findings_file("engines", folder, check_setting, options.cache_folder, device)
    check_function = check_paged_logits
    if is_gpu(device) and make_compile_properties(options).get("KV_CACHE_PRECISION") != "f16":  # may crash
        check_function = check_paged_logits_in_process
    return read_cached(PagedCheck, check_file) or write_cached(check_file, check_function(folder, options))


def check_paged_logits_in_process(folder: Path, options: DeviceOptions) -> PagedCheck:
    """Return the result of ``check_paged_logits``; a crash of a GPU's compiler ends only a separate process."""
    options_json = json.dumps(asdict(options) | {"cache_dir": options.cache_dir and str(options.cache_dir)})
    command = [sys.executable, "-P", "-m", "ovspec.setup.engine_trial", str(folder), options_json]
    process = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if process.returncode == 0:
        return PagedCheck(**json.loads(process.stdout.splitlines()[-1]))
    fault = name_fault_signal(process.returncode) or "an error"
    kv_precision = make_compile_properties(options).get("KV_CACHE_PRECISION")
    return PagedCheck(False, f"OpenVINO crashes ({fault}) when it runs the model with a {kv_precision} KV cache")


def check_paged_logits(folder: Path, options: DeviceOptions) -> PagedCheck:
    """Return whether the paged and the stateful decoder yield the same logits for the model in ``folder``.

    On a CPU, both run with the least rounding, or with ``options`` if 16-bit weights widened to 32 bits don't fit into
    memory. On a GPU, the paged decoder runs with ``options``, and the stateful decoder runs on the CPU. They run one
    after the other, because memory may be too small for two copies of the model.
    """
    on_gpu = is_gpu(parse_device_option(options.device))
    properties = EXACT_PROPERTIES
    # A GPU's properties don't apply to the CPU.
    if not on_gpu and not weights_fit_into_memory(folder, 3):
        properties = options.fixed_properties | {"CACHE_DIR": ""}
    stateful_options = DeviceOptions(properties=properties)
    ir = compile_ir(folder, stateful_options)
    if not ir.kv_states:
        return PagedCheck(False, "the model has no keys and values")
    if ir.config.rope_switch_length:
        return PagedCheck(False, "the model's rotary frequencies change with the length of the text")
    attention_window = find_narrowest_window(ir)
    # Random ids, longer than the window unless the window exceeds LONGEST_TESTED_WINDOW.
    text_length = 45 + attention_window * (attention_window <= LONGEST_TESTED_WINDOW)
    text_ids, other_ids = np.split(
        np.random.default_rng(0).integers(0, ir.logits_width, text_length + 40), [text_length]
    )
    decoder = StatefulDecoder(ir, RollbackMethod(None))
    stateful_logits = decoder.feed([text_ids], [8])[0].copy()
    decoder.reset(1)
    decoder.feed([text_ids[:-8]], [0])
    # Feeding the same text in other pieces changes the logits by rounding; the paged decoder may differ as much.
    rounding_error = np.abs(decoder.feed([text_ids[-8:]], [8])[0] - stateful_logits).max()
    del decoder, ir
    paged_windows: set[int | None] = set()

    def rewrite(model: ov.Model) -> AdvanceGraph | None:
        advance_graph = rewrite_states_to_paged(model, on_gpu)
        paged_windows.update(read_attention_windows(model))
        if not on_gpu:
            allow_several_queries_per_token(model)
        return advance_graph

    try:
        paged_ir = compile_ir(folder, options if on_gpu else stateful_options, rewrite)
        paged_decoder = paged_decoder_class(paged_ir)(paged_ir, rule=FAST_GPU_RULE if on_gpu else FAST_RULE)
        paged_window = min((window_size for window_size in paged_windows if window_size is not None), default=UNBOUNDED)
        if paged_window != attention_window:
            return PagedCheck(
                False,
                f"the attention window is {attention_window} in the model, but {paged_window} in the paged engine",
            )
        paged_logits = compute_paged_logits(paged_decoder, text_ids, other_ids)
    except NotPaged as error:
        return PagedCheck(False, str(error))
    except OvspecError as error:
        return PagedCheck(False, f"OpenVINO cannot run the model with the paged engine ({last_error_line(error)})")
    tolerance = MAX_GPU_NOISE * stateful_logits.std() if on_gpu else 10 * rounding_error + 1e-4 * stateful_logits.std()
    if all(np.abs(logits - stateful_logits[-len(logits) :]).max() <= tolerance for logits in paged_logits):
        return PagedCheck(True, "its logits agree with the stateful engine's")
    return PagedCheck(False, "the paged engine's logits differ from the stateful engine's")


def compute_paged_logits(decoder: Decoder, text_ids: np.ndarray, other_ids: np.ndarray) -> list[np.ndarray]:
    """Return the last logits of ``text_ids``: fed whole, with a forked row of other text, and after rollbacks."""
    no_tokens = text_ids[:0]

    def roll_back(row: int, length: int) -> np.ndarray:
        """Roll ``row`` back to ``length``, or to the states still available; return the text from there on."""
        decoder.truncate(row, length)
        return text_ids[min(len(decoder.rows[row]), length) :]

    whole_logits = decoder.feed([text_ids], [8])[0].copy()
    roll_back(0, 5)
    decoder.feed([other_ids], [1])
    decoder.feed([roll_back(0, 5)[:-8]], [0])
    decoder.reorder([0, 0])
    batch_logits = decoder.feed([text_ids[-8:], other_ids[:11]], [8, 1])[0].copy()
    other_row_logits = decoder.feed([no_tokens, roll_back(1, len(text_ids) - 8)], [0, 8])[1].copy()
    rollback_logits = decoder.feed([roll_back(0, len(text_ids) - 3), no_tokens], [3, 0])[0]
    return [whole_logits, batch_logits, other_row_logits, rollback_logits]
