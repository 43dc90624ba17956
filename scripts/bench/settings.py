"""Time what could make an IR's plain decoding faster: threads, pinning, and matrix products that are joined.

    python scripts/bench/settings.py MODEL [--isa AVX2]

All settings take turns: milliseconds for 1, 2, 4 and 8 tokens after 128, in fast arithmetic and f32. "joined" is the IR
with the products q, k and v of a layer as one, and gate and up as one; their weights are put one behind the other, so
nothing is read twice. The last column says whether the logits have the same bits as those of the first row.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from formats import CONTEXT, TURNS, WIDTHS, feed_ms, read
from harness import Table, cap, machine, options, take_turns
from openvino import opset13

from ovspec.cache.decoder import Decoder
from ovspec.ir.device import DeviceOptions
from ovspec.setup.engine_choice import load_ir
from ovspec.setup.tuning import TEXT
from ovspec.text.tokenizer import Tokenizer

SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one thread": {"INFERENCE_NUM_THREADS": 1},
    "not pinned": {"ENABLE_CPU_PINNING": False},
    "hyper-threads too": {"ENABLE_HYPER_THREADING": True},
    "joined": {},
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--isa", help="cap OpenVINO to this instruction set")
    args = parser.parse_args()
    cap(args.isa)
    with tempfile.TemporaryDirectory(dir=args.model.parent) as scratch:
        folder = Path(scratch) / "joined"
        products = write_joined(args.model, folder)
        decoders = {
            name: decoder_of(folder if name == "joined" else args.model, more) for name, more in SETTINGS.items()
        }
        text = Tokenizer(args.model).encode(TEXT.read_text(encoding="utf-8"))[: CONTEXT + max(WIDTHS)]
        logits = {name: read(decoder, text[:CONTEXT]) for name, decoder in decoders.items()}
        print(f"{machine()}{f', capped to {args.isa}' if args.isa else ''}; {products} products joined\n", flush=True)
        table = Table("setting", *(f"{width} tokens, ms" for width in WIDTHS), "same bits")
        ways = [(name, width) for name in decoders for width in WIDTHS]
        times = take_turns(ways, lambda way, _: feed_ms(decoders[way[0]], text, way[1]), TURNS)
        for name in decoders:
            measured = [f"{statistics.median(times[name, width]):.1f}" for width in WIDTHS]
            table.row(name, *measured, "yes" if np.array_equal(logits[name], logits["as it is"]) else "no")


def decoder_of(folder: Path, properties: dict[str, Any]) -> Decoder:
    chosen = DeviceOptions(precision="f32", kv_precision="f32", properties={"CACHE_DIR": "", **properties})
    return load_ir(folder, chosen, arithmetic="fast").decoder()


# ---------------------------------------------------------------- joining products


def write_joined(source: Path, folder: Path) -> int:
    """Write ``source`` with joined products; return how many were."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("openvino_model.*", "ovspec.json"))
    model = ov.Core().read_model(source / "openvino_model.xml")
    products: dict[tuple[Any, ...], list[ov.Node]] = {}
    for op in model.get_ordered_ops():
        if op.get_type_name() == "MatMul" and op.get_attributes()["transpose_b"] and (shape := weights_of(op)):
            value = op.input_value(0)
            products.setdefault((value.get_node().get_friendly_name(), value.get_index(), shape), []).append(op)
    groups = [group for group in products.values() if len(group) > 1]
    for group in groups:
        join(group)
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    return sum(map(len, groups))


def weights_of(product: ov.Node) -> tuple[str, ...]:
    """Return the operations that make a product's weights of constants; () if they are made otherwise."""

    def names(node: ov.Node) -> list[str]:
        if node.get_type_name() == "Constant":
            return ["Constant"]
        found = [node.get_type_name(), str(node.get_element_type())]
        if node.get_type_name() not in ("Convert", "Subtract", "Multiply", "Reshape"):
            raise LookupError
        return found + [name for value in node.input_values() for name in names(value.get_node())]

    try:
        return tuple(names(product.input_value(1).get_node()))
    except LookupError:
        return ()


def join(products: list[ov.Node]) -> None:
    """Replace products of one value by a single one, whose result is split."""
    widths = [product.input_value(1).get_partial_shape()[0].get_length() for product in products]
    weights = stacked([product.input_value(1).get_node() for product in products])
    whole = opset13.matmul(products[0].input_value(0), weights, False, True)
    parts = opset13.variadic_split(whole, np.int64(-1), np.array(widths, dtype=np.int64))
    for product, part in zip(products, parts.outputs(), strict=True):
        product.output(0).replace(part)


def stacked(nodes: list[ov.Node]) -> ov.Node:
    """Return what makes the weights of all ``nodes``, one behind the other."""
    kind, first = nodes[0].get_type_name(), nodes[0]
    if kind == "Constant":
        if not first.shape or first.get_element_type() == ov.Type.i64:
            return first
        shape = [sum(node.shape[0] for node in nodes), *list(first.shape)[1:]]
        data = np.concatenate([node.data.reshape(-1).view(np.uint8) for node in nodes])
        return ov.op.Constant(ov.Tensor(data, ov.Shape(shape), first.get_element_type()))
    values = [stacked([node.input_value(i).get_node() for node in nodes]) for i in range(len(first.inputs()))]
    if kind == "Convert":
        return opset13.convert(values[0], first.get_element_type().to_string())
    if kind == "Reshape":
        shape = [sum(node.shape[0] for node in nodes), *list(first.shape)[1:]]
        return opset13.reshape(values[0], np.array(shape, dtype=np.int64), False)
    return {"Subtract": opset13.subtract, "Multiply": opset13.multiply}[kind](*values)


if __name__ == "__main__":
    main()
