"""llama.cpp's own grammar engine as a worker: grammars.

It has no separate masks: a single pass over all candidates computes and applies a mask. First llama.cpp only checks its
choice without a grammar (``check`` here); this is mostly enough. llama-server converts JSON schemas to its grammars
with llama.cpp's own converter, but needs a model to run; the converter of llama-cpp-python is older and supports fewer
schemas.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import gguf_writer
import llama_cpp  # type: ignore[import-not-found]
import numpy as np
import protocol
import worker_llamacpp
from http_server import Server
from install import FOLDER, server_of_llamacpp

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
DEMO = Path(__file__).resolve().parents[3] / "models" / "demo-hf" / "target"


@dataclass
class Candidates:
    """A llama.cpp array of candidates over numpy's memory."""

    values: np.ndarray

    def __post_init__(self) -> None:
        pointer = self.values.ctypes.data_as(llama_cpp.llama_token_data_p)
        self.array = llama_cpp.llama_token_data_array(pointer, len(self.values), -1, False)

    def go_through(self, sampler: Any) -> None:
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(self.array))


class Grammar:
    """The state of a grammar within a text, a ``protocol.Walk``."""

    def __init__(self, vocab: Any, gbnf: str, everything: Candidates, single: Candidates) -> None:
        self._sampler = llama_cpp.llama_sampler_init_grammar(vocab, gbnf.encode(), b"root")
        if not self._sampler:
            raise protocol.Refusal("it doesn't take the grammar")
        self._all = everything
        self._single = single

    def __del__(self) -> None:
        if self._sampler:
            llama_cpp.llama_sampler_free(self._sampler)

    def prepare(self, logits: np.ndarray) -> None:
        self._all.values["logit"] = logits

    def mask(self) -> bool:
        self._all.go_through(self._sampler)
        return False

    def apply(self) -> None: ...

    def check(self, token: int) -> bool:
        self._single.values[0] = (token, 1, 0)
        self._single.go_through(self._sampler)
        return bool(np.isfinite(self._single.values["logit"][0]))

    def allows(self, token: int) -> bool:
        return bool(np.isfinite(self._all.values["logit"][token]))

    def accept(self, token: int) -> bool:
        """Accept only allowed tokens, because a C++ exception would end the process."""
        if not self.allows(token):
            return False
        llama_cpp.llama_sampler_accept(self._sampler, token)
        return True


def vocabulary_file(vocabulary: protocol.Vocabulary) -> Path:
    """Return a GGUF file without weights, written once for each tokenizer."""
    source = Path(vocabulary.file)
    digest = hashlib.sha256(source.read_bytes() + f"{vocabulary.size} {vocabulary.end}".encode()).hexdigest()[:8]
    out = FOLDER / "gguf" / f"vocabulary-{digest}.gguf"
    if not out.exists():
        writer = gguf.GGUFWriter(gguf_writer.unfinished(out), "llama")
        config = {"vocab_size": vocabulary.size, "bos_token_id": vocabulary.end, "eos_token_id": vocabulary.end}
        gguf_writer.add_vocabulary(writer, source.parent, config)
        gguf_writer.finish(writer, out)
    return out


def load_grammars(vocabulary: protocol.Vocabulary) -> protocol.Grammars:
    file = vocabulary_file(vocabulary)
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
    if not model:
        raise protocol.Refusal(f"it doesn't read {file}")
    vocab = llama_cpp.llama_model_get_vocab(model)
    values = np.zeros(vocabulary.size, CANDIDATE)
    values["id"] = np.arange(vocabulary.size)
    everything = Candidates(values)
    single = Candidates(np.zeros(1, CANDIDATE))

    def grammar(kind: str, source: str) -> Callable[[], Grammar]:
        if kind not in ("json", "gbnf"):
            raise protocol.Refusal(f"it doesn't read {kind}")
        gbnf = gbnf_of_schema(source) if kind == "json" else source
        return lambda: Grammar(vocab, gbnf, everything, single)

    return grammar


def gbnf_of_schema(schema: str) -> str:
    body = {"prompt": "a", "n_predict": 0, "json_schema": json.loads(schema)}
    try:
        with schema_converter().post("/completion", body) as answer:
            return json.load(answer)["generation_settings"]["grammar"]
    except urllib.error.HTTPError as error:
        raise protocol.Refusal(f"it doesn't convert the schema: {json.load(error)['error']['message']}") from error


@functools.cache
def schema_converter() -> Server:
    """Start llama-server with the demo target."""
    model = FOLDER / "gguf" / "demo-for-schemas.gguf"
    if not model.exists():
        gguf_writer.write(DEMO, model)
    program = server_of_llamacpp()
    setup = protocol.Setup(str(model), mode="lookup", options={"server": str(program) if program.exists() else None})
    return worker_llamacpp.start_server(setup, threads=1, k=None, context=256)


if __name__ == "__main__":
    protocol.serve(["llama-cpp-python"], grammars=load_grammars)
