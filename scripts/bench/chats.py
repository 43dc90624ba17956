"""Time the answers to real chats: plain decoding, lookup, fixed lookaheads, and peers on the same weights, in turns.

    python scripts/bench/chats.py MODEL --out FILE [--checkpoint DIR] [--kinds NAME,...] [--prompts 2] [--turns 3]

MODEL is an exported model with a chat template, such as SmolLM2, or SmolLM2 widened by 'bench_pair.py --of'; its text
is real, unlike the demo pair's. The chats are those of chats.json, the ones for judging first. Every turn of a chat is
a line of FILE as soon as it is measured: stop the bench when you like, and the same command goes on; with more kinds,
prompts or turns it adds what is missing. At the end the tables of all that FILE has are printed. Use an idle machine.

Each answer ends where the model ends it, after --tokens tokens at most; peers generate as many tokens as ovspec. With
the defaults and the peers, a model of 1.3 billion parameters in int8 should take less than two hours of two cores.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from harness import Chat, Table, Worker, chats, machine, median_interval, options, several
from peers.run import gguf_of

import ovspec
from ovspec.api.comparison import rotated
from ovspec.base.errors import OvspecError
from ovspec.drafting.choice import DraftChoice

KINDS = tuple(dict.fromkeys(chat.kind for chat in chats()))
PLAIN, AUTO = "plain", "lookup"
FIXED = {f"lookup, {k}": k for k in (1, 2, 4, 8)}  # fixed lookaheads; 0 is plain decoding
# ovspec in a process of its own is a control: beside itself it should be as fast.
PEERS = {"genai": "openvino-genai", "llamacpp": "llama.cpp, Q8_0", "ovspec": "ovspec as a peer"}
WARM_UP = 32  # tokens, in which kernels are made for each width


@dataclass(frozen=True)
class Text:
    """A generated text. ``tpot_ms``: of each token after the first; None if there is none. Peers count no rounds."""

    tokens: list[int]
    ttft_ms: float
    tpot_ms: float | None
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Turn:
    """The texts of a chat in one turn, by the way in which each was generated."""

    chat: str
    temperature: float
    number: int
    prompt_tokens: int
    texts: dict[str, Text]

    @property
    def key(self) -> tuple[str, float, int]:
        return self.chat, self.temperature, self.number


# ---------------------------------------------------------------- the file


@dataclass
class Log:
    """The turns that were measured, and their file. Its first line is ``about``: what was measured, and where."""

    file: Path
    about: dict[str, Any]
    turns: dict[tuple[str, float, int], Turn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        written = self.file.read_bytes() if self.file.exists() else b""
        whole = written[: written.rfind(b"\n") + 1]
        if whole != written:  # the bench was killed while it wrote
            self.file.write_bytes(whole)
        if not whole:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._append(self.about)
        about, *turns = [json.loads(line) for line in whole.splitlines()] or [self.about]
        for name, value in self.about.items():
            if about.get(name) != value:
                raise OvspecError(f"{self.file}: its {name} is {about.get(name)}, not {value}; give another --out.")
        for line in turns:
            turn = Turn(**line | {"texts": {way: Text(**text) for way, text in line["texts"].items()}})
            self.turns[turn.key] = turn

    def add(self, turn: Turn) -> None:
        self._append(asdict(turn))
        self.turns[turn.key] = turn

    def _append(self, line: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")


# ---------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Bench:
    """The model without a drafter and with lookup, and the peers' processes.

    fixed: number of chats of a kind that FIXED are tried on. lengths: tokens of the greedy answers, by chat.
    """

    plain: ovspec.LanguageModel
    lookup: ovspec.LanguageModel
    workers: dict[str, Worker]
    tokens: int
    fixed: int
    lengths: dict[str, int] = field(default_factory=dict)

    def ways(self, chat: Chat, temperature: float) -> list[str]:
        fixed = list(FIXED) if chat.number <= self.fixed else []
        return [PLAIN, AUTO, *fixed, *(self.workers if temperature == 0 else ())]

    def warm_up(self, chat: Chat) -> None:
        prompt = self.plain.encode(chat.messages).tolist()
        for temperature in (0.0, 1.0):
            self.texts(prompt, temperature, 0, [*FIXED, PLAIN, AUTO], WARM_UP)
        self.texts(prompt, 0.0, 0, list(self.workers), WARM_UP)
        self.lookup.use_large_pages()

    def turn(self, chat: Chat, temperature: float, number: int) -> Turn:
        prompt = self.plain.encode(chat.messages).tolist()
        tokens = self.tokens
        if temperature == 0 and self.workers:  # peers have to know how many tokens there will be
            if chat.name not in self.lengths:
                self.lengths[chat.name] = len(self.plain.generate(prompt, max_tokens=tokens).token_ids)
            tokens = self.lengths[chat.name]
        ways = rotated(self.ways(chat, temperature), number + chat.number)
        return Turn(chat.name, temperature, number, len(prompt), self.texts(prompt, temperature, number, ways, tokens))

    def texts(self, prompt: list[int], temperature: float, turn: int, ways: list[str], most: int) -> dict[str, Text]:
        """Generate a text in each way. Fixed lookaheads share the reading of the prompt.

        Each continues a fork, because a session's lookup also finds what was generated and taken back.
        """
        asked: Any = {"temperature": temperature, "seed": turn + 1, "top_k": 0, "max_tokens": most}
        found = dict[str, Text]()
        with self.lookup.session() as session:
            session.append(prompt)
            mark = session.mark()
            if FIXED.keys() & set(ways):
                session.generate(max_tokens=1, lookahead=0)
                session.rewind(mark)
            for way in ways:
                if way in self.workers:
                    answer = self.workers[way].answer({"prompts": [prompt], "max_tokens": most})
                    found[way] = Text(answer["tokens"][0], answer["ttft_ms"], answer["tpot_ms"])
                elif way in FIXED:
                    with session.fork() as fork:
                        found[way] = text_of(fork.generate(**asked, lookahead=FIXED[way]))
                else:
                    found[way] = text_of((self.plain if way == PLAIN else self.lookup).generate(prompt, **asked))
        return found


def text_of(result: ovspec.Result) -> Text:
    stats = result.stats
    return Text(result.token_ids, stats.ttft_ms, stats.tpot_ms or None, stats.rounds, stats.proposed, stats.accepted)


def start(peer: str, folder: Path, checkpoint: Path | None) -> Worker:
    """Start a peer's process; raises RuntimeError if it can't be used here."""
    setup: dict[str, Any] = {"target": str(folder)}
    if peer == "llamacpp":
        if not checkpoint:
            raise RuntimeError("llamacpp needs --checkpoint, what MODEL was exported from; or leave it out of --peers")
        setup = {"target": str(gguf_of(checkpoint, "q8_0")), "options": {"threads": psutil.cpu_count(logical=False)}}
    worker = Worker(peer, setup)
    if "error" in worker.ready:
        raise RuntimeError(f"{peer}: {worker.ready['error']}; or leave it out of --peers")
    return worker


# ---------------------------------------------------------------- tables


@dataclass(frozen=True)
class Figures:
    """What tables show of the turns of one kind of chat, or of all, at one temperature."""

    turns: list[Turn]

    def middle(self, way: str, figure: Callable[[Turn, Text], float | None], digits: int = 1) -> str | None:
        values = [figure(turn, turn.texts[way]) for turn in self.turns if way in turn.texts]
        known = [value for value in values if value is not None]
        return f"{statistics.median(known):.{digits}f}" if known else None

    def ms(self, way: str) -> str | None:
        return self.middle(way, lambda _, text: text.tpot_ms)

    def prompt_ms(self, way: str) -> str | None:
        return self.middle(way, lambda turn, text: text.ttft_ms / turn.prompt_tokens, 2)

    def speeds(self, way: str, base: str = PLAIN) -> dict[str, list[float]]:
        """Return the speed of ``way`` as a multiple of that of ``base`` in each turn, by chat."""
        found: dict[str, list[float]] = {}
        for turn in self.turns:
            if way in turn.texts and base in turn.texts:
                ours, others = turn.texts[way].tpot_ms, turn.texts[base].tpot_ms
                if ours and others:
                    found.setdefault(turn.chat, []).append(others / ours)
        return found

    def speed(self, way: str, base: str = PLAIN) -> str | None:
        """Return the median of these with its interval."""
        values = [value for each in self.speeds(way, base).values() for value in each]
        if not values:
            return None
        return "{:.2f} ({:.2f} to {:.2f})".format(statistics.median(values), *median_interval(values))

    def lowest(self, way: str) -> str | None:
        """Return the median speed of the chat where it is lowest."""
        speeds = self.speeds(way)
        return f"{min(map(statistics.median, speeds.values())):.2f}" if speeds else None

    def rates(self, way: str) -> tuple[str, str]:
        """Return tokens per round, and accepted of proposed tokens."""
        texts = [turn.texts[way] for turn in self.turns if way in turn.texts]
        rounds, proposed, accepted = (
            sum(getattr(t, name) for t in texts) for name in ("rounds", "proposed", "accepted")
        )
        tokens = sum(len(text.tokens) for text in texts)
        return f"{tokens / max(rounds, 1):.2f}", f"{accepted} of {proposed}"

    def equal(self, *ways: str) -> str:
        """Return how many texts are those of plain decoding."""
        pairs = [(turn.texts[way], turn.texts[PLAIN]) for turn in self.turns for way in ways if way in turn.texts]
        return f"{sum(text.tokens == plain.tokens for text, plain in pairs)} of {len(pairs)}"

    def with_fixed(self) -> Figures:
        return Figures([turn for turn in self.turns if turn.texts.keys() >= FIXED.keys()])

    def best_fixed(self) -> str:
        """Return the fixed lookahead of the greatest median speed; 0 is plain decoding."""
        speeds = {way: [value for each in self.speeds(way).values() for value in each] for way in (PLAIN, *FIXED)}
        return max(speeds, key=lambda way: statistics.median(speeds[way] or [0.0]))


def groups(log: Log, temperatures: list[float]) -> Iterator[tuple[str, str, Figures]]:
    """Yield (kind, temperature, figures) of what was measured, and at the end those of all kinds."""
    kinds = {chat.name: chat.kind for chat in chats()}
    for temperature in temperatures:
        turns = [turn for turn in log.turns.values() if turn.temperature == temperature]
        for kind in (*KINDS, "all"):
            of_kind = [turn for turn in turns if kind in (kinds[turn.chat], "all")]
            if of_kind:
                yield kind, f"{temperature:g}", Figures(of_kind)


def print_tables(log: Log) -> None:
    temperatures = sorted({turn.temperature for turn in log.turns.values()})
    greedy = list(groups(log, [0.0]))
    peers = {peer: name for peer, name in PEERS.items() if any(peer in turn.texts for turn in log.turns.values())}
    print("Speeds are multiples of plain decoding's in the same turn: medians with their 95 % intervals.\n")
    print("Greedy, milliseconds per token and speeds:\n")
    table = Table(
        "kind", "plain, ms", "lookup, ms", "lookup", *(c for name in peers.values() for c in (f"{name}, ms", name))
    )
    for kind, _, figures in greedy:
        cells = (cell for peer in peers for cell in (figures.ms(peer), figures.speed(peer)))
        table.row(kind, figures.ms(PLAIN), figures.ms(AUTO), figures.speed(AUTO), *cells)
    print("\nMilliseconds per token of the prompt, until the first token:\n")
    table = Table("kind", "tokens", "ovspec", *peers.values())
    for kind, _, figures in greedy:
        tokens = figures.middle(PLAIN, lambda turn, _: turn.prompt_tokens, 0)
        table.row(kind, tokens, *(figures.prompt_ms(way) for way in (PLAIN, *peers)))
    print("\nLookup with the automatic lookahead:\n")
    table = Table("kind", "T", "speed", "lowest of a chat", "tokens per round", "accepted", "equal texts")
    for kind, temperature, figures in groups(log, temperatures):
        speeds = (figures.speed(AUTO), figures.lowest(AUTO))
        table.row(kind, temperature, *speeds, *figures.rates(AUTO), figures.equal(AUTO))
    print("\nLookup with fixed lookaheads, 0 being plain decoding, and the automatic one beside the best of them:\n")
    table = Table("kind", "T", *map(str, FIXED.values()), "automatic", "best", "automatic / best", "equal texts")
    for kind, temperature, every in groups(log, temperatures):
        figures = every.with_fixed()
        if figures.turns:
            speeds, best = (figures.speed(way) for way in (*FIXED, AUTO)), figures.best_fixed()
            table.row(kind, temperature, *speeds, FIXED.get(best, 0), figures.speed(AUTO, best), figures.equal(*FIXED))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="what MODEL was exported from, for llamacpp")
    parser.add_argument("--peers", type=several(choices=(*PEERS, "none")), default="genai,llamacpp")
    parser.add_argument("--kinds", type=several(choices=KINDS), default=",".join(KINDS))
    parser.add_argument("--prompts", type=int, default=2, help="of each kind")
    parser.add_argument("--fixed", type=int, default=2, help="prompts of each kind that fixed lookaheads are tried on")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--arithmetic", choices=("exact", "fast"), default="exact")
    parser.add_argument("--temperatures", type=several(float), default="0,1")
    args = parser.parse_args()
    chosen = [chat for chat in chats() if chat.kind in args.kinds and chat.number <= args.prompts]
    lm = ovspec.load(args.model, arithmetic=args.arithmetic, cache_memory=0)
    plain, lookup = lm.with_drafters(None), lm.with_drafters(DraftChoice(lookup=True))
    here = machine().rpartition(", ")[0]  # without the month
    about = {"model": str(args.model.resolve()), "tokens": args.tokens, "machine": here, "arithmetic": args.arithmetic}
    log = Log(args.out, about)
    with ExitStack() as stack:
        peers = [peer for peer in args.peers if peer in PEERS]
        workers = {peer: stack.enter_context(start(peer, args.model, args.checkpoint)) for peer in peers}
        bench = Bench(plain, lookup, workers, args.tokens, args.fixed)
        asked = [(turn, chat, t) for turn in range(args.turns) for chat in chosen for t in args.temperatures]
        missing = [
            (turn, chat, t)
            for turn, chat, t in asked
            if (chat.name, t, turn) not in log.turns
            or not log.turns[chat.name, t, turn].texts.keys() >= set(bench.ways(chat, t))
        ]
        if missing:
            bench.warm_up(chosen[0])
        for place, (turn, chat, t) in enumerate(missing, 1):
            print(f"{place} of {len(missing)}: turn {turn + 1}, {chat.name}, T={t:g}", file=sys.stderr, flush=True)
            log.add(bench.turn(chat, t, turn))
    print(f"{args.model.name} on {machine()}; by default it proposes with {lm.runtime.choice or 'nothing'} here\n")
    print_tables(log)


if __name__ == "__main__":
    try:
        main()
    except (OvspecError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped; the same command goes on.")
