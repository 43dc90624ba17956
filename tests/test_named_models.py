"""A name is enough: models of a stand-in for the hub and a real GGUF file are exported once and answer."""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from conftest import CHECKPOINTS, DRAFT
from hubs import TOKEN, Repository, StandInHub, folder_files, stand_in_hub
from servers import wait_until

from ovspec.ir.device import default_cache_dir

pytestmark = pytest.mark.slow
SMALL, TARGET = folder_files(DRAFT), folder_files(CHECKPOINTS / "draft")
GGUF = default_cache_dir() / "downloads" / "model" / "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France?\n"
MOMENTS = 20


@dataclass
class User:
    """Somebody with a cache of their own, and the hub."""

    hub: StandInHub
    home: Path

    @property
    def cache(self) -> Path:
        return self.home / "ovspec" / "models"

    def start(self, *arguments: str | Path, token: str | None = None, **variables: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.home), "LOCALAPPDATA": str(self.home)}
        environment |= self.hub.environment(self.home / "hub", token) | variables
        command = [sys.executable, "-m", "ovspec", *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, text=True, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload]

    def run(self, *arguments: str | Path, stdin: str = "", **options: str) -> tuple[int, str, str]:
        """Run a command; return its exit code, and what it prints on stdout and stderr."""
        process = self.start(*arguments, **options)
        printed, told = process.communicate(stdin, timeout=300)
        return process.returncode, printed, told

    def ask(self, model: str | Path, *options: str | Path, **more: str) -> tuple[int, str, str]:
        return self.run("generate", model, "def f(", "-n", "4", *options, **more)

    def entries(self) -> list[str]:
        return sorted(path.name for path in self.cache.iterdir() if not path.name.startswith("."))


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    repositories = {"model": Repository(SMALL), "gated": Repository(SMALL, gated=True)}
    repositories |= {"lost": Repository(SMALL, lost_after=1 << 16), "large": Repository(SMALL, bytes_per_second=400e3)}
    repositories["broken"] = Repository({**SMALL, "model.safetensors": b"\0" * 100})
    with stand_in_hub(**repositories) as hub:
        yield User(hub, tmp_path)


def test_a_changing_repository_is_exported_once(user: User) -> None:
    """What is exported touches the network no more; the new commit comes after ``rm``."""
    code, first, told = user.ask("org/model")
    assert (code, told.count("org/model: an export in int8 is made once: ")) == (0, 1), told
    requests = len(user.hub.requested)
    assert user.ask("org/model") == (0, first, "")
    assert len(user.hub.requested) == requests
    user.hub.repositories["org/model"].files = {**TARGET, "README.md": b"new"}
    assert user.ask("org/model")[1] == first
    assert user.ask("org/model", HF_ENDPOINT="http://127.0.0.1:9")[1] == first
    assert user.run("models", "rm", "org/model")[0] == 0
    code, second, _ = user.ask("org/model")
    assert code == 0 and second != first
    assert user.entries() == ["model-int8"]


def test_repositories_that_cannot_be_had(user: User) -> None:
    assert "accept the terms on its page and log in with 'hf auth login'" in user.ask("org/gated")[2]
    lost = user.ask("org/lost")
    assert lost[0] == 1 and "check the network, and run the same command to resume the download" in lost[2]
    broken = user.ask("org/broken")
    assert broken[0] == 1 and "model.safetensors: not a safetensors file" in broken[2].splitlines()[-1]
    assert user.entries() == [] and not list(user.cache.glob(".new-*"))
    user.hub.repositories["org/lost"].lost_after = None
    assert user.ask("org/lost")[0] == 0
    commit = user.hub.repositories["org/lost"].commit
    assert user.hub.fetched(f"org/lost/resolve/{commit}/generation_config.json") == 1
    assert user.ask("org/gated", token=TOKEN)[0] == 0
    assert user.entries() == ["gated-int8", "lost-int8"]


def test_two_processes_export_a_model_once(user: User) -> None:
    processes = [user.start("generate", "org/large", "def f(", "-n", "4", "--draft", "org/model") for _ in range(2)]
    answers = [process.communicate("", timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    assert answers[0][0] == answers[1][0]
    told = "".join(answer[1] for answer in answers)
    assert told.count("is made once") == 1
    assert "org/large: waiting for another process, which exports it" in told
    assert "org/large: fetching" in told
    assert user.hub.fetched("model.safetensors") == 2
    assert user.entries() == ["large-int8"]


def test_kills_leave_nothing_half_made(user: User) -> None:
    """At moments from the first request to the answer."""
    began = time.monotonic()
    assert user.ask("org/large")[0] == 0
    duration = time.monotonic() - began
    user.run("models", "rm", "org/large")
    shutil.rmtree(user.home / "hub")
    draw = random.Random(1)
    for number in range(MOMENTS):
        process = user.start("generate", "org/large", "def f(", "-n", "4")
        time.sleep(draw.uniform(0, 1) * duration)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        code, listed, told = user.run("models")
        assert code == 0 and "damaged" not in told, number
        if "large-int8" in listed:
            assert user.ask("org/large")[0] == 0
            assert user.run("models", "rm", "org/large")[0] == 0
    assert user.ask("org/large")[0] == 0
    assert user.entries() == ["large-int8"] and not list(user.cache.glob(".new-*"))


def test_a_start_after_a_kill_fetches_no_file_again(user: User) -> None:
    process = user.start("generate", "org/large", "def f(", "-n", "4")
    wait_until(lambda: any((user.home / "hub").rglob("snapshots/*/tokenizer.json")), seconds=60)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert user.hub.fetched("/tokenizer.json") == 1
    assert user.ask("org/large")[0] == 0
    assert user.hub.fetched("/tokenizer.json") == 1


def test_a_server_answers_while_it_exports(user: User) -> None:
    process = user.start("serve", "org/large", "--port", "0")
    assert process.stderr
    url = "http://" + process.stderr.readline().split()[0]
    seen: list[tuple[int, str]] = []

    def is_ready() -> bool:
        reply = httpx.get(f"{url}/ready", timeout=30)
        seen.append((reply.status_code, reply.text))
        return reply.status_code == 200

    try:
        wait_until(is_ready, seconds=120)
        assert [status for status, _ in seen[:-1]] == [503] * (len(seen) - 1)
        assert any("org/large: fetching" in text for _, text in seen)
        assert any("converting" in text for _, text in seen)
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "def f(", "max_tokens": 4}, timeout=60)
        assert reply.json()["model"] == "org/large" and reply.json()["choices"][0]["text"]
        assert "in use by process" in user.run("models", "rm", "org/large")[2]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert user.run("models", "rm", "org/large")[0] == 0


@pytest.mark.skipif(not GGUF.is_file(), reason="the real model could not be fetched")
def test_a_real_file_answers_after_one_command(user: User, tmp_path: Path) -> None:
    """The second start takes at most 1.2 times as long as one of the folder."""
    file = tmp_path / GGUF.name
    shutil.copyfile(GGUF, file)
    code, answer, told = user.run("chat", file, "-n", "16", stdin=QUESTION)
    assert (code, "Paris" in answer) == (0, True), told
    assert "SmolLM2-135M-Instruct.Q4_1: an export with its own weights is made once: " in told
    shutil.copytree(user.cache / "SmolLM2-135M-Instruct.Q4_1-keep" / "ir", tmp_path / "folder")
    seconds: dict[Path, list[float]] = {file: [], tmp_path / "folder": []}
    for _ in range(6):
        for model, times in seconds.items():
            began = time.monotonic()
            assert "Paris" in user.run("chat", model, "-n", "16", stdin=QUESTION)[1]
            times.append(time.monotonic() - began)
    by_name, by_folder = (statistics.median(times[1:]) for times in seconds.values())
    assert by_name < 1.2 * by_folder
