"""The page in headless Chromium, and what its tests do there."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium here (on Debian: apt-get install chromium)")
SECONDS = 60
EXPECTED_ERRORS = re.compile(r"Failed to load resource: the server responded with a status of (?:4|503)")


@dataclass
class Tab:
    """A tab with the page. ``url``: of its server."""

    page: Page
    url: str

    def ask(self, text: str) -> None:
        self.page.fill("#input", text)
        self.page.keyboard.press("Enter")

    def wait(self) -> Locator:
        """Return the last answer, when it is whole."""
        from playwright.sync_api import expect

        expect(self.page.locator("#stop")).to_be_hidden()
        expect(self.last.get_by_role("button", name="Regenerate")).to_be_visible()
        return self.last

    def answer(self, text: str) -> Locator:
        self.ask(text)
        return self.wait()

    @cached_property
    def last(self) -> Locator:
        return self.page.locator(".message.assistant").last

    def press(self, name: str) -> None:
        """Press a button of the last answer."""
        self.last.get_by_role("button", name=name, exact=True).first.click()

    def set(self, **settings: str | bool) -> None:
        """Set options in the panel, which is open afterwards."""
        if self.page.locator("#panel").is_hidden() or self.page.locator("#settings").is_hidden():
            self.page.click("#show-settings")
        for name, value in settings.items():
            field = self.page.locator(f"#setting-{name}")
            if isinstance(value, bool):
                field.set_checked(value)
            elif field.evaluate("field => field.tagName") == "SELECT":
                field.select_option(value)
            else:
                field.fill(value)
                field.dispatch_event("change")

    def stored(self, script: str) -> Any:
        return self.page.evaluate(f"(async () => {{ {script} }})()")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Ask the server without the page."""
        answer = httpx.post(self.url + path, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()


OpenTab = Callable[..., Tab]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--lang=en-US"])
        yield browser
        browser.close()


@pytest.fixture
def open_tab(browser: Browser) -> Iterator[OpenTab]:
    """Return a function that opens the page of a server, with a storage of its own.

    At the end no tab may have asked another host for anything, or complained of anything but answers that are errors.
    """
    from playwright.sync_api import expect

    tabs = list[Tab]()
    hosts, complaints = set[str | None](), list[str]()

    def note(message: Any) -> None:
        if message.type in ("error", "warning") and not EXPECTED_ERRORS.search(message.text):
            complaints.append(message.text)

    def open_tab(url: str, path: str = "/", context: Any = None, **options: Any) -> Tab:
        options.setdefault("viewport", {"width": 1280, "height": 860})
        context = context or browser.new_context(accept_downloads=True, **options)
        page = context.new_page()
        page.set_default_timeout(SECONDS * 1e3)
        page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(url + path)
        tabs.append(Tab(page, url))
        return tabs[-1]

    expect.set_options(timeout=SECONDS * 1e3)
    yield open_tab
    for tab in tabs:
        with contextlib.suppress(Exception):
            tab.page.context.close()
    assert hosts <= {"127.0.0.1", "localhost", None}
    assert not complaints
