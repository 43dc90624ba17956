"""Fixtures: a small pair exported in f32, and Hugging Face's model of the same checkpoint as the reference."""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from filelock import FileLock
from places import PLACE, cores_at

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OVSPEC_TUNE"] = "0"  # what is tested must not depend on which settings are fastest here
if PLACE in os.environ and hasattr(os, "sched_setaffinity"):
    # Give each worker its own cores before OpenVINO counts them: on shared cores, its threads wait for each other.
    os.sched_setaffinity(0, cores_at(os.environ[PLACE], os.sched_getaffinity(0)))

import ovspec
from ovspec.cache.decoder import FeedRule, RollbackMethod
from ovspec.cache.paged import PagedDecoder
from ovspec.cache.stateful import StatefulDecoder
from ovspec.ir.compile import CompiledIR, compile_ir
from ovspec.ir.device import DeviceOptions, default_cache_dir, list_native_precisions
from ovspec.ir.instruction_set import describe_instruction_set
from ovspec.setup.paging import compile_paged

pytest_plugins = ["browsers", "compiling", "durations", "guardian", "limits", "servers"]
pytest_plugins += ["scheduling"] if find_spec("xdist") else []
ROOT = Path(__file__).resolve().parent.parent
USERS_CACHE = default_cache_dir()  # holds the overlays for exports; most tests use another
HAS_BF16 = "bf16" in list_native_precisions()  # elsewhere bf16 is emulated, and attention is computed in f32
# The strictest rule that the paged engine was found to need, on any processor. What a test plants must break this one.
STRICT_UNBOUND = FeedRule(queries=2, fewest=5, fewest_logits=5)
STRICT = replace(STRICT_UNBOUND, most=64)
CHECKPOINTS = ROOT / "models" / "demo-hf"
# The tests' pair: the demo pair's draft as the target (five times cheaper than the demo target) and a one-layer draft.
TARGET, DRAFT = CHECKPOINTS / "draft", ROOT / "models" / "small-hf"
PROMPTS: list[str] = [
    entry["text"] for entry in json.loads((ROOT / "models" / "prompts.json").read_text(encoding="utf-8"))["prompts"]
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-docs", action="store_true", help="Update the tables and pictures in docs/.")


def pytest_configure() -> None:
    """Restore Ctrl-C, which some tests send: a shell that runs pytest in the background makes it ignore the signal."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class SignalStack(ctypes.Structure):
    """What ``sigaltstack`` takes."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let signals use the usual stack: with one of its own that is freed, a signal kills the process without a word.

    OpenVINO's CPU plugin gives the thread that loads it a stack for signals, and restores the one before with its Core.
    Where Cores end in the order in which they began, that is one which is freed already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).sigaltstack(ctypes.byref(SignalStack(None, 2, 0)), None)  # SS_DISABLE


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Look for no garbage among modules and tests, now or later, and seldom among what tests import and make.

    There are more than a million objects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def pytest_report_header() -> str:
    return f"instruction set: {describe_instruction_set()}"


@pytest.fixture(scope="session")
def update_docs(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-docs"))


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache that all workers share, so that what one has found out the other need not."""
    return made_once(tmp_path_factory, "cache", Path.mkdir)


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Path:
    """Return a folder of this name that all workers share; the first that asks for it makes it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / name
    with FileLock(shared / f"{name}.lock"):
        part = shared / f"{name}.part"
        if not folder.exists():
            shutil.rmtree(part, ignore_errors=True)  # of a test that was interrupted
            make(part)
            part.rename(folder)
    return folder


def export_small_pair(folder: Path) -> None:
    from family_models import warm_jobs
    from ovspec_export import Compression, export_pair

    with pytest.MonkeyPatch.context() as patched:
        if hasattr(os, "fork"):
            warm_jobs(patched)
        export_pair(str(TARGET), str(DRAFT), folder, Compression("fp32"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the small pair, exported in f32."""
    from kept import kept_model

    return kept_model(tmp_path_factory, "small-pair", export_small_pair)


@pytest.fixture(scope="session")
def with_generation_config(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    """Return a function that returns a copy of the small pair with more in its generation config, made once."""

    @functools.cache
    def made(more: str) -> Path:
        folder = tmp_path_factory.mktemp("generation-config") / "pair"
        shutil.copytree(pair, folder)
        (folder / "ovspec.json").unlink()  # which has the size of the file
        file = folder / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | json.loads(more)), "utf-8")
        return folder

    return lambda more: made(json.dumps(more))


@pytest.fixture(scope="session")
def load(pair: Path, cache_dir: Path) -> Callable[..., ovspec.LanguageModel]:
    """Return a function that loads the f32 pair with ``ovspec.load``, in f32, once per set of options.

    ``rollback`` selects the stateful engine and replaces the probed rollback: the pair only needs masking, but its
    cache can also be trimmed. ``compact_at``: number of dead slots at which the stateful engine compacts its cache.
    """

    @functools.cache
    def load(
        draft: bool = False,
        rollback: Literal["mask", "trim"] | None = None,
        compact_at: int | None = None,
        **options: Any,
    ) -> ovspec.LanguageModel:
        if rollback:
            options["engine"] = "stateful"
        if options.get("engine") == "stateful":
            options.setdefault("arithmetic", "fast")  # which masks; exact arithmetic has tests of its own
        lm = ovspec.load(pair, draft, precision="f32", cache_dir=cache_dir, **options)
        for loaded in filter(None, (lm.target, lm.draft)):
            loaded.rollback = RollbackMethod(rollback) if rollback else loaded.rollback
            if compact_at and loaded.engine == "stateful":
                make = functools.partial(StatefulDecoder, loaded.ir, loaded.rollback, compaction_threshold=compact_at)
                loaded.make_decoder = lambda *given, make=make, shares_prefixes=False: make(*given)  # type: ignore  # noqa: ARG005
        return lm

    return load


@pytest.fixture(scope="session")
def target_ir(pair: Path, cache_dir: Path) -> CompiledIR:
    return compile_ir(pair, DeviceOptions(precision="f32", cache_dir=cache_dir))


@pytest.fixture(scope="session")
def make_decoder(target_ir: CompiledIR) -> Callable[..., StatefulDecoder]:
    def make_decoder(rollback: Any, compact_at: int = 256) -> StatefulDecoder:
        return StatefulDecoder(target_ir, RollbackMethod(rollback), compaction_threshold=compact_at)

    return make_decoder


@pytest.fixture(scope="session")
def make_paged(pair: Path, cache_dir: Path) -> Callable[..., PagedDecoder]:
    ir = compile_paged(pair, DeviceOptions(precision="f32", cache_dir=cache_dir))

    def make_paged(rule: FeedRule = STRICT_UNBOUND, **options: Any) -> PagedDecoder:
        return PagedDecoder(ir, rule=rule, **options)

    return make_paged


class Reference:
    """Hugging Face's model and tokenizer, in f32."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return the logits after each token, (len(tokens), vocab), computed from scratch."""
        with self.torch.no_grad():
            return self.model(input_ids=self.torch.tensor([tokens])).logits[0].numpy()

    def generate(self, prompt: str, max_tokens: int, ignore_eos: bool = False) -> list[int]:
        """Return the token ids of the greedy continuation."""
        ids = self.tokenizer(prompt, return_tensors="pt")
        config = self.model.generation_config
        ends, config.eos_token_id = config.eos_token_id, None if ignore_eos else config.eos_token_id
        out = self.model.generate(**ids, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        config.eos_token_id = ends
        return out[0, ids["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference(TARGET)


@pytest.fixture(scope="session")
def command_environment(cache_dir: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONUTF8": "1", "XDG_CACHE_HOME": str(cache_dir), "LOCALAPPDATA": str(cache_dir)}


@pytest.fixture(scope="session")
def ovspec_command(command_environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the command line in a separate process."""

    def run(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ovspec", *map(str, arguments)]
        done = subprocess.run(
            command, input=stdin.encode(), capture_output=True, env=command_environment, timeout=120, check=False
        )
        out, err = done.stdout.decode().replace("\r\n", "\n"), done.stderr.decode().replace("\r\n", "\n")
        err = re.sub(r"(?m)^.* …\n", "", err)  # what took long on a busy machine
        return subprocess.CompletedProcess(command, done.returncode, out, err)

    return run
