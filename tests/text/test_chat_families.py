"""Templates like those of current model families are rendered byte for byte as Hugging Face renders them."""

from __future__ import annotations

import contextlib
import copy
import json
import time
from pathlib import Path
from typing import Any

import jinja2
import pytest
from chat_templates import CHATS, DOCUMENTS, SPECIAL, TEMPLATES, TOOLS, WAYS, answer, template_tokenizer, user

from ovspec.base.errors import OvspecError
from ovspec.setup.identity import hash_prompt_files
from ovspec.setup.manifest import ExportedModel, Manifest, read_manifest
from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import RENDERER, TEMPLATES_FOLDER, ChatTemplate, load_chat_template
from ovspec.text.chat_template_worker import find_variables

MESSAGES = CHATS["system"]
Ways = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return template_tokenizer()


def hugging_face(tokenizer: Any, messages: list[Any], source: str | None, ways: Ways) -> str | None:
    """Return what Hugging Face renders; None if it refuses."""
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=ways.get("tools"),
            documents=ways.get("documents"),
            chat_template=source,
            add_generation_prompt=ways.get("open", True),
            tokenize=False,
            **ways.get("variables", {}),
        )
    except Exception:  # whatever a template or Python raises
        return None


def rendered_here(template: ChatTemplate, messages: list[Any], ways: Ways) -> str:
    given = {name: ways[name] for name in ("tools", "documents") if name in ways}
    return template.render(messages, ways.get("open", True), given | ways.get("variables", {}))


def ours(template: ChatTemplate, messages: list[Any], ways: Ways) -> str | None:
    try:
        return rendered_here(template, messages, ways)
    except OvspecError as error:
        assert "cannot render these messages" in str(error)
        return None


@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.slow), False], ids=["all", "in turns"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_families_are_rendered_like_hugging_face(tokenizer: Any, name: str, every: bool) -> None:
    """All chats without more than messages; in other ways, quick runs have a third of them each, in turns."""
    source, rendered, done = TEMPLATES[name], set[str](), list[Ways]()
    template, reads = ChatTemplate(source, SPECIAL), find_variables(source)
    assert {"messages", "add_generation_prompt"} & reads
    for way, given in WAYS.items():
        if any(value and key in ("tools", "documents") and key not in reads for key, value in given.items()):
            continue
        variables = {key: value for key, value in given.get("variables", {}).items() if key in reads}
        ways = {**given, "variables": variables}
        if ways in done:  # its variables are others'
            continue
        done.append(ways)
        for number, (chat, messages) in enumerate(CHATS.items()):
            if given and not every and (number + len(done)) % 3:
                continue
            found, expected = ours(template, messages, ways), hugging_face(tokenizer, messages, source, ways)
            assert found == expected, (way, chat)
            rendered |= {found} if found else set()
    assert len(rendered) > 8, "most are rendered, not refused"


def saved(tokenizer: Any, folder: Path, **changes: Any) -> Any:
    """Save a tokenizer, change entries of its config, and return Hugging Face's reading of the folder."""
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")
    return AutoTokenizer.from_pretrained(folder)


ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "boi", "eoi", "audio", "video", "eot", "other")
ADDED = {"__type": "AddedToken", "content": "<own>", "special": True}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bos_token": {**ADDED, "lstrip": False}, "eos_token": None, "pad_token": "", "mask_token": "<m>"},
        {"extra_special_tokens": {"audio_token": "<audio>", "video_token": ADDED}},
        {"extra_special_tokens": ["<a>", "<b>"], "eot_token": "<eot>", "add_bos_token": True},
        {
            "model_specific_special_tokens": {"boi_token": "<b>", "eoi_token": ADDED},
            "image_token": None,
            "boi_token": None,
        },
    ],
)
def test_special_tokens_are_those_of_hugging_face(tokenizer: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    source = "".join(f"{{{{ {role}_token is defined }}}}{{{{ {role}_token }}}}," for role in ROLES)
    theirs = saved(tokenizer, tmp_path, chat_template=source, **changes)
    template = load_chat_template(tmp_path)
    assert template.special_tokens == theirs.special_tokens_map
    assert template.render(MESSAGES) == hugging_face(theirs, MESSAGES, None, {})
    own = {"variables": {"bos_token": "<mine>"}}
    assert ours(template, MESSAGES, own) == hugging_face(theirs, MESSAGES, None, own)


NAMED = {"default": "default{{ tools | length if tools }}", "tool_use": "tools{{ tools | length }}", "rag": "rag"}


@pytest.mark.parametrize("how", ["files", "list", "object", "only default", "only in the folder"])
def test_the_template_of_several_is_that_of_hugging_face(tokenizer: Any, tmp_path: Path, how: str) -> None:
    tokenizer = copy.copy(tokenizer)
    entries: dict[str, Any] = {}
    if how == "files":
        tokenizer.chat_template, entries = NAMED, {"chat_template": "not this one"}
    elif how == "list":
        entries["chat_template"] = [{"name": name, "template": text} for name, text in NAMED.items()]
    elif how == "object":
        entries["chat_template"] = NAMED
    elif how == "only default":
        entries["chat_template"] = NAMED["default"]
    else:
        tokenizer.chat_template = {name: text for name, text in NAMED.items() if name != "default"}
        entries["chat_template"] = NAMED["default"]
    theirs = saved(tokenizer, tmp_path, **entries)
    if how == "only in the folder":
        with pytest.raises(OvspecError, match=r"none of its chat templates \(rag, tool_use\) is the default; choose"):
            load_chat_template(tmp_path)
        with pytest.raises(ValueError, match="no default"):
            theirs.apply_chat_template(MESSAGES)
        return
    asked: list[Ways] = [{}, {"tools": TOOLS}, {"tools": []}]
    for ways in asked:
        expected = hugging_face(theirs, MESSAGES, None, ways)
        assert expected in ("default", "default2", "tools2", "tools0")
        assert ours(load_chat_template(tmp_path), MESSAGES, ways) == expected


def test_nothing_that_is_given_is_left_out_silently() -> None:
    qwen, gemma = ChatTemplate(TEMPLATES["qwen3"], SPECIAL), ChatTemplate(TEMPLATES["gemma3"], SPECIAL)
    cases: list[tuple[ChatTemplate, Ways, str]] = [
        (
            qwen,
            {"variables": {"enable_thnking": False}},
            "use the variable enable_thnking; leave enable_thnking out .the template uses enable_thinking, t",
        ),
        (
            gemma,
            {"variables": {"enable_thinking": False}},
            "use the variable enable_thinking; leave enable_thinking out .the template uses no variables",
        ),
        (gemma, {"tools": TOOLS}, "doesn't use the variable tools; leave tools out"),
        (qwen, {"documents": DOCUMENTS}, "doesn't use the variable documents; leave documents out"),
        (qwen, {"variables": {"documents": DOCUMENTS}}, "doesn't use the variable documents"),
        (qwen, {"tools": {"type": "function"}}, "`chat_template_kwargs`: tools must be a list of objects"),
        (qwen, {"tools": ["get_weather"]}, "`chat_template_kwargs`: tools must be a list of objects"),
        (qwen, {"documents": "text"}, "`chat_template_kwargs`: documents must be a list of objects"),
        (qwen, {"variables": {"messages": []}}, "can't set messages, a reserved name"),
        (qwen, {"variables": {"add_generation_prompt": False}}, "can't set add_generation_prompt"),
        (qwen, {"variables": {"enable_thinking": {1}}}, "JSON"),
    ]
    for template, ways, sentence in cases:
        with pytest.raises(OvspecError, match=sentence):
            rendered_here(template, MESSAGES, ways)
    assert gemma.render(MESSAGES, variables={"tools": [], "documents": None}) == gemma.render(MESSAGES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_goes_on_where_hugging_face_lets_it(tokenizer: Any, name: str) -> None:
    """Where the template refuses a last answer, or drops it, its text follows the generation prompt."""
    source = TEMPLATES[name]
    template, compared = ChatTemplate(source, SPECIAL), 0
    format, asked = ChatFormat(template), [user("One?")]
    for more in ({}, {"reasoning_content": "Hm."}):
        for text in ('{"a": [', "Well,\n\n- <b>ä"):
            chat = [*asked, answer(text, **more)]
            with contextlib.suppress(OvspecError):
                found = format.render_prompt(chat)
                assert found.endswith(text)
                with contextlib.suppress(ValueError, jinja2.TemplateError, TypeError):
                    theirs: Any = {"continue_final_message": True, "tokenize": False, "chat_template": source}
                    assert found == tokenizer.apply_chat_template(chat, **theirs)
                    compared += 1
    assert compared == (0 if name == "command_r_tools" else 4)


@pytest.mark.parametrize("name", ["deepseek", "qwen3", "gpt_oss"])
def test_an_answer_begins_after_one_that_only_thinks(name: str) -> None:
    """DeepSeek's template would end the prompt with the end of that message, so it doesn't get it."""
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    chat = [user("One?"), answer("", reasoning_content="Hm.")]
    asked = chat[:1] if name == "deepseek" else chat
    prompt = ChatFormat(template).render_prompt(chat)
    assert prompt == template.render(asked) != template.render(asked, opens_answer=False)


def test_an_answer_goes_on_where_the_template_refuses_it() -> None:
    refuses = "{% if messages[-1].role != 'user' %}{{ raise_exception('No.') }}{% endif %}{{ messages[-1].content }}"
    thinks = f"{refuses}<a>{{% if add_generation_prompt %}}<think>\n{{% endif %}}{{# </think> #}}"
    chat = [user("One?"), answer("Two")]
    for source, expected in ((refuses, "One?Two"), (thinks, "One?<a><think>\n</think>\n\nTwo")):
        format = ChatFormat(ChatTemplate(source, SPECIAL))
        assert format.render_prompt(chat) == expected
        assert format.render_prompt([*chat[:1], answer("")]) == format.render_prompt(chat[:1])
        assert format.render_prompt([*chat[:1], answer([{"type": "text", "text": "Two"}])]) == expected


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="has no time zones by environment")
def test_the_date_is_that_of_the_users_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    dates = set()
    for zone in ("AAA-14", "BBB+11"):
        RENDERER.end_idle_processes()
        monkeypatch.setenv("TZ", zone)
        dates.add(ChatTemplate("{{ strftime_now('%d') }}", {}).render(MESSAGES))
    RENDERER.end_idle_processes()
    assert len(dates) == 2, "25 hours lie between them"


def test_files_of_more_templates_belong_to_the_model(tmp_path: Path) -> None:
    from ovspec_export.convert import copy_ir_files
    from ovspec_export.sources import Source

    source, folder = tmp_path / "source", tmp_path / "copied"
    (source / TEMPLATES_FOLDER).mkdir(parents=True)
    folder.mkdir()
    (source / TEMPLATES_FOLDER / "tool_use.jinja").write_text("tools", "utf-8")
    copy_ir_files(Source("a", source, True, "1"), folder)
    assert hash_prompt_files(folder) == hash_prompt_files(source)
    (folder / TEMPLATES_FOLDER / "tool_use.jinja").write_text("other tools", "utf-8")
    assert hash_prompt_files(folder) != hash_prompt_files(source)
    model = ExportedModel("a", "fp32", {}, [])
    Manifest(model, None, {}, {}).write_to_folder(folder)
    with pytest.raises(OvspecError, match=r"tool_use\.jinja: not part of the export"):
        read_manifest(folder, verify=True)
