"""The rollback probe: its result, its cost, and where the result is kept."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import hybrid
import numpy as np
import pytest
from conftest import ROOT

import ovspec
import ovspec.cache.stateful
import ovspec.setup.rollback_probing
from ovspec.cache.decoder import RollbackMethod
from ovspec.cache.slots import SlotTables
from ovspec.cache.stateful import StatefulDecoder
from ovspec.ir.attention_mask import UNBOUNDED, find_exact_masking_limit
from ovspec.ir.compile import CompiledIR, compile_ir
from ovspec.ir.config import ModelConfig
from ovspec.ir.device import DeviceOptions
from ovspec.ir.request import InferenceRequest
from ovspec.setup.engine_choice import load_compiled_model
from ovspec.setup.rollback_probing import find_working_copy_modes, probe_rollback

DEMO = ROOT / "models" / "demo"


def test_a_mask_suffices_for_the_demo_pair(target_ir: CompiledIR) -> None:
    assert probe_rollback(target_ir).rollback == RollbackMethod("mask")
    assert find_exact_masking_limit(target_ir) == UNBOUNDED


@pytest.mark.parametrize(("folder", "precision"), [(DEMO, "bf16"), (DEMO / "draft", "f32")])
def test_probing_is_cheap_and_says_what_it_cost(folder: Path, precision: str) -> None:
    ir = compile_ir(folder, DeviceOptions(precision=precision))
    probe = probe_rollback(ir)
    assert probe.rollback == RollbackMethod("mask")
    assert 0 < probe.seconds < 1
    assert f"INFERENCE_PRECISION_HINT={precision}" in probe.setting


def test_which_requests_take_copied_states(target_ir: CompiledIR, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU does, which ignores states of a request that hasn't run, and other values where it copies none."""
    assert find_working_copy_modes(target_ir, RollbackMethod("mask")) == "any"
    write, infer, ran = ovspec.cache.stateful.write_states, InferenceRequest.infer, set[Any]()

    def noting(self: InferenceRequest, *given: Any) -> Any:
        ran.add(self.openvino_request)
        return infer(self, *given)

    monkeypatch.setattr(InferenceRequest, "infer", noting)

    def ignoring(request: Any, values: dict[str, np.ndarray]) -> None:
        if request in ran:
            write(request, values)

    monkeypatch.setattr(ovspec.cache.stateful, "write_states", ignoring)
    assert find_working_copy_modes(target_ir, RollbackMethod("mask")) == "run"
    monkeypatch.setattr(ovspec.cache.stateful, "gather_states", lambda *_: None)
    assert find_working_copy_modes(target_ir, RollbackMethod("mask")) is None


def test_trim_where_a_mask_has_no_effect(target_ir: CompiledIR, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_alive(self: SlotTables) -> np.ndarray:
        return np.ones((len(self.row_lengths), self.slot_count), dtype=np.int64)

    monkeypatch.setattr(SlotTables, "attention_mask", property(all_alive))
    assert probe_rollback(target_ir).rollback == RollbackMethod("trim")


def test_trim_where_the_bound_is_in_doubt(target_ir: CompiledIR, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trim if neither the config nor the attention mask shows the bound."""
    monkeypatch.setattr(ovspec.setup.rollback_probing, "find_exact_masking_limit", lambda _: None)
    assert probe_rollback(target_ir).rollback == RollbackMethod("mask"), "the config has no window"
    monkeypatch.setattr(target_ir, "config", ModelConfig())
    assert probe_rollback(target_ir).rollback == RollbackMethod("trim")


def test_neither_helps(target_ir: CompiledIR, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ovspec.setup.rollback_probing, "restores_clean_run", lambda *_: False)
    with pytest.raises(ovspec.OvspecError, match="can't be rolled back"):
        probe_rollback(target_ir)


@pytest.mark.parametrize("window", [24, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("told", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_window_is_found_in_the_mask_itself(
    tmp_path_factory: pytest.TempPathFactory, window: int, told: bool
) -> None:
    """The window is found even if no probe could reach it by running the model, or the config does not mention it."""
    from families import GROUPED, Family
    from family_models import export
    from kept import kept_model

    def make(place: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = GROUPED | {"sliding_window": window, "max_position_embeddings": 8192}
            export(Family("MistralConfig", arguments), place)
        config = place / "ir" / "config.json"
        data = json.loads(config.read_text(encoding="utf-8"))
        config.write_text(json.dumps(data if told else data | {"sliding_window": None}), encoding="utf-8")

    folder = kept_model(tmp_path_factory, f"window-{window}-{told}", make)
    ir = compile_ir(folder / "ir", DeviceOptions(precision="f32"))
    assert ir.config.attention_window == (window if told else None)
    assert find_exact_masking_limit(ir) == window
    assert probe_rollback(ir).rollback == RollbackMethod("mask", window)


def test_remembered_by_model_and_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(DEMO / "draft", folder)
    probed = []

    def counting(ir: CompiledIR) -> ovspec.setup.rollback_probing.ProbedRollback:
        probed.append(ovspec.setup.rollback_probing.describe_rollback_setting(ir.device, ir.properties))
        return probe_rollback(ir)

    def load(**options: Any) -> None:
        load_compiled_model(folder, DeviceOptions(cache_dir=cache, **options), "stateful")

    monkeypatch.setattr(ovspec.setup.rollback_probing, "probe_rollback", counting)
    for _ in range(2):
        load(precision="f32")
    assert len(probed) == 1
    load(precision="bf16")
    load(precision="f32", kv_precision="u8")
    assert len(set(probed)) == 3
    # A damaged file is ignored.
    for file in (cache / "probes").iterdir():
        file.write_text('{"rollback": 1}', encoding="utf-8")
    load(precision="f32")
    assert len(probed) == 4
    # Other weights make another model.
    shutil.copy(DEMO / "openvino_model.xml", folder)
    shutil.copy(DEMO / "openvino_model.bin", folder)
    load(precision="f32")
    assert len(probed) == 5


@pytest.mark.slow
def test_logits_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    model = hybrid.Hybrid(4096, None)
    model.head.data[:] = float("nan")
    folder = hybrid.export(model, tmp_path / "ir", DEMO)
    with pytest.raises(ovspec.OvspecError, match="the model computed NaN or infinite logits"):
        ovspec.load(folder, cache_dir=tmp_path / "cache")


@pytest.mark.slow
def test_snapshots_are_where_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft with recurrent states never starts over, and plain decoding rarely takes a snapshot."""
    from family_models import Mistaken

    import ovspec.cache.stateful

    folder = hybrid.export(hybrid.Hybrid(4096, "mask"), tmp_path / "ir", DEMO)
    lm = ovspec.load(folder, folder, engine="stateful", precision="f32", cache_dir=tmp_path / "cache")
    engine = lm.runtime.decoder_pool.acquire()
    engine.reset(1)
    draft = engine.drafter.decoder._decoders[0]  # type: ignore[union-attr]
    engine.drafter = Mistaken(engine.drafter)  # type: ignore[arg-type]
    lm.runtime.decoder_pool.release(engine)
    widths, snapshots, infer = [], [], draft._request.infer

    def recording(arrays: tuple[np.ndarray, ...], logits_idx: np.ndarray) -> np.ndarray:
        widths.append(arrays[0].shape[1])
        return infer(arrays, logits_idx)

    read_states = ovspec.cache.stateful.read_states
    monkeypatch.setattr(draft._request, "infer", recording)
    monkeypatch.setattr(ovspec.cache.stateful, "read_states", lambda *a: snapshots.append(1) or read_states(*a))
    prompt = list(range(100, 140))
    lm.generate(prompt, max_tokens=100, ignore_eos=True, lookahead=0)
    assert len(snapshots) <= 3
    result = lm.generate(prompt, max_tokens=100, ignore_eos=True, lookahead=4)
    assert 0 < result.stats.accepted < result.stats.proposed
    assert widths[0] >= len(prompt)
    assert max(widths[1:]) <= 4


@pytest.mark.slow
def test_replay_is_bounded(tmp_path: Path) -> None:
    """However often proposals are rejected, at most REPLAY_AT committed tokens are fed again."""
    from ovspec.cache.sequence import Sequence, catch_up
    from ovspec.cache.stateful import MAX_REPLAY_TOKENS

    model = hybrid.Hybrid(4096, "mask")
    ir = compile_ir(hybrid.export(model, tmp_path / "ir", DEMO), DeviceOptions(precision="f32"))
    decoder = StatefulDecoder(ir, probe_rollback(ir).rollback)
    fed, infer = [], decoder._request.infer

    def recording(arrays: tuple[np.ndarray, ...], logits_idx: np.ndarray) -> np.ndarray:
        fed.append(arrays[0].shape[1])
        return infer(arrays, logits_idx)

    decoder._request.infer = recording  # type: ignore[method-assign]
    text = Sequence(range(20, 40))
    decoder.feed([text.tokens], [1])
    for token in range(100, 140):  # each round commits one token, and three proposed tokens are rejected
        text.commit([token])
        new = catch_up(decoder, 0, text)
        logits = decoder.feed([np.concatenate((new, [7, 8, 9]))], [4])[0]
        np.testing.assert_allclose(logits[0], model.logits(text.tokens.tolist())[-1], atol=2e-3)
        decoder.truncate(0, len(text))
    assert max(fed[1:]) <= MAX_REPLAY_TOKENS + 1 + 4
    assert len(fed) - 1 <= 40 + 40 / (MAX_REPLAY_TOKENS - 1) + 1
