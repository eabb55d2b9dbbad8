"""The page for everybody: names for screen readers, contrast, and targets large enough for a thumb at 390 pixels."""

from __future__ import annotations

import re

import pytest
from browser import PHONE, answers, say
from scripted_engine import always, delta, finished, stop

pytestmark = pytest.mark.browser

WIDE_TABLE = "| " + " | ".join(f"column {at}" for at in range(12)) + " |\n" + "|-" * 12 + "|\n" + "| value " * 12 + "|"


def talk(page, served, expect) -> None:
    """Two versions of an answer, the second with tokens to look at."""
    served.engine.script = always(delta(WIDE_TABLE), stop(), finished(cached=3))
    say(page, "Hi")
    expect(page.locator(".stats")).to_be_visible()
    page.get_by_label("Regenerate answer").click()
    expect(page.locator(".branch-count")).to_have_text("2 / 2")


@pytest.mark.deep
def test_everything_new_that_can_be_operated_has_a_name(open_page, served, expect):
    page = open_page()
    page.get_by_label("Token probabilities").check()
    page.get_by_label("System prompt").fill("Be brief.")
    talk(page, served, expect)
    page.get_by_label("Save as a preset").click()
    page.get_by_label("More about Hi").click()
    tree = page.locator("body").aria_snapshot()
    operable = "button|textbox|searchbox|combobox|slider|switch|menuitem|link|article|region|group"
    nameless = re.findall(rf"^\s*- ((?:{operable})(?::.*| \[.*|))$", tree, re.MULTILINE)
    assert nameless == ["group: More parameters"]  # a summary names it
    for name in (
        'menuitem "Rename"',
        'searchbox "Search conversations"',
        'combobox "Preset"',
        'group "Version 2 of 2"',
    ):
        assert name in tree


@pytest.mark.deep
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_token_that_was_most_unsure_can_still_be_read(open_page, served, expect, theme):
    page = open_page(color_scheme=theme)
    page.get_by_label("Token probabilities").check()
    served.engine.script = always(delta("sea", logprob=-20.0), stop(), finished())
    say(page, "Hi")
    expect(page.locator(".tokens .token")).to_have_count(1)
    contrast = page.locator(".tokens .token").evaluate(
        """(node) => {
          const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
          const style = getComputedStyle(node);
          const paint = (...colours) => {
            for (const colour of colours) {
              context.fillStyle = colour;
              context.fillRect(0, 0, 1, 1);
            }
            const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((v) => linear(v / 255));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const ground = getComputedStyle(document.querySelector(".middle")).backgroundColor;
          const [high, low] = [paint(ground, style.backgroundColor), paint(style.color)].sort((a, b) => b - a);
          return (high + 0.05) / (low + 0.05);
        }"""
    )
    assert contrast >= 4.5  # WCAG 2.2, success criterion 1.4.3
    assert contrast < 16  # it has a background of its own


def test_at_390_pixels_nothing_is_wider_than_the_window_and_buttons_fit_a_thumb(open_page, served, expect):
    page = open_page(**PHONE)
    talk(page, served, expect)
    fits = "document.documentElement.scrollWidth <= innerWidth"
    right = "all => Math.max(0, ...all.map((e) => e.getBoundingClientRect().right))"
    small = """all => all.map((e) => [e.id || e.ariaLabel, e.getBoundingClientRect()])
      .filter(([, r]) => r.width && Math.min(r.width, r.height) < 36).map(([name]) => name)"""
    assert page.evaluate(fits)
    assert answers(page).locator(".scrolls").evaluate_all(right) <= 390
    assert page.locator(".middle button").evaluate_all(small) == []
    for opener, drawer in (("Conversations", "#conversations"), ("Engine and settings", "#panel")):
        page.get_by_role("button", name=opener, exact=True).click()
        page.wait_for_timeout(300)  # the drawer slides in
        assert page.evaluate(fits)
        assert page.locator(f"{drawer} :is(button, input, select, textarea, .meter)").evaluate_all(right) <= 390
        assert page.locator(f"{drawer} button").evaluate_all(small) == []
        page.keyboard.press("Escape")
        page.wait_for_timeout(300)
    page.get_by_role("button", name="Conversations", exact=True).click()
    page.get_by_label("More about Hi").tap()
    box = page.get_by_role("menu").bounding_box()
    assert box["x"] + box["width"] <= 390
    page.get_by_role("menuitem", name="Rename").tap()
    page.keyboard.type("Rivers")
    page.keyboard.press("Enter")
    expect(page.locator(".conversation-title")).to_have_text("Rivers")


@pytest.mark.deep
def test_escape_closes_one_thing_at_a_time(open_page, served, expect):
    """First the menu, then the drawer that it lies on."""
    page = open_page(viewport={"width": 900, "height": 700})
    talk(page, served, expect)
    page.get_by_role("button", name="Conversations", exact=True).click()
    page.get_by_label("More about Hi").click()
    expect(page.get_by_role("menu")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("menu")).to_have_count(0)
    expect(page.locator("#conversations.is-open")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.locator("#conversations.is-open")).to_have_count(0)
