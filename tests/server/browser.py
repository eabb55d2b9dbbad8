"""What tests of the page use: a headless Chromium, a check for console messages, and helpers that act like a person.

A test that uses these is marked `browser`. It runs wherever Chromium (the system's, or the one that PENSTOCK_CHROMIUM
names) and the extra page-test are installed. Elsewhere it is skipped, and the reason says what is missing; under
`make test-page` (PENSTOCK_PAGE_TESTS=required) it fails instead.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator

import pytest

from penstock.server.page import engine_events

SETTLE = 10_000  # milliseconds that an expectation may take on a busy machine
DESKTOP = {"width": 1360, "height": 860}
PHONE = {"viewport": {"width": 390, "height": 760}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
"""It opens our page only, and asks no other host for anything."""


def missing() -> str:
    """What a test of the page needs and is missing here; "" if nothing."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return "" if _path() else "there is no Chromium on the PATH or in PENSTOCK_CHROMIUM"


def _path() -> str | None:
    return os.environ.get("PENSTOCK_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    lacking = missing()
    if lacking and os.environ.get("PENSTOCK_PAGE_TESTS") == "required":
        pytest.fail(f"The page cannot be tested: {lacking}.")
    if lacking:
        pytest.skip(f"The page is not tested: {lacking}. Install Chromium and run `make test-page`.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_path(), args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium, served, monkeypatch):
    """Opens the page in a fresh browser context; at the end, the console must have been silent."""
    monkeypatch.setattr(engine_events, "PERIOD_SECONDS", 0.05)
    contexts, complaints = [], []

    def open_one(path: str = "/", *, expect_console: bool = False, before=None, **options):
        context = chromium.new_context(**({"viewport": DESKTOP} | options))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(SETTLE)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        if not expect_console:
            page.on("console", lambda message: complaints.append(message.text))
        if before:
            before(page)
        page.goto(served.url + path)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert complaints == [], complaints


@pytest.fixture
def expect(chromium):
    from playwright.sync_api import expect

    expect.set_options(timeout=SETTLE)
    return expect


def say(page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page):
    return page.get_by_role("article", name="Answer")


def messages_of(request) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.prompt.messages]
