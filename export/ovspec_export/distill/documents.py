"""The documents that a head or a draft learns from: their file, the user's own texts and chats, and near-duplicates."""

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
HELD_OUT_DIVISOR = 20  # one of so many documents is held out
STRETCH_BYTES = 32_000  # bytes of a text that is held out whole, about 8,000 tokens
RUN_LENGTH = 8  # tokens, by which documents are compared
MAX_LINE_BYTES = 1 << 20  # bytes, more than a document has in its file
BINARY_CHECK_BYTES = 1 << 13  # bytes of a file in which a binary one shows
CHATS_SUFFIX = ".jsonl"
CHAT_LINE_FORMATS = (
    'a line must be {"messages": [...]}, a list of {"role": ..., "content": ...}, or {"prompt": ..., "completion": ...}'
)


@dataclass(frozen=True)
class Document:
    """A text as tokens.

    ids: all tokens, those of the template included.
    answer: index of the first token of the answer; 0 if all of the text counts.
    source: whether the model wrote its answer itself ("own"), or who uses the model gave it.
    greedy: whether the model chose the answer greedily.
    held_out: for judging only, never trained on.
    """

    ids: list[int]
    answer: int
    source: Literal["own", "chats", "text"]
    greedy: bool
    held_out: bool


# ---------------------------------------------------------------- the file


def read_documents(file: Path) -> list[Document]:
    """Return the documents in ``file``, a JSON object a line, without a last line that was cut off.

    Raises:
        OvspecError: another line is damaged.
    """
    decoder = msgspec.json.Decoder(Document)
    documents = list[Document]()
    if not file.is_file():
        return []
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
        try:
            documents.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise OvspecError(f"{file}: line {number} is damaged; delete the folder and start again.") from None
    return documents


def create_documents(file: Path, documents: Iterable[Document]) -> None:
    """Write ``file`` with its first documents, completely or not at all."""
    with open_replacement(file) as partial:
        partial.write_bytes(msgspec.json.Encoder().encode_lines(documents))


def append_documents(file: Path, documents: Iterable[Document]) -> None:
    """Append documents to ``file``, in place of a last line that was cut off, and wait until they are on the disk."""
    with file.open("ab+") as opened:
        opened.truncate(find_end_of_lines(opened))
        opened.write(msgspec.json.Encoder().encode_lines(documents))
    flush_to_disk(file)


def find_end_of_lines(opened: BinaryIO) -> int:
    """Return where the last complete line of a file ends."""
    size = opened.seek(0, os.SEEK_END)
    start = opened.seek(max(0, size - MAX_LINE_BYTES))
    return start + opened.read().rfind(b"\n") + 1


# ---------------------------------------------------------------- near-duplicates and hold-out


def hash_token_runs(ids: Sequence[int]) -> np.ndarray:
    """Return a hash of each run of eight tokens, (n,) uint64; a shorter text is one run."""
    tokens = np.array([*ids, *[-1] * (RUN_LENGTH - len(ids))], dtype=np.int64).view(np.uint64)
    hashes = np.zeros(len(tokens) - RUN_LENGTH + 1, dtype=np.uint64)
    for start in range(RUN_LENGTH):
        hashes = (hashes ^ tokens[start : start + len(hashes)]) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return hashes


def is_looping(ids: Sequence[int]) -> bool:
    """Return whether a text has got into a loop: half of its runs were there before."""
    hashes = hash_token_runs(ids)
    return len(np.unique(hashes)) < len(hashes) / 2


class SeenRuns:
    """The runs of tokens that documents have. A table of bits: after 3 million tokens, 1 % of others pass for seen."""

    BITS = 28

    def __init__(self) -> None:
        self._table = np.zeros(1 << (self.BITS - 3), dtype=np.uint8)

    def add_runs(self, ids: Sequence[int]) -> None:
        bytes_of_runs, bits = self._find_bits(ids)
        np.bitwise_or.at(self._table, bytes_of_runs, bits)

    def is_near_duplicate(self, ids: Sequence[int]) -> bool:
        """Return whether a text is a near-duplicate: more than half of its runs were added."""
        bytes_of_runs, bits = self._find_bits(ids)
        return bool(np.mean((self._table[bytes_of_runs] & bits) > 0) > 0.5)

    def _find_bits(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return in which byte of the table each run is, and its bit there."""
        bits = hash_token_runs(ids) >> np.uint64(64 - self.BITS)
        return bits >> np.uint64(3), np.uint8(1) << (bits & np.uint64(7)).astype(np.uint8)


def compute_checksum(ids: Sequence[int]) -> int:
    return zlib.crc32(np.array(ids, dtype=np.int64).tobytes())


def is_held_out(ids: Sequence[int]) -> bool:
    """Return whether what begins with ``ids`` is held out; so are all answers to a question, or none."""
    return compute_checksum(ids) % HELD_OUT_DIVISOR == 0


def choose_held_out(checksums: Iterable[int]) -> set[int]:
    """Return which of the texts with these checksums are held out: a twentieth, if there are at least four."""
    known = sorted(set(checksums))
    return set(known[: -(-len(known) // HELD_OUT_DIVISOR)]) if len(known) >= 4 else set()


# ---------------------------------------------------------------- what the user gives


@dataclass(frozen=True)
class Chat:
    """A chat of the user's; ``place`` is where it was read, for errors."""

    messages: list[Message]
    tools: list[JsonObject]
    place: str

    @property
    def answered(self) -> bool:
        """Whether the assistant has the last word; otherwise the model is to answer."""
        return self.messages[-1]["role"] == "assistant"


@dataclass(frozen=True)
class UserTexts:
    """What the user gives: texts, each a file's, and chats. ``skipped``: how many files in folders hold no text."""

    texts: list[str]
    chats: list[Chat]
    skipped: int


class Candidate(NamedTuple):
    """A document that may be a near-duplicate, which shows in its tokens from ``start`` on.

    part: checksum of the text or prompt that it belongs to; all documents of a part are held out, or none.
    """

    document: Document
    start: int
    part: int


def read_user_texts(paths: Iterable[str | Path]) -> UserTexts:
    """Read the user's files: texts, and chats in those that end in .jsonl. Folders are read with all that is in them.

    Raises:
        OvspecError: there is no such file, it holds no text, or a line isn't a chat.
    """
    texts = list[str]()
    chats = list[Chat]()
    skipped = 0
    for path in map(Path, paths):
        if not path.exists():
            raise OvspecError(f"{path}: no such file or folder; name a text file, or a folder of them.")
        before = len(texts) + len(chats)
        for file in list_files(path):
            text = read_utf8_text(file)
            if text is None:
                skipped += 1
            elif file.suffix == CHATS_SUFFIX:
                lines = enumerate(text.split("\n"), 1)
                chats += [parse_chat(line, f"{file}, line {number}") for number, line in lines if line.strip()]
            elif text.strip():
                texts.append(text)
        if len(texts) + len(chats) == before:
            raise OvspecError(f"{path}: contains no text; name a text file in UTF-8, or a folder of them.")
    return UserTexts(texts, chats, skipped)


def list_files(path: Path) -> Iterator[Path]:
    """Yield ``path``, or the files in a folder and in those in it, except hidden ones."""
    if path.is_file():
        yield path
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def read_utf8_text(file: Path) -> str | None:
    """Return the text in a file; None if it is none, or can't be read."""
    try:
        with file.open("rb") as opened:
            if b"\0" in opened.read(BINARY_CHECK_BYTES):
                return None
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    if "\0" in text:
        return None
    return text


def parse_chat(line: str, place: str) -> Chat:
    """Return the chat in a line of JSON; raises OvspecError if there is none."""
    try:
        line_json = json.loads(line)
    except (ValueError, RecursionError):
        raise OvspecError(f"{place}: not valid JSON; {CHAT_LINE_FORMATS}.") from None
    entries = line_json if isinstance(line_json, dict) else {"messages": line_json}
    messages: JsonValue = entries.get("messages")
    tools = entries.get("tools") or []
    if "prompt" in entries:
        messages = [*parse_messages("user", entries["prompt"]), *parse_messages("assistant", entries.get("completion"))]
    is_chat = isinstance(messages, list) and isinstance(tools, list) and all(map(is_message, messages))
    if not is_chat or all(message["role"] != "user" for message in messages):
        raise OvspecError(f"{place}: not a chat with a user's message; {CHAT_LINE_FORMATS}.")
    return Chat(messages, tools, place)


def parse_messages(role: str, content: JsonValue) -> list[Message]:
    """Return what a line has of one side as messages: none, a text, or messages already."""
    if not content or isinstance(content, list):
        return content or []
    return [{"role": role, "content": content}]


def is_message(entry: JsonValue) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("role"), str) and bool({"content", "tool_calls"} & {*entry})


def make_user_documents(user_texts: UserTexts, prompts: PromptEncoder, seen: SeenRuns) -> list[Document]:
    """Return the documents of what the user gives, without near-duplicates, and add them to ``seen``.

    Their order depends only on their text, so that their first ones are a sample of all.

    Raises:
        OvspecError: the model has no chat template, or it can't render a chat.
    """
    texts = make_text_candidates(user_texts.texts, prompts.tokenizer)
    chats = make_chat_candidates([chat for chat in user_texts.chats if chat.answered], prompts)
    # Near-duplicates go first: of texts in many versions, what was held out before would nearly all be dropped below.
    candidates = [*mark_held_out(drop_near_duplicates(texts, SeenRuns()))]
    candidates += mark_held_out(drop_near_duplicates(chats, SeenRuns()))
    # Those held out come last, because no training document may be like them.
    kept = drop_near_duplicates(sorted(candidates, key=lambda candidate: candidate.document.held_out), seen)
    return sorted((candidate.document for candidate in kept), key=lambda document: compute_checksum(document.ids))


def drop_near_duplicates(candidates: Iterable[Candidate], seen: SeenRuns) -> list[Candidate]:
    """Return the candidates without near-duplicates of ``seen`` and of those before them, and add them to ``seen``."""
    kept = list[Candidate]()
    for candidate in candidates:
        if not seen.is_near_duplicate(candidate.document.ids[candidate.start :]):
            seen.add_runs(candidate.document.ids)
            kept.append(candidate)
    return kept


def mark_held_out(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates of one kind, a twentieth of whose parts are held out."""
    held_out = choose_held_out(candidate.part for candidate in candidates)
    return [
        candidate._replace(document=replace(candidate.document, held_out=candidate.part in held_out))
        for candidate in candidates
    ]


def make_text_candidates(texts: Iterable[str], tokenizer: Tokenizer) -> list[Candidate]:
    """Cut texts into documents, each with the BOS that the model's prompts have."""
    bos = tokenizer.prefix_ids
    most = MAX_DOCUMENT_TOKENS - len(bos)
    candidates = list[Candidate]()
    for part in (part for text in texts for part in cut_text(text)):
        for piece in cut_tokens(tokenizer.encode(part, special=False).tolist(), most, tokenizer):
            document = Document([*bos, *piece], 0, "text", False, False)
            if len(document.ids) > 1:
                candidates.append(Candidate(document, len(bos), zlib.crc32(part.encode())))
    return candidates


def cut_text(text: str) -> list[str]:
    """Cut a text at line ends into parts of about ``STRETCH_BYTES``; longer lines are cut, too."""
    parts = list[str]()
    part = list[str]()
    size = 0
    for line in text.splitlines(keepends=True):
        for piece in (line[start : start + STRETCH_BYTES] for start in range(0, len(line), STRETCH_BYTES)):
            part.append(piece)
            size += len(piece.encode())
            if size >= STRETCH_BYTES:
                parts.append("".join(part))
                part = []
                size = 0
    if parts and size < STRETCH_BYTES // 4:
        parts[-1] += "".join(part)
    elif part:
        parts.append("".join(part))
    return parts


def cut_tokens(ids: list[int], most: int, tokenizer: Tokenizer) -> list[list[int]]:
    """Cut tokens into pieces of at most ``most``, at line ends if there are any in a piece's second half."""
    pieces = list[list[int]]()
    while len(ids) > most:
        ends = range(most, most // 2, -1)
        end = next((end for end in ends if is_line_boundary(*ids[end - 1 : end + 1], tokenizer)), most)
        pieces.append(ids[:end])
        ids = ids[end:]
    return [*pieces, ids]


def is_line_boundary(before: int, after: int, tokenizer: Tokenizer) -> bool:
    return tokenizer.token_bytes(before).endswith(b"\n") or tokenizer.token_bytes(after).startswith(b"\n")


def make_chat_candidates(chats: Iterable[Chat], prompts: PromptEncoder) -> list[Candidate]:
    """Make documents of chats; all that follows the first answer counts. Chats with the same prompt stay together."""
    candidates = list[Candidate]()
    for chat in chats:
        try:
            ids, answer = encode_chat(chat, prompts)
            start = find_content_start(chat, ids, prompts)
        except OvspecError as error:
            raise OvspecError(f"{chat.place}: {error}") from None
        part = compute_checksum(ids[:answer])
        cut = max(0, answer - MAX_DOCUMENT_TOKENS // 2)  # of a long prompt, the end matters
        answer -= cut
        start -= cut
        for piece in cut_tokens(ids[cut:], MAX_DOCUMENT_TOKENS, prompts.tokenizer):
            if answer < len(piece):
                document = Document(piece, max(0, answer), "chats", False, False)
                candidates.append(Candidate(document, max(0, start), part))
            answer -= len(piece)
            start -= len(piece)
    return candidates


def encode_chat(chat: Chat, prompts: PromptEncoder) -> tuple[list[int], int]:
    """Return the tokens of a chat, and at which its first answer begins.

    Those before are the prompt as the model gets it, unless the template writes a prompt otherwise once it is answered.
    """
    encode = prompts.tokenizer.encode
    messages = chat.messages
    first = next(index for index, message in enumerate(messages) if index and message["role"] == "assistant")
    prompt = prompts.chat_format.render_prompt(messages[:first], chat.tools)
    whole = prompts.chat_format.render_prompt(messages, chat.tools, open=False)
    before = encode(prompt, special=False).tolist()
    if whole.startswith(prompt):
        return [*before, *prompts.tokenizer.encode_continuation(whole[len(prompt) :]).tolist()], len(before)
    ids = encode(whole, special=False).tolist()
    return ids, Tokens(before).common_prefix_length(np.array(ids))


def find_content_start(chat: Chat, ids: list[int], prompts: PromptEncoder) -> int:
    """Return at which token of a chat the first message of the user begins, which no other chat need have."""
    first = next(index for index, message in enumerate(chat.messages) if message["role"] == "user")
    other = [*chat.messages[:first], {"role": "user", "content": "?"}]
    return Tokens(ids).common_prefix_length(prompts.encode(other, tools=chat.tools))


def encode_open_chats(user_texts: UserTexts, prompts: PromptEncoder) -> list[list[int]]:
    """Return the tokens of the chats that the model is to answer."""
    encoded_chats = list[list[int]]()
    for chat in user_texts.chats:
        if not chat.answered:
            try:
                encoded_chats.append(prompts.encode(chat.messages, tools=chat.tools).tolist())
            except OvspecError as error:
                raise OvspecError(f"{chat.place}: {error}") from None
    return encoded_chats
