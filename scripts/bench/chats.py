"""Time the answers to real chats in many ways, in turns: plain decoding, drafters, and peers on the same weights.

    python scripts/bench/chats.py MODEL --out FILE [--ways lookup head lookup,head genai ...] [--draft NAME=PATH]...

MODEL is an exported model with a chat template, such as SmolLM2, or SmolLM2 widened by 'bench_pair.py --of'. The chats
are in chats.json; held-out chats come first. The kinds completion (code), prose and JSON are texts to be continued.
--documents adds the texts held out by 'ovspec distill'.

A way is "plain"; drafters, as in ovspec's --draft; or a peer: genai or llamacpp, alone or with -lookup or -head,
optimum, torch, or ovspec in its own process: "ovspec", "ovspec-fast" (fast arithmetic) and "ovspec-before" (the
checkout named by --against). "@K" fixes the lookahead, as in "lookup@4"; of the peers, genai's drafters need it, and
llamacpp-head takes it. For JSON, "plain" chooses each token, "forced" takes several at a time where the schema leaves
no choice, and "free" generates as many tokens without the schema. --draft names the file of a way: ovspec's head or
draft model; "genai-head", the same head from 'optimum-cli export openvino --task text-generation-with-past
--trust-remote-code'; or "llamacpp-head", its GGUF file from 'convert_hf_to_gguf.py HEAD --target-model-dir CHECKPOINT'.

Each measured turn is a line of FILE. The same command resumes a stopped bench; further ways, kinds, prompts, turns,
contexts or batches are added, each beside plain decoding. At the end, all tables of FILE are printed. Use an idle
machine. Answers end where the model ends them, or after --tokens tokens; peers generate as many tokens as ovspec, and
are greedy. A batch has prompts of one kind, repeated if there are too few.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import openvino as ov
import psutil
from chat_log import PLAIN, RATES, Case, Figures, Log, Text, Turn
from figures import Table, machine, totals
from harness import ISA, ROOT, Option, Prompt, Worker, add_held_out, arguments, cap, prompt_named, prompts, with_context
from peers.install import gguf_of, server_of_llamacpp

import ovspec
from ovspec.api.comparison import rotate_modes
from ovspec.base.errors import OvspecError
from ovspec.drafting.choice import DraftChoice
from ovspec.ir.compile import MODEL_FILE, read_openvino_model
from ovspec.ir.heads import read_target_layers
from ovspec.ir.instruction_set import describe_instruction_set

KINDS = (*dict.fromkeys(prompt.kind for prompt in prompts()), "held-out own", "held-out chats", "held-out text")
CHAT_KINDS = [kind for kind in KINDS if kind not in ("completion", "prose", "JSON")]
FORCED, FREE, LOOKUP = "forced", "free", "lookup"
WARM_UP = 32  # maximum tokens for warming up, to compile kernels for each width


@dataclass(frozen=True)
class Peer:
    """A peer in a mode.

    files: the model's format: MODEL itself ("ir"), its "checkpoint", or the checkpoint as "gguf".
    lookahead: whether a number of tokens to propose can be given: "no", "may" or "must".
    """

    worker: str
    mode: str
    files: str = "ir"
    options: Mapping[str, Any] = field(default_factory=dict)
    lookahead: str = "no"


PEERS = {
    "ovspec": Peer("ovspec", "plain"),
    "ovspec-fast": Peer("ovspec", "plain", options={"arithmetic": "fast"}),
    "ovspec-before": Peer("ovspec", "plain", options={"settle": False}),
    "genai": Peer("genai", "plain"),
    "genai-lookup": Peer("genai", "lookup", lookahead="must"),
    "genai-head": Peer("genai", "draft", lookahead="must"),
    "llamacpp": Peer("llamacpp", "plain", "gguf"),
    "llamacpp-lookup": Peer("llamacpp", "lookup", "gguf"),
    "llamacpp-head": Peer("llamacpp", "head", "gguf", lookahead="may"),
    "optimum": Peer("optimum", "plain", options={"runtime": "openvino"}),
    "torch": Peer("optimum", "plain", "checkpoint", {"runtime": "torch"}),
}


# ---------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Way:
    """A way to generate: ``runner`` names drafters or a peer; a ``lookahead`` of None is automatic."""

    name: str
    runner: str
    lookahead: int | None

    @property
    def is_peer(self) -> bool:
        return self.runner in PEERS

    def takes(self, case: Case) -> bool:
        kind = prompt_named(case.prompt).kind
        if not self.is_peer:
            return kind == "JSON" or self.runner not in (FORCED, FREE)
        if kind == "JSON":
            return False
        if PEERS[self.runner].worker == "ovspec":  # all texts of its batches have the same length
            return case.batch == 1 or kind not in CHAT_KINDS
        return case.temperature == 0 and (case.batch == 1 or self.runner.startswith("genai"))


def way_of(text: str) -> Way:
    """Parse a way from the command line.

    Raises:
        argparse.ArgumentTypeError: its lookahead isn't a number, is missing, or isn't possible.
    """
    runner, fixed, lookahead = text.partition("@")
    takes = PEERS[runner].lookahead if runner in PEERS else "may"
    if fixed and takes == "no":
        raise argparse.ArgumentTypeError(f"{runner} takes no number after @: {text}")
    if fixed and not lookahead.isdecimal():
        raise argparse.ArgumentTypeError(f"{runner} takes a whole number after @: {text}")
    if takes == "must" and not fixed:
        raise argparse.ArgumentTypeError(f"{runner} needs the number of tokens to propose, as in {runner}@4")
    if runner in (PLAIN, FREE):
        lookahead = "0"
    return Way(text, runner, int(lookahead) if lookahead else None)


@dataclass(frozen=True)
class Bench:
    """Runs each way, with models by drafters, and peers' processes by (name, whether for batches).

    lengths: numbers of tokens of a case's plain answers, for the peers.
    """

    models: dict[str, ovspec.LanguageModel]
    workers: dict[tuple[str, bool], Worker]
    tokens: int
    lengths: dict[Case, list[int]] = field(default_factory=dict)

    def warm_up(self, prompt: Prompt, ways: list[Way], batches: set[int]) -> None:
        ids = self.models[PLAIN].encode(prompt.content).tolist()
        for way, batch, temperature in product(ways, batches, (0.0, 1.0)):
            case = Case(prompt.name, 0, batch, temperature, "compare", 0)
            if way.takes(case):
                self.text(way, case, [ids] * batch, [min(WARM_UP, self.tokens)] * batch)
        for model in self.models.values():
            model.use_large_pages()

    def turn(self, case: Case, ways: list[Way]) -> Turn:
        """Generate the texts of a case in each of ``ways``, in turns."""
        ids = self.prompt_ids(case)
        lengths = [self.tokens] * case.batch
        if any(way.is_peer or way.runner == FREE for way in ways):
            alike = case if case.temperature else replace(case, turn=0)  # greedy turns have the same texts
            if alike not in self.lengths:
                answers = self.models[PLAIN].generate(ids, **self.options(case, self.tokens))
                self.lengths[alike] = [len(answer.token_ids) for answer in answers]
            lengths = self.lengths[alike]
        first = case.turn + [prompt.name for prompt in prompts()].index(case.prompt)
        texts = {way.name: self.text(way, case, ids, lengths) for way in rotate_modes(ways, first)}
        return Turn(case, sum(map(len, ids)), texts)

    def prompt_ids(self, case: Case) -> list[list[int]]:
        model = self.models[PLAIN]
        first = prompt_named(case.prompt)
        same = [prompt for prompt in prompts() if prompt.kind == first.kind]
        rows = [same[(same.index(first) + i) % len(same)] for i in range(case.batch)]
        return [with_context(model.tokenizer, model.encode(row.content).tolist(), case.context) for row in rows]

    def options(self, case: Case, tokens: int) -> dict[str, Any]:
        prompt = prompt_named(case.prompt)
        options: dict[str, Any] = {"temperature": case.temperature, "seed": case.turn + 1, "top_k": 0}
        options |= {"accept": case.accept, "max_tokens": tokens, "batch_size": case.batch}
        if prompt.kind == "JSON":
            return options | {"json_schema": prompt.schema}
        return options | {"ignore_eos": prompt.kind not in CHAT_KINDS}

    def text(self, way: Way, case: Case, ids: list[list[int]], lengths: list[int]) -> Text:
        if way.is_peer:
            request: dict[str, Any] = {"prompts": ids, "max_tokens": max(lengths), "lengths": lengths}
            request |= {"k": way.lookahead, "temperature": case.temperature, "seed": case.turn + 1}
            answer = self.workers[way.runner, case.batch > 1].answer(request)
            return Text(answer["tokens"], answer["seconds"], answer["ttft_ms"], answer["tpot_ms"])
        options = self.options(case, max(lengths))
        if way.runner == FREE:
            options |= {"json_schema": None, "ignore_eos": True, "max_tokens": max(2, *lengths)}
        if way.lookahead is not None:
            options["lookahead"] = way.lookahead
        return text_of(self.models[way.runner].generate(ids, **options))


def text_of(results: list[ovspec.Result]) -> Text:
    stats = [result.stats for result in results]
    later_tokens = sum(text.generated_tokens - 1 for text in stats)
    decoding_ms = max(text.tpot_ms * (text.generated_tokens - 1) for text in stats)
    seconds = max(text.ttft_ms + text.tpot_ms * (text.generated_tokens - 1) for text in stats) / 1e3
    return Text(
        [result.token_ids for result in results],
        seconds,
        max(text.ttft_ms for text in stats),
        decoding_ms / later_tokens if later_tokens else None,
        *totals(results, "rounds", "proposed", "accepted", "reached", "forced"),
    )


def load_models(folder: Path, ways: Iterable[Way], drafts: dict[str, str], arithmetic: Any) -> dict[str, Any]:
    """Load the model for each way except peers. Ways with a head don't share it: it gets additional outputs."""
    by_draft = dict[str | None, ovspec.LanguageModel]()
    by_way = dict[str, ovspec.LanguageModel]()
    for runner in dict.fromkeys([PLAIN, *(way.runner for way in ways if not way.is_peer)]):
        drafters = [] if runner in (PLAIN, FORCED, FREE) else runner.split(",")
        named = next((name for name in drafters if name != LOOKUP), None)
        draft = named and drafts.get(named, named)
        if draft not in by_draft:
            load = [LOOKUP, *([draft] if draft else ())]
            by_draft[draft] = ovspec.load(folder, load, arithmetic=arithmetic, cache_memory=0)
        model = by_draft[draft]
        choice = model.runtime.models.draft_choice
        chosen = choice.model if draft and choice else None
        by_way[runner] = model.with_drafters(DraftChoice(lookup=LOOKUP in drafters, model=chosen) or None)
    return by_way


def start_peer(name: str, together: bool, args: Any, drafts: dict[str, str], scratch: Path) -> Worker:
    """Start a peer's process; raises RuntimeError if it can't be used here."""
    peer = PEERS[name]
    target = args.model
    draft = drafts.get(name)
    options = dict(peer.options)
    if name.endswith("-head") and not draft:
        raise RuntimeError(f"{name} needs --draft {name}=PATH")
    if name == "ovspec-before" and not args.against:
        raise RuntimeError(f"{name} needs --against CHECKOUT")
    if peer.files != "ir" and not args.checkpoint:
        raise RuntimeError(f"{name} needs --checkpoint, what MODEL was exported from")
    if peer.files != "ir":
        target = gguf_of(args.checkpoint) if peer.files == "gguf" else args.checkpoint
    if peer.worker == "llamacpp":
        options |= {"threads": psutil.cpu_count(logical=False), "server": str(server_of_llamacpp())}
    if together and peer.worker == "genai":
        options["batches"] = True
    if name == "genai-head":
        draft = str(with_its_layers(Path(str(draft)), drafts.get("head"), scratch))
    setup = {"target": str(target), "draft": draft, "mode": peer.mode, "options": options}
    worker = Worker(peer.worker, setup, checkout=args.against.resolve() if name == "ovspec-before" else ROOT)
    if "error" in worker.ready:
        raise RuntimeError(f"{name}: {worker.ready['error']}")
    return worker


def with_its_layers(head: Path, ours: str | None, scratch: Path) -> Path:
    """Write a head's layers into its IR for openvino-genai; genai's default is the outputs of 2, N/2 and N-3."""
    if not ours:
        raise RuntimeError("genai-head needs --draft head=PATH, which knows its layers")
    model = read_openvino_model(head)
    model.set_rt_info(
        [layer - 1 for layer in read_target_layers(read_openvino_model(Path(ours)))], ["hidden_layers_list"]
    )
    copy = Path(tempfile.mkdtemp(dir=scratch))  # a copy per process
    shutil.copytree(head, copy, ignore=shutil.ignore_patterns("openvino_model.*"), dirs_exist_ok=True)
    ov.save_model(model, copy / MODEL_FILE, compress_to_fp16=False)
    return copy


# ---------------------------------------------------------------- tables


def tables_of(log: Log) -> Iterator[tuple[str, Figures]]:
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
    for title, figures in tables_of(log):
        columns = {kind: figures.of(lambda prompt, kind=kind: prompt.kind == kind) for kind in KINDS}
        columns["for judging"] = figures.of(lambda prompt: prompt.judge)
        columns["others"] = figures.of(lambda prompt: not prompt.judge)
        columns = {name: column for name, column in columns.items() if column.turns}
        ways = list(dict.fromkeys(way for turn in figures.turns for way in turn.texts))
        ways.sort(key=lambda way: (way != PLAIN, way.partition("@")[0] in PEERS))
        print(f"\n{title}:\n")
        table = Table("way", "ms a token", *columns, "accepted", "equal texts")
        table.row(PLAIN, figures.ms(PLAIN))
        for way in ways[1:]:
            speeds = (column.speed(way) for column in columns.values())
            table.row(way, figures.ms(way), *speeds, figures.accepted(way), figures.equal(way))
        for heading in RATES:
            rows = {way: [column.rate(way, heading) for column in columns.values()] for way in ways}
            rows = {way: cells for way, cells in rows.items() if way != PLAIN and any(cells)}
            if rows:
                print(f"\n{heading}:\n")
                table = Table("way", *columns)
                for way, cells in rows.items():
                    table.row(way, *cells)
    print("\nMilliseconds per token of the prompt, until the first token:\n")
    alone = Figures([turn for turn in log.turns if turn.case.batch == 1 and not turn.case.temperature])
    peers = [peer for peer in PEERS if any(peer in turn.texts for turn in alone.turns)]
    table = Table("kind", "tokens", "plain", *peers)
    for kind in KINDS:
        figures = alone.of(lambda prompt, kind=kind: prompt.kind == kind)
        if figures.turns:
            table.row(kind, figures.prompt_tokens(), *(figures.prompt_ms(way) for way in (PLAIN, *peers)))


# ---------------------------------------------------------------- the command


def named_path(text: str) -> tuple[str, str]:
    name, path = text.split("=", 1)
    return name, path


def cases_of(args: Any) -> Iterator[Case]:
    """Yield the requested cases, turn by turn. Batches begin with the first prompt of a kind."""
    chosen = [prompt for prompt in prompts() if prompt.kind in args.kinds and prompt.number <= args.prompts]
    for turn, prompt in product(range(args.turns), chosen):
        for context, batch, temperature in product(args.contexts, args.batches, args.temperatures):
            if batch == 1 or prompt.number == 1:
                for accept in args.accept if temperature else ["compare"]:
                    yield Case(prompt.name, context, batch, temperature, accept, turn)


def unmeasured(log: Log, cases: Iterable[Case], ways: list[Way]) -> dict[Case, list[Way]]:
    """Return each case's missing ways, with plain decoding as the first."""
    plain, *others = ways
    missing = dict[Case, list[Way]]()
    for case in cases:
        measured = log.has(case)
        new = [way for way in others if way.takes(case) and way.name not in measured]
        if new or not measured:
            missing[case] = [plain, *new]
    return missing


def measure(log: Log, missing: dict[Case, list[Way]], args: Any, drafts: dict[str, str]) -> None:
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ways = dict.fromkeys(way for each_ways in missing.values() for way in each_ways)
        peers = {(way.runner, case.batch > 1) for case, ways in missing.items() for way in ways if way.is_peer}
        workers = {peer: stack.enter_context(start_peer(*peer, args, drafts, scratch)) for peer in sorted(peers)}
        bench = Bench(load_models(args.model, ways, drafts, args.arithmetic), workers, args.tokens)
        first = prompt_named(next(iter(missing)).prompt)
        bench.warm_up(first, list(ways), {case.batch for case in missing})
        for place, (case, case_ways) in enumerate(missing.items(), 1):
            title = f"turn {case.turn + 1}, {case.prompt}, {', '.join(map(str, case.group))}"
            print(f"{place} of {len(missing)}: {title}", file=sys.stderr, flush=True)
            log.add(bench.turn(case, case_ways))


def main() -> None:
    args = arguments(
        __doc__,
        "model",
        out=Option(Path, "the file of the turns", required=True),
        ways=Option([way_of(LOOKUP)], kind=way_of, separator=" "),
        draft=Option([], "NAME=PATH", kind=named_path, separator=" "),
        checkpoint=Option(Path, "what MODEL was exported from, for llamacpp"),
        against=Option(Path, "the checkout of ovspec-before"),
        kinds=Option(CHAT_KINDS, choices=KINDS),
        prompts=Option(2, "of each kind"),
        documents=Option(Path, "the documents.jsonl of 'ovspec distill --work DIR'"),
        turns=3,
        tokens=Option(64, "of an answer, at most"),
        contexts=Option([0], "least tokens of a prompt"),
        batches=Option([1], "chats that are answered together"),
        temperatures=[0.0, 1.0],
        accept=Option(["compare"], choices=("compare", "rejection")),
        arithmetic=Option("exact", choices=("exact", "fast")),
        isa=ISA,
    )
    cap(args.isa)
    if args.documents:
        add_held_out(args.documents, args.prompts)
    ways = [way_of(PLAIN), *(way for way in args.ways if way.name != PLAIN)]
    drafts = {name: str(Path(path).resolve()) for name, path in args.draft}
    about = {
        "model": str(args.model.resolve()),
        "tokens": args.tokens,
        "machine": machine().rpartition(", ")[0],  # without the month
        "isa": describe_instruction_set(),
        "arithmetic": args.arithmetic,
        "draft": drafts,
        "documents": args.documents and str(args.documents.resolve()),
    }
    log = Log(args.out, about)
    if missing := unmeasured(log, cases_of(args), ways):
        measure(log, missing, args, drafts)
    print(f"{args.model.name} on {machine()}, {describe_instruction_set()}\n")
    print_tables(log)


if __name__ == "__main__":
    try:
        main()
    except (OvspecError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped; the same command goes on.")
