"""Convert one checkpoint to an IR in a folder, each step in a process of its own."""

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
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.base.progress import in_bytes, step
from ovspec.ir.compile import MODEL_FILE
from ovspec.setup.manifest import MANIFEST_FILE
from ovspec.text.tokenizer import TOKENIZER_FILE
from ovspec_export.compression import DEFAULT_GROUP_SIZE, WEIGHT_FORMATS, Compression
from ovspec_export.environments import prepared_variables
from ovspec_export.head_layout import flattened
from ovspec_export.sources import TEXTS, GgufSource, HeadSource, Source, copy_files
from ovspec_export.tokenizers import load_tokenizer

WORKER = "ovspec_export.worker"  # the module that runs jobs
WAIT = 0.2 if sys.platform == "win32" else None  # seconds; Ctrl-C interrupts no longer wait there
SMALLEST_GROUP = 16  # weights that share a scale
FAILED = {
    "optimum_cli": "optimum-cli could not export it",
    "eagle_head": "the head could not be converted",
    "gguf_weights": "its weights could not be unpacked",
    "tokenizer": "its tokenizer could not be converted",
    "first_layers": "its first layers could not be saved as a checkpoint",
    "calibrate": "nncf could not compress it",
    "to_bf16": "it could not be rounded to bf16",
    "evaluate": "it could not be compared with the checkpoint",
    "write_texts": "it could not write texts",
    "write_features": "its hidden states could not be computed",
    "train_head": "a head could not be trained",
    "train_draft": "the draft could not be taught",
    "measure_costs": "it could not be timed",
    "measure_gain": "the gain could not be measured",
}
OURS = ("gguf_weights", "tokenizer", "to_bf16")  # jobs that don't load the model, and run without an overlay
# Text in the standard error of a failed step -> the reason that is reported instead.
KNOWN_REASONS = {
    "No space left on device": "the disk of {place} is full",
    "iostream error": "a file could not be written in {place}; is the disk full?",
    "requested and": "a file could not be written in {place}; is the disk full?",  # numpy's
    "PytorchStreamWriter failed": "a file could not be written in {place}; is the disk full?",
    "MemoryError": "not enough memory",
    "bad_alloc": "not enough memory",
}


def convert(
    source: Source,
    folder: Path,
    compression: Compression,
    trust_remote_code: bool = False,
    layers: list[int] | None = None,
    states: Path | None = None,
) -> None:
    """Write the IR and the tokenizer of ``source`` into ``folder``.

    What ``layers`` of it read of a short text goes to the file ``states``, for the comparison of a head.

    Raises:
        OvspecError: optimum or nncf rejects the model or the options, or disk space or memory runs out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if source.is_ir:
        with step(f"{source.name}: copying the IR of {in_bytes(source.size)}", keep=True):
            copy_ir(source, folder)
        return
    arguments = ["--model", str(source.folder), "--task", "text-generation-with-past"]
    runs_code = source.runs_code(trust_remote_code)
    arguments += [*compression.arguments(), *["--trust-remote-code"] * runs_code]
    first = arguments[arguments.index("--weight-format") + 1]
    groups = f" in groups of {compression.group_size}" if (compression.group_size or 0) > 0 and first == "int4" else ""
    with step(f"{source.name}: converting {in_bytes(source.size)} to {first}{groups}", keep=True) as converting:
        run_job(
            "optimum_cli",
            source,
            folder,
            arguments=[*arguments, str(folder)],
            source=str(source.folder),
            model_type=source.model_type,
            trust_remote_code=runs_code,
            **({"layers": layers, "states": str(states)} if layers else {}),
        )
        if not (folder / "openvino_tokenizer.xml").is_file():  # the overlay can't read what a newer transformers wrote
            where = {"source": str(source.folder), "folder": str(folder)}
            run_job("tokenizer", source, folder, **where, trust_remote_code=trust_remote_code)
        if not (folder / TOKENIZER_FILE).is_file():  # has the byte vocabulary; optimum-cli omits it for some
            load_tokenizer(source, trust_remote_code).save_pretrained(folder)
        converting.result = written(folder)
    if compression.calibration:
        what = f"compressing {written(folder)} to int4 with {compression.calibration.name}"
        with step(f"{source.name}: {what}", keep=True) as compressing:
            run_job(
                "calibrate",
                source,
                folder,
                folder=str(folder),
                calibration=str(compression.calibration.absolute()),
                samples=compression.samples,
                config=compression.quantization_config(),
                trust_remote_code=runs_code,
            )
            compressing.result = written(folder)
    elif compression.weight_format == "bf16":
        with step(f"{source.name}: rounding {written(folder)} to bf16", keep=True) as rounding:
            run_job("to_bf16", source, folder, folder=str(folder))
            rounding.result = written(folder)


def convert_head(
    source: HeadSource, folder: Path, compression: Compression, target: Source, layers: list[int], states: Path
) -> None:
    """Write the IR of a head into ``folder``. layers: those of ``target`` whose inputs it reads; states: as they are.

    Raises:
        OvspecError: like ``convert``.
    """
    folder.mkdir(parents=True)
    format_ = compression.weight_format
    with step(f"{source.name}: converting the head of {in_bytes(source.size)} to {format_}", keep=True) as converting:
        where = {"source": source.folder, "folder": folder, "target": "" if target.is_ir else target.folder}
        run_job(
            "eagle_head",
            source,
            folder,
            **{each: str(place) for each, place in where.items()},
            name=source.name,
            layers=layers,
            weight_format=format_,
            quantization=compression.quantization_config() if format_.startswith("int") else {},
            states=str(states),
        )
        # Its attention has no window, whatever its config says of one.
        config = flattened(source.config) | {"sliding_window": None}
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8", newline="\n")
        converting.result = written(folder)


def first_layers(source: Source, layers: int, folder: Path, trust_remote_code: bool) -> Source:
    """Save the first ``layers`` layers of ``source`` as a checkpoint in ``folder`` and return it as a source."""
    with step(f"{source.name}: making a draft from its first {layers} layers", keep=True):
        options: dict[str, Any] = {"layers": layers, "folder": str(folder)}
        options["trust_remote_code"] = source.runs_code(trust_remote_code)
        run_job("first_layers", source, folder.parent, source=str(source.folder), **options)
    return Source(f"{source.name}, first {layers} layers", folder, is_ir=False, revision=source.revision)


def layers_of(source: Source, layers: int) -> float:
    """Return ``layers`` as a share of all layers; raises OvspecError for an IR or a number out of range."""
    if source.is_ir:
        raise OvspecError(f"{source.name}: `draft_layers` needs a checkpoint, but this is already an IR.")
    total = source.entry("layers")
    if total is None:
        return 1.0  # not in the config by any of these names; transformers will know
    if not 0 < layers < total:
        raise OvspecError(f"`draft_layers` is {layers}; {source.name} has {total} layers, so take 1 to {total - 1}.")
    return layers / total


def copy_ir(source: Source, folder: Path) -> None:
    """Copy the files of an IR to ``folder``, without other files beside them."""

    def wanted(file: Path) -> bool:
        return file.name != MANIFEST_FILE and (file.suffix in TEXTS or file.name.startswith("openvino_"))

    copy_files(source.folder, folder, wanted)


def run_job(
    job: str, model: Source, scratch: Path, told: Callable[[dict[str, Any]], None] | None = None, /, **arguments: Any
) -> bool:
    """Run a job of ``worker.py`` in the environment of the model's family, with temporary files in ``scratch``.

    told: is called with each message about the job's progress. With it, Ctrl-C asks the job to write what it has and to
    end, which ``{"stopping": True}`` tells, and a second Ctrl-C ends it.

    Returns whether the job came to its own end.

    Raises:
        OvspecError: the job fails, with the reason, or its environment can't be prepared.
    """
    command = [sys.executable, "-P", "-m", WORKER, job, json.dumps(arguments)]
    scratch.mkdir(parents=True, exist_ok=True)
    overlay = {} if model.is_ir or job in OURS else prepared_variables(model.family.environment, model.model_type)
    asked = False
    with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as temporary:
        # Everything needed is already downloaded, with weights as safetensors only; nothing else may be fetched now.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONUTF8": "1"}
        environment |= {"TMPDIR": temporary, "TEMP": temporary, "TMP": temporary} | overlay
        errors = Path(temporary) / "errors"
        # The worker ends when its input closes, even if this process is killed. Ctrl-C is for this process alone.
        with (
            errors.open("wb") as noise,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=noise,
                env=environment,
                **own_group(),
            ) as process,
        ):
            assert process.stdin
            listening = threading.Thread(target=listen, args=(process, told), daemon=True)
            listening.start()
            try:
                while process.poll() is None:
                    try:
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            process.wait(WAIT)
                    except KeyboardInterrupt:
                        if not told or asked:
                            raise
                        asked = True
                        told({"stopping": True})
                        with contextlib.suppress(OSError):  # it has just ended
                            process.stdin.write(b"stop\n")
                            process.stdin.flush()
            except BaseException:
                process.kill()
                raise
            listening.join()
        noisy = errors.read_text(encoding="utf-8", errors="replace")
    if process.returncode:
        why = reason(noisy, process.returncode, scratch.absolute().parent)
        raise OvspecError(f"{model.name}: {FAILED[job]} ({why}).")
    return not asked


def own_group() -> dict[str, Any]:
    """Return the arguments of ``Popen`` that keep Ctrl-C from a process."""
    if sys.platform == "win32":
        return {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200)}
    return {"start_new_session": True}


def listen(process: subprocess.Popen[bytes], told: Callable[[dict[str, Any]], None] | None) -> None:
    """Hand on what a worker tells, until it ends."""
    assert process.stdout
    for line in process.stdout:
        if told:
            told(json.loads(line))


def reason(told: str, returncode: int, place: Path = Path()) -> str:
    """Return what went wrong, from the standard error of a failed process that wrote to ``place``."""
    known = next((text.format(place=place) for sign, text in KNOWN_REASONS.items() if sign in told), None)
    lines = [line.rstrip() for line in told.splitlines() if line.strip()]
    if known or not lines or returncode < 0:
        return known or (f"ended by signal {-returncode}" if returncode < 0 else f"exit code {returncode}")
    # A traceback ends with the exception, whose message may have several lines.
    raised = [i for i, line in enumerate(lines) if re.match(r"[A-Za-z_][\w.]*(Error|Exception)\b", line)]
    told = " ".join(line.strip() for line in lines[raised[-1] if raised else -1 :])
    sentences = re.split(r"(?<=\.) ", re.sub(r"^[\w.]+: ", "", told))
    return " ".join(sentences[:2])[:300].rstrip(". ")


def written(folder: Path) -> str:
    """Return the size of the files in ``folder``."""
    return in_bytes(sum(path.stat().st_size for path in folder.iterdir() if path.is_file()))


def needed_space(source: Source, compression: Compression) -> float:
    """Return the disk space for exporting ``source``, in bytes: its IR and, if made first, the uncompressed one."""
    if source.is_ir:
        return source.size
    final = source.parameters * WEIGHT_FORMATS[compression.weight_format] / 8
    through_fp32 = compression.calibration or compression.weight_format not in ("fp32", "fp16")
    copy = source.size if source.holds_text_model else 0  # made first
    if isinstance(source, GgufSource):
        copy = source.parameters * (4 if compression.weight_format == "fp32" else 2)
    return 1.05 * (final + source.parameters * 4 * bool(through_fp32)) + copy + 20e6


def fitted(source: Source, compression: Compression) -> Compression:
    """Return ``compression`` with groups that divide the rows of the weights, where int4 is asked for and nothing else.

    Raises:
        OvspecError: a group size that is asked for doesn't divide them, which nncf would say after the conversion.
    """
    if source.is_ir or compression.weight_format != "int4" or compression.ratio not in (None, 1.0):
        return compression  # with a ratio, nncf chooses the layers that are cut
    widths, size = source.widths(), compression.group_size or DEFAULT_GROUP_SIZE
    wrong = next((name for name, width in widths.items() if size != -1 and width % size), None)
    if not wrong:
        return compression
    fits = math.gcd(*widths.values(), DEFAULT_GROUP_SIZE)
    fits = fits if fits >= SMALLEST_GROUP else -1
    if not compression.options():  # optimum's own choice for a model that it doesn't know has groups of 128
        return dataclasses.replace(compression, group_size=fits)
    raise OvspecError(
        f"{source.name}: `group_size` is {size}, but {wrong} has rows of {widths[wrong]} weights; take "
        f"{f'{fits}, or -1' if fits > 0 else fits} for a scale per channel."
    )


def check_ir(source: Source, folder: Path) -> None:
    """Raise OvspecError if a step reported success but left no model."""
    for file in (folder / MODEL_FILE, (folder / MODEL_FILE).with_suffix(".bin")):
        if not file.is_file() or not file.stat().st_size:
            raise OvspecError(f"{source.name}: the conversion wrote no {file.name}; is the disk full?")
