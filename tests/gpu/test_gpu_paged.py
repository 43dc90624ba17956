"""The paged engine on a GPU: blocks in its memory, and every accelerator beside plain decoding."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_texts import DEMO, KERNELS, MARKS, PROMPT, PROMPTS, after, assert_same_where_decided, continued, on_gpu
from mtp_pairs import small_mtp_pairs
from servers import StartHere

import ovspec
from ovspec.cache.block_arrays import DeviceBlockArray
from ovspec.engine.results import Result
from ovspec.ir.request import InferenceRequest

pytestmark = MARKS
N = 32


@pytest.fixture(scope="module")
def plain() -> Result:
    return on_gpu().generate(PROMPT, max_tokens=N, logprobs=2)


def test_the_default_is_paged_and_says_what_it_promises(plain: Result) -> None:
    lm = on_gpu()
    assert lm.target.engine == "paged", lm.target.engine_reason
    assert plain.stats.device == "GPU"
    assert lm.target.ir.properties["KV_CACHE_PRECISION"] == "f16"
    assert plain.stats.arithmetic.startswith("fast, not exact")
    assert_same_where_decided(plain, lm.generate(PROMPT, max_tokens=N))


def test_texts_are_those_of_the_cpu_where_they_are_decided(plain: Result) -> None:
    properties = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    cpu = ovspec.load(DEMO, "none", properties=properties)
    assert_same_where_decided(cpu.generate(PROMPT, max_tokens=N, logprobs=2), plain)


@pytest.mark.parametrize("draft", ["lookup", True, "lookup,draft"])
def test_a_drafter_changes_no_text(draft: Any, plain: Result) -> None:
    text = on_gpu(draft).generate(PROMPT, max_tokens=N, lookahead=3)
    assert text.stats.accepted > 0
    assert_same_where_decided(plain, text)


@pytest.mark.parametrize("name", ["own", "deep", "pair"])
def test_mtp_layers_change_no_text(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A layer, two of them, and one whose lm_head is cut."""
    lm = ovspec.load(small_mtp_pairs(tmp_path_factory) / name, "mtp", device="GPU", cache_dir=KERNELS)
    assert lm.draft and lm.draft.engine == "paged"
    plain, text = (lm.generate(PROMPT, max_tokens=N, lookahead=count, logprobs=2) for count in (0, 3))
    assert text.stats.drafters["mtp"]["proposed"] > N / 2
    assert_same_where_decided(plain, text)


def test_a_seed_draws_the_same_with_a_drafter() -> None:
    options: dict[str, Any] = {"max_tokens": N, "temperature": 1.0, "seed": 3}
    plain = on_gpu().generate(PROMPT, **options)
    text = on_gpu("lookup,draft").generate(PROMPT, lookahead=3, **options)
    assert text.stats.accepted > 0
    same = [ours == theirs for ours, theirs in zip(plain.token_ids, text.token_ids, strict=False)]
    assert all(same[:8]), "noise may decide otherwise later on"


def test_draft_and_target_on_different_devices(plain: Result) -> None:
    text = on_gpu(True, draft_device="CPU").generate(PROMPT, max_tokens=N, lookahead=3)
    assert (text.stats.device, text.stats.draft_device) == ("GPU", "CPU")
    assert text.stats.accepted > 0
    assert_same_where_decided(plain, text)
    reverse = on_gpu(True, device="CPU", draft_device="GPU").generate(PROMPT, max_tokens=N, lookahead=3)
    assert (reverse.stats.device, reverse.stats.draft_device) == ("CPU", "GPU")
    assert reverse.stats.accepted > 0


def test_rows_join_a_batch() -> None:
    lm = on_gpu("lookup")
    alone = [lm.generate(prompt, max_tokens=N, lookahead=0, logprobs=2) for prompt in PROMPTS]
    for size in (2, 3):
        together = lm.generate(PROMPTS, max_tokens=N, batch_size=size)
        for ours, theirs in zip(alone, together, strict=True):
            assert_same_where_decided(ours, theirs)


def test_samples_share_a_prompt() -> None:
    texts = on_gpu().samples(PROMPT, n=3, max_tokens=8, temperature=1.0, seed=1)
    assert len({tuple(text.token_ids) for text in texts}) > 1


def test_a_prompt_is_found_in_the_cache() -> None:
    lm = on_gpu()
    first = lm.generate(PROMPT * 3, max_tokens=N, logprobs=2)
    again = lm.generate(PROMPT * 3, max_tokens=N)
    assert again.stats.cached_tokens == again.stats.prompt_tokens - 1
    assert_same_where_decided(first, again)


def test_a_session_forks_rewinds_and_is_kept_in_a_file(plain: Result, tmp_path: Path) -> None:
    lm = on_gpu("lookup")
    texts = continued(lm, 4, N - 4, tmp_path / "session.bin")
    assert texts[2].stats.cached_tokens >= len(lm.encode(PROMPT)), "its KV cache is in the file"
    for text in texts:
        assert_same_where_decided(after(plain, 4), text)


def test_only_ids_lengths_and_logits_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are copied on the device when rows that share them part, and when there are more."""
    lm = on_gpu("lookup,draft")
    lm.generate(PROMPT, max_tokens=4)
    given: list[int] = []
    infer = InferenceRequest.infer

    def noting(self: InferenceRequest, arrays: Any, logits_idx: np.ndarray) -> np.ndarray:
        logits = infer(self, arrays, logits_idx)
        given.append(sum(array.nbytes for array in arrays) + logits.nbytes)
        return logits

    def refused(*_: Any) -> Any:
        raise AssertionError("blocks crossed")

    monkeypatch.setattr(InferenceRequest, "infer", noting)
    monkeypatch.setattr(DeviceBlockArray, "read_bits", refused)
    monkeypatch.setattr(DeviceBlockArray, "write_bits", refused)
    texts = lm.samples(PROMPT * 3, n=3, max_tokens=N, lookahead=3, temperature=1.0, seed=1)
    assert sum(text.stats.accepted for text in texts)
    width = lm.target.ir.logits_width
    assert max(given) <= 64 * (width * 4 + 64), "at most 64 tokens' logits, and some numbers for each token"


@pytest.mark.parametrize("device", ["GPU", "AUTO:GPU,CPU"])
def test_a_server_answers_two_clients(device: str, plain: Result, start_here: StartHere) -> None:
    server = start_here(DEMO, "--device", device, "--draft", "lookup", "--cache-dir", str(KERNELS))
    body = {"prompt": PROMPT, "max_tokens": N, "temperature": 0, "logprobs": 2}
    with ThreadPoolExecutor() as clients:
        answers = list(clients.map(lambda _: server.post("/v1/completions", body).json(), range(2)))
    assert "fast, not exact" in server.get("/ready").text
    for answer in answers:
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == N
        assert answer["choices"][0]["text"][:8] == plain.text[:8]


def test_a_compressed_cache_is_refused_or_right(plain: Result) -> None:
    """A device may have no kernels for an i8 cache; the stand-in's compiler may even end the process."""
    options = ("--device", "GPU", "--kv-precision", "u8", "--cache-dir", str(KERNELS), "-n", str(N), "--json")
    command = [sys.executable, "-m", "ovspec", "generate", str(DEMO), PROMPT, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode < 0:
        pytest.skip(f"this GPU's compiler ends the process (signal {-done.returncode})")
    if done.returncode:
        assert "GPU" in done.stderr.splitlines()[-1]
    else:
        assert json.loads(done.stdout)["token_ids"][:4] == plain.token_ids[:4]
