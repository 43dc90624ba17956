"""What somebody who types a question to an instruct model is told, and the sampling that its chats get."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_runs import Outcome, runs

from ovspec.cli import generate as command_module

SHORT = ("-n", "6", "--engine", "stateful", "--arithmetic", "fast")  # which loads fastest
QUESTION = "What is the capital of France?"
ASKED = "--chat sends it as a chat message"
RECOMMENDED = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 20}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_dir: Path) -> Iterator[Callable[..., Outcome]]:
    yield from runs(monkeypatch, tmp_path, cache_dir)


# ---------------------------------------------------------------- chats


@pytest.mark.parametrize(
    ("options", "sampling", "told"),
    [
        ((), (1.5, 20, 0.9), "temperature 1.5, top-k 20, top-p 0.9"),
        (("-t", "0.5"), (0.5, 20, 0.9), "top-k 20, top-p 0.9"),
        (("--top-p", "1"), (1.5, 20, 1.0), "temperature 1.5, top-k 20"),
        (("--top-k", "7", "--top-p", "0.5"), (1.5, 7, 0.5), "temperature 1.5"),
        (("-t", "2", "--top-k", "0", "--top-p", "0.5"), (2.0, 0, 0.5), None),
        (("-t", "0"), (0.0, 0, 1.0), None),
        (
            ("--draft", "--lookahead", "2", "--accept", "rejection"),
            (1.5, 20, 0.9),
            "temperature 1.5, top-k 20, top-p 0.9",
        ),
        (("--regex", "[a-z]+", "--frequency-penalty", "1"), (1.5, 20, 0.9), "temperature 1.5, top-k 20, top-p 0.9"),
    ],
)
def test_a_chat_is_sampled_as_recommended(
    run: Callable[..., Outcome],
    with_generation_config: Callable[[dict[str, Any]], Path],
    options: tuple[str, ...],
    sampling: tuple[float, int, float],
    told: str | None,
) -> None:
    found = run("chat", with_generation_config(RECOMMENDED), *SHORT, *options, stdin="hi\n")
    assert found.code == 0, found.err
    params = found.rows[0].params
    assert (params.temperature, params.top_k, params.top_p) == sampling
    line = f"Sampling as the model recommends: {told}; --temperature 0 for greedy.\n"
    assert found.err.count(line) == (told is not None) and found.err.count("recommends") == (told is not None)


def test_a_recommended_chat_is_what_the_options_give(
    run: Callable[..., Outcome], with_generation_config: Callable[[dict[str, Any]], Path]
) -> None:
    folder, seed = with_generation_config(RECOMMENDED), ("--seed", "3", "-n", "20")
    options = ("-t", "1.5", "--top-p", "0.9", "--top-k", "20")
    texts = [run("chat", folder, *SHORT, *more, *seed, stdin="hi\n").tokens for more in ((), options, ("-t", "0"))]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("config", [{}, RECOMMENDED | {"do_sample": False}, {"temperature": 1.5, "top_p": 0.9}])
def test_a_chat_without_a_recommendation_is_greedy(
    run: Callable[..., Outcome], with_generation_config: Callable[[dict[str, Any]], Path], config: dict[str, Any]
) -> None:
    folder = with_generation_config(config)
    found = run("chat", folder, *SHORT, stdin="hi\n")
    assert found.code == 0 and not found.rows[0].params.is_sampled and "recommends" not in found.err
    refused = run("chat", folder, *SHORT, "--top-p", "0.5", stdin="hi\n")
    assert refused.code == 2 and "--top-p needs a --temperature above 0." in refused.err


def test_other_commands_stay_greedy(
    run: Callable[..., Outcome], with_generation_config: Callable[[dict[str, Any]], Path]
) -> None:
    folder = with_generation_config(RECOMMENDED)
    Path("in.txt").write_text("hi\n", "utf-8")
    for arguments in (("generate", folder, "hi", "--chat"), ("batch", folder, "in.txt", "-o", "out", "--chat")):
        found = run(*arguments, *SHORT)
        assert found.code == 0 and not found.rows[0].params.is_sampled and "recommends" not in found.err


def test_a_wrong_recommendation_names_its_file(
    run: Callable[..., Outcome], with_generation_config: Callable[[dict[str, Any]], Path]
) -> None:
    folder = with_generation_config({"do_sample": True, "top_p": 3})
    found = run("chat", folder, *SHORT, stdin="hi\n")
    assert found.code == 1 and "generation_config.json: top_p is 3; it must be" in found.err
    assert "export the model again, or set --temperature 0." in found.err
    assert run("chat", folder, *SHORT, "-t", "0", stdin="hi\n").code == 0
    assert run("generate", folder, "hi", *SHORT).code == 0


# ---------------------------------------------------------------- questions to 'generate'


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((QUESTION,), True),
        (("-p", QUESTION), True),
        ((QUESTION, "--samples", "2", "-t", "1"), True),
        ((QUESTION, "--chat"), False),
        ((QUESTION, "--raw"), False),
        ((QUESTION, "--heal"), False),
        ((QUESTION, "--regex", ".* yes", "--constrain-from", "@0"), False),
        ((QUESTION, "--json"), False),
        ((QUESTION, "--samples", "2", "-t", "1", "--json"), False),
        (("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",), False),
        (("--file", "prompt.txt"), False),
        (("--token-ids", "5 6"), False),
        ((), False),
    ],
)
def test_a_typed_question_is_told_of_chats(
    run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, pair: Path, arguments: tuple[str, ...], told: bool
) -> None:
    Path("prompt.txt").write_text(QUESTION, "utf-8")
    monkeypatch.setattr(command_module, "on_terminal", lambda: True)
    found = run("generate", pair, *arguments, *SHORT, stdin="" if arguments else QUESTION)
    assert found.code == 0, found.err
    assert (ASKED in found.err) == told and ASKED not in found.out


def test_a_question_is_not_told_of_chats_where_there_are_none(
    run: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    with_generation_config: Callable[[dict[str, Any]], Path],
) -> None:
    monkeypatch.setattr(command_module, "on_terminal", lambda: True)
    base = with_generation_config({"pad_token_id": 0})
    (base / "chat_template.jinja").unlink()
    found = run("generate", base, QUESTION, *SHORT)
    assert found.code == 0 and ASKED not in found.err
    found = run("generate", QUESTION, *SHORT)  # the demo pair continues code
    assert found.code == 0 and ASKED not in found.err


def test_a_base_model_is_for_generate(
    run: Callable[..., Outcome], with_generation_config: Callable[[dict[str, Any]], Path]
) -> None:
    base = with_generation_config({"pad_token_id": 1})
    (base / "chat_template.jinja").unlink(missing_ok=True)
    told = f"{base}: a base model without a chat template; "
    for command, instead in (
        (("chat", base), "continue a text with 'ovspec generate'"),
        (("generate", base, "hi", "--chat"), "leave out --chat"),
    ):
        found = run(*command, *SHORT, stdin="hi\n")
        assert (found.code, found.err) == (1, f"{told}{instead}, or set --chat-template.")
        given = run(*command, *SHORT, "--chat-template", "chatml", stdin="hi\n")
        assert given.code == 0, given.err
        prompt = given.rows[0].sequence.tokens[: given.rows[0].prompt_length]
        assert (
            given.lm.tokenizer.decode_with_special(prompt) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        )


def test_a_log_is_not_told_of_chats(run: Callable[..., Outcome], pair: Path) -> None:
    found = run("generate", pair, QUESTION, *SHORT)
    assert found.code == 0 and ASKED not in found.err


def test_a_text_that_goes_on_is_not_told_of_chats(
    run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, pair: Path
) -> None:
    monkeypatch.setattr(command_module, "on_terminal", lambda: True)
    found = [run("generate", pair, "It was", *SHORT, "--session", "story.ov").err for _ in range(2)]
    assert [ASKED in err for err in found] == [True, False]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_question_in_a_terminal(command_environment: dict[str, str], pair: Path) -> None:
    import pexpect

    arguments = ["-m", "ovspec", "generate", str(pair), QUESTION, *SHORT]
    child = pexpect.spawn(sys.executable, arguments, env=command_environment, encoding="utf-8", timeout=60)  # type: ignore[arg-type]
    child.setwinsize(40, 200)
    child.expect("The prompt was continued as plain text; --chat sends it as a chat message, --raw hides this note.")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
