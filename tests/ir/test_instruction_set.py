"""The instruction set in use: what the processor has, capped by the environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import dev
import pytest
from conftest import ROOT

from ovspec.base.errors import OvspecError
from ovspec.ir import instruction_set as module
from ovspec.ir.instruction_set import check_instruction_set, describe_instruction_set, list_instruction_sets

DEMO = ROOT / "models" / "demo"
# Some processors, by the levels that they have.
ZEN3 = ("SSE41", "AVX", "AVX2")
LAPTOP = (*ZEN3, "AVX2_VNNI")
ZEN5 = (*LAPTOP, "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16")


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def pretend(levels: tuple[str, ...], onednn: str = "", openvino: str = "") -> None:
        monkeypatch.setattr(module, "list_instruction_sets", lambda: levels)
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", onednn)
        monkeypatch.setenv("OV_CPU_MAX_ISA", openvino)

    return pretend


@pytest.mark.parametrize(
    ("levels", "onednn", "openvino", "expected"),
    [
        (ZEN3, "", "", "AVX2"),
        (LAPTOP, "", "", "AVX2_VNNI"),
        (ZEN5, "", "", "AVX512_CORE_BF16"),
        (ZEN5, "AVX2", "AVX2", "AVX2"),
        (ZEN5, "avx512_core", "AVX512_CORE", "AVX512_CORE"),
        (ZEN5, "AVX512_CORE_AMX", "AVX512_CORE_AMX", "AVX512_CORE_BF16"),
        (ZEN5, "AVX2", "", "AVX2 and AVX512_CORE_BF16"),
        (ZEN5, "SOMETHING", "SOMETHING", "AVX512_CORE_BF16"),
    ],
)
def test_the_better_one_that_the_cap_allows(
    pretend: Callable[..., None], levels: tuple[str, ...], onednn: str, openvino: str, expected: str
) -> None:
    pretend(levels, onednn, openvino)
    assert describe_instruction_set() == expected


@pytest.mark.parametrize(("levels", "cap"), [(("SSE41", "AVX"), ""), (ZEN5, "AVX"), (ZEN5, "SSE41")])
def test_a_processor_on_which_models_do_not_run(
    pretend: Callable[..., None], levels: tuple[str, ...], cap: str
) -> None:
    pretend(levels, cap, cap)
    with pytest.raises(OvspecError, match=f"This processor has {cap or 'AVX'}, but OpenVINO needs AVX2 "):
        check_instruction_set()


def test_this_processor_runs_models_and_is_what_the_system_says() -> None:
    check_instruction_set()
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file() or not list_instruction_sets():
        pytest.skip("not Linux on x86")
    flags = set(re.search(r"(?m)^flags\s*:(.*)$", cpuinfo.read_text())[1].split())  # type: ignore[index]
    assert ("AVX2" in list_instruction_sets()) == ({"avx2", "fma"} <= flags)
    assert ("AVX512_CORE_VNNI" in list_instruction_sets()) == ("avx512_vnni" in flags)


@pytest.mark.skipif(not list_instruction_sets(), reason="not an x86 processor")
def test_the_commands_say_so(cache_dir: Path) -> None:
    capped = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX", "OV_CPU_MAX_ISA": "AVX", "XDG_CACHE_HOME": str(cache_dir)}
    command = [sys.executable, "-m", "ovspec", "generate", str(DEMO), "a", "-n", "2"]
    done = subprocess.run(command, env=capped, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not done.stdout
    assert (
        done.stderr.startswith("Error: This processor has AVX, but OpenVINO needs AVX2")
        and done.stderr.count("\n") == 1
    )
    with pytest.raises(SystemExit, match=r"^--isa: this processor has no 'AVX3'"):
        dev.cap_instruction_set("AVX3")
