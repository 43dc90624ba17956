"""What a model writes itself, for a head or a draft to learn from: questions and its answers, or continuations."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.engine.decoders import NO_LOOKAHEAD
from ovspec.engine.prompts import PromptEncoder
from ovspec.engine.results import Piece
from ovspec.engine.row import Row
from ovspec.engine.runtime import Runtime
from ovspec.engine.scheduler import BatchLimits, Scheduler
from ovspec.ir.memory import count_free_tokens
from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import Message
from ovspec_export.channel import is_stop_requested, report_progress
from ovspec_export.distill.documents import (
    MAX_DOCUMENT_TOKENS,
    Document,
    SeenRuns,
    append_documents,
    compute_checksum,
    create_documents,
    encode_open_chats,
    is_held_out,
    is_looping,
    make_user_documents,
    read_documents,
    read_user_texts,
)
from ovspec_export.distill.work_folder import DOCUMENTS_FILE

MAX_QUESTION_TOKENS, MAX_ANSWER_TOKENS = 160, 320  # tokens
MAX_ROWS = 64  # rows; twice as many gain a twelfth, and end twice as late
MIN_ROWS, INTENDED_ROUNDS = 8, 120  # the rows are as many as leave time for so many rounds
WRITE_SECONDS = 5.0  # seconds after which documents are written
BEGINNING_TOKENS = 32  # tokens of a text that the model draws before it goes on
PREFIX_TOKENS = (32, 128)  # tokens of the user's texts, at least and at most, that the model continues
MIN_UNFINISHED_TOKENS = 32  # tokens from which on an answer is kept when the time is over
LOOP_CHECK_TOKENS = 64  # tokens after which an answer is searched for a loop again
PROMPT_KEY_TOKENS = 256  # last tokens of a prompt, which tell it from others
# The texts may differ at near-ties from what the user's settings give, but are written half again as fast.
LOAD_SETTINGS: dict[str, Any] = {
    "arithmetic": "fast",
    "kv_precision": "u8",
    "properties": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "128"},
    "tune": False,
}
USER_PLACEHOLDER = "Xq7zv"  # stands for what a user says
TOPIC_OPENING = "I have a question about {}: "
# Without a system message a small model invents more noise than questions; None is the template's own.
SYSTEM_MESSAGES = (
    None,
    "You are a programmer. You write code and explain it.",
    None,
    "You are a helpful assistant. Answer briefly.",
    None,
    "You are a writer who edits and corrects texts.",
)


def write_texts(
    model: str,
    work: str,
    seconds: float,
    tokens: float,
    texts: Sequence[str] = (),
    topics: Sequence[str] = (),
    seed: int = 0,
    batch: int = MAX_ROWS,
    question: int = MAX_QUESTION_TOKENS,
    answer: int = MAX_ANSWER_TOKENS,
) -> None:
    """Append documents to those in ``work`` for about ``seconds``, or until they have ``tokens`` tokens together.

    The first call begins with the user's own. What a later one draws depends on how many tokens there are already, so
    that it repeats nothing.

    Args:
        model: the exported model.
        work: the work folder.
        texts: files and folders of the user's; see ``read_user_texts``.
        topics: what is asked about; by default anything.
        batch: maximum number of texts that are written at a time.
        question, answer: maximum numbers of their tokens.
    """
    began = time.monotonic()
    runtime = ovspec.load(model, "none", **LOAD_SETTINGS).runtime
    file = Path(work) / DOCUMENTS_FILE
    user_texts = read_user_texts(texts)
    seen = SeenRuns()
    if file.is_file():
        documents = read_documents(file)
        for document in documents:
            seen.add_runs(document.ids)
    else:
        documents = make_user_documents(user_texts, runtime.prompt_encoder, seen)
        create_documents(file, documents)
    count = len(documents)
    total = sum(len(document.ids) for document in documents)
    report_progress(tokens=total, per_second=0, documents=count, skipped=user_texts.skipped)
    prompts = select_unanswered(encode_open_chats(user_texts, runtime.prompt_encoder), documents, runtime)
    prompt_source = make_prompt_source(runtime.prompt_encoder, topics, seen, question)
    writer = TextWriter(runtime, prompt_source, seen, documents, prompts, seed + total, answer)
    before = total
    since = time.monotonic()
    can_train = False

    def is_over() -> bool:
        elapsed = time.monotonic() - began
        # A job that ends with nothing to learn from is lost time.
        if is_stop_requested() or total >= tokens:
            return True
        return elapsed > seconds * (1 if can_train or writer.has_answer_to_keep else 2)

    for written in writer.write_documents(is_over, batch, seconds - (time.monotonic() - began)):
        append_documents(file, written)
        can_train = can_train or not all(document.held_out for document in written)
        count = count + len(written)
        total = total + sum(len(document.ids) for document in written)
        speed = (total - before) / (time.monotonic() - since)
        report_progress(tokens=total, per_second=speed, documents=count, begun=writer.running_tokens)


# ---------------------------------------------------------------- what is answered or continued


@dataclass(frozen=True)
class Prompt:
    """What the model answers or continues."""

    ids: list[int]
    held_out: bool


@dataclass(frozen=True)
class Lead:
    """A beginning with which the model goes on until it has asked something, or begun a text.

    options: how it goes on.
    system, effort: of the chat in which it asks.
    """

    ids: list[int]
    options: dict[str, Any]
    system: str | None = None
    effort: str | None = None


def make_prompt_source(
    prompts: PromptEncoder, topics: Sequence[str], seen: SeenRuns, most: int
) -> QuestionSource | BeginningSource:
    """Return what makes prompts: questions, unless the model has no chat template that shows what a user says."""
    try:
        split_at_user_text(prompts.chat_format, None)
    except OvspecError:
        return BeginningSource(prompts, seen)
    return QuestionSource(prompts, topics, seen, most)


class QuestionSource:
    """Lets the model ask, by going on with an empty turn of the user (Magpie, arXiv 2406.08464)."""

    def __init__(self, prompts: PromptEncoder, topics: Sequence[str], seen: SeenRuns, most: int) -> None:
        self._prompts, self._topics, self._seen, self._most = prompts, topics, seen, most
        self._systems = SYSTEM_MESSAGES if prompts.chat_format.takes_system and not topics else (None,)
        self._asked = self._ended = 0
        self._leads = functools.cache(self._make_lead)

    def draw_lead(self, draws: np.random.Generator) -> Lead:
        system = self._systems[int(draws.integers(len(self._systems)))]
        topic = self._topics[int(draws.integers(len(self._topics)))] if self._topics else None
        # Where the template can be told how much to think, half of the answers think less.
        return self._leads(system, topic, "none" if draws.integers(2) else None)

    def _make_lead(self, system: str | None, topic: str | None, effort: str | None) -> Lead:
        tokenizer = self._prompts.tokenizer
        opening = TOPIC_OPENING.format(topic) if topic else ""
        before, after = split_at_user_text(self._prompts.chat_format, system, opening)
        stop_ids, stop = find_turn_end(after, tokenizer.added_tokens)
        options = {"temperature": 1.0, "top_p": 0.95, "max_tokens": self._most, "stop_ids": stop_ids, "stop": stop}
        return Lead(tokenizer.encode(before, special=False).tolist(), options, system, effort)

    def make_prompt(self, lead: Lead, row: Row) -> Prompt | None:
        """Return what the model has asked; None if it is no question, or was asked before."""
        tokenizer = self._prompts.tokenizer
        text = row.text.strip()
        ended = row.finish_reason != "length"
        tokens = row.token_ids[:-1] if ended else row.token_ids
        self._asked = self._asked + 1
        self._ended = self._ended + ended
        if not ended and self._ended > self._asked / 4:  # few models end hardly any question
            return None
        written = "".join(map(tokenizer.token_text, tokens))
        if not text or is_looping(tokens) or tokenizer.contains_special_name(written):
            return None
        try:
            question = tokenizer.encode(text, special=False).tolist()
            ids = self._prompts.encode(make_chat(text, lead.system), reasoning_effort=lead.effort).tolist()
        except OvspecError:  # the text is strange, or the template takes too long on a busy machine
            return None
        if self._seen.is_near_duplicate(question):
            return None
        self._seen.add_runs(question)
        return Prompt(ids, is_held_out(question))


class BeginningSource:
    """Lets the model begin texts, if it has no chat template."""

    def __init__(self, prompts: PromptEncoder, seen: SeenRuns) -> None:
        tokenizer = prompts.tokenizer
        config = prompts.generation_config
        self._bos = tokenizer.prefix_ids
        self._seen = seen
        # A text begins behind BOS or, without one, behind the end of another text, or on a new line.
        start = config.bos_ids.tolist() or sorted(config.eos_ids)[:1] or tokenizer.encode("\n", special=False).tolist()
        self._lead = Lead(start, {"temperature": 1.0, "max_tokens": BEGINNING_TOKENS})

    def draw_lead(self, draws: np.random.Generator) -> Lead:
        del draws
        return self._lead

    def make_prompt(self, lead: Lead, row: Row) -> Prompt | None:
        """Return what the model has begun; None if it has ended it, or has begun like this before."""
        del lead
        if row.finish_reason != "length" or is_looping(row.token_ids) or self._seen.is_near_duplicate(row.token_ids):
            return None
        self._seen.add_runs(row.token_ids)
        return Prompt([*self._bos, *row.token_ids], is_held_out(row.token_ids))


def make_chat(text: str, system: str | None) -> list[Message]:
    user_message = {"role": "user", "content": text}
    if not system:
        return [user_message]
    return [{"role": "system", "content": system}, user_message]


def split_at_user_text(format: ChatFormat, system: str | None, lead: str = "") -> tuple[str, str]:
    """Return what a template writes before what a user says, and after it; the user begins with ``lead``.

    Raises:
        OvspecError: the template can't render that, or doesn't show what a user says.
    """
    prompt = format.render_prompt(make_chat(lead + USER_PLACEHOLDER, system))
    before, placeholder, after = prompt.partition(USER_PLACEHOLDER)
    if not placeholder:
        raise OvspecError("The model's chat template doesn't show what a user says.")
    return before.rstrip(" "), after  # most vocabularies have words with the space before them


def find_turn_end(after: str, added: Mapping[str, int]) -> tuple[list[int], list[str]]:
    """Return the ids and the strings that end a user's turn: what the template writes first after it.

    added: the ids of tokens that the vocabulary has for names, such as "<|im_end|>".
    """
    places = {name: after.find(name) for name in added if name.strip() and name in after}
    first = min(places, key=lambda name: (places[name], -len(name)), default="")
    text = (after[: places[first]] if first else after).strip()
    if text:
        return [], [text]
    if first:
        return [added[first]], []
    return [], []


def select_unanswered(prompts: Iterable[list[int]], documents: Iterable[Document], runtime: Runtime) -> list[Prompt]:
    """Return the user's prompts that have no answer yet, and that the model's context has room for."""
    done = {compute_checksum(document.ids[: document.answer][-PROMPT_KEY_TOKENS:]) for document in documents}
    room = runtime.models.target.ir.context_length or np.inf
    left = (ids for ids in prompts if len(ids) < room and compute_checksum(ids[-PROMPT_KEY_TOKENS:]) not in done)
    return [Prompt(ids, is_held_out(ids)) for ids in left]


# ---------------------------------------------------------------- writing


@dataclass(frozen=True)
class RunningText:
    """A text that is being written: what the model asks after a ``Lead``, or answers to a ``Prompt``."""

    row: Row
    start: Lead | Prompt
    greedy: bool


class TextWriter:
    """Keeps a batch full of questions and answers, and makes documents of the answers.

    Args:
        documents: those so far; the model continues pieces of what the user gave.
        prompts: what is answered first.
        number: of the first text. What is drawn for a text follows from its number.
        answer: maximum number of tokens of an answer.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompt_source: QuestionSource | BeginningSource,
        seen: SeenRuns,
        documents: Iterable[Document],
        prompts: Iterable[Prompt],
        number: int,
        answer: int,
    ) -> None:
        self._runtime, self._prompt_source, self._seen, self._answer = runtime, prompt_source, seen, answer
        self._user_documents = [
            document for document in documents if document.source != "own" and len(document.ids) > PREFIX_TOKENS[0]
        ]
        self._ready = deque(prompts)
        self._number = number
        self._running: dict[int, RunningText] = {}  # by the scheduler's number of its row
        self._written: list[Document] = []

    def write_documents(self, is_over: Callable[[], bool], batch: int, seconds: float) -> Iterator[list[Document]]:
        """Yield documents every few seconds until ``is_over`` says so, which should be after ``seconds``."""
        decoders = self._runtime.decoder_pool.acquire()
        models = self._runtime.models
        limits = BatchLimits(batch, count_free_tokens(models.compiled_irs(), batch, models.idle_bytes))
        scheduler = Scheduler(decoders.target, None, NO_LOOKAHEAD, (), limits)
        rows = min(batch, MIN_ROWS)
        costs = deque[float](maxlen=16)
        since = time.monotonic()
        try:
            while not is_over():
                while len(self._running) < rows:
                    running = self._start_text()
                    self._running[scheduler.queue.add_row(running.row)] = running
                began = time.monotonic()
                pieces = scheduler.step() or []
                now = time.monotonic()
                costs.append((now - began) / max(1, len(pieces)))
                rows = int(min(batch, max(MIN_ROWS, seconds / INTENDED_ROUNDS / median(costs))))
                scheduler.remove_rows(self._collect_ended(pieces))
                if now - since > WRITE_SECONDS:
                    yield self._hand_over()
                    since = now
            for running in self._running.values():
                if isinstance(running.start, Prompt) and len(running.row.token_ids) >= MIN_UNFINISHED_TOKENS:
                    self._keep_answer(running, running.start)
            self._running = {}
            yield self._hand_over()
        finally:
            self._runtime.decoder_pool.release(decoders)

    @property
    def running_tokens(self) -> int:
        """The tokens of texts that are being written."""
        return sum(len(running.row.token_ids) for running in self._running.values())

    @property
    def has_answer_to_keep(self) -> bool:
        """Whether a text that is being written would be kept, and learned from, if the time were over."""
        return any(
            isinstance(text.start, Prompt)
            and not text.start.held_out
            and len(text.row.token_ids) >= MIN_UNFINISHED_TOKENS
            for text in self._running.values()
        )

    def _start_text(self) -> RunningText:
        """Return the next text, not begun yet: an answer, if there is something to answer, or a question."""
        draws = np.random.default_rng(self._number)
        greedy = bool(draws.integers(2))
        seed = self._number
        self._number += 1
        if self._ready:
            after = self._ready.popleft()
        elif self._user_documents and draws.integers(2):
            after = self._draw_prompt(draws)
        else:
            lead = self._prompt_source.draw_lead(draws)
            return RunningText(self._make_row(lead.ids, seed=seed, **lead.options), lead, False)
        options = {"temperature": 0.0 if greedy else 1.0, "max_tokens": self._answer}
        return RunningText(self._make_row(after.ids, seed=seed, **options), after, greedy)

    def _draw_prompt(self, draws: np.random.Generator) -> Prompt:
        """Return a prompt that the user gave an answer to, or a piece of a text, to be continued by the model."""
        document = self._user_documents[int(draws.integers(len(self._user_documents)))]
        bos = self._runtime.prompt_encoder.tokenizer.prefix_ids
        if document.answer:
            return Prompt(document.ids[: document.answer], document.held_out)
        body = document.ids
        if body[: len(bos)] == bos:
            body = body[len(bos) :]
        length = min(int(draws.integers(PREFIX_TOKENS[0], PREFIX_TOKENS[1] + 1)), len(body))
        start = int(draws.integers(len(body) - length + 1))
        return Prompt([*bos, *body[start : start + length]], document.held_out)

    def _make_row(self, ids: list[int], **options: Any) -> Row:
        [row] = self._runtime.row_maker.make_rows(ids, self._runtime.row_maker.make_complete_params(options))  # type: ignore[arg-type]
        return row

    def _collect_ended(self, pieces: Iterable[tuple[int, Piece]]) -> list[int]:
        """Take the texts that have ended; return the numbers of those that have got into a loop, which end now."""
        looping = list[int]()
        for number, piece in pieces:
            running = self._running[number]
            row = running.row
            after = running.start
            if not piece.finish_reason:
                if len(row.token_ids) % LOOP_CHECK_TOKENS or not row.token_ids or not is_looping(row.token_ids):
                    continue
                looping.append(number)
            elif isinstance(after, Prompt):
                self._keep_answer(running, after)
            elif prompt := self._prompt_source.make_prompt(after, row):
                self._ready.append(prompt)
            del self._running[number]
        return looping

    def _keep_answer(self, running: RunningText, prompt: Prompt) -> None:
        """Make a document of an answer, unless it loops or is a near-duplicate."""
        tokens = running.row.token_ids
        if is_looping(tokens) or self._seen.is_near_duplicate(tokens):
            return
        ids = [*prompt.ids, *tokens]
        self._seen.add_runs(ids)
        answer = max(0, min(len(prompt.ids), MAX_DOCUMENT_TOKENS - len(tokens)))
        self._written.append(Document(ids[-MAX_DOCUMENT_TOKENS:], answer, "own", running.greedy, prompt.held_out))

    def _hand_over(self) -> list[Document]:
        written = self._written
        self._written = []
        return written
