"""Every model family gives Hugging Face's tokens, with the rollback that its states need.

The models are tiny and random, and exported as optimum-cli does it. Their folders have no manifest, so everything is
probed. ``dev.py test --slow tests/export/test_families.py --update-docs`` writes the findings into
docs/reference/models.md.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hybrid
import numpy as np
import openvino as ov
import pytest
from conftest import PROMPTS, ROOT
from families import FAMILIES, VOCAB
from family_models import Mistaken, export_as_the_worker_does, make
from ovspec_export.environments import OVERLAYS, TRANSFORMERS_5_2, Environment, prepare_environment_variables
from ovspec_export.families import FAMILIES as REGISTRY

import ovspec
from ovspec.cache.decoder import Arithmetic, RollbackMethod
from ovspec.cache.stateful import StatefulDecoder
from ovspec.engine.decoders import DecoderSet
from ovspec.ir.compile import compile_ir
from ovspec.ir.device import DeviceOptions
from ovspec.setup.engine_choice import EngineChoice

pytestmark = pytest.mark.filterwarnings("ignore")  # from tracing
DOCS = ROOT / "docs" / "reference" / "models.md"
TOKENS = 60
PROMPT_LENGTHS = (17, 7, 12)

# Each token's experts are gathered, so that nncf takes their weights for embeddings, which stay in int8.
GATHERED = ("gemma4_text, experts", "glm4_moe")
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}
HYBRIDS = {
    "convolution + SSM + attention": ("mask", "mask + replay"),
    "convolution + SSM + ALiBi": ("alibi", "trim + replay"),
    "convolution + SSM": (None, "replay"),
}

# For quick runs: a gated delta net, exported in an overlay. test_text_part.py exports two windows without one.
QUICK, QUICK_TOKENS = "qwen3_5_text", 24
Way = tuple[EngineChoice, Arithmetic, tuple[int, ...]]
# For each shape: the engine, the arithmetic, and the lookaheads to try.
WAYS: list[list[Way]] = [
    [("stateful", "fast", (1, 2, 4, 7)), ("stateful", "exact", (3,)), ("auto", "exact", (1, 2, 4, 7))],
    [("stateful", "fast", (3,)), ("auto", "exact", (5,))],
]

# How far a u8 cache may move logits, as a share of their standard deviation: three times the most that was seen.
U8_MOVES = 0.17
U8_MOVES_MORE = {"gemma2": 0.9}  # its random attention is so sharp that rounding decides what it sees
U8_IGNORED = ("gemma3n_text",)  # OpenVINO keeps its cache, which layers share, in f32


@functools.cache
def prompts() -> list[list[int]]:
    ids = ovspec.load().encode("".join(PROMPTS[:2])).tolist()
    return [ids[:length] for length in PROMPT_LENGTHS]


def check(
    name: str,
    folder: Path,
    cache_dir: Path,
    expected: list[list[int]],
    rollback: str,
    note: str = "",
    ways: list[Way] = WAYS[0],
    tokens: int = TOKENS,
) -> str:
    """Check that plain, speculative and batched decoding of the IR in ``folder`` give ``expected``.

    Returns the family's row of the table in the docs.
    """
    assert all(len(set(text)) > 8 for text in expected), "a text that repeats itself proves nothing"
    lm = paged = None
    for engine, arithmetic, lookaheads in ways:
        lm = ovspec.load(folder, folder, engine=engine, arithmetic=arithmetic, precision="f32", cache_dir=cache_dir)
        paged = lm.target.engine == "paged"
        cuts = not paged and lm.target.arithmetic == "exact"  # where the probe finds differences, it is "fast"
        decoders = with_mistakes(lm)
        plain = [lm.generate(ids, max_tokens=tokens, ignore_eos=True, lookahead=0) for ids in prompts()]
        assert [result.token_ids for result in plain] == expected
        for lookahead in lookaheads:
            before = decoders.target.inferences
            result = lm.generate(prompts()[0], max_tokens=tokens, ignore_eos=True, lookahead=lookahead)
            assert result.token_ids == expected[0]
            usual = re.sub("mask( until [0-9]+)?", "trim", rollback) if cuts else rollback
            paged_rollback = "blocks + advance" if rollback.endswith("+ replay") else "blocks"
            assert result.stats.rollback == (paged_rollback if paged else usual)
            assert 0 < result.stats.accepted < result.stats.proposed
            first_alone = int(cuts)  # a text's first token has an inference of its own
            prompt_kept = int(not paged and rollback.endswith("replay"))  # so has a kept prompt's last token
            needed = result.stats.rounds + first_alone + prompt_kept
            if lm.target.ir.config.rope_switch_length:  # there the text is computed anew
                assert needed <= decoders.target.inferences - before <= needed + 5
            else:
                assert decoders.target.inferences - before == needed
            assert result.stats.rounds < tokens
            together = lm.generate(prompts(), max_tokens=tokens, ignore_eos=True, lookahead=lookahead)
            assert [row.token_ids for row in together] == expected
    assert lm
    has_positions = "yes" if "position_ids" in lm.target.ir.inputs else "no"
    family = name + f" ({note})" * bool(note)
    made_in = environment_of(name)
    return f"| {' | '.join([family, made_in, rollback, has_positions, *['yes'] * 3, 'yes' if paged else 'no'])} |"


def check_u8_cache(name: str, folder: Path, cache_dir: Path, expected: list[int]) -> None:
    """Check that a u8 cache, OpenVINO's own choice on AUTO and HETERO, moves the logits little.

    Rolling back changes such a cache, so texts may part where f32's logits are close.
    """
    prompt, count = np.array(prompts()[0]), len(prompts()[0])
    text = np.concatenate((prompt, expected[:-1]))

    def logits(kv_precision: str, begin: np.ndarray, steps: int) -> np.ndarray:
        """Return the logits after ``begin``, fed at once, and after further tokens of ``text``, fed one by one."""
        options = DeviceOptions(precision="f32", kv_precision=kv_precision, cache_dir=cache_dir)
        decoder = StatefulDecoder(compile_ir(folder, options), RollbackMethod(None))
        return np.concatenate([decoder.feed([new], [1])[0].copy() for new in [begin, *text[count:][:steps, None]]])

    exact, seen = logits("f32", prompt, TOKENS - 1), logits("u8", prompt, TOKENS - 1)
    assert exact.argmax(-1).tolist() == expected

    def moved(found: np.ndarray) -> float:
        """Return how far half of the positions are from f32: in the others, a near-tie may choose other experts."""
        return float(np.median(np.sqrt(((found - exact[: len(found)]) ** 2).mean(-1))) / exact.std())

    most = U8_MOVES_MORE.get(name, U8_MOVES)
    assert (moved(seen) > 0) == (name not in U8_IGNORED)
    assert moved(seen) < most
    # The keys and values of another text would move them further.
    assert moved(logits("u8", np.concatenate((prompt[-2::-1], prompt[-1:])), 4)[1:]) > most
    lm = ovspec.load(
        folder, folder, engine="stateful", arithmetic="fast", precision="f32", kv_precision="u8", cache_dir=cache_dir
    )
    with_mistakes(lm)
    result = lm.generate(prompts()[0], max_tokens=TOKENS, ignore_eos=True, lookahead=4)
    assert 0 < result.stats.accepted < result.stats.proposed and len(result.token_ids) == TOKENS
    parted = [at for at, token in enumerate(result.token_ids) if token != expected[at]][:1]
    for at in parted:
        gap = exact[at, expected[at]] - exact[at, result.token_ids[at]]
        assert gap <= 2 * np.abs(seen - exact).max()


def with_mistakes(lm: ovspec.LanguageModel) -> DecoderSet:
    """Make the draft of ``lm`` err; return its decoders."""
    decoders = lm.runtime.decoder_pool.acquire()
    assert decoders.drafter
    decoders.drafter = Mistaken(decoders.drafter)
    lm.runtime.decoder_pool.release(decoders)
    return decoders


def environment_of(name: str) -> str:
    """Return what the docs say of a family's environment."""
    if name in HYBRIDS:
        return "none"
    environment = REGISTRY[FAMILIES[name].model_type or name].environment
    return environment.name if environment else "as installed"


def documented(name: str, row: str, update: bool) -> None:
    """Compare a family's row with the one in the table of the docs, or write it there."""
    text = DOCS.read_text(encoding="utf-8")
    rows = {row.split("|")[1].split(" (")[0].strip(): row for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)}
    if not update:
        assert row == rows.get(name)
        return
    head = text[: text.index("\n| family |")]
    titles = ["family", "environment", "rollback", "`position_ids`", "plain", "speculative", "batch of 3", "paged"]
    rows[name] = row
    order = [rows[name] for name in (*FAMILIES, *HYBRIDS) if name in rows]
    table = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|", *order]
    DOCS.write_text("\n".join([head, *table]) + "\n", encoding="utf-8")


@pytest.mark.slow
def test_a_family_with_an_environment_of_its_own(tmp_path: Path, cache_dir: Path) -> None:
    family = FAMILIES[QUICK]
    expected = make(QUICK, family, 1, tmp_path / "hf", prompts(), QUICK_TOKENS)
    failure = export_as_the_worker_does(QUICK, family, tmp_path / "hf", tmp_path / "ir")
    assert not failure, failure
    rollback = family.expected_rollback(1)
    check(QUICK, tmp_path / "ir", cache_dir, expected, rollback, ways=WAYS[1], tokens=QUICK_TOKENS)


# In quick runs for one of them; exports of the others fail in slow runs, too, if something is missing.
@pytest.mark.parametrize(
    "environment",
    [pytest.param(each, id=each.name, marks=[pytest.mark.slow] * (each != TRANSFORMERS_5_2)) for each in OVERLAYS],
)
def test_each_environment_has_its_versions_and_the_classes_of_its_families(environment: Environment) -> None:
    """What an export starts there finds them; the slow tests then export each family."""
    versions = {name: version for name, version, _ in environment.wheels}
    families = {name: family for name, family in FAMILIES.items() if environment_of(name) == environment.name}
    assert families
    code = (
        "import json, sys; from importlib.metadata import version; versions, configs = sys.argv[1:]; "
        "sys.modules['torch'] = None; import transformers; "  # which torch would slow down
        "found = {name: version(name) for name in json.loads(versions)}; "
        "print(json.dumps([found, sorted({*json.loads(configs)} - {*dir(transformers)})]))"
    )
    wanted = json.dumps(versions), json.dumps([family.config for family in families.values()])
    variables = {**os.environ, **prepare_environment_variables(environment, "tests")}
    done = subprocess.run([sys.executable, "-P", "-c", code, *wanted], env=variables, capture_output=True, check=True)
    assert json.loads(done.stdout) == [versions, []]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str, tmp_path: Path, cache_dir: Path, update_docs: bool) -> None:
    family = FAMILIES[name]
    rows = []
    for shape in range(2):
        folder = tmp_path / str(shape)
        expected = make(name, family, shape, folder, prompts(), TOKENS)
        failure = export_as_the_worker_does(name, family, folder, folder / "ir")
        assert not failure, failure
        rollback = family.expected_rollback(shape)
        rows.append(check(name, folder / "ir", cache_dir, expected, rollback, family.note, WAYS[shape]))
        if not shape and family.rollback != "replay":  # which has no keys and values
            check_u8_cache(name, folder / "ir", cache_dir, expected[0])
    documented(name, re.sub(" until [0-9]+", " until n", rows[0]), update_docs)


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if EXPERTS & family.arguments.keys()])
def test_the_weights_of_experts_are_compressed(name: str, weight_format: str, tmp_path: Path) -> None:
    make(name, FAMILIES[name], 0, tmp_path / "hf", prompts()[:1], 2)
    failure = export_as_the_worker_does(
        name, FAMILIES[name], tmp_path / "hf", tmp_path / "ir", weight_format=weight_format
    )
    assert not failure, failure
    bits = {"u8": 8, "i8": 8, "u4": 4, "i4": 4, "f4e2m1": 4}
    model = ov.Core().read_model(tmp_path / "ir" / "openvino_model.xml")
    constants = [op.output(0) for op in model.get_ops() if op.get_type_name() == "Constant"]
    weights = [(port.get_element_type().get_type_name(), list(port.get_shape())) for port in constants]
    weights = [(kind, shape) for kind, shape in weights if np.prod(shape) >= 1024]  # norms and biases stay as they are
    sizes = [(kind, int(np.prod(shape))) for kind, shape in weights]
    compressed = sum(size for kind, size in sizes if kind in bits)
    assert compressed > 0.95 * sum(size for _, size in sizes), sizes
    wanted = {"int8": 8, "int4": 4}[weight_format]
    count = next(value for key, value in FAMILIES[name].arguments.items() if key in EXPERTS)
    experts = [(kind, shape) for kind, shape in weights if shape[0] == count and len(shape) > 2 and min(shape) > 1]
    if not experts:  # each has matrices of its own
        experts = [(kind, shape) for kind, shape in weights if np.prod(shape) < 64 * VOCAB and min(shape) > 1]
    if name in GATHERED:
        wanted = 8
    assert all(bits.get(kind) == wanted for kind, _ in experts), experts


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid(name: str, tmp_path: Path, cache_dir: Path, update_docs: bool) -> None:
    attention, rollback = HYBRIDS[name]
    model = hybrid.Hybrid(VOCAB, attention)
    folder = hybrid.export(model, tmp_path / "ir", ROOT / "models" / "demo")
    expected = [model.generate(ids, TOKENS) for ids in prompts()]
    documented(name, check(name, folder, cache_dir, expected, rollback, "built by hand"), update_docs)
