"""A model asks and answers in any template, goes on where it was stopped, and continues what the user gave."""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_templates import SPECIAL, TEMPLATES
from conftest import PROMPTS, ROOT
from hypothesis import given
from hypothesis import strategies as st
from ovspec_export.distill import texts
from ovspec_export.distill.documents import (
    MAX_DOCUMENT_TOKENS,
    Document,
    hash_token_runs,
    is_held_out,
    is_looping,
    read_documents,
)
from ovspec_export.distill.texts import (
    BEGINNING_TOKENS,
    DOCUMENTS_FILE,
    TOPIC_OPENING,
    find_turn_end,
    make_chat_messages,
    make_own_prompt_source,
    split_at_user_text,
    write_texts,
)
from real_families import DOWNLOADS, FAMILIES
from real_families import TEMPLATES as PUBLISHED

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.base.files import read_dataclass
from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import ChatTemplate
from ovspec.text.tokenizer_files import TOKENIZER_FILE, TokenizerFile

DEMO, REAL = ROOT / "models" / "demo", ROOT / "smollm2"
OPENS = "<|im_start|>assistant\n"
Write = Callable[..., list[Document]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    monkeypatch.setattr(texts, "WRITE_SECONDS", 0.1)
    monkeypatch.setattr(texts, "LOAD_SETTINGS", {**texts.LOAD_SETTINGS, "cache_dir": cache_dir})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo pair's draft, the quickest model there is, as a model of its own with the pair's template."""
    folder = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(DEMO / "draft", folder)
    shutil.copy(DEMO / "chat_template.jinja", folder)
    return folder


@pytest.fixture(scope="module")
def lm(model: Path, cache_dir: Path) -> ovspec.LanguageModel:
    return ovspec.load(model, "none", arithmetic="fast", precision="f32", cache_dir=cache_dir)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What jobs tell."""
    messages = list[dict[str, Any]]()
    monkeypatch.setattr(texts, "report_progress", lambda **figures: messages.append(figures))
    return messages


SHORT = {"max_rows": 16, "max_question_tokens": 24, "max_answer_tokens": 40}


@pytest.fixture
def write(tmp_path: Path, model: Path) -> Write:
    """Return a function that writes until there are so many tokens, and returns all documents in the work folder."""

    def write(tokens: int, model: Path = model, **options: Any) -> list[Document]:
        (tmp_path / "work").mkdir(exist_ok=True)
        write_texts(str(model), str(tmp_path / "work"), **{"seconds": 120, "tokens": tokens, **SHORT, **options})
        return read_documents(tmp_path / "work" / DOCUMENTS_FILE)

    return write


def test_a_job_does_not_end_with_nothing(
    write: Write, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that ticks with the rounds, after 33 of which no answer is long enough; twice the time is the end."""
    clock = itertools.count()
    monkeypatch.setattr(texts, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(texts, "MIN_UNFINISHED_TOKENS", 8)
    documents = write(10**9, seconds=100)
    assert 110 < next(clock) < 210
    assert any(not document.held_out for document in documents)
    assert told[-1]["tokens"] > 0 and told[-1]["begun"] == 0 < max(each.get("begun", 0) for each in told)
    assert all(not each["tokens"] for each in told[:-1]), "nothing was finished before"


# ---------------------------------------------------------------- templates

# What ends the turn of a user in templates like those of current families.
ENDS = {
    "apertus": "<|user_end|>",
    "command_r": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜Assistant｜>",
    "ernie45": "Assistant:",
    "exaone4": "[|endofturn|]",
    "gemma2": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "gemma4": "<turn|>",
    "glm4": "<|assistant|>",
    "gpt_oss": "<|end|>",
    "granite4": "<|end_of_text|>",
    "hunyuan": "<|extra_0|>",
    "lfm2": "<|im_end|>",
    "llama31": "<|eot_id|>",
    "llama4": "<|eot|>",
    "mistral_v3": "[/INST]",
    "mistral_v7": "[/INST]",
    "phi4_mini": "<|end|>",
    "qwen3": "<|im_end|>",
    "qwen35": "<|im_end|>",
    "qwen3_coder": "<|im_end|>",
    "seed_oss": "<seed:eos>",
    "smollm3": "<|im_end|>",
}


def format_of(source: str) -> ChatFormat:
    return ChatFormat(ChatTemplate(source, SPECIAL))


@pytest.mark.parametrize("name", ENDS)
def test_the_turn_of_a_user_is_found(name: str) -> None:
    format = format_of(TEMPLATES[name])
    before, after = split_at_user_text(format, None)
    whole = format.render_prompt(make_chat_messages("Why?", None))
    assert whole.replace(" Why?", "Why?") == f"{before}Why?{after}"
    if ENDS[name][0].isalpha():
        assert find_turn_end(after, {"<else>": 6}) == ([], [ENDS[name]])
    else:
        assert find_turn_end(after, {ENDS[name]: 7, ENDS[name][:3]: 8, " ": 9}) == ([7], [])
    assert find_turn_end(after.strip(), {"\n": 5, "<else>": 6})[0] == []
    topical, same = split_at_user_text(format, None, TOPIC_OPENING.format("fish"))
    assert (topical, same) == (
        before + (" " if whole != f"{before}Why?{after}" else "") + TOPIC_OPENING.format("fish").strip(),
        after,
    )


published = sorted(PUBLISHED.glob("*.jinja")) or [PUBLISHED / "none"]


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="llama.cpp's templates could not be fetched")
@pytest.mark.parametrize("file", published, ids=lambda file: file.stem)
def test_the_turn_of_a_user_is_found_in_published_templates(file: Path) -> None:
    format = format_of(file.read_text("utf-8"))
    try:
        whole = format.render_prompt(make_chat_messages("Why?", None))
    except OvspecError:
        pytest.skip("the template renders no chats without tools")
    before, after = split_at_user_text(format, None)
    assert whole.replace(" Why?", "Why?") == f"{before}Why?{after}"
    ids, [text] = find_turn_end(after, {})
    assert not ids
    assert text == after.strip()


@pytest.mark.skipif(not (DOWNLOADS / "tokenizers").is_dir(), reason="the real tokenizers could not be fetched")
@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3.5", "gpt-oss"))])
def test_a_token_of_the_vocabulary_ends_the_turn(name: str) -> None:
    family = FAMILIES[name]
    file = read_dataclass(TokenizerFile, DOWNLOADS / "tokenizers" / family.tokenizer / TOKENIZER_FILE)
    _, after = split_at_user_text(format_of((PUBLISHED / f"{family.template}.jinja").read_text("utf-8")), None)
    expected = {"qwen3.5": 151645, "gpt-oss": 200007, "llama": 128009}[name]
    assert find_turn_end(after, {token.content: token.id for token in file.added_tokens}) == ([expected], [])


@given(
    st.dictionaries(st.text("<>ab ", min_size=1, max_size=4), st.integers(0, 9), max_size=5),
    st.text("<>ab \n", max_size=20),
)
def test_what_comes_first_ends_the_turn(added: dict[str, int], after: str) -> None:
    ids, texts = find_turn_end(after, added)
    assert len(ids) + len(texts) <= 1
    for text in texts:
        assert text
        assert after.strip().startswith(text)
    for index in ids:
        named = [name for name in added if after.lstrip().startswith(name.lstrip()) and added[name] == index]
        assert named, (added, after)
    if after.strip():
        assert ids or texts


# ---------------------------------------------------------------- writing


def greedy_share(lm: ovspec.LanguageModel, document: Document) -> float:
    """Return in how many places of the answer the token is the model's first choice, by one pass."""
    decoders = lm.runtime.decoder_pool.acquire()
    try:
        decoders.reset(1)
        count = len(document.ids) - document.answer
        logits = decoders.target.feed([np.array(document.ids)], [count + 1])[0]
    finally:
        lm.runtime.decoder_pool.release(decoders)
    return float(np.mean(logits[:-1].argmax(-1) == document.ids[document.answer :]))


def misplaced(lm: ovspec.LanguageModel, found: list[Document]) -> list[Document]:
    """Return the documents whose answer doesn't begin right behind a prompt of the template."""
    opens = lm.tokenizer.encode(OPENS, special=False).tolist()
    return [each for each in found if each.ids[: each.answer][-len(opens) :] != opens]


def test_it_asks_and_answers_and_goes_on(lm: ovspec.LanguageModel, write: Write, told: list[dict[str, Any]]) -> None:
    first = write(1500)
    assert told[0] == {"tokens": 0, "per_second": 0, "documents": 0, "skipped": 0}
    total = sum(len(document.ids) for document in first)
    assert 1500 <= total < 8000
    assert {name: told[-1][name] for name in ("tokens", "documents")} == {"tokens": total, "documents": len(first)}
    assert told[-1]["per_second"] > 0
    done = len(told)
    second = write(3000)
    assert second[: len(first)] == first
    assert len(second) > len(first)
    assert told[done]["tokens"] == total
    assert {document.source for document in second} == {"own"}
    assert {document.greedy for document in second} == {True, False}
    for document in second:
        answer = document.ids[document.answer :]
        assert len(document.ids) <= MAX_DOCUMENT_TOKENS
        assert 0 < len(answer) <= 40
        assert not is_looping(answer)
        assert not set(lm.tokenizer.added_tokens.values()) & set(answer[:-1])
    prompts = [tuple(document.ids[: document.answer]) for document in second]
    assert len(set(prompts)) == len(prompts), "nothing is asked twice"
    assert not misplaced(lm, second)
    assert len(misplaced(lm, [replace(each, answer=each.answer + 1) for each in second])) == len(second)
    shares = {greedy: [greedy_share(lm, each) for each in second if each.greedy is greedy] for greedy in (True, False)}
    assert np.mean(shares[True]) > 0.9 > 0.8 > np.mean(shares[False]), "but for near-ties"


def test_what_is_asked_is_what_is_held_out(lm: ovspec.LanguageModel, write: Write) -> None:
    found = write(4500, max_answer_tokens=8)
    assert len({document.held_out for document in found}) == 2
    before, after = split_at_user_text(lm.runtime.prompt_encoder.chat_format, None)
    for document in found:
        text = lm.tokenizer.decode_with_special(np.array(document.ids[: document.answer])) or ""
        question = text.removesuffix(after).rpartition("user\n")[2]
        assert document.held_out == is_held_out(lm.tokenizer.encode(question, special=False).tolist())
    assert before.endswith("user\n")


def test_what_has_been_written_is_kept_when_it_is_to_stop(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[float]()
    monkeypatch.setattr(texts, "is_stop_requested", lambda: bool(asked.append(time.monotonic())) or len(asked) > 90)
    monkeypatch.setattr(texts, "WRITE_SECONDS", 60)
    began = time.monotonic()
    found = write(10**9)
    assert len(found) > 5
    assert len(asked) == 91, "it is asked after each round, and nothing is begun after that"
    assert time.monotonic() - asked[-1] < 0.2 * (time.monotonic() - began) + 1


KILLED = """
import sys, json
from ovspec_export.distill import texts
texts.WRITE_SECONDS = 0.1
texts.write_texts(**json.loads(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
def test_a_killed_one_goes_on(write: Write, model: Path, tmp_path: Path, command_environment: dict[str, str]) -> None:
    work = tmp_path / "work"
    work.mkdir()
    arguments = {"model": str(model), "work_folder": str(work), "seconds": 60, "tokens": 1e9, **SHORT}
    search = os.pathsep.join(filter(None, sys.path))
    environment = {**command_environment, "PYTHONPATH": search}
    process = subprocess.Popen([sys.executable, "-c", KILLED, json.dumps(arguments)], env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (work / DOCUMENTS_FILE).is_file() or (work / DOCUMENTS_FILE).read_bytes().count(b"\n") < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = read_documents(work / DOCUMENTS_FILE)
    with (work / DOCUMENTS_FILE).open("ab") as file:
        file.write(b'{"ids": [1, 2')
    found = write(sum(len(document.ids) for document in before) + 500)
    assert found[: len(before)] == before
    assert len(found) > len(before) >= 3
    prompts = [tuple(document.ids[: document.answer]) for document in found]
    assert len(set(prompts)) == len(prompts)
    assert [file.name for file in work.iterdir()] == [DOCUMENTS_FILE]


def test_a_model_without_a_template_begins_texts(write: Write, tmp_path: Path) -> None:
    shutil.copytree(DEMO / "draft", tmp_path / "base", ignore=shutil.ignore_patterns("chat_template*"))
    found = write(600, tmp_path / "base")
    assert {document.answer for document in found} == {BEGINNING_TOKENS}, "it has no BOS"
    assert {document.greedy for document in found} == {True, False}
    begun = [tuple(document.ids[:BEGINNING_TOKENS]) for document in found]
    assert len(set(begun)) == len(begun)


def test_it_continues_what_the_user_gave(lm: ovspec.LanguageModel, write: Write) -> None:
    files = sorted((ROOT / "ovspec" / "engine").glob("*.py"))[:6]
    given = write(1, texts=[str(file) for file in files])
    assert {(document.source, document.held_out) for document in given} == {("text", True), ("text", False)}
    found = write(sum(len(document.ids) for document in given) + 3000, texts=[str(ROOT / "README.md")])
    assert found[: len(given)] == given
    assert all(document.source == "own" for document in found[len(given) :]), "the user's texts are read once"
    runs_given = {
        side: set(np.concatenate([hash_token_runs(each.ids) for each in given if each.held_out is side]))
        for side in (True, False)
    }
    opens = lm.tokenizer.encode(OPENS, special=False).tolist()
    own = found[len(given) :]
    continued = [each for each in own if each.ids[: each.answer][-len(opens) :] != opens]
    assert len(continued) > 3
    assert len(own) > len(continued)
    for document in continued:
        assert 32 <= document.answer <= 128
        assert set(hash_token_runs(document.ids[: document.answer])) <= runs_given[document.held_out]


def test_the_users_prompts_are_answered_first_and_once(lm: ovspec.LanguageModel, write: Write, tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    asked = PROMPTS[:16]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked), "utf-8")
    prompts = [lm.encode(make_chat_messages(text, None)).tolist() for text in asked]
    found = write(2500, texts=[str(file)])
    answered = [document.ids[: document.answer] for document in found]
    first = [prompt for prompt in prompts if prompt in answered]
    assert len(first) > 3, "such a model often gets into a loop"
    assert max(map(answered.index, first)) < len(first) + 8
    found = write(3500, texts=[str(file)])
    answered = [document.ids[: document.answer] for document in found]
    assert all(answered.count(prompt) <= 1 for prompt in prompts)
    assert {document.source for document in found} == {"own"}


def test_topics_lead_to_questions_but_are_not_in_them(lm: ovspec.LanguageModel) -> None:
    asking = make_own_prompt_source(lm.runtime.prompt_encoder, ["fish", "birds"], texts.SeenTokenRuns(), 20)
    drawn = np.random.default_rng(0)
    leads = [asking.draw_opening(drawn) for _ in range(40)]
    told = {lm.tokenizer.decode_with_special(np.array(lead.ids)) for lead in leads}
    assert told == {f"<|im_start|>user\n{TOPIC_OPENING.format(topic).strip()}" for topic in ("fish", "birds")}
    anything = make_own_prompt_source(lm.runtime.prompt_encoder, [], texts.SeenTokenRuns(), 20)
    told = {lm.tokenizer.decode_with_special(np.array(anything.draw_opening(drawn).ids)) or "" for _ in range(60)}
    assert len(told) == 4
    assert sum("<|im_start|>system\n" in text for text in told) == 3


def test_without_a_system_role_there_are_no_system_messages(lm: ovspec.LanguageModel) -> None:
    prompts = copy.copy(lm.runtime.prompt_encoder)
    vars(prompts)["chat_format"] = format_of(TEMPLATES["gemma2"])
    asking, drawn = make_own_prompt_source(prompts, [], texts.SeenTokenRuns(), 20), np.random.default_rng(0)
    assert {prompts.tokenizer.decode_with_special(np.array(asking.draw_opening(drawn).ids)) for _ in range(30)} == {
        "<bos><start_of_turn>user\n"
    }


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the real model could not be fetched")
def test_a_real_model_asks_questions(tmp_path: Path) -> None:
    write_texts(str(REAL), str(tmp_path), seconds=100, tokens=20_000)
    found = read_documents(tmp_path / DOCUMENTS_FILE)
    real = ovspec.load(REAL, "none", arithmetic="fast")
    assert len(found) > 30
    assert not misplaced(real, found)
    special = set(real.tokenizer.added_tokens.values())
    asked = list[str]()
    for document in found:
        assert not special & set(document.ids[document.answer : -1])
        text = real.tokenizer.decode_with_special(np.array(document.ids[: document.answer])) or ""
        question = text.removesuffix(f"<|im_end|>\n{OPENS}").rpartition("<|im_start|>user\n")[2]
        assert "<|" not in question
        asked.append(question)
    words = ("can you", "what", "how", "i'm", "i am", "i have", "write", "create", "give", "why", "is ", "could")
    assert np.mean([any(word in question.lower() for word in words) for question in asked]) > 0.7
    assert np.mean([question.rstrip()[-1] in ".?!" for question in asked]) > 0.7, "they end of their own accord"
