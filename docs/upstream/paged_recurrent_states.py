"""Compare a stateful IR that has recurrent states with the same IR after OpenVINO's paged-attention transformation.

    pip install openvino numpy
    python docs/upstream/paged_recurrent_states.py FOLDER

FOLDER holds an openvino_model.xml that optimum-intel 2.2 has exported with the task text-generation-with-past, of a
hybrid model: Qwen3.5, LFM2, Granite 4. Random weights will do. A report for OpenVINO's project; see README.md.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import openvino as ov
from openvino._offline_transformations import paged_attention_transformation

TOKENS = 64
WIDTHS = (1, 5, 16, 32)
STATE_ROWS = 4
BLOCKS = 16
OPTIONS = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


class StatefulModel:
    def __init__(self, file: Path) -> None:
        self.compiled_model = ov.Core().compile_model(file, "CPU", OPTIONS)
        self.request = self.compiled_model.create_infer_request()
        self.length = 0

    def reset(self) -> None:
        self.request.reset_state()
        self.length = 0

    def feed(self, tokens: np.ndarray) -> np.ndarray:
        """Append ``tokens`` (n,) to the text; return the logits after each, (n, vocabulary)."""
        positions = np.arange(self.length, self.length + len(tokens), dtype=np.int64)
        self.length += len(tokens)
        inputs = {
            "input_ids": tokens[None],
            "attention_mask": np.ones((1, self.length), dtype=np.int64),
            "position_ids": positions[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        names = {name for port in self.compiled_model.inputs for name in port.names}
        self.request.infer({name: array for name, array in inputs.items() if name in names})
        return np.array(self.request.get_tensor("logits").data[0])


class PagedModel:
    """The same interface; the states of the only text are in row 0 of the tables, read and written in place."""

    def __init__(self, file: Path) -> None:
        model = ov.Core().read_model(file)
        paged_attention_transformation(model)
        self.compiled_model = ov.Core().compile_model(model, "CPU", OPTIONS)
        self.request = self.compiled_model.create_infer_request()
        self.tables: list[ov.Tensor] = []
        self.length = 0
        self.block_size = 1
        for port in self.compiled_model.inputs:
            name = next((name for name in port.names if "_table." in name or "_cache." in name), "")
            if not name:
                continue
            first_dimension = STATE_ROWS if "_table." in name else BLOCKS
            shape = [first_dimension, *(dimension.get_length() for dimension in list(port.get_partial_shape())[1:])]
            tensor = ov.Tensor(port.get_element_type(), ov.Shape(shape))
            self.request.set_tensor(name, tensor)
            if "_table." in name:
                self.tables.append(tensor)
            elif "key_cache" in name:
                self.block_size = shape[2]
        self.reset()

    def reset(self) -> None:
        for table in self.tables:
            table.data[...] = 0
        self.length = 0

    def feed(self, tokens: np.ndarray) -> np.ndarray:
        def integers(*values: int) -> np.ndarray:
            return np.array(values, dtype=np.int32)

        past = self.length
        self.length += len(tokens)
        used_blocks = -(-self.length // self.block_size)
        inputs = {
            "input_ids": tokens,
            "position_ids": np.arange(past, self.length, dtype=np.int64),
            "past_lens": integers(past),
            "subsequence_begins": integers(0, len(tokens)),
            "block_indices": np.arange(used_blocks, dtype=np.int32),
            "block_indices_begins": integers(0, used_blocks),
            "max_context_len": np.array(self.length, dtype=np.int32),
            "la.block_indices": integers(0, 0),
            "la.block_indices_begins": integers(0, 2),
            "la.past_lens": integers(past),
            "la.cache_interval": integers(1 << 30),
        }
        names = {name for port in self.compiled_model.inputs for name in port.names}
        for name in names & inputs.keys():
            self.request.set_tensor(name, ov.Tensor(inputs[name]))
        self.request.infer()
        return np.array(self.request.get_output_tensor(0).data).reshape(len(tokens), -1)


def read_in_pieces(model: StatefulModel | PagedModel, text: np.ndarray, width: int) -> np.ndarray:
    model.reset()
    return np.concatenate([model.feed(text[begin : begin + width]) for begin in range(0, len(text), width)])


def time_inference(model: StatefulModel | PagedModel, text: np.ndarray, width: int) -> float:
    """Return the median milliseconds of an inference of ``width`` tokens after 32 others."""
    times: list[float] = []
    for _ in range(12):
        model.reset()
        model.feed(text[:32])
        model.feed(text[32 : 32 + width])  # of a new width
        began = time.perf_counter()
        model.feed(text[32 : 32 + width])
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[2:])


def main() -> None:
    file = Path(sys.argv[1]) / "openvino_model.xml"
    stateful, paged = StatefulModel(file), PagedModel(file)
    kinds = Counter(op.get_type_name() for op in ov.Core().read_model(file).get_ops())
    print(f"OpenVINO {ov.get_version()}; {kinds['Loop']} loops, {kinds['ScaledDotProductAttention']} attention layers")
    text = np.random.default_rng(0).integers(
        1, stateful.compiled_model.output("logits").partial_shape[-1].get_length(), TOKENS
    )
    expected = read_in_pieces(stateful, text, 1)
    print("| tokens | stateful, error | paged, error | same next token | stateful, ms | paged, ms |")
    print("|---|---|---|---|---|---|")
    for width in WIDTHS:
        errors: list[str] = []
        for model in (stateful, paged):
            logits = read_in_pieces(model, text, width)
            errors.append(f"{np.abs(logits - expected).max() / np.abs(expected).max():.0e}")
        same = (logits.argmax(-1) == expected.argmax(-1)).mean()
        times = [f"{time_inference(model, text, width):.1f}" for model in (stateful, paged)]
        print(f"| {width} | {' | '.join(errors)} | {same:.0%} | {' | '.join(times)} |")


if __name__ == "__main__":
    main()
