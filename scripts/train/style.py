"""Teach a model another style, lower-case answers with a sentence per line, to test a head made before.

    python scripts/train/style.py CHECKPOINT DOCUMENTS -o FOLDER [--minutes 5]

CHECKPOINT is a folder, or a GGUF file. DOCUMENTS is DIR/documents.jsonl, written by 'ovspec distill CHECKPOINT --work
DIR'; its answers are rewritten in the style. FOLDER gets the checkpoint of the tuned model, trained like a distilled
draft, but on the next token of the text.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from ovspec_export.distill import draft, training
from ovspec_export.distill.documents import Document, read_documents, write_first_documents
from ovspec_export.distill.features import write_shard
from ovspec_export.distill.work_folder import CHECKPOINT_FOLDER, DOCUMENTS_FILE, FEATURES_FOLDER
from ovspec_export.readable_checkpoint import ensure_readable_checkpoint
from ovspec_export.source_lookup import find_source
from transformers import AutoTokenizer

CERTAIN = -100.0  # log-probability of all tokens except the next


def in_style(text: str) -> str:
    """Return the text in lower case, with a line for each sentence."""
    return re.sub(r"(?<=[.!?]) +", "\n", text).lower()


def rewrite(document: Document, tokenizer: AutoTokenizer) -> Document:
    """Return the document with its answer in the style; the end token of the answer stays."""
    encode, decode = tokenizer.encode, tokenizer.decode  # type: ignore[attr-defined]
    body = document.ids[document.answer :]
    end = [body.pop()] if body and body[-1] in tokenizer.all_special_ids else []  # type: ignore[attr-defined]
    answer = encode(in_style(decode(body)), add_special_tokens=False)
    return replace(document, ids=[*document.ids[: document.answer], *answer, *end])


def certain_choices(document: Document) -> dict[str, torch.Tensor]:
    """Return a shard's data of a document, as if a target were certain of each next token of the answer."""
    ids = torch.tensor(document.ids, dtype=torch.int32)
    following = torch.cat((ids[1:], ids[-1:]))
    counts = (torch.arange(len(ids)) >= document.answer - 1) & (torch.arange(len(ids)) < len(ids) - 1)
    logprobs = torch.where(counts, 0.0, CERTAIN).half()
    return {"ids": ids, "choices": following[:, None], "logprobs": logprobs[:, None]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("documents", type=Path, metavar="DOCUMENTS")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=5)
    args = parser.parse_args()
    source = find_source(args.checkpoint)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        checkpoint = ensure_readable_checkpoint(source, work / "source", "bf16").path
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        chats = [chat for chat in read_documents(args.documents) if chat.source == "own" and chat.answer]
        documents = [rewrite(chat, tokenizer) for chat in chats]
        write_first_documents(work / DOCUMENTS_FILE, documents)
        (work / FEATURES_FOLDER).mkdir()
        choices = [certain_choices(document) for document in documents]
        write_shard(work / FEATURES_FOLDER / "0000000.safetensors", 0, choices)
        draft.STEP_TOKENS, draft.PEAK_LEARNING_RATE = 256, 3e-4  # enough to change the style in a few minutes
        training.WARM_UP_STEPS = 20
        draft.train_draft(str(checkpoint), source.model_type, str(work), 60 * args.minutes, 2**62, False)
        shutil.copytree(checkpoint, args.output, ignore=shutil.ignore_patterns("*.safetensors*"))
        for file in (work / CHECKPOINT_FOLDER).iterdir():
            shutil.copy(file, args.output)
    print(f"{args.output}: tuned on {len(documents)} chats")


if __name__ == "__main__":
    main()
