"""Branches on the page: another version of a message or an answer, and nothing that was said is lost."""

from __future__ import annotations

import json

import pytest
from browser import answers, messages_of, say
from scripted_engine import Wait, always, delta, finished, stop

from penstock.contract.errors import Overloaded

pytestmark = pytest.mark.browser


def own(page):
    return page.get_by_role("article", name="You")


def says(served, *texts: str) -> None:
    """Let the next answers be these texts, in order."""
    left = list(texts)
    served.engine.script = lambda request: (delta(left.pop(0)), stop(), finished())


def talk(page, expect, *texts: str) -> None:
    for text in texts:
        before = answers(page).count()
        say(page, text)
        expect(answers(page).nth(before).locator(".stats")).to_be_visible()


def edit(page, expect, message, text: str) -> None:
    message.hover()
    message.get_by_label("Edit message").click()
    expect(message.get_by_role("textbox")).to_be_focused()
    message.get_by_role("textbox").fill(text)
    page.keyboard.press("Enter")


def shown(page) -> list[str]:
    return page.locator(".said, .answer").all_inner_texts()


@pytest.mark.deep
def test_an_answer_anew_is_another_version_and_the_first_is_kept(open_page, served, expect):
    says(served, "First", "Second", "Third")
    page = open_page()
    talk(page, expect, "Hi")
    expect(page.get_by_role("group", name="Version")).to_have_count(0)
    for count in (2, 3):
        page.get_by_label("Regenerate answer").click()
        expect(page.get_by_role("group", name=f"Version {count} of {count}")).to_be_visible()
    assert [messages_of(each) for each in served.engine.requests] == [[("user", "Hi")]] * 3
    assert shown(page) == ["Hi", "Third"]
    expect(page.get_by_label("Next version")).to_be_disabled()
    page.get_by_label("Previous version").click()
    expect(page.get_by_label("Previous version")).to_be_focused()
    expect(page.locator("#said")).to_have_text("Version 2 of 3")
    page.keyboard.press("Enter")
    expect(page.locator(".branch-count")).to_have_text("1 / 3")
    assert shown(page) == ["Hi", "First"]
    page.reload()
    expect(page.locator(".branch-count")).to_have_text("1 / 3")
    assert shown(page) == ["Hi", "First"]


def test_an_edited_message_begins_a_branch_and_each_branch_remembers_how_it_went_on(open_page, served, expect):
    says(served, "A1", "A2", "B1", "B2", "C")
    page = open_page()
    talk(page, expect, "a", "and a")
    edit(page, expect, own(page).first, "b")
    expect(answers(page)).to_have_count(1)
    expect(answers(page)).to_contain_text("B1")
    assert messages_of(served.request) == [("user", "b")]
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    talk(page, expect, "and b")
    assert shown(page) == ["b", "B1", "and b", "B2"]
    own(page).first.get_by_label("Previous version").click()
    assert shown(page) == ["a", "A1", "and a", "A2"]
    own(page).first.get_by_label("Next version").click()
    assert shown(page) == ["b", "B1", "and b", "B2"]
    own(page).first.get_by_label("Previous version").click()
    talk(page, expect, "more a")
    assert messages_of(served.request) == [
        ("user", "a"),
        ("assistant", "A1"),
        ("user", "and a"),
        ("assistant", "A2"),
        ("user", "more a"),
    ]


@pytest.mark.deep
def test_an_edit_can_be_called_off(open_page, served, expect):
    page = open_page()
    talk(page, expect, "Hi")
    own(page).hover()
    own(page).get_by_label("Edit message").click()
    page.keyboard.type(" and more")
    page.keyboard.press("Escape")
    expect(own(page).get_by_label("Edit message")).to_be_focused()
    assert shown(page) == ["Hi", "Hello"]


@pytest.mark.deep
def test_an_answer_that_came_to_nothing_is_tried_again_in_its_place(open_page, served, expect):
    served.engine.script = always(Overloaded("7 sequences are waiting already.", retry_after=3))
    page = open_page(expect_console=True)
    say(page, "Hi")
    expect(page.get_by_role("alert")).to_be_visible()
    served.engine.reset()
    page.get_by_label("Try again").click()
    expect(answers(page)).to_contain_text("Hello")
    expect(page.get_by_role("group", name="Version")).to_have_count(0)


@pytest.mark.deep
def test_one_may_look_at_another_version_while_an_answer_grows(open_page, served, expect):
    says(served, "First")
    page = open_page()
    talk(page, expect, "Hi")
    served.engine.script = always(delta("Sec"), Wait(1), delta("ond"), stop(), finished())
    page.get_by_label("Regenerate answer").click()
    expect(answers(page)).to_contain_text("Sec")
    edit_button = own(page).get_by_label("Edit message")
    own(page).hover()
    edit_button.click()
    page.keyboard.type("!")
    page.keyboard.press("Enter")
    expect(page.locator("#notice-text")).to_have_text("Wait for the answer, or stop it.")
    expect(own(page).get_by_role("textbox")).to_have_value("Hi!")  # what was written is still there
    page.keyboard.press("Escape")
    expect(page.get_by_role("group", name="Version 2 of 2")).to_be_visible()
    assert shown(page) == ["Hi", "Second"]


@pytest.mark.deep
def test_what_the_first_version_of_the_page_kept_is_still_there(open_page, served, expect):
    old = {
        "system": "Be brief.",
        "sampling": {"temperature": 0.5},
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "tool", "content": "no message of this page"},
            {"role": "assistant", "content": "Hello", "ending": "stop", "stats": {"tokens": 2, "ttft": 9.5, "rate": 3}},
            {"role": "user", "content": "More"},
            {"role": "assistant", "content": "Half", "running": True},
        ],
    }
    kept = {
        "penstock.conversations": json.dumps([{"id": "abc", "title": "Hi", "updated": 1}]),
        "penstock.conversation.abc": json.dumps(old),
    }
    script = f"for (const [key, text] of Object.entries({json.dumps(kept)})) localStorage[key] ??= text;"
    page = open_page(before=lambda page: page.add_init_script(script))
    page.get_by_role("button", name="Hi", exact=True).click()
    assert shown(page) == ["Hi", "Hello", "More", "Half"]
    expect(answers(page).last).to_contain_text("The connection ended before the answer did.")
    expect(answers(page).first.locator(".stats")).to_contain_text("2 tokens")
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    page.get_by_label("Try again").click()
    expect(page.get_by_role("group", name="Version 2 of 2")).to_be_visible()
    stored = json.loads(page.evaluate("localStorage['penstock.conversation.abc']"))
    assert stored["version"] == 2
    assert [message["parent"] for message in stored["messages"]] == [-1, 0, 1, 2, 2]
    assert dict(served.request.sampling.entries) == {"temperature": 0.5}


@pytest.mark.deep
def test_an_answer_is_kept_when_the_page_goes_away_in_its_midst(open_page, served, expect):
    served.engine.script = always(delta("Half an answer"), Wait())
    page = open_page()
    say(page, "Hi")
    expect(answers(page)).to_contain_text("Half an answer")
    page.reload()
    expect(answers(page)).to_contain_text("Half an answer")
    expect(answers(page)).to_contain_text("The connection ended before the answer did.")


@pytest.mark.deep
def test_where_nothing_is_kept_a_second_conversation_does_not_end_the_first(open_page, served, expect):
    refuse = (
        "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no', 'SecurityError'); } });"
    )
    page = open_page(before=lambda page: page.add_init_script(refuse))
    talk(page, expect, "one")
    page.get_by_role("button", name="New conversation").click()
    talk(page, expect, "two")
    page.get_by_role("button", name="one", exact=True).click()
    assert shown(page) == ["one", "Hello"]
