"""The documents that a head or a draft learns from: their file, the user's own texts and chats, and near-duplicates."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec
import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.files import flush_to_disk, open_replacement
from ovspec.cache.sequence import Sequence as Tokens
from ovspec.engine.prompts import PromptEncoder
from ovspec.text.chat_template import Message
from ovspec.text.tokenizer import Tokenizer

MOST_TOKENS = 1024  # of a document
HELD_OUT = 20  # one of so many documents is held out
STRETCH = 32_000  # bytes of a text that is held out whole, about 8,000 tokens
RUN = 8  # tokens, by which documents are compared
LONGEST_LINE = 1 << 20  # bytes, more than a document has in its file
LOOKED_AT = 1 << 13  # bytes of a file in which a binary one shows
CHATS = ".jsonl"
ACCEPTED = (
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
    decoder, found = msgspec.json.Decoder(Document), list[Document]()
    *lines, _ = (file.read_bytes() if file.is_file() else b"").split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            found.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise OvspecError(f"{file}: line {number} is damaged; delete the folder and start again.") from None
    return found


def create_documents(file: Path, documents: Iterable[Document]) -> None:
    """Write ``file`` with its first documents, completely or not at all."""
    with open_replacement(file) as partial:
        partial.write_bytes(msgspec.json.Encoder().encode_lines(documents))


def append_documents(file: Path, documents: Iterable[Document]) -> None:
    """Append documents to ``file``, in place of a last line that was cut off, and wait until they are on the disk."""
    with file.open("ab+") as opened:
        opened.truncate(end_of_lines(opened))
        opened.write(msgspec.json.Encoder().encode_lines(documents))
    flush_to_disk(file)


def end_of_lines(opened: BinaryIO) -> int:
    """Return where the last complete line of a file ends."""
    size = opened.seek(0, os.SEEK_END)
    start = opened.seek(max(0, size - LONGEST_LINE))
    return start + opened.read().rfind(b"\n") + 1


# ---------------------------------------------------------------- near-duplicates and hold-out


def runs(ids: Sequence[int]) -> np.ndarray:
    """Return a hash of each run of eight tokens, (n,) uint64; a shorter text is one run."""
    tokens = np.array([*ids, *[-1] * (RUN - len(ids))], dtype=np.int64).view(np.uint64)
    hashes = np.zeros(len(tokens) - RUN + 1, dtype=np.uint64)
    for start in range(RUN):
        hashes = (hashes ^ tokens[start : start + len(hashes)]) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return hashes


def repeats(ids: Sequence[int]) -> bool:
    """Return whether a text has got into a loop: half of its runs were there before."""
    found = runs(ids)
    return len(np.unique(found)) < len(found) / 2


class Seen:
    """The runs of tokens that documents have. A table of bits: after 3 million tokens, 1 % of others pass for seen."""

    BITS = 28

    def __init__(self) -> None:
        self._table = np.zeros(1 << (self.BITS - 3), dtype=np.uint8)

    def add(self, ids: Sequence[int]) -> None:
        at, bit = self._places(ids)
        np.bitwise_or.at(self._table, at, bit)

    def has(self, ids: Sequence[int]) -> bool:
        """Return whether a text is a near-duplicate: more than half of its runs were added."""
        at, bit = self._places(ids)
        return bool(np.mean((self._table[at] & bit) > 0) > 0.5)

    def _places(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return in which byte of the table each run is, and its bit there."""
        found = runs(ids) >> np.uint64(64 - self.BITS)
        return found >> np.uint64(3), np.uint8(1) << (found & np.uint64(7)).astype(np.uint8)


def checksum(ids: Sequence[int]) -> int:
    return zlib.crc32(np.array(ids, dtype=np.int64).tobytes())


def is_held_out(ids: Sequence[int]) -> bool:
    """Return whether what begins with ``ids`` is held out; so are all answers to a question, or none."""
    return checksum(ids) % HELD_OUT == 0


def held_out_of(checksums: Iterable[int]) -> set[int]:
    """Return which of the texts with these checksums are held out: a twentieth, if there are at least four."""
    known = sorted(set(checksums))
    return set(known[: -(-len(known) // HELD_OUT)]) if len(known) >= 4 else set()


# ---------------------------------------------------------------- what the user gives


@dataclass(frozen=True)
class Chat:
    """A chat of the user's; ``place`` is where it was read, for errors."""

    messages: list[Message]
    tools: list[Any]
    place: str

    @property
    def answered(self) -> bool:
        """Whether the assistant has the last word; otherwise the model is to answer."""
        return self.messages[-1]["role"] == "assistant"


@dataclass(frozen=True)
class Given:
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


def read_given(paths: Iterable[str | Path]) -> Given:
    """Read the user's files: texts, and chats in those that end in .jsonl. Folders are read with all that is in them.

    Raises:
        OvspecError: there is no such file, it holds no text, or a line isn't a chat.
    """
    texts, chats, skipped = list[str](), list[Chat](), 0
    for path in map(Path, paths):
        if not path.exists():
            raise OvspecError(f"{path}: no such file or folder; name a text file, or a folder of them.")
        before = len(texts) + len(chats)
        for file in files_in(path):
            text = text_of(file)
            if text is None:
                skipped += 1
            elif file.suffix == CHATS:
                lines = enumerate(text.split("\n"), 1)
                chats += [chat_of(line, f"{file}, line {number}") for number, line in lines if line.strip()]
            elif text.strip():
                texts.append(text)
        if len(texts) + len(chats) == before:
            raise OvspecError(f"{path}: contains no text; name a text file in UTF-8, or a folder of them.")
    return Given(texts, chats, skipped)


def files_in(path: Path) -> Iterator[Path]:
    """Yield ``path``, or the files in a folder and in those in it, except hidden ones."""
    if path.is_file():
        yield path
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def text_of(file: Path) -> str | None:
    """Return the text in a file; None if it is none, or can't be read."""
    try:
        with file.open("rb") as opened:
            if b"\0" in opened.read(LOOKED_AT):
                return None
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\0" in text else text


def chat_of(line: str, place: str) -> Chat:
    """Return the chat in a line of JSON; raises OvspecError if there is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise OvspecError(f"{place}: not valid JSON; {ACCEPTED}.") from None
    entries = value if isinstance(value, dict) else {"messages": value}
    messages: Any = entries.get("messages")
    tools = entries.get("tools") or []
    if "prompt" in entries:
        messages = [*said("user", entries["prompt"]), *said("assistant", entries.get("completion"))]
    fits = isinstance(messages, list) and isinstance(tools, list) and all(map(is_message, messages))
    if not fits or all(message["role"] != "user" for message in messages):
        raise OvspecError(f"{place}: not a chat with a user's message; {ACCEPTED}.")
    return Chat(messages, tools, place)


def said(role: str, content: Any) -> list[Any]:
    """Return what a line has of one side as messages: none, a text, or messages already."""
    return content if isinstance(content, list) else [{"role": role, "content": content}] if content else []


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and bool({"content", "tool_calls"} & {*value})


def given_documents(given: Given, prompts: PromptEncoder, seen: Seen) -> list[Document]:
    """Return the documents of what the user gives, without near-duplicates, and add them to ``seen``.

    Their order depends only on their text, so that their first ones are a sample of all.

    Raises:
        OvspecError: the model has no chat template, or it can't render a chat.
    """
    texts = text_candidates(given.texts, prompts.tokenizer)
    chats = chat_candidates([chat for chat in given.chats if chat.answered], prompts)
    # Near-duplicates go first: of texts in many versions, what was held out before would nearly all be dropped below.
    found = [each for kind in (texts, chats) for each in hold_out(distinct(kind, Seen()))]
    # Those held out come last, because no training document may be like them.
    kept = distinct(sorted(found, key=lambda each: each.document.held_out), seen)
    return sorted((each.document for each in kept), key=lambda document: checksum(document.ids))


def distinct(candidates: Iterable[Candidate], seen: Seen) -> list[Candidate]:
    """Return the candidates without near-duplicates of ``seen`` and of those before them, and add them to ``seen``."""
    kept = list[Candidate]()
    for each in candidates:
        if not seen.has(each.document.ids[each.start :]):
            seen.add(each.document.ids)
            kept.append(each)
    return kept


def hold_out(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates of one kind, a twentieth of whose parts are held out."""
    parts = held_out_of(each.part for each in candidates)
    return [each._replace(document=replace(each.document, held_out=each.part in parts)) for each in candidates]


def text_candidates(texts: Iterable[str], tokenizer: Tokenizer) -> list[Candidate]:
    """Cut texts into documents, each with the BOS that the model's prompts have."""
    bos, found = tokenizer.prefix_ids, list[Candidate]()
    for part in (part for text in texts for part in stretches(text)):
        for piece in pieces(tokenizer.encode(part, special=False).tolist(), MOST_TOKENS - len(bos), tokenizer):
            document = Document([*bos, *piece], 0, "text", False, False)
            found += [Candidate(document, len(bos), zlib.crc32(part.encode()))] if len(document.ids) > 1 else []
    return found


def stretches(text: str) -> list[str]:
    """Cut a text at line ends into parts of about ``STRETCH`` bytes; lines may be cut that are longer themselves."""
    parts, part, size = list[str](), list[str](), 0
    for line in text.splitlines(keepends=True):
        for piece in (line[start : start + STRETCH] for start in range(0, len(line), STRETCH)):
            part.append(piece)
            size += len(piece.encode())
            if size >= STRETCH:
                parts.append("".join(part))
                part, size = [], 0
    if parts and size < STRETCH // 4:
        parts[-1] += "".join(part)
    elif part:
        parts.append("".join(part))
    return parts


def pieces(ids: list[int], most: int, tokenizer: Tokenizer) -> list[list[int]]:
    """Cut tokens into pieces of at most ``most``, at line ends if there are any in a piece's second half."""
    found = list[list[int]]()
    while len(ids) > most:
        places = range(most, most // 2, -1)
        at = next((place for place in places if between_lines(*ids[place - 1 : place + 1], tokenizer)), most)
        found.append(ids[:at])
        ids = ids[at:]
    return [*found, ids]


def between_lines(before: int, after: int, tokenizer: Tokenizer) -> bool:
    return tokenizer.token_bytes(before).endswith(b"\n") or tokenizer.token_bytes(after).startswith(b"\n")


def chat_candidates(chats: Iterable[Chat], prompts: PromptEncoder) -> list[Candidate]:
    """Make documents of chats; all that follows the first answer counts. Chats with the same prompt stay together."""
    found = list[Candidate]()
    for chat in chats:
        try:
            ids, answer = chat_tokens(chat, prompts)
            start = content_start(chat, ids, prompts)
        except OvspecError as error:
            raise OvspecError(f"{chat.place}: {error}") from None
        part = checksum(ids[:answer])
        cut = max(0, answer - MOST_TOKENS // 2)  # of a long prompt, the end matters
        answer, start = answer - cut, start - cut
        for piece in pieces(ids[cut:], MOST_TOKENS, prompts.tokenizer):
            if answer < len(piece):
                document = Document(piece, max(0, answer), "chats", False, False)
                found.append(Candidate(document, max(0, start), part))
            answer, start = answer - len(piece), start - len(piece)
    return found


def chat_tokens(chat: Chat, prompts: PromptEncoder) -> tuple[list[int], int]:
    """Return the tokens of a chat, and at which its first answer begins.

    Those before are the prompt as the model gets it, unless the template writes a prompt otherwise once it is answered.
    """
    encode, messages = prompts.tokenizer.encode, chat.messages
    first = next(index for index, message in enumerate(messages) if index and message["role"] == "assistant")
    prompt = prompts.chat_format.render_prompt(messages[:first], chat.tools)
    whole = prompts.chat_format.render_prompt(messages, chat.tools, open=False)
    before = encode(prompt, special=False).tolist()
    if whole.startswith(prompt):
        return [*before, *prompts.tokenizer.encode_continuation(whole[len(prompt) :]).tolist()], len(before)
    ids = encode(whole, special=False).tolist()
    return ids, Tokens(before).common_prefix_length(np.array(ids))


def content_start(chat: Chat, ids: list[int], prompts: PromptEncoder) -> int:
    """Return at which token of a chat the first message of the user begins, which no other chat need have."""
    first = next(index for index, message in enumerate(chat.messages) if message["role"] == "user")
    other = [*chat.messages[:first], {"role": "user", "content": "?"}]
    return Tokens(ids).common_prefix_length(prompts.encode(other, tools=chat.tools))


def given_prompts(given: Given, prompts: PromptEncoder) -> list[list[int]]:
    """Return the tokens of the chats that the model is to answer."""
    found = list[list[int]]()
    for chat in given.chats:
        if not chat.answered:
            try:
                found.append(prompts.encode(chat.messages, tools=chat.tools).tolist())
            except OvspecError as error:
                raise OvspecError(f"{chat.place}: {error}") from None
    return found
