"""Answers that attack the page, and answers without an end: nothing runs, and the page stays fluent."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from browsers import OpenTab, Tab, needs_chromium
from playwright.sync_api import Browser, expect
from recorded_answers import replay

pytestmark = [needs_chromium, pytest.mark.slow]
RUN = "window.attacked=1"
ATTACKS = {
    "script": f"<script>{RUN}</script>",
    "image": f"<img src=x onerror={RUN}> ![a](https://attack.example/pixel.png)",
    "svg": f"<svg onload={RUN}><animate onbegin={RUN} attributeName=x></svg>",
    "links": f"[a](javascript:{RUN}) [b](&#x6A;avascript:{RUN}) <a href='data:text/html,x'>c</a> [d](vbscript:x)",
    "frames": f"<iframe srcdoc='<script>{RUN}</script>'></iframe><object data=x></object><embed src=x>",
    "page": "<base href=https://attack.example/><meta http-equiv=refresh content='0;url=https://attack.example/'>",
    "style": "<style>body{display:none}</style><div style='position:fixed;inset:0'>cover</div>",
    "form": "<form id=composer action=https://attack.example><input id=input name=body></form>",
    "mutation": f"<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=x onerror={RUN}&gt;'>",
    "template": f"<template><script>{RUN}</script></template>"
    f"<noscript><p title='</noscript><img src=x onerror={RUN}>'>",
    "fence": f'```"><script>{RUN}</script>\ncode\n```\n~~~html\n<script>{RUN}</script>\n~~~\n',
    "table": f"| a | b |\n|---|\n| <img src=x onerror={RUN}> |\n\n| x |\n|:-:|\n| y",
    "unclosed": "**bold *both `code [link](http://a.example\n\n- [ ] task\n- [x] <b>done\n\n````\n```\nnever closed",
    "deep": "> " * 4000
    + "deep\n\n"
    + "- " * 3000
    + "x\n\n"
    + "[" * 30_000
    + "\n\n"
    + "*_" * 20_000
    + "\n\n"
    + "<b>" * 5000,
    "marks": "\u202eevil\u202c \u2066a\u2067 שלום `\u202e code` \u200f\u200e\n\n"
    "```python\nif x:\u202e # \u2066 end\n```\n",
    "controls": "\x00\x01\x1b[31m\ud83d\ude00 \ufffe\r\nline\rline\u2028\u2029 \u0300" * 50 + "a" + "\u0301" * 3000,
    "numbers": "99999999999999999999. item\n\n" + "#" * 50 + " heading\n\n" + "|" * 5000 + "\n" + "-|" * 5000,
}
FILL = "The page stays as it is. "


def cut(text: str, size: int = 7) -> list[dict[str, str]]:
    return [{"content": text[start : start + size]} for start in range(0, len(text), size)]


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_harmless(name: str, open_tab: OpenTab) -> None:
    """While the answer grows, when it is whole, in its tokens, and when it is opened again."""
    with replay(cut(f"{FILL}\n\n{ATTACKS[name]}\n\n{FILL}", 7 if name != "deep" else 500)) as url:
        tab = open_tab(url)
        tab.page.on("framenavigated", lambda frame: pytest.fail(frame.url) if frame.url.rstrip("/") != url else None)
        tab.answer("Attack me")
        is_harmless(tab)
        tab.press("Inside")
        is_harmless(tab)
        tab.page.reload()
        tab.page.locator("#chats .chat").first.click()
        expect(tab.last.locator(".actions")).to_be_visible()
        is_harmless(tab)


def is_harmless(tab: Tab) -> None:
    """No element is there that could do anything, and the page is as wide and as usable as before."""
    page = tab.page
    page.wait_for_timeout(100)
    assert page.evaluate("window.attacked") is None
    forbidden = "script, img, svg:not(.plot svg), iframe, object, embed, base, meta, style, form, template, math"
    assert page.locator(".message.assistant").locator(f"{forbidden}, [style*=fixed]").count() == 0
    names = page.evaluate(
        """[...document.querySelectorAll(".markdown *")].flatMap(
            (node) => [...node.attributes].map(({ name }) => name))"""
    )
    assert not [name for name in names if name.startswith("on") or name in ("id", "name", "src", "srcdoc", "style")]
    links = page.locator(".markdown a").evaluate_all("links => links.map(link => [link.href, link.rel, link.target])")
    for href, relation, target in links:
        assert href.startswith(("http://", "https://", "mailto:")) and "noopener" in relation and target == "_blank"
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    expect(page.locator("#input")).to_be_visible()
    page.fill("#input", "typed")
    page.fill("#input", "")


def test_html_that_is_only_shown(open_tab: OpenTab) -> None:
    """Markup in an answer is text, apart from the harmless; code says where its order would deceive."""
    text = "H<sub>2</sub>O and <div onclick=x>div</div>\n\n```python\nx = 1 \u202e # \u2066\n```\n"
    with replay(cut(text)) as url:
        tab = open_tab(url)
        tab.answer("?")
        expect(tab.last.locator("sub")).to_have_text("2")
        expect(tab.last.locator(".markdown p")).to_contain_text("<div onclick=x>div</div>")
        expect(tab.last.locator("pre")).to_contain_text("\\u202e")
        expect(tab.last.locator("pre .hljs-number")).to_have_text("1")


def test_thinking_is_folded(open_tab: OpenTab) -> None:
    thinking = [{"reasoning_content": f"Step {number}. "} for number in range(20)]
    with replay([*thinking, {"content": "The **answer**."}]) as url:
        tab = open_tab(url)
        tab.answer("?")
        box = tab.last.locator("details.thinking")
        assert not box.evaluate("box => box.open")
        expect(tab.last.locator("strong")).to_have_text("answer")
        box.locator("summary").click()
        expect(box).to_contain_text("Step 19.")


def test_a_growing_text_ends_as_the_whole_one(open_tab: OpenTab) -> None:
    """However it is cut: lists, tables, code, references; the elements are those of the whole text."""
    text = Path(__file__).with_name("long_answer.md").read_text(encoding="utf-8")
    rendered = list[str]()
    for size in (1, 13, len(text)):
        with replay(cut(text, size)) as url:
            tab = open_tab(url)
            tab.answer("?")
            expect(tab.last.locator(".hljs-keyword").first).to_be_visible()
            tab.page.wait_for_timeout(300)
            grown = tab.last.locator(".markdown").inner_html()
            tab.page.reload()
            tab.page.locator("#chats .chat").first.click()
            expect(tab.last.locator(".hljs-keyword").first).to_be_visible()
            tab.page.wait_for_timeout(300)
            assert tab.last.locator(".markdown").inner_html() == grown
            rendered.append(grown)
    assert len({*rendered}) == 1
    assert all(
        part in rendered[0]
        for part in ("<table", "<ol", "<blockquote", "hljs-keyword", "/3/howto/sorting", 'type="checkbox"')
    )


# ---------------------------------------------------------------- fluency

LONG = {
    "words": [{"content": f"word{number} "} for number in range(100_000)],
    "unbroken": [{"content": "abcd"} for _ in range(100_000)],
    "code": [{"content": "```python\n"}, *[{"content": f"x{number} = {number}\n"} for number in range(50_000)]],
    "list": [{"content": f"- item **{number}** of `many`\n"} for number in range(20_000)],
}


@pytest.mark.parametrize("name", LONG)
def test_an_answer_without_an_end(name: str, open_tab: OpenTab) -> None:
    """100,000 tokens as fast as they come: the page answers meanwhile, and no step of it takes long."""
    with replay(LONG[name]) as url:
        tab = open_tab(url)
        tab.page.evaluate(NOTE_LONG_TASKS)
        tab.ask("Go on")
        expect(tab.last.locator(".markdown").last).not_to_be_empty()
        tab.page.fill("#input", "typed meanwhile")
        tab.wait()
        tasks = tab.page.evaluate("window.longTasks")
        print(
            name, "long tasks", len(tasks), "median", statistics.median(tasks or [0]), "longest", max(tasks, default=0)
        )
        assert statistics.median(tasks or [0]) < 250
        length = sum(len(delta["content"]) for delta in LONG[name])
        assert len(tab.last.locator(".markdown").text_content() or "") > 0.5 * length


NOTE_LONG_TASKS = """() => {
    window.longTasks = [];
    const note = (list) => window.longTasks.push(...list.getEntries().map((entry) => entry.duration));
    new PerformanceObserver(note).observe({ type: "longtask" });
}"""


def frames_of(trace: bytes) -> tuple[int, int, float]:
    """Return the presented and the dropped frames, and seconds, of a trace of Chromium's."""
    events = json.loads(trace)["traceEvents"]
    reports = [event for event in events if event.get("name") == "PipelineReporter" and event.get("ph") in ("b", "B")]
    states = [
        (event["ts"], event["args"]["frame_reporter"]) for event in reports if "frame_reporter" in event.get("args", {})
    ]
    presented, dropped = dict[Any, float](), set[Any]()
    for ts, report in filter(lambda state: state[1], states):  # a frame may have two: of the compositor and of the page
        frame = report["frame_source"], report["frame_sequence"]
        if report["state"] in ("STATE_PRESENTED_ALL", "STATE_PRESENTED_PARTIAL"):
            presented[frame] = ts
        elif report["state"] == "STATE_DROPPED":
            dropped.add(frame)
    dropped -= presented.keys()
    seconds = (max(presented.values()) - min(presented.values())) / 1e6
    return len(presented), len(dropped), seconds


def test_scrolling_while_an_answer_grows(browser: Browser, open_tab: OpenTab) -> None:
    """A long chat, and 100 tokens a second: measured by Chromium's trace, scrolling has 60 frames a second.

    As it has without an answer that grows, which a busy machine can't show.
    """
    text = Path(__file__).with_name("long_answer.md").read_text(encoding="utf-8")
    with replay(cut(text * 12, 4), tokens_per_second=100) as url:
        tab = open_tab(url)
        fill_chat(tab, 200, text)
        tab.page.reload()
        tab.page.locator("#chats .chat").first.click()
        expect(tab.page.locator(".message").nth(199)).to_be_attached()
        idle_rates, rates = list[float](), list[float]()
        for _ in range(3):
            idle_rates.append(scrolling_rate(browser, tab, "nothing grows"))
            tab.ask("Go on")
            expect(tab.last.locator(".markdown").last).not_to_be_empty()
            tab.page.wait_for_timeout(1000)
            rates.append(scrolling_rate(browser, tab, "an answer grows"))
            tab.page.keyboard.press("Escape")
            tab.wait()
            if rates[-1] > 55:
                return
    if max(idle_rates) < 58:
        pytest.skip(f"this machine is too busy: {max(idle_rates):.0f} frames a second with nothing that grows")
    pytest.fail(f"{max(rates):.1f} frames a second")


def scrolling_rate(browser: Browser, tab: Tab, label: str) -> float:
    """Return the frames a second that are presented while the chat is scrolled."""
    categories = ["cc", "benchmark", "disabled-by-default-devtools.timeline.frame", "devtools.timeline.frame"]
    browser.start_tracing(page=tab.page, categories=categories)
    intervals = tab.page.evaluate(SCROLL, 5_000)
    presented, dropped, seconds = frames_of(browser.stop_tracing())
    slow = sorted(intervals)[int(0.95 * len(intervals))]
    print(f"{label}: presented {presented}, dropped {dropped} in {seconds:.1f} s: {presented / seconds:.1f} a second;")
    print(f"animation frames: median {statistics.median(intervals):.1f} ms, 95 % {slow:.1f} ms")
    return presented / seconds


# Scrolls up and down by animation frames; returns the times between these.
SCROLL = """(milliseconds) => new Promise((done) => {
    const scroller = document.querySelector("#scroller");
    const intervals = []; const start = performance.now(); let last = start;
    const step = (now) => {
        intervals.push(now - last); last = now;
        scroller.scrollTop += Math.sin((now - start) / 700) > 0 ? -25 : 25;
        if (now - start < milliseconds) requestAnimationFrame(step); else done(intervals.slice(1));
    };
    requestAnimationFrame(step);
})"""


def fill_chat(tab: Tab, count: int, text: str) -> None:
    """Put a chat with so many messages into the browser's storage."""
    tab.page.evaluate(
        """async ([count, text]) => {
            const { saveChat, saveMessages } = await import("./page/store.js");
            const { newChat } = await import("./page/chats.js");
            const chat = { ...newChat({}), title: "A long chat" };
            const messages = Array.from({ length: count }, (_, index) => ({
                id: `m${index}`, chat: chat.id, parent: index ? `m${index - 1}` : null, created: index,
                role: index % 2 ? "assistant" : "user", content: index % 2 ? text : `Question ${index}`,
            }));
            await saveMessages(messages);
            await saveChat({ ...chat, leaf: `m${count - 1}` });
        }""",
        [count, text],
    )


def test_a_chat_of_2000_messages_opens_within_a_second(open_tab: OpenTab) -> None:
    text = Path(__file__).with_name("long_answer.md").read_text(encoding="utf-8")
    with replay([]) as url:
        tab = open_tab(url)
        fill_chat(tab, 2000, text)
        tab.page.reload()
        expect(tab.page.locator("#chats .chat")).to_have_count(1)
        times: list[Any] = []
        for _ in range(3):
            times.append(tab.page.evaluate(OPEN))
            tab.page.click("#new-chat")
        print("milliseconds:", times)
        assert min(times) < 1000 and statistics.median(times) < 1000
        tab.page.locator("#chats .chat").first.click()
        expect(tab.last.locator("table").first).to_be_visible()
        tab.page.evaluate("document.querySelector('#scroller').scrollTop = 1e5")
        expect(tab.page.locator(".message.assistant table").nth(5)).to_be_attached()
        tab.page.fill("#search", "Question 1234")
        expect(tab.page.locator("#chats li")).to_contain_text("Question 1234")


# From the click to the frame in which the last message is shown.
OPEN = """() => new Promise((done) => {
    const start = performance.now();
    document.querySelector("#chats .chat").click();
    const isShown = () => document.querySelectorAll(".message").length === 2000
        && document.querySelector(".message:last-child .actions button");
    const end = () => done(performance.now() - start);
    const look = () => requestAnimationFrame(isShown() ? end : look);
    look();
})"""
