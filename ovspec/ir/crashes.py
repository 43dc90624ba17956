"""Recognise models likely to crash OpenVINO during compilation, and compute them in f32.

A crash inside the library would end this process silently. So a small layer of the same kind is compiled first, in a
separate process, for the same device and with the same properties; the outcome is cached.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from ovspec import __version__
from ovspec.base.errors import OvspecError
from ovspec.base.files import read_cached, write_cached
from ovspec.base.progress import print_note
from ovspec.ir.config import MODEL_FILE
from ovspec.ir.device import (
    DeviceOptions,
    count_cores,
    identify_machine,
    list_possible_devices,
    make_compile_properties,
    resolve_precision,
)

TRIAL_COMMAND = ("-P", str(Path(__file__).with_name("crash_trial.py")))  # Python's arguments; then device, properties
TRIAL_SECONDS = 60.0  # limit of a trial; it needs less than one
# Exit codes of processes ended by a fault in their own code; other signals come from outside.
FAULT_SIGNALS = ("SIGFPE", "SIGILL", "SIGSEGV", "SIGBUS", "SIGABRT")
FAULTS_BY_EXIT_CODE = {-int(getattr(signal, name)): name for name in FAULT_SIGNALS if hasattr(signal, name)}
FIRST_WINDOWS_FAULT_CODE = 0xC0000000  # Windows' exit codes of crashed processes begin here
MATRIX_SHAPE_PATTERN = re.compile(rb'<data element_type="(?:f32|f16|bf16)" shape="(\d+), ?(\d+)"')

TrialSetting = tuple[str, ...]
known_outcomes: dict[TrialSetting, TrialOutcome] = {}  # of this process, with or without a cache on the disk
shown_notes = set[str]()


@dataclass(frozen=True)
class TrialOutcome:
    """The signal of a failed trial, such as SIGFPE; empty if the trial succeeded."""

    fault: str


def choose_crash_free_options(folder: Path, options: DeviceOptions) -> DeviceOptions:
    """Return ``options``, in f32 where OpenVINO would crash on the model in ``folder``; a note reports this once.

    Raises OvspecError if the user asked for the crashing precision.
    """
    precision = resolve_precision(options)
    if precision == "f32" or "CPU" not in list_possible_devices(options.device) or not has_uncompressed_gates(folder):
        return options
    fault = recall_or_run_trial(options).fault
    if not fault:
        return options
    cores = count_cores()
    threads = min(int(options.fixed_properties.get("INFERENCE_NUM_THREADS", 0)) or cores, cores)
    occasion = f"when it compiles this model for {precision} with {threads} thread{'s' * (threads != 1)}"
    crash_text = f"{folder}: OpenVINO crashes on this machine ({fault}) {occasion}"
    if options.precision:
        raise OvspecError(
            f"{crash_text}; set `precision='f32'`, use more threads, or export the model with int8 weights."
        )
    note = f"{crash_text}, so the model is computed in f32; more threads or int8 weights avoid this."
    if note not in shown_notes:
        shown_notes.add(note)
        print_note(note)
    return replace(options, properties=options.properties | {"INFERENCE_PRECISION_HINT": "f32"})


def has_uncompressed_gates(folder: Path) -> bool:
    """Return whether the IR in ``folder`` has layers like the trial's: with a gate, and weights not compressed.

    Such a layer has two matrices of the same shape and a transposed one; a layer without a gate has one of each.
    """
    ir_file = folder / MODEL_FILE
    if not ir_file.is_file():
        return False
    matrix_shapes = MATRIX_SHAPE_PATTERN.findall(ir_file.read_bytes())
    shape_counts = Counter((int(rows), int(columns)) for rows, columns in matrix_shapes)

    def is_gated(rows: int, columns: int) -> bool:
        transposed_count = 2 if rows == columns else shape_counts[columns, rows]
        return shape_counts[rows, columns] > transposed_count > 0

    return any(is_gated(*matrix_shape) for matrix_shape in list(shape_counts))


def recall_or_run_trial(options: DeviceOptions) -> TrialOutcome:
    """Return the cached outcome, from this or an earlier process, or run the trial and cache its outcome."""
    properties = {name: value for name, value in make_compile_properties(options).items() if name != "CACHE_DIR"}
    trial_setting = (options.device.upper(), json.dumps(properties, sort_keys=True), *TRIAL_COMMAND)
    if trial_setting not in known_outcomes:
        finding_key = repr((trial_setting[:2], identify_machine(options.device), __version__))
        file_name = f"{hashlib.sha256(finding_key.encode()).hexdigest()[:24]}.json"
        finding_file = options.cache_folder and options.cache_folder / "crashes" / file_name
        outcome = read_cached(TrialOutcome, finding_file)
        if not outcome and (outcome := run_trial(*trial_setting)):
            write_cached(finding_file, outcome)
        known_outcomes[trial_setting] = outcome or TrialOutcome("")
    return known_outcomes[trial_setting]


def run_trial(device: str, properties: str, *trial_arguments: str) -> TrialOutcome | None:
    """Run the trial; None if it timed out, or failed without a crash, so the outcome is unknown."""
    command = [sys.executable, *trial_arguments, device, properties]
    devnull = subprocess.DEVNULL
    try:
        exit_code = subprocess.run(
            command, stdin=devnull, stdout=devnull, stderr=devnull, timeout=TRIAL_SECONDS
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return None
    if exit_code == 0:
        return TrialOutcome("")
    fault = name_fault_signal(exit_code)
    return TrialOutcome(fault) if fault else None


def name_fault_signal(exit_code: int) -> str | None:
    """Return the fault signal behind a process's exit code, such as SIGSEGV; None if it didn't end by a fault."""
    if exit_code >= FIRST_WINDOWS_FAULT_CODE:
        return f"{exit_code:#x}"
    return FAULTS_BY_EXIT_CODE.get(exit_code)
