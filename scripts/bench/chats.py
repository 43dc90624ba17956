"""Time the answers to real chats in many ways, in turns: plain decoding, drafters, and peers on the same weights.

    python scripts/bench/chats.py MODEL --out FILE [--ways plain lookup head lookup,head genai ...]
        [--draft NAME=PATH]... [--prompts 2] [--turns 3] [--contexts 0] [--batches 1] [--temperatures 0,1]

MODEL is an exported model with a chat template, such as SmolLM2, or SmolLM2 widened by 'bench_pair.py --of'; its text
is real, unlike the demo pair's. The chats are those of chats.json, the ones for judging first.

A way is "plain", drafters as ovspec's --draft takes them, or a peer: genai or llamacpp, alone or with -lookup or -head,
optimum, torch, or "ovspec", a control in a process of its own. "@K" fixes the lookahead, as in "lookup@4" or
"genai-head@2"; of peers, only genai's drafters and llamacpp-head take one, and genai's need it. --draft names what a
way loads: a head or draft model of ovspec's, "genai-head" the same head by 'optimum-cli export openvino --task
text-generation-with-past --trust-remote-code', and "llamacpp-head" its GGUF file, by 'convert_hf_to_gguf.py HEAD
--target-model-dir CHECKPOINT'.

Every turn of a chat is a line of FILE as soon as it is measured: stop the bench when you like, and the same command
goes on; with more ways, kinds, prompts, turns, contexts or batches it adds what is missing, each time beside plain
decoding. At the end the tables of all that FILE has are printed. Use an idle machine.

Each answer ends where the model ends it, after --tokens tokens at most; peers generate as many tokens as ovspec, and
only greedily. A batch has chats of one kind, over again if there are fewer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import openvino as ov
import psutil
from harness import Chat, Table, Worker, cap, chats, machine, median_interval, options, several, with_context
from peers.install import gguf_of, server_of_llamacpp

import ovspec
from ovspec.api.comparison import rotate_modes
from ovspec.base.errors import OvspecError
from ovspec.drafting.choice import DraftChoice
from ovspec.ir.compile import MODEL_FILE, read_model
from ovspec.ir.heads import read_target_layers
from ovspec.ir.instruction_set import instruction_set

KINDS = tuple(dict.fromkeys(chat.kind for chat in chats()))
PLAIN, LOOKUP = "plain", "lookup"
WARM_UP = 32  # tokens, at most, in which kernels are made for each width


@dataclass(frozen=True)
class Peer:
    """A peer in one mode.

    files: what it loads, MODEL ("ir"), its "checkpoint", or that as "gguf".
    lookahead: whether it takes a number of tokens to propose: "no", or it "may" or "must" be given.
    """

    worker: str
    mode: str
    files: str = "ir"
    options: Mapping[str, Any] = field(default_factory=dict)
    lookahead: str = "no"


PEERS = {
    "ovspec": Peer("ovspec", "plain"),
    "genai": Peer("genai", "plain"),
    "genai-lookup": Peer("genai", "lookup", lookahead="must"),
    "genai-head": Peer("genai", "draft", lookahead="must"),
    "llamacpp": Peer("llamacpp", "plain", "gguf"),
    "llamacpp-lookup": Peer("llamacpp", "lookup", "gguf"),
    "llamacpp-head": Peer("llamacpp", "head", "gguf", lookahead="may"),
    "optimum": Peer("optimum", "plain", options={"runtime": "openvino"}),
    "torch": Peer("optimum", "plain", "checkpoint", {"runtime": "torch"}),
}


@dataclass(frozen=True)
class Case:
    """What a turn answers: a chat, or ``batch`` chats of its kind that begin with it.

    context: tokens of other text come before a shorter prompt until it has so many.
    accept: the rule for sampled tokens.
    """

    chat: str
    context: int
    batch: int
    temperature: float
    accept: str
    turn: int

    @property
    def group(self) -> tuple[int, int, float, str]:
        """What a table is of."""
        return self.batch, self.context, self.temperature, self.accept


@dataclass(frozen=True)
class Text:
    """The texts that were generated together in one way.

    tpot_ms: milliseconds per token after the first of each text; None if there is none, and for peers' batches.
    seconds: with reading the prompts. Peers count no rounds.
    """

    tokens: list[list[int]]
    seconds: float
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Turn:
    """The texts of a case, by the way in which they were generated. ``prompt_tokens``: of all prompts."""

    case: Case
    prompt_tokens: int
    texts: dict[str, Text]


# ---------------------------------------------------------------- the file


@dataclass
class Log:
    """The turns that were measured, and their file. Its first line is ``about``: what was measured, and where."""

    file: Path
    about: dict[str, Any]
    turns: list[Turn] = field(default_factory=list)  # several of a case, if ways were added

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
            texts = {way: Text(**text) for way, text in line["texts"].items()}
            self.turns.append(Turn(Case(**line["case"]), line["prompt_tokens"], texts))

    def add(self, turn: Turn) -> None:
        self._append(asdict(turn))
        self.turns.append(turn)

    def has(self, case: Case) -> set[str]:
        """Return the ways in which a case was measured."""
        return {way for turn in self.turns if turn.case == case for way in turn.texts}

    def _append(self, line: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")


# ---------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Way:
    """A way to generate: ``runner`` names drafters, or a peer; None lets it choose its ``lookahead``."""

    name: str
    runner: str
    lookahead: int | None

    @property
    def is_peer(self) -> bool:
        return self.runner in PEERS

    def takes(self, case: Case) -> bool:
        if self.is_peer:
            return case.temperature == 0 and (case.batch == 1 or self.runner.startswith("genai"))
        return True


def way_of(text: str) -> Way:
    """Read a way as it is given.

    Raises:
        argparse.ArgumentTypeError: its lookahead isn't a number, or a peer doesn't take it or needs it.
    """
    runner, fixed, lookahead = text.partition("@")
    takes = PEERS[runner].lookahead if runner in PEERS else "may"
    if fixed and (takes == "no" or not lookahead.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{runner} takes {'no' if takes == 'no' else 'a whole'} number after @: {text}"
        )
    if takes == "must" and not fixed:
        raise argparse.ArgumentTypeError(f"{runner} needs the number of tokens to propose, as in {runner}@4")
    return Way(text, runner, int(lookahead) if fixed else None)


@dataclass(frozen=True)
class Bench:
    """What runs each way: models by their drafters, and peers' processes by name and whether they take batches.

    lengths: tokens of the greedy answers of a case, which peers have to know.
    """

    models: dict[str, ovspec.LanguageModel]
    workers: dict[tuple[str, bool], Worker]
    tokens: int
    lengths: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)

    def warm_up(self, chat: Chat, ways: list[Way], batches: set[int]) -> None:
        prompt = self.models[PLAIN].encode(chat.messages).tolist()
        for way, batch, temperature in product(ways, batches, (0.0, 1.0)):
            case = Case(chat.name, 0, batch, temperature, "compare", 0)
            if way.takes(case):
                self.text(way, case, [prompt] * batch, [min(WARM_UP, self.tokens)] * batch)
        for model in self.models.values():
            model.use_large_pages()

    def turn(self, case: Case, ways: list[Way]) -> Turn:
        """Generate the texts of a case in each of ``ways``, which take turns."""
        prompts = self.prompts(case)
        most = [self.tokens] * case.batch
        if any(way.is_peer for way in ways):
            key = case.chat, case.context, case.batch
            if key not in self.lengths:
                found = self.models[PLAIN].generate(prompts, max_tokens=self.tokens, batch_size=case.batch)
                self.lengths[key] = [len(result.token_ids) for result in found]
            most = self.lengths[key]
        first = case.turn + [chat.name for chat in chats()].index(case.chat)
        texts = {way.name: self.text(way, case, prompts, most) for way in rotate_modes(ways, first)}
        return Turn(case, sum(map(len, prompts)), texts)

    def prompts(self, case: Case) -> list[list[int]]:
        model, every = self.models[PLAIN], chats()
        first = next(chat for chat in every if chat.name == case.chat)
        same = [chat for chat in every if chat.kind == first.kind]
        rows = [same[(same.index(first) + i) % len(same)] for i in range(case.batch)]
        return [with_context(model.tokenizer, model.encode(row.messages).tolist(), case.context) for row in rows]

    def text(self, way: Way, case: Case, prompts: list[list[int]], most: list[int]) -> Text:
        if way.is_peer:
            worker = self.workers[way.runner, case.batch > 1]
            return asked_of(worker, way, prompts, most)
        asked: dict[str, Any] = {"temperature": case.temperature, "seed": case.turn + 1, "top_k": 0}
        asked |= {"accept": case.accept, "max_tokens": max(most), "batch_size": case.batch}
        if way.lookahead is not None:
            asked["lookahead"] = way.lookahead
        return text_of(self.models[way.runner].generate(prompts, **asked))


def asked_of(worker: Worker, way: Way, prompts: list[list[int]], lengths: list[int]) -> Text:
    answer = worker.answer({"prompts": prompts, "max_tokens": max(lengths), "lengths": lengths, "k": way.lookahead})
    return Text(answer["tokens"], answer["seconds"], answer["ttft_ms"], answer["tpot_ms"])


def text_of(results: list[ovspec.Result]) -> Text:
    stats = [result.stats for result in results]
    later = sum(each.generated_tokens - 1 for each in stats)
    decoding = max(each.tpot_ms * (each.generated_tokens - 1) for each in stats)
    seconds = max(each.ttft_ms + each.tpot_ms * (each.generated_tokens - 1) for each in stats) / 1e3
    first = max(each.ttft_ms for each in stats)
    counts = (sum(getattr(each, name) for each in stats) for name in ("rounds", "proposed", "accepted"))
    tokens = [result.token_ids for result in results]
    return Text(tokens, seconds, first, decoding / later if later else None, *counts)


def load_models(folder: Path, ways: Iterable[Way], drafts: dict[str, str], arithmetic: Any) -> dict[str, Any]:
    """Load the model for each way but peers'. With a head it has further outputs, so the others don't share that."""
    loaded = dict[str | None, ovspec.LanguageModel]()
    found = dict[str, ovspec.LanguageModel]()
    for runner in dict.fromkeys([PLAIN, *(way.runner for way in ways if not way.is_peer)]):
        parts = [] if runner == PLAIN else runner.split(",")
        named = next((part for part in parts if part != LOOKUP), None)
        draft = drafts.get(named, named) if named else None
        if draft not in loaded:
            loaded[draft] = ovspec.load(
                folder, [LOOKUP, *([draft] if draft else ())], arithmetic=arithmetic, cache_memory=0
            )
        model = loaded[draft]
        chosen = model.runtime.models.choice.model if draft and model.runtime.models.choice else None
        found[runner] = model.with_drafters(DraftChoice(lookup=LOOKUP in parts, model=chosen) or None)
    return found


def start(peer: str, together: bool, args: Any, drafts: dict[str, str], scratch: Path) -> Worker:
    """Start a peer's process; raises RuntimeError if it can't be used here."""
    kind = PEERS[peer]
    target, draft, given = args.model, drafts.get(peer), dict(kind.options)
    if peer.endswith("-head") and not draft:
        raise RuntimeError(f"{peer} needs --draft {peer}=PATH")
    if kind.files != "ir" and not args.checkpoint:
        raise RuntimeError(f"{peer} needs --checkpoint, what MODEL was exported from")
    if kind.files != "ir":
        target = gguf_of(args.checkpoint, args.gguf) if kind.files == "gguf" else args.checkpoint
    if kind.worker == "llamacpp":
        given |= {"threads": psutil.cpu_count(logical=False), "server": str(server_of_llamacpp())}
    if together:
        given["batches"] = True
    if peer == "genai-head":
        draft = str(with_its_layers(Path(str(draft)), drafts.get("head"), scratch))
    worker = Worker(kind.worker, {"target": str(target), "draft": draft, "mode": kind.mode, "options": given})
    if "error" in worker.ready:
        raise RuntimeError(f"{peer}: {worker.ready['error']}")
    return worker


def with_its_layers(head: Path, ours: str | None, scratch: Path) -> Path:
    """Tell openvino-genai which layers a head was trained on; its own are the outputs of 2, N/2 and N-3."""
    if not ours:
        raise RuntimeError("genai-head needs --draft head=PATH, which knows its layers")
    changed = read_model(head)
    changed.set_rt_info([layer - 1 for layer in read_target_layers(read_model(Path(ours)))], ["hidden_layers_list"])
    copy = Path(tempfile.mkdtemp(dir=scratch))  # each process has its own
    shutil.copytree(head, copy, ignore=shutil.ignore_patterns("openvino_model.*"), dirs_exist_ok=True)
    ov.save_model(changed, copy / MODEL_FILE, compress_to_fp16=False)
    return copy


# ---------------------------------------------------------------- tables


@dataclass(frozen=True)
class Figures:
    """What tables show of some turns."""

    turns: list[Turn]

    def of(self, chosen: Callable[[Chat], bool]) -> Figures:
        names = {chat.name for chat in chats() if chosen(chat)}
        return Figures([turn for turn in self.turns if turn.case.chat in names])

    def middle(self, way: str, figure: Callable[[Turn, Text], float | None], digits: int = 1) -> str | None:
        values = [figure(turn, turn.texts[way]) for turn in self.turns if way in turn.texts]
        known = [value for value in values if value is not None]
        return f"{statistics.median(known):.{digits}f}" if known else None

    def ms(self, way: str) -> str | None:
        return self.middle(way, lambda _, text: text.tpot_ms)

    def prompt_ms(self, way: str) -> str | None:
        return self.middle(way, lambda turn, text: text.ttft_ms and text.ttft_ms / turn.prompt_tokens, 2)

    def speeds(self, way: str) -> list[float]:
        """Return the speed of ``way`` as a multiple of plain decoding's in each turn: of batches with their prompts."""
        found = []
        for turn in (turn for turn in self.turns if way in turn.texts):
            text, plain = turn.texts[way], turn.texts[PLAIN]
            if turn.case.batch > 1:
                found.append(plain.seconds / text.seconds)
            elif text.tpot_ms and plain.tpot_ms:
                found.append(plain.tpot_ms / text.tpot_ms)
        return found

    def speed(self, way: str) -> str | None:
        """Return the median of these with its interval."""
        values = self.speeds(way)
        if not values:
            return None
        return "{:.2f} ({:.2f} to {:.2f})".format(statistics.median(values), *median_interval(values))

    def texts(self, way: str) -> list[Text]:
        return [turn.texts[way] for turn in self.turns if way in turn.texts]

    def tokens_per_round(self, way: str) -> str | None:
        rounds = sum(text.rounds for text in self.texts(way))
        tokens = sum(len(each) for text in self.texts(way) for each in text.tokens)
        return f"{tokens / rounds:.2f}" if rounds else None

    def accepted(self, way: str) -> str | None:
        """Return accepted of proposed tokens; None for peers."""
        proposed, accepted = (sum(getattr(text, name) for text in self.texts(way)) for name in ("proposed", "accepted"))
        return f"{accepted} of {proposed}" if proposed else None

    def equal(self, way: str) -> str:
        """Return how many texts are those of plain decoding."""
        pairs = [
            pair
            for turn in self.turns
            if way in turn.texts
            for pair in zip(turn.texts[way].tokens, turn.texts[PLAIN].tokens, strict=True)
        ]
        return f"{sum(ours == plain for ours, plain in pairs)} of {len(pairs)}"


def groups(log: Log) -> Iterator[tuple[str, Figures]]:
    """Yield the title and the figures of each table."""
    for group in sorted({turn.case.group for turn in log.turns}):
        batch, context, temperature, accept = group
        size = "One at a time" if batch == 1 else f"Batches of {batch}"
        length = f"a context of {context:,} tokens" if context else "the chats as they are"
        rule = f"T={temperature:g}, by {accept}" if temperature else "greedy"
        yield f"{size}, {length}, {rule}", Figures([turn for turn in log.turns if turn.case.group == group])


def print_tables(log: Log) -> None:
    print("Speeds are multiples of plain decoding's in the same turn: medians with their 95 % intervals.")
    print("Those of batches are with reading the prompts.")
    for title, every in groups(log):
        parts = {kind: every.of(lambda chat, kind=kind: chat.kind == kind) for kind in KINDS}
        parts |= {"for judging": every.of(lambda chat: chat.judge), "others": every.of(lambda chat: not chat.judge)}
        parts = {name: figures for name, figures in parts.items() if figures.turns}
        ways = list(dict.fromkeys(way for turn in every.turns for way in turn.texts))
        print(f"\n{title}:\n")
        ways.sort(key=lambda way: (way != PLAIN, way.partition("@")[0] in PEERS))
        table = Table("way", "ms a token", *parts, "accepted", "equal texts")
        for way in ways:
            speeds = (None if way == PLAIN else figures.speed(way) for figures in parts.values())
            counts = (None, None) if way == PLAIN else (every.accepted(way), every.equal(way))
            table.row(way, every.ms(way), *speeds, *counts)
        drafting = [way for way in ways if every.accepted(way)]
        if drafting:
            print("\nTokens a round:\n")
            table = Table("way", *parts)
            for way in drafting:
                table.row(way, *(figures.tokens_per_round(way) for figures in parts.values()))
    print("\nMilliseconds per token of the prompt, until the first token:\n")
    alone = Figures([turn for turn in log.turns if turn.case.batch == 1 and not turn.case.temperature])
    peers = [peer for peer in PEERS if any(peer in turn.texts for turn in alone.turns)]
    table = Table("kind", "tokens", "plain", *peers)
    for kind in KINDS:
        figures = alone.of(lambda chat, kind=kind: chat.kind == kind)
        if not figures.turns:
            continue
        tokens = figures.middle(PLAIN, lambda turn, _: turn.prompt_tokens, 0)
        table.row(kind, tokens, *(figures.prompt_ms(way) for way in (PLAIN, *peers)))


# ---------------------------------------------------------------- the command


def named(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals:
        raise ValueError
    return name, path


def cases_of(args: Any) -> Iterator[Case]:
    """Yield what is asked for, turn by turn. Batches begin with the first chat of a kind."""
    chosen = [chat for chat in chats() if chat.kind in args.kinds and chat.number <= args.prompts]
    for turn, chat in product(range(args.turns), chosen):
        for context, batch in product(args.contexts, args.batches):
            if batch > 1 and chat.number > 1:
                continue
            for temperature in args.temperatures:
                for accept in args.accept if temperature else ["compare"]:
                    yield Case(chat.name, context, batch, temperature, accept, turn)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--ways", type=way_of, nargs="+", default=[way_of(LOOKUP)], metavar="WAY")
    parser.add_argument("--draft", type=named, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="what MODEL was exported from, for llamacpp")
    parser.add_argument("--gguf", choices=("q8_0", "q4_0"), default="q8_0", help="its weights in llama.cpp")
    parser.add_argument("--kinds", type=several(choices=KINDS), default=",".join(KINDS))
    parser.add_argument("--prompts", type=int, default=2, help="of each kind")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--contexts", type=several(int), default="0", help="least tokens of a prompt")
    parser.add_argument("--batches", type=several(int), default="1", help="chats that are answered together")
    parser.add_argument("--temperatures", type=several(float), default="0,1")
    parser.add_argument("--accept", type=several(choices=("compare", "rejection")), default="compare")
    parser.add_argument("--arithmetic", choices=("exact", "fast"), default="exact")
    parser.add_argument("--isa", help="cap OpenVINO to this instruction set, such as AVX2")
    args = parser.parse_args()
    cap(args.isa)
    ways = [way_of(PLAIN), *(way for way in args.ways if way.name != PLAIN)]
    drafts = {name: str(Path(path).resolve()) for name, path in args.draft}
    here = machine().rpartition(", ")[0]  # without the month
    about = {"model": str(args.model.resolve()), "tokens": args.tokens, "machine": here, "isa": instruction_set()}
    log = Log(args.out, about | {"arithmetic": args.arithmetic, "gguf": args.gguf, "draft": drafts})
    plain, *others = ways
    missing = dict[Case, list[Way]]()
    for case in cases_of(args):
        has = log.has(case)
        new = [way for way in others if way.takes(case) and way.name not in has]
        if new or not has:
            missing[case] = [plain, *new]
    if missing:
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            needed = dict.fromkeys(way for each in missing.values() for way in each)
            peers = {(way.runner, case.batch > 1): 0 for case, each in missing.items() for way in each if way.is_peer}
            workers = {each: stack.enter_context(start(*each, args, drafts, scratch)) for each in peers}
            bench = Bench(load_models(args.model, needed, drafts, args.arithmetic), workers, args.tokens)
            bench.warm_up(chats()[0], list(needed), {case.batch for case in missing})
            for place, (case, each) in enumerate(missing.items(), 1):
                what = f"turn {case.turn + 1}, {case.chat}, {', '.join(map(str, case.group))}"
                print(f"{place} of {len(missing)}: {what}", file=sys.stderr, flush=True)
                log.add(bench.turn(case, each))
    print(f"{args.model.name} on {machine()}, {instruction_set()}\n")
    print_tables(log)


if __name__ == "__main__":
    try:
        main()
    except (OvspecError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped; the same command goes on.")
