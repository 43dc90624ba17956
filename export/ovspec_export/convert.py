"""Convert a checkpoint to an IR in a folder, each step in a separate process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.base.progress import format_size, print_note, show_step
from ovspec.ir.compile import MODEL_FILE
from ovspec.ir.heads import list_head_layers
from ovspec.setup.manifest import MANIFEST_FILE
from ovspec.text.tokenizer import TOKENIZER_FILE
from ovspec_export.compression import DEFAULT_GROUP_SIZE, KEEP, WEIGHT_FORMATS, Compression
from ovspec_export.environments import prepare_environment_variables
from ovspec_export.head_layout import flatten_head_config
from ovspec_export.kept_weights import has_kept_weights, read_forms, write_first_layers_config
from ovspec_export.mtp_layout import make_layer_config
from ovspec_export.sources import TEXT_SUFFIXES, GgufSource, HeadSource, MtpSource, Source, copy_model_files
from ovspec_export.tokenizers import load_tokenizer

WORKER_MODULE = "ovspec_export.worker"  # the module with the jobs
# Called with each message about a job's progress.
MessageHandler = Callable[[JsonObject], None]
POLL_SECONDS = 0.2 if sys.platform == "win32" else None  # seconds; on Windows, Ctrl-C doesn't interrupt longer waits
SMALLEST_GROUP_SIZE = 16  # weights with a shared scale
KEPT_SIZE = 1.8  # maximum size of kept weights, relative to the source's: 5 bits become 8
JOB_FAILURES = {
    "export_with_optimum": "optimum-cli could not export the model",
    "convert_eagle_head": "the head could not be converted",
    "convert_mtp_layers": "its MTP layer could not be converted",
    "unpack_gguf_weights": "its weights could not be unpacked",
    "convert_tokenizer": "its tokenizer could not be converted",
    "save_first_layers": "its first layers could not be saved as a checkpoint",
    "calibrate_weights": "nncf could not compress the model",
    "round_to_bf16": "the model could not be rounded to bf16",
    "evaluate_ir": "the exported model could not be compared with the checkpoint",
    "write_texts": "the model could not generate texts",
    "write_features": "its hidden states could not be computed",
    "train_head": "a head could not be trained",
    "train_mtp": "an MTP layer could not be trained",
    "check_mtp_possible": "no MTP layer can be made",
    "find_most_used_ids": "the model could not generate texts",
    "train_draft": "the draft could not be trained",
    "measure_costs": "the model could not be timed",
    "measure_gain": "the draft's gain could not be measured",
}
JOBS_WITHOUT_OVERLAY = ("unpack_gguf_weights", "convert_tokenizer", "round_to_bf16")  # they don't load the model
BUG_ADVICE = "; remove the cause and try again, or report this bug to ovspec"
# Text in the standard error of a failed step -> the reason to report instead.
KNOWN_FAILURE_REASONS = {
    "No space left on device": "the disk of {folder} is full; free some space",
    "iostream error": "a file could not be written in {folder}; check the free space of the disk",
    "requested and": "a file could not be written in {folder}; check the free space of the disk",  # numpy's
    "PytorchStreamWriter failed": "a file could not be written in {folder}; check the free space of the disk",
    "MemoryError": "there is not enough free memory; close other programs, or use a machine with more memory",
    "bad_alloc": "there is not enough free memory; close other programs, or use a machine with more memory",
}


def convert_source(
    source: Source,
    folder: Path,
    compression: Compression,
    trust_remote_code: bool = False,
    tap_layers: list[int] | None = None,
    states_file: Path | None = None,
) -> None:
    """Write the IR and the tokenizer of ``source`` into ``folder``.

    The inputs of its ``tap_layers`` for a short text, or the lm_head's if there are none, go to ``states_file``, for
    the comparison of a head.

    Raises:
        OvspecError: optimum or nncf rejects the model or the options, or disk space or memory runs out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if source.is_ir:
        with show_step(f"{source.name}: copying the IR of {format_size(source.size_in_bytes)}", keep_line=True):
            copy_ir_files(source, folder)
        return
    arguments = ["--model", str(source.path), "--task", "text-generation-with-past"]
    runs_code = source.runs_own_code(trust_remote_code)
    arguments += [*compression.optimum_arguments(), *["--trust-remote-code"] * runs_code]
    optimum_format = arguments[arguments.index("--weight-format") + 1]
    group_note = ""
    if optimum_format == "int4" and (compression.group_size or 0) > 0:
        group_note = f" in groups of {compression.group_size}"
    heading = f"{source.name}: converting {format_size(source.size_in_bytes)} to {optimum_format}{group_note}"
    if compression.weight_format == KEEP:
        heading = f"{source.name}: converting its graph and keeping its weights"
    with show_step(heading, keep_line=True) as conversion_step:
        run_worker_job(
            "export_with_optimum",
            source,
            folder,
            arguments=[*arguments, str(folder)],
            source=str(source.path),
            model_type=source.model_type,
            trust_remote_code=runs_code,
            **({"tap_layers": tap_layers, "states_file": str(states_file)} if tap_layers is not None else {}),
        )
        if not (folder / "openvino_tokenizer.xml").is_file():  # the overlay can't read a newer transformers' files
            path_arguments = {"source": str(source.path), "folder": str(folder)}
            run_worker_job("convert_tokenizer", source, folder, **path_arguments, trust_remote_code=trust_remote_code)
        if not (folder / TOKENIZER_FILE).is_file():  # has the byte vocabulary; optimum-cli omits it for some models
            load_tokenizer(source, trust_remote_code).save_pretrained(folder)
        forms = read_forms(folder) if compression.weight_format == KEEP else []
        conversion_step.result = describe_folder_size(folder)
    for form in forms:
        print_note(f"{source.name}: {form}")
    if compression.calibration:
        heading = f"compressing {describe_folder_size(folder)} to int4 with {compression.calibration.name}"
        with show_step(f"{source.name}: {heading}", keep_line=True) as compression_step:
            run_worker_job(
                "calibrate_weights",
                source,
                folder,
                folder=str(folder),
                calibration=str(compression.calibration.absolute()),
                samples=compression.samples,
                config=compression.quantization_config(),
                trust_remote_code=runs_code,
            )
            compression_step.result = describe_folder_size(folder)
    elif compression.weight_format == "bf16":
        with show_step(f"{source.name}: rounding {describe_folder_size(folder)} to bf16", keep_line=True) as rounding:
            run_worker_job("round_to_bf16", source, folder, folder=str(folder))
            rounding.result = describe_folder_size(folder)


def convert_head(
    source: HeadSource, folder: Path, compression: Compression, target: Source, tap_layers: list[int], states_file: Path
) -> None:
    """Write the IR of a head on the inputs of the target's ``tap_layers`` into ``folder``.

    Args:
        states_file: the inputs of these layers for some text, if written by ``convert_source``.

    Raises:
        OvspecError: like ``convert_source``.
    """
    arguments: JsonObject = {"target": "" if target.is_ir else str(target.path), "tap_layers": tap_layers}
    # Its attention has no window, even if its config has one.
    config = flatten_head_config(source.config) | {"sliding_window": None}
    convert_head_with("convert_eagle_head", source, folder, compression, states_file, arguments, config)


def convert_mtp_layer(
    source: MtpSource, folder: Path, compression: Compression, target_ids: np.ndarray | None, states_file: Path
) -> None:
    """Write the IR of an MTP layer into ``folder``, with the IRs of further layers inside it.

    Args:
        target_ids: the ids of the tokens to propose, (n,); None for all.
        states_file: the target's lm_head inputs for some text, if written by ``convert_source``.

    Raises:
        OvspecError: like ``convert_source``.
    """
    arguments: JsonObject = {"model_type": source.model_type, "ids_file": ""}
    if target_ids is not None:  # too many for a command line
        ids_file = states_file.with_name("ids.npy")
        np.save(ids_file, target_ids)
        arguments["ids_file"] = str(ids_file)
    config = make_layer_config(source.config.get("text_config") or source.config)
    try:
        convert_head_with("convert_mtp_layers", source, folder, compression, states_file, arguments, config)
    finally:
        states_file.with_name("ids.npy").unlink(missing_ok=True)


def convert_head_with(
    job: str,
    source: HeadSource,
    folder: Path,
    compression: Compression,
    states_file: Path,
    arguments: JsonObject,
    config: JsonObject,
) -> None:
    """Run a job to write the IR of a head into ``folder``, with these ``arguments`` among others, and its config."""
    folder.mkdir(parents=True)
    weight_format = compression.weight_format
    part = "MTP layer" if isinstance(source, MtpSource) else "head"
    heading = f"{source.name}: converting the {part} of {format_size(source.size_in_bytes)} to {weight_format}"
    with show_step(heading, keep_line=True) as conversion_step:
        run_worker_job(
            job,
            source,
            folder,
            source=str(source.path),
            folder=str(folder),
            name=source.name,
            weight_format=weight_format,
            quantization=compression.quantization_config() if weight_format.startswith("int") else {},
            states_file=str(states_file),
            **arguments,
        )
        for layer_folder in list_head_layers(folder):
            (layer_folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8", newline="\n")
        conversion_step.result = describe_folder_size(folder)


def make_first_layers_checkpoint(source: Source, layer_count: int, folder: Path, trust_remote_code: bool) -> Source:
    """Save the first layers of ``source`` as a checkpoint in ``folder`` and return it as a source."""
    name = f"{source.name}, first {layer_count} layers"
    if has_kept_weights(source.path):
        write_first_layers_config(source.path, layer_count, folder)
        return Source(name, folder, is_ir=False, revision=source.revision)
    with show_step(f"{source.name}: making a draft from its first {layer_count} layers", keep_line=True):
        run_worker_job(
            "save_first_layers",
            source,
            folder.parent,
            source=str(source.path),
            layer_count=layer_count,
            folder=str(folder),
            trust_remote_code=source.runs_own_code(trust_remote_code),
        )
    return Source(name, folder, is_ir=False, revision=source.revision)


def compute_layer_share(source: Source, layer_count: int) -> float:
    """Return ``layer_count`` as a share of all layers; raises OvspecError for an IR or a number out of range."""
    if source.is_ir:
        raise OvspecError(
            f"{source.name}: `draft_layers` needs a checkpoint, but this model is already an OpenVINO IR; give the "
            "original checkpoint."
        )
    total_layers = source.get_config_number("layers")
    if total_layers is None:
        return 1.0  # not in the config under any of these names; transformers will know
    if not 0 < layer_count < total_layers:
        allowed_counts = f"1 to {total_layers - 1}"
        raise OvspecError(
            f"`draft_layers` is {layer_count}; {source.name} has {total_layers} layers, so choose {allowed_counts}."
        )
    return layer_count / total_layers


def copy_ir_files(source: Source, folder: Path) -> None:
    """Copy the files of an IR to ``folder``, without other files of its folder."""

    def is_ir_file(file: Path) -> bool:
        return file.name != MANIFEST_FILE and (file.suffix in TEXT_SUFFIXES or file.name.startswith("openvino_"))

    for layer_folder in list_head_layers(source.path):
        copy_model_files(layer_folder, folder / layer_folder.relative_to(source.path), is_ir_file)


def run_worker_job(
    job: str, model: Source, scratch_folder: Path, on_message: MessageHandler | None = None, /, **arguments: JsonValue
) -> bool:
    """Run a job of ``worker.py`` in the environment of the model's family, with temporary files in ``scratch_folder``.

    on_message: called with each message about the job's progress. With it, Ctrl-C asks the job to save its work so far
    and to end, as announced by the message ``{"stopping": True}``, and a second Ctrl-C ends it.

    Returns whether the job ran to completion.

    Raises:
        OvspecError: the job fails, with the reason, or its environment can't be prepared.
    """
    command = [sys.executable, "-P", "-m", WORKER_MODULE, job, json.dumps(arguments)]
    scratch_folder.mkdir(parents=True, exist_ok=True)
    overlay_variables: dict[str, str] = {}
    if not model.is_ir and job not in JOBS_WITHOUT_OVERLAY:
        overlay_variables = prepare_environment_variables(model.family.environment, model.model_type)
    stop_requested = False
    with tempfile.TemporaryDirectory(dir=scratch_folder, ignore_cleanup_errors=True) as temporary_folder:
        # Everything needed is already downloaded, with weights as safetensors only; the job must not download anything.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONUTF8": "1"}
        environment |= {
            "TMPDIR": temporary_folder,
            "TEMP": temporary_folder,
            "TMP": temporary_folder,
        } | overlay_variables
        error_file = Path(temporary_folder) / "errors"
        # The worker ends when its input closes, even if this process is killed. Ctrl-C is for this process alone.
        with (
            error_file.open("wb") as error_stream,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=error_stream,
                env=environment,
                **make_process_group_arguments(),
            ) as process,
        ):
            assert process.stdin
            message_reader = threading.Thread(target=forward_messages, args=(process, on_message), daemon=True)
            message_reader.start()
            try:
                while process.poll() is None:
                    try:
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            process.wait(POLL_SECONDS)
                    except KeyboardInterrupt:
                        if not on_message or stop_requested:
                            raise
                        stop_requested = True
                        on_message({"stopping": True})
                        with contextlib.suppress(OSError):  # it has just ended
                            process.stdin.write(b"stop\n")
                            process.stdin.flush()
            except BaseException:
                process.kill()
                raise
            message_reader.join()
        error_text = error_file.read_text(encoding="utf-8", errors="replace")
    if process.returncode:
        reason = describe_failure(error_text, process.returncode, scratch_folder.absolute().parent, BUG_ADVICE)
        raise OvspecError(f"{model.name}: {JOB_FAILURES[job]} ({reason}).")
    return not stop_requested


def make_process_group_arguments() -> JsonObject:
    """Return the arguments of ``Popen`` to shield a process from Ctrl-C."""
    if sys.platform == "win32":
        return {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200)}
    return {"start_new_session": True}


def forward_messages(process: subprocess.Popen[bytes], on_message: MessageHandler | None) -> None:
    """Pass on a worker's messages until it ends."""
    assert process.stdout
    for line in process.stdout:
        if on_message:
            on_message(json.loads(line))


def describe_failure(error_text: str, returncode: int, folder: Path = Path(), advice: str = "") -> str:
    """Return the reason for a failure, from the standard error of a process with output in ``folder``.

    advice: added to an unknown reason; errors of ours have their own advice.
    """
    for pattern, reason in KNOWN_FAILURE_REASONS.items():
        if pattern in error_text:
            return reason.format(folder=folder)
    if returncode < 0:
        return f"its process was ended by signal {-returncode}{advice}"
    lines = [line.rstrip() for line in error_text.splitlines() if line.strip()]
    if not lines:
        return f"its process ended with exit code {returncode}{advice}"
    # A traceback ends with the exception; its message may have several lines.
    exception_line_numbers = [
        i for i, line in enumerate(lines) if re.match(r"[A-Za-z_][\w.]*(Error|Exception)\b", line)
    ]
    message = " ".join(line.strip() for line in lines[exception_line_numbers[-1] if exception_line_numbers else -1 :])
    sentences = re.split(r"(?<=\.) ", re.sub(r"^[\w.]+: ", "", message))
    exception_text = " ".join(sentences[:2])[:300].rstrip(". ")
    return exception_text if message.startswith(OvspecError.__module__) else f"{exception_text}{advice}"


def describe_folder_size(folder: Path) -> str:
    """Return the size of the files in ``folder``, in words."""
    files = [path for layer_folder in list_head_layers(folder) for path in layer_folder.iterdir() if path.is_file()]
    return format_size(sum(path.stat().st_size for path in files))


def estimate_disk_space(source: Source, compression: Compression) -> float:
    """Return the disk space for exporting ``source``, in bytes: its IR and, if made first, the uncompressed IR."""
    if source.is_ir:
        return source.size_in_bytes
    if compression.weight_format == KEEP:
        return KEPT_SIZE * source.size_in_bytes + 20e6
    final_bytes = source.parameter_count * WEIGHT_FORMATS[compression.weight_format] / 8
    passes_through_fp32 = compression.calibration or compression.weight_format not in ("fp32", "fp16")
    checkpoint_bytes = 0  # written first
    if isinstance(source, GgufSource):
        checkpoint_bytes = source.parameter_count * (4 if compression.weight_format == "fp32" else 2)
    elif source.has_non_text_parts:
        checkpoint_bytes = source.size_in_bytes
    return 1.05 * (final_bytes + source.parameter_count * 4 * bool(passes_through_fp32)) + checkpoint_bytes + 20e6


def choose_group_size(source: Source, compression: Compression) -> Compression:
    """Return ``compression`` with a group size for the weights' rows, if it has only int4 and no group size.

    Raises:
        OvspecError: a requested group size doesn't fit; nncf would say so only after the conversion.
    """
    if source.is_ir or compression.weight_format != "int4" or compression.ratio not in (None, 1.0):
        return compression  # with a ratio, nncf chooses the layers to compress
    row_widths = source.weight_widths()
    group_size = compression.group_size or DEFAULT_GROUP_SIZE
    misfit_layer = next((name for name, width in row_widths.items() if group_size != -1 and width % group_size), None)
    if not misfit_layer:
        return compression
    fitting_size = math.gcd(*row_widths.values(), DEFAULT_GROUP_SIZE)
    advice = f"{fitting_size}, or to -1"
    if fitting_size < SMALLEST_GROUP_SIZE:
        fitting_size = -1
        advice = "-1"
    if not compression.requested_options():  # optimum's own choice for an unknown model has groups of 128
        return dataclasses.replace(compression, group_size=fitting_size)
    raise OvspecError(
        f"{source.name}: `group_size` is {group_size}, but the rows of {misfit_layer} have "
        f"{row_widths[misfit_layer]} weights, not a multiple of {group_size}; set `group_size` to {advice} for a "
        "scale per channel."
    )


def check_converted_files(source: Source, folder: Path) -> None:
    """Raise OvspecError if a step reported success but produced no model."""
    for file in (folder / MODEL_FILE, (folder / MODEL_FILE).with_suffix(".bin")):
        if not file.is_file() or not file.stat().st_size:
            raise OvspecError(
                f"{source.name}: the conversion wrote no {file.name}; free some disk space, and export again."
            )
