"""The model's own texts, for a head or a draft to learn from: questions and its answers, or continuations."""

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
    SeenTokenRuns,
    append_documents,
    compute_tokens_checksum,
    encode_unanswered_chats,
    is_held_out,
    is_looping,
    make_user_documents,
    read_documents,
    read_user_texts,
    write_first_documents,
)
from ovspec_export.distill.work_folder import DOCUMENTS_FILE

MAX_QUESTION_TOKENS, MAX_ANSWER_TOKENS = 160, 320  # tokens
MAX_ROWS = 64  # rows; twice as many gain a twelfth, and finish twice as late
MIN_ROWS, INTENDED_ROUNDS = 8, 120  # as many rows as leave time for so many rounds
WRITE_SECONDS = 5.0  # seconds between writes of documents
BEGINNING_TOKENS = 32  # tokens sampled by the model at the start of a text
PREFIX_TOKENS = (32, 128)  # minimum and maximum tokens of the user's texts for the model to continue
MIN_UNFINISHED_TOKENS = 32  # minimum tokens of an unfinished answer to keep it when time is up
LOOP_CHECK_TOKENS = 64  # tokens between searches for a loop in an answer
PROMPT_KEY_TOKENS = 256  # last tokens of a prompt, as its identity
# The texts may differ at near-ties from generation with the user's settings, but are written half again as fast.
LOAD_SETTINGS: dict[str, Any] = {
    "arithmetic": "fast",
    "kv_precision": "u8",
    "properties": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "128"},
    "tune": False,
}
USER_PLACEHOLDER = "Xq7zv"  # placeholder for the user's text
TOPIC_OPENING = "I have a question about {}: "
# Without a system message a small model produces more noise than questions; None is the template's own.
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
    work_folder: str,
    seconds: float,
    tokens: float,
    texts: Sequence[str] = (),
    topics: Sequence[str] = (),
    seed: int = 0,
    max_rows: int = MAX_ROWS,
    max_question_tokens: int = MAX_QUESTION_TOKENS,
    max_answer_tokens: int = MAX_ANSWER_TOKENS,
) -> None:
    """Append documents to ``work_folder`` for about ``seconds``, or until they have ``tokens`` in all.

    The first call starts with the user's own. A later call's samples depend on the number of existing tokens, so
    nothing repeats.

    Args:
        model: the exported model.
        texts: files and folders of the user's; see ``read_user_texts``.
        topics: topics of questions; by default any.
        max_rows: maximum batch size.
        max_question_tokens, max_answer_tokens: per question, and per answer.
    """
    began = time.monotonic()
    runtime = ovspec.load(model, "none", **LOAD_SETTINGS).runtime
    documents_file = Path(work_folder) / DOCUMENTS_FILE
    user_texts = read_user_texts(texts)
    seen_runs = SeenTokenRuns()
    if documents_file.is_file():
        documents = read_documents(documents_file)
        for document in documents:
            seen_runs.add_runs(document.ids)
    else:
        documents = make_user_documents(user_texts, runtime.prompt_encoder, seen_runs)
        write_first_documents(documents_file, documents)
    document_count = len(documents)
    total_tokens = sum(len(document.ids) for document in documents)
    report_progress(tokens=total_tokens, per_second=0, documents=document_count, skipped=user_texts.skipped_files)
    unanswered_prompts = select_unanswered_prompts(
        encode_unanswered_chats(user_texts, runtime.prompt_encoder), documents, runtime
    )
    own_prompt_source = make_own_prompt_source(runtime.prompt_encoder, topics, seen_runs, max_question_tokens)
    writer = TextWriter(
        runtime, own_prompt_source, seen_runs, documents, unanswered_prompts, seed + total_tokens, max_answer_tokens
    )
    initial_tokens = total_tokens
    writing_began = time.monotonic()
    can_train = False

    def is_writing_over() -> bool:
        elapsed = time.monotonic() - began
        # A job without a document to train on would be lost time, so it may take twice as long.
        if is_stop_requested() or total_tokens >= tokens:
            return True
        return elapsed > seconds * (1 if can_train or writer.has_answer_to_keep else 2)

    for new_documents in writer.write_documents(is_writing_over, max_rows, seconds - (time.monotonic() - began)):
        append_documents(documents_file, new_documents)
        can_train = can_train or not all(document.held_out for document in new_documents)
        document_count = document_count + len(new_documents)
        total_tokens = total_tokens + sum(len(document.ids) for document in new_documents)
        tokens_per_second = (total_tokens - initial_tokens) / (time.monotonic() - writing_began)
        report_progress(
            tokens=total_tokens, per_second=tokens_per_second, documents=document_count, begun=writer.unfinished_tokens
        )


# ---------------------------------------------------------------- prompts to answer or continue


@dataclass(frozen=True)
class Prompt:
    """A prompt for the model to answer or continue."""

    ids: list[int]
    held_out: bool


@dataclass(frozen=True)
class PromptOpening:
    """The start of a question or a text; the model continues it to its end.

    row_options: its generating options.
    system, effort: of the chat it asks in.
    """

    ids: list[int]
    row_options: dict[str, Any]
    system: str | None = None
    effort: str | None = None


def make_own_prompt_source(
    prompt_encoder: PromptEncoder, topics: Sequence[str], seen_runs: SeenTokenRuns, max_question_tokens: int
) -> SelfAskedPrompts | SelfBegunPrompts:
    """Return a source of prompts: questions, if the model has a chat template showing the user's text."""
    try:
        split_at_user_text(prompt_encoder.chat_format, None)
    except OvspecError:
        return SelfBegunPrompts(prompt_encoder, seen_runs)
    return SelfAskedPrompts(prompt_encoder, topics, seen_runs, max_question_tokens)


class SelfAskedPrompts:
    """Makes the model ask, by continuing an empty turn of the user (Magpie, arXiv 2406.08464)."""

    def __init__(
        self, prompt_encoder: PromptEncoder, topics: Sequence[str], seen_runs: SeenTokenRuns, max_question_tokens: int
    ) -> None:
        self._prompt_encoder, self._topics, self._seen_runs, self._max_question_tokens = (
            prompt_encoder,
            topics,
            seen_runs,
            max_question_tokens,
        )
        self._system_messages = SYSTEM_MESSAGES if prompt_encoder.chat_format.takes_system and not topics else (None,)
        self._question_count = self._ended_count = 0
        self._make_cached_opening = functools.cache(self._make_opening)

    def draw_opening(self, rng: np.random.Generator) -> PromptOpening:
        system = self._system_messages[int(rng.integers(len(self._system_messages)))]
        topic = self._topics[int(rng.integers(len(self._topics)))] if self._topics else None
        # Where the template can control how much to think, half of the answers think less.
        return self._make_cached_opening(system, topic, "none" if rng.integers(2) else None)

    def _make_opening(self, system: str | None, topic: str | None, effort: str | None) -> PromptOpening:
        tokenizer = self._prompt_encoder.tokenizer
        topic_opening = TOPIC_OPENING.format(topic) if topic else ""
        before_user_text, after_user_text = split_at_user_text(self._prompt_encoder.chat_format, system, topic_opening)
        stop_ids, stop_strings = find_turn_end(after_user_text, tokenizer.added_tokens)
        row_options = {
            "temperature": 1.0,
            "top_p": 0.95,
            "max_tokens": self._max_question_tokens,
            "stop_ids": stop_ids,
            "stop": stop_strings,
        }
        return PromptOpening(tokenizer.encode(before_user_text, special=False).tolist(), row_options, system, effort)

    def make_prompt(self, opening: PromptOpening, row: Row) -> Prompt | None:
        """Return the model's question; None if it isn't a question, or was asked before."""
        tokenizer = self._prompt_encoder.tokenizer
        question_text = row.text.strip()
        is_ended = row.finish_reason != "length"
        question_tokens = row.token_ids[:-1] if is_ended else row.token_ids
        self._question_count = self._question_count + 1
        self._ended_count = self._ended_count + is_ended
        if not is_ended and self._ended_count > self._question_count / 4:  # few models end hardly any question
            return None
        written_text = "".join(map(tokenizer.token_text, question_tokens))
        if not question_text or is_looping(question_tokens) or tokenizer.contains_special_name(written_text):
            return None
        try:
            question_ids = tokenizer.encode(question_text, special=False).tolist()
            prompt_ids = self._prompt_encoder.encode(
                make_chat_messages(question_text, opening.system), reasoning_effort=opening.effort
            ).tolist()
        except OvspecError:  # the text is strange, or the template takes too long on a busy machine
            return None
        if self._seen_runs.is_near_duplicate(question_ids):
            return None
        self._seen_runs.add_runs(question_ids)
        return Prompt(prompt_ids, is_held_out(question_ids))


class SelfBegunPrompts:
    """Makes the model begin texts, if it has no chat template."""

    def __init__(self, prompt_encoder: PromptEncoder, seen_runs: SeenTokenRuns) -> None:
        tokenizer = prompt_encoder.tokenizer
        generation_config = prompt_encoder.generation_config
        self._bos_ids = tokenizer.prefix_ids
        self._seen_runs = seen_runs
        # A text starts after BOS or, without one, after the end of another text, or on a new line.
        start_ids = (
            generation_config.bos_ids.tolist()
            or sorted(generation_config.eos_ids)[:1]
            or tokenizer.encode("\n", special=False).tolist()
        )
        self._opening = PromptOpening(start_ids, {"temperature": 1.0, "max_tokens": BEGINNING_TOKENS})

    def draw_opening(self, rng: np.random.Generator) -> PromptOpening:
        del rng
        return self._opening

    def make_prompt(self, opening: PromptOpening, row: Row) -> Prompt | None:
        """Return the text that the model has begun; None if it has ended it, or has begun like this before."""
        del opening
        if (
            row.finish_reason != "length"
            or is_looping(row.token_ids)
            or self._seen_runs.is_near_duplicate(row.token_ids)
        ):
            return None
        self._seen_runs.add_runs(row.token_ids)
        return Prompt([*self._bos_ids, *row.token_ids], is_held_out(row.token_ids))


def make_chat_messages(text: str, system: str | None) -> list[Message]:
    user_message = {"role": "user", "content": text}
    if not system:
        return [user_message]
    return [{"role": "system", "content": system}, user_message]


def split_at_user_text(chat_format: ChatFormat, system: str | None, user_opening: str = "") -> tuple[str, str]:
    """Return a template's text before and after the user's text; the user's text starts with ``user_opening``.

    Raises:
        OvspecError: the template can't render it, or doesn't show the user's text.
    """
    prompt = chat_format.render_prompt(make_chat_messages(user_opening + USER_PLACEHOLDER, system))
    before_user_text, placeholder, after_user_text = prompt.partition(USER_PLACEHOLDER)
    if not placeholder:
        raise OvspecError(
            "The model's chat template leaves out the user's message; export the model with another `chat_template`."
        )
    return before_user_text.rstrip(" "), after_user_text  # most vocabularies have words with a leading space


def find_turn_end(after_user_text: str, added_tokens: Mapping[str, int]) -> tuple[list[int], list[str]]:
    """Return the ids and the strings to end a user's turn: the beginning of the template's text after it.

    added_tokens: the ids of named tokens in the vocabulary, such as "<|im_end|>".
    """
    name_positions = {
        name: after_user_text.find(name) for name in added_tokens if name.strip() and name in after_user_text
    }
    first_name = min(name_positions, key=lambda name: (name_positions[name], -len(name)), default="")
    end_text = (after_user_text[: name_positions[first_name]] if first_name else after_user_text).strip()
    if end_text:
        return [], [end_text]
    if first_name:
        return [added_tokens[first_name]], []
    return [], []


def select_unanswered_prompts(
    encoded_prompts: Iterable[list[int]], documents: Iterable[Document], runtime: Runtime
) -> list[Prompt]:
    """Return the user's prompts still unanswered and short enough for the model's context."""
    answered_keys = {
        compute_tokens_checksum(document.ids[: document.answer][-PROMPT_KEY_TOKENS:]) for document in documents
    }
    context_length = runtime.models.target.ir.context_length or np.inf
    unanswered_prompts = (
        ids
        for ids in encoded_prompts
        if len(ids) < context_length and compute_tokens_checksum(ids[-PROMPT_KEY_TOKENS:]) not in answered_keys
    )
    return [Prompt(ids, is_held_out(ids)) for ids in unanswered_prompts]


# ---------------------------------------------------------------- writing


@dataclass(frozen=True)
class UnfinishedText:
    """A text in progress: a question from a ``PromptOpening``, or an answer to a ``Prompt``."""

    row: Row
    beginning: PromptOpening | Prompt
    greedy: bool


class TextWriter:
    """Keeps a batch full of questions and answers, and makes documents of the answers.

    Args:
        documents: the documents so far; the model continues pieces of the user's.
        prompts: the first prompts to answer.
        first_number: of the first text. A text's random choices follow from its number.
        max_answer_tokens: per answer.
    """

    def __init__(
        self,
        runtime: Runtime,
        own_prompt_source: SelfAskedPrompts | SelfBegunPrompts,
        seen_runs: SeenTokenRuns,
        documents: Iterable[Document],
        prompts: Iterable[Prompt],
        first_number: int,
        max_answer_tokens: int,
    ) -> None:
        self._runtime, self._own_prompt_source, self._seen_runs, self._max_answer_tokens = (
            runtime,
            own_prompt_source,
            seen_runs,
            max_answer_tokens,
        )
        self._user_documents = [
            document for document in documents if document.source != "own" and len(document.ids) > PREFIX_TOKENS[0]
        ]
        self._ready_prompts = deque(prompts)
        self._next_number = first_number
        self._running_texts: dict[int, UnfinishedText] = {}  # by the scheduler's number of its row
        self._written_documents: list[Document] = []

    def write_documents(
        self, is_writing_over: Callable[[], bool], max_rows: int, seconds: float
    ) -> Iterator[list[Document]]:
        """Yield documents every few seconds until ``is_writing_over`` returns True, ideally after ``seconds``."""
        decoders = self._runtime.decoder_pool.acquire()
        models = self._runtime.models
        batch_limits = BatchLimits(
            max_rows, count_free_tokens(models.compiled_irs(), max_rows, models.idle_cache_bytes)
        )
        scheduler = Scheduler(decoders.target, None, NO_LOOKAHEAD, (), batch_limits)
        row_count = min(max_rows, MIN_ROWS)
        step_row_seconds = deque[float](maxlen=16)
        last_write_time = time.monotonic()
        try:
            while not is_writing_over():
                while len(self._running_texts) < row_count:
                    new_text = self._start_text()
                    self._running_texts[scheduler.queue.add_row(new_text.row)] = new_text
                step_began = time.monotonic()
                pieces = scheduler.run_next_round() or []
                now = time.monotonic()
                step_row_seconds.append((now - step_began) / max(1, len(pieces)))
                row_count = int(min(max_rows, max(MIN_ROWS, seconds / INTENDED_ROUNDS / median(step_row_seconds))))
                scheduler.remove_rows(self._collect_ended_texts(pieces))
                if now - last_write_time > WRITE_SECONDS:
                    yield self._take_written_documents()
                    last_write_time = now
            for new_text in self._running_texts.values():
                if isinstance(new_text.beginning, Prompt) and len(new_text.row.token_ids) >= MIN_UNFINISHED_TOKENS:
                    self._keep_answer(new_text, new_text.beginning)
            self._running_texts = {}
            yield self._take_written_documents()
        finally:
            self._runtime.decoder_pool.release(decoders)

    @property
    def unfinished_tokens(self) -> int:
        """The tokens of texts in progress."""
        return sum(len(running_text.row.token_ids) for running_text in self._running_texts.values())

    @property
    def has_answer_to_keep(self) -> bool:
        """Whether a text in progress would be kept, and learned from, if the time were up."""
        return any(
            isinstance(running_text.beginning, Prompt)
            and not running_text.beginning.held_out
            and len(running_text.row.token_ids) >= MIN_UNFINISHED_TOKENS
            for running_text in self._running_texts.values()
        )

    def _start_text(self) -> UnfinishedText:
        """Return the next text, still empty: an answer, if there is a prompt to answer, or a question."""
        rng = np.random.default_rng(self._next_number)
        greedy = bool(rng.integers(2))
        seed = self._next_number
        self._next_number += 1
        if self._ready_prompts:
            prompt = self._ready_prompts.popleft()
        elif self._user_documents and rng.integers(2):
            prompt = self._draw_prompt(rng)
        else:
            opening = self._own_prompt_source.draw_opening(rng)
            return UnfinishedText(self._make_row(opening.ids, seed=seed, **opening.row_options), opening, False)
        row_options = {"temperature": 0.0 if greedy else 1.0, "max_tokens": self._max_answer_tokens}
        return UnfinishedText(self._make_row(prompt.ids, seed=seed, **row_options), prompt, greedy)

    def _draw_prompt(self, rng: np.random.Generator) -> Prompt:
        """Return a prompt from the user's answered prompts, or a piece of a text for the model to continue."""
        document = self._user_documents[int(rng.integers(len(self._user_documents)))]
        bos_ids = self._runtime.prompt_encoder.tokenizer.prefix_ids
        if document.answer:
            return Prompt(document.ids[: document.answer], document.held_out)
        content_ids = document.ids
        if content_ids[: len(bos_ids)] == bos_ids:
            content_ids = content_ids[len(bos_ids) :]
        prefix_length = min(int(rng.integers(PREFIX_TOKENS[0], PREFIX_TOKENS[1] + 1)), len(content_ids))
        prefix_start = int(rng.integers(len(content_ids) - prefix_length + 1))
        return Prompt([*bos_ids, *content_ids[prefix_start : prefix_start + prefix_length]], document.held_out)

    def _make_row(self, ids: list[int], **row_options: Any) -> Row:
        [row] = self._runtime.row_maker.make_rows(ids, self._runtime.row_maker.make_complete_params(row_options))  # type: ignore[arg-type]
        return row

    def _collect_ended_texts(self, pieces: Iterable[tuple[int, Piece]]) -> list[int]:
        """Collect the finished texts; return the numbers of texts caught in a loop, to end them now."""
        looping_numbers = list[int]()
        for row_number, piece in pieces:
            running_text = self._running_texts[row_number]
            row = running_text.row
            beginning = running_text.beginning
            if not piece.finish_reason:
                if len(row.token_ids) % LOOP_CHECK_TOKENS or not row.token_ids or not is_looping(row.token_ids):
                    continue
                looping_numbers.append(row_number)
            elif isinstance(beginning, Prompt):
                self._keep_answer(running_text, beginning)
            elif prompt := self._own_prompt_source.make_prompt(beginning, row):
                self._ready_prompts.append(prompt)
            del self._running_texts[row_number]
        return looping_numbers

    def _keep_answer(self, running_text: UnfinishedText, prompt: Prompt) -> None:
        """Make a document of an answer, unless it loops or is a near-duplicate."""
        answer_ids = running_text.row.token_ids
        if is_looping(answer_ids) or self._seen_runs.is_near_duplicate(answer_ids):
            return
        document_ids = [*prompt.ids, *answer_ids]
        self._seen_runs.add_runs(document_ids)
        answer_start = max(0, min(len(prompt.ids), MAX_DOCUMENT_TOKENS - len(answer_ids)))
        self._written_documents.append(
            Document(document_ids[-MAX_DOCUMENT_TOKENS:], answer_start, "own", running_text.greedy, prompt.held_out)
        )

    def _take_written_documents(self) -> list[Document]:
        written_documents = self._written_documents
        self._written_documents = []
        return written_documents
