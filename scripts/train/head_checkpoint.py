"""Write the checkpoint of an EAGLE-3 head stored as an int8 IR, such as models/smollm2-head.

    python scripts/train/head_checkpoint.py models/smollm2-head CHECKPOINT

It has the IR's weights in f32: exported in int8, it is the same head again. It is in AngelSlim's format, the input of
other engines' converters, of 'ovspec distill --draft' for further training, and of 'bench_pair.py --head'.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from ovspec_export.distill.head import to_angelslim_name
from safetensors.torch import save_file

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_json
from ovspec.ir.compile import read_openvino_model, read_target_ids

MATRIX = re.compile(r"self\.(?:head\.)?(.*\.weight)$")  # "head." in IRs of earlier exports
NORM = re.compile(r"__module\.(?:head\.)?(.*norm)/")


def write_checkpoint(head: Path, output: Path) -> None:
    """Write ``output``; raises OvspecError if ``head`` can't be read, or is no head in int8 with ids of its own."""
    model = read_openvino_model(head)
    ids = read_target_ids(model)
    constants = {node.get_friendly_name(): node for node in model.get_ops() if node.get_type_name() == "Constant"}

    def values(name: str) -> np.ndarray:
        return np.asarray(constants[name].get_data(), np.float32)

    tensors = dict[str, np.ndarray]()
    for name, node in constants.items():
        if matrix := MATRIX.match(name):
            if f"{name}/scale" not in constants or node.get_element_type().bitwidth != 8:
                raise OvspecError(f"{head}: its weights aren't in int8; export it with --draft-weight-format int8.")
            zero = values(f"{name}/zero_point") if f"{name}/zero_point" in constants else 0
            tensors[matrix[1]] = (values(name) - zero) * values(f"{name}/scale")
        for use in node.output(0).get_target_inputs():
            if norm := NORM.match(use.get_node().get_friendly_name()):
                tensors[f"{norm[1]}.weight"] = values(name).reshape(-1)
    weights = {to_angelslim_name(name): torch.from_numpy(tensor.copy()) for name, tensor in tensors.items()}
    if ids is None or "d2t" in weights or "fc.weight" not in weights:
        raise OvspecError(f"{head}: not a head that proposes some of its target's ids.")
    vocabulary = read_json(head / "config.json")["vocab_size"]
    own = torch.from_numpy(ids.astype(np.int64))
    weights["d2t"] = own - torch.arange(len(own))
    weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, own, True)
    output.mkdir(parents=True, exist_ok=True)
    save_file(weights, output / "model.safetensors", {"format": "pt"})
    shutil.copyfile(head / "config.json", output / "config.json")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        write_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
    except (OvspecError, OSError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
