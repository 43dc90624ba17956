"""Compare ovspec with its peers: the same weights, the same token ids, in turns.

    python scripts/bench/peers/install.py
    python scripts/bench/peers/run.py PAIR [--checkpoints DIR] [--row NAME ...] [--contexts 128,1024] [--out FILE]

PAIR is an exported pair. DIR has its checkpoints target/ and draft/, for the peers that don't read OpenVINO's format.
Each peer runs in its own interpreter and environment. In a row, ovspec and a peer's configurations take turns, prompt
by prompt. A peer that proposes tokens first tries several lookaheads and keeps the fastest; ovspec chooses its
lookahead while it runs. Peers that take OpenVINO's properties run with their defaults and with those of ovspec's
profile. One JSON object is printed for each configuration and context, with the peer's errors and differing texts in
it. Use an idle machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from install import FOLDER, python_of, server_of_llamacpp
from peer import Worker

from ovspec.ir.device import DeviceOptions, default_kv_precision
from ovspec.setup.profile import known_profile
from ovspec.text.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from cells import tasks_of, with_context  # noqa: E402

KS = (1, 2, 3, 4, 5, 8)
WARM_UP = 6.0  # minimum seconds of warm-up for each contender
SHORT = 32  # tokens of a text that warms up a contender or tries a k
BATCH = 8


@dataclass(frozen=True)
class Configuration:
    """A peer in one mode. ``files``: what it loads, an exported folder ("ir"), a checkpoint ("hf") or "gguf"."""

    peer: str
    mode: str
    files: str = "ir"
    options: tuple[tuple[str, Any], ...] = ()
    ks: tuple[int | None, ...] = ()  # lookaheads to try; empty if nothing is proposed
    properties: str = "default"

    @property
    def label(self) -> str:
        return " ".join([self.mode, *(f"{name}={value}" for name, value in self.options)])


@dataclass(frozen=True)
class Row:
    """Configurations that take turns with ovspec in the modes ``ours``. ``measure``: which figure is compared."""

    name: str
    ours: tuple[str, ...]
    configurations: tuple[Configuration, ...]
    workload: str = "completion"
    temperature: float = 0.0
    measure: str = "tpot"  # or throughput


def twice(configuration: Configuration) -> tuple[Configuration, ...]:
    """Return the configuration with default properties and with those of ovspec's profile."""
    return configuration, replace(configuration, properties="ours")


GENAI_DRAFT = Configuration("genai", "draft", ks=(*KS, None))
# With prefix caching, as in its own scheduler; sampling with a draft fails with it.
GENAI_AS_IT_IS = replace(GENAI_DRAFT, options=(("prefix_caching", True),), ks=(None,))
GENAI_BATCH = Configuration("genai", "batch")
GENAI_SLICED = replace(GENAI_BATCH, options=(("batched_tokens", 256),))  # the default of its SchedulerConfig
PAGED = Configuration("genai", "plain", options=(("backend", "PA"),))
STATEFUL = Configuration("genai", "plain", options=(("backend", "SDPA"),))
TORCH = Configuration("optimum", "plain", "hf", (("runtime", "torch"), ("dtype", "bf16")))
OPTIMUM = Configuration("optimum", "plain", options=(("runtime", "openvino"),))
LLAMACPP = Configuration("llamacpp", "plain", "gguf")
LOOKUP = Configuration("genai", "lookup", ks=KS)
PLAIN, DRAFT = ("plain",), ("draft", "lookup,draft")
ROWS = (
    Row("genai", PLAIN, (*twice(PAGED), *twice(STATEFUL))),
    Row("genai-draft", DRAFT, (*twice(GENAI_DRAFT), *twice(LOOKUP))),
    Row("genai-draft-sampled", DRAFT, (*twice(GENAI_DRAFT), GENAI_AS_IT_IS), temperature=1.0),
    Row("genai-lookup", ("lookup", "lookup,draft"), twice(LOOKUP), "edit"),
    Row("batch", ("plain", "lookup,draft"), (*twice(GENAI_BATCH), GENAI_SLICED), measure="throughput"),
    Row("copy-trim", DRAFT, twice(Configuration("copy_trim", "draft", ks=KS))),
    Row("torch", PLAIN, (TORCH,)),
    Row("torch-draft", DRAFT, (replace(TORCH, mode="draft", ks=(*KS, None)),)),
    Row("optimum", PLAIN, twice(OPTIMUM)),
    Row("optimum-draft", DRAFT, (replace(OPTIMUM, mode="draft", ks=(*KS, None)),)),
    Row("llamacpp", PLAIN, (LLAMACPP,)),
    Row("llamacpp-lookup", ("lookup", "lookup,draft"), (replace(LLAMACPP, mode="lookup", ks=KS),), "edit"),
    Row("llamacpp-draft", DRAFT, (replace(LLAMACPP, mode="server-draft", ks=(*KS, None)),)),
)


@dataclass
class Line:
    """The figures of a configuration at one context.

    ``ratio``: for each mode of ovspec, how many times as long the peer took in the same turn, per token or for the
    batch, as the median over the prompts. ``ttft_ratio``: the same for the first token and ovspec's first mode. Above
    1, ovspec is faster. ``equal``: how many texts equal ovspec's plain greedy text; other arithmetic gives other texts.
    ``alike``: the median number of tokens before they part. ``own``: how many texts equal those of the peer's own plain
    decoding, one by one. ``acceptance``: the conditional acceptance. ``ks``: ms per token, or the error, for each k
    that was tried.
    """

    pair: str
    row: str
    workload: str
    context: int
    temperature: float
    measure: str
    mode: str = ""
    peer: str = ""
    properties: str = ""
    k: int | str | None = None
    tokens_per_s: float | None = None
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    ratio: dict[str, float] = field(default_factory=dict)
    ttft_ratio: float | None = None
    equal: str | None = None
    alike: float | None = None
    own: str | None = None
    acceptance: float | None = None
    ks: dict[str, float | str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Bench:
    pair: Path
    hf: Path | None
    gguf: str
    tokens: int
    prompts: int

    def prompts_of(self, workload: str, context: int, count: int) -> list[list[int]]:
        tokenizer = Tokenizer(self.pair)
        encoder: Any = SimpleNamespace(tokenizer=tokenizer, encode=tokenizer.encode)  # no model has to be loaded
        tasks = tasks_of(workload, count)
        return [with_context(encoder, tasks[i % len(tasks)].prompt, context + i // len(tasks)) for i in range(count)]

    def setup_of(self, configuration: Configuration, context: int) -> dict[str, Any]:
        """Return the worker's set-up.

        Raises:
            ValueError: files or a profile are missing.
        """
        setup: dict[str, Any] = {"mode": configuration.mode, "options": dict(configuration.options)}
        if configuration.files == "ir":
            target, draft = self.pair, self.pair / "draft"
        elif not self.hf:
            raise ValueError("it needs the checkpoints, see --checkpoints")
        else:
            target, draft = self.hf / "target", self.hf / "draft"
        if configuration.properties == "ours":
            setup |= {"properties": our_properties(target), "draft_properties": our_properties(draft)}
        if configuration.files == "gguf":
            target, draft = gguf_of(target, self.gguf), gguf_of(draft, self.gguf)
            setup["options"] |= {"threads": psutil.cpu_count(logical=False), "server": str(server_of_llamacpp())}
            setup["options"]["context"] = context
        return setup | {"target": str(target), "draft": str(draft) if "draft" in configuration.mode else None}


@dataclass
class Contender:
    """A configuration in a row, its worker, and its answers, one for each turn."""

    line: Line
    configuration: Configuration
    worker: Worker | None = None
    k: int | None = None
    warm: bool = False
    answers: list[dict[str, Any]] = field(default_factory=list)

    def enter(self, bench: Bench, context: int) -> None:
        """Start the worker, or record why there is none."""
        try:
            self.worker = Worker(self.configuration.peer, bench.setup_of(self.configuration, context))
        except ValueError as error:
            self.line.error = str(error)
            return
        self.line.error, self.line.versions = self.worker.ready.get("error"), self.worker.ready.get("versions", {})

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the worker's answer; a worker that died is restarted for the next request."""
        assert self.worker
        answer = self.worker.ask(request | {"k": self.k})
        if "error" in answer and not self.worker.alive and "error" not in self.worker.ready:
            self.worker.stop()
            self.worker.start()
        return answer


def our_properties(folder: Path) -> dict[str, str]:
    """Return the properties of the profile for the model in ``folder``; ovspec's worker has tuned new models before."""
    profile = known_profile(folder, DeviceOptions())
    best = profile.choose(DeviceOptions(), "auto") if profile else None
    if not best:
        raise ValueError(f"no profile is known for {folder.name}; run 'ovspec tune'")
    options = DeviceOptions(properties=best.setting.properties)
    return options.properties | {"KV_CACHE_PRECISION": default_kv_precision(options) or "f32"}


def gguf_of(checkpoint: Path, kind: str) -> Path:
    """Return the checkpoint as a GGUF file, written if it is missing or out of date."""
    key = hashlib.sha256(str(checkpoint.resolve()).encode()).hexdigest()[:8]
    out = FOLDER / "gguf" / f"{checkpoint.name}-{key}-{kind}.gguf"
    source = checkpoint / "model.safetensors"
    if not out.exists() or out.stat().st_mtime < source.stat().st_mtime:
        command = [python_of("llamacpp"), HERE / "gguf_writer.py", checkpoint, out, "--type", kind]
        try:
            subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(f"{checkpoint.name} can't be written as GGUF: {error}") from None
    return out


def run_row(bench: Bench, row: Row, contexts: list[int], plain: dict[Any, list[list[int]]]) -> Iterator[Line]:
    """Yield the lines of a row, ovspec's first at each context."""
    count = BATCH if row.measure == "throughput" else bench.prompts
    prompts = {context: bench.prompts_of(row.workload, context, count) for context in contexts}
    longest = max(len(prompt) for each in prompts.values() for prompt in each) + bench.tokens + max(KS) + 1
    ours = [Configuration("ovspec", mode, ks=() if mode == "plain" else (None,)) for mode in row.ours]

    def texts_of(configuration: Configuration, context: int) -> list[list[int]]:
        key = (configuration, row.workload, context, count)
        if key not in plain:
            setup = bench.setup_of(configuration, longest)
            plain[key] = plain_texts(configuration.peer, setup, prompts[context], bench.tokens)
        return plain[key]

    for context in contexts if row.temperature == 0 else ():
        if not all(texts_of(plain_of(ours[0]), context)):
            sys.exit("ovspec itself doesn't generate")
    contenders: list[Contender] = []
    try:
        for configuration in (*ours, *row.configurations):
            line = Line(bench.pair.name, row.name, row.workload, contexts[0], row.temperature, row.measure)
            line.mode, line.peer, line.properties = configuration.label, configuration.peer, configuration.properties
            contenders.append(Contender(line, configuration))
            contenders[-1].enter(bench, longest)
        for context in contexts:
            for contender in contenders:
                contender.answers = []
                contender.line = replace(contender.line, context=context, k=None, ks={})
                try_ks(contender, request_of(row, prompts[context][-1:], SHORT, 0))
            take_turns([each for each in contenders if not each.line.error], row, prompts[context], bench.tokens)
            for contender in contenders:
                line = replace(contender.line)
                if contender.answers:
                    fill(line, contender, contenders[: len(ours)], row)
                if row.temperature == 0 and any("tokens" in answer for answer in contender.answers):
                    got, own = texts_in(contender), plain_of(contender.configuration)
                    line.equal, line.alike = compare(got, texts_of(plain_of(ours[0]), context))
                    if contender.configuration not in ours and own != contender.configuration:
                        line.own, _ = compare(got, texts_of(own, context))
                yield line
    finally:
        for contender in contenders:
            if contender.worker:
                contender.worker.stop()


def plain_texts(name: str, setup: dict[str, Any], prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Return the greedy texts of a peer, generated one by one; a text that fails is empty."""
    with Worker(name, setup) as worker:
        answers = [worker.ask({"prompts": [prompt], "max_tokens": tokens}) for prompt in prompts]
    return [answer["tokens"][0] if "tokens" in answer else [] for answer in answers]


def plain_of(configuration: Configuration) -> Configuration:
    """Return the configuration of the same peer without a draft, in the same arithmetic."""
    mode = "server-plain" if configuration.mode == "server-draft" else "plain"
    return replace(configuration, mode=mode, ks=())


def request_of(row: Row, prompts: list[list[int]], tokens: int, seed: int) -> dict[str, Any]:
    return {"prompts": prompts, "max_tokens": tokens, "temperature": row.temperature, "seed": seed}


def try_ks(contender: Contender, request: dict[str, Any]) -> None:
    """Find the fastest k and warm up; a contender that is done before ``WARM_UP`` seconds keeps warming up."""
    line, ks, times = contender.line, contender.configuration.ks, dict[int | None, float]()
    if line.error:
        return
    began = time.monotonic()
    for k in ks or (None,):
        contender.k = k
        if not times:
            contender.ask(request)
        answer = contender.ask(request)
        failed = answer.get("error")
        name = "auto" if k is None else str(k)
        if failed:
            line.ks[name] = failed
        elif ks:
            times[k] = answer["tpot_ms"]
            line.ks[name] = round(times[k], 3)
    if ks and times:
        contender.k = min(times, key=lambda k: times[k])
        line.k = "auto" if contender.k is None else contender.k
    elif line.ks:
        line.error = str(next(iter(line.ks.values())))
    while not line.error and not contender.warm and time.monotonic() < began + WARM_UP:
        line.error = contender.ask(request).get("error")
    contender.warm = True


def take_turns(contenders: list[Contender], row: Row, prompts: list[list[int]], tokens: int) -> None:
    """Send every prompt to every contender before the next prompt; the first contender rotates."""
    turns = [prompts] if row.measure == "throughput" else [[prompt] for prompt in prompts]
    if row.measure == "throughput":
        for contender in contenders:
            contender.ask(request_of(row, turns[-1], SHORT, 0))  # compiles the kernels for this many rows
    for turn, asked in enumerate(turns):
        first = turn % len(contenders) if contenders else 0
        for contender in contenders[first:] + contenders[:first]:
            contender.answers.append(contender.ask(request_of(row, asked, tokens, turn + 1)))


def fill(line: Line, contender: Contender, ours: list[Contender], row: Row) -> None:
    """Fill in the figures of the contender's answers."""
    good = [answer for answer in contender.answers if "error" not in answer]
    line.error = next((answer["error"] for answer in contender.answers if "error" in answer), None)
    if not good:
        return
    line.tpot_ms = middle(answer["tpot_ms"] for answer in good) if row.measure == "tpot" else None
    line.ttft_ms = middle(answer["ttft_ms"][0] if answer["ttft_ms"] else None for answer in good)
    line.acceptance = middle(answer["acceptance"] for answer in good)
    line.tokens_per_s = 1e3 / line.tpot_ms if line.tpot_ms else None
    if row.measure == "throughput":
        line.tokens_per_s = middle(sum(len(text) for text in a["tokens"]) / a["seconds"] for a in good)
    for mine in ours:
        ratio = middle_ratio(contender, mine, lambda answer: figure(answer, row))
        if ratio is not None:
            line.ratio[mine.configuration.mode] = round(ratio, 4)
    if row.measure == "tpot":
        line.ttft_ratio = middle_ratio(contender, ours[0], lambda answer: answer["ttft_ms"][0])


def middle_ratio(theirs: Contender, ours: Contender, figure_of: Callable[[dict[str, Any]], float]) -> float | None:
    """Return the median ratio of the figures, turn by turn."""
    pairs = zip(theirs.answers, ours.answers, strict=True) if ours.answers else []
    return middle(figure_of(their) / figure_of(our) for their, our in pairs if "error" not in their | our)


def texts_in(contender: Contender) -> list[list[int]]:
    """Return the texts of all turns; a failed turn gives one empty text, as a batch that fails is its only turn."""
    return [text for answer in contender.answers for text in answer.get("tokens", [[]])]


def compare(got: list[list[int]], wanted: list[list[int]]) -> tuple[str, float | None]:
    """Return how many texts are equal, and the median number of tokens before they part."""
    same = [alike(a, b) for a, b in zip(got, wanted, strict=True)]
    equal = sum(a == b for a, b in zip(got, wanted, strict=True))
    return f"{equal} of {len(wanted)}", middle(same)


def alike(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def figure(answer: dict[str, Any], row: Row) -> float:
    return answer["seconds"] if row.measure == "throughput" else answer["tpot_ms"]


def middle(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def as_json(line: Line) -> str:
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(line).items()}
    return json.dumps(rounded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", type=Path)
    parser.add_argument("--checkpoints", "--hf", dest="hf", type=Path, help="folder with target/ and draft/")
    parser.add_argument("--peer", action="append", help="only rows with this peer; may be repeated")
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS], help="only this; may be repeated")
    parser.add_argument("--contexts", default="128,1024")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--gguf", choices=("q8_0", "q4_0"), default="q8_0", help="weight format for llama.cpp")
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    args = parser.parse_args()
    bench = Bench(args.pair, args.hf, args.gguf, args.tokens, args.prompts)
    contexts = [int(part) for part in args.contexts.split(",")]
    plain: dict[Any, list[list[int]]] = {}
    for row in ROWS:
        peers = {configuration.peer for configuration in row.configurations}
        if (args.row and row.name not in args.row) or (args.peer and not peers & set(args.peer)):
            continue
        for line in run_row(bench, row, contexts, plain):
            print(as_json(line), flush=True)
            if args.out:
                with args.out.open("a", encoding="utf-8") as out:
                    out.write(as_json(line) + "\n")


if __name__ == "__main__":
    main()
