"""The training documents of a head or a draft: their file, the user's own texts and chats, and near-duplicates."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import msgspec
import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.files import flush_to_disk, open_replacement
from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.cache.sequence import Sequence as Tokens
from ovspec.engine.prompts import PromptEncoder
from ovspec.text.chat_template import Message
from ovspec.text.tokenizer import Tokenizer

MAX_DOCUMENT_TOKENS = 1024  # of a document
HELD_OUT_DIVISOR = 20  # the number of documents per held-out document
TEXT_PART_BYTES = 32_000  # bytes of a text held out as a whole, about 8,000 tokens
RUN_TOKENS = 8  # tokens per run for comparing documents
MAX_TAIL_BYTES = 1 << 20  # bytes, more than any document takes in its file
BINARY_CHECK_BYTES = 1 << 13  # bytes of a file examined for binary content
CHATS_SUFFIX = ".jsonl"
CHAT_LINE_FORMATS = (
    'a line must be {"messages": [...]}, a list of {"role": ..., "content": ...}, or {"prompt": ..., "completion": ...}'
)


@dataclass(frozen=True)
class Document:
    """A text as tokens.

    ids: all tokens, including the template's.
    answer: index of the first token of the answer; 0 if the whole text counts.
    source: "own" for the model's own answer, "chats" or "text" for the user's data.
    greedy: whether the answer is greedy.
    held_out: for evaluation only, never trained on.
    """

    ids: list[int]
    answer: int
    source: Literal["own", "chats", "text"]
    greedy: bool
    held_out: bool


# ---------------------------------------------------------------- the file


def read_documents(file: Path) -> list[Document]:
    """Return the documents in ``file``, a JSON object a line, without a truncated last line.

    Raises:
        OvspecError: another line is damaged.
    """
    decoder = msgspec.json.Decoder(Document)
    documents = list[Document]()
    if not file.is_file():
        return []
    for line_number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
        try:
            documents.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise OvspecError(
                f"{file}: line {line_number} is damaged; delete the folder {file.parent} and start again."
            ) from None
    return documents


def write_first_documents(file: Path, documents: Iterable[Document]) -> None:
    """Write ``file`` with its first documents, completely or not at all."""
    with open_replacement(file) as partial_file:
        partial_file.write_bytes(msgspec.json.Encoder().encode_lines(documents))


def append_documents(file: Path, documents: Iterable[Document]) -> None:
    """Append documents to ``file``, replacing a truncated last line, and wait until they are on the disk."""
    with file.open("ab+") as stream:
        stream.truncate(find_last_line_end(stream))
        stream.write(msgspec.json.Encoder().encode_lines(documents))
    flush_to_disk(file)


def find_last_line_end(stream: BinaryIO) -> int:
    """Return the end of the last complete line of a file."""
    file_bytes = stream.seek(0, os.SEEK_END)
    tail_start = stream.seek(max(0, file_bytes - MAX_TAIL_BYTES))
    return tail_start + stream.read().rfind(b"\n") + 1


# ---------------------------------------------------------------- near-duplicates and hold-out


def hash_token_runs(ids: Sequence[int]) -> np.ndarray:
    """Return a hash of each run of eight tokens, (n,) uint64; a shorter text is a single run."""
    tokens = np.array([*ids, *[-1] * (RUN_TOKENS - len(ids))], dtype=np.int64).view(np.uint64)
    hashes = np.zeros(len(tokens) - RUN_TOKENS + 1, dtype=np.uint64)
    for offset in range(RUN_TOKENS):
        hashes = (hashes ^ tokens[offset : offset + len(hashes)]) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return hashes


def is_looping(ids: Sequence[int]) -> bool:
    """Return whether a text is in a loop: half of its runs occurred before."""
    hashes = hash_token_runs(ids)
    return len(np.unique(hashes)) < len(hashes) / 2


class SeenTokenRuns:
    """The token runs of the documents. A table of bits: after 3 million tokens, 1 % of new runs pass for seen."""

    HASH_BITS = 28

    def __init__(self) -> None:
        self._bit_table = np.zeros(1 << (self.HASH_BITS - 3), dtype=np.uint8)

    def add_runs(self, ids: Sequence[int]) -> None:
        byte_indices, bit_masks = self._locate_table_bits(ids)
        np.bitwise_or.at(self._bit_table, byte_indices, bit_masks)

    def is_near_duplicate(self, ids: Sequence[int]) -> bool:
        """Return whether a text is a near-duplicate: more than half of its runs are known."""
        byte_indices, bit_masks = self._locate_table_bits(ids)
        return bool(np.mean((self._bit_table[byte_indices] & bit_masks) > 0) > 0.5)

    def _locate_table_bits(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the byte and the bit of each run in the table."""
        bit_numbers = hash_token_runs(ids) >> np.uint64(64 - self.HASH_BITS)
        return bit_numbers >> np.uint64(3), np.uint8(1) << (bit_numbers & np.uint64(7)).astype(np.uint8)


def compute_tokens_checksum(ids: Sequence[int]) -> int:
    return zlib.crc32(np.array(ids, dtype=np.int64).tobytes())


def is_held_out(ids: Sequence[int]) -> bool:
    """Return whether documents with the beginning ``ids`` are held out: all answers to a question, or none."""
    return compute_tokens_checksum(ids) % HELD_OUT_DIVISOR == 0


def choose_held_out_checksums(checksums: Iterable[int]) -> set[int]:
    """Return the checksums of the texts to hold out: a twentieth, if there are at least four."""
    sorted_checksums = sorted(set(checksums))
    return (
        set(sorted_checksums[: -(-len(sorted_checksums) // HELD_OUT_DIVISOR)]) if len(sorted_checksums) >= 4 else set()
    )


# ---------------------------------------------------------------- the user's data


@dataclass(frozen=True)
class Chat:
    """A chat of the user's; ``location`` is its place in the files, for errors."""

    messages: list[Message]
    tools: list[JsonObject]
    location: str

    @property
    def is_answered(self) -> bool:
        """Whether the assistant has the last word; otherwise the model is to answer."""
        return self.messages[-1]["role"] == "assistant"


@dataclass(frozen=True)
class UserTexts:
    """The user's data: texts, one per file, and chats. ``skipped_files``: number of files without text."""

    texts: list[str]
    chats: list[Chat]
    skipped_files: int


class CandidateDocument(NamedTuple):
    """A document to check for near-duplicates, by its tokens from ``content_start`` on.

    part_checksum: checksum of its text or prompt; all documents of a part are held out, or none.
    """

    document: Document
    content_start: int
    part_checksum: int


def read_user_texts(paths: Iterable[str | Path]) -> UserTexts:
    """Read the user's files: texts, and chats in .jsonl files. Folders are read recursively.

    Raises:
        OvspecError: a file is missing or has no text, or a line isn't a chat.
    """
    texts = list[str]()
    chats = list[Chat]()
    skipped_files = 0
    for path in map(Path, paths):
        if not path.exists():
            raise OvspecError(f"{path}: no such file or folder; give a text file, or a folder of text files.")
        count_before = len(texts) + len(chats)
        for file in list_visible_files(path):
            text = read_utf8_text(file)
            if text is None:
                skipped_files += 1
            elif file.suffix == CHATS_SUFFIX:
                lines = enumerate(text.split("\n"), 1)
                chats += [
                    parse_chat(line, f"{file}, line {line_number}") for line_number, line in lines if line.strip()
                ]
            elif text.strip():
                texts.append(text)
        if len(texts) + len(chats) == count_before:
            raise OvspecError(f"{path}: contains no text; give a text file in UTF-8, or a folder of text files.")
    return UserTexts(texts, chats, skipped_files)


def list_visible_files(path: Path) -> Iterator[Path]:
    """Yield ``path``, or the files in a folder and its subfolders, except hidden files."""
    if path.is_file():
        yield path
    for folder, subfolder_names, file_names in os.walk(path):
        subfolder_names[:] = sorted(
            subfolder_name for subfolder_name in subfolder_names if not subfolder_name.startswith(".")
        )
        yield from (Path(folder, file_name) for file_name in sorted(file_names) if not file_name.startswith("."))


def read_utf8_text(file: Path) -> str | None:
    """Return the text in a file; None if the file isn't text or is unreadable."""
    try:
        with file.open("rb") as stream:
            if b"\0" in stream.read(BINARY_CHECK_BYTES):
                return None
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    if "\0" in text:
        return None
    return text


def parse_chat(line: str, location: str) -> Chat:
    """Return the chat in a line of JSON; raises OvspecError if there is none."""
    try:
        line_json = json.loads(line)
    except (ValueError, RecursionError):
        raise OvspecError(f"{location}: not valid JSON; {CHAT_LINE_FORMATS}.") from None
    chat_entries = line_json if isinstance(line_json, dict) else {"messages": line_json}
    messages: JsonValue = chat_entries.get("messages")
    tools = chat_entries.get("tools") or []
    if "prompt" in chat_entries:
        messages = [
            *to_messages("user", chat_entries["prompt"]),
            *to_messages("assistant", chat_entries.get("completion")),
        ]
    is_chat = isinstance(messages, list) and isinstance(tools, list) and all(map(is_message, messages))
    if not is_chat or all(message["role"] != "user" for message in messages):
        raise OvspecError(f"{location}: not a chat, or no message has the role user; {CHAT_LINE_FORMATS}.")
    return Chat(messages, tools, location)


def to_messages(role: str, content: JsonValue) -> list[Message]:
    """Return a side of a line as messages: none, a text, or messages already."""
    if not content or isinstance(content, list):
        return content or []
    return [{"role": role, "content": content}]


def is_message(message: JsonValue) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and bool({"content", "tool_calls"} & {*message})
    )


def make_user_documents(
    user_texts: UserTexts, prompt_encoder: PromptEncoder, seen_runs: SeenTokenRuns
) -> list[Document]:
    """Return the documents of the user's data, without near-duplicates, and add them to ``seen_runs``.

    Their order depends only on their text, so the first documents are a sample of all.

    Raises:
        OvspecError: the model has no chat template, or it can't render a chat.
    """
    text_candidates = make_text_candidates(user_texts.texts, prompt_encoder.tokenizer)
    chat_candidates = make_chat_candidates([chat for chat in user_texts.chats if chat.is_answered], prompt_encoder)
    # Drop near-duplicates first: otherwise nearly all held-out texts with several versions would be dropped below.
    candidates = [*mark_held_out(drop_near_duplicates(text_candidates, SeenTokenRuns()))]
    candidates += mark_held_out(drop_near_duplicates(chat_candidates, SeenTokenRuns()))
    # Held-out documents come last, because no training document may resemble them.
    distinct_candidates = drop_near_duplicates(
        sorted(candidates, key=lambda candidate: candidate.document.held_out), seen_runs
    )
    return sorted(
        (candidate.document for candidate in distinct_candidates),
        key=lambda document: compute_tokens_checksum(document.ids),
    )


def drop_near_duplicates(candidates: Iterable[CandidateDocument], seen_runs: SeenTokenRuns) -> list[CandidateDocument]:
    """Return the candidates without near-duplicates of ``seen_runs`` and of each other, and add them to it."""
    distinct_candidates = list[CandidateDocument]()
    for candidate in candidates:
        if not seen_runs.is_near_duplicate(candidate.document.ids[candidate.content_start :]):
            seen_runs.add_runs(candidate.document.ids)
            distinct_candidates.append(candidate)
    return distinct_candidates


def mark_held_out(candidates: Sequence[CandidateDocument]) -> list[CandidateDocument]:
    """Return the candidates of a kind, with a twentieth of their parts held out."""
    held_out_checksums = choose_held_out_checksums(candidate.part_checksum for candidate in candidates)
    return [
        candidate._replace(document=replace(candidate.document, held_out=candidate.part_checksum in held_out_checksums))
        for candidate in candidates
    ]


def make_text_candidates(texts: Iterable[str], tokenizer: Tokenizer) -> list[CandidateDocument]:
    """Cut texts into documents, each with the BOS of the model's prompts."""
    bos_ids = tokenizer.prefix_ids
    max_content_tokens = MAX_DOCUMENT_TOKENS - len(bos_ids)
    candidates = list[CandidateDocument]()
    for text_part in (part for text in texts for part in cut_text(text)):
        for piece_ids in cut_tokens(tokenizer.encode(text_part, special=False).tolist(), max_content_tokens, tokenizer):
            document = Document([*bos_ids, *piece_ids], 0, "text", False, False)
            if len(document.ids) > 1:
                candidates.append(CandidateDocument(document, len(bos_ids), zlib.crc32(text_part.encode())))
    return candidates


def cut_text(text: str) -> list[str]:
    """Cut a text at line ends into parts of about ``TEXT_PART_BYTES``; longer lines are cut, too."""
    parts = list[str]()
    part_lines = list[str]()
    part_bytes = 0
    for line in text.splitlines(keepends=True):
        for line_piece in (line[offset : offset + TEXT_PART_BYTES] for offset in range(0, len(line), TEXT_PART_BYTES)):
            part_lines.append(line_piece)
            part_bytes += len(line_piece.encode())
            if part_bytes >= TEXT_PART_BYTES:
                parts.append("".join(part_lines))
                part_lines = []
                part_bytes = 0
    if parts and part_bytes < TEXT_PART_BYTES // 4:
        parts[-1] += "".join(part_lines)
    elif part_lines:
        parts.append("".join(part_lines))
    return parts


def cut_tokens(ids: list[int], max_tokens: int, tokenizer: Tokenizer) -> list[list[int]]:
    """Cut tokens into pieces of at most ``max_tokens``, at line ends if there are any in a piece's second half."""
    pieces = list[list[int]]()
    while len(ids) > max_tokens:
        possible_ends = range(max_tokens, max_tokens // 2, -1)
        piece_end = next(
            (end for end in possible_ends if is_line_boundary(*ids[end - 1 : end + 1], tokenizer)), max_tokens
        )
        pieces.append(ids[:piece_end])
        ids = ids[piece_end:]
    return [*pieces, ids]


def is_line_boundary(previous_id: int, next_id: int, tokenizer: Tokenizer) -> bool:
    return tokenizer.token_bytes(previous_id).endswith(b"\n") or tokenizer.token_bytes(next_id).startswith(b"\n")


def make_chat_candidates(chats: Iterable[Chat], prompt_encoder: PromptEncoder) -> list[CandidateDocument]:
    """Make documents of chats, trained from the first answer on. Chats with the same prompt stay together."""
    candidates = list[CandidateDocument]()
    for chat in chats:
        try:
            ids, answer_start = encode_chat(chat, prompt_encoder)
            content_start = find_content_start(chat, ids, prompt_encoder)
        except OvspecError as error:
            raise OvspecError(f"{chat.location}: {error}") from None
        prompt_checksum = compute_tokens_checksum(ids[:answer_start])
        dropped_tokens = max(0, answer_start - MAX_DOCUMENT_TOKENS // 2)  # the end of a long prompt is kept
        answer_start -= dropped_tokens
        content_start -= dropped_tokens
        for piece_ids in cut_tokens(ids[dropped_tokens:], MAX_DOCUMENT_TOKENS, prompt_encoder.tokenizer):
            if answer_start < len(piece_ids):
                document = Document(piece_ids, max(0, answer_start), "chats", False, False)
                candidates.append(CandidateDocument(document, max(0, content_start), prompt_checksum))
            answer_start -= len(piece_ids)
            content_start -= len(piece_ids)
    return candidates


def encode_chat(chat: Chat, prompt_encoder: PromptEncoder) -> tuple[list[int], int]:
    """Return the tokens of a chat, and the index of its first answer.

    The tokens before it are the model's prompt, unless the template writes an answered prompt differently.
    """
    encode = prompt_encoder.tokenizer.encode
    messages = chat.messages
    first_answer_index = next(
        index for index, message in enumerate(messages) if index and message["role"] == "assistant"
    )
    prompt_text = prompt_encoder.chat_format.render_prompt(messages[:first_answer_index], chat.tools)
    chat_text = prompt_encoder.chat_format.render_prompt(messages, chat.tools, opens_answer=False)
    prompt_ids = encode(prompt_text, special=False).tolist()
    if chat_text.startswith(prompt_text):
        return [
            *prompt_ids,
            *prompt_encoder.tokenizer.encode_continuation(chat_text[len(prompt_text) :]).tolist(),
        ], len(prompt_ids)
    ids = encode(chat_text, special=False).tolist()
    return ids, Tokens(prompt_ids).common_prefix_length(np.array(ids))


def find_content_start(chat: Chat, ids: list[int], prompt_encoder: PromptEncoder) -> int:
    """Return the token index of a chat's first user message, where chats begin to differ."""
    first_user_index = next(index for index, message in enumerate(chat.messages) if message["role"] == "user")
    other_messages = [*chat.messages[:first_user_index], {"role": "user", "content": "?"}]
    return Tokens(ids).common_prefix_length(prompt_encoder.encode(other_messages, tools=chat.tools))


def encode_unanswered_chats(user_texts: UserTexts, prompt_encoder: PromptEncoder) -> list[list[int]]:
    """Return the tokens of the chats for the model to answer."""
    encoded_chats = list[list[int]]()
    for chat in user_texts.chats:
        if not chat.is_answered:
            try:
                encoded_chats.append(prompt_encoder.encode(chat.messages, tools=chat.tools).tolist())
            except OvspecError as error:
                raise OvspecError(f"{chat.location}: {error}") from None
    return encoded_chats
