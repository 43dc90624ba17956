"""The page as a chat, in a browser: the demo pair's and the real model's."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsers import OpenTab, Tab, needs_chromium
from playwright.sync_api import expect
from servers import DEMO, Running, StartHere

from ovspec.base.progress import show_step
from ovspec.server.server import open_socket
from ovspec.server.startup import answer_while_preparing

pytestmark = [needs_chromium, pytest.mark.slow]
QUESTION = "Write a short function that adds two numbers."


@pytest.fixture(params=["server", "real_server"])
def tab(request: pytest.FixtureRequest, open_tab: OpenTab) -> Tab:
    """The page of the demo pair or of the real model, greedy, with short answers."""
    tab = open_tab(request.getfixturevalue(request.param).url)
    tab.set(temperature="0", max_tokens="48")
    return tab


def chat_body(*messages: str, **options: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    chat = [{"role": roles[index % 2], "content": text} for index, text in enumerate(messages)]
    return {"messages": chat, "temperature": 0, "max_tokens": 48, **options}


def text_of(tab: Tab) -> str:
    """Return the text of the last answer as it is stored."""
    return tab.stored(
        """const database = await new Promise((done) => {
            const request = indexedDB.open("ovspec", 1); request.onsuccess = () => done(request.result); });
        const all = await new Promise((done) => {
            const request = database.transaction("messages").objectStore("messages").getAll();
            request.onsuccess = () => done(request.result); });
        return all.filter(({ role }) => role === "assistant").sort((a, b) => a.created - b.created).at(-1).content;"""
    )


def test_the_answer_is_the_servers(tab: Tab) -> None:
    """And the second turn continues the chat; both survive the tab."""
    tab.answer(QUESTION)
    first = tab.post("/v1/chat/completions", chat_body(QUESTION))["choices"][0]["message"]["content"]
    assert text_of(tab) == first
    facts = tab.last.locator(".facts").inner_text()
    assert re.search(r"[\d.]+ tokens/s", facts) and re.search(r"\d+ tokens in \d+ rounds", facts)
    assert "prompt tokens cached" in facts and "first token after" in facts
    tab.answer("Now multiply.")
    second = tab.post("/v1/chat/completions", chat_body(QUESTION, first, "Now multiply."))
    assert text_of(tab) == second["choices"][0]["message"]["content"]
    tab.page.reload()
    tab.page.locator("#chats .chat").first.click()
    expect(tab.page.locator(".message")).to_have_count(4)
    assert tab.page.locator("#title").inner_text() == QUESTION


def test_stop_and_continue(tab: Tab) -> None:
    """A stopped answer goes on from its last character, and so does one that was cut off; neither can be verified."""
    tab.set(max_tokens="1500", ignore_eos=True)
    tab.ask(QUESTION)
    expect(tab.last.locator(".markdown").last).not_to_be_empty()
    tab.page.keyboard.press("Escape")
    tab.wait()
    stopped = text_of(tab)
    assert "Stopped" in tab.last.inner_text() and len(stopped) > 0
    tab.press("Verify")
    expect(tab.last.locator(".verdict.bad")).to_have_text("A stopped answer can't be verified; regenerate it.")
    tab.set(max_tokens="10")
    tab.press("Continue")
    expect(tab.last.locator(".note")).to_contain_text("Cut off")
    longer = text_of(tab)
    assert longer.startswith(stopped) and len(longer) > len(stopped)
    body = chat_body(QUESTION, stopped, max_tokens=10, ignore_eos=True)
    assert longer == stopped + tab.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    tab.press("Inside")
    assert len(tab.last.locator(".tokens").text_content() or "") >= len(longer) - 5  # of chunks out of sight, too
    tab.last.locator(".tokens .token").first.hover()
    expect(tab.page.locator("#token-details")).to_contain_text("interrupted, so its probabilities aren't known")
    tab.press("Verify")
    expect(tab.last.locator(".verdict.bad")).to_have_text(
        "An answer that was stopped and continued can't be verified; regenerate it."
    )
    tokens = tab.last.locator(".tokens .token").count()
    tab.press("Continue")
    tab.wait()
    expect(tab.last.locator(".verdict")).to_have_count(0)
    expect(tab.last.locator(".inside")).to_have_count(1)
    expect(tab.last.locator(".ending")).to_contain_text("Cut off at the maximum number")
    assert tab.last.locator(".tokens .token").count() > tokens
    assert sum(map(int, re.findall(r" (\d+)$", tab.last.locator(".legend").inner_text(), re.M))) > tokens


def test_branches(tab: Tab) -> None:
    """Regenerating, editing and deleting; what was deleted comes back."""
    tab.answer(QUESTION)
    original = text_of(tab)
    tab.press("Regenerate")
    tab.wait()
    branches = tab.last.locator(".branches")
    expect(branches).to_contain_text("2 / 2")
    assert text_of(tab) == original
    tab.press("Inside")
    expect(tab.last.locator(".inside")).to_be_visible()
    branches.get_by_role("button", name="Earlier branch").click()
    expect(tab.last.locator(".branches")).to_contain_text("1 / 2")
    expect(tab.last.locator(".inside")).to_have_count(0)
    tab.last.get_by_role("button", name="Later branch").click()
    expect(tab.last.locator(".inside")).to_be_visible()  # it is as it was left
    tab.press("Inside")
    tab.last.get_by_role("button", name="Earlier branch").click()
    expect(tab.last.locator(".branches")).to_contain_text("1 / 2")
    user = tab.page.locator(".message.user").last
    user.get_by_role("button", name="Edit").click()
    user.locator("textarea").fill("Another question?")
    user.get_by_role("button", name="Send as a branch").click()
    tab.wait()
    expect(tab.page.locator(".message.user .body").last).to_have_text("Another question?")
    expect(tab.page.locator(".message.user .branches").last).to_contain_text("2 / 2")
    expect(tab.page.locator(".message")).to_have_count(2)
    tab.page.locator(".message.user").last.get_by_role("button", name="Delete").click()
    expect(tab.page.locator(".message.user .body").last).to_have_text(QUESTION)
    expect(tab.page.locator(".message textarea")).to_have_count(0)
    tab.page.locator("#toast").get_by_role("button", name="Undo").click()
    expect(tab.page.locator(".message.user .body").last).to_have_text("Another question?")
    tab.press("Edit")
    tab.last.locator("textarea").fill("It is 4")
    tab.last.get_by_role("button", name="Save as a branch").click()
    expect(tab.last.locator(".markdown")).to_have_text("It is 4")
    tab.press("Continue")
    tab.wait()
    body = chat_body("Another question?", "It is 4")
    assert text_of(tab) == "It is 4" + tab.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]


def test_several_chats(tab: Tab, tmp_path: Path, open_tab: OpenTab) -> None:
    """Search, rename, delete, export, and import into another browser."""
    for number in ("one", "two"):
        tab.page.click("#new-chat")
        tab.set(max_tokens="5")
        tab.answer(f"Question number {number}, <b>bold</b>")
    chats = tab.page.locator("#chats li")
    expect(chats).to_have_count(2)
    tab.page.fill("#search", "NUMBER one")
    expect(chats).to_have_count(1)
    tab.page.fill("#search", "nowhere")
    expect(chats).to_have_text("No chat has these words.")
    tab.page.fill("#search", "")
    chats.first.hover()
    chats.first.get_by_role("button", name="Rename").click()
    tab.page.keyboard.type("My <i>title</i>")
    tab.page.keyboard.press("Enter")
    expect(chats.first.locator("bdi")).to_have_text("My <i>title</i>")
    with tab.page.expect_download() as download:
        tab.page.click("#export")
    file = tmp_path / "chats.json"
    download.value.save_as(file)
    exported = json.loads(file.read_text("utf-8"))
    assert [len(chat["messages"]) for chat in exported["chats"]] == [2, 2]
    chats.first.hover()
    chats.first.get_by_role("button", name="Delete").click()
    expect(chats).to_have_count(1)
    tab.page.locator("#toast").get_by_role("button", name="Undo").click()
    expect(chats).to_have_count(2)
    expect(tab.page.locator(".message")).to_have_count(2)
    other = open_tab(tab.url)
    other.page.set_input_files("#import-file", file)
    expect(other.page.locator("#chats li")).to_have_count(2)
    expect(other.page.locator(".message")).to_have_count(2)
    bad = tmp_path / "bad.json"
    bad.write_text('{"format": "other"}', "utf-8")
    other.page.set_input_files("#import-file", bad)
    expect(other.page.locator("#toast")).to_contain_text("The file has no chats")


def test_options_reach_the_model(tab: Tab) -> None:
    """The same seed gives the server's text; a system prompt, stop strings and no draft arrive."""
    tab.set(temperature="1", seed="7", top_p="0.9", system="Be brief.", stop="\\n\\n", draft="none")
    tab.answer(QUESTION)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    body = {"messages": messages, "temperature": 1, "seed": 7, "top_p": 0.9, "max_tokens": 48, "stop": ["\n\n"]}
    assert text_of(tab) == tab.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    tab.press("Inside")
    expect(tab.last.locator(".legend li")).to_have_count(1)
    options = tab.page.locator("#setting-draft option").all_inner_texts()
    assert "lookup" in options and options[1] == "None: plain decoding"
    tab.page.focus("#setting-top_p")
    expect(tab.page.locator("#setting-top_p-hint")).to_contain_text("up to this total probability")


def test_a_new_chat_has_the_servers_defaults(server: Running, open_tab: OpenTab) -> None:
    """Settings belong to their chat; how many differ is shown, and all can be reset."""
    tab = open_tab(server.url)
    settings = tab.page.locator("#show-settings")
    expect(settings).to_have_text("Settings")
    tab.set(temperature="0", max_tokens="5", system="Be brief.")
    expect(settings).to_have_text("Settings (3)")
    expect(settings).to_have_accessible_name("Settings (3): 3 settings differ from the server's defaults")
    tab.answer(QUESTION)
    tab.page.click("#new-chat")
    expect(settings).to_have_text("Settings")
    for name in ("temperature", "max_tokens", "system"):
        expect(tab.page.locator(f"#setting-{name}")).to_have_value("")
    tab.page.locator("#chats .chat").first.click()
    expect(tab.page.locator("#setting-system")).to_have_value("Be brief.")
    tab.page.get_by_role("button", name="Reset").click()
    expect(tab.page.locator("#setting-system")).to_have_value("")
    expect(settings).to_have_text("Settings")
    tab.page.reload()
    tab.page.locator("#chats .chat").first.click()
    expect(tab.page.locator(".message")).to_have_count(2)
    expect(settings).to_have_text("Settings")


def test_schemas_and_grammars(tab: Tab) -> None:
    """Answers in JSON are shown as such; an error is beside its field, found by the page or by the server."""
    tab.set(format="json_schema", format_text='{"type": "object"', max_tokens="60")
    tab.ask(QUESTION)
    error = tab.page.locator("#setting-format_text-error")
    expect(error).to_contain_text("This isn't JSON")
    expect(tab.page.locator("#setting-format_text")).to_be_focused()
    expect(tab.page.locator(".message")).to_have_count(0)
    tab.set(format_text='{"type": "wrong"}')
    expect(error).to_contain_text("wrong")  # checked by the server before anything is sent
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
    tab.set(format_text=json.dumps({**schema, "additionalProperties": False}))
    expect(error).to_have_text("")
    tab.page.fill("#input", QUESTION)  # what was typed is still there
    tab.page.keyboard.press("Enter")
    tab.wait()
    assert 0 <= json.loads(text_of(tab))["age"] <= 99 or json.loads(text_of(tab))["age"] < 0
    expect(tab.last.locator(".code-bar")).to_contain_text("json")
    expect(tab.last.locator("pre .hljs-attr")).to_have_text('"age"')
    tab.set(format="regex", format_text="(")
    expect(error).to_contain_text("regex")
    tab.set(format_text="yes|no")
    tab.answer("Is it?")
    assert text_of(tab) in ("yes", "no")
    tab.set(format="", temperature="-1")
    tab.ask("again")
    expect(tab.page.locator("#setting-temperature-error")).to_contain_text("temperature")
    expect(tab.page.locator(".message")).to_have_count(5)  # the question stays, to be sent again
    expect(tab.page.locator("#composer-error")).to_contain_text("temperature")
    tab.set(temperature="0")
    expect(tab.page.locator("#composer-error")).to_have_text("")
    tab.page.locator(".message.user").last.get_by_role("button", name="Try again").click()
    expect(tab.page.locator(".message")).to_have_count(6)
    tab.wait()
    expect(tab.page.get_by_role("button", name="Try again")).to_have_count(0)


def test_a_call_of_a_tool(real_server: Running, open_tab: OpenTab) -> None:
    """It is shown with its arguments; its result is sent, and the model answers."""
    tab = open_tab(real_server.url)
    parameters = {"type": "object", "properties": {"city": {"enum": ["Vienna", "Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    tab.set(temperature="0", max_tokens="60", tools=json.dumps([tool]), tool_choice="required")
    tab.ask("What is the weather in Vienna?")
    call = tab.page.locator(".call").first
    expect(call).to_contain_text("weather")
    expect(call.locator("pre")).to_contain_text('"city"')
    tab.wait()
    tab.set(tool_choice="none")
    calls = tab.page.locator(".call").count()
    for _ in range(calls):
        tab.page.get_by_label("Result of weather").first.fill('{"degrees": 21}')
        tab.page.get_by_role("button", name="Send result").first.click()
    expect(tab.page.locator(".message")).to_have_count(3 + calls)
    tab.wait()
    expect(tab.page.locator(".message.tool pre").last).to_contain_text('"degrees"')
    expect(tab.page.get_by_label("Result of weather")).to_have_count(0)


def test_everything_by_keyboard(server: Running, open_tab: OpenTab) -> None:
    """No pointer is used; the focus is never lost."""
    tab = open_tab(server.url)
    keys = tab.page.keyboard
    expect(tab.page.locator("#input")).to_be_focused()
    keys.press("Alt+s")
    expect(tab.page.locator("#tab-settings")).to_be_focused()
    keys.press("ArrowRight")
    expect(tab.page.locator("#server-state")).to_contain_text("demo")
    keys.press("Escape")
    expect(tab.page.locator("#panel")).to_be_hidden()
    keys.press("Alt+i")
    keys.type("First line")
    keys.press("Shift+Enter")
    keys.type("second line")
    keys.press("Enter")
    tab.wait()
    expect(tab.page.locator(".message.user .body")).to_have_text("First line\nsecond line")
    keys.press("Alt+u")
    expect(tab.last).to_be_focused()
    for _ in range(12):
        keys.press("Tab")
        if tab.page.evaluate("document.activeElement.textContent") == "Inside":
            break
    keys.press("Enter")
    keys.press("Shift+Tab")
    keys.press("Shift+Tab")
    expect(tab.last.locator(".tokens")).to_be_focused()
    keys.press("ArrowRight")
    keys.press("ArrowRight")
    expect(tab.page.locator("#token-details")).to_contain_text("Probability")
    assert tab.last.locator(".token.current").get_attribute("data-index") == "1"
    keys.press("Alt+i")
    keys.press("ArrowUp")
    expect(tab.page.locator(".message.user textarea")).to_be_focused()
    keys.press("Escape")
    keys.press("Alt+k")
    expect(tab.page.locator("#keys")).to_be_visible()
    keys.press("Escape")
    keys.press("Alt+n")
    expect(tab.page.locator(".message")).to_have_count(0)
    expect(tab.page.locator("#input")).to_be_focused()


def test_a_key_is_asked_for_and_kept_for_the_tab(start_here: StartHere, tmp_path: Path, open_tab: OpenTab) -> None:
    file = tmp_path / "keys"
    file.write_text("secret", "utf-8")
    small = (DEMO / "draft", "--draft", "none", "--precision", "f32", "--arithmetic", "fast")
    tab = open_tab(start_here(*small, "--api-key-file", file).url)
    for key in ("wrong", "secret"):
        tab.page.fill("#key", key)
        tab.page.keyboard.press("Enter")
        if key == "wrong":
            expect(tab.page.locator("#key-note")).to_contain_text("doesn't know this key")
    expect(tab.page.locator("#model")).not_to_be_empty()
    tab.set(max_tokens="4")
    tab.answer("Hello")
    assert tab.page.evaluate("sessionStorage.getItem('ovspec-key')") == "secret"
    assert tab.page.evaluate("JSON.stringify(localStorage)").count("secret") == 0
    tab.page.reload()
    expect(tab.page.locator("#model")).not_to_be_empty()
    expect(tab.page.locator("#key-dialog")).to_be_hidden()


def test_while_the_model_is_prepared(open_tab: OpenTab) -> None:
    """The page shows how far that is, and waits."""
    listener = open_socket("127.0.0.1", 0)
    with listener, answer_while_preparing(listener, [], insecure=False), show_step("org/model: exporting"):
        tab = open_tab(f"http://127.0.0.1:{listener.getsockname()[1]}")
        expect(tab.page.locator("#model")).to_contain_text("being prepared: org/model: exporting")


@pytest.fixture
def proxy(server: Running) -> Iterator[str]:
    """A reverse proxy in front of a server, which is below a path of it."""

    class Handler(BaseHTTPRequestHandler):
        def forward(self) -> None:
            if not self.path.startswith("/tools/llm/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {"Content-Type": self.headers.get("Content-Type", "")}
            url = server.url + self.path.removeprefix("/tools/llm")
            with httpx.stream(self.command, url, content=body, headers=headers, timeout=60) as answer:
                self.send_response(answer.status_code)
                for name in ("content-type", "content-security-policy"):
                    if name in answer.headers:
                        self.send_header(name, answer.headers[name])
                self.end_headers()
                for part in answer.iter_raw():
                    self.wfile.write(part)
                    self.wfile.flush()

        do_GET = do_POST = forward

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()
        thread.join()


def test_below_a_path_of_a_proxy(proxy: str, open_tab: OpenTab) -> None:
    tab = open_tab(proxy, "/tools/llm/")
    tab.set(max_tokens="12")
    tab.answer("```python\nx = 1\n```")
    tab.press("Verify")
    expect(tab.last.locator(".verdict")).to_contain_text("Verified: each of the")
    tab.page.click("#show-server")
    expect(tab.page.locator("#server-state")).to_contain_text("KV cache")
