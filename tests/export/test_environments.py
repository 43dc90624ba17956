"""The overlays in which some families are exported: made whole or not at all, once, and without touching anything else.

The wheels here are made by the tests; nothing comes from a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT
from ovspec_export import environments, families
from ovspec_export.compression import INT8
from ovspec_export.environments import OVERLAYS, Environment, prepare_environment, prepare_environment_variables
from ovspec_export.manifests import make_manifest_entry
from ovspec_export.sources import Source

from ovspec.base.errors import OvspecError
from ovspec.setup.manifest import Manifest, read_manifest

PREPARE = (
    "from ovspec_export.environments import Environment, prepare_environment; import sys; "
    "print(prepare_environment(Environment('toy', (('ovspec-toy', '1.0', sys.argv[1]),)), 'toys'))"
)
INFO = "ovspec_toy-1.0.dist-info"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    return toy_in(tmp_path, monkeypatch)


def toy_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Return an environment of one small wheel, which pip finds in a folder; ovspec's cache is another."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))  # the user's, of no concern here
    (tmp_path / "constraints.txt").write_text("ovspec-toy==2.0\n")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return Environment("toy", (("ovspec-toy", "1.0", wheel(tmp_path / "wheels")),))


def wheel(folder: Path) -> str:
    """Write a wheel with the module ``ovspec_toy`` into ``folder`` and return its SHA-256."""
    file, info = folder / "ovspec_toy-1.0-py3-none-any.whl", INFO
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("ovspec_toy/__init__.py", "PLACE = __file__\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: ovspec-toy\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "ovspec_toy/__init__.py,,17\n../../bin/toy,,5\n")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the toy's overlay, made once."""
    place = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patched:
        return prepare_environment(toy_in(place, patched), "toys")


def prepared(environment: Environment, whole: Path) -> Path:
    """Put a whole copy where an environment's overlay is."""
    environment.overlay_folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(whole, environment.overlay_folder)
    assert environment.is_prepared
    return environment.overlay_folder


def left_in(environment: Environment) -> list[str]:
    """Return what the folder of all overlays holds, but for locks."""
    parent = environment.overlay_folder.parent
    return sorted(path.name for path in parent.iterdir() if path.suffix != ".lock") if parent.exists() else []


def test_an_overlay_is_made_once_and_seen_by_a_child_only(toy: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    assert not toy.is_prepared
    variables = {**os.environ, **prepare_environment_variables(toy, "toys")}
    assert toy.is_prepared and left_in(toy) == [toy.overlay_folder.name] == ["ovspec-toy-1.0"]
    assert len(capsys.readouterr().err.splitlines()) in (1, 2)  # one line, or two if it took more than a second
    os.environ["PIP_FIND_LINKS"] = ""  # from now on, making it again would fail
    assert prepare_environment(toy, "toys") == toy.overlay_folder
    assert not capsys.readouterr().err
    code = "import ovspec_toy; print(ovspec_toy.PLACE)"
    found = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert found.stdout.startswith(str(toy.overlay_folder))
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 1


def test_without_a_network_a_sentence_says_what_to_do(toy: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(OvspecError, match=r"needs ovspec-toy 1\.0.*cannot be reached.*'ovspec export --prepare toys'"):
        prepare_environment(toy, "toys")
    assert left_in(toy) == []
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens there
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(OvspecError, match="cannot be reached"):
        prepare_environment(toy, "toys")
    assert left_in(toy) == []


def test_a_wheel_with_another_checksum_is_refused(toy: Environment) -> None:
    forged = Environment("toy", (("ovspec-toy", "1.0", "0" * 64),))
    with pytest.raises(OvspecError, match="the wrong checksum"):
        prepare_environment(forged, "toys")
    assert left_in(toy) == []


def test_a_full_disk_leaves_nothing(toy: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import resource as r, runpy; r.setrlimit(r.RLIMIT_FSIZE, (50, 50)); runpy.run_module('pip', {}, '__main__')"
    limited = [sys.executable, "-c", code, "install"]
    with monkeypatch.context() as patched:
        patched.setattr(environments, "find_installer_command", lambda: limited)
        with pytest.raises(OvspecError, match=r"installing the packages into .* failed \(.*File too large"):
            prepare_environment(toy, "toys")
    assert left_in(toy) == []
    with monkeypatch.context() as patched:
        patched.setattr(environments, "NEEDED_BYTES", 10**18)
        with pytest.raises(OvspecError, match="is free; free some space"):
            prepare_environment(toy, "toys")
    prepare_environment(toy, "toys")


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill ends processes otherwise there")
@pytest.mark.parametrize("moments", [(0.7,), pytest.param([0.15 * i for i in range(10)], marks=pytest.mark.slow)])
def test_a_killed_preparation_leaves_no_overlay_and_the_next_one_cleans_up(
    toy: Environment, moments: Sequence[float]
) -> None:
    """Killed at any moment, the folder is whole or not there."""
    command = [sys.executable, "-c", PREPARE, toy.wheels[0][2]]
    for seconds in moments:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGKILL)  # with its pip, which would go on writing
        process.wait()
        if toy.is_prepared:
            break
    assert not toy.is_prepared or (toy.overlay_folder / "ovspec_toy" / "__init__.py").is_file()
    parent = toy.overlay_folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    (parent / f"{toy.partial_prefix}killed").mkdir()
    if not toy.is_prepared:
        prepare_environment(toy, "toys")
        assert left_in(toy) == [toy.overlay_folder.name]
    assert (toy.overlay_folder / "ovspec_toy" / "__init__.py").is_file()


@pytest.mark.slow
def test_two_processes_at_once_make_it_once(toy: Environment) -> None:
    command = [sys.executable, "-c", PREPARE, toy.wheels[0][2]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    answers = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    assert {out.strip() for out, _ in answers} == {str(toy.overlay_folder)}
    assert left_in(toy) == [toy.overlay_folder.name]


def test_two_at_once_make_it_once(toy: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads, whose locks are as those of processes."""
    installed, install = list[str](), environments.install_wheels

    def counted(environment: Environment, families: str) -> int:
        installed.append(families)
        return install(environment, families)

    monkeypatch.setattr(environments, "install_wheels", counted)
    with ThreadPoolExecutor(2) as executor:
        assert [*executor.map(lambda _: prepare_environment(toy, "toys"), range(2))] == [toy.overlay_folder] * 2
    assert installed == ["toys"]
    assert left_in(toy) == [toy.overlay_folder.name]


def damage(toy: Environment, how: str) -> None:
    module, record = (toy.overlay_folder / name for name in ("ovspec_toy/__init__.py", f"{INFO}/RECORD"))
    if how == "cut off":
        module.write_text("PLACE")
    elif how == "with an empty RECORD":
        record.write_text("")
    else:
        (module if how == "missing" else record).unlink()


DAMAGES = ("missing", "cut off", "without a RECORD", "with an empty RECORD")


def test_an_incomplete_copy_is_noticed(toy: Environment, whole: Path) -> None:
    for how in DAMAGES:
        prepared(toy, whole)
        (toy.overlay_folder / "more").mkdir()  # no harm
        assert toy.is_prepared
        damage(toy, how)
        assert not toy.is_prepared, how
        shutil.rmtree(toy.overlay_folder)


@pytest.mark.parametrize("how", [DAMAGES[0], *[pytest.param(how, marks=pytest.mark.slow) for how in DAMAGES[1:]]])
def test_an_incomplete_copy_is_made_anew(
    toy: Environment, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    module = prepared(toy, whole) / "ovspec_toy" / "__init__.py"
    (toy.overlay_folder / "more").mkdir()
    damage(toy, how)
    with monkeypatch.context() as patched:
        patched.setenv("PIP_FIND_LINKS", "")
        with pytest.raises(
            OvspecError, match=r"ovspec-toy-1\.0 is incomplete, and .* failed .*on a machine with network"
        ):
            prepare_environment(toy, "toys")
    assert left_in(toy) == [toy.overlay_folder.name]  # it may still be completed by hand
    capsys.readouterr()
    prepare_environment(toy, "toys")
    assert f"{toy.overlay_folder}: incomplete" in capsys.readouterr().err
    assert toy.is_prepared and left_in(toy) == [toy.overlay_folder.name]
    assert module.read_text() == "PLACE = __file__\n" and not (toy.overlay_folder / "more").exists()


def test_each_overlay_is_looked_at_once_for_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Path] = []
    monkeypatch.setattr(environments, "is_wheel_complete", lambda info: not looked_at.append(info))
    assert not [line for line in families.describe_families() if "not prepared" in line]
    assert len(looked_at) == len({*looked_at}) == sum(len(environment.wheels) for environment in OVERLAYS)


def test_what_is_prepared_is_listed(toy: Environment, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, "toy", families.Family(toy, remote_code=True))
    line = next(line for line in families.describe_families() if line.startswith("toy "))
    assert "not prepared" in line and "needs --trust-remote-code" in line
    prepared(toy, whole)
    line = next(line for line in families.describe_families() if line.startswith("toy "))
    assert "prepared" in line and "not prepared" not in line


def test_families_are_prepared_by_name() -> None:
    assert families.find_environments(["llama"]) == {}
    with pytest.raises(OvspecError, match="typo"):
        families.find_environments(["all", "typo"])
    needed = families.find_environments(["qwen3_5", "lfm2", "llama4"])
    assert sorted(needed.values()) == ["llama4", "qwen3_5 lfm2"]
    assert list(families.find_environments(["all"])) == list(OVERLAYS)
    with pytest.raises(OvspecError, match=r"foo: .*ovspec and optimum-intel don't support the family.*--list-families"):
        families.find_environments(["foo"])


def test_models_are_not_taken_for_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    (tmp_path / "lfm2").mkdir()
    for model in ("org/model", "org/model@main", str(tmp_path), r"C:\models\one", "my-model", "qwen3-8b"):
        with pytest.raises(OvspecError) as error:
            families.find_environments(["lfm2", model])
        assert str(error.value).startswith(
            f"{model}: a model, but 'ovspec export --prepare' needs a model family; give the model_t"
        )
        assert str(error.value).endswith("listed by 'ovspec export --list-families'.")
    assert list(families.find_environments(["lfm2"]).values()) == ["lfm2"]


def test_each_model_has_the_versions_of_its_own_environment(tmp_path: Path) -> None:
    """A target and a draft may be exported in different environments; manifests of old exports don't tell."""
    demo = ROOT / "models" / "demo"
    models = []
    for family in ("lfm2", "granitemoehybrid", "llama"):
        (tmp_path / family).mkdir()
        (tmp_path / family / "config.json").write_text(json.dumps({"model_type": family}), encoding="utf-8")
        models.append(make_manifest_entry(Source(family, tmp_path / family, False, "1"), demo, INT8))
    assert [model.versions for model in models] == [{"transformers": "5.2.0"}, {"optimum-intel": "2.2.0"}, {}]
    assert not make_manifest_entry(Source("demo", demo, True, "1"), demo, INT8).versions
    written = Manifest(models[0], models[1], {"transformers": "5.5.0"}, {})
    written.write_to_folder(tmp_path)
    assert read_manifest(tmp_path) == written
    old = json.loads((tmp_path / "ovspec.json").read_text(encoding="utf-8"))
    del old["target"]["versions"], old["draft"]["versions"]
    (tmp_path / "ovspec.json").write_text(json.dumps(old), encoding="utf-8")
    read = read_manifest(tmp_path)
    assert read and read.draft and (read.target.versions, read.draft.versions) == ({}, {})


def test_the_overlays_of_this_project_are_prepared() -> None:
    """``dev.py`` prepares them when it installs, so that exports in other tests need no network."""
    assert all(environment.is_prepared for environment in OVERLAYS)
