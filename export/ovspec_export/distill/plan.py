"""The plan of a distillation, checked before any work: files, models, and room in memory and on the disk."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from ovspec.base.errors import OvspecError
from ovspec.base.progress import format_size
from ovspec.ir.compile import MODEL_FILE, check_weights_file
from ovspec.setup.identity import hash_model_and_tokenizer
from ovspec.setup.manifest import DRAFT_FOLDER
from ovspec_export.compression import INT8, WEIGHT_FORMATS
from ovspec_export.convert import describe_failure, estimate_disk_space
from ovspec_export.distill.folder_checks import check_folders_apart, check_result_folder, check_text_files
from ovspec_export.distill.models import (
    HeadKind,
    ResultKind,
    choose_kind_draft_and_layers,
    find_target_origin,
    find_torch_checkpoint,
)
from ovspec_export.distill.new_head import make_head_config, make_head_layout
from ovspec_export.distill.work_folder import DistillSettings, check_settings, read_work_header
from ovspec_export.draft_vocabulary import read_proposed_ids
from ovspec_export.folders import check_disk_space
from ovspec_export.source_lookup import find_source
from ovspec_export.sources import HeadSource, MtpSource, Source, check_can_be_unpacked

DEFAULT_DRAFT_VOCABULARY = 16384
DEFAULT_MINUTES = 180.0
DEFAULT_TRIM_MINUTES = 10.0  # of texts for counting the ids
DEFAULT_SIZE_LIMIT_GB = 10.0  # GB
TRAINING_BYTES_PER_WEIGHT = 20  # bytes of a weight in training: itself, its gradient, two of Adam and its mean, 4 each
STORED_BYTES_PER_WEIGHT = 18  # bytes of a weight on the disk: the same without the gradient, and the result in 16 bits
OVERHEAD_BYTES = 1e9  # bytes per stage besides weights: a KV cache or activations, and libraries


@dataclass(frozen=True)
class DistillOptions:
    """The options of ``ovspec distill``.

    model: the target: an exported folder, a checkpoint folder, a GGUF file or a hub id.
    output: the folder to write.
    text: files and folders with texts and chats to learn from, in addition to the model's own.
    topics: a file with a topic a line, for the model's own questions.
    kind: "head" to make an EAGLE-3 head, the default without a draft, or "mtp" to make an MTP layer.
    draft: a draft model or a head to train further; None to make a new head.
    trim_vocabulary: number of ids to keep in the draft; it is not trained then.
    draft_vocabulary: number of ids a head can propose.
    minutes: for all stages together, over all runs.
    tokens: end after so many training tokens, counted each time they are read.
    torch_device: torch's device.
    size_limit: of the features on the disk, in GB.
    work: the folder for everything except the result; kept if set.
    overwrite: replace a result of an earlier distillation.
    """

    model: str
    output: Path
    text: tuple[Path, ...] = ()
    topics: Path | None = None
    kind: HeadKind | None = None
    draft: str | None = None
    trim_vocabulary: int | None = None
    draft_vocabulary: int | None = None
    minutes: float | None = None
    tokens: int | None = None
    torch_device: str = "cpu"
    size_limit: float = DEFAULT_SIZE_LIMIT_GB
    work: Path | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class DistillPlan:
    """A checked distillation.

    target: the model, as named. origin: the name and revision of its checkpoint.
    torch_checkpoint: the target's, if torch computes hidden states on another device.
    draft: a checkpoint, or None; to be trimmed, perhaps an IR.
    tap_layers: the target layers whose inputs the head reads; empty for an MTP layer, None for a draft model.
    """

    options: DistillOptions
    kind: ResultKind
    output: Path
    work_folder: Path
    target: Source
    origin: tuple[str, str | None]
    torch_checkpoint: Source | None
    draft: Source | None
    tap_layers: list[int] | None
    settings: DistillSettings

    @property
    def result_name(self) -> str:
        """The result's name in messages."""
        return self.output.name

    @property
    def makes_head(self) -> bool:
        return self.kind in ("head", "mtp")

    @property
    def budget_seconds(self) -> float:
        """Seconds for all stages."""
        if self.options.minutes is not None:
            return 60 * self.options.minutes
        return 60 * (DEFAULT_TRIM_MINUTES if self.kind == "trimmed draft" else DEFAULT_MINUTES)

    @property
    def draft_vocab_size(self) -> int:
        """The number of ids a head can propose; a head trained further keeps its number."""
        if isinstance(self.draft, MtpSource):
            ids = read_proposed_ids(self.draft, self.target)
            return self.options.draft_vocabulary or (DEFAULT_DRAFT_VOCABULARY if ids is None else len(ids))
        if isinstance(self.draft, HeadSource):
            return self.options.draft_vocabulary or self.draft.layout.draft_vocab_size
        return self.options.draft_vocabulary or DEFAULT_DRAFT_VOCABULARY


def make_plan(options: DistillOptions) -> DistillPlan:
    """Check as much as possible before any work.

    Raises:
        OvspecError: a file is missing, a model can't be used, the output exists, or there is too little room.
    """
    output = options.output.expanduser().resolve()
    work_folder = (options.work or output.with_name(f".{output.name}.distill")).expanduser().resolve()
    check_text_files(options.text, options.topics)
    work_header = read_work_header(work_folder)
    check_result_folder(output, work_header.run if work_header else None, options.overwrite)
    check_torch_device(options.torch_device)
    target = find_source(options.model)
    check_can_be_unpacked(target)
    if isinstance(target, HeadSource):
        raise OvspecError(f"{target.name}: an EAGLE-3 head, not a model; give the target model of this head.")
    check_folders_apart(target, output, work_folder)
    kind, draft, tap_layers = choose_kind_draft_and_layers(
        target, options.kind, options.draft, options.trim_vocabulary, options.draft_vocabulary
    )
    settings = DistillSettings(
        model=hash_model_and_tokenizer(target.path) if target.is_ir else target.revision,
        text=[str(path.expanduser().resolve()) for path in options.text],
        topics=str(options.topics.expanduser().resolve()) if options.topics else None,
        draft=f"{draft.name} {draft.revision}" if draft else None,
        trim_vocabulary=options.trim_vocabulary,
        draft_vocabulary=options.draft_vocabulary,
        kind=kind if kind == "mtp" else None,
    )
    check_settings(work_folder, work_header, settings)
    torch_checkpoint = find_torch_checkpoint(target) if options.torch_device != "cpu" else None
    plan = DistillPlan(
        options,
        kind,
        output,
        work_folder,
        target,
        find_target_origin(target),
        torch_checkpoint,
        draft,
        tap_layers,
        settings,
    )
    check_disk_and_memory(plan)
    return plan


def check_torch_device(device_name: str) -> None:
    if device_name == "cpu":
        return
    # In a separate process: torch is large, and would keep the device in use.
    command = [sys.executable, "-P", "-c", "import sys, torch; torch.empty(1, device=sys.argv[1])", device_name]
    process = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if process.returncode:
        reason = describe_failure(process.stderr, process.returncode)
        raise OvspecError(
            f"`torch_device={device_name!r}`: torch can't use this device ({reason}); choose another device, such as "
            "cpu."
        )


# ---------------------------------------------------------------- memory and disk space


def check_disk_and_memory(plan: DistillPlan) -> None:
    """Raise OvspecError if the disk or the memory is too small."""
    trained_weights = count_trained_weights(plan)
    training_bytes = STORED_BYTES_PER_WEIGHT * trained_weights + 4 * count_embedding_weights(plan.target)
    export_bytes = 0.0 if plan.target.is_ir else estimate_disk_space(plan.target, INT8)
    stored_bytes = sum(file.stat().st_size for file in plan.work_folder.rglob("*") if file.is_file())
    features_bytes = 0 if plan.kind == "trimmed draft" else plan.options.size_limit * 1e9
    check_disk_space(
        plan.work_folder,
        features_bytes + training_bytes + export_bytes - stored_bytes,
        "distilling with this `size_limit`",
    )
    check_disk_space(plan.output, 4 * trained_weights, "the result")
    needed_bytes = estimate_memory(plan)
    free_bytes = psutil.virtual_memory().available
    if needed_bytes > free_bytes:
        raise OvspecError(
            f"{plan.target.name}: distilling needs about {format_size(needed_bytes)} of memory, but only "
            f"{format_size(free_bytes)} is free; close other programs, or use a machine with more memory."
        )


def estimate_memory(plan: DistillPlan) -> float:
    """Estimate the memory for distilling, in bytes: for its largest stage, as each runs in a separate process.

    Writing and reading texts needs the target's weights once, and the comparison with an old draft needs them twice.
    Training needs ``TRAINING_BYTES_PER_WEIGHT`` of each trained weight, and for a head also the target's embedding and
    lm_head in 16 bits.
    """
    target_copies = 1 + bool(plan.draft or (plan.target.is_ir and (plan.target.path / DRAFT_FOLDER).is_dir()))
    if plan.target.is_ir:
        generating_bytes = float(check_weights_file(plan.target.path / MODEL_FILE))
    else:
        generating_bytes = plan.target.parameter_count * WEIGHT_FORMATS["int8"] / 8
    if plan.kind == "trimmed draft":
        return target_copies * generating_bytes + OVERHEAD_BYTES
    training_bytes = TRAINING_BYTES_PER_WEIGHT * count_trained_weights(plan)
    if plan.makes_head:
        training_bytes += 4 * count_embedding_weights(plan.target)
    return max(target_copies * generating_bytes, training_bytes) + OVERHEAD_BYTES


def count_trained_weights(plan: DistillPlan) -> float:
    """Return the number of weights of the result."""
    if isinstance(plan.draft, HeadSource) and not isinstance(plan.draft, MtpSource):
        return float(sum(map(count_elements, plan.draft.layout.tensor_shapes().values())))
    if plan.draft:
        return float(plan.draft.parameter_count)
    hidden_size = plan.target.get_config_number("hidden") or 0
    vocab_size = plan.target.get_config_number("vocab") or 0
    tap_layers = plan.tap_layers or [0]  # an MTP layer is about as large as a head
    head_config = make_head_config(
        plan.target.config, vocab_size, hidden_size, tap_layers, min(plan.draft_vocab_size, vocab_size)
    )
    return float(sum(map(count_elements, make_head_layout(head_config, tap_layers).tensor_shapes().values())))


def count_elements(shape: list[int]) -> int:
    return math.prod(shape)


def count_embedding_weights(target: Source) -> float:
    """Return the number of weights of the target's embedding, and as many again for an untied lm_head."""
    return float((target.get_config_number("hidden") or 0) * (target.get_config_number("vocab") or 0))
