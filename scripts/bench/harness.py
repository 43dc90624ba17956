"""Options and prompts of the benchmarks, the speed of memory, and worker processes."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from figures import machine, milliseconds
from ovspec_export.distill.gain_benchmark import read_held_out_prompts
from peers.install import PEERS, python_of

from ovspec.ir.compile import MODEL_FILE
from ovspec.setup.tuning import TUNING_TEXT_FILE
from ovspec.text.chat_template import Message
from ovspec.text.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Held-out files: the demo pair was trained on none of these texts.
CODE: list[str] = [entry["text"] for entry in json.loads((ROOT / "models/prompts.json").read_text("utf-8"))["prompts"]]
PROSE: list[str] = json.loads((HERE / "prose.json").read_text("utf-8"))["prompts"]


@dataclass(frozen=True)
class Prompt:
    """A text to continue, its token ids, or the messages of a chat, the last by the user.

    judge: held out: nothing is trained or tuned on it.
    schema: the schema of the requested JSON, in chats of the kind "extract" and texts of the kind "JSON". The messages
        only name its keys, because small models would repeat the whole schema.
    """

    kind: str
    number: int  # in its kind, from 1
    content: str | list[Message] | list[int]
    judge: bool = True
    schema: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"


@functools.cache
def chats() -> list[Prompt]:
    """Return the chats of ``chats.json``: kind by kind, held-out chats first."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for entry in json.loads((HERE / "chats.json").read_text("utf-8")):
        by_kind.setdefault(entry["kind"], []).append(entry)
    return [
        Prompt(kind, number, entry["messages"], entry["judge"], entry.get("schema"))
        for kind, entries in by_kind.items()
        for number, entry in enumerate(sorted(entries, key=lambda entry: not entry["judge"]), 1)
    ]


@functools.cache
def prompts() -> list[Prompt]:
    """Return the chats, code and prose to continue, and code to continue with a JSON text."""
    texts = {"completion": CODE, "prose": PROSE}
    plain = [Prompt(kind, number, text) for kind in texts for number, text in enumerate(texts[kind], 1)]
    constrained = []
    for number, entry in enumerate(json.loads((HERE / "grammars.json").read_text("utf-8")), 1):
        example = json.dumps(entry["values"][0], indent=2, ensure_ascii=False)
        name = entry["name"].replace(" ", "_")
        text = f"import json\n\n# Two examples of a {entry['name']}:\n{name}_1 = json.loads('''{example}''')\n"
        constrained.append(Prompt("JSON", number, f"{text}{name}_2 = json.loads('''", schema=entry["schema"]))
    return [*chats(), *plain, *constrained]


def add_held_out(documents: Path, most: int) -> None:
    """Add prompts from texts held out by 'ovspec distill', at most ``most`` of each kind, chats up to the answer."""
    for source in ("own", "chats", "text"):
        texts = enumerate(read_held_out_prompts(documents, most, source), 1)
        prompts().extend(Prompt(f"held-out {source}", number, ids, judge=False) for number, ids in texts)


@functools.cache
def prompt_named(name: str) -> Prompt:
    return next(prompt for prompt in prompts() if prompt.name == name)


def with_context(tokenizer: Tokenizer, ids: list[int], context: int) -> list[int]:
    """Return a prompt's ids with other text in front, ``context`` tokens in total."""
    if len(ids) >= context:
        return ids
    filler = tokenizer.encode(TUNING_TEXT_FILE.read_text(encoding="utf-8") + "\n\n", special=False)
    return [*np.resize(filler, context - len(ids)).tolist(), *ids]


# ---------------------------------------------------------------- options


@dataclass(frozen=True)
class Option:
    """An option of a benchmark.

    default: a list for values joined by ``separator``; a type for an option without a default; bool for a flag.
    choices: the allowed values.
    kind: converts a value; by default the type of the default.
    """

    default: Any
    help: str | None = None
    choices: Collection[str] = ()
    kind: Callable[[str], Any] | None = None
    separator: str = ","
    required: bool = False

    def add_to(self, parser: argparse.ArgumentParser, flag: str) -> None:
        if self.default is bool:
            parser.add_argument(flag, action="store_true", help=self.help)
        elif isinstance(self.default, type):
            parser.add_argument(flag, type=self.default, required=self.required, help=self.help)
        elif not isinstance(self.default, list):
            kind = self.kind or type(self.default)
            parser.add_argument(flag, type=kind, default=self.default, choices=self.choices or None, help=self.help)
        elif self.separator == " ":
            parser.add_argument(flag, type=self.kind or str, nargs="+", action="extend", help=self.help)
        else:
            kind = several(self.kind or type(self.default[0]), self.choices, self.separator)
            parser.add_argument(flag, type=kind, default=self.default, help=self.help)


def arguments(doc: str | None, *positional: str | tuple[str, ...], **options: Any) -> argparse.Namespace:
    """Parse the command line of a benchmark.

    Args:
        positional: names of arguments for files or folders; with "+" at the end, for several. A tuple has the choices
            of the argument ``what``.
        options: by name, an ``Option`` or just its default.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in positional:
        if isinstance(name, tuple):
            parser.add_argument("what", choices=name)
        else:
            parser.add_argument(name.rstrip("+"), type=Path, nargs="+" if name.endswith("+") else None)
    declared = {name: value if isinstance(value, Option) else Option(value) for name, value in options.items()}
    for name, option in declared.items():
        option.add_to(parser, f"--{name.replace('_', '-')}")
    parser.add_argument("--record", action="store_true", help="append the output to the script's page in docs/records")
    args = parser.parse_args()
    if args.record:
        record_output()
    for name, option in declared.items():
        if option.separator == " " and getattr(args, name) is None:
            setattr(args, name, option.default)
    return args


def record_output() -> None:
    """Run the script again, append command and output to its page in docs/records, and exit."""
    command = [argument for argument in sys.argv if argument != "--record"]
    script = Path(command[0]).resolve()
    output = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True).stdout
    shown_command = shlex.join([".venv/bin/python", script.relative_to(ROOT).as_posix(), *command[1:]])
    with (ROOT / "docs" / "records" / f"{script.stem}.md").open("a", encoding="utf-8", newline="\n") as page:
        page.write(f"\n## {machine()}\n\n```sh\n{shown_command}\n```\n\n{output.strip()}\n")
    sys.exit(print(output))


def several(kind: Callable[[str], Any], choices: Collection[str], separator: str) -> Callable[[str], list[Any]]:
    """Return the argparse type for values joined by ``separator``."""

    def convert(text: str) -> list[Any]:
        values = [part.strip() for part in text.split(separator)]
        if unknown := [value for value in values if choices and value not in choices]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {f'{separator} '.join(choices)}")
        return [kind(value) for value in values]

    return convert


ISA = Option(str, "cap OpenVINO to this instruction set, such as AVX2")


def cap(isa: str | None) -> None:
    """Run the script again with OpenVINO capped to an instruction set, unless it already is."""
    if isa and os.environ.get("OV_CPU_MAX_ISA") != isa:
        sys.exit(run_capped(isa))


def run_capped(isa: str, *options: str) -> int:
    """Run the script again with more options and OpenVINO capped to an instruction set; return its exit code."""
    capped = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "OV_CPU_MAX_ISA": isa}
    return subprocess.run([sys.executable, *sys.argv, *options], env=capped).returncode


# ---------------------------------------------------------------- memory


def read_bandwidth(size: int = 1 << 29) -> float:
    """Return the bytes per second read from memory by all cores together, the best of 7 passes over ``size`` bytes."""
    parts = np.array_split(np.ones(size // 8, dtype=np.int64), os.cpu_count() or 1)
    with ThreadPoolExecutor(len(parts)) as pool:
        return 1e3 * size / min(milliseconds(lambda: list(pool.map(np.bitwise_or.reduce, parts))) for _ in range(7))


def bytes_a_step(folder: Path) -> int:
    """Return the bytes of weights read in a step of a model: all except the embedding (only a row is read)."""
    read = 0
    for op in ov.Core().read_model(folder / MODEL_FILE).get_ops():
        if op.get_type_name() == "Constant":
            users = {use.get_node().get_type_name() for use in op.output(0).get_target_inputs()}
            embedding = "embed_tokens" in op.get_friendly_name() or users == {"Gather"}
            read += 0 if embedding else op.get_byte_size()  # type: ignore[attr-defined]
    return read


# ---------------------------------------------------------------- processes


class Worker(contextlib.AbstractContextManager["Worker"]):
    """A process for requests of ``peers/protocol.py``; it answers "error" if it failed, died or was too slow.

    Args:
        name: the process runs ``peers/worker_NAME.py``.
        setup: the worker's set-up.
        seconds: time limit for each answer.
        checkout: the folder to import ovspec from.
    """

    def __init__(self, name: str, setup: Mapping[str, Any], seconds: float = 600.0, checkout: Path = ROOT) -> None:
        self.name, self._setup, self._seconds, self._checkout = name, setup, seconds, checkout
        self._start()

    def _start(self) -> None:
        peer = self.name.partition("_")[0]
        python = python_of(peer) if peer in PEERS else Path(sys.executable)
        self._process: subprocess.Popen[str] | None = None
        if not python.exists():
            self.ready = {"error": f"{self.name} isn't installed; run scripts/bench/peers/install.py {peer}"}
            return
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        # PYTHONPATH is for ovspec's own workers; other environments don't import the project's code. The new session
        # allows killing the worker together with its child processes.
        self._process = subprocess.Popen(
            [str(python), str(HERE / "peers" / f"worker_{self.name}.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            encoding="utf-8",
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(self._checkout), "PYTHONUTF8": "1", "HF_HUB_OFFLINE": "1"},
        )
        self.ready = self._exchange(self._process, self._setup)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; a dead worker is started again."""
        if self._process and self._process.poll() is not None and "error" not in self.ready:
            self.stop()
            self._start()
        return self.ready if "error" in self.ready or not self._process else self._exchange(self._process, request)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; raises RuntimeError if it is an error."""
        answer = self.ask(request)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def _exchange(self, process: subprocess.Popen[str], request: Mapping[str, Any]) -> dict[str, Any]:
        assert process.stdin and process.stdout
        late = threading.Event()

        def give_up() -> None:
            late.set()
            kill_group(process)

        timer = threading.Timer(self._seconds, give_up)
        timer.start()
        line = ""
        with contextlib.suppress(OSError):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        timer.cancel()
        if line:
            return json.loads(line)
        code = process.wait()
        if late.is_set():
            return {"error": f"no answer within {self._seconds:g} s"}
        self._log.seek(0)
        last = [line.strip() for line in self._log if line.strip()][-1:]
        end = signal.Signals(-code).name if code < 0 else f"exit code {code}"  # on POSIX, below 0 is a signal
        return {"error": ": ".join([f"its process ended ({end})", *last])[:350]}

    def stop(self) -> None:
        if self._process:
            try:
                self._process.communicate(timeout=30)  # closes its stdin
            except (OSError, subprocess.TimeoutExpired):
                kill_group(self._process)
                self._process.wait()
            self._log.close()
        self._process = None

    def __exit__(self, *exc: object) -> None:
        self.stop()


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill a process together with its child processes, such as servers."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
