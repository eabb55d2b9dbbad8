"""The view of the prefix cache: what it holds, how much it saves, and what each answer took from it."""

from __future__ import annotations

import dataclasses

import pytest
from browser import say
from scripted_engine import HEALTHY, always, delta, finished, stop

pytestmark = pytest.mark.browser


def state(served, **counters: int) -> None:
    served.engine.state = dataclasses.replace(HEALTHY, **counters)


@pytest.mark.deep
def test_the_cache_shows_what_it_holds_and_how_much_was_found_in_it(open_page, served, expect):
    state(served, cached_blocks=12, hit_tokens=300, query_tokens=400)
    page = open_page()
    card = page.get_by_role("region", name="Prefix cache")
    expect(card.locator("#value-hits")).to_have_text("75 %")
    expect(card).to_contain_text("300 of 400 since the start")
    expect(card.locator("#hits-lately")).to_have_text("\u2013")  # no request since the page was opened
    shares = "['held', 'cached', 'empty'].map((name) => document.getElementById(`blocks-${name}`).textContent)"
    assert page.evaluate(shares) == ["10", "12", "18"]
    widths = page.locator("#bar-held, #bar-cached, #bar-empty").evaluate_all("all => all.map((e) => e.style.flexGrow)")
    assert widths == ["10", "12", "18"]
    state(served, cached_blocks=12, hit_tokens=310, query_tokens=500)
    expect(card.locator("#hits-lately")).to_have_text("10 %")
    expect(card.locator("#value-hits")).to_have_text("62 %")
    state(served, hit_tokens=0, query_tokens=8)  # another server: no recent hits are known
    expect(card.locator("#value-hits")).to_have_text("0 %")
    expect(card.locator("#hits-lately")).to_have_text("\u2013")


def test_each_answer_tells_what_it_took_from_the_cache(open_page, served, expect):
    page = open_page()
    expect(page.locator("#turns-view")).to_be_hidden()
    for prompt, cached in ((20, 0), (60, 48)):
        served.engine.script = always(delta("Yes"), stop(), finished(prompt=prompt, completion=20, cached=cached))
        say(page, "Hi")
        expect(page.locator(".turns li").last).to_have_attribute(
            "title", f"{prompt} prompt tokens, {cached} of them from the cache; 20 written"
        )
    expect(page.locator(".turn-share")).to_have_text(["0 %", "80 %"])
    parts = "all => all.map((i) => parseFloat(i.style.width))"
    assert page.locator(".turns i").evaluate_all(parts) == [0, 25, 25, 60, 15, 25]
    expect(page.locator(".stats").last).to_contain_text("48 cached")
    page.reload()
    expect(page.locator(".turn-share")).to_have_text(["0 %", "80 %"])
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#turns-view")).to_be_hidden()
