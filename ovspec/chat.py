"""A model's chat template, rendered here and nowhere else: sandboxed, bounded in time, memory and output."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from ovspec.errors import OvspecError
from ovspec.ir import read_json

Message = dict[str, Any]  # {"role": ..., "content": ...}

MAX_SECONDS = 2.0
MAX_BYTES = 1_000_000_000  # of memory that rendering may take


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template with the variables and functions that Hugging Face gives it."""

    source: str
    special_tokens: dict[str, str]

    def render(self, messages: list[Message]) -> str:
        """The prompt for ``messages``, open for the assistant's answer.

        Raises:
            OvspecError: the template fails, refuses these messages, or takes too much time or memory.
        """
        try:
            request = json.dumps({**asdict(self), "messages": messages})
        except (TypeError, ValueError) as error:
            raise OvspecError(f"The chat messages cannot be handed to a template: {error}.") from None
        answer = RENDERER.render(request)
        if "error" in answer:
            raise OvspecError(f"The model's chat template refuses these messages: {answer['error']}.")
        return answer["text"]


class Renderer:
    """A process that renders templates, started when first needed and kept for the next turn.

    A template comes from the internet. Jinja's sandbox keeps it from reaching anything, but a single operation
    in it can run for hours or fill the memory, and only a process can be stopped in the middle of one.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def render(self, request: str) -> dict[str, str]:
        """The answer of ``chat_worker.answer``; raises OvspecError where the process had to be stopped."""
        with self._lock:
            try:
                return self._ask(request)
            except (OSError, ValueError):  # it was killed between two turns
                self.stop()
                return self._ask(request)
            except BaseException:
                self.stop()  # its answer, if one comes, belongs to nobody
                raise

    def _ask(self, request: str) -> dict[str, str]:
        process = self._process = self._process or start()
        answers: list[str] = []

        def talk() -> None:
            assert process.stdin and process.stdout
            try:
                process.stdin.write(request + "\n")
                process.stdin.flush()
                answers.append(process.stdout.readline())
            except (OSError, ValueError):
                answers.append("")

        talking = threading.Thread(target=talk, daemon=True)
        talking.start()
        until, watched = time.monotonic() + MAX_SECONDS, psutil.Process(process.pid)
        while talking.is_alive():
            talking.join(0.02)
            if talking.is_alive() and time.monotonic() > until:
                self._refuse(f"ran longer than {MAX_SECONDS:g} seconds")
            if talking.is_alive() and memory_of(watched) > MAX_BYTES:
                self._refuse(f"took more than {MAX_BYTES // 1_000_000} MB of memory")
        if not answers[0]:
            raise OSError("the renderer has ended")
        return json.loads(answers[0])

    def _refuse(self, why: str) -> None:
        self.stop()
        raise OvspecError(f"The model's chat template {why}; give a raw prompt without --chat.")

    def stop(self) -> None:
        """End the process; the next rendering starts another."""
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None


def start() -> subprocess.Popen[str]:
    """The process ends when its standard input does, so it doesn't outlive this one."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "ovspec.chat_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
    )


def memory_of(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:  # it has just ended
        return 0


RENDERER = Renderer()
atexit.register(RENDERER.stop)


def chat_template(folder: Path) -> ChatTemplate:
    """The chat template in an exported folder.

    Raises:
        OvspecError: the model has none.
    """
    config = read_json(folder / "tokenizer_config.json")
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if not source:
        raise OvspecError(f"{folder}: this model has no chat template; leave --chat out and give a raw prompt.")
    special = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in special.items()}
    return ChatTemplate(source, {name: value for name, value in texts.items() if value})
