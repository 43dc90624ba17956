"""What is to be distilled, checked before any work: files, models, and room in memory and on the disk."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import openvino as ov
import psutil

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_text
from ovspec.base.progress import in_bytes, note
from ovspec.ir.compile import MODEL_FILE, check_ir_folder, check_weights, lm_head, read_ir
from ovspec.ir.heads import check_own_keys, read_by_heads
from ovspec.setup.identity import model_identity
from ovspec.setup.manifest import DRAFT_FOLDER, ExportedModel, is_ours, read_manifest, restore_backup
from ovspec_export.compression import INT8, WEIGHT_FORMATS
from ovspec_export.convert import needed_space, reason
from ovspec_export.distill.card import made_in
from ovspec_export.distill.documents import read_given
from ovspec_export.distill.new_head import new_config, new_layout
from ovspec_export.distill.trimming import check_trimmable, most_used
from ovspec_export.distill.work import Settings, begun_in, check_settings
from ovspec_export.folders import check_output, check_space, manifest_in
from ovspec_export.head_fit import check_fits
from ovspec_export.head_layout import new_head_layers
from ovspec_export.sources import GgufSource, HeadSource, Source, find_source
from ovspec_export.tokenizers import check_pair

Kind = Literal["head", "draft", "trimmed draft"]
DRAFT_VOCABULARY = 16384
MINUTES = 180.0
MINUTES_TO_TRIM = 10.0  # of texts, in which the ids are counted
SIZE_LIMIT = 10.0  # GB
PER_WEIGHT = 20  # bytes of a weight in training: itself, its gradient, two of Adam and its mean, 4 each
STORED = 18  # bytes of a weight on the disk: the same without the gradient, and the result in 16 bits
WITH_KEYS = ("full_attention", "sliding_attention", "chunked_attention", "attention")  # kinds of layers in configs
WORKING = 1e9  # bytes that a stage takes beside weights: a KV cache or activations, and libraries


@dataclass(frozen=True)
class DistillOptions:
    """What ``ovspec distill`` was asked for.

    model: the target: an exported folder, a checkpoint folder, a GGUF file or a hub id.
    output: the folder to write.
    text: files and folders with texts and chats to learn from, beside what the model writes itself.
    topics: a file with a topic a line, for the questions that the model asks itself.
    draft: a draft model to teach, or a head to train further; without one, a head is made.
    trim_vocabulary: how many ids the draft keeps; it is not taught then.
    draft_vocabulary: how many ids a head can propose.
    minutes: for all stages together, over all runs.
    tokens: end after training on so many, counted as often as they are read.
    torch_device: where torch computes.
    size_limit: of the features on the disk, in GB.
    work: the folder for everything that isn't the result; kept if it is given.
    overwrite: replace a result of an earlier distillation.
    """

    model: str
    output: Path
    text: tuple[Path, ...] = ()
    topics: Path | None = None
    draft: str | None = None
    trim_vocabulary: int | None = None
    draft_vocabulary: int | None = None
    minutes: float | None = None
    tokens: int | None = None
    torch_device: str = "cpu"
    size_limit: float = SIZE_LIMIT
    work: Path | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Plan:
    """A checked distillation.

    target: the model as it was given. origin: the name and revision of the checkpoint behind it.
    checkpoint: the target's, if torch is to compute hidden states on another device.
    draft: a checkpoint, or None; to be trimmed, perhaps an IR.
    layers: those of the target whose inputs a head reads; none for a draft model.
    """

    options: DistillOptions
    kind: Kind
    output: Path
    work: Path
    target: Source
    origin: tuple[str, str | None]
    checkpoint: Source | None
    draft: Source | None
    layers: list[int]
    settings: Settings

    @property
    def name(self) -> str:
        """What messages call the result."""
        return self.output.name

    @property
    def of_head(self) -> bool:
        return self.kind == "head"

    @property
    def budget(self) -> float:
        """Seconds for all stages."""
        usual = MINUTES_TO_TRIM if self.kind == "trimmed draft" else MINUTES
        return 60 * (usual if self.options.minutes is None else self.options.minutes)

    @property
    def vocabulary(self) -> int:
        """How many ids a head can propose; one that is trained further keeps their number."""
        usual = self.draft.layout.draft_vocab if isinstance(self.draft, HeadSource) else DRAFT_VOCABULARY
        return self.options.draft_vocabulary or usual


def planned(options: DistillOptions) -> Plan:
    """Check everything that can be known before any work.

    Raises:
        OvspecError: a file is missing, a model can't be used, the output is in the way, or there is too little room.
    """
    output = options.output.expanduser().resolve()
    work = (options.work or output.with_name(f".{output.name}.distill")).expanduser().resolve()
    check_files(options)
    begun = begun_in(work)
    check_place(output, begun.run if begun else None, options.overwrite)
    check_torch_device(options.torch_device)
    target = find_source(options.model)
    if isinstance(target, HeadSource):
        raise OvspecError(f"{target.name}: an EAGLE-3 head, not a model; name the model that it drafts for.")
    check_places(target, output, work)
    kind, draft, layers = asked_for(options, target)
    settings = Settings(
        model=model_identity(target.folder) if target.is_ir else target.revision,
        text=[str(place.expanduser().resolve()) for place in options.text],
        topics=str(options.topics.expanduser().resolve()) if options.topics else None,
        draft=f"{draft.name} {draft.revision}" if draft else None,
        trim_vocabulary=options.trim_vocabulary,
        draft_vocabulary=options.draft_vocabulary,
    )
    check_settings(work, begun, settings)
    checkpoint = for_torch(target) if options.torch_device != "cpu" else None
    plan = Plan(options, kind, output, work, target, origin(target), checkpoint, draft, layers, settings)
    check_room(plan)
    return plan


def origin(target: Source) -> tuple[str, str | None]:
    """Return the name and the revision of the checkpoint behind a target, as far as they are known."""
    manifest = read_manifest(target.folder) if target.is_ir else None
    return (manifest.target.source, manifest.target.revision) if manifest else (target.name, target.revision)


def for_torch(target: Source) -> Source | None:
    """Return the checkpoint of which torch can compute hidden states; None if there is none."""
    found = exported_from(target) if target.is_ir else target
    if found is None or isinstance(found, GgufSource) or found.holds_text_model:
        note(f"{target.name}: its checkpoint can't be used, so OpenVINO computes the hidden states, on the CPU")
        return None
    return found


def asked_for(options: DistillOptions, target: Source) -> tuple[Kind, Source | None, list[int]]:
    """Return what is to be made, the draft that it is made of, and the target's layers that it reads.

    Raises:
        OvspecError: the draft doesn't fit the target or can't be used, or the target can't have a head.
    """
    draft, trimmed = None, options.trim_vocabulary
    if options.draft:
        draft = find_source(options.draft) if trimmed else find_draft(options.draft)
    for_head = not trimmed and (draft is None or isinstance(draft, HeadSource))
    if not for_head and options.draft_vocabulary:
        raise OvspecError("`draft_vocabulary` is for heads; for a draft model use `trim_vocabulary`.")
    if target.is_ir:
        check_target(target.folder, target.name, for_head)
    elif for_head:
        check_checkpoint(target)
    if isinstance(draft, HeadSource) and not trimmed:
        return "head", draft, check_fits(target, draft)
    if draft is None:
        return "head", None, new_head_layers(number_of(target, "layers"))
    if trimmed:
        check_trimmable(draft)
        most_used([], trimmed, number_of(draft, "vocab"))  # which refuses a wrong number
    check_pair(target, draft, trust_remote_code=False)
    return "trimmed draft" if trimmed else "draft", draft, []


def number_of(source: Source, what: str) -> int:
    """Return a number in a config; raises OvspecError if it isn't there."""
    number = source.entry(what)
    if number is None:
        told = {"layers": "layers", "vocab": "ids"}[what]
        raise OvspecError(f"{source.name}: its config.json doesn't say how many {told} it has; add that.")
    return number


def check_places(target: Source, output: Path, work: Path) -> None:
    """Raise OvspecError if a folder that is written holds the target or the other one, or is in it."""
    where = target.folder.resolve()
    for name, place in (("output", output), ("work", work)):
        if place == where or where in place.parents or place in where.parents:
            raise OvspecError(f"{place}: is, contains or is inside the source {target.name}; name another `{name}`.")
    if work == output or output in work.parents or work in output.parents:
        raise OvspecError(f"{work}: is, contains or is inside the output; name another `work`.")


def check_files(options: DistillOptions) -> None:
    """Raise OvspecError if a file isn't there, or holds something else than texts, chats or topics."""
    if skipped := read_given(place.expanduser() for place in options.text).skipped:
        note(f"{skipped} file{'s' * (skipped > 1)} in the folders hold no text, and are left out")
    if options.topics:
        read_text(options.topics.expanduser())


def check_place(output: Path, run: str | None, overwrite: bool) -> None:
    """Raise OvspecError if ``output`` holds something else than a result, or one that is not to be replaced.

    What an earlier process has written for the same ``run`` is replaced in any case.
    """
    restore_backup(output)
    made = made_in(output)
    if is_ours(output) and not made and not manifest_in(output).get("unfinished"):
        raise OvspecError(f"{output}: holds an exported model, not what was distilled; name another `output`.")
    check_output(output, overwrite or bool(made and made.run == run))


def check_torch_device(name: str) -> None:
    if name == "cpu":
        return
    # In a process of its own: torch is large, and would hold on to the device.
    command = [sys.executable, "-P", "-c", "import sys, torch; torch.empty(1, device=sys.argv[1])", name]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        why = reason(done.stderr, done.returncode)
        raise OvspecError(f"`torch_device={name!r}`: torch can't use it ({why}).")


def check_target(folder: Path, name: str, for_head: bool) -> None:
    """Raise OvspecError if the exported model can't be run here, or can't have a head and is to get one."""
    check_ir_folder(folder)
    check_weights(folder / MODEL_FILE)

    def check(model: ov.Model) -> None:
        if for_head:
            read_by_heads(model, folder, Path(name))
            if lm_head(model) is None:
                raise OvspecError(f"{name}: a head can't be used with this target: its lm_head can't be found.")

    read_ir(folder, check)


def check_checkpoint(target: Source) -> None:
    """Raise OvspecError if the config of a checkpoint says that its model can't have a head.

    It need not say so: the exported model is checked again.
    """
    config, layers = target.text_config or target.config, target.entry("layers")
    kinds = config.get("layer_types")
    if layers and isinstance(kinds, list) and len(kinds) == layers:
        shared = int(config.get("num_kv_shared_layers") or 0)
        check_own_keys(sum(kind in WITH_KEYS for kind in kinds) - shared, layers, target.name)


# ---------------------------------------------------------------- the draft


def find_draft(name: str) -> Source:
    """Return the checkpoint of a draft, also if its export is named.

    Raises:
        OvspecError: it isn't here.
    """
    source = find_source(name)
    if not source.is_ir:
        return source
    if isinstance(source, HeadSource):
        raise OvspecError(f"{name}: only the IR of a head, which can't be trained; name the head's checkpoint.")
    entry = exported_as(source.folder)
    if entry is None:
        raise OvspecError(f"{name}: an IR, which can't be taught, and nothing says of what; name the checkpoint.")
    if not (found := exported_from(source)):
        raise OvspecError(
            f"{name}: its checkpoint, {entry.source}, is needed and isn't here; name its folder or hub id."
        )
    note(f"{name}: taught from its checkpoint {found.folder}")
    return found


def exported_from(source: Source) -> Source | None:
    """Return the checkpoint of an export by what its manifest says: beside it, or on the hub; None if it isn't there.

    The network need not be there for what is in the hub's cache.
    """
    entry = exported_as(source.folder)
    if entry is None:
        return None
    beside = [parent / entry.source for parent in list(source.folder.resolve().parents)[:2]]
    places = [str(place) for place in beside if (place / "config.json").is_file()]
    if entry.source.count("/") == 1:
        places.append(f"{entry.source.partition('@')[0]}@{entry.revision}")
    for place in places:
        with contextlib.suppress(OvspecError):
            found = find_source(place)
            if not found.is_ir and not isinstance(found, HeadSource):
                return found
    return None


def exported_as(folder: Path) -> ExportedModel | None:
    """Return what the manifest says of the model in ``folder``, which may be the draft beside its target."""
    if manifest := read_manifest(folder):
        return manifest.target
    above = read_manifest(folder.resolve().parent) if folder.resolve().name == DRAFT_FOLDER else None
    return above.draft if above else None


# ---------------------------------------------------------------- room


def check_room(plan: Plan) -> None:
    """Raise OvspecError if the disk or the memory is too small."""
    trained = trained_weights(plan)
    in_training = STORED * trained + 4 * embedding_weights(plan.target)
    export = 0.0 if plan.target.is_ir else needed_space(plan.target, INT8)
    held = sum(file.stat().st_size for file in plan.work.rglob("*") if file.is_file())
    features = 0 if plan.kind == "trimmed draft" else plan.options.size_limit * 1e9
    check_space(plan.work, features + in_training + export - held, "distilling with this `size_limit`")
    check_space(plan.output, 4 * trained, "the result")
    needed, free = needed_memory(plan), psutil.virtual_memory().available
    if needed > free:
        raise OvspecError(
            f"{plan.target.name}: distilling needs about {in_bytes(needed)} of memory, but only {in_bytes(free)} are "
            "free; close other programs, or take a machine with more."
        )


def needed_memory(plan: Plan) -> float:
    """Estimate the memory that distilling takes, in bytes: that of its largest stage, as each is a process of its own.

    Writing and reading texts holds the target's weights, and the comparison with an old draft holds them twice.
    Training holds ``PER_WEIGHT`` bytes of each weight that is trained, and of a head also the target's embedding and
    lm_head in 16 bits.
    """
    copies = 2 if plan.draft or (plan.target.is_ir and (plan.target.folder / DRAFT_FOLDER).is_dir()) else 1
    if plan.target.is_ir:
        generating = float(check_weights(plan.target.folder / MODEL_FILE))
    else:
        generating = plan.target.parameters * WEIGHT_FORMATS["int8"] / 8
    training = PER_WEIGHT * trained_weights(plan) + (4 * embedding_weights(plan.target) if plan.of_head else 0)
    return max(copies * generating, 0 if plan.kind == "trimmed draft" else training) + WORKING


def trained_weights(plan: Plan) -> float:
    """Return the number of weights of the result."""
    if isinstance(plan.draft, HeadSource):
        return float(sum(map(size_of, plan.draft.layout.tensors().values())))
    if plan.draft:
        return float(plan.draft.parameters)
    hidden, vocab = plan.target.entry("hidden") or 0, plan.target.entry("vocab") or 0
    config = new_config(plan.target.config, vocab, hidden, plan.layers, min(plan.vocabulary, vocab))
    return float(sum(map(size_of, new_layout(config, plan.layers).tensors().values())))


def size_of(shape: list[int]) -> int:
    return shape[0] * shape[1] if len(shape) == 2 else shape[0]


def embedding_weights(target: Source) -> float:
    """Return the number of weights of the target's embedding, and as many again for an lm_head of its own."""
    return float((target.entry("hidden") or 0) * (target.entry("vocab") or 0))
