"""Measure what a grammar's mask costs per token, with a vocabulary as large as those of today's models.

    python scripts/train/tokenizer.py
    python scripts/bench/grammars.py [--steps N] [--out FILE]
    python scripts/bench/peers/install.py xgrammar llamacpp
    python scripts/bench/grammars.py --peers [NAME ...]

Texts are fed to their grammars token by token: JSON by the schemas of grammars.json, each text indented and compact,
and C by ovspec's own grammar. Each text constructs its grammar again. With --peers, other engines, each in its own
environment, get the same texts in turns, schema by schema; C is included if --gbnf names a grammar for it. The tables
on stdout are Markdown. Use an idle machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from llguidance import LLTokenizer
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE / "peers"))

import peer  # noqa: E402
from grammar_protocol import KINDS, Task, Vocabulary, measured  # noqa: E402
from protocol import Refusal, sentence  # noqa: E402
from worker_llguidance import Matcher, appliers, begin_of, grammar_tokenizer  # noqa: E402

TOKENIZER = ROOT / ".cache" / "bench" / "tokenizer-128k" / "tokenizer.json"
GRAMMARS = ROOT / "demos" / "grammars"
OURS = "llguidance"
PEERS = {"xgrammar": "xgrammar", "llamacpp_grammar": "llamacpp"}  # worker: the peer whose interpreter runs it
peer.INTERPRETERS.update(PEERS)
PEER_SECONDS = 300.0
STYLES: tuple[dict[str, Any], ...] = ({"indent": 2}, {"separators": (",", ":")})


@dataclass(frozen=True)
class Subject:
    """A grammar and texts that it allows. ``kind``: json (a schema) or lark."""

    set: str
    name: str
    kind: str
    source: str
    texts: list[str]


def json_subjects(file: Path) -> list[Subject]:
    """Return a subject for each {name, schema, values} of ``file``."""
    found = []
    for entry in json.loads(file.read_text(encoding="utf-8")):
        texts = [json.dumps(value, ensure_ascii=False, **style) for value in entry["values"] for style in STYLES]
        found.append(Subject("JSON", entry["name"], "json", json.dumps(entry["schema"]), texts))
    return found


def c_subjects(grammar: Path, samples: list[Path]) -> list[Subject]:
    """Return the subject of C in a list, which is empty if the grammar or the samples are missing."""
    if not (grammar.exists() and samples):
        return []
    texts = [sample.read_text(encoding="utf-8") for sample in samples]
    return [Subject("C", grammar.stem, "lark", grammar.read_text(encoding="utf-8"), texts)]


def vocabulary_of(file: Path) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json; its first added token counts as the end of a text."""
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    ids = [*tokenizer["model"]["vocab"].values(), *(added["id"] for added in tokenizer["added_tokens"])]
    return Vocabulary(str(file), max(ids) + 1, tokenizer["added_tokens"][0]["id"])


# ---------------------------------------------------------------- our own figures


def details(tokenizer: LLTokenizer, task: Task) -> dict[str, list[float]]:
    """Return the milliseconds of a matcher's other operations in decoding, and of each way to apply a mask."""
    times: dict[str, list[float]] = {}
    ways = appliers(tokenizer.vocab_size)
    logits = np.random.default_rng(0).normal(size=tokenizer.vocab_size).astype(np.float32)

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        times.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
        return result

    for text in task.texts:
        walk = Matcher(tokenizer, ways["ovspec"], task.kind, task.source)
        matcher = walk.matcher
        for token in text[: task.steps]:
            found = timed("mask as bytes", matcher.compute_bitmask)
            mask = np.frombuffer(found, np.uint8)[: walk.bytes.size]
            for name, way in ways.items():
                timed(f"apply, {name}", lambda way=way, mask=mask: way(logits, mask))
            timed("forced tokens", matcher.compute_ff_tokens)
            matcher.consume_token(token)
            timed("rollback of one", lambda matcher=matcher: matcher.rollback(1))
            timed("accept again", lambda matcher=matcher, token=token: matcher.consume_token(token))
        matcher.reset()
        for token in text[: task.steps]:
            timed("mask, a text again", walk.mask)
            matcher.consume_token(token)
    return times


@dataclass(frozen=True)
class Line:
    """The milliseconds of an operation over all texts of a set."""

    set: str
    engine: str
    operation: str
    count: int
    mean: float
    p50: float
    p99: float
    max: float


def line_of(set: str, engine: str, operation: str, times: list[float]) -> Line:
    p50, p99 = np.percentile(times, [50, 99])
    return Line(set, engine, operation, len(times), float(np.mean(times)), float(p50), float(p99), max(times))


@dataclass
class Bench:
    """What is measured. ``steps``: maximum number of tokens per text.

    Texts are tokenised as ordinary text, so a grammar gets the tokens that a model would mostly choose.
    """

    vocabulary: Vocabulary
    subjects: list[Subject]
    steps: int

    def tasks(self) -> Iterator[tuple[Subject, Task]]:
        tokenizer = Tokenizer.from_file(self.vocabulary.file)
        for subject in self.subjects:
            ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in subject.texts]
            yield subject, Task(subject.kind, subject.source, ids, self.steps)


def slices_of() -> dict[str, list[str] | None]:
    """Return the ways to slice the vocabulary for faster masks; those for JSON only if they aren't the default."""
    ways: dict[str, list[str] | None] = {"default slices": None, "no slices": []}
    if LLTokenizer.json_slices() != LLTokenizer.general_slices():
        ways["JSON slices"] = LLTokenizer.json_slices()
    return ways


def our_lines(bench: Bench) -> Iterator[Line]:
    """Yield all figures of llguidance, for each way to slice the vocabulary."""
    size = bench.vocabulary.size
    for name, slices in slices_of().items():
        before, began = psutil.Process().memory_info().rss, time.perf_counter()
        tokenizer = grammar_tokenizer(bench.vocabulary, slices)
        seconds, grown = time.perf_counter() - began, psutil.Process().memory_info().rss - before
        print(f"{name}: {size} tokens in {seconds:.2f} s, {grown / 1e6:,.0f} MB more", file=sys.stderr, flush=True)
        yield line_of("tokenizer", name, "construct", [seconds * 1e3])
        times: dict[tuple[str, str], list[float]] = {}
        outside: dict[str, int] = {}
        for subject, task in bench.tasks():
            try:
                found = measured(begin_of(tokenizer), task, bench.vocabulary)
            except Refusal as error:
                print(f"{name}, {subject.name}: {sentence(error)}", file=sys.stderr, flush=True)
                continue
            outside[subject.set] = outside.get(subject.set, 0) + found["outside"]
            for operation in KINDS:
                times.setdefault((subject.set, operation), []).extend(found[f"{operation}_ms"])
            if slices is None:
                for operation, values in details(tokenizer, task).items():
                    times.setdefault((subject.set, operation), []).extend(values)
        for (part, operation), values in times.items():
            yield line_of(part, name, operation, values)
        told = ", ".join(f"{part} {count}" for part, count in outside.items())
        print(f"{name}: tokens of the texts that their masks forbid: {told}", file=sys.stderr, flush=True)


def our_table(lines: list[Line]) -> str:
    heads = ("set", "slices", "operation", "count", "mean, ms", "p50", "p99", "max")
    rows = [
        (line.set, line.engine, line.operation, str(line.count), *(f"{value:.4f}" for value in figures_of(line)))
        for line in lines
    ]
    return table_of(heads, rows)


def figures_of(line: Line) -> tuple[float, ...]:
    return line.mean, line.p50, line.p99, line.max


def table_of(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ("---",) * len(heads), *rows))


# ---------------------------------------------------------------- beside peers


@dataclass(frozen=True)
class Answer:
    """An engine's result for a subject: times by operation, or an error."""

    engine: str
    subject: Subject
    times: dict[str, list[float]]
    error: str | None


def peer_answers(bench: Bench, names: list[str], gbnf: str | None) -> Iterator[Answer]:
    """Yield the answers of all engines in turn, subject by subject; a worker that died is restarted for the next."""
    workers = {name: peer.Worker(name, asdict(bench.vocabulary), PEER_SECONDS) for name in (OURS, *names)}
    for name, worker in workers.items():
        print(f"{name}: {worker.ready.get('versions') or worker.ready}", file=sys.stderr, flush=True)
    try:
        for subject, task in bench.tasks():
            for name, worker in workers.items():
                asked = task
                if subject.kind == "lark" and name != OURS:
                    if gbnf is None:
                        continue
                    asked = Task("gbnf", gbnf, task.texts, task.steps)
                if not worker.alive and worker.ready.get("ready"):
                    worker.stop()
                    worker.start()
                yield answer_of(name, subject, worker.ask(asdict(asked)))
    finally:
        for worker in workers.values():
            worker.stop()


def answer_of(engine: str, subject: Subject, answer: dict[str, Any]) -> Answer:
    times = {kind: answer.get(f"{kind}_ms", []) for kind in KINDS}
    print(f"{engine}, {subject.name}: {answer.get('error') or 'measured'}", file=sys.stderr, flush=True)
    return Answer(engine, subject, times, answer.get("error"))


def peer_lines(answers: list[Answer]) -> Iterator[Line]:
    for part, engine in dict.fromkeys((answer.subject.set, answer.engine) for answer in answers):
        for kind in KINDS:
            values = [
                value
                for answer in answers
                if (answer.subject.set, answer.engine) == (part, engine)
                for value in answer.times[kind]
            ]
            if values:
                yield line_of(part, engine, kind, values)


def peer_table(answers: list[Answer], lines: list[Line]) -> str:
    """Return a table of milliseconds; columns without another label are means.

    llama.cpp applies a mask while it computes it, and its construction time excludes the conversion of the schema.
    """
    heads = ("set", "engine", "steps", "construct, p50", "max", "mask", "p50", "p99", "max", "apply", "check", "accept")
    rows = []
    for part, engine in dict.fromkeys((answer.subject.set, answer.engine) for answer in answers):
        found = {line.operation: line for line in lines if (line.set, line.engine) == (part, engine)}
        asked = [answer for answer in answers if (answer.subject.set, answer.engine) == (part, engine)]
        refused = f"{sum(answer.error is not None for answer in asked)} of {len(asked)}"

        def shown(operation: str, name: str = "mean", found: dict[str, Line] = found) -> str:
            return f"{getattr(found[operation], name):.3f}" if operation in found else ""

        mask = [shown("mask", name) for name in ("mean", "p50", "p99", "max")]
        apply = "in the mask" if engine == "llamacpp_grammar" and mask[0] else shown("apply")
        steps = str(found["mask"].count) if "mask" in found else ""
        begin = (part, engine, steps, shown("construct", "p50"), shown("construct", "max"))
        rows.append((*begin, *mask, apply, shown("check"), shown("accept"), refused))
    return table_of((*heads, "refused"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--schemas", type=Path, default=HERE / "grammars.json")
    parser.add_argument("--grammar", type=Path, default=GRAMMARS / "c11.lark", help="grammar of C in Lark's syntax")
    parser.add_argument("--samples", type=Path, nargs="*", default=sorted((GRAMMARS / "samples").glob("*.c")))
    parser.add_argument("--gbnf", type=Path, help="grammar of C in GBNF, for the peers")
    parser.add_argument("--steps", type=int, default=1_000_000, help="maximum number of tokens per text")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="compare with these peers (default: all)")
    parser.add_argument("--out", type=Path, help="write a JSON line for each figure to this file")
    args = parser.parse_args()
    if not args.tokenizer.exists():
        parser.error(f"{args.tokenizer} does not exist; run scripts/train/tokenizer.py")
    subjects = json_subjects(args.schemas)
    bench = Bench(vocabulary_of(args.tokenizer), subjects + c_subjects(args.grammar, args.samples), args.steps)
    if args.peers is None:
        lines = list(our_lines(bench))
        print(our_table(lines))
    else:
        gbnf = args.gbnf.read_text(encoding="utf-8") if args.gbnf else None
        answers = list(peer_answers(bench, args.peers or list(PEERS), gbnf))
        lines = list(peer_lines(answers))
        print(peer_table(answers, lines))
        errors = [f"- {answer.engine}, {answer.subject.name}: {answer.error}" for answer in answers if answer.error]
        print("\n".join(["", *errors]))
    if args.out:
        args.out.write_text("".join(json.dumps(asdict(line)) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
