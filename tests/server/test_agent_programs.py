"""Agents that people use, as programs, offline: each reads a file with a tool, and then answers, with the real model.

The model is small, so a proxy forces the call (see steering.py), and the agents' long prompts are replaced.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, USERS_CACHE
from servers import Running, Start
from steering import Steering

REAL = ROOT / "smollm2"
PROGRAMS = USERS_CACHE / "downloads" / "agents" / "node_modules"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not REAL.is_dir(), reason="the real model could not be fetched"),
    pytest.mark.skipif(not PROGRAMS.is_dir(), reason="run 'python scripts/fetch.py agents' first"),
]
FILE, FACT = "notes.txt", "The magic number is 4711."
QUESTION = f"What is the magic number in {FILE}?"
SYSTEM = "You help with files."


@dataclass(frozen=True)
class Agent:
    """An agent: its program, the tool that reads a file, and how it is run.

    arguments: of the tool, from the file's path.
    prepare: writes its settings, from (home, project, the server's URL); returns arguments and environment.
    path: what it asks.
    """

    program: str
    tool: str
    arguments: Callable[[Path], dict[str, Any]]
    prepare: Callable[[Path, Path, str], tuple[list[str], dict[str, str]]]
    path: str


def codex(home: Path, _: Path, url: str) -> tuple[list[str], dict[str, str]]:
    system = home / "system.md"
    system.write_text(SYSTEM, encoding="utf-8")
    (home / "config.toml").write_text(
        f"""
model = "smollm2"
model_provider = "ovspec"
model_instructions_file = {json.dumps(str(system))}
web_search = "disabled"

[model_providers.ovspec]
name = "ovspec"
base_url = "{url}/v1"
wire_api = "responses"

[features]
apps = false
goals = false

[agents]
enabled = false
""",
        encoding="utf-8",
    )
    return ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", QUESTION], {"CODEX_HOME": str(home)}


def opencode(_: Path, project: Path, url: str) -> tuple[list[str], dict[str, str]]:
    model = {"name": "SmolLM2", "limit": {"context": 8192, "output": 512}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1"}, "models": {"smollm2": model}}
    settings = {
        "provider": {"ovspec": provider},
        "model": "ovspec/smollm2",
        "small_model": "ovspec/smollm2",
        "autoupdate": False,
        "agent": {"build": {"prompt": SYSTEM, "tools": {"*": False, "read": True}}},
    }
    (project / "opencode.json").write_text(json.dumps(settings), encoding="utf-8")
    return ["run", QUESTION], {}


def claude(home: Path, _: Path, url: str) -> tuple[list[str], dict[str, str]]:
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "smollm2",
        "ANTHROPIC_SMALL_FAST_MODEL": "smollm2",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CONFIG_DIR": str(home),
    }
    return ["-p", QUESTION, "--tools", "Read", "--system-prompt", SYSTEM], variables


AGENTS = {
    "claude": Agent(
        "@anthropic-ai/claude-code-*/claude", "Read", lambda file: {"file_path": str(file)}, claude, "/v1/messages"
    ),
    "codex": Agent(
        "@openai/codex-*/vendor/*/bin/codex", "exec_command", lambda file: {"cmd": f"cat {file.name}"}, codex,
        "/v1/responses",
    ),
    "opencode": Agent(
        "opencode-*/bin/opencode", "read", lambda file: {"filePath": str(file)}, opencode, "/v1/chat/completions"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def real(start: Start) -> Iterator[Running]:
    server = start(REAL, "--draft", "lookup", "--temperature", "0", "--max-tokens", "-1")
    yield server
    assert " 500 " not in server.log.read_text("utf-8")


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_an_agent_reads_a_file_and_answers(real: Running, agent: Agent, tmp_path: Path) -> None:
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    (project / FILE).write_text(FACT, encoding="utf-8")
    [program] = [each for each in PROGRAMS.glob(agent.program) if "baseline" not in str(each)]
    with Steering(real.url, agent.tool, agent.arguments(project / FILE)) as steering:
        arguments, variables = agent.prepare(home, project, steering.url)
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
        done = subprocess.run(
            [program, *arguments], cwd=project, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=240,
        )  # fmt: skip
    told = f"{done.stdout}\n{done.stderr}\n{real.log.read_text('utf-8')[-3000:]}"
    assert done.returncode == 0, told
    asked = [each for each in steering.passed if each[0].split("?")[0] == agent.path and each[1].get("tools")]
    assert {status for _, _, status, _ in steering.passed} <= {200, 404}, told  # 404: what else they look for
    called, answered = asked[-2:]
    assert agent.tool in called[3] and FACT in json.dumps(answered[1])
    said = texts_in(answered[3])
    assert said.strip() and said.split()[0] in done.stdout, told


def texts_in(stream: str) -> str:
    """Return the text that a stream of any API brings."""
    text = ""
    for line in stream.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            delta = event.get("delta", "")
            if event.get("type") == "response.output_text.delta":
                text += delta
            elif isinstance(delta, dict):
                text += delta.get("text", "")
            for choice in event.get("choices", ()):
                text += choice["delta"].get("content") or ""
    return text
