"""Settings of a conversation on the page: presets, and which model answers."""

from __future__ import annotations

import json
import re

import pytest
from browser import answers, messages_of, say
from scripted_engine import HEALTHY

from penstock.server.page.engine_events import snapshot

pytestmark = pytest.mark.browser

MODELS = {"object": "list", "data": [{"id": "acme/tiny-1", "max_model_len": 64}, {"id": "acme/large-2"}]}


def preset(page):
    return page.get_by_label("Preset", exact=True)


def test_a_preset_brings_its_system_prompt_and_sampling_to_another_conversation(open_page, served, expect):
    page = open_page()
    expect(preset(page)).to_have_value("Server's defaults")
    expect(page.get_by_label("Save as a preset")).to_be_hidden()
    page.get_by_label("System prompt").fill("Answer in rhyme.")
    page.get_by_label("temperature", exact=True).fill("0.5")
    expect(preset(page).locator("option:checked")).to_have_text("Custom")
    page.get_by_label("Save as a preset").click()
    page.get_by_label("Name of the preset").fill("Poet")
    page.keyboard.press("Enter")
    expect(preset(page)).to_have_value("Poet")
    expect(preset(page)).to_be_focused()
    preset(page).select_option("Always the likeliest")
    expect(page.get_by_label("System prompt")).to_have_value("")
    expect(page.get_by_label("temperature", exact=True)).to_have_value("0")
    page.reload()
    preset(page).select_option("Poet")
    say(page, "Hi")
    expect(page.locator(".stats")).to_be_visible()
    assert messages_of(served.request)[0] == ("system", "Answer in rhyme.")
    assert dict(served.request.sampling.entries) == {"temperature": 0.5}


@pytest.mark.deep
def test_each_conversation_keeps_its_preset_and_changing_it_leaves_the_preset_alone(open_page, served, expect):
    page = open_page()
    preset(page).select_option("Always the likeliest")
    say(page, "one")
    expect(page.locator(".stats")).to_be_visible()
    page.get_by_role("button", name="New conversation").click()
    preset(page).select_option("Server's defaults")
    say(page, "two")
    expect(page.locator(".stats")).to_be_visible()
    page.get_by_role("button", name="one", exact=True).click()
    expect(preset(page)).to_have_value("Always the likeliest")
    page.get_by_label("top_k", exact=True).fill("3")
    expect(preset(page).locator("option:checked")).to_have_text("Custom")
    preset(page).select_option("Always the likeliest")
    expect(page.get_by_label("top_k", exact=True)).to_have_value("")


@pytest.mark.deep
def test_a_preset_can_be_deleted_and_those_of_the_page_cannot(open_page, expect):
    page = open_page()
    expect(page.get_by_label("Delete this preset")).to_be_hidden()
    page.get_by_label("System prompt").fill("x")
    page.get_by_label("Save as a preset").click()
    page.get_by_label("Name of the preset").fill("Server's defaults")
    page.keyboard.press("Enter")
    expect(preset(page)).to_have_value("Server's defaults (own)")
    page.get_by_label("Delete this preset").click()
    expect(preset(page).locator("option")).to_have_text(["Custom", "Server's defaults", "Always the likeliest"])
    page.get_by_label("Save as a preset").click()
    page.keyboard.press("Escape")
    expect(page.get_by_label("Name of the preset")).to_be_hidden()
    expect(page.get_by_label("Save as a preset")).to_be_focused()


@pytest.mark.deep
def test_where_several_models_are_served_a_conversation_chooses_one(open_page, expect):
    asked: list[str] = []

    def intercept(page) -> None:
        page.route("**/v1/models", lambda route: route.fulfill(json=MODELS))
        page.route("**/v1/chat/completions", answer)

    def answer(route) -> None:
        asked.append(route.request.post_data_json["model"])
        chunk = {"choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": "stop"}]}
        chunk["usage"] = {"prompt_tokens": 3, "completion_tokens": 1}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    page = open_page(before=intercept)
    choice = page.get_by_label("Model", exact=True)
    expect(choice).to_have_value("acme/tiny-1")
    expect(page.locator("#welcome-model")).to_have_text("acme/tiny-1 · a context of 64 tokens")
    say(page, "one")
    expect(answers(page)).to_contain_text("Hello")
    page.get_by_role("button", name="New conversation").click()
    choice.select_option("acme/large-2")
    say(page, "two")
    expect(answers(page)).to_contain_text("Hello")
    page.reload()
    expect(choice).to_have_value("acme/large-2")
    page.get_by_role("button", name="one", exact=True).click()
    expect(choice).to_have_value("acme/tiny-1")
    assert asked == ["acme/tiny-1", "acme/large-2"]


@pytest.mark.deep
def test_the_engine_that_is_shown_is_the_one_of_the_chosen_model(open_page, expect):
    def intercept(page) -> None:
        page.route("**/v1/models", lambda route: route.fulfill(json=MODELS))
        page.route(re.compile("/engine/events"), tell)

    def tell(route) -> None:
        event = snapshot(HEALTHY) | {"state": "loading" if "large-2" in route.request.url else "loaded"}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(event)}\n\n")

    page = open_page(before=intercept)
    state = page.locator("#engine-state")
    expect(state).to_have_text("Ready" if HEALTHY.running == 0 else "Working")
    page.get_by_label("Model", exact=True).select_option("acme/large-2")
    expect(state).to_have_text("Loading")
    page.get_by_label("Model", exact=True).select_option("acme/tiny-1")
    expect(state).not_to_have_text("Loading")


@pytest.mark.deep
def test_where_one_model_is_served_there_is_nothing_to_choose(open_page, expect):
    page = open_page()
    expect(page.get_by_role("heading", name="acme/tiny-1", exact=True)).to_be_visible()
    expect(page.get_by_label("Model", exact=True)).to_be_hidden()


@pytest.mark.deep
def test_who_asks_before_the_models_are_known_is_answered_by_the_one_that_is_served(open_page, expect):
    page = open_page(before=lambda page: page.route("**/v1/models", lambda route: None))  # the list never comes
    say(page, "Hi")
    expect(answers(page)).to_contain_text("Hello")
