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

import hashlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from harness import Worker, as_json, options, several, take_turns, tasks_of, with_context  # noqa: E402
from peers.install import FOLDER, python_of, server_of_llamacpp  # noqa: E402

from ovspec.ir.device import DeviceOptions, default_kv_precision  # noqa: E402
from ovspec.setup.profile import known_profile  # noqa: E402
from ovspec.text.tokenizer import Tokenizer  # noqa: E402

KS = (1, 2, 3, 4, 5, 8)
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


@dataclass(frozen=True)
class Bench:
    """What all rows share. ``warm_up``: minimum seconds of warm-up for each contender."""

    pair: Path
    hf: Path | None
    gguf: str
    tokens: int
    prompts: int
    warm_up: float
    plain: dict[Any, list[list[int]]] = field(default_factory=dict)  # texts without a draft, for comparison

    def prompts_of(self, workload: str, context: int, count: int) -> list[list[int]]:
        tokenizer, tasks = Tokenizer(self.pair), tasks_of(workload, count)
        ids = [tokenizer.encode(tasks[i % len(tasks)].prompt).tolist() for i in range(count)]
        return [with_context(tokenizer, each, context + i // len(tasks)) for i, each in enumerate(ids)]

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

    def plain_texts(self, configuration: Configuration, prompts: list[list[int]], longest: int) -> list[list[int]]:
        """Return the greedy texts of the same peer without a draft, one by one; a text that fails is empty."""
        configuration = plain_of(configuration)
        key = (configuration, str(prompts))
        if key not in self.plain:
            with Worker(configuration.peer, self.setup_of(configuration, longest)) as worker:
                answers = [worker.ask({"prompts": [prompt], "max_tokens": self.tokens}) for prompt in prompts]
            self.plain[key] = [answer["tokens"][0] if "tokens" in answer else [] for answer in answers]
        return self.plain[key]


@dataclass(eq=False)
class Contender:
    """A configuration in a row, its worker, and its answers at a context, one for each turn.

    ``ks``: ms per token, or the error, for each k that was tried.
    """

    configuration: Configuration
    worker: Worker | None = None
    error: str | None = None
    k: int | None = None
    ks: dict[str, float | str] = field(default_factory=dict)
    warm: bool = False
    answers: list[dict[str, Any]] = field(default_factory=list)

    def enter(self, bench: Bench, longest: int) -> None:
        """Start the worker, or record why there is none."""
        try:
            self.worker = Worker(self.configuration.peer, bench.setup_of(self.configuration, longest))
            self.error = self.worker.ready.get("error")
        except ValueError as error:
            self.error = str(error)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.worker
        return self.worker.ask(request | {"k": self.k})

    def try_ks(self, request: dict[str, Any], seconds: float) -> None:
        """Find the fastest k and warm up; what is done before the ``seconds`` are over keeps warming up."""
        self.ks, self.answers, times = {}, [], dict[int | None, float]()
        if self.error:
            return
        began = time.monotonic()
        for k in self.configuration.ks or (None,):
            self.k = k
            if not times:
                self.ask(request)
            answer = self.ask(request)
            if "error" in answer:
                self.ks[name_of(k)] = answer["error"]
            elif self.configuration.ks:
                times[k] = answer["tpot_ms"]
                self.ks[name_of(k)] = round(times[k], 3)
        if times:
            self.k = min(times, key=lambda k: times[k])
        elif self.ks:
            self.error = str(next(iter(self.ks.values())))
        while not self.error and not self.warm and time.monotonic() < began + seconds:
            self.ask(request)
        self.warm = True


def name_of(k: int | None) -> str:
    return "auto" if k is None else str(k)


def our_properties(folder: Path) -> dict[str, str]:
    """Return the properties of the profile for the model in ``folder``; ovspec's worker has tuned new models before."""
    profile = known_profile(folder, DeviceOptions())
    best = profile.choose(DeviceOptions(), "auto") if profile else None
    if not best:
        raise ValueError(f"no profile is known for {folder.name}; run 'ovspec tune'")
    device = DeviceOptions(properties=best.setting.properties)
    return device.properties | {"KV_CACHE_PRECISION": default_kv_precision(device) or "f32"}


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


def run_row(bench: Bench, row: Row, contexts: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a row, ovspec's first at each context."""
    together = row.measure == "throughput"
    prompts = {c: bench.prompts_of(row.workload, c, BATCH if together else bench.prompts) for c in contexts}
    longest = max(len(prompt) for each in prompts.values() for prompt in each) + bench.tokens + max(KS) + 1
    configurations = [Configuration("ovspec", mode, ks=() if mode == "plain" else (None,)) for mode in row.ours]
    ours = [Contender(configuration) for configuration in configurations]
    contenders = [*ours, *map(Contender, row.configurations)]
    for context in contexts if row.temperature == 0 else ():
        if not all(bench.plain_texts(configurations[0], prompts[context], longest)):
            sys.exit("ovspec itself doesn't generate")
    try:
        for contender in contenders:
            contender.enter(bench, longest)
        for context in contexts:
            turns = [prompts[context]] if together else [[prompt] for prompt in prompts[context]]

            def request(asked: list[list[int]], tokens: int, seed: int) -> dict[str, Any]:
                return {"prompts": asked, "max_tokens": tokens, "temperature": row.temperature, "seed": seed}

            def ask(contender: Contender, turn: int, turns: list[list[list[int]]] = turns) -> dict[str, Any]:
                return contender.ask(request(turns[turn], SHORT if turn < 0 else bench.tokens, turn + 1))

            for contender in contenders:
                contender.try_ks(request(prompts[context][-1:], SHORT, 0), bench.warm_up)
            running = [contender for contender in contenders if not contender.error]
            # A batch's first turn compiles the kernels for this many rows.
            for contender, answers in take_turns(running, ask, len(turns), warm_up=together).items():
                contender.answers = answers
            for contender in contenders:
                configuration, line = contender.configuration, line_of(contender, ours, row)
                texts = [text for answer in contender.answers for text in answer.get("tokens", [[]])]
                if row.temperature == 0 and any(texts):
                    wanted = bench.plain_texts(configurations[0], prompts[context], longest)
                    line["equal"], line["alike"] = compare(texts, wanted)
                    if contender not in ours and plain_of(configuration) != configuration:
                        line["own"], _ = compare(texts, bench.plain_texts(configuration, prompts[context], longest))
                yield {"pair": bench.pair.name, "row": row.name, "context": context} | line
    finally:
        for contender in contenders:
            if contender.worker:
                contender.worker.stop()


def plain_of(configuration: Configuration) -> Configuration:
    """Return the configuration of the same peer without a draft, in the same arithmetic."""
    mode = "server-plain" if configuration.mode == "server-draft" else "plain"
    return replace(configuration, mode=mode, ks=())


def line_of(contender: Contender, ours: list[Contender], row: Row) -> dict[str, Any]:
    """Return the figures of a contender at one context.

    ``ratio``: for each mode of ovspec, how many times as long the peer took in the same turn, per token or for the
    batch, as the median over the prompts. ``ttft_ratio``: the same for the first token and ovspec's first mode. Above
    1, ovspec is faster. ``equal``: how many texts equal ovspec's plain greedy text; other arithmetic gives other texts.
    ``alike``: the median number of tokens before they differ. ``own``: how many texts equal those of the peer's own
    plain decoding, one by one. ``acceptance``: the conditional acceptance.
    """
    configuration, alone = contender.configuration, row.measure == "tpot"
    good = [answer for answer in contender.answers if "error" not in answer]
    failed = (answer["error"] for answer in contender.answers if "error" in answer)
    took = "tpot_ms" if alone else "seconds"

    def ratio(mine: Contender, figure: str) -> float | None:
        pairs = zip(contender.answers, mine.answers, strict=True) if contender.answers and mine.answers else ()
        return middle(theirs[figure] / our[figure] for theirs, our in pairs if "error" not in theirs | our)

    tpot = middle(answer["tpot_ms"] for answer in good) if alone else None
    speeds = (sum(len(text) for text in answer["tokens"]) / answer["seconds"] for answer in good)
    by_mode = {mine.configuration.mode: ratio(mine, took) for mine in ours}
    return {
        "workload": row.workload,
        "temperature": row.temperature,
        "measure": row.measure,
        "mode": configuration.label,
        "peer": configuration.peer,
        "properties": configuration.properties,
        "k": name_of(contender.k) if configuration.ks and contender.ks and not contender.error else None,
        "tokens_per_s": (1e3 / tpot if tpot else None) if alone else middle(speeds),
        "tpot_ms": tpot,
        "ttft_ms": middle(answer["ttft_ms"] for answer in good),
        "ratio": {mode: round(each, 4) for mode, each in by_mode.items() if each is not None},
        "ttft_ratio": ratio(ours[0], "ttft_ms") if alone else None,
        "equal": None,
        "alike": None,
        "own": None,
        "acceptance": middle(answer["acceptance"] for answer in good),
        "ks": contender.ks,
        "versions": contender.worker.ready.get("versions", {}) if contender.worker else {},
        "error": contender.error or next(failed, None),
    }


def compare(got: list[list[int]], wanted: list[list[int]]) -> tuple[str, float | None]:
    """Return how many texts are equal, and the median number of tokens before they differ."""
    pairs = list(zip(got, wanted, strict=True))
    alike = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))) for a, b in pairs
    ]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}", middle(alike)


def middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("pair", type=Path)
    parser.add_argument("--checkpoints", "--hf", dest="hf", type=Path, help="folder with target/ and draft/")
    parser.add_argument("--peer", action="append", help="only rows with this peer; may be repeated")
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS], help="only this; may be repeated")
    parser.add_argument("--contexts", type=several(int), default="128,1024")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--gguf", choices=("q8_0", "q4_0"), default="q8_0", help="weight format for llama.cpp")
    parser.add_argument("--warm-up", type=float, default=6.0, help="minimum seconds for each contender")
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    args = parser.parse_args()
    bench = Bench(args.pair, args.hf, args.gguf, args.tokens, args.prompts, args.warm_up)
    for row in ROWS:
        peers = {configuration.peer for configuration in row.configurations}
        if (args.row and row.name not in args.row) or (args.peer and not peers & set(args.peer)):
            continue
        for line in run_row(bench, row, args.contexts):
            print(as_json(line), flush=True)
            if args.out:
                with args.out.open("a", encoding="utf-8") as out:
                    out.write(as_json(line) + "\n")


if __name__ == "__main__":
    main()
