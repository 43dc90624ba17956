"""The target's features for the documents: kept in shards, because computing them takes longer than reading them.

For each token of a document a shard has ``features`` [tokens, layers * hidden] (some layers' inputs, concatenated),
``final`` [tokens, hidden] (the lm_head's input), and ``choices`` and ``logprobs`` [tokens, TOP] (the likeliest next
tokens). OpenVINO computes them from the exported model, the future target of the head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ovspec.base.errors import OvspecError
from ovspec.base.files import open_replacement
from ovspec.ir.compile import add_output, compile_ir, find_state_variables, read_openvino_model
from ovspec.ir.device import DeviceOptions, make_compile_properties, openvino_core
from ovspec.ir.hidden_states import find_embedding, find_layer_inputs
from ovspec.ir.lm_head import find_lm_head
from ovspec_export.channel import is_stop_requested, report_progress
from ovspec_export.distill.documents import Document, read_documents
from ovspec_export.distill.work_folder import DOCUMENTS_FILE, FEATURES_FOLDER, TARGET_TABLES_FILE

CHOICE_COUNT = 16  # number of likeliest tokens to keep
SHARD_BYTES = 64e6  # bytes
# Activations share a scale in larger groups than usual: a long text is read faster, and a head learns as well.
DEVICE_PROPERTIES = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "128", "CACHE_DIR": ""}
REPORT_SECONDS = 2.0  # seconds between two reports of progress
ROWS_AT_ONCE = 4096  # embedding rows to read at once


@dataclass(frozen=True)
class Shard:
    """A file with the target's features for ``document_count`` documents from number ``first_document`` on."""

    file: Path
    first_document: int
    document_count: int


@dataclass(frozen=True)
class Example:
    """A document and the target's features for it, a row for each token; features and final are bf16."""

    document: Document
    ids: Tensor
    features: Tensor
    final_states: Tensor
    choices: Tensor
    logprobs: Tensor


def write_features(
    model: str,
    work_folder: str,
    layers: list[int] | None,
    seconds: float,
    max_bytes: float,
    checkpoint: str = "",
    model_type: str = "",
    torch_device: str = "",
    trust_remote_code: bool = False,
) -> None:
    """Compute features of documents without a shard, for about ``seconds``, while shards have less than ``max_bytes``.

    Args:
        model: the exported target.
        layers: the target layers whose inputs are kept, besides its lm_head's input; None for a draft model, because it
            learns from choices alone.
        checkpoint: the target's, for torch to compute the features in place of OpenVINO, on ``torch_device``.
        model_type: its family.
    """
    began = time.monotonic()
    features_folder = Path(work_folder) / FEATURES_FOLDER
    features_folder.mkdir(exist_ok=True)
    documents = read_documents(Path(work_folder) / DOCUMENTS_FILE)
    shards = list_shards(features_folder)
    done_count = count_documents(shards)
    if layers is not None and not (Path(work_folder) / TARGET_TABLES_FILE).is_file():
        write_embedding_and_lm_head(Path(model), Path(work_folder) / TARGET_TABLES_FILE)
    stored_bytes = sum(shard.file.stat().st_size for shard in shards)
    if checkpoint:
        compute_tensors = make_torch_computation(checkpoint, model_type, layers, torch_device, trust_remote_code)
    else:
        compute_tensors = make_openvino_computation(Path(model), layers)
    initial_tokens = computed_tokens = sum(len(document.ids) for document in documents[:done_count])
    last_report_time = loop_start_time = time.monotonic()
    while done_count < len(documents) and stored_bytes < max_bytes and not is_time_over(began, seconds):
        documents_tensors = list[dict[str, Tensor]]()
        shard_bytes = 0
        while (
            done_count + len(documents_tensors) < len(documents)
            and shard_bytes < SHARD_BYTES
            and not (documents_tensors and is_time_over(began, seconds))
        ):
            documents_tensors.append(compute_tensors(documents[done_count + len(documents_tensors)].ids))
            shard_bytes += sum(tensor.nbytes for tensor in documents_tensors[-1].values())
            computed_tokens += len(documents_tensors[-1]["ids"])
            if (now := time.monotonic()) - last_report_time > REPORT_SECONDS:
                report_progress(
                    tokens=computed_tokens, per_second=(computed_tokens - initial_tokens) / (now - loop_start_time)
                )
                last_report_time = now
        write_shard(features_folder / f"{done_count:07}.safetensors", done_count, documents_tensors)
        done_count = done_count + len(documents_tensors)
        stored_bytes = stored_bytes + shard_bytes
    report_progress(tokens=computed_tokens)


def is_time_over(began: float, seconds: float) -> bool:
    return is_stop_requested() or time.monotonic() - began > seconds


def write_shard(file: Path, first_document: int, documents_tensors: list[dict[str, Tensor]]) -> None:
    """Write the tensors of documents from number ``first_document`` on, and the start of each document."""
    tensors = {
        name: torch.cat([document_tensors[name] for document_tensors in documents_tensors])
        for name in documents_tensors[0]
    }
    tensors["starts"] = torch.tensor(
        [0, *(len(document_tensors["ids"]) for document_tensors in documents_tensors)]
    ).cumsum(0)
    with open_replacement(file) as partial_file:
        save_file(tensors, partial_file, {"first": str(first_document), "count": str(len(documents_tensors))})


def count_documents(shards: Sequence[Shard]) -> int:
    return shards[-1].first_document + shards[-1].document_count if shards else 0


def list_shards(folder: Path) -> list[Shard]:
    """Return the shards, in order; a file after a gap is left out, and written again."""
    shards = list[Shard]()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as shard_file:
            shard = Shard(file, int(shard_file.metadata()["first"]), int(shard_file.metadata()["count"]))
        if shard.first_document != count_documents(shards):
            break
        shards.append(shard)
    return shards


@dataclass(frozen=True)
class ShardSpan:
    """The rows of a document in an open shard."""

    document: Document
    shard_file: safe_open
    first_row: int
    end_row: int

    def read_tensors(self, *names: str) -> list[Tensor]:
        """Return some of its tensors; empty tensors for tensors missing in the shard."""
        stored_names = self.shard_file.keys()
        empty_tensor = torch.empty((self.end_row - self.first_row, 0))
        return [
            self.shard_file.get_slice(name)[self.first_row : self.end_row] if name in stored_names else empty_tensor
            for name in names
        ]


class Examples(Sequence[Example]):
    """Documents with a shard, read from the disk at each access."""

    def __init__(self, spans: list[ShardSpan]) -> None:
        self.spans = spans

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        span = self.spans[index]
        ids, features, final_states, choices, logprobs = span.read_tensors(
            "ids", "features", "final", "choices", "logprobs"
        )
        if not features.shape[1]:  # an MTP layer's input is the lm_head's
            features = final_states
        return Example(span.document, ids, features, final_states, choices, logprobs)


def read_examples(work: Path, held_out: bool) -> Examples:
    """Return the held-out documents in a work folder, or all others.

    Raises:
        OvspecError: a shard belongs to other documents.
    """
    documents = read_documents(work / DOCUMENTS_FILE)
    spans = list[ShardSpan]()
    for shard in list_shards(work / FEATURES_FOLDER):
        shard_file = safe_open(shard.file, "pt")
        document_starts = shard_file.get_tensor("starts").tolist()
        shard_documents = documents[shard.first_document : shard.first_document + shard.document_count]
        if document_starts != [0, *accumulate(len(document.ids) for document in shard_documents)]:
            raise OvspecError(f"the hidden states in {work} belong to other texts; delete this folder and start again")
        document_rows = zip(shard_documents, pairwise(document_starts), strict=True)
        spans += [ShardSpan(document, shard_file, start, end) for document, (start, end) in document_rows]
    return Examples([span for span in spans if span.document.held_out == held_out])


def make_openvino_computation(model: Path, layers: list[int] | None) -> Callable[[list[int]], dict[str, Tensor]]:
    """Return a function from a document's ids to a shard's tensors."""
    options = DeviceOptions(precision="f32", properties=DEVICE_PROPERTIES)
    compiled_model = compile_ir(
        model, options, lambda graph: replace_logits_by_shard_outputs(graph, layers)
    ).compiled_model
    request = compiled_model.create_infer_request()
    output_names = {port.get_any_name() for port in compiled_model.outputs}

    def compute_tensors(ids: list[int]) -> dict[str, Tensor]:
        inputs = {
            "input_ids": np.array([ids]),
            "attention_mask": np.ones((1, len(ids)), dtype=np.int64),
            "position_ids": np.arange(len(ids))[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
            "logits_idx": np.arange(len(ids)),
        }
        request.reset_state()
        request.infer({port: inputs[port.get_any_name()] for port in compiled_model.inputs})
        outputs = {name: torch.from_numpy(request.get_tensor(name).data.reshape(len(ids), -1)) for name in output_names}
        return make_shard_tensors(ids, outputs)

    return compute_tensors


def make_torch_computation(
    checkpoint: str, model_type: str, layers: list[int] | None, device: str, trust_remote_code: bool
) -> Callable[[list[int]], dict[str, Tensor]]:
    """Return a function from a document's ids to a shard's tensors, by the checkpoint in torch."""
    from ovspec_export.patches import adapt_optimum
    from ovspec_export.quantised import load_checkpoint_model

    dtype_options = {"dtype": torch.float32} if device == "cpu" else {}  # a GPU uses the checkpoint's own type
    model = load_checkpoint_model(checkpoint, trust_remote_code, **dtype_options, **adapt_optimum(model_type)).to(
        device
    )

    @torch.no_grad()
    def compute_tensors(ids: list[int]) -> dict[str, Tensor]:
        input_ids = torch.tensor([ids], device=device)
        model_output = model(input_ids=input_ids, use_cache=False, output_hidden_states=layers is not None)
        logprobs, choices = model_output.logits[0].float().log_softmax(-1).topk(CHOICE_COUNT)
        tensors = {"logprobs": logprobs.cpu(), "choices": choices.cpu()}
        if layers is not None:
            hidden_states = model_output.hidden_states  # each layer's input, and last the lm_head's input
            if layers:
                tensors["features"] = torch.cat([hidden_states[layer][0] for layer in layers], -1).cpu()
            tensors["final"] = hidden_states[-1][0].cpu()
        return make_shard_tensors(ids, tensors)

    return compute_tensors


def make_shard_tensors(ids: list[int], outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the computed tensors in the types of a shard."""
    shard_dtypes = {
        "features": torch.bfloat16,
        "final": torch.bfloat16,
        "choices": torch.int32,
        "logprobs": torch.float16,
    }
    tensors = {name: tensor.to(shard_dtypes[name], copy=True) for name, tensor in outputs.items()}
    return {"ids": torch.tensor(ids, dtype=torch.int32), **tensors}


def replace_logits_by_shard_outputs(model: ov.Model, layers: list[int] | None) -> None:
    """Add the outputs features, final, choices and logprobs in place of the logits; see ``write_features``."""
    logits_result = model.output("logits").get_node()
    logprobs = ops.log_softmax(logits_result.input_value(0), -1)
    top_choices = ops.topk(logprobs, ops.constant(CHOICE_COUNT, dtype=ov.Type.i64), -1, "max", "value")
    outputs = {"logprobs": top_choices.output(0), "choices": top_choices.output(1)}
    if layers:
        layer_inputs = find_layer_inputs(model, find_state_variables(model))
        outputs["features"] = ops.concat([layer_inputs[layer] for layer in layers], -1).output(0)
    if layers is not None:
        outputs["final"] = require_lm_head(model).input_value(0)
    for name, output in outputs.items():
        add_output(model, output, name)
    model.remove_result(logits_result)


def require_lm_head(model: ov.Model) -> ov.Node:
    """Return the lm_head of a graph; raises OvspecError if it isn't found."""
    lm_head = find_lm_head(model)
    if lm_head is None:
        raise OvspecError(
            "ovspec can't find the lm_head in the model's graph; set `draft` to train a draft model instead"
        )
    return lm_head


def write_embedding_and_lm_head(folder: Path, file: Path) -> None:
    """Write the target's ``embedding`` and ``lm_head`` [vocabulary, hidden], as its IR has them, in bf16.

    If they are equal (tied), only ``embedding`` is written.
    """
    model = read_openvino_model(folder)
    lm_head = require_lm_head(model)
    embedding_table = find_embedding(model).input_value(0)
    lm_head_weights = lm_head.input_value(1)
    row_axis = int(not lm_head.get_attributes()["transpose_b"])
    tensors = {
        "embedding": compute_constant_rows(embedding_table, 0),
        "lm_head": compute_constant_rows(lm_head_weights, row_axis),
    }
    if torch.equal(*tensors.values()):
        del tensors["lm_head"]
    with open_replacement(file) as partial_file:
        save_file(tensors, partial_file)


def compute_constant_rows(matrix: ov.Output, row_axis: int) -> Tensor:
    """Return the rows along ``row_axis`` of a matrix computed from constants in a graph, in bf16."""
    row_indices = ops.parameter([-1], ov.Type.i64)
    picked_rows: ov.Node = ops.gather(matrix, row_indices, ops.constant(row_axis, dtype=ov.Type.i64))
    if row_axis:
        picked_rows = ops.transpose(picked_rows, ops.constant([1, 0], dtype=ov.Type.i64))
    graph = ov.Model([ops.result(ops.convert(picked_rows, "f32"))], [row_indices])  # type: ignore[call-overload]
    properties = make_compile_properties(DeviceOptions(precision="f32", properties={"CACHE_DIR": ""}))
    request = openvino_core().compile_model(graph, "CPU", properties).create_infer_request()
    row_count = matrix.get_partial_shape()[row_axis].get_length()
    row_blocks = list[Tensor]()
    for start in range(0, row_count, ROWS_AT_ONCE):
        request.infer([np.arange(start, min(start + ROWS_AT_ONCE, row_count))])
        row_blocks.append(torch.from_numpy(request.get_output_tensor(0).data).bfloat16())
    return torch.cat(row_blocks)
