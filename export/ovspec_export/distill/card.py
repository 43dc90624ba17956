"""The record of a distillation: for programs in ``distill.json``, for people in the card, ``README.md``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_dataclass
from ovspec.base.json_types import JsonObject
from ovspec_export.distill.documents import Document

RECORD_FILE = "distill.json"
CARD_FILE = "README.md"
KIND_TITLES = {
    "head": "An EAGLE-3 head",
    "mtp": "A layer for multi-token prediction (MTP)",
    "draft": "A draft model",
    "trimmed draft": "A draft model with a smaller vocabulary",
}
SOURCE_DESCRIPTIONS = {"own": "written by the model itself", "chats": "of given chats", "text": "of given text"}


@dataclass(frozen=True)
class DocumentCounts:
    """Numbers of documents and tokens of a source."""

    documents: int = 0
    tokens: int = 0

    def add_document(self, document: Document) -> DocumentCounts:
        """Return the counts including ``document``."""
        return DocumentCounts(self.documents + 1, self.tokens + len(document.ids))


@dataclass(frozen=True)
class ResultRecord:
    """The result of a distillation, and its settings.

    run: identifies a run; a continued run replaces its own result.
    kind: a ``ResultKind``. model, revision: the target's name and revision. draft: the draft or head trained further.
    complete: whether the requested time or tokens are reached.
    seconds: by stage. tokens: training tokens, counted each time they are read.
    data: the training data, by source. held_out: the evaluation data.
    lost: for a trimmed vocabulary, the share of the target's tokens missing in it.
    machine: the name of the processor. agreement: share of guesses at depth 1, 2, ... equal to the model's choice.
    rows: the benchmark's, as in ``ovspec bench --json``.
    """

    run: str
    kind: str
    model: str
    revision: str | None
    draft: str | None
    complete: bool
    seconds: dict[str, float]
    tokens: int
    data: dict[str, DocumentCounts]
    held_out: DocumentCounts
    machine: str
    agreement: list[float] = field(default_factory=list)
    lost: float | None = None
    rows: list[JsonObject] = field(default_factory=list)


def read_record(folder: Path) -> ResultRecord | None:
    """Return the record in a folder's ``distill.json``, or None if the folder isn't a result."""
    if not (folder / RECORD_FILE).is_file():
        return None
    try:
        return read_dataclass(ResultRecord, folder / RECORD_FILE)
    except OvspecError:
        return None


def write_record_and_card(record: ResultRecord, result_name: str, folder: Path) -> None:
    """Write both files into ``folder``."""
    (folder / RECORD_FILE).write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8", newline="\n")
    (folder / CARD_FILE).write_text(format_card(record, result_name), encoding="utf-8", newline="\n")


def format_card(record: ResultRecord, result_name: str) -> str:
    """Return the card of the result called ``result_name``."""
    revision_note = f", revision {record.revision[:12]}" if record.revision else ""
    origin_note = f" It was made from {record.draft}." if record.draft else ""
    head_note = (
        " It reads the model's own hidden states and works with no other model."
        if record.kind in ("head", "mtp")
        else ""
    )
    sections = [
        f"# {KIND_TITLES[record.kind]} for {record.model}",
        f"It proposes tokens for {record.model}{revision_note}, so that it generates faster; the model alone decides "
        f"what is generated.{head_note}{origin_note} Made by `ovspec distill`.",
        "## Use it",
        f"MODEL is an export of {record.model}, CHECKPOINT what it was exported from.",
        f'```sh\novspec generate MODEL "Once upon a time" --draft {result_name} --stats\n'
        f"ovspec export CHECKPOINT --draft {result_name} -o MODEL    # both in one folder, for --draft alone\n```",
        "## How it was made",
        "\n".join(f"- {line}" for line in list_facts(record)),
    ]
    if record.rows:
        sections += ["## What it brings", f"Measured on {record.machine}, on texts that were held out."]
        sections.append(format_benchmark_table(record.rows))
    sections += [
        "## License",
        f"The license of {record.model} holds for what is made of it; the texts that you gave may have their own.",
    ]
    return "\n\n".join(sections) + "\n"


def list_facts(record: ResultRecord) -> list[str]:
    """Return the facts about the result's training, a line each."""
    total_seconds = sum(record.seconds.values())
    unit, unit_name = (3600, "hours") if total_seconds >= 3600 else (60, "minutes")
    stage_times = ", ".join(f"{stage} {seconds / unit:.1f}" for stage, seconds in record.seconds.items() if seconds)
    data_descriptions = [
        f"{counts.tokens:,} tokens {description} ({counts.documents:,} documents)"
        for source, description in SOURCE_DESCRIPTIONS.items()
        if (counts := record.data.get(source, DocumentCounts())).documents
    ]
    lines = list[str]()
    if record.tokens:
        lines.append(f"**Trained on** {record.tokens:,} tokens, counted as often as they were read")
    if data_descriptions:
        lines.append(
            f"**Data**: {'; '.join(data_descriptions)}; {record.held_out.documents:,} more documents were held out"
        )
    if stage_times:
        lines.append(f"**Time**: {total_seconds / unit:.1f} {unit_name} ({stage_times})")
    lines.append(f"**Machine**: {record.machine}")
    if record.lost is not None:
        lines.append(f"**Vocabulary**: without {record.lost:.1%} of the tokens in held-out texts")
    if record.agreement:
        agreement = describe_agreement(record.agreement)
        lines.append(f"**Agreement** with the model's own choice on held-out texts: {agreement}")
    if not record.complete:
        lines.append("**Not finished**: it was stopped before the time that was asked for")
    return lines


def describe_agreement(agreement: list[float]) -> str:
    """Return the share of right guesses at each depth."""
    first_rate, *further_rates = [f"{rate:.2f}" for rate in agreement]
    return f"{first_rate} for the first token" + (
        f", {' and '.join(further_rates)} for the next" if further_rates else ""
    )


def format_benchmark_table(rows: list[JsonObject]) -> str:
    """Return the rows of a benchmark as a table in Markdown."""
    lines = ["| | ms/token | tokens/s | speed-up | accepted of proposed | tokens/round |", "|---|---|---|---|---|---|"]
    for row in rows:
        speedup = accepted_share = ""
        if row["mode"] != "plain":
            speedup = f"{row['speedup']:.2f}" if row["speedup"] else "none"
            accepted_share = f"{row['accepted']} of {row['proposed']}"
        time_columns = f"{row['tpot_ms']:.2f} | {row['tokens_per_s']:.1f}"
        lines.append(
            f"| {row['mode']} | {time_columns} | {speedup} | {accepted_share} | {row['tokens_per_round']:.2f} |"
        )
    return "\n".join(lines)
