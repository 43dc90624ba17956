"""Find out by trial how to roll back a model's states; nothing is guessed from a model's name."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import openvino as ov

from ovspec import __version__
from ovspec.base.errors import OvspecError
from ovspec.base.files import read_cached, write_cached
from ovspec.cache.decoder import RollbackMethod, StateCopies
from ovspec.cache.stateful import StatefulDecoder
from ovspec.ir.attention_mask import UNBOUNDED, find_exact_masking_limit
from ovspec.ir.compile import MODEL_FILE, CompiledIR
from ovspec.ir.device import identify_machine

ROLLBACK_PROPERTIES = ("PRECISION", "PRECISION_HINT", "DEVICE_PROPERTIES")  # suffixes of property names
ROLLBACK_PROBE_VERSION = "4"  # a new version invalidates cached findings


@dataclass(frozen=True)
class ProbedRollback:
    """The rollback found by probing."""

    rollback: RollbackMethod
    setting: str  # its device and properties
    seconds: float  # of probing


def describe_rollback_setting(device: str, properties: dict[str, str]) -> str:
    """Return a string of the device, OpenVINO's version, and the properties with a possible effect on rollback."""
    affecting_properties = sorted(pair for pair in properties.items() if pair[0].endswith(ROLLBACK_PROPERTIES))
    openvino_version = ov.get_version().split("-")[0]
    return " ".join(
        [device, *(f"{name}={setting}" for name, setting in affecting_properties), f"OpenVINO {openvino_version}"]
    )


def probe_rollback(ir: CompiledIR) -> ProbedRollback:
    """Find a rollback without a trace: feed junk after a prefill, roll back, continue, compare with a clean run.

    Tries masking first, then trimming. Raises OvspecError if neither restores the clean run's logits, or if these
    are not numbers.
    """
    start_time = time.perf_counter()
    for kv_rollback in ("mask", "trim") if ir.kv_states else (None,):
        rollback = RollbackMethod(kv_rollback, replay=bool(ir.recurrent_states), copies=list_copy_modes(ir)[0])
        if restores_clean_run(ir, rollback):
            mask_bound = find_safe_mask_bound(ir) if kv_rollback == "mask" else None
            if mask_bound != 0:
                rollback = replace(rollback, mask_until=mask_bound)
                rollback = replace(rollback, copies=find_working_copy_modes(ir, rollback))
                setting = describe_rollback_setting(ir.device, ir.properties)
                return ProbedRollback(rollback, setting, time.perf_counter() - start_time)
    raise OvspecError(f"{ir.folder}: its KV cache can't be rolled back by masking or trimming; use another model.")


def restores_clean_run(ir: CompiledIR, rollback: RollbackMethod) -> bool:
    """Return whether junk leaves no trace in the logits after its rollback."""
    text_ids, junk_ids = np.split(np.random.default_rng(0).integers(0, ir.logits_width, 22), [14])
    decoder = StatefulDecoder(ir, rollback)

    def run_pieces(*pieces: np.ndarray) -> np.ndarray:
        decoder.reset(1)
        for piece in pieces[:-1]:
            decoder.feed([piece], [len(piece)])
        return decoder.feed([pieces[-1]], [1])[0].copy()

    clean_logits = run_pieces(text_ids[:10], text_ids[10:])
    regrouped_logits = run_pieces(text_ids[:7], text_ids[7:12], text_ids[12:])
    decoder.reset(1)
    decoder.feed([text_ids[:10]], [10])
    # If slots are freed, roll back twice to the same shapes, to test a GPU's reuse of states. With masking, more dead
    # slots would exceed a sliding window.
    rejected_pieces = [junk_ids]
    if rollback.kv != "mask":
        rejected_pieces.append(junk_ids[::-1])
    for rejected_ids in rejected_pieces:
        decoder.feed([np.concatenate((text_ids[len(decoder.rows[0]) : 10], rejected_ids))], [len(rejected_ids)])
        decoder.truncate(0, 10)
    rolled_back_logits = decoder.feed([text_ids[len(decoder.rows[0]) :]], [1])[0]
    if not np.isfinite(clean_logits).all():
        raise OvspecError(f"{ir.folder}: its logits are NaN or infinite on {ir.device}; export the model again.")
    # Feeding the same text in other pieces changes the logits by rounding; a rollback may change them to this extent.
    rounding_error = np.abs(regrouped_logits - clean_logits).max()
    return bool(np.abs(rolled_back_logits - clean_logits).max() <= 10 * rounding_error + 1e-4 * clean_logits.std())


def find_working_copy_modes(ir: CompiledIR, rollback: RollbackMethod) -> StateCopies:
    """Return the infer requests able to continue correctly with copied states; see ``RollbackMethod.copies``."""
    for copy_mode in list_copy_modes(ir):
        if copies_continue_like_clean_run(ir, replace(rollback, copies=copy_mode)):
            return copy_mode
    return None


def list_copy_modes(ir: CompiledIR) -> tuple[StateCopies, ...]:
    """Return the ways of setting states to try.

    On a GPU, a forward pass with copied states fails if the request hasn't run, and then all later passes of the model
    fail, too (OpenVINO 2026.4.1).
    """
    return ("any", "run") if ir.device == "CPU" else ("run",)


def copies_continue_like_clean_run(ir: CompiledIR, rollback: RollbackMethod) -> bool:
    """Return whether compacted rows, and a new request with their states, continue like a clean run."""
    text_ids, junk_ids = np.split(np.random.default_rng(1).integers(0, ir.logits_width, 22), [14])
    tail_ids = text_ids[10:]
    no_ids = text_ids[:0]
    decoder = StatefulDecoder(ir, rollback)
    copied_decoder = StatefulDecoder(ir, rollback)
    decoder.feed([text_ids[:10]], [0])
    clean_logits = decoder.feed([tail_ids], [4])[0].copy()
    decoder.reset(1)
    decoder.feed([text_ids[:7]], [0])
    decoder.feed([text_ids[7:12]], [0])
    regrouped_logits = decoder.feed([text_ids[12:]], [2])[0].copy()
    decoder.reset(1)
    continued_logits: list[np.ndarray] = []
    try:
        decoder.feed([text_ids[:10]], [0])
        if ir.kv_states and not ir.recurrent_states:
            if not ir.needs_single_rows:
                decoder.reorder([0, 0])
                decoder.feed([no_ids, junk_ids], [0, 1])
                decoder.truncate(1, 5)
            decoder.compact()
            other_row_count = len(decoder.rows) - 1
            decoder.feed([junk_ids, *[no_ids] * other_row_count], [1, *[0] * other_row_count])
            decoder.truncate(0, 10)
            decoder.compact()
        decoder.copy_into(copied_decoder)
        for tested_decoder in (decoder, copied_decoder):
            other_row_count = len(tested_decoder.rows) - 1
            logits = tested_decoder.feed([tail_ids, *[no_ids] * other_row_count], [4, *[0] * other_row_count])[0]
            continued_logits.append(logits.copy())
    except (OvspecError, RuntimeError, IndexError):  # a plugin may provide no states, or states without a shape
        return False
    rounding_error = np.abs(regrouped_logits - clean_logits[-2:]).max()
    tolerance = 10 * rounding_error + 1e-4 * clean_logits.std()
    return all(np.abs(logits - clean_logits).max() <= tolerance for logits in continued_logits)


def find_safe_mask_bound(ir: CompiledIR) -> int | None:
    """Return the number of slots up to which masking is exact: None for no limit, 0 if in doubt."""
    mask_bound = find_exact_masking_limit(ir)
    if mask_bound == 0 or (mask_bound is None and not ir.config.model_type):
        return 0
    safe_bound = min(ir.config.attention_window or UNBOUNDED, mask_bound or UNBOUNDED)
    return safe_bound if safe_bound < UNBOUNDED else None


def load_or_probe_rollback(ir: CompiledIR, cache_dir: Path | None) -> ProbedRollback:
    """Return the result of an earlier probe, or probe."""
    setting = f"{ROLLBACK_PROBE_VERSION} {describe_rollback_setting(ir.device, ir.properties)}"
    findings_file = find_findings_file("probes", ir.folder, setting, cache_dir, ir.device)
    return read_cached(ProbedRollback, findings_file) or write_cached(findings_file, probe_rollback(ir))


def find_findings_file(
    finding_kind: str, folder: Path, setting: str, cache_dir: Path | None, device: str = "CPU"
) -> Path | None:
    """Return the file for findings about the model in ``folder`` in a ``setting`` on this machine; None: no cache.

    ``device``: the device of the findings.
    """
    if not cache_dir:
        return None
    files = [folder / MODEL_FILE, (folder / MODEL_FILE).with_suffix(".bin"), folder / "config.json"]
    file_identities = [
        (str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()
    ]
    finding_key = repr((file_identities, setting, identify_machine(device), __version__))
    return cache_dir / finding_kind / f"{hashlib.sha256(finding_key.encode()).hexdigest()[:24]}.json"
