"""Results can be pickled, and sent to other processes, with the record that ``verify`` needs."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
from conftest import PROMPTS
from pydantic import BaseModel

import ovspec

Load = Callable[..., ovspec.LanguageModel]


class Brief(BaseModel):
    name: str


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampled": {"temperature": 1.0, "seed": 3, "logit_bias": {5: -1.0}, "stop": ["\n\n"], "logprobs": 2},
    "schema": {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    "model": {"json_schema": type("Local", (Brief,), {})},
    "processor": {"logits_processors": [lambda _, logits: logits]},
}


@pytest.mark.parametrize("case", CASES)
def test_results_can_be_pickled(load: Load, case: str) -> None:
    lm = load(draft="lookup,draft", lookahead=3)
    result = lm.generate(PROMPTS[0], max_tokens=12, **CASES[case])
    data = pickle.dumps(result)
    found = pickle.loads(data)
    assert found == result and repr(found) == repr(result)
    assert pickle.loads(pickle.dumps(found)) == result
    if case == "processor":
        for each in (result, found):
            with pytest.raises(ovspec.OvspecError, match="`logits_processors` can't be verified"):
                lm.verify(each)
    else:
        assert lm.verify(found).ok and lm.verify(result).ok


def text_of(result: ovspec.Result) -> ovspec.Result:
    return result


@pytest.mark.slow
@pytest.mark.parametrize("by", ["multiprocessing", "joblib", "ray"])
def test_results_are_sent_to_processes(load: Load, by: str) -> None:
    lm = load()
    result = lm.generate(PROMPTS[0], max_tokens=8)
    if by == "multiprocessing":
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found = pool.submit(text_of, result).result()
    elif by == "joblib":
        joblib = pytest.importorskip("joblib")
        [found] = joblib.Parallel(2)(joblib.delayed(lambda each: each)(each) for each in [result])
    else:
        ray = pytest.importorskip("ray")
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        try:
            found = ray.get(ray.remote(lambda each: each).remote(result))
        finally:
            ray.shutdown()
    assert found == result and lm.verify(found).ok


@pytest.mark.slow
def test_no_torch_is_needed_to_read_one(load: Load, tmp_path: Any) -> None:
    """Nor openvino's model: another process reads the text and the record."""
    result = load().generate(PROMPTS[0], max_tokens=4)
    file = tmp_path / "result"
    file.write_bytes(pickle.dumps(result))
    code = (
        "import json, pickle, sys; found = pickle.load(open(sys.argv[1], 'rb'));"
        "print(json.dumps([found.text, found.record.model(), 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [result.text, load().runtime.identity, False]
