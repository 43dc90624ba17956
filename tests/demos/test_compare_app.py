"""The page that compares plain and speculative decoding, in a browser.

``dev.py test tests/demos/test_compare_app.py -k narrow --update-docs`` takes the picture in docs/images/.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
from conftest import PROMPTS, ROOT
from PIL import Image
from playwright.sync_api import BrowserContext, Page, sync_playwright

import ovspec
from ovspec.api.comparison import iterate_turns

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium here (on Debian: apt-get install chromium)")
REAL = ROOT / "smollm2"
COLOUR = "element => getComputedStyle(element).backgroundColor"
HOSTILE = "<b>bold</b><img src=x onerror=alert(1)>${1 + 1}{{value}}@children &amp; </div>\n"


@pytest.fixture(scope="module")
def compare_app() -> ModuleType:
    """The demo, which takes seconds to import; so only the worker that runs this file does."""
    return importlib.import_module("compare_app")


@pytest.fixture(scope="module")
def address(pair: Path, cache_dir: Path, compare_app: ModuleType, update_docs: bool) -> Iterator[str]:
    """Of the page, which this process serves as the demo does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = [str(REAL), "--chat"] if update_docs else [str(pair), "--precision", "f32"]
    build, pages = compare_app.build, list[Any]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache_dir))
        patch.setattr(sys, "argv", ["compare_app.py", *given, "--port", str(port)])
        patch.setattr(compare_app, "build", lambda *arguments: pages.append(build(*arguments)) or pages[-1])
        launch = functools.partialmethod(compare_app.gr.Blocks.launch, prevent_thread_lock=True)
        patch.setattr(compare_app.gr.Blocks, "launch", launch)
        if not update_docs:
            hurry(compare_app, patch)
        compare_app.main()
        try:
            yield f"http://127.0.0.1:{port}/"
        finally:
            pages[0].close(verbose=False)


def hurry(compare_app: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Time a single turn, and don't let the browser settle: no test reads the times."""
    patch.setattr(compare_app, "SETTLE", 0)
    patch.setattr(compare_app, "iterate_turns", lambda: range(1))


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserContext]:
    """One for all pages, which keeps the scripts that each of them loads."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_context(viewport={"width": 1280, "height": 900})
        browser.close()


@pytest.fixture
def page(browser: BrowserContext, address: str) -> Iterator[Page]:
    """The page as it is opened; at the end it must have asked nobody else for anything, and complained of nothing."""
    page = browser.new_page()
    page.set_default_timeout(20_000)
    requests, complaints = list[str](), list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    page.goto(address)
    page.wait_for_selector("#generate")
    yield page
    assert {urlsplit(url).hostname for url in requests if not url.startswith(("data:", "blob:"))} == {"127.0.0.1"}
    assert not complaints
    page.close()


def settle(page: Page) -> None:
    """Wait until the page has drawn what was opened or typed: what is typed into a field just before is lost."""
    page.evaluate(
        "new Promise(done => { let left = 10; requestAnimationFrame(function f() {"
        " left-- ? requestAnimationFrame(f) : done() }) })"
    )


def open_sampling(page: Page) -> None:
    page.click("text=Sampling and grammar")
    page.wait_for_selector("#regex textarea, #regex input")
    settle(page)


def press(page: Page, prompt: str, drafter: str = "draft model", lookahead: str = "4", tokens: int = 60) -> None:
    page.fill("#prompt textarea", prompt)
    page.get_by_label(drafter, exact=True).check()
    page.fill("#lookahead input", lookahead)
    page.keyboard.press("Enter")
    page.fill("#max-tokens input", str(tokens))
    settle(page)
    page.click("#generate")


def texts(page: Page) -> list[str | None]:
    """Both, once they are whole."""
    page.wait_for_selector(".numbers")
    return [page.text_content(f".{name} .text") for name in ("plain", "speculative")]


def colour(page: Page, source: str) -> str:
    return page.locator(f".speculative .token.{source}").first.evaluate(COLOUR)


@needs_chromium
def test_both_texts_their_times_and_who_proposed_them(page: Page, load: Callable[..., ovspec.LanguageModel]) -> None:
    press(page, PROMPTS[3], lookahead="3")
    expected = load(draft=True).generate(PROMPTS[3], max_tokens=60, lookahead=3)
    assert texts(page) == [PROMPTS[3] + expected.text] * 2
    verdict = page.inner_text(".verdict")
    assert verdict.endswith(f". Both texts have the same {len(expected.token_ids)} tokens.")
    assert re.match(r"(Speed-up|No clear speed-up:|No speed-up: drafting costs more) ", verdict)

    numbers = dict(line.split("\t", 1) for line in page.inner_text(".numbers").splitlines()[1:])
    assert all(float(cell.removesuffix(" ms")) > 0 for cell in numbers["time to first token"].split("\t"))
    assert all(float(cell) > 0 for cell in numbers["tokens per second after it"].split("\t"))
    stats = expected.stats
    rate = f"{stats.accepted} of {stats.proposed} ({100 * stats.accepted / stats.proposed:.0f} %)"
    assert numbers["accepted of proposed tokens"].strip() == rate
    conditional = next(cell for name, cell in numbers.items() if name.startswith("conditional acceptance"))
    assert float(conditional) == pytest.approx(stats.conditional_acceptance, abs=0.005)

    legend = page.inner_text(".legend").split("\n")
    assert legend[1:] == [
        f"the target itself {stats.generated_tokens - stats.accepted}",
        f"draft model {stats.accepted}",
        "lookup 0",
    ]
    assert page.locator(".plain .token.draft").count() == 0 < page.locator(".plain .token.target").count()
    assert colour(page, "draft") != colour(page, "target")
    fits_narrow_window(page)


def fits_narrow_window(page: Page) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    plain, speculative = (page.locator(f".{name}").bounding_box() for name in ("plain", "speculative"))
    assert plain and speculative and plain["y"] + plain["height"] < speculative["y"]


@needs_chromium
def test_text_is_never_markup(page: Page) -> None:
    """Neither of a field nor of the prompt nor of the model, which a grammar has say it here."""
    press(page, "import os", lookahead="<i>few</i>")
    page.wait_for_selector(".error")
    assert page.inner_text(".error") == "The lookahead is <i>few</i>; it must be auto or a number of at least 1."
    open_sampling(page)
    page.fill("#regex input, #regex textarea", re.escape(HOSTILE.strip()))
    press(page, HOSTILE, "lookup, then draft model", tokens=100)
    assert texts(page) == [HOSTILE + HOSTILE.strip()] * 2
    assert page.locator(".results").locator("b, img").count() == 0
    assert "forced by the grammar" in page.inner_text(".legend")
    assert colour(page, "forced") != page.locator(".legend .target").evaluate(COLOUR)


@needs_chromium
@pytest.mark.slow
def test_a_schema_top_p_and_no_draft(page: Page, load: Callable[..., ovspec.LanguageModel]) -> None:
    """A schema forces tokens without any draft; a top-p of 0.01 draws what greedy decoding chooses."""
    press(page, PROMPTS[3], "no draft")
    expected = load().generate(PROMPTS[3], max_tokens=60)
    assert texts(page) == [PROMPTS[3] + expected.text] * 2
    assert "nothing was proposed" in page.inner_text(".verdict")
    open_sampling(page)
    page.fill("#top-p input[type=number]", "0.01")
    press(page, "import os", "no draft")
    page.wait_for_selector(".error:has-text('needs a `temperature` above 0')")
    page.fill("#temperature input[type=number]", "1")
    press(page, PROMPTS[3], tokens=20)
    assert texts(page) == [PROMPTS[3] + load().generate(PROMPTS[3], max_tokens=20).text] * 2
    page.fill("#schema textarea", '{"const": {"name": "Tom"}}')
    press(page, "x = ", "no draft")
    page.wait_for_selector(".speculative .token.forced")
    plain, speculative = texts(page)
    assert plain == speculative
    assert json.loads(str(plain).removeprefix("x = ")) == {"name": "Tom"}


@needs_chromium
@pytest.mark.slow
def test_a_press_at_the_very_end_is_not_lost(page: Page) -> None:
    """When the table appears, the run isn't over for gradio yet."""
    page.evaluate("""() => {
        window.tables = 0;
        let there = false;
        new MutationObserver(() => {
            const before = there;
            there = document.querySelector(".numbers") !== null;
            if (there && !before && ++window.tables === 1) document.querySelector("#generate").click();
        }).observe(document.body, {childList: true, subtree: true});
    }""")
    press(page, PROMPTS[3], "no draft", tokens=5)
    page.wait_for_function("window.tables === 2")


@needs_chromium
@pytest.mark.slow
def test_what_cannot_be_done_is_said_in_a_sentence(page: Page) -> None:
    press(page, "import os", tokens=0)
    page.wait_for_selector(".error")
    assert "`max_tokens` is 0; it must be at least 1, or -1" in page.inner_text(".error")
    press(page, "import os", lookahead="<i>few</i>")
    page.wait_for_selector(".error:has-text('lookahead')")
    assert page.inner_text(".error") == "The lookahead is <i>few</i>; it must be auto or a number of at least 1."
    press(page, "import os", tokens=1)
    assert len(set(texts(page))) == 1
    nothing = "No speed-up: drafting doesn't pay for this text (nothing was proposed)"
    assert page.inner_text(".verdict").startswith(nothing)
    assert page.inner_text(".verdict").endswith("Both texts have the same 1 token.")


@needs_chromium
@pytest.mark.slow
def test_it_fits_a_narrow_window(page: Page, update_docs: bool, compare_app: ModuleType) -> None:
    prompt, drafters = (compare_app.QUESTION, "EAGLE-3 head") if update_docs else (compare_app.PROMPT, "draft model")
    press(page, prompt, f"lookup, then {drafters}", "auto" if update_docs else "4", tokens=160)
    texts(page)
    if update_docs:
        picture = Image.open(io.BytesIO(page.screenshot(full_page=True)))
        picture.quantize(64).save(ROOT / "docs" / "images" / "compare_app.png", optimize=True)
    fits_narrow_window(page)


def test_one_text_after_the_other(
    compare_app: ModuleType, load: Callable[..., ovspec.LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shown grows, and nothing is speculated before the plain text is whole; both get the same seed."""
    monkeypatch.setattr(compare_app, "REFRESH", 0)
    hurry(compare_app, monkeypatch)
    monkeypatch.setattr(compare_app, "iterate_turns", functools.partial(iterate_turns, 0.0))
    # Without a seed, some texts would end before they have 40 tokens.
    options: dict[str, Any] = compare_app.options_of(40, 1.0, 1.0, None, "", "") | {"ignore_eos": True}
    pages = list(compare_app.compare(load(draft="lookup,draft"), PROMPTS[0], False, options, 4))
    counts = [[side.count('class="token') for side in p.split("<section")[1:]] for p in pages]
    assert counts == sorted(counts)
    assert all(plain == counts[-1][0] for plain, speculative in counts if speculative)
    assert len(counts) > 40
    assert 'class="numbers"' in pages[-1]
    assert "Both texts have the same 40 tokens." in pages[-1]
    turns = [page for page in pages if "timed in turns" in page]
    assert len(turns) >= 4, "each way is timed several times, after both texts are whole"
    assert all('class="numbers"' not in page for page in pages[:-1])


@needs_chromium
@pytest.mark.slow
def test_a_user_of_a_chat_asks(page: Page, load: Callable[..., ovspec.LanguageModel]) -> None:
    expected = load(draft=True).generate([{"role": "user", "content": "Why?"}], max_tokens=30, lookahead=4)
    page.get_by_label("Send as a chat message").check()
    press(page, "Why?", tokens=30)
    assert texts(page) == [f"Why?\n\n{expected.text}"] * 2


def test_a_head_is_named(
    compare_app: ModuleType,
    pair: Path,
    cache_dir: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A random one, which proposes; what it would propose rightly has its name, too."""
    from distilling import made_head, without_draft

    hurry(compare_app, monkeypatch)
    folder = tmp_path / "headed"
    without_draft(pair, folder)
    shutil.copytree(made_head(tmp_path_factory) / "ir", folder / "draft")
    options: dict[str, Any] = compare_app.options_of(40, 0.0, 1.0, None, "", "") | {"ignore_eos": True}
    model = compare_app.loader(folder, tune=False, precision="f32", cache_dir=cache_dir)
    *_, last = compare_app.compare(model("CPU", "draft"), PROMPTS[0], False, options, 3)
    assert "Both texts have the same 40 tokens." in last
    assert re.search(r"<td>\d+ of [1-9]\d* ", last) and "draft model" not in last
    page = json.dumps(compare_app.build(folder, model, False).get_config_file(), default=str)
    assert "lookup, then EAGLE-3 head" in page and "draft model" not in page
    run = compare_app.Run([("a", "target"), ("b", "head")])
    shown = compare_app.results("", [run, run], ["", ""])
    assert "EAGLE-3 head</span> 1</li>" in shown and shown.count('class="token head" title="EAGLE-3 head">b<') == 2


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the real model could not be fetched")
def test_a_head_answers_with_lookup(compare_app: ModuleType, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thing that one sees of a real model."""
    hurry(compare_app, monkeypatch)
    options: dict[str, Any] = compare_app.options_of(40, 0.0, 1.0, None, "", "")
    lm = compare_app.loader(REAL, tune=False, cache_dir=cache_dir)("CPU", "lookup,draft")
    *_, last = compare_app.compare(lm, compare_app.QUESTION, True, options, 3)
    assert "Both texts have the same " in last
    assert last.count('class="token head"') > 10
    assert "EAGLE-3 head</span> " in last and "draft model" not in last


@pytest.mark.parametrize("value", ["0", "-1", "x", "", None, "1.5"])
def test_lookaheads_that_there_are_not(compare_app: ModuleType, value: str | None) -> None:
    with pytest.raises(ovspec.OvspecError, match="must be auto or a number"):
        compare_app.lookahead_of(value)
