"""The list of conversations on the page: found, renamed, and carried as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browser import answers, say
from scripted_engine import delta, finished, stop

pytestmark = pytest.mark.browser

NOTHING = {"format": "penstock-conversations", "conversations": []}
SOUND = {
    "id": "abc",
    "version": 2,
    "name": "From afar",
    "leaf": 1,
    "messages": [
        {"role": "user", "content": "Hi", "parent": -1},
        {"role": "assistant", "content": "Ho", "parent": 0, "stats": {"tokens": 2}},
    ],
}


def talks(page, served, expect, **said: str) -> None:
    """Hold one conversation for each, of one question and its answer."""
    for question, answer in said.items():
        served.engine.script = lambda request, answer=answer: (delta(answer), stop(), finished())
        page.get_by_role("button", name="New conversation").click()
        say(page, question)
        expect(page.locator(".stats")).to_be_visible()


def titles(page):
    return page.locator(".conversation-title")


def choose(page, conversation: str, item: str) -> None:
    page.get_by_label(f"More about {conversation}").click()
    page.get_by_role("menuitem", name=item).click()


def exported(page, click) -> dict:
    with page.expect_download() as download:
        click()
    return json.loads(Path(download.value.path()).read_text()) | {"file": download.value.suggested_filename}


def give(page, content: object, name: str = "some.json") -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    page.locator("#import-file").set_input_files(
        [{"name": name, "mimeType": "application/json", "buffer": text.encode()}]
    )


def stored(page) -> str:
    return page.evaluate("JSON.stringify(Object.entries(localStorage).sort())")


def test_a_conversation_is_renamed_by_menu_by_key_and_not_by_escape(open_page, served, expect):
    page = open_page()
    talks(page, served, expect, one="A", two="B")
    choose(page, "one", "Rename")
    field = page.get_by_label("Name of the conversation")
    expect(field).to_be_focused()
    expect(field).to_have_value("one")
    field.fill("Rivers <b>")
    page.keyboard.press("Enter")
    expect(titles(page)).to_have_text(["Rivers <b>", "two"])
    expect(page.get_by_role("button", name="Rivers <b>", exact=True)).to_be_focused()
    page.keyboard.press("F2")
    field.fill("Lakes")
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    expect(page).to_have_title("Rivers <b> · Penstock")
    page.reload()
    expect(titles(page)).to_have_text(["Rivers <b>", "two"])
    choose(page, "Rivers <b>", "Rename")
    field.fill("")
    page.keyboard.press("Enter")  # without a name, it is named after its beginning again
    expect(titles(page)).to_have_text(["one", "two"])


def test_the_menu_is_used_by_keyboard_and_gives_the_focus_back(open_page, served, expect):
    page = open_page()
    talks(page, served, expect, one="A")
    more = page.get_by_label("More about one")
    more.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("menuitem", name="Rename")).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("menuitem", name="Delete")).to_be_focused()
    expect(more).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Escape")
    expect(page.get_by_role("menu")).to_have_count(0)
    expect(more).to_be_focused()


def test_search_finds_titles_and_what_was_said_and_shows_where(open_page, served, expect):
    page = open_page()
    talks(
        page, served, expect, rivers="The Danube is long.", lakes="Lake Baikal is deep, <i>very</i> deep.", hills="Low."
    )
    search = page.get_by_label("Search conversations")
    search.fill("BAIKAL")
    expect(titles(page)).to_have_text(["lakes"])
    expect(page.locator(".excerpt")).to_have_text("Lake Baikal is deep, <i>very</i> deep.")
    expect(page.locator("mark")).to_have_text("Baikal")
    expect(page.locator("#search-status")).to_have_text("1 conversation found")
    search.fill("rive")
    expect(titles(page)).to_have_text(["rivers"])
    search.fill("nowhere")
    expect(titles(page)).to_have_count(0)
    expect(page.locator("#search-status")).to_have_text("No conversations found")
    page.keyboard.press("Escape")
    expect(titles(page)).to_have_count(3)
    expect(search).to_have_value("")


def test_what_was_exported_is_imported_in_another_browser_with_all_its_branches(open_page, served, expect):
    page = open_page()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("top_k", exact=True).fill("5")
    talks(page, served, expect, one="A", two="B")
    page.get_by_label("Regenerate answer").click()
    expect(page.locator(".branch-count")).to_have_text("2 / 2")
    one = exported(page, lambda: choose(page, "two", "Export"))
    assert (one["file"], len(one["conversations"])) == ("two.json", 1)
    file = exported(page, page.get_by_label("Export all conversations").click)
    assert file["file"] == "penstock-conversations.json"
    assert [len(each["messages"]) for each in file.pop("conversations")] == [3, 2]
    other = open_page()
    expect(other.get_by_label("Export all conversations")).to_be_disabled()
    give(other, one)
    expect(titles(other)).to_have_text(["two"])
    expect(other.locator(".branch-count")).to_have_text("2 / 2")
    expect(other.get_by_label("System prompt")).to_have_value("Be brief.")
    expect(other.get_by_label("top_k", exact=True)).to_have_value("5")
    give(other, one)
    expect(other.locator("#notice-text")).to_have_text("Conversations imported: 0. Here already: 1.")
    expect(titles(other)).to_have_count(1)
    say(other, "More")
    expect(answers(other)).to_have_count(2)
    expect(answers(other).last.locator(".stats")).to_be_visible()
    give(other, one)  # now it differs from the one on this page: both are kept
    expect(titles(other)).to_have_text(["two", "two"])


@pytest.mark.deep
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "it is no JSON file"),
        ("[]", "it is no file that this page has exported"),
        ({"messages": []}, "it is no file that this page has exported"),
        (NOTHING | {"conversations": [SOUND, 5]}, "of conversation 2, it is no object"),
        (NOTHING | {"conversations": [SOUND | {"version": 9}]}, "its version is 9"),
        (NOTHING | {"conversations": [SOUND | {"leaf": 7}]}, "its leaf is none of its messages"),
        (NOTHING | {"conversations": [SOUND | {"messages": [{"role": "x"}]}]}, "its message 1 is neither"),
        (
            NOTHING | {"conversations": [SOUND | {"messages": [{"role": "user", "content": "a", "parent": 0}]}]},
            "its message 1 follows no earlier message",
        ),
        (NOTHING | {"conversations": [SOUND | {"id": f"n{at}"} for at in range(201)]}, "at most 200 are kept"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_file_is_refused_in_words_and_changes_nothing(open_page, served, expect, content, words):
    page = open_page()
    talks(page, served, expect, one="A")
    before = stored(page)
    give(page, content, "bad.json")
    expect(page.locator("#notice-text")).to_contain_text("bad.json was not imported: ")
    expect(page.locator("#notice-text")).to_contain_text(words)
    assert stored(page) == before
    expect(titles(page)).to_have_text(["one"])


@pytest.mark.deep
def test_a_file_for_which_there_is_no_room_displaces_nothing(open_page, served, expect):
    page = open_page()
    talks(page, served, expect, one="A")
    before = stored(page)
    many = [SOUND | {"id": f"n{at}", "name": "x" * 1_500_000} for at in range(5)]
    give(page, NOTHING | {"conversations": many}, "large.json")
    expect(page.locator("#notice-text")).to_have_text("large.json was not imported: this browser has no room for it.")
    assert stored(page) == before


@pytest.mark.deep
def test_values_of_a_file_that_no_control_can_show_do_no_harm(open_page, expect):
    sampling = {"stop": 5, "stop_token_ids": "x", "temperature": {}, "messages": [], "logit_bias": 3}
    page = open_page()
    give(page, NOTHING | {"conversations": [SOUND | {"sampling": sampling}]})
    expect(titles(page)).to_have_text(["From afar"])
    expect(answers(page)).to_contain_text("Ho")
