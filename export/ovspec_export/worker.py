"""Jobs with torch, run in a separate process: they are noisy and large, and can be ended at once.

    python -m ovspec_export.worker JOB JSON-ARGUMENTS

A job reports its progress through the channel of ``channel.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ovspec.base.json_types import JsonObject, JsonValue
from ovspec_export.channel import open_channel
from ovspec_export.patches import apply_splits_in_turn, hide_torchvision, match_hugging_face_tokens

if TYPE_CHECKING:
    from openvino import Model

    from ovspec_export.heads import HeadModule

IR_NAME = "openvino_model"


def export_with_optimum(
    arguments: list[str],
    source: str,
    model_type: str,
    trust_remote_code: bool,
    tap_layers: list[int] | None = None,
    states_file: str = "",
) -> None:
    """Run 'optimum-cli export openvino', patched for the family, and compare the IR with ``source``.

    The comparison comes before compression, because compression changes the IR's logits. The inputs of the checkpoint's
    ``tap_layers`` for a short text, or the lm_head's if there are none, go to ``states_file``, for the comparison of a
    head.
    """
    import argparse

    from ovspec_export.agreement import check_ir_agrees_with_model, save_hidden_states
    from ovspec_export.kept_export import keeping_weights
    from ovspec_export.patches import adapt_optimum, refuse_missing_tensors
    from ovspec_export.quantised import load_checkpoint_model

    loading_options = adapt_optimum(model_type)
    apply_splits_in_turn()
    match_hugging_face_tokens()
    refuse_missing_tensors()
    from optimum.commands.export.openvino import OVExportCommand, parse_args_openvino
    from optimum.exporters.openvino import __main__ as exporter

    original_export = exporter.main_export
    original_compress = exporter._apply_model_size_based_quantization
    postponed_calls: list[tuple[Any, ...]] = []

    def export_and_compare(*, output: Path, **options: Any) -> None:
        with keeping_weights(Path(source)):
            original_export(output=output, model_loading_kwargs=loading_options, **options)
        release_freed_memory()
        # With the IR's own rounding: otherwise it could choose a different expert at a tie.
        model = load_checkpoint_model(source, trust_remote_code, as_exported=True, **loading_options)
        check_ir_agrees_with_model(model, output)
        if tap_layers is not None:
            save_hidden_states(model, tap_layers, Path(states_file))
        del model
        for call_arguments in postponed_calls:
            original_compress(*call_arguments)

    exporter.main_export = export_and_compare
    # Compression by main_export itself (gpt-oss in int4) is postponed until after the comparison.
    exporter._apply_model_size_based_quantization = lambda *call: postponed_calls.append(call)
    parser = argparse.ArgumentParser()
    parse_args_openvino(parser)
    # Not by its main function: it would also register the command of the optimum-intel hidden by an overlay.
    OVExportCommand.run(argparse.Namespace(args=parser.parse_args(arguments)))  # type: ignore[arg-type]


def release_freed_memory() -> None:
    """Return free memory to the system; glibc keeps it otherwise, as much as all weights take."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another system's library
        ctypes.CDLL(None).malloc_trim(0)


def convert_eagle_head(
    source: str,
    name: str,
    folder: str,
    tap_layers: list[int],
    weight_format: str,
    quantization: JsonObject,
    target: str,
    states_file: str,
) -> None:
    """Write the EAGLE-3 head ``source`` as an IR into ``folder``.

    tap_layers: the target layers whose inputs the head reads. target: the target's checkpoint, or "". states_file: a
    file with these inputs for some text.
    """
    from ovspec_export.heads import convert_head_to_ir, load_head_checkpoint, read_target_embedding

    head = load_head_checkpoint(Path(source), name, read_target_embedding(Path(target)) if target else None)
    model = convert_head_to_ir(head, tap_layers)
    save_head_ir(head, model, folder, weight_format, quantization, states_file)


def convert_mtp_layers(
    source: str,
    name: str,
    folder: str,
    model_type: str,
    ids_file: str,
    weight_format: str,
    quantization: JsonObject,
    states_file: str,
) -> None:
    """Write the MTP layers in the checkpoint ``source`` as IRs: the first into ``folder``, the next inside it.

    ids_file: a file with the ids of the tokens to propose, or "" for all. states_file: a file with the target's lm_head
    inputs for some text.
    """
    import numpy as np

    from ovspec.ir.heads import NEXT_LAYER_FOLDER
    from ovspec_export.heads import convert_head_to_ir
    from ovspec_export.mtp import count_mtp_layers, load_mtp_layer
    from ovspec_export.patches import adapt_optimum, patch_for_tracing

    loading_options = adapt_optimum(model_type)
    layer_folder = Path(folder)
    for depth in range(count_mtp_layers(Path(source))):
        layer, layer_model = load_mtp_layer(Path(source), name, depth, **loading_options)
        layer.target_ids = np.load(ids_file) if ids_file else None
        with patch_for_tracing(layer_model, model_type):
            model = convert_head_to_ir(layer, [])
        layer_folder.mkdir(exist_ok=True)
        save_head_ir(layer, model, str(layer_folder), weight_format, quantization, states_file)
        layer_folder = layer_folder / NEXT_LAYER_FOLDER


def save_head_ir(
    head: HeadModule, model: Model, folder: str, weight_format: str, quantization: JsonObject, states_file: str
) -> None:
    """Compare ``model`` with its original ``head``, compress it, and write it into ``folder``."""
    import numpy as np
    import openvino as ov

    from ovspec_export.head_agreement import check_head_ir

    check_head_ir(head, model, np.load(states_file) if Path(states_file).is_file() else None)
    if quantization:
        from optimum.intel import OVWeightQuantizationConfig
        from optimum.intel.openvino.quantization import _weight_only_quantization

        model = _weight_only_quantization(model, OVWeightQuantizationConfig(**quantization))
    if weight_format == "bf16" or quantization.get("backup_precision") == "none":
        round_weights(model)
    ov.save_model(model, Path(folder) / f"{IR_NAME}.xml", compress_to_fp16=weight_format == "fp16")


def save_first_layers(source: str, layer_count: int, folder: str, trust_remote_code: bool) -> None:
    """Save the checkpoint ``source`` with only its first layers in ``folder``."""
    from transformers import AutoConfig

    from ovspec_export.quantised import load_checkpoint_model
    from ovspec_export.sources import copy_missing_files

    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    config.num_hidden_layers = layer_count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layer_count]
    model = load_checkpoint_model(source, trust_remote_code, config=config)
    # transformers can't quantise dequantised weights again, and would leave them out.
    options: JsonObject = {"save_original_format": False} if "quantization_config" in config else {}
    model.save_pretrained(folder, **options)
    copy_missing_files(Path(source), Path(folder))


def unpack_gguf_weights(gguf_file: str, folder: str, dtype: str) -> None:
    """Write the weights of a GGUF file next to the config.json in ``folder``."""
    from ovspec_export.gguf_checkpoint import write_gguf_weights
    from ovspec_export.gguf_file import read_gguf_headers

    write_gguf_weights(read_gguf_headers(Path(gguf_file)), Path(folder), dtype)


def convert_tokenizer(source: str, folder: str, trust_remote_code: bool) -> None:
    """Convert the tokenizer of ``source`` to OpenVINO's, into ``folder``."""
    from optimum.exporters.openvino.convert import export_tokenizer
    from transformers import AutoTokenizer

    apply_splits_in_turn()
    match_hugging_face_tokens()
    export_tokenizer(AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code), Path(folder))


def calibrate_weights(
    folder: str, calibration: str, samples: int | None, config: JsonObject, trust_remote_code: bool
) -> None:
    """Compress the fp32 IR in ``folder`` with nncf, calibrated on the text file ``calibration``."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    from ovspec.base.files import read_text

    texts = split_text(read_text(Path(calibration)), samples or 128)
    quantization = OVWeightQuantizationConfig(dataset=texts, tokenizer=folder, num_samples=len(texts), **config)
    model = OVModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, compile=False, trust_remote_code=trust_remote_code
    )
    model.save_pretrained(Path(folder) / "compressed")
    del model
    for compressed_file in (Path(folder) / "compressed").iterdir():
        if compressed_file.stem in (IR_NAME, "openvino_config"):
            compressed_file.replace(Path(folder) / compressed_file.name)
    shutil.rmtree(Path(folder) / "compressed")


def split_text(text: str, count: int, piece_length: int = 2000) -> list[str]:
    """Return up to ``count`` pieces of about ``piece_length`` characters, spread over the whole text."""
    piece_starts = list(range(0, max(len(text) - piece_length // 4, 1), piece_length))
    if len(piece_starts) > count:
        piece_starts = [piece_starts[i * len(piece_starts) // count] for i in range(count)]
    return [text[start : start + piece_length] for start in piece_starts]


def round_to_bf16(folder: str) -> None:
    """Round the fp32 weights of the IR in ``folder`` to bf16; OpenVINO itself can only write fp16."""
    import openvino as ov

    ir_file = Path(folder) / f"{IR_NAME}.xml"
    model = ov.Core().read_model(ir_file)
    round_weights(model)
    ov.save_model(model, Path(folder) / "bf16.xml", compress_to_fp16=False)
    del model  # it maps the file to be replaced next
    for suffix in (".xml", ".bin"):
        (Path(folder) / f"bf16{suffix}").replace(ir_file.with_suffix(suffix))


def round_weights(model: Model) -> None:
    """Convert every large f32 constant of an OpenVINO model to bf16, rounding to nearest, ties to even."""
    import numpy as np
    import openvino as ov
    from openvino import opset13 as ops

    for operation in model.get_ops():
        if operation.get_type_name() != "Constant" or operation.get_element_type() != ov.Type.f32:
            continue
        if int(np.prod(operation.get_output_shape(0))) < 1024:
            continue  # norms and biases take little space
        bits = operation.get_data().view(np.uint32)
        rounded = np.ascontiguousarray(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))
        tensor = ov.Tensor(rounded.reshape(-1), list(rounded.shape), ov.Type.bf16)
        constant = ov.op.Constant(tensor, shared_memory=False)
        for consumer in operation.output(0).get_target_inputs():
            consumer.replace_source_output(ops.convert(constant, "f32").output(0))


def evaluate_ir(source: str, folder: str, text: str, context: int, output: str, trust_remote_code: bool) -> None:
    """Compare the IR in ``folder`` with the checkpoint on a text and write the figures as JSON to ``output``."""
    from ovspec.base.files import read_text
    from ovspec_export.evaluate import compare_with_checkpoint

    figures = compare_with_checkpoint(Path(source), Path(folder), read_text(Path(text)), context, trust_remote_code)
    Path(output).write_text(json.dumps(figures), encoding="utf-8", newline="\n")


def run_distillation_job(job: str, **arguments: JsonValue) -> None:
    """Run a job of a distillation."""
    # Before torch is imported: waiting threads sleep, to keep a night's training from slowing down other programs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    module = importlib.import_module(f"ovspec_export.distill.{DISTILL_MODULES[job]}")
    getattr(module, job)(**subtract_startup_time(arguments))


def subtract_startup_time(arguments: JsonObject) -> JsonObject:
    """Return a job's arguments; from its ``seconds``, the time its process has already taken is subtracted."""
    if "seconds" not in arguments:
        return arguments
    startup_seconds = max(0.0, time.time() - psutil.Process().create_time())
    return arguments | {"seconds": arguments["seconds"] - startup_seconds}


# Jobs of distillations, and their files.
DISTILL_MODULES = {"write_texts": "texts", "write_features": "features", "train_head": "head", "train_draft": "draft"}
DISTILL_MODULES |= {"train_mtp": "mtp", "check_mtp_possible": "mtp", "find_most_used_ids": "used_ids"}
DISTILL_MODULES |= {"measure_costs": "speedup_estimate", "measure_gain": "gain_benchmark"}
JOBS: dict[str, Callable[..., None]] = {
    job.__name__: job
    for job in (
        export_with_optimum,
        convert_eagle_head,
        convert_mtp_layers,
        unpack_gguf_weights,
        convert_tokenizer,
        save_first_layers,
        calibrate_weights,
        round_to_bf16,
        evaluate_ir,
    )
} | {job: functools.partial(run_distillation_job, job) for job in DISTILL_MODULES}


if __name__ == "__main__":
    open_channel()
    hide_torchvision()
    JOBS[sys.argv[1]](**json.loads(sys.argv[2]))
