"""What clients send back of a chat, whatever it holds, lets the chat go on: in each API, and in batch files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from servers import DEMO, Running

import ovspec
from ovspec.batch.requests import parse_line
from ovspec.batch.run import BatchRun
from ovspec.engine.engine_thread import EngineThread
from ovspec.params import make_params
from ovspec.params.serving import ServeParams
from ovspec.server.access import IGNORED_HEADER, AccessMiddleware
from ovspec.server.app import make_app
from ovspec.server.context import ServerContext

APIS = ("chat", "responses", "messages", "batch")
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
LIMITS = {"responses": "max_output_tokens"}
History = list[dict[str, Any]]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: Any, *arguments: Any) -> dict[str, Any]:
    """Return an answer, with a call for each of ``arguments``."""
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": "look", "arguments": each}}
        for number, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_0", "content": content}


ASK, AND = user("Look at the sky."), user("And now?")
TEXT = {"type": "text", "text": "Blue."}
# Parts that a model of text can't read, as each API has them.
IMAGE: dict[str, Any] = {
    "chat": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    "responses": {"type": "input_image", "image_url": "data:image/png;base64,AA"},
    "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
}
IMAGE["batch"] = IMAGE["chat"]


def with_calls(*arguments: Any) -> History:
    return [ASK, answer("", *arguments), result("Blue."), AND]


# A history, and either the same in plain words or a text that is in its prompt.
CASES: dict[str, tuple[History, History | str]] = {
    **{f"arguments {value!r}": (with_calls(value), with_calls({})) for value in (None, "null", "\n", '"null"', [])},
    "arguments twice quoted": (with_calls(json.dumps('{"at": 1}')), with_calls({"at": 1})),
    "arguments with half a pair": (with_calls('{"at": "\\ud83d"}'), with_calls({"at": "\ufffd"})),
    **{
        f"arguments {value!r}": (with_calls(value), f'"arguments": {told}}}')
        for value, told in (
            ('{"at": "Zür', '{"at": "Zür'),
            ('{"at": 1}}', '{"at": 1}}'),
            ([1, 2], "[1, 2]"),
            ('"here"', '"here"'),
            ("here", "here"),
        )
    },
    "an answer of null": ([ASK, answer(None), AND], [ASK, answer(""), AND]),
    "an answer of nothing": ([ASK, answer([]), AND], [ASK, answer(""), AND]),
    "no calls": ([ASK, answer(None) | {"tool_calls": []}, AND], [ASK, answer(""), AND]),
    "null and a call": ([ASK, answer(None, "{}"), result("x"), AND], [ASK, answer("", "{}"), result("x"), AND]),
    "a result of null": ([ASK, answer("", "{}"), result(None), AND], [ASK, answer("", "{}"), result(""), AND]),
    "a result of nothing": ([ASK, answer("", "{}"), result([]), AND], [ASK, answer("", "{}"), result(""), AND]),
    "a user's earlier nothing": ([ASK, answer("Ok."), user([]), AND], [ASK, answer("Ok."), user(""), AND]),
    "half a pair": ([user("so\ud83d"), answer("\ude00so"), AND], [user("so\ufffd"), answer("\ufffdso"), AND]),
    "a whole pair": ([user("so\U0001f600 \\ud83d"), answer("Ok."), AND], "so\U0001f600 \\ud83d"),
    "an earlier image": (
        [user([{"type": "image"}, TEXT]), answer("Ok."), AND],
        [user("[image omitted]\nBlue."), answer("Ok."), AND],
    ),
    "an image of the assistant": (
        [ASK, answer([TEXT, {"type": "image"}]), AND],
        [ASK, answer("Blue.\n[image omitted]"), AND],
    ),
    "an image in a result": (
        [ASK, answer("", "{}"), result([{"type": "image"}])],
        [ASK, answer("", "{}"), result("[image omitted]")],
    ),
}


def items_of(history: History) -> History:
    """Return a history as the Responses API has it."""
    items = History()
    for message in history:
        if message["role"] == "tool":
            output = {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            items.append(output)
            continue
        items.append({name: message[name] for name in ("role", "content")})
        for call in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def blocks_of(history: History) -> History:
    """Return a history as Anthropic's API has it."""
    made = History()
    for message in history:
        role, content = message["role"], message["content"]
        if role == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
            made.append({"role": "user", "content": [block]})
        elif calls := message.get("tool_calls"):
            said = [{"type": "text", "text": content}] if content else []
            uses = [
                {"type": "tool_use", "id": call["id"], "name": "look", "input": call["function"]["arguments"]}
                for call in calls
            ]
            made.append({"role": role, "content": said + uses})
        else:
            made.append({"role": role, "content": content})
    return made


def in_words_of(api: str, value: Any) -> Any:
    """Return a value with the API's own parts."""
    if isinstance(value, list):
        return [in_words_of(api, each) for each in value]
    if not isinstance(value, dict):
        return value
    if value == {"type": "image"}:
        return IMAGE[api]
    return {name: in_words_of(api, each) for name, each in value.items()}


def body_of(api: str, history: History, **more: Any) -> dict[str, Any]:
    turns = {"responses": items_of, "messages": blocks_of}.get(api, list)(history)
    field = "input" if api == "responses" else "messages"
    return {field: in_words_of(api, turns), LIMITS.get(api, "max_tokens"): 1, **more}


@dataclass
class Answered:
    """``said``: the answer, or where it is the error its message; ``ignored``: the names of what was left out."""

    status: int
    said: Any
    ignored: list[str]

    @property
    def record(self) -> dict[str, Any]:
        first = self.said.get("choices", [self.said])[0]
        return first["record"]


class Served:
    """A model, asked through the app of a server without a socket, and by batches."""

    def __init__(self, lm: ovspec.LanguageModel) -> None:
        self.lm, self.engine = lm, EngineThread(lm.runtime, max_rows=2)
        self.engine.start()
        service = ServerContext(lm, self.engine, ["demo"], ServeParams())
        self._app: Any = AccessMiddleware(make_app(service), [], True, lambda *_: None)

    def spelt(self, ids: list[int]) -> str:
        return self.lm.tokenizer.decode_with_special(np.array(ids)) or ""

    def post(self, path: str, body: Any) -> httpx.Response:
        async def post() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url="http://localhost") as to:
                return await to.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})

        return asyncio.run(post())

    def ask(self, api: str, history: History, **more: Any) -> Answered:
        body = body_of(api, history, **more)
        if api != "batch":
            answered = self.post(PATHS[api], {**body, "return_record": True})
            said, ignored = answered.json(), answered.headers.get(IGNORED_HEADER, "")
            said = said if answered.status_code == 200 else said["error"]["message"]
            return Answered(answered.status_code, said, ignored.split(", ") if ignored else [])
        request = {"custom_id": "a", "method": "POST", "url": PATHS["chat"], "body": body}
        lines = [json.dumps(request), json.dumps({"id": "b", **body})]  # both kinds
        found = list[dict[str, Any]]()
        requests = [parse_line(line, "?") for line in lines]
        for _ in BatchRun(
            self.lm, make_params({"max_tokens": 1}), requests, lambda _, line: found.append(line)
        ).run_rounds():
            pass
        theirs, own = sorted(found, key=lambda line: line.get("custom_id", line["id"]))
        if error := theirs.get("error"):
            assert own["error"] == error["message"]
            return Answered(400, own["error"], [])
        said = theirs["response"]["body"]
        assert own["record"]["prompt_token_ids"] == said["choices"][0]["record"]["prompt_token_ids"]
        assert own.get("ignored") == theirs.get("ignored")
        return Answered(200, said, own.get("ignored", []))


@pytest.fixture(scope="module")
def served(cache_dir: Path) -> Iterator[Served]:
    lm = ovspec.load(DEMO / "draft", "none", engine="paged", precision="f32", cache_dir=cache_dir)
    served = Served(lm)
    yield served
    served.engine.stop()


each_api = pytest.mark.parametrize("api", APIS)


@pytest.mark.parametrize(("history", "same"), CASES.values(), ids=CASES)
def test_a_history_lets_the_chat_go_on(served: Served, history: History, same: History | str) -> None:
    answers = {api: served.ask(api, history) for api in APIS}
    assert {api: each.status for api, each in answers.items()} == dict.fromkeys(APIS, 200), answers
    prompts = {api: each.record["prompt_token_ids"] for api, each in answers.items()}
    if isinstance(same, str):
        assert all(same in served.spelt(ids) for ids in prompts.values()), prompts
        assert len({*map(tuple, prompts.values())}) == 1
    else:
        expected = served.lm.runtime.prompt_encoder.encode(same).tolist()
        assert prompts == dict.fromkeys(APIS, expected)
    left_out = {api: [f"content.{IMAGE[api]['type']}"] if "image" in str(history) else [] for api in APIS}
    assert {api: each.ignored for api, each in answers.items()} == left_out


@each_api
def test_an_image_of_the_users_last_message_is_an_error(served: Served, api: str) -> None:
    for history in ([user([TEXT, {"type": "image"}])], [ASK, user([{"type": "image"}]), answer("", "{}"), result("x")]):
        found = served.ask(api, history)
        assert found.status == 400 and f"type {IMAGE[api]['type']} is not supported; send text" in found.said, found
    for nothing in (None, []):
        assert served.ask(api, [user(nothing)]).status == 400


@pytest.mark.parametrize(
    ("api", "role", "part", "told"),
    [
        ("chat", "user", {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, "audio"),
        ("chat", "user", {"type": "file", "file": {"file_id": "x"}}, "file"),
        ("responses", "user", {"type": "input_file", "file_id": "x"}, "file"),
        ("messages", "user", {"type": "document", "source": {}}, "document"),
        ("messages", "assistant", {"type": "server_tool_use", "id": "x", "name": "web_search"}, "server_tool_use"),
        ("messages", "assistant", {"type": "web_search_tool_result", "content": []}, "web_search_tool_result"),
    ],
)
def test_other_parts_are_left_out_and_named(served: Served, api: str, role: str, part: Any, told: str) -> None:
    history = [ASK, answer("Ok."), AND]
    history[["user", "assistant"].index(role)] = {"role": role, "content": [part]}
    found = served.ask(api, history)
    assert found.status == 200 and found.ignored == [f"content.{part['type']}"], found
    assert f"[{told} omitted]" in served.spelt(found.record["prompt_token_ids"])


def test_a_refusal_is_text_and_a_made_image_an_item(served: Served) -> None:
    refused = served.ask("chat", [ASK, answer([{"type": "refusal", "refusal": "No."}]), AND])
    assert (
        refused.record["prompt_token_ids"]
        == served.lm.runtime.prompt_encoder.encode([ASK, answer("No."), AND]).tolist()
    )
    made = {"type": "image_generation_call", "id": "ig_1", "result": "AA", "status": "completed"}
    found = served.post(PATHS["responses"], {"input": [ASK, made, AND], "max_output_tokens": 1, "return_record": True})
    expected = served.lm.runtime.prompt_encoder.encode([ASK, answer("[image omitted]"), AND]).tolist()
    assert found.json()["record"]["prompt_token_ids"] == expected
    assert found.headers[IGNORED_HEADER] == "content.image_generation_call"


@each_api
def test_an_unknown_role_is_an_error_that_names_it(served: Served, api: str) -> None:
    found = served.ask(api, [ASK, {"role": "critic", "content": "Bad."}, AND])
    assert found.status == 400 and "'critic'; it must be" in found.said, found


@each_api
def test_a_cut_off_call_can_be_sent_back(served: Served, api: str) -> None:
    schema = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    tool: dict[str, Any] = {"name": "look", "parameters": schema}
    tools: dict[str, tuple[Any, Any]] = {
        "responses": ({"type": "function", **tool}, "required"),
        "messages": ({"name": "look", "input_schema": schema}, {"type": "any"}),
    }
    given, choice = tools.get(api, ({"type": "function", "function": tool}, "required"))
    for tokens in (1, 30):
        limit = {LIMITS.get(api, "max_tokens"): tokens}
        said = served.ask(api, [ASK], tools=[given], tool_choice=choice, **limit).said
        if api == "responses":
            body = {"input": [ASK, *said["output"], AND], "max_output_tokens": 1}
        else:
            message = {"role": "assistant", "content": said["content"]} if api == "messages" else None
            body = {"messages": [ASK, message or said["choices"][0]["message"], AND], "max_tokens": 1}
        if api == "batch":
            line = parse_line(json.dumps(body), "a")
            assert not line.error and len(served.lm.runtime.prompt_encoder.encode(line.text_request.prompts[0])) > 8
        else:
            again = served.post(PATHS[api], {**body, "tools": [given]})
            assert again.status_code == 200, (body, again.text)


# ---------------------------------------------------------------- template arguments


@each_api
def test_template_arguments_that_nothing_reads(served: Served, api: str) -> None:
    """The server ignores and names them; Python and the command line refuse them."""
    found = served.ask(api, [ASK], chat_template_kwargs={"enable_thinking": False, "tint": 1})
    if api == "batch":
        assert "doesn't use the variable enable_thinking" in found.said
        return
    assert found.ignored == ["chat_template_kwargs.enable_thinking", "chat_template_kwargs.tint"], found
    assert found.record["prompt_token_ids"] == served.lm.runtime.prompt_encoder.encode([ASK]).tolist()
    assert served.ask(api, [ASK], chat_template_kwargs={"messages": []}).status == 400


def test_tokenize_leaves_out_the_same(served: Served) -> None:
    history = in_words_of("chat", [user([{"type": "image"}]), answer(None), AND])
    found = served.post("/tokenize", {"messages": history, "chat_template_kwargs": {"tint": 1}})
    same = [user("[image omitted]"), answer(""), AND]
    assert found.json()["tokens"] == served.lm.runtime.prompt_encoder.encode(same).tolist()
    assert found.headers[IGNORED_HEADER] == "content.image_url, chat_template_kwargs.tint"


# ---------------------------------------------------------------- answers that go on


@each_api
def test_a_last_message_of_the_assistant_is_continued(served: Served, api: str) -> None:
    chat = [ASK, answer("The sky is")]
    found = served.ask(api, chat)
    ids = found.record["prompt_token_ids"]
    assert served.spelt(ids).endswith("The sky is")
    assert ids == served.lm.runtime.prompt_encoder.encode(chat).tolist() and found.record["token_ids"]
    assert found.record["token_ids"] == served.lm.generate(chat, max_tokens=1).token_ids
    begun = served.ask(api, [ASK, answer("")])
    assert begun.record["prompt_token_ids"] == served.lm.runtime.prompt_encoder.encode([ASK]).tolist()


FLAGS: list[tuple[dict[str, bool], bool, str]] = [
    ({"continue_final_message": True}, True, ""),
    ({"continue_final_message": True, "add_generation_prompt": False}, True, ""),
    ({"add_generation_prompt": False}, True, ""),
    ({"add_generation_prompt": True, "continue_final_message": False}, False, ""),
    ({"continue_final_message": True, "add_generation_prompt": True}, True, "can't both be true"),
    ({"continue_final_message": True}, False, "needs an assistant message without tool calls at the end"),
    ({"continue_final_message": False}, True, "of the chat is always continued; add a user message at the end"),
    ({"add_generation_prompt": False}, False, "the chat doesn't end with an assistant message to continue"),
]


@pytest.mark.parametrize(("flags", "begun", "error"), FLAGS)
def test_fields_that_ask_for_it(served: Served, flags: dict[str, bool], begun: bool, error: str) -> None:
    chat = [ASK, *([answer("The sky is")] if begun else [])]
    for api in ("chat", "responses", "batch"):
        found = served.ask(api, chat, **flags)
        assert found.status == (400 if error else 200) and (not error or error in found.said), found
    tokens = served.post("/tokenize", {"messages": chat, **flags}).json()
    assert tokens == tokens | ({} if error else {"tokens": served.lm.runtime.prompt_encoder.encode(chat).tolist()})
    assert ("error" in tokens) == bool(error)


@pytest.mark.parametrize("flags", [{"continue_final_message": True}, {"add_generation_prompt": False}])
def test_they_need_a_chat(served: Served, flags: dict[str, bool]) -> None:
    body = {"prompt": "The sky is", **flags}
    for path in ("/tokenize", "/v1/completions"):
        assert next(iter(flags)) in served.post(path, body).json()["error"]["message"]
    assert next(iter(flags)) in (parse_line(json.dumps(body), "a").error or "")


# ---------------------------------------------------------------- response formats


@pytest.mark.parametrize("api", ["chat", "batch"])
@pytest.mark.parametrize("more", [{}, {"name": "x", "strict": True}])
def test_a_schema_beside_the_type_is_enforced(served: Served, api: str, more: dict[str, Any]) -> None:
    format = {"type": "json_schema", "schema": {"const": "yes"}, **more}
    found = served.ask(api, [ASK], response_format=format, max_tokens=9)
    assert found.said["choices"][0]["message"]["content"] == '"yes"'


# ---------------------------------------------------------------- clients

CUT: Any = {"max_tokens": 30, "tool_choice": "required"}
LOOK: Any = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}


def of_openai(server: Running) -> Callable[..., Any]:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def ask(chat: Any, **more: Any) -> Any:
        tools: Any = [{"type": "function", "function": {"name": "look", "parameters": LOOK}}]
        return client.chat.completions.create(model="any", messages=chat, tools=tools, **more).choices[0].message

    return ask


def of_anthropic(server: Running) -> Callable[..., Any]:
    import anthropic

    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)

    def ask(chat: Any, tool_choice: Any = None, **more: Any) -> Any:
        choice: Any = {"tool_choice": {"type": "any"}} if tool_choice else {}
        tools: Any = [{"name": "look", "input_schema": LOOK}]
        found = client.messages.create(model="any", messages=chat, tools=tools, **choice, **more)
        return {"role": "assistant", "content": found.content}

    return ask


def of_langchain(server: Running) -> Callable[..., Any]:
    langchain: Any = pytest.importorskip("langchain_openai")
    url = f"{server.url}/v1"

    def ask(chat: Any, tool_choice: Any = None, **more: Any) -> Any:
        model = langchain.ChatOpenAI(model="any", base_url=url, api_key="none", max_retries=0, **more)
        tool = {"type": "function", "function": {"name": "look", "parameters": LOOK}}
        return model.bind_tools([tool], tool_choice=tool_choice).invoke(chat)

    return ask


@pytest.mark.slow
@pytest.mark.parametrize("client", [of_openai, of_anthropic, of_langchain])
def test_clients_go_on_after_a_cut_off_call(server: Running, client: Callable[[Running], Callable[..., Any]]) -> None:
    ask = client(server)
    cut = ask([ASK], **CUT)
    assert ask([ASK, cut, AND], max_tokens=5)
    assert ask([ASK, {"role": "assistant", "content": "The sky is"}], max_tokens=5)
