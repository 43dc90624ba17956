"""Infilling, asked for as llama.vim and llama.vscode do it, on a random model with Qwen3's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kept import kept_model
from real_families import DOWNLOADS, FAMILIES, export
from servers import Running, StartHere

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT = 1536  # tokens
PREFIX, SUFFIX, BEGINNING = "def total(values):\n", "\n    return found\n", "    found = su"
EXTRA = [
    {"text": f"def helper_{n}(x):\n    return x + {n}\n", "time": [0, n], "filename": f"src/{n}.py"} for n in range(3)
]
AROUND = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": EXTRA, "prompt": BEGINNING}
FIELDS = ["content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms"]
FIELDS += ["timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms", "timings/predicted_per_token_ms"]
FIELDS += ["timings/predicted_per_second", "truncated", "tokens_cached"]
OF_EDITORS = {"id_slot": 0, "cache_prompt": True, "t_max_prompt_ms": 500}
# As autoload/llama.vim builds them.
VIM = {
    **AROUND,
    **OF_EDITORS,
    "n_predict": 128,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.90,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "t_max_predict_ms": 250,
    "response_fields": FIELDS,
    "model": "",
}
NOTHING = {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": []}
VIM_AHEAD = {**OF_EDITORS, **NOTHING, "input_extra": EXTRA, "temperature": 0.0, "stream": False}
VIM_AHEAD |= {"t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""], "model": ""}
# As src/llama-server.ts builds them.
VSCODE = {**AROUND, **OF_EDITORS, "n_predict": 128, "n_cmpl": 3, "top_k": 40, "top_p": 0.99, "stream": False}
VSCODE |= {"samplers": ["top_k", "top_p", "infill"], "n_indent": 4, "t_max_predict_ms": 2500}
VSCODE_AHEAD = {**OF_EDITORS, **NOTHING, "input_extra": EXTRA, "t_max_predict_ms": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (DOWNLOADS / "tokenizers" / "qwen3").is_dir():
        pytest.skip("the tokenizer could not be fetched")
    return kept_model(tmp_path_factory, "real-qwen3", lambda place: export(FAMILIES["qwen3"], place))


@pytest.fixture(scope="module")
def coder(start_here: StartHere, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """A server of the model, with a short context, which is soon full."""
    short = tmp_path_factory.mktemp("coder") / "model"
    short.mkdir()
    for file in folder.iterdir():
        if file.name not in ("config.json", "ovspec.json"):
            (short / file.name).hardlink_to(file)
    config = json.loads((folder / "config.json").read_text("utf-8")) | {"max_position_embeddings": CONTEXT}
    (short / "config.json").write_text(json.dumps(config), "utf-8")
    options = ("--draft", "lookup", "--lookahead", "4", "--precision", "f32", "--model-name", "coder", "--no-tune")
    return start_here(short, *options)


@pytest.fixture(scope="module")
def theirs() -> Tokenizer:
    """Hugging Face's tokenizer, without transformers, whose import takes seconds."""
    from tokenizers import Tokenizer

    if not (DOWNLOADS / "tokenizers" / "qwen3").is_dir():
        pytest.skip("the tokenizer could not be fetched")
    return Tokenizer.from_file(str(DOWNLOADS / "tokenizers" / "qwen3" / "tokenizer.json"))


def filled(server: Running, **more: Any) -> Any:
    answer = server.post("/infill", {**AROUND, "n_predict": 12, "draft": "none", **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def pieces(server: Running, **more: Any) -> list[Any]:
    text = server.post("/infill", {**AROUND, "n_predict": 12, "stream": True, **more}).text
    return [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part]


def layout(extra: list[dict[str, Any]], prefix: str = PREFIX, suffix: str = SUFFIX, beginning: str = BEGINNING) -> str:
    """Return the prompt that llama.cpp documents."""
    files = "".join(f"<|file_sep|>{chunk['filename']}\n{chunk['text']}" for chunk in extra)
    middle = f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>{beginning}"
    return f"<|repo_name|>myproject\n{files}<|file_sep|>filename\n{middle}"


def ids_of(answer: Any) -> list[int]:
    return answer["record"]["prompt_token_ids"]


# ---------------------------------------------------------------- prompts


def test_the_prompt_is_llama_cpps(coder: Running, theirs: Tokenizer) -> None:
    for extra in (EXTRA, []):
        found = filled(coder, input_extra=extra, return_record=True)
        assert theirs.decode(ids_of(found), skip_special_tokens=False) == found["prompt"] == layout(extra)
        parts = [theirs.token_to_id(f"<|fim_{name}|>") for name in ("prefix", "suffix", "middle")]
        assert [token for token in ids_of(found) if token in parts] == parts
        assert found["tokens_evaluated"] == len(ids_of(found))


def test_a_token_that_is_spelt_in_a_text_stays_text(coder: Running, theirs: Tokenizer) -> None:
    spelt = "a <|fim_middle|> b <|endoftext|><|fim_suffix|>"
    extra = [{"text": spelt, "filename": spelt}]
    around = {"input_prefix": spelt, "input_suffix": spelt, "input_extra": extra, "prompt": spelt}
    found = filled(coder, **around, return_record=True)
    assert theirs.decode(ids_of(found), skip_special_tokens=False) == layout(extra, spelt, spelt, spelt)
    for name in ("<|fim_middle|>", "<|fim_suffix|>"):
        assert ids_of(found).count(theirs.token_to_id(name)) == 1
    assert theirs.token_to_id("<|endoftext|>") not in ids_of(found)


def test_chunks_that_do_not_fit_are_left_out_whole(coder: Running) -> None:
    extra = [{"text": f"x{n} = 1\n" * 30, "filename": f"{n}.py"} for n in range(16)]
    found = filled(coder, input_extra=extra, n_predict=1)
    first = next(n for n in range(16) if layout(extra[n:]) == found["prompt"])
    assert 0 < first < 15 and found["tokens_evaluated"] < found["generation_settings"]["n_ctx"] == CONTEXT
    refused = coder.post("/infill", {**AROUND, "input_prefix": "x = 1\n" * 2000})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["code"] == "context_length_exceeded", error
    assert error["param"] == "input_prefix"


def test_a_prompt_is_read_ahead(coder: Running) -> None:
    extra = [{"text": f"read_ahead_{n} = {n}\n" * 40, "filename": f"{n}.py"} for n in range(2)]
    generated = coder.metric("ovspec_generated_tokens_total")
    ahead = filled(coder, **NOTHING, input_extra=extra)
    assert (ahead["content"], ahead["tokens_predicted"], ahead["tokens_cached"]) == ("", 0, 0)
    assert ahead["stop_type"] == "limit" and ahead["generation_settings"]["n_predict"] == 0
    assert coder.metric("ovspec_generated_tokens_total") == generated
    found = filled(coder, input_extra=extra)
    assert found["tokens_cached"] > 400 and found["timings"]["cache_n"] == found["tokens_cached"]
    assert found["timings"]["prompt_n"] == found["tokens_evaluated"] - found["tokens_cached"]
    assert pieces(coder, **NOTHING, input_extra=extra)[-1]["content"] == ""


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "once more " * 100}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Read this ahead. " * 50}]}),
    ],
)
def test_other_prompts_are_read_ahead(coder: Running, path: str, prompt: Any) -> None:
    """As llama.vim does it while an instruction is typed; also where a grammar would force tokens."""
    body = {**prompt, "id_slot": 1, "samplers": [], "cache_prompt": True, "response_fields": [""]}
    ahead = coder.post(path, {**body, "n_predict": 0, "stream": False, "regex": "yes"}).json()
    [choice] = ahead["choices"]
    assert (choice.get("text") or choice.get("message", {}).get("content") or "") == ""
    assert choice["finish_reason"] == "length" and ahead["usage"]["completion_tokens"] == 0
    assert ahead["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    usage = coder.post(path, {**body, "n_predict": 9}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 64


# ---------------------------------------------------------------- how texts end

ENDS = [f"<|{name}|>" for name in ("fim_prefix", "fim_suffix", "fim_middle", "fim_pad", "repo_name", "file_sep")]


@pytest.mark.parametrize("name", [*ENDS, "<|endoftext|>", "<|im_end|>"])
def test_tokens_that_end_a_text_are_not_shown(coder: Running, theirs: Tokenizer, name: str) -> None:
    bias = {str(theirs.token_to_id(name)): 100}
    found = filled(coder, logit_bias=bias)
    assert (found["content"], found["stop_type"], found["tokens_predicted"]) == ("", "eos", 1)
    suffixed = coder.post("/v1/completions", {"prompt": PREFIX, "suffix": SUFFIX, "logit_bias": bias}).json()
    assert [(each["text"], each["finish_reason"]) for each in suffixed["choices"]] in ([("", "stop")], [("", "eos")])
    assert filled(coder, logit_bias=bias, ignore_eos=True)["tokens_predicted"] == 12


def test_a_text_ends_before_a_line_that_is_indented_less(coder: Running) -> None:
    whole = r"sum\(values\)\n    b = 1\n\t  \tc\n  d\n    e"
    for least, expected in ((4, "sum(values)\n    b = 1\n\t  \tc"), (2, None), (5, "sum(values)"), (0, None)):
        text = "sum(values)\n    b = 1\n\t  \tc\n  d\n    e"
        asked = {"regex": whole, "n_indent": least, "n_predict": 60}
        found = filled(coder, **asked)
        assert found["content"] == (expected or text), least
        assert found["stop_type"] == ("limit" if expected else "eos") and found["has_new_line"] == (least != 5)
        told = pieces(coder, **asked)
        assert "".join(each["content"] for each in told) == found["content"]
    blank = filled(coder, regex=r"a\n\n    b", n_indent=4, n_predict=60)
    assert blank["content"] == "a", "a blank line isn't indented"
    stopped = filled(coder, regex=whole, n_indent=4, n_predict=60, stop=["= 1", "  d"])
    assert (stopped["content"], stopped["stopping_word"]) == ("sum(values)\n    b ", "= 1")
    assert stopped["stop_type"] == "word"


def test_a_text_ends_at_a_line_break_when_its_time_is_over(coder: Running) -> None:
    lines: dict[str, Any] = {
        "regex": r"([ab]{2}\n){24}",
        "n_predict": 100,
        "lookahead": 0,
        "temperature": 1.0,
        "seed": 1,
    }
    whole = filled(coder, **lines)["content"]
    assert filled(coder, **lines, t_max_predict_ms=60_000)["content"] == whole
    for read in (filled(coder, **lines, t_max_predict_ms=0.01, return_record=True), None):
        told = [read] if read else pieces(coder, **lines, draft="none", t_max_predict_ms=0.01)
        text = "".join(each["content"] for each in told)
        assert whole.startswith(text) and text.endswith("\n") and 0 < len(text) < len(whole) / 2
        assert told[-1]["stop_type"] == "limit"


# ---------------------------------------------------------------- answers


def test_a_stream_is_the_whole_answer(coder: Running) -> None:
    for more in ({}, {"temperature": 1.0, "seed": 4}):
        whole, told = filled(coder, **more), pieces(coder, draft="none", **more)
        assert [each["stop"] for each in told] == [*[False] * (len(told) - 1), True]
        assert "".join(each["content"] for each in told) == whole["content"] and len(told) > 2
        assert told[-1].keys() == whole.keys() and told[-1]["content"] == ""
        for name in ("tokens_predicted", "tokens_evaluated", "stop_type", "prompt", "generation_settings", "model"):
            assert told[-1][name] == whole[name]


def test_drafts_and_seeds(coder: Running) -> None:
    """Few likely tokens make texts that repeat themselves, so that lookup proposes what is accepted."""
    more: dict[str, Any] = {"temperature": 2.0, "n_predict": 30, "logit_bias": {"64": 60, "65": 60, "66": 60}}
    texts = set[str]()
    for seed in range(3):
        plain, drafted = filled(coder, **more, seed=seed), filled(coder, **more, seed=seed, draft="lookup")
        assert plain["content"] == drafted["content"] and "draft_n" not in plain["timings"]
        assert drafted["timings"]["draft_n"] >= drafted["timings"]["draft_n_accepted"] > 0
        texts.add(plain["content"])
    assert len(texts) == 3


def test_several_texts_are_a_list(coder: Running) -> None:
    found = filled(coder, n_cmpl=2, temperature=1.0, seed=1, response_fields=["index", "content"])
    assert [each["index"] for each in found] == [0, 1] and found[0]["content"] != found[1]["content"]
    assert filled(coder, temperature=1.0, seed=1)["content"] == found[0]["content"]
    told = pieces(coder, n_cmpl=2, temperature=1.0, seed=1, draft="none")
    for index in range(2):
        mine = [each for each in told if each["index"] == index]
        assert "".join(each["content"] for each in mine) == found[index]["content"] and mine[-1]["stop"]


def test_fields_of_the_answer(coder: Running) -> None:
    whole = filled(coder)
    asked = ["content", "timings/prompt_n", "generation_settings/n_predict", "timings/none", "none", "content/x"]
    found = filled(coder, response_fields=asked)
    assert found == {"content": whole["content"], "timings/prompt_n": found["timings/prompt_n"], asked[2]: 12}
    assert filled(coder, response_fields=[""]) == {} and filled(coder, response_fields=[]).keys() == whole.keys()
    assert pieces(coder, response_fields=["stop_type"])[-1] == {"stop_type": "limit"}
    timings = whole["timings"]
    assert timings["predicted_n"] == whole["tokens_predicted"] == 12 and timings["predicted_ms"] > 0
    assert timings["prompt_ms"] > 0 and timings["prompt_per_second"] > 0


@pytest.mark.parametrize(
    ("body", "fields"), [(VIM, {*FIELDS}), (VIM_AHEAD, set()), (VSCODE, None), (VSCODE_AHEAD, None)]
)
def test_what_editors_send(coder: Running, body: dict[str, Any], fields: set[str] | None) -> None:
    answer = coder.post("/infill", body)
    found = answer.json()
    assert answer.status_code == 200 and "x-ovspec-ignored" not in answer.headers, answer.text
    if fields is not None:
        assert found.keys() == fields
    else:
        assert isinstance(found["content"], str) and found["generation_settings"]["n_ctx"] == CONTEXT
        assert found["timings"]["prompt_ms"] > 0
    if "content" in found and body["n_predict"]:
        assert found["content"] == filled(coder, n_predict=128, n_indent=4)["content"]


def test_what_llama_vim_sends_for_instructions(coder: Running) -> None:
    chat = {
        "id_slot": 3,
        "messages": [{"role": "user", "content": "INSTRUCTION: go"}],
        "cache_prompt": True,
        "model": "",
    }
    ahead = {**chat, "samplers": [], "n_predict": 0, "stream": False, "response_fields": [""]}
    assert coder.post("/v1/chat/completions", ahead).status_code == 200
    sent = {**chat, "min_p": 0.1, "temperature": 0.1, "samplers": ["min_p", "temperature"], "stream": True}
    answer = coder.post("/v1/chat/completions", {**sent, "max_tokens": 5})
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")


def test_a_suffix_is_the_same_prompt(coder: Running) -> None:
    asked = {"n_predict": 9, "temperature": 1.0, "seed": 3}
    body = {"prompt": PREFIX, "suffix": SUFFIX, "return_record": True, **asked}
    found = coder.post("/v1/completions", body).json()
    same = filled(coder, input_extra=[], prompt="", return_record=True, **asked)
    assert found["choices"][0]["record"]["prompt_token_ids"] == ids_of(same)
    assert found["choices"][0]["text"] == same["content"] and found["object"] == "text_completion"
    plain = [coder.post("/v1/completions", {"prompt": PREFIX, **asked, **more}).json() for more in ({}, {"suffix": ""})]
    assert plain[0]["choices"] == plain[1]["choices"] != found["choices"]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/infill", AROUND, None),
        ("/infill", {**AROUND, "stream": True}, None),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
def test_a_model_without_the_tokens(server: Running, path: str, body: Any, field: str | None) -> None:
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (501, "not_supported_error", field), error
    assert error["message"].startswith("The model's vocabulary has no fill-in-the-middle tokens; ")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"input_extra": "x"}, 'input_extra must be a list of {"filename": …, "text": …}, with strings as values'),
        ({"input_extra": [5]}, 'input_extra must be a list of {"filename": …'),
        ({"input_extra": [{"text": 5}]}, 'input_extra must be a list of {"filename": …'),
        ({"input_extra": [{"filename": "a"}]}, 'input_extra must be a list of {"filename": …'),
        ({"input_extra": [{"text": "a", "filename": ["b"]}]}, 'input_extra must be a list of {"filename": …'),
        ({"input_prefix": None}, "input_prefix is missing."),
        ({"input_suffix": 5}, "input_suffix must be a string."),
        ({"prompt": ["a"]}, "prompt must be a string."),
        ({"response_fields": "content"}, "response_fields must be a list of strings."),
        ({"n_indent": -1}, "n_indent is -1; it must be 0 or more."),
        ({"t_max_predict_ms": "1"}, "t_max_predict_ms must be a number, not '1'."),
        ({"samplers": ["xtc"]}, "samplers is not supported"),
        ({"messages": []}, "messages is not a field of this request, but of /v1/chat/completions"),
        ({"echo": True}, "echo is not a field of this request, but of /v1/completions"),
        ({"input_prefix": "a\0"}, "NUL"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "`tools` needs chat messages"),
    ],
)
def test_wrong_fields(coder: Running, more: dict[str, Any], told: str) -> None:
    answer = coder.post("/infill", {**AROUND, **more})
    assert answer.status_code == 400 and told in answer.json()["error"]["message"], answer.text
