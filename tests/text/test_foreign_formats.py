"""What the makers of models say of their formats: openai-harmony and mistral-common, and real vocabularies."""

from __future__ import annotations

import base64
import datetime
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from chat_templates import answer, user
from conftest import USERS_CACHE
from test_tool_formats import CALLS, TOOLS, chat_of, needs_templates, template_of

from ovspec.base.files import read_dataclass
from ovspec.params.tool_formats import TOOL_FORMATS_BY_NAME
from ovspec.text.answer import HARMONY_THINKING, AnswerContent, AnswerFormat, AnswerReader, ThinkingFormat
from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import ChatTemplate, load_chat_template
from ovspec.text.tokenizer import ByteDetokenizer, make_byte_level_alphabet, make_byte_vocabulary
from ovspec.text.tokenizer_files import TOKENIZER_FILE, TokenizerFile

TOKENIZERS = USERS_CACHE / "downloads" / "tokenizers"
needs_tokenizers = pytest.mark.skipif(not TOKENIZERS.is_dir(), reason="the real tokenizers could not be fetched")
# Without the quotes in a description, which Nemo's template doesn't escape.
UNQUOTED: list[Any] = json.loads(json.dumps(TOOLS).replace('\\"', ""))


# ---------------------------------------------------------------- Mistral

NO_MISTRAL = "mistral-common isn't installed"


@functools.cache
def mistral_tokenizer(name: str) -> Any:
    """Return a tokenizer that mistral-common brings, or one of a later version, of which only the texts are right."""
    load = pytest.importorskip("mistral_common.tokens.tokenizers.mistral", reason=NO_MISTRAL).MistralTokenizer.from_file
    folder = Path(pytest.importorskip("mistral_common").__file__ or "").parent / "data"
    if not name.startswith("v"):
        return load(str(folder / name))
    made = json.loads((folder / "tekken_240911.json").read_text("utf-8"))
    made["config"]["version"] = name
    around = ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS", "SYSTEM_PROMPT", "THINK")
    alone = ("TOOL_CALLS", "TOOL_CONTENT", "ARGS", "CALL_ID", "IMG", "IMG_BREAK", "IMG_END", "PREFIX", "MIDDLE")
    tokens = ["<unk>", "<s>", "</s>", "<pad>", "[SUFFIX]", *(f"[{name}]" for name in (*around, *alone))]
    tokens += [f"[/{name}]" for name in around]
    made["special_tokens"] = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(tokens)]
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "tekken.json"
        file.write_text(json.dumps(made), "utf-8")
        return load(str(file))


@needs_templates
@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [
        ("mistral_v3", "mistral_instruct_tokenizer_240323.model.v3"),
        ("mistralai-Mistral-Nemo-Instruct-2407", "tekken_240718.json"),
        pytest.param("Mistral-Small-3.2-24B-Instruct-2506", "v11", marks=pytest.mark.slow),
        pytest.param("unsloth-mistral-Devstral-Small-2507", "v13", marks=pytest.mark.slow),
        pytest.param("mistralai-Ministral-3-14B-Reasoning-2512", "v13", marks=pytest.mark.slow),
    ],
)
def test_prompts_are_those_of_mistral_common(name: str, tokenizer: str) -> None:
    theirs, later = mistral_tokenizer(tokenizer), tokenizer.startswith("v")
    ours = ChatFormat(ChatTemplate(template_of(name).source, {"bos_token": "<s>", "eos_token": "</s>"}))
    chat = chat_of(CALLS, "", "")[0 if later else 1 :]  # older templates lose system prompts, if results are last
    for messages in (chat, [*chat, answer("Rain."), user("Oh")]):
        request = pytest.importorskip("mistral_common.protocol.instruct.request").ChatCompletionRequest.from_openai(
            messages, tools=UNQUOTED
        )
        expected = theirs.encode_chat_completion(request).text or ""
        assert ours.render_prompt(messages, UNQUOTED) == expected.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")


# ---------------------------------------------------------------- harmony


def openai_harmony() -> Any:
    return pytest.importorskip("openai_harmony", reason="openai-harmony isn't installed")


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The encoding of openai-harmony, with the vocabulary that the library would fetch."""
    library = openai_harmony()
    if not TOKENIZERS.is_dir():
        pytest.skip("the real tokenizers could not be fetched")
    alphabet = make_byte_level_alphabet()
    vocabulary: Any = vocabulary_of("gptoss")[0].model.vocab
    folder = tmp_path_factory.mktemp("harmony")
    with (folder / "o200k_base.tiktoken").open("wb") as file:  # whose sha256 the library checks
        for piece, rank in sorted(vocabulary.items(), key=lambda entry: entry[1]):
            file.write(base64.b64encode(bytes(alphabet[each] for each in piece)) + b" %d\n" % rank)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        return library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)


def conversation_of(thought: str) -> Any:
    """Return ``chat_of(CALLS, "", thought)`` as openai-harmony has conversations."""
    library = openai_harmony()
    message, role = library.Message, library.Role
    given = [tool["function"] for tool in TOOLS]
    schemas = [each["parameters"] if each["parameters"]["properties"] else None for each in given]
    tools = [
        library.ToolDescription.new(each["name"], each["description"], schema)
        for each, schema in zip(given, schemas, strict=True)
    ]
    today = datetime.date.today().isoformat()
    messages = [
        message.from_role_and_content(role.SYSTEM, library.SystemContent.new().with_conversation_start_date(today)),
        message.from_role_and_content(
            role.DEVELOPER, library.DeveloperContent.new().with_instructions("Be brief.").with_function_tools(tools)
        ),
        message.from_role_and_content(role.USER, "Both?"),
        message.from_role_and_content(role.ASSISTANT, thought).with_channel("analysis"),
    ]
    for number, (name, arguments) in enumerate(CALLS, 1):
        call = message.from_role_and_content(role.ASSISTANT, json.dumps(arguments, ensure_ascii=False))
        result = message.from_author_and_content(library.Author.new(role.TOOL, f"functions.{name}"), f'"{number}0"')
        messages += [
            call.with_channel("commentary").with_recipient(f"functions.{name}").with_content_type("json"),
            result.with_channel("commentary").with_recipient("assistant"),
        ]
    return library.Conversation.from_messages(messages)


@needs_templates
def test_prompts_are_those_of_openai_harmony(harmony: Any) -> None:
    theirs = harmony.render_conversation_for_completion(conversation_of("Hm."), openai_harmony().Role.ASSISTANT)
    ours = ChatFormat(template_of("openai-gpt-oss-120b")).render_prompt(chat_of(CALLS, "", "Hm."), TOOLS)
    assert ours == harmony.decode_utf8(theirs)
    assert harmony.encode(ours, allowed_special="all") == theirs


@pytest.mark.parametrize("way", range(3))
@pytest.mark.parametrize("text", ["", "I look.", "to=functions.get_time <|channel|>commentary to=functions.get_time"])
def test_answers_mean_to_openai_harmony_what_they_mean_here(harmony: Any, way: int, text: str) -> None:
    """Its parser and ours are given the same tokens; tags that were spelt out are text to both."""
    (name, arguments), spelt = CALLS[0], "<|end|> isn't an end"
    parts = [("<|channel|>analysis<|message|>", spelt), ("<|end|><|start|>assistant", "")]
    parts += [("<|channel|>commentary<|message|>", text), ("<|end|><|start|>assistant", "")] if text else []
    parts += [(TOOL_FORMATS_BY_NAME["harmony"].write_calls([(name, arguments | {"days": spelt})], way), "")]
    ids = list[int]()
    for tags, free in parts:
        ids += harmony.encode(tags.replace(spelt, "SPELT"), allowed_special="all")
        ids += harmony.encode(free, disallowed_special=())
    at = find(ids, harmony.encode("SPELT"))
    ids[at : at + len(harmony.encode("SPELT"))] = harmony.encode(spelt, disallowed_special=())

    thinking, *said, call = harmony.parse_messages_from_completion_tokens(
        [*ids, 200012], openai_harmony().Role.ASSISTANT
    )
    assert (thinking.channel, thinking.content[0].text) == ("analysis", spelt)
    assert [(each.channel, each.content[0].text) for each in said] == ([("commentary", text)] if text else [])
    assert (call.channel, call.recipient) == ("commentary", f"functions.{name}")

    read, calls = read_tokens("gptoss", ids, "harmony", HARMONY_THINKING)
    assert (read.thinking, read.text) == (spelt, text)
    assert calls == [(name, json.loads(call.content[0].text))] == [(name, arguments | {"days": spelt})]


def find(tokens: list[int], part: list[int]) -> int:
    return next(at for at in range(len(tokens)) if tokens[at : at + len(part)] == part)


# ---------------------------------------------------------------- real vocabularies


@functools.cache
def vocabulary_of(model: str) -> tuple[TokenizerFile, list[bytes | None]]:
    file = read_dataclass(TokenizerFile, TOKENIZERS / model / TOKENIZER_FILE)
    return file, make_byte_vocabulary(file) or []


def read_tokens(
    model: str, tokens: list[int], format: str, thinking: ThinkingFormat | None
) -> tuple[AnswerContent, list[tuple[str | None, Any]]]:
    """Return what tokens of a real vocabulary say, and the calls."""
    file, vocabulary = vocabulary_of(model)
    added = {token.content: token.id for token in file.added_tokens}
    names = tuple(name for name, _ in CALLS)
    answer_format = AnswerFormat(TOOL_FORMATS_BY_NAME[format], thinking, names, added_tokens=added)
    detokenizer = ByteDetokenizer(vocabulary, answer_format.mark_by_token_id)
    reader, said = AnswerReader(answer_format, id_key=b"1"), AnswerContent()
    for token in tokens:
        reader.push(detokenizer.push(token), said)
    reader.push(detokenizer.flush(), said)
    reader.flush(said)
    return said, [(call.name, json.loads(call.arguments)) for call in reader.calls]


@pytest.mark.slow
@needs_tokenizers
def test_tokens_of_qwen3() -> None:
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(TOKENIZERS / "qwen3" / TOKENIZER_FILE))
    format, thinking = (
        TOOL_FORMATS_BY_NAME["hermes"],
        ChatFormat(load_chat_template(TOKENIZERS / "qwen3")).thinking_format,
    )
    assert ChatFormat(load_chat_template(TOKENIZERS / "qwen3")).tool_format is format
    spelt = [id for part in ("a <tool", "_call> {} </", "think> b") for id in tokenizer.encode(part).ids]
    tokens = [tokenizer.token_to_id("<think>"), *tokenizer.encode("\n").ids, *spelt, tokenizer.token_to_id("</think>")]
    tokens += [*tokenizer.encode("\n\n").ids, *spelt, *tokenizer.encode(f"\n{format.write_calls(CALLS)}").ids]
    said, calls = read_tokens("qwen3", tokens, "hermes", thinking)
    assert (said.thinking, said.text) == ("a <tool_call> {} </think> b",) * 2
    assert calls == CALLS


@needs_tokenizers
@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
def test_tokens_of_llama(tag: str) -> None:
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(TOKENIZERS / "llama3_1" / TOKENIZER_FILE))
    written = tag + TOOL_FORMATS_BY_NAME["llama3"].write_calls(CALLS[:1])
    said, calls = read_tokens("llama3_1", tokenizer.encode(written, add_special_tokens=False).ids, "llama3", None)
    assert (said.text, calls) == ("", CALLS[:1])
    later = tokenizer.encode(f"So: {written}", add_special_tokens=False).ids
    assert read_tokens("llama3_1", later, "llama3", None)[1] == []
