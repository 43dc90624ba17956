"""Quantise a GGUF file with llama.cpp and compute logits with it, in the environment of that peer.

    python llama_cpp_logits.py FILE FOLDER IDS.json TYPE ...

Writes FOLDER/TYPE.gguf and FOLDER/TYPE.npy, the logits of every position, for each type such as Q4_K_M.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import llama_cpp  # type: ignore[import-not-found]
import numpy as np


def main() -> None:
    file, folder, ids, *types = sys.argv[1:]
    tokens = json.loads(Path(ids).read_text(encoding="utf-8"))
    for kind in types:
        quantised = Path(folder) / f"{kind}.gguf"
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        assert not llama_cpp.llama_model_quantize(file.encode(), str(quantised).encode(), options)
        model = llama_cpp.Llama(str(quantised), n_ctx=512, logits_all=True, verbose=False)
        model.eval(tokens)
        np.save(quantised.with_suffix(".npy"), np.array(model.scores[: len(tokens)]))


if __name__ == "__main__":
    main()
