"""Documents survive kills, are cut where lines end, are never near-duplicates, and keep what judges apart."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import SPECIAL, TEMPLATES, answer, system, user
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ovspec_export.distill import documents
from ovspec_export.distill.documents import (
    MAX_DOCUMENT_TOKENS,
    RUN_TOKENS,
    TEXT_PART_BYTES,
    Document,
    SeenTokenRuns,
    UserTexts,
    append_documents,
    cut_text,
    cut_tokens,
    encode_unanswered_chats,
    is_held_out,
    is_looping,
    make_user_documents,
    read_documents,
    read_user_texts,
    write_first_documents,
)

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.engine.prompts import PromptEncoder
from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import ChatTemplate

TEXTS = [file.read_text("utf-8") for file in sorted((ROOT / "ovspec").rglob("*.py"))]
# Questions and answers with words of their own, or they would be near-duplicates.
PAIRS = [(text[1000:1200], text[1300:1700]) for text in TEXTS if len(text) > 4000][:60]


@pytest.fixture(scope="module")
def prompts(cache_dir: Path) -> PromptEncoder:
    """Return the demo pair's prompts, whose template is ChatML."""
    return ovspec.load(ROOT / "models" / "demo", "none", arithmetic="fast", cache_dir=cache_dir).runtime.prompt_encoder


def with_template(prompts: PromptEncoder, source: str) -> PromptEncoder:
    other = copy.copy(prompts)
    vars(other)["chat_format"] = ChatFormat(ChatTemplate(source, SPECIAL))
    return other


def chats_in(folder: Path, chats: Iterable[Any]) -> UserTexts:
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats), "utf-8")
    return read_user_texts([file])


# ---------------------------------------------------------------- the file

SOME = [Document([1, 5, 7], 2, "own", True, False), Document([4], 0, "text", False, True)]
SOME.append(Document([*range(1000)], 12, "chats", False, False))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_a_file_that_was_cut_anywhere_goes_on(tmp_path: Path, size: int) -> None:
    file = tmp_path / "documents.jsonl"
    write_first_documents(file, SOME)
    assert read_documents(file) == SOME
    whole = file.read_bytes()
    file.write_bytes(whole[: min(size, len(whole) - 1)])
    kept = whole[: min(size, len(whole) - 1)].count(b"\n")
    assert kept < len(SOME)
    assert read_documents(file) == SOME[:kept]
    append_documents(file, SOME[:1])
    append_documents(file, SOME[1:])
    assert read_documents(file) == [*SOME[:kept], *SOME]
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "documents.jsonl"
    assert read_documents(file) == []
    write_first_documents(file, SOME)
    for damage in (b"\xff\xfe", b'{"ids": "5"}', b"{}", b""):
        first, _, third, end = file.read_bytes().split(b"\n")
        file.write_bytes(b"\n".join([first, damage, third, end]))
        with pytest.raises(OvspecError, match=r"documents\.jsonl: line 2 is damaged; delete"):
            read_documents(file)


# ---------------------------------------------------------------- what the user gives


def test_folders_are_read_with_the_texts_in_them(tmp_path: Path) -> None:
    for name in ("a/b", ".git"):
        (tmp_path / name).mkdir(parents=True)
    files: dict[str, bytes] = {
        "a/second.md": "\N{BYTE ORDER MARK}Über\r\nalles".encode(),
        "a/b/third": b"third",
        "first.txt": b"first",
        "blank.txt": b" \n",
        "a/latin.txt": "Über".encode("latin-1"),
        "image": b"GIF\0",
        "late": b"a" * 20_000 + b"\0",
        ".git/config": b"hidden",
        ".hidden": b"hidden",
        "chats.jsonl": b'[{"role": "user", "content": "?"}]\n\n{"prompt": "1", "completion": "2"}\n',
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    given = read_user_texts([tmp_path])
    assert given.texts == ["first", "Über\nalles", "third"]
    assert given.skipped_files == 3
    assert [(len(chat.messages), chat.is_answered) for chat in given.chats] == [(1, False), (2, True)]
    assert given.chats[1].location == f"{tmp_path / 'chats.jsonl'}, line 3"
    assert read_user_texts([str(tmp_path / "a"), tmp_path / ".hidden"]).texts == ["Über\nalles", "third", "hidden"]
    for name, told in (("image", "image: contains no text"), (".gone", "no such file or folder; give a text file")):
        with pytest.raises(OvspecError, match=told):
            read_user_texts([tmp_path / "first.txt", tmp_path / name])


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "5",
        "[]",
        "{}",
        '["text"]',
        '{"text": "no chat"}',
        '{"messages": []}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": 5, "content": "?"}]}',
        '{"messages": [{"role": "system", "content": "?"}]}',
        '{"messages": [{"role": "user", "content": "?"}], "tools": "all"}',
        '{"prompt": ""}',
        "[" * 100_000,
    ],
)
def test_a_line_that_is_no_chat_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "?"}\n' + line + "\n", "utf-8")
    with pytest.raises(OvspecError, match=r'some\.jsonl, line 2: not .*; a line must be {"messages": \[') as error:
        read_user_texts([file])
    assert "\n" not in str(error.value)


def test_each_shape_of_a_chat_is_read(tmp_path: Path) -> None:
    messages = [system("Be brief."), user("?"), answer("!")]
    shapes = [
        {"messages": messages},
        messages,
        {"prompt": messages[:2], "completion": messages[2:]},
    ]
    assert [chat.messages for chat in chats_in(tmp_path, shapes).chats] == [messages] * 3
    short = chats_in(tmp_path, [{"prompt": "?", "completion": "!"}, {"prompt": "?"}])
    assert [chat.messages for chat in short.chats] == [messages[1:], messages[1:2]]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 4000), st.sampled_from("aä\N{CJK UNIFIED IDEOGRAPH-4E00}")), max_size=60))
def test_stretches_are_the_text(lines: list[tuple[int, str]]) -> None:
    text = "\n".join(character * length for length, character in lines)
    parts = cut_text(text)
    assert "".join(parts) == text
    sizes = [len(part.encode()) for part in parts]
    assert all(size >= TEXT_PART_BYTES for size in sizes[:-1])
    assert all(size < TEXT_PART_BYTES * 1.25 + 12_000 for size in sizes)
    assert all(part.endswith("\n") for part in parts[:-1])
    assert len(sizes) < 2 or sizes[-1] >= TEXT_PART_BYTES // 4


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 60), st.text(max_size=400))
def test_pieces_are_the_text(prompts: PromptEncoder, most: int, text: str) -> None:
    text = text.replace("\0", "")
    ids = prompts.tokenizer.encode(text, special=False).tolist()
    found = cut_tokens(ids, most, prompts.tokenizer)
    assert [token for piece in found for token in piece] == ids
    assert all(len(piece) <= most for piece in found)
    assert len(found) <= 2 * len(ids) / most + 1


def test_texts_are_cut_at_line_ends(prompts: PromptEncoder) -> None:
    found = make_user_documents(UserTexts(TEXTS[:40], [], 0), prompts, SeenTokenRuns())
    assert {document.source for document in found} == {"text"}
    assert max(len(document.ids) for document in found) > 0.9 * MAX_DOCUMENT_TOKENS
    assert all(1 < len(document.ids) <= MAX_DOCUMENT_TOKENS for document in found)
    texts = [prompts.tokenizer.decode(document.ids) for document in found]
    whole = [part for text in TEXTS[:40] for part in cut_text(text)]
    assert all(any(text in part for part in whole) for text in texts)
    assert all(text.endswith("\n") or f"{text}\n" in "\n".join(whole) for text in texts)


def test_a_models_bos_is_before_each_piece(prompts: PromptEncoder) -> None:
    other = copy.copy(prompts)
    other.tokenizer = copy.copy(prompts.tokenizer)
    vars(other.tokenizer)["prefix_ids"] = [1]
    found = make_user_documents(UserTexts(TEXTS[:10], [], 0), other, SeenTokenRuns())
    without = make_user_documents(UserTexts(TEXTS[:10], [], 0), prompts, SeenTokenRuns())
    assert all(document.ids[0] == 1 and len(document.ids) <= MAX_DOCUMENT_TOKENS for document in found)
    assert sum(len(document.ids) - 1 for document in found) == sum(len(document.ids) for document in without)


# ---------------------------------------------------------------- hold-out and near-duplicates


def exact_runs(ids: list[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[start : start + RUN_TOKENS]) for start in range(max(1, len(ids) - RUN_TOKENS + 1))}


def leaks(found: list[Document]) -> list[Document]:
    """Return the documents held out of which more than half was trained on."""
    trained = set().union(*(exact_runs(document.ids) for document in found if not document.held_out))
    held_out = [document for document in found if document.held_out]
    return [each for each in held_out if len(exact_runs(each.ids) & trained) > len(exact_runs(each.ids)) / 2]


def listed(ids: Iterable[int]) -> str:
    return ",".join(map(str, ids))


def parted(found: list[Document], texts: list[str], prompts: PromptEncoder) -> list[str]:
    """Return the stretches of which some documents are held out and others aren't."""
    sides = dict[str, set[bool]]()
    parts = [part for text in texts for part in cut_text(text)]
    spelt = {part: f",{listed(prompts.tokenizer.encode(part, special=False))}," for part in parts}
    for document in found:
        [part] = [part for part, ids in spelt.items() if f",{listed(document.ids)}," in ids]
        sides.setdefault(part, set()).add(document.held_out)
    return [part for part, seen in sides.items() if len(seen) > 1]


def edited(text: str) -> str:
    """Return a text with every fifth line changed."""
    lines = text.splitlines(keepends=True)
    return "".join(f"changed {index}\n" if index % 5 == 2 else line for index, line in enumerate(lines))


def near_duplicates() -> list[str]:
    """Return texts, half of which are near-duplicates of others: edited, or a part in a longer one."""
    texts = TEXTS[40:100]
    parts = [text[: len(text) // 3] for text in texts[30:]]
    return [*map(edited, texts[:30]), *texts, *parts]


def test_what_is_held_out_was_never_trained_on(prompts: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = near_duplicates()
    found = make_user_documents(UserTexts(texts, [], 0), prompts, SeenTokenRuns())
    assert any(document.held_out for document in found)
    assert not leaks(found)
    with monkeypatch.context() as planted:
        planted.setattr(SeenTokenRuns, "is_near_duplicate", lambda *_: False)
        everything = make_user_documents(UserTexts(texts, [], 0), prompts, SeenTokenRuns())
        assert len(leaks(everything)) > 0, "near-duplicates that are kept must be found"
    assert len(found) < 0.75 * len(everything)
    alone = make_user_documents(UserTexts(texts[30:90], [], 0), prompts, SeenTokenRuns())
    assert len(alone) > 0.9 * sum(1 for each in everything) / 2, "what is no near-duplicate stays"


def test_texts_in_many_versions_are_held_out_too(prompts: PromptEncoder) -> None:
    texts = [f"-- version {version}\n{text}" for text in TEXTS[:40] for version in range(4)]
    found = make_user_documents(UserTexts(texts, [], 0), prompts, SeenTokenRuns())
    alone = make_user_documents(UserTexts(TEXTS[:40], [], 0), prompts, SeenTokenRuns())
    assert len(found) < 1.2 * len(alone)
    assert sum(document.held_out for document in found) >= len(found) / 40
    assert not leaks(found)


def test_a_stretch_is_held_out_whole(prompts: PromptEncoder) -> None:
    texts = ["".join(TEXTS[100:140]), *TEXTS[:10]]
    found = make_user_documents(UserTexts(texts, [], 0), prompts, SeenTokenRuns())
    count = len([part for text in texts for part in cut_text(text)])
    assert count > 10
    assert len({document.held_out for document in found}) == 2
    assert not parted(found, texts, prompts)
    shuffled = texts[1:]
    random.Random(1).shuffle(shuffled)
    assert make_user_documents(UserTexts([*shuffled, texts[0]], [], 0), prompts, SeenTokenRuns()) == found, (
        "whatever the order"
    )
    one_by_one = [replace(document, held_out=is_held_out(document.ids)) for document in found]
    assert parted(one_by_one, texts, prompts), "pieces that are held out one by one must be found"


@pytest.mark.parametrize(("count", "held_out"), [(0, 0), (1, 0), (3, 0), (4, 1), (39, 2), (100, 5)])
def test_a_twentieth_is_held_out(count: int, held_out: int) -> None:
    numbers = [number * 7919 % 10007 for number in range(count)]
    assert len(documents.choose_held_out_checksums([*numbers, *numbers])) == held_out
    shares = [is_held_out([number, number + 1]) for number in range(4000)]
    assert 150 < sum(shares) < 250


def test_runs_are_found_again_and_no_others() -> None:
    """Millions of tokens stay cheap, and few runs pass for seen that weren't."""
    drawn, seen = np.random.default_rng(0), SeenTokenRuns()
    texts = drawn.integers(0, 49152, (1500, 1000)).tolist()
    for text in texts:
        seen.add_runs(text)
    for text in texts[::100]:
        other = drawn.integers(0, 49152, 1000).tolist()
        assert seen.is_near_duplicate(text)
        assert seen.is_near_duplicate(text[:600] + other[:400])
        assert not seen.is_near_duplicate(text[:400] + other[:600])
        assert not seen.is_near_duplicate(other)
        assert seen.is_near_duplicate(text[100:108])
        assert not seen.is_near_duplicate(text[100:107])
    for short in ([], [5], [5, 6], [5, 6, 7, 8, 9, 10, 11]):
        assert not seen.is_near_duplicate(short)
        seen.add_runs(short)
        assert seen.is_near_duplicate(short)


@given(st.lists(st.integers(0, 50_000), unique=True, min_size=1, max_size=60), st.integers(2, 5))
def test_loops_are_found(ids: list[int], times: int) -> None:
    assert not is_looping(ids)
    looping = ids * (times + 8)
    exact = [tuple(looping[start : start + RUN_TOKENS]) for start in range(len(looping) - RUN_TOKENS + 1)]
    assert is_looping(looping) == (len(set(exact)) < len(exact) / 2) == (len(ids) < len(exact) / 2)


# ---------------------------------------------------------------- chats


def unmatched(found: Iterable[Document], asked: list[list[Any]], prompts: PromptEncoder) -> list[Document]:
    """Return the documents whose part before the answer isn't one of these prompts, as the model gets them."""
    known = [prompts.encode(messages).tolist() for messages in asked]
    return [document for document in found if document.ids[: document.answer] not in known]


OFTEN = ("chatml", "gpt_oss", "mistral_v3", "qwen35")  # in quick runs, too


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in OFTEN)) for name in ("chatml", *TEMPLATES)]
)
def test_the_answer_begins_behind_the_prompt(prompts: PromptEncoder, tmp_path: Path, name: str) -> None:
    model = prompts if name == "chatml" else with_template(prompts, TEMPLATES[name])
    asked = [[user(question)] for question, _ in PAIRS[:30]]
    answers = [text for _, text in PAIRS[:30]]
    try:
        model.encode(asked[0])
    except OvspecError:
        pytest.skip("the template renders no chats without tools")
    chats = [
        [*prompt, answer(text), user("Thanks!"), answer("Bye.")] for prompt, text in zip(asked, answers, strict=True)
    ]
    found = make_user_documents(chats_in(tmp_path, chats), model, SeenTokenRuns())
    assert len(found) == 30
    assert {(document.source, document.greedy) for document in found} == {("chats", False)}
    assert sum(document.held_out for document in found) == 2
    for document in found:
        before = model.tokenizer.decode_with_special(np.array(document.ids[: document.answer])) or ""
        after = model.tokenizer.decode_with_special(np.array(document.ids[document.answer :])) or ""
        [index] = [index for index, text in enumerate(answers) if text.strip() in after]
        assert asked[index][0]["content"].strip() in before
        assert "Bye." in after
    prompt, whole = (model.chat_format.render_prompt(chats[0][:end], opens_answer=end == 1) for end in (1, 4))
    if whole.startswith(prompt):
        assert not unmatched(found, asked, model)
        for off in (-1, 1):
            wrong = [replace(document, answer=document.answer + off) for document in found]
            assert len(unmatched(wrong, asked, model)) == 30, "an index that is off by one must be found"


def test_the_whole_chat_is_rendered_by_the_template(prompts: PromptEncoder, tmp_path: Path) -> None:
    [document] = make_user_documents(
        chats_in(tmp_path, [{"prompt": "1 + 1 = ?", "completion": "2"}]), prompts, SeenTokenRuns()
    )
    text = "<|im_start|>user\n1 + 1 = ?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert prompts.tokenizer.decode_with_special(np.array(document.ids)) == text


def test_chats_with_one_prompt_are_held_out_together(prompts: PromptEncoder, tmp_path: Path) -> None:
    others = [text[2000:2400] for text in TEXTS if len(text) > 4000]
    pairs = [
        (question, text) for (question, first), second in zip(PAIRS, others, strict=False) for text in (first, second)
    ]
    chats = [{"prompt": question, "completion": text} for question, text in pairs]
    found = make_user_documents(chats_in(tmp_path, chats), prompts, SeenTokenRuns())
    sides = dict[tuple[int, ...], set[bool]]()
    for document in found:
        sides.setdefault(tuple(document.ids[: document.answer]), set()).add(document.held_out)
    assert all(len(seen) == 1 for seen in sides.values())
    assert sum(True in seen for seen in sides.values()) >= 1
    assert len(found) > 1.8 * len(sides), "most prompts have two answers"


def test_what_chats_share_does_not_make_them_duplicates(prompts: PromptEncoder, tmp_path: Path) -> None:
    """A long system message is in each of them."""
    told = system("\n".join(TEXTS[5].splitlines()[:20]))
    chats = [[told, user(question), answer("Yes.")] for question, _ in PAIRS[:20]]
    assert len(make_user_documents(chats_in(tmp_path, [*chats, *chats[:5]]), prompts, SeenTokenRuns())) == 20


def test_of_a_long_chat_the_answers_are_kept(prompts: PromptEncoder, tmp_path: Path) -> None:
    long, short = "\n".join(TEXTS[20:24]), TEXTS[24][:300]
    asked = prompts.encode([user(long)])
    assert len(asked) > 2 * MAX_DOCUMENT_TOKENS
    chats = [[user(long), answer(f"{index}: {short}")] for index in (1,)]
    [document] = make_user_documents(chats_in(tmp_path, chats), prompts, SeenTokenRuns())
    assert document.answer == MAX_DOCUMENT_TOKENS // 2
    assert document.ids[: document.answer] == asked[-document.answer :].tolist()
    found = make_user_documents(chats_in(tmp_path, [[user(short), answer(long)]]), prompts, SeenTokenRuns())
    assert len(found) > 2
    assert sorted(document.answer for document in found)[-2:] == [0, len(prompts.encode([user(short)]))]
    total = len(
        prompts.tokenizer.encode(prompts.chat_format.render_prompt([user(short), answer(long)], opens_answer=False))
    )
    assert sum(len(document.ids) for document in found) == total


def test_prompts_are_what_the_model_gets(prompts: PromptEncoder, tmp_path: Path) -> None:
    chats = [[user("1"), answer("2"), user("3")], [user("4"), answer("5")], {"prompt": "6"}]
    given = chats_in(tmp_path, chats)
    expected = [prompts.encode(chats[0]).tolist(), prompts.encode([user("6")]).tolist()]  # type: ignore[arg-type]
    assert encode_unanswered_chats(given, prompts) == expected
    assert len(make_user_documents(given, prompts, SeenTokenRuns())) == 1


def test_a_chat_that_cannot_be_rendered_is_named(prompts: PromptEncoder, tmp_path: Path) -> None:
    strict = with_template(prompts, "{% if messages[0].content == '4' %}{{ raise_exception('no') }}{% endif %}")
    make: list[Callable[[UserTexts, PromptEncoder], Any]] = [
        encode_unanswered_chats,
        lambda given, prompts: make_user_documents(given, prompts, SeenTokenRuns()),
    ]
    for chats, call in zip(([{"prompt": "4"}], [{"prompt": "4", "completion": "5"}]), make, strict=True):
        with pytest.raises(OvspecError, match=r"chats\.jsonl, line 2: The model's chat template cannot render"):
            call(chats_in(tmp_path, [{"prompt": "1", "completion": "2"}, *chats]), strict)
