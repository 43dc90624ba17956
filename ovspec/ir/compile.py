"""Read and compile an exported IR: find its inputs and states, and compute logits only where needed."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ovspec.base.errors import InferenceError, OvspecError
from ovspec.ir.config import MODEL_FILE, ModelConfig, read_model_config
from ovspec.ir.crashes import choose_crash_free_options
from ovspec.ir.device import (
    DeviceOptions,
    format_property,
    make_compile_properties,
    may_use_gpu,
    openvino_core,
    parse_device_option,
)
from ovspec.ir.large_pages import LargePageMover
from ovspec.ir.lm_head import find_lm_head

# Two threads reading their first model at once may deadlock inside OpenVINO's Python binding.
MODEL_READING_LOCK = threading.Lock()
# Constant output of a head or draft with a reduced vocabulary: the target's id minus the logit's index, by logit.
TARGET_IDS_OUTPUT = "d2t"
KNOWN_INPUTS = {"input_ids", "attention_mask", "position_ids", "beam_idx", "cache_position"}


@dataclass(frozen=True)
class StateVariable:
    """A variable of the model: the keys or values of a layer, or a recurrent state (convolution, SSM)."""

    name: str
    batch_axis: int
    sequence_axis: int | None  # axis of the slots to cut or mask; None for a state without slots
    width: int  # values per row and slot, or per row if there are no slots


@dataclass(frozen=True)
class AdvanceGraph:
    """A model that advances recurrent states by tokens with known updates; see ``recurrent_states.py``.

    shapes: of the states, in the order of its inputs.
    token_axes: of the updates, in the order of its inputs: the axis of the tokens.
    """

    model: ov.Model
    shapes: list[tuple[int, ...]]
    token_axes: list[int]


Rewrite = Callable[[ov.Model], AdvanceGraph | None]


@dataclass(frozen=True)
class ModelGraph:
    """A language model or head, ready to be compiled.

    picks_logits: whether it has the input ``logits_idx``.
    target_ids: the target's id of each logit, (n,) int64; None if there are logits of all ids.
    """

    model: ov.Model
    states: list[StateVariable]
    picks_logits: bool
    target_ids: np.ndarray | None
    advance: AdvanceGraph | None = None  # for its recurrent states, if they are inputs and outputs


@dataclass(frozen=True)
class StateAdvance:
    """A compiled ``AdvanceGraph``."""

    compiled_model: ov.CompiledModel
    shapes: list[tuple[int, ...]]
    token_axes: list[int]


@dataclass
class CompiledIR:
    """A language model compiled by OpenVINO, with its inputs and states. ``InferenceRequest`` runs it."""

    folder: Path
    open_model: ov.CompiledModel | None  # None once closed
    device: str
    states: list[StateVariable]
    config: ModelConfig
    inputs: dict[str, int]  # name -> index, for the fast setters
    outputs: dict[str, int]  # name -> index, for the fast getters
    picks_logits: bool  # as in ``ModelGraph``
    target_ids: np.ndarray | None  # as in ``ModelGraph``
    properties: dict[str, str]  # OpenVINO's compile properties
    large_page_mover: LargePageMover  # moves its weights into large pages
    state_advance: StateAdvance | None = None  # for a model with recurrent states as inputs and outputs
    last_run: tuple[object, int] = (None, 0)  # stateful engine on a GPU: the last request to run, its tokens per row

    @property
    def compiled_model(self) -> ov.CompiledModel:
        """OpenVINO's model; raises InferenceError if it is closed."""
        if self.open_model is None:
            raise InferenceError(f"{self.folder}: the model was closed; load it again.")
        return self.open_model

    def close(self) -> None:
        """Free OpenVINO's model as soon as it has no requests left."""
        self.open_model = None
        self.state_advance = None
        self.last_run = (None, 0)

    @property
    def kv_states(self) -> list[StateVariable]:
        return [state for state in self.states if state.sequence_axis is not None]

    @property
    def recurrent_states(self) -> list[StateVariable]:
        return [state for state in self.states if state.sequence_axis is None]

    @functools.cached_property
    def kv_precision(self) -> str | None:
        """The type of the KV cache; None if the device doesn't report it."""
        if precision := self.properties.get("KV_CACHE_PRECISION"):
            return precision
        with contextlib.suppress(RuntimeError):
            device_properties = self.compiled_model.get_property("DEVICE_PROPERTIES").values()
            precisions = {properties.get("KV_CACHE_PRECISION") for properties in device_properties}
            if len(precisions) == 1 and (precision := precisions.pop()):
                return format_property(precision)
        return None

    @property
    def needs_single_rows(self) -> bool:
        """Whether each row needs its own forward pass.

        Padding would enter a convolution or an SSM, or shift the chunks of chunked attention. With LongRoPE, a long row
        changes the other rows' frequencies. And on a GPU, a forward pass with fewer rows than the last crashes
        (OpenVINO 2026.4.1).
        """
        if self.recurrent_states or self.config.has_chunked_attention or self.config.rope_switch_length is not None:
            return True
        return may_use_gpu(self.device)

    @property
    def logits_width(self) -> int:
        """Width of the logits; may exceed the tokenizer's vocabulary."""
        return self.output_width("logits")

    def output_width(self, output: str) -> int:
        """Return the number of values per token in the output ``output``; 0 if the model doesn't have it."""
        if output not in self.outputs:
            return 0
        return self.compiled_model.output(self.outputs[output]).get_partial_shape()[-1].get_length()

    @functools.cached_property
    def context_length(self) -> int | None:
        return self.config.context_length


def check_ir_folder(folder: Path) -> None:
    """Raise an OvspecError that describes ``folder``, unless it has an exported language model."""
    if folder.is_file() and folder.suffix == ".gguf":
        raise OvspecError(f"{folder}: a GGUF file, not an IR; run 'ovspec export {folder} -o DIR' first.")
    if not folder.is_dir():
        problem = "is a file" if folder.is_file() else "no such folder"
        raise OvspecError(f"{folder}: {problem}; give a folder made by 'ovspec export' or optimum-cli.")
    if (folder / MODEL_FILE).is_file():
        return
    if list(folder.glob("*.safetensors")) or list(folder.glob("pytorch_model*.bin")):
        raise OvspecError(f"{folder}: a Hugging Face checkpoint, not an IR; run 'ovspec export {folder} -o DIR' first.")
    raise OvspecError(f"{folder} has no {MODEL_FILE}; give a folder made by 'ovspec export' or optimum-cli.")


def check_weights_file(xml: Path) -> int:
    """Return the size in bytes of the .bin file of ``xml``.

    Raises OvspecError if either file is missing, or the .bin is shorter than the .xml says: OpenVINO maps it into
    memory, and reading past its end would kill the process.
    """
    weights = xml.with_suffix(".bin")
    try:
        xml_content = xml.read_bytes()
        weights_bytes = weights.stat().st_size
    except FileNotFoundError as error:
        raise OvspecError(f"{error.filename}: missing; export the model again.") from None
    tensor_ends = [
        int(offset) + int(length) for offset, length in re.findall(rb'offset="(\d+)" size="(\d+)"', xml_content)
    ]
    if weights_bytes < max(tensor_ends, default=0):
        raise OvspecError(
            f"{weights}: truncated ({weights_bytes} of {max(tensor_ends)} bytes); export the model again."
        )
    return weights_bytes


def find_state_variables(model: ov.Model) -> list[StateVariable]:
    """Return the model's variables with their axes; the batch axis is the axis gathered by ``beam_idx``."""
    batch_axes: dict[str, int] = {}
    for op in model.get_ops():
        if op.get_type_name() != "ReadValue":
            continue
        for reader in op.output(0).get_target_inputs():
            if reader.get_node().get_type_name() == "Gather" and reader.get_index() == 0:
                axis = reader.get_node().input_value(2).get_node()
                if axis.get_type_name() == "Constant":
                    batch_axes[op.get_variable_id()] = int(axis.get_data().item())  # type: ignore[attr-defined]
    states: list[StateVariable] = []
    for variable in model.get_variables():
        info = variable.info
        batch_axis = batch_axes.get(info.variable_id, 0)
        dynamic_axes = [i for i, size in enumerate(info.data_shape) if size.is_dynamic and i != batch_axis]
        sequence_axis = None
        if len(dynamic_axes) == 1 and len(info.data_shape) == 4:
            sequence_axis = dynamic_axes[0]
        width = math.prod(size.get_length() for size in info.data_shape if size.is_static)
        states.append(StateVariable(info.variable_id, batch_axis, sequence_axis, width))
    return sorted(states, key=lambda state: state.name)


def add_logits_index_input(model: ov.Model) -> bool:
    """Add the input ``logits_idx`` [n] i64: flat indices (row * width + column) of the tokens to compute logits for.

    The hidden states are gathered before the lm_head, so ``logits`` becomes [1, n, vocab].
    Returns False, and leaves the model unchanged, if the lm_head is not found.
    """
    lm_head = find_lm_head(model)
    if lm_head is None:
        return False
    hidden = lm_head.input_value(0)
    hidden_shape = hidden.get_partial_shape()
    if hidden_shape.rank.get_length() != 3 or hidden_shape[2].is_dynamic:
        return False
    gather_rows_for_readers(model, hidden, [lm_head.input(0)])
    model.validate_nodes_and_infer_types()
    return True


def gather_rows_for_readers(model: ov.Model, hidden: ov.Output, readers: list[ov.Input]) -> ov.Output:
    """Let ``readers`` of hidden states [rows, columns, width] read only the tokens picked by input ``logits_idx`` [n].

    Returns the picked hidden states, [1, n, width].
    """
    zero = ops.constant(0, dtype=ov.Type.i64)
    logits_indices = ops.parameter([-1], ov.Type.i64, name="logits_idx")
    logits_indices.output(0).get_tensor().set_names({"logits_idx"})
    width = hidden.get_partial_shape()[-1].get_length()
    flat_hidden = ops.reshape(hidden, ops.constant([-1, width], dtype=ov.Type.i64), special_zero=False)
    picked_hidden = ops.unsqueeze(ops.gather(flat_hidden, logits_indices, zero), zero).output(0)
    for reader in readers:
        reader.replace_source_output(picked_hidden)
    model.add_parameters([logits_indices])
    return picked_hidden


def add_output(model: ov.Model, value: ov.Output, name: str) -> None:
    """Make ``value`` an output of a model."""
    result = ops.result(value)
    result.output(0).get_tensor().set_names({name})
    model.add_results([result])  # type: ignore[list-item]


def has_trimmed_vocabulary(folder: Path) -> bool:
    """Return whether the IR in ``folder`` has a reduced vocabulary, so can't be a target."""
    file = folder / MODEL_FILE
    return file.is_file() and f'"{TARGET_IDS_OUTPUT}"'.encode() in file.read_bytes()


def read_target_ids(model: ov.Model) -> np.ndarray | None:
    """Return the target's id of each logit of a model, (n,) int64; None if there are logits of all ids."""
    outputs = [port for port in model.outputs if TARGET_IDS_OUTPUT in port.names]
    if not outputs:
        return None
    offsets = outputs[0].get_node().input_value(0).get_node().get_data()  # type: ignore[attr-defined]
    return np.arange(len(offsets)) + offsets.astype(np.int64)


def write_target_ids(model: ov.Model, target_ids: np.ndarray) -> None:
    """Record the ``target_ids`` (n,) of a model's logits in the model."""
    add_output(
        model, ops.constant(target_ids - np.arange(len(target_ids)), dtype=ov.Type.i64).output(0), TARGET_IDS_OUTPUT
    )


def read_openvino_model(folder: Path) -> ov.Model:
    try:
        return openvino_core().read_model(folder / MODEL_FILE)
    except RuntimeError as error:
        problem = f"cannot be read ({last_error_line(error)})"
        raise OvspecError(f"{folder / MODEL_FILE}: {problem}; export the model again.") from None


def read_model_graph(folder: Path, rewrite: Rewrite | None = None) -> ModelGraph:
    """Read the language model in ``folder``, and apply ``add_logits_index_input`` and ``rewrite``."""
    model = read_openvino_model(folder)
    states = find_state_variables(model)
    input_names = {name for port in model.inputs for name in port.names}
    output_names = {name for port in model.outputs for name in port.names}
    if "logits" not in output_names or "input_ids" not in input_names:
        raise OvspecError(
            f"{folder}: not a text generation model (it has no input_ids or no logits); choose another model."
        )
    if not states or not {"attention_mask", "beam_idx"} <= input_names:
        raise OvspecError(f"{folder}: exported without a KV cache; export it with the task text-generation-with-past.")
    if unknown_inputs := input_names - KNOWN_INPUTS:
        raise OvspecError(f"{folder}: the model's input {min(unknown_inputs)} is not supported; choose another model.")
    for parameter in model.get_parameters():
        if parameter.get_friendly_name() == "cache_position" and not parameter.output(0).get_target_inputs():
            model.remove_parameter(parameter)
    if (target_ids := read_target_ids(model)) is not None:
        if model.output("logits").get_partial_shape()[-1] != len(target_ids):
            problem = f"the head's {TARGET_IDS_OUTPUT} and logits differ in length"
            raise OvspecError(f"{folder}: {problem}; export the model again.")
        model.remove_result(model.output(TARGET_IDS_OUTPUT).get_node())
    picks_logits = add_logits_index_input(model)
    advance = rewrite(model) if rewrite else None
    return ModelGraph(model, states, picks_logits, target_ids, advance)


def compile_ir(folder: Path, options: DeviceOptions, rewrite: Rewrite | None = None) -> CompiledIR:
    """Read the language model in ``folder``, apply ``rewrite`` if given, and compile it.

    Raises OvspecError if the folder holds no stateful text model, or the device is missing or can't compile it.
    """
    check_ir_folder(folder)
    parse_device_option(options.device)
    check_weights_file(folder / MODEL_FILE)
    with MODEL_READING_LOCK:
        graph = read_model_graph(folder, rewrite)
    return compile_graph(graph, folder, options)


def compile_graph(graph: ModelGraph, folder: Path, options: DeviceOptions) -> CompiledIR:
    """Compile ``graph``, read from ``folder``, in f32 where OpenVINO would crash otherwise.

    Raises OvspecError if the device can't compile it.
    """
    device = parse_device_option(options.device)
    properties = make_compile_properties(choose_crash_free_options(folder, options))
    large_pages = LargePageMover()
    try:
        compiled_model = openvino_core().compile_model(graph.model, device, properties)
        state_advance = graph.advance and StateAdvance(
            openvino_core().compile_model(graph.advance.model, device, properties | {"CACHE_DIR": ""}),
            graph.advance.shapes,
            graph.advance.token_axes,
        )
    except RuntimeError as error:
        raise OvspecError(
            f"{folder}: {device} cannot compile this model ({last_error_line(error)}); choose another `device`."
        ) from None
    inputs = {port.get_any_name(): i for i, port in enumerate(compiled_model.inputs)}
    outputs = {name: i for i, port in enumerate(compiled_model.outputs) for name in port.names}
    return CompiledIR(
        folder,
        compiled_model,
        device,
        graph.states,
        read_model_config(folder),
        inputs,
        outputs,
        graph.picks_logits,
        graph.target_ids,
        properties,
        large_pages,
        state_advance,
    )


def last_error_line(error: Exception) -> str:
    """Return the last line of an OpenVINO error. The other lines name OpenVINO's source files."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__
