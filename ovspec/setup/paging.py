"""The paged engine: how a model is compiled for it, and whether it computes the stateful engine's logits."""

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
from ovspec.cache.decoder import FAST_GPU_RULE, FAST_RULE, Rollback
from ovspec.cache.paged import PagedDecoder
from ovspec.cache.stateful import StatefulDecoder
from ovspec.ir.attention_mask import UNBOUNDED, find_narrowest_window
from ovspec.ir.compile import MODEL_FILE, CompiledIR, check_weights, compile_ir, last_error_line
from ovspec.ir.crashes import name_fault
from ovspec.ir.device import DeviceOptions, check_device, is_gpu, make_compile_properties
from ovspec.ir.heads import add_features_output
from ovspec.ir.instruction_set import describe_instruction_set
from ovspec.ir.matrix_products import SPLITTING_INSTRUCTION_SETS, join_products, split_wide_products
from ovspec.ir.memory import weights_fit_into_memory
from ovspec.ir.paged_attention import NotPaged, pair_queries, read_attention_windows, rewrite_to_paged
from ovspec.setup.rollback_probing import find_findings_file

# If a model's attention window has at most this many slots, the text that compares the engines is longer than it.
LONGEST_TESTED_WINDOW = 256
# Bytes of weights up to which products are joined: OpenVINO keeps the joined weights in memory, and its own form of
# them, too, and the more a product has to read, the less it matters how many there are.
MOST_JOINED_BYTES = 5e8
# A GPU computes in 16 bits, so that its logits differ from those in f32 by this share of their standard deviation: seen
# are 0.045, and 0.5 and more where attention reads wrong keys.
GPU_NOISE = 0.1
# The properties that round least. Models compiled with them are needed only briefly, so they are not cached.
EXACT_PROPERTIES = {
    "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "CACHE_DIR": "",
}  # fmt: skip


@dataclass(frozen=True)
class PagedCheck:
    """Whether the paged decoder can run a model, and why."""

    usable: bool
    reason: str


def compile_paged(
    folder: Path, options: DeviceOptions, two_queries: bool = True, head: Path | None = None
) -> CompiledIR:
    """Compile like ``compile_ir``, rewritten for the paged decoder by ``rewrite_to_paged`` and ``join_products``.

    Raises NotPaged if that is impossible.

    ``two_queries``: whether it is rewritten for exact arithmetic by ``pair_queries`` and, if need be,
    ``split_wide_products``.
    ``head``: the folder of a head that the model gives features to.
    """

    on_gpu = is_gpu(check_device(options.device))

    def rewrite(model: ov.Model) -> None:
        if head:
            add_features_output(model, folder, head)
        rewrite_to_paged(model)
        if on_gpu:  # which joins products itself
            return
        if check_weights(folder / MODEL_FILE) <= MOST_JOINED_BYTES:
            join_products(model)
        if two_queries:
            pair_queries(model)
            if describe_instruction_set() in SPLITTING_INSTRUCTION_SETS:
                split_wide_products(model)

    if not on_gpu:
        # Not cached: OpenVINO 2026.4 can't read a paged model back for a CPU, because the head sizes are lost.
        options = replace(options, properties=options.properties | {"CACHE_DIR": ""})
    return compile_ir(folder, options, rewrite)


def check_paged(folder: Path, options: DeviceOptions) -> PagedCheck:
    """Return the result of ``compare_engines``, cached on disk; only a CPU and GPUs have a paged engine."""
    device = check_device(options.device)
    setting = f"OpenVINO {ov.get_version()}"
    if is_gpu(device):
        properties = [pair for pair in sorted(make_compile_properties(options).items()) if pair[0] != "CACHE_DIR"]
        setting = f"{setting} {properties}"
    elif device != "CPU":
        return PagedCheck(False, f"the paged engine runs on a CPU or a GPU only, and the device is {device}")
    file = find_findings_file("engines", folder, setting, options.cache_folder, device)
    compare = compare_engines
    if is_gpu(device) and make_compile_properties(options).get("KV_CACHE_PRECISION") != "f16":  # which may crash
        compare = compare_engines_in_process
    return read_cached(PagedCheck, file) or write_cached(file, compare(folder, options))


def compare_engines_in_process(folder: Path, options: DeviceOptions) -> PagedCheck:
    """Return the result of ``compare_engines``; a GPU's compiler that crashes ends a process of its own only."""
    options_json = json.dumps(asdict(options) | {"cache_dir": options.cache_dir and str(options.cache_dir)})
    command = [sys.executable, "-P", "-m", "ovspec.setup.engine_trial", str(folder), options_json]
    process = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if process.returncode == 0:
        return PagedCheck(**json.loads(process.stdout.splitlines()[-1]))
    fault = name_fault(process.returncode) or "an error"
    kv_precision = make_compile_properties(options).get("KV_CACHE_PRECISION")
    return PagedCheck(False, f"OpenVINO ends with {fault} when it runs it with a {kv_precision} KV cache")


def compare_engines(folder: Path, options: DeviceOptions) -> PagedCheck:
    """Return whether the paged decoder gives the same logits as the stateful one for the model in ``folder``.

    Both run with the properties that round least, or with those of ``options`` if 16-bit weights widened to 32 bits
    would not fit into memory; and one after the other, because memory may hold the model only once. A GPU runs the
    paged one with ``options``, and the CPU the stateful one.
    """
    on_gpu = is_gpu(check_device(options.device))
    properties = EXACT_PROPERTIES
    # Properties of a GPU are none of the CPU's.
    if not on_gpu and not weights_fit_into_memory(folder, 3):
        properties = options.fixed_properties | {"CACHE_DIR": ""}
    stateful_options = DeviceOptions(properties=properties)
    ir = compile_ir(folder, stateful_options)
    if ir.recurrent_states or not ir.kv_states:
        return PagedCheck(False, "it has states other than keys and values")
    if ir.config.rope_switch_length:
        return PagedCheck(False, "its rotary frequencies change with the length of the text")
    window = find_narrowest_window(ir)
    # Random ids, more than the window holds unless the window is longer than LONGEST_TESTED_WINDOW.
    length = 45 + window * (window <= LONGEST_TESTED_WINDOW)
    text, junk = np.split(np.random.default_rng(0).integers(0, ir.logits_width, length + 40), [length])
    decoder = StatefulDecoder(ir, Rollback(None))
    expected = decoder.feed([text], [8])[0].copy()
    decoder.reset(1)
    decoder.feed([text[:-8]], [0])
    # Feeding the same text in other pieces changes the logits by rounding; the paged decoder may differ as much.
    rounding = np.abs(decoder.feed([text[-8:]], [8])[0] - expected).max()
    del decoder, ir
    windows: set[int | None] = set()

    def rewrite(model: ov.Model) -> None:
        rewrite_to_paged(model)
        windows.update(read_attention_windows(model))
        if not on_gpu:
            pair_queries(model)

    try:
        paged_ir = compile_ir(folder, options if on_gpu else stateful_options, rewrite)
        paged_decoder = PagedDecoder(paged_ir, rule=FAST_GPU_RULE if on_gpu else FAST_RULE)
        paged_window = min((size for size in windows if size is not None), default=UNBOUNDED)
        if paged_window != window:
            return PagedCheck(False, f"its attention window is {window} in the model and {paged_window} when paged")
        paged_logits = compute_paged_logits(paged_decoder, text, junk)
    except NotPaged as error:
        return PagedCheck(False, str(error))
    except OvspecError as error:
        return PagedCheck(False, f"OpenVINO cannot run it paged ({last_error_line(error)})")
    tolerance = GPU_NOISE * expected.std() if on_gpu else 10 * rounding + 1e-4 * expected.std()
    if all(np.abs(logits - expected[-len(logits) :]).max() <= tolerance for logits in paged_logits):
        return PagedCheck(True, "it agrees with the stateful decoder")
    return PagedCheck(False, "its logits differ when paged")


def compute_paged_logits(decoder: PagedDecoder, text: np.ndarray, junk: np.ndarray) -> list[np.ndarray]:
    """Return the last logits of ``text``: fed whole, together with a forked row of other text, and after rollbacks."""
    begin = len(text) - 8
    no_tokens = text[:0]
    fed_whole = decoder.feed([text], [8])[0].copy()
    decoder.truncate(0, 5)
    decoder.feed([junk], [1])
    decoder.truncate(0, 5)
    decoder.feed([text[5:begin]], [0])
    decoder.reorder([0, 0])
    in_batch = decoder.feed([text[begin:], junk[:11]], [8, 1])[0].copy()
    decoder.truncate(1, begin)
    other_row = decoder.feed([no_tokens, text[begin:]], [0, 8])[1].copy()
    decoder.truncate(0, len(text) - 3)
    after_rollback = decoder.feed([text[-3:], no_tokens], [3, 0])[0]
    return [fed_whole, in_batch, other_row, after_rollback]
