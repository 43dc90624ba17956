"""The page for everybody: axe's rules, four sizes, both themes, and what a screen reader is told.

``dev.py test tests/server/page/test_accessibility.py --slow -k picture --update-docs`` takes the picture in the docs.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from browsers import OpenTab, Tab, needs_chromium
from conftest import ROOT, USERS_CACHE
from playwright.sync_api import expect
from recorded_answers import replay
from servers import REAL, Running, Start

pytestmark = [needs_chromium, pytest.mark.slow]
SIZES = {"phone": (390, 844), "tablet": (820, 1180), "laptop": (1280, 800), "desktop": (1920, 1080)}
AXE = USERS_CACHE / "downloads" / "axe" / "axe" / "axe.min.js"
ANSWER = (Path(__file__).with_name("long_answer.md")).read_text(encoding="utf-8")


def find_violations(tab: Tab) -> list[str]:
    """Return what axe finds that is serious, or worse, with its places."""
    tab.page.context.new_cdp_session(tab.page).send("Runtime.evaluate", {"expression": AXE.read_text(encoding="utf-8")})
    results: Any = tab.page.evaluate("async () => await axe.run(document)")
    return [
        f"{violation['id']}: {[node['html'][:120] for node in violation['nodes'][:4]]}"
        for violation in results["violations"]
        if violation["impact"] in ("serious", "critical", "moderate")
    ]


@pytest.mark.skipif(not AXE.is_file(), reason="axe could not be fetched (scripts/fetch.py axe)")
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", ["phone", "laptop"])
def test_axe_finds_nothing(server: Running, open_tab: OpenTab, theme: str, size: str) -> None:
    """In each state of the page: empty, answered, opened, with its panels and dialogs, and with an error."""
    width, height = SIZES[size]
    tab = open_tab(server.url, viewport={"width": width, "height": height}, color_scheme=theme, bypass_csp=True)
    violations = {"empty": find_violations(tab)}
    tab.page.evaluate("document.body.append(document.createElement('button'))")
    assert find_violations(tab), "axe finds what is planted"
    tab.page.evaluate("document.body.lastChild.remove()")
    tab.set(temperature="0", max_tokens="30")
    violations["settings"] = find_violations(tab)
    tab.page.click("#close-panel")
    tab.answer("def add(a, b):\n    return a + b\n\ndef add(a, b):\n")
    violations["answered"] = find_violations(tab)
    tab.press("Inside")
    tab.press("Verify")
    expect(tab.last.locator(".verdict.good")).to_be_visible()
    tab.page.locator(".message.user").get_by_role("button", name="Edit").click()
    violations["inside"] = find_violations(tab)
    tab.page.click("#show-server")
    expect(tab.page.locator("#server-state svg").first).to_be_visible()
    violations["server"] = find_violations(tab)
    tab.page.click("#close-panel")
    tab.press("Compare")
    expect(tab.page.locator("#compare .verdict")).to_contain_text("peed-up")
    violations["compare"] = find_violations(tab)
    tab.page.keyboard.press("Escape")
    tab.set(format="regex", format_text="(")
    expect(tab.page.locator("#setting-format_text-error")).not_to_be_empty()
    violations["error"] = find_violations(tab)
    assert not {state: broken for state, broken in violations.items() if broken}


@pytest.mark.skipif(not AXE.is_file(), reason="axe could not be fetched (scripts/fetch.py axe)")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_in_markdown(open_tab: OpenTab, theme: str) -> None:
    with replay([{"reasoning_content": "thinking"}, {"content": ANSWER}]) as url:
        tab = open_tab(url, color_scheme=theme, bypass_csp=True)
        tab.answer("How do I sort?")
        tab.page.wait_for_timeout(500)
        assert not find_violations(tab)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_fits(open_tab: OpenTab, size: str, theme: str, tmp_path: Path) -> None:
    """Nothing is wider than the window, nothing that can be pressed is cut off, and the theme is the system's."""
    width, height = SIZES[size]
    with replay([{"content": ANSWER}]) as url:
        tab = open_tab(url, viewport={"width": width, "height": height}, color_scheme=theme)
        tab.answer("How do I sort in Python?")
        background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") == (theme == "light")
        fits(tab, width)
        tab.page.screenshot(path=tmp_path / f"{size}-{theme}-answer.png")
        tab.press("Inside")
        fits(tab, width)
        tab.page.screenshot(path=tmp_path / f"{size}-{theme}-inside.png")
        tab.page.click("#show-settings")
        fits(tab, width)
        tab.page.screenshot(path=tmp_path / f"{size}-{theme}-settings.png")
        tab.page.click("#close-panel")
        tab.page.locator(".message.user").get_by_role("button", name="Delete").click()
        toast, composer, field = (
            tab.page.locator(place).bounding_box() for place in ("#toast", "#composer", ".composer-row")
        )
        assert toast and composer and field and toast["y"] + toast["height"] <= field["y"]
        assert size != "phone" or toast["width"] >= composer["width"] - 30
        tab.page.locator("#toast").get_by_role("button", name="Undo").click()
        expect(tab.page.locator(".message")).to_have_count(2)
        if size == "phone":
            tab.page.click("#toggle-sidebar")
            expect(tab.page.locator("#chats .chat").first).to_be_visible()
            tab.page.screenshot(path=tmp_path / f"{size}-{theme}-chats.png")
            tab.page.locator("#chats .chat").first.click()
            expect(tab.page.locator("#sidebar")).to_be_hidden()
        zoomed_width = max(320, width // 2)
        tab.page.set_viewport_size({"width": zoomed_width, "height": height // 2})
        fits(tab, zoomed_width)


def fits(tab: Tab, width: int) -> None:
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    edges = "buttons => buttons.map(button => button.getBoundingClientRect()).map(({ left, right }) => [left, right])"
    buttons = tab.page.locator("button:visible").evaluate_all(edges)
    assert buttons and all(left >= -1 and right <= width + 1 for left, right in buttons)


def test_the_theme_can_be_chosen(open_tab: OpenTab) -> None:
    with replay([]) as url:
        tab = open_tab(url, color_scheme="light")
        colour = "getComputedStyle(document.body).backgroundColor"
        light = tab.page.evaluate(colour)
        for name in ("light", "dark"):
            tab.page.click("#theme")
            expect(tab.page.locator("#theme")).to_have_text(f"Theme: {name}")
        assert tab.page.evaluate(colour) != light
        tab.page.reload()
        expect(tab.page.locator("#theme")).to_have_text("Theme: dark")


def test_a_phone_has_the_theme_and_the_model(open_tab: OpenTab) -> None:
    width, height = SIZES["phone"]
    with replay([]) as url:
        tab = open_tab(url, viewport={"width": width, "height": height}, color_scheme="light")
        expect(tab.page.locator("#model")).to_be_visible()
        tab.page.click("#toggle-sidebar")
        tab.page.get_by_role("button", name="Theme: auto").click()
        expect(tab.page.locator("#sidebar .theme")).to_have_text("Theme: light")
        theme, sidebar = (tab.page.locator(place).bounding_box() for place in ("#sidebar .theme", "#sidebar"))
        assert theme and sidebar and theme["x"] + theme["width"] <= sidebar["width"]
        fits(tab, width)


def test_what_a_screen_reader_is_told(open_tab: OpenTab) -> None:
    """While an answer grows, one sentence; at its end, the answer; never each token."""
    with replay([{"content": f"word{number} "} for number in range(300)], tokens_per_second=200) as url:
        tab = open_tab(url)
        tab.page.evaluate(
            """() => { window.told = [];
            for (const region of document.querySelectorAll("[role=status], [role=alert], [aria-live=polite]"))
                new MutationObserver(() => window.told.push(region.textContent)).observe(region,
                    { childList: true, characterData: true, subtree: true }); }"""
        )
        tab.answer("Count")
        tab.page.wait_for_timeout(300)
        told = [sentence for sentence in tab.page.evaluate("window.told") if sentence]
        assert told[0] == "The model answers." and told[-1].startswith("The answer is whole: word0 word1")
        assert len(told) == 2
        assert tab.page.locator("#messages").get_attribute("role") == "log"
        tree = tab.last.aria_snapshot()
        for name in ("heading", 'button "Copy"', 'button "Inside"'):
            assert name in tree


def test_the_picture_in_the_docs(start: Start, open_tab: OpenTab, update_docs: bool) -> None:
    """Of the real model with lookup and its head; taken anew with --update-docs."""
    if not update_docs:
        assert (ROOT / "docs" / "images" / "page.png").stat().st_size > 20_000
        return
    from PIL import Image

    tab = open_tab(
        start(REAL, "--draft", "lookup,head", "--temperature", "0").url, viewport={"width": 1280, "height": 900}
    )
    for _ in range(8):  # weights move into large pages, and drafters are known to pay
        tab.post("/v1/completions", {"prompt": "A list of things: ", "max_tokens": 200})
    tab.set(max_tokens="120")
    tab.page.click("#close-panel")
    tab.answer("What is the difference between a list and a tuple in Python?")
    tab.press("Compare")
    expect(tab.page.locator("#compare .verdict")).to_contain_text("peed-up", timeout=180_000)
    tab.page.keyboard.press("Escape")
    tab.press("Inside")
    tab.press("Verify")
    expect(tab.last.locator(".verdict.good")).to_be_visible()
    tab.page.wait_for_timeout(500)
    picture = Image.open(io.BytesIO(tab.page.screenshot()))
    picture.quantize(128).save(ROOT / "docs" / "images" / "page.png", optimize=True)
