"""Drafts with a reduced vocabulary: their ids, and an IR with only these ids' rows of the lm_head.

A checkpoint of such a draft has the file ``DRAFT_VOCABULARY_FILE`` with the ids; its weights are a usual draft's.
Exporting cuts the rows. Its IR lists the ids in the output ``TARGET_IDS_OUTPUT``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_dataclass, write_atomically
from ovspec.ir.compile import (
    MODEL_FILE,
    check_weights_file,
    has_trimmed_vocabulary,
    read_openvino_model,
    read_target_ids,
    write_target_ids,
)
from ovspec.ir.lm_head import find_logits_operations, keep_logits
from ovspec_export.sources import HeadSource, MtpSource, Source

DRAFT_VOCABULARY_FILE = "draft_vocabulary.json"
MIN_IDS = 64  # ids; with fewer, a draft is nearly useless
TRIM_ADVICE = "make the draft again with 'ovspec distill'"


@dataclass(frozen=True)
class DraftVocabularyFile:
    """The content of a ``DRAFT_VOCABULARY_FILE``. ids: the proposed ids, sorted."""

    ids: list[int]


def write_draft_vocabulary(folder: Path, ids: np.ndarray) -> None:
    """Make the checkpoint in ``folder`` propose only ``ids`` (n,)."""
    write_atomically(folder / DRAFT_VOCABULARY_FILE, json.dumps({"ids": ids.tolist()}) + "\n")


def read_draft_vocabulary(folder: Path) -> np.ndarray:
    """Return the ids proposed by the checkpoint in ``folder``, (n,) int64."""
    return np.array(read_dataclass(DraftVocabularyFile, folder / DRAFT_VOCABULARY_FILE).ids, dtype=np.int64)


def is_trimmed(source: Source) -> bool:
    """Return whether a model has a reduced vocabulary."""
    return has_trimmed_vocabulary(source.path) if source.is_ir else (source.path / DRAFT_VOCABULARY_FILE).is_file()


def read_proposed_ids(draft: Source, target: Source) -> np.ndarray | None:
    """Return the ids proposed by a draft model or MTP layer, (n,) int64; None for all, or an EAGLE-3 head.

    Raises:
        OvspecError: they aren't distinct ids of both models, or they can't be read.
    """
    if (isinstance(draft, HeadSource) and not isinstance(draft, MtpSource)) or not is_trimmed(draft):
        return None
    if draft.is_ir:
        check_weights_file(draft.path / MODEL_FILE)
        ids = read_target_ids(read_openvino_model(draft.path))
    else:
        ids = read_draft_vocabulary(draft.path)
    if ids is None or not len(ids):
        raise OvspecError(f"{draft.name}: the draft's trimmed vocabulary is empty; {TRIM_ADVICE}.")
    vocab_size = min(source.get_config_number("vocab") or np.iinfo(np.int64).max for source in (draft, target))
    if len(wrong_ids := ids[(ids < 0) | (ids >= vocab_size)]):
        raise OvspecError(
            f"{draft.name}: the draft's trimmed vocabulary has the token id {wrong_ids[0]}, but the target has "
            f"{vocab_size} tokens; {TRIM_ADVICE}."
        )
    if len(np.unique(ids)) < len(ids):
        raise OvspecError(f"{draft.name}: the draft's trimmed vocabulary has a duplicate token; {TRIM_ADVICE}.")
    return ids


def choose_most_used_ids(
    texts: Iterable[Sequence[int]], count: int, vocab_size: int, special_ids: Iterable[int] = ()
) -> np.ndarray:
    """Return the ``count`` ids most used in texts, sorted, (count,) int64.

    Args:
        texts: token ids of the target's prompts and answers.
        count: number of ids.
        vocab_size: the draft's number of ids. If the texts use too few, the smallest other ids are added: they are the
            most frequent in vocabularies of merges.
        special_ids: ids of special tokens, kept if the texts use them at all.

    Raises:
        OvspecError: ``count`` is out of range.
    """
    if not MIN_IDS <= count <= vocab_size:
        valid_counts_text = f"it must be from {MIN_IDS} to {vocab_size}, the size of the draft's vocabulary"
        raise OvspecError(f"`trim_vocabulary` is {count}; {valid_counts_text}.")
    id_counts = np.bincount(concatenate_ids(texts), minlength=vocab_size)[:vocab_size]
    used_special_ids = np.array(
        [token_id for token_id in special_ids if token_id < vocab_size and id_counts[token_id]], dtype=np.int64
    )
    id_counts[used_special_ids] += id_counts.max()
    return np.sort(np.argsort(-id_counts, kind="stable")[:count])


def concatenate_ids(texts: Iterable[Sequence[int]]) -> np.ndarray:
    """Return the ids of all texts, (n,) int64."""
    return np.concatenate([np.empty(0, np.int64), *(np.asarray(text, np.int64) for text in texts)])


def trim_ir(folder: Path, ids: np.ndarray, name: str) -> None:
    """Reduce the lm_head of the IR in ``folder`` to the rows of ``ids`` (n,); the embedding keeps all.

    ``name`` is for messages.

    Raises:
        OvspecError: the lm_head isn't found, or its weights come from unknown operations.
    """
    try:
        model = read_and_trim_model(folder, ids)
    except ValueError as error:
        raise OvspecError(
            f"{name}: this draft's vocabulary can't be trimmed ({error}); choose another draft."
        ) from None
    write_target_ids(model, ids)
    ov.save_model(model, folder / "trimmed.xml", compress_to_fp16=False)
    del model  # it maps the file to be replaced next
    for suffix in (".bin", ".xml"):
        (folder / f"trimmed{suffix}").replace((folder / MODEL_FILE).with_suffix(suffix))


def read_and_trim_model(folder: Path, ids: np.ndarray) -> ov.Model:
    """Return the graph of the model in ``folder`` reduced to the logits of ``ids`` (n,); ValueError if impossible."""
    model = read_openvino_model(folder)
    # The embedding may share the lm_head's weights, so the rows come from a second copy of the model.
    second_model = read_openvino_model(folder)
    logits_operations = find_logits_operations(model)
    previous_node = logits_operations[0].input_value(0).get_node()
    for node, second_node in zip(logits_operations, find_logits_operations(second_model), strict=True):
        for port, second_value in zip(node.inputs(), second_node.input_values(), strict=True):
            if port.get_source_output().get_node().get_name() != previous_node.get_name():
                port.replace_source_output(second_value)
        previous_node = node
    keep_logits(logits_operations, ids)
    model.validate_nodes_and_infer_types()
    if model.output("logits").get_partial_shape()[-1] != len(ids):
        raise ValueError("the logits and the rows of the lm_head differ in number")
    return model
