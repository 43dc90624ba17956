"""What the page shows of an answer's inside, in a browser: tokens, speed, comparisons, verification, the server."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from browsers import OpenTab, Tab, needs_chromium
from conftest import ROOT
from playwright.sync_api import expect

pytestmark = [needs_chromium, pytest.mark.slow]
QUESTION = (ROOT / "demos" / "correct.txt").read_text(encoding="utf-8")


@pytest.fixture(params=["server", "real_server"])
def tab(request: pytest.FixtureRequest, open_tab: OpenTab) -> Tab:
    """A tab in which a question is answered that repeats itself, for lookup."""
    tab = open_tab(request.getfixturevalue(request.param).url)
    tab.set(temperature="0", max_tokens="40")
    tab.answer(QUESTION)
    return tab


def sources_of(tab: Tab, **options: Any) -> list[dict[str, Any]]:
    """Return the tokens of the answer as the server gives them."""
    body = {"messages": [{"role": "user", "content": QUESTION.strip()}], "temperature": 0, "max_tokens": 40, **options}
    return tab.post("/v1/chat/completions", {**body, "return_token_sources": True})["choices"][0]["token_sources"]


def shown_sources(tab: Tab, place: str = ".message.assistant") -> list[str]:
    names = tab.page.locator(f"{place} .tokens .token").evaluate_all("tokens => tokens.map(({className}) => className)")
    return [re.search(r"from-(\w+)", name)[1] for name in names]  # type: ignore[index]


def test_tokens_by_proposer(tab: Tab) -> None:
    """Each token, with its source and its text; the colours and lines of sources differ."""
    expected = sources_of(tab)
    tab.press("Inside")
    texts = tab.last.locator(".tokens .token").all_text_contents()
    assert texts == [token["text"] or "·" for token in expected]
    shown = Counter(shown_sources(tab))
    assert shown == Counter(token["source"] for token in expected) and len(shown) > 1
    legend = dict(line.rsplit(" ", 1) for line in tab.last.locator(".legend li").all_inner_texts())
    assert sorted(map(int, legend.values())) == sorted(shown.values())
    colours = {
        tab.last.locator(f".tokens .from-{source}").first.evaluate(
            "token => [getComputedStyle(token).backgroundColor, getComputedStyle(token).borderBottomStyle].join()"
        )
        for source in shown
    }
    assert len(colours) == len(shown)
    saved = tab.last.locator(".saved").inner_text()
    assert re.match(rf"\d+ of {len(expected)} tokens cost no inference of their own; [\d.]+ tokens a round", saved)
    expect(tab.last.locator(".plot svg polyline")).to_have_count(1)
    tab.page.reload()
    tab.page.locator("#chats .chat").first.click()
    expect(tab.last.locator(".actions")).to_be_visible()
    tab.press("Inside")
    assert Counter(shown_sources(tab)) == shown  # it is kept


def test_a_tokens_probability(tab: Tab) -> None:
    """Its id, probability and alternatives, equal to those of a request that asks for them."""
    body = {"messages": [{"role": "user", "content": QUESTION.strip()}], "temperature": 0, "max_tokens": 40}
    reply = tab.post(
        "/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 5, "return_token_sources": True}
    )
    tokens = reply["choices"][0]["token_sources"]
    place = next(index for index, token in enumerate(tokens) if index > 3 and token["text"].strip())
    logprobs = reply["choices"][0]["logprobs"]["content"][place]
    tab.press("Inside")
    tab.last.locator(".tokens .token").nth(place).hover()
    details = tab.page.locator("#token-details")
    expect(details).to_contain_text("the most likely here")
    text = details.inner_text()
    assert f"id {reply['choices'][0]['token_sources'][place]['id']}," in text
    share = 100 * 2.718281828459045 ** logprobs["logprob"]
    shown = re.search(r"Probability ([\d.e+-]+) %", text)
    assert shown and float(shown[1]) == pytest.approx(share, rel=0.05, abs=0.6)
    alternatives = details.locator("li code").all_inner_texts()
    assert [json.loads(each) for each in alternatives][:2] == [each["token"] for each in logprobs["top_logprobs"]][:2]
    tab.page.mouse.move(5, 5)
    expect(details).to_be_hidden()


def test_while_it_grows(server: Any, open_tab: OpenTab) -> None:
    """With Inside open, tokens, numbers and the plot grow with the answer."""
    tab = open_tab(server.url)
    tab.set(temperature="0", max_tokens="6", ignore_eos=True)
    tab.answer(QUESTION)
    tab.press("Inside")
    tab.set(max_tokens="700")
    tab.ask("Once more")
    counts = list[int]()
    while tab.page.locator("#stop").is_visible() or not counts:
        counts.append(tab.last.locator(".tokens .token").count())
        tab.page.wait_for_timeout(100)
    assert counts == sorted(counts) and len(set(counts)) > 3
    assert tab.last.locator(".tokens .token").count() == 700
    assert "tokens/s" in tab.last.locator(".facts").inner_text()


def test_the_drafts_choice(tab: Tab) -> None:
    """Without a draft nothing is proposed, and the text stays the same."""
    tab.set(draft="none")
    tab.press("Regenerate")
    tab.wait()
    tab.press("Inside")
    assert {*shown_sources(tab)} == {"target"}
    assert "proposed" not in tab.last.locator(".facts").inner_text()
    texts = tab.last.locator(".tokens .token").all_text_contents()
    assert texts == [token["text"] or "·" for token in sources_of(tab)]


def test_a_comparison(tab: Tab) -> None:
    """Both texts with the clock, side by side; then the speed-up, which stays with the answer."""
    tab.press("Compare")
    dialog = tab.page.locator("#compare")
    expect(dialog.locator(".verdict")).to_contain_text("oth texts are identical", ignore_case=True)
    expect(dialog.locator(".verdict")).to_contain_text("speed-up", ignore_case=True)
    plain, speculative = (dialog.locator(f"section[aria-label={name}]") for name in ("Plain", "Speculative"))
    assert plain.locator(".tokens").inner_text() == speculative.locator(".tokens").inner_text() != ""
    assert plain.locator(".token:not(.from-target)").count() == 0 < speculative.locator(".token.from-lookup").count()
    assert all(
        re.match(r"[\d.]+ tokens/s, median turn", side.locator(".clock").inner_text()) for side in (plain, speculative)
    )
    speculative.locator(".token").first.click()
    expect(tab.page.locator("#token-details")).to_be_hidden()
    assert dialog.locator("[tabindex], .token.current").count() == 0
    verdict = dialog.locator(".verdict").inner_text()
    tab.page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    if speedup := re.match(r"(?:Speed-up|No clear speed-up:) ([\d.]+) \((?!.*noise)", verdict):
        expect(tab.last.locator(".fact-speedup")).to_have_text(f"speed-up {speedup[1]}")


def test_a_comparison_that_is_closed_ends(tab: Tab) -> None:
    tab.set(max_tokens="1000", ignore_eos=True)
    tab.press("Compare")
    expect(tab.page.locator("#compare .token").first).to_be_visible()
    tab.page.keyboard.press("Escape")
    expect(tab.page.locator("#compare")).to_be_hidden()
    tab.set(max_tokens="4")
    tab.answer("next")


def test_verification(tab: Tab) -> None:
    """Also of an answer of several parts; what was edited can't be verified."""
    tab.press("Verify")
    verdict = tab.last.locator(".verdict.good")
    expect(verdict).to_have_text(re.compile(r"Verified: each of the \d+ tokens is the model's own choice\."))
    if tab.last.get_by_role("button", name="Continue").count():
        tab.press("Continue")
        tab.wait()
        tab.press("Verify")
        expect(verdict).to_contain_text("Verified: each of the")
    tab.press("Edit")
    tab.last.locator("textarea").fill("something else")
    tab.last.get_by_role("button", name="Save as a branch").click()
    tab.press("Verify")
    expect(tab.last.locator(".verdict.bad")).to_contain_text("Nothing is known of how this text came about")


def test_a_wrong_token_is_found(server: Any, open_tab: OpenTab) -> None:
    """Of an answer that was changed in the browser's storage."""
    tab = open_tab(server.url)
    tab.set(temperature="0", max_tokens="20")
    tab.answer(QUESTION)
    tab.stored(
        """const database = await new Promise((done) => {
            const request = indexedDB.open("ovspec", 1); request.onsuccess = () => done(request.result); });
        const store = database.transaction("details", "readwrite").objectStore("details");
        const [details] = await new Promise((done) => {
            const request = store.getAll(); request.onsuccess = () => done(request.result); });
        details.parts[0].record.token_ids[3] += 1;
        await new Promise((done) => { store.put(details).onsuccess = done; });"""
    )
    tab.press("Verify")
    expect(tab.last.locator(".verdict.bad")).to_contain_text("Not verified: token 4 of ")


def test_the_servers_state(tab: Tab) -> None:
    """What the metrics say, and plots of them."""
    tab.page.click("#show-server")
    state = tab.page.locator("#server-state")
    expect(state).to_contain_text("Kept of ended texts")
    expect(state.locator("svg")).to_have_count(4)
    facts = dict(zip(state.locator("dt").all_inner_texts(), state.locator("dd").all_inner_texts(), strict=True))
    assert facts["Arithmetic"] == "exact" and "lookup" in facts["Drafters"] and facts["Device"].startswith("CPU")
    assert facts["Model"] in tab.page.title()
    assert facts["Running texts"] == "0" and int(facts["Tokens generated"].replace(",", "")) > 0
    accepted, proposed = (int(each.replace(",", "")) for each in facts["Accepted of lookup"].split(" of "))
    assert 0 < accepted <= proposed
    tab.set(max_tokens="600", ignore_eos=True)
    tab.page.click("#show-server")
    tab.ask("On and on")
    expect(state.get_by_label(re.compile("Tokens generated a second, at most [1-9]"))).to_be_visible()
    if "smollm2" in tab.page.title():  # the other model has answered before it is looked at
        expect(state.locator("dt:text-is('Running texts') + dd").first).to_have_text("1")
