"""Log probabilities on the page: how sure each token was, and what else might have stood in its place."""

from __future__ import annotations

import math
import re

import pytest
from browser import PHONE, answers, say
from scripted_engine import always, finished, stop

from penstock.contract.events import ChoiceDelta, TokenPiece

pytestmark = pytest.mark.browser


def token(text: str | bytes, share: float, **others: float) -> ChoiceDelta:
    """A token with its probability, and the most likely tokens in its place, which may include it."""
    raw = text.encode() if isinstance(text, str) else text
    top = tuple(TokenPiece(at, name.encode(), math.log(p)) for at, (name, p) in enumerate(others.items()))
    return ChoiceDelta(0, raw.decode(errors="ignore"), (TokenPiece(7, raw, math.log(share), top),))


ANSWER = always(
    token("The", 0.9, The=0.9, A=0.06),
    token(" **sea**", 0.25, **{" lake": 0.5, " **sea**": 0.25}),
    token("\n", 0.5, **{"\n": 0.5, ".": 0.1}),
    token("x<b>", 0.001, y=0.7, z=0.2),
    stop(),
    finished(completion=4),
)


def ask(page, expect) -> None:
    page.get_by_label("Token probabilities").check()
    say(page, "Hi")
    expect(page.locator(".stats")).to_be_visible()


def tokens(page):
    return page.locator(".tokens .token")


def rows(page) -> list[list[str]]:
    cells = "all => all.map((tr) => [tr.cells[0], tr.cells[2]].map((td) => td.textContent))"
    return page.locator("#token-card tr").evaluate_all(cells)


def test_nothing_is_asked_of_the_engine_unless_the_switch_is_on(open_page, served, expect):
    page = open_page()
    say(page, "Hi")
    expect(page.locator(".stats")).to_be_visible()
    assert served.request.sampling.entries == ()
    expect(page.get_by_label("Show how sure each token was")).to_have_count(0)
    page.get_by_label("Token probabilities").check()
    say(page, "Hi")
    expect(page.locator(".stats")).to_have_count(2)
    assert dict(served.request.sampling.entries) == {"logprobs": 5}


@pytest.mark.deep
def test_each_token_tells_how_sure_it_was_and_what_else_it_might_have_been(open_page, served, expect):
    served.engine.script = ANSWER
    page = open_page()
    ask(page, expect)
    expect(tokens(page)).to_have_count(4)
    doubts = tokens(page).evaluate_all("all => all.map((e) => Number(e.style.getPropertyValue('--doubt')))")
    assert doubts == pytest.approx([0.1, 0.75, 0.5, 0.999], abs=1e-3)
    other = tokens(page).evaluate_all("all => all.map((e) => e.classList.contains('other'))")
    assert other == [False, True, False, True]
    expect(page.locator(".token-legend")).to_contain_text(f"perplexity {(0.9 * 0.25 * 0.5 * 0.001) ** -0.25:.2f}")
    card = page.locator("#token-card")
    expect(card).to_be_hidden()
    tokens(page).nth(1).hover()
    expect(card).to_be_visible()
    assert rows(page) == [["␣lake", "50.0 %"], ["␣**sea**", "25.0 %"]]
    expect(card.locator(".chosen th")).to_have_text("␣**sea**")
    tokens(page).nth(3).hover()
    expect(card.locator(".chosen th")).to_have_text("x<b>")
    assert rows(page) == [["y", "70.0 %"], ["z", "20.0 %"], ["x<b>", "0.10 %"]]
    expect(card).to_contain_text("not among the 2 likeliest")
    page.mouse.move(5, 5)
    expect(card).to_be_hidden()


@pytest.mark.deep
def test_tokens_are_walked_through_by_arrow_keys_with_one_stop_of_the_tab_key(open_page, served, expect):
    served.engine.script = ANSWER
    page = open_page()
    ask(page, expect)
    assert tokens(page).evaluate_all("all => all.map((e) => e.tabIndex)") == [0, -1, -1, -1]
    tokens(page).first.focus()
    for key, at in (("ArrowRight", 1), ("End", 3), ("ArrowRight", 3), ("ArrowLeft", 2), ("Home", 0)):
        page.keyboard.press(key)
        expect(tokens(page).nth(at)).to_be_focused()
    expect(page.locator("#token-card")).to_contain_text("90.0 %")
    page.keyboard.press("Escape")
    expect(page.locator("#token-card")).to_be_hidden()
    expect(page.get_by_role("button", name="⏎", exact=True)).to_have_count(1)  # an invisible character has a name


def test_an_answer_is_turned_between_text_and_tokens_and_both_stay(open_page, served, expect):
    served.engine.script = ANSWER
    page = open_page()
    ask(page, expect)
    button = page.get_by_label("Show how sure each token was")
    expect(button).to_have_attribute("aria-pressed", "true")
    button.click()
    expect(page.locator(".answer strong")).to_have_text("sea")
    expect(button).to_be_focused()
    expect(tokens(page)).to_have_count(0)
    page.keyboard.press("Enter")
    expect(tokens(page)).to_have_count(4)
    page.reload()
    expect(page.get_by_label("Token probabilities")).to_be_checked()
    expect(tokens(page)).to_have_count(4)
    page.get_by_label("Token probabilities").uncheck()
    expect(page.locator(".answer strong")).to_have_text("sea")
    button.click()
    expect(tokens(page)).to_have_count(4)


@pytest.mark.deep
def test_a_part_of_a_character_is_shown_as_its_bytes(open_page, served, expect):
    served.engine.script = always(
        token(b"\xf0\x9f", 0.5), token(b"\x8c\x8a", 0.5), token(" sea", 0.5), stop(), finished()
    )
    page = open_page()
    ask(page, expect)
    expect(tokens(page)).to_have_text(["\\xf0\\x9f", "\\x8c\\x8a", " sea"])


@pytest.mark.deep
def test_on_a_phone_a_tap_shows_the_card_within_the_window(open_page, served, expect):
    served.engine.script = ANSWER
    page = open_page(**PHONE)
    page.get_by_role("button", name="Engine and settings", exact=True).click()
    page.get_by_label("Token probabilities").check()
    page.keyboard.press("Escape")
    say(page, "Hi")
    expect(answers(page).locator(".stats")).to_be_visible()
    tokens(page).nth(1).tap()
    expect(page.locator("#token-card")).to_be_visible()
    box = page.locator("#token-card").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= PHONE["viewport"]["width"]
    assert box["y"] + box["height"] <= PHONE["viewport"]["height"]


@pytest.mark.deep
def test_probabilities_make_room_for_conversations_and_are_carried_in_files(open_page, served, expect):
    served.engine.script = always(*[token(" sea", 0.5, **{" sea": 0.5, " lake": 0.3})] * 60, stop(), finished())
    page = open_page()
    ask(page, expect)
    stored = "Object.keys(localStorage).filter((key) => key.startsWith('penstock.tokens.')).length"
    assert page.evaluate(stored) == 1
    with page.expect_download() as download:
        page.get_by_label("Export all conversations").click()
    page.get_by_role("button", name="New conversation").click()
    served.engine.reset()
    say(page, "Hi")
    expect(page.locator(".stats")).to_be_visible()
    page.evaluate("for (let size = 1e7; size >= 1; size /= 2) try { localStorage.x += 'x'.repeat(size); } catch {}")
    say(page, "More " * 20)
    expect(page.locator(".stats")).to_have_count(2)
    expect(page.locator(".conversation")).to_have_count(2)  # neither was dropped
    page.locator(".conversation").last.click()
    expect(page.locator(".answer")).to_have_text("sea " * 59 + "sea")
    expect(tokens(page)).to_have_count(0)
    page.evaluate("delete localStorage.x")
    page.locator("#import-file").set_input_files(download.value.path())
    expect(page.locator("#notice-text")).to_have_text(re.compile("^Conversations imported: 1"))
    expect(tokens(page)).to_have_count(60)
