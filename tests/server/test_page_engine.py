"""The page's view of the engine's inside: steps, an answer's time, cached prefixes, tenants' shares."""

from __future__ import annotations

import dataclasses
import time

import pytest
from browser import PHONE, answers, say
from scripted_engine import HEALTHY, Wait, always, delta, stop

from penstock.contract.engine_views import OwnPart, PrefixNode, PrefixTree, StepStall, StepView
from penstock.contract.events import RequestFinished, Usage
from penstock.contract.measurements import LatencyParts, Timings
from penstock.contract.plan import StallReason
from penstock.server.page import engine_views

pytestmark = pytest.mark.browser


@pytest.fixture(autouse=True)
def _always_a_new_tree(monkeypatch):
    monkeypatch.setattr(engine_views, "TREE_SECONDS", 0.0)


LOOKED = 300  # milliseconds, in which the page hears from the engine several times


def step(number: int, **fields) -> StepView:
    known = {"decode": 0.010, "prompts": 0.0, "drafting": 0.0, "restored": 0.0, "engine": 0.001, "foreseen": 0.009}
    known |= {"decoding": 3, "drafted": 1, "chunk": 0, "read": 0, "waiting": 0, "stall": None}
    return StepView(**{"step": number, "at": number / 100, **known, **fields})


def computed(served, *steps: StepView) -> None:
    """Let the engine have computed these steps too."""
    served.engine.steps += steps
    served.engine.state = dataclasses.replace(HEALTHY, steps=served.engine.steps[-1].step + 1)


def drawn(page, kind: str, chart: str = "#steps-chart") -> int:
    """How many bars or lines of a kind are drawn."""
    path = page.locator(f"{chart} .lane-{kind}").get_attribute("d") or ""
    return path.count("M")


def chart_of(page, name: str):
    return page.get_by_role("slider", name=name)


def test_steps_are_drawn_by_what_took_them_with_what_was_expected_and_why_the_queue_stood(open_page, served, expect):
    stalled = step(2, waiting=4, stall=StepStall(StallReason.NO_BLOCKS, 5, 2), foreseen=0.0)
    computed(served, step(1), stalled, step(3, prompts=0.03, chunk=64, foreseen=0.05))
    page = open_page()
    expect(page.locator("#steps-chart .lane-note")).to_have_text("3 steps: median 10 ms, forecast off by 25 %.")
    kinds = ("decode", "guesses", "prompts", "engine", "forecast", "stalls")
    assert [drawn(page, kind) for kind in kinds] == [3, 3, 1, 3, 2, 1]
    expect(page.locator("#steps-chart .legend")).to_have_text(
        "decodeguessespromptsbetween stepsforecastqueue stands still"
    )
    chart = chart_of(page, "Latest steps")
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * (1 - 1.5 / 72), box["y"] + 40)
    told = "Step 2: 10 ms. 3 decode, 1 guessed. 4 waiting: no KV blocks are free (5 needed, 2 there)."
    expect(page.locator("#steps-chart .lane-note")).to_have_text(told)
    expect(chart).to_have_attribute("aria-valuetext", told)
    page.mouse.move(0, 0)
    expect(page.locator("#steps-chart .lane-note")).to_contain_text("3 steps")


def test_steps_can_be_walked_through_by_keyboard(open_page, served, expect):
    computed(served, step(1), step(2), step(3))
    page = open_page()
    chart = chart_of(page, "Latest steps")
    expect(chart).to_have_attribute("aria-valuetext", "3 steps: median 10 ms, forecast off by 10 %.")
    chart.focus()
    for key, number in (("ArrowRight", 3), ("ArrowLeft", 2), ("Home", 1), ("ArrowLeft", 1), ("End", 3)):
        page.keyboard.press(key)
        told = f"Step {number}: 10 ms, expected 9.0 ms. 3 decode, 1 guessed."
        expect(chart).to_have_attribute("aria-valuetext", told)


@pytest.mark.deep
def test_the_engine_is_asked_for_steps_only_when_it_has_computed_more(open_page, served, expect):
    computed(served, step(1))
    asked: list[str] = []
    page = open_page(before=lambda page: page.on("request", lambda each: asked.append(each.url)))
    note = page.locator("#steps-chart .lane-note")
    expect(note).to_contain_text("1 step:")
    page.wait_for_timeout(LOOKED)
    assert [url for url in asked if "/engine/steps" in url] == [f"{served.url}/engine/steps"]
    computed(served, step(2))
    expect(note).to_contain_text("2 steps:")
    assert [url for url in asked if "after=" in url] == [f"{served.url}/engine/steps?after=1"]
    page.keyboard.press("Tab")
    chart_of(page, "Latest steps").focus()
    page.keyboard.press("End")
    computed(served, step(3))
    page.wait_for_timeout(LOOKED)
    expect(note).to_contain_text("Step 2:")  # what is pointed at stays
    page.get_by_label("Message", exact=True).focus()
    computed(served, step(4))
    expect(note).to_contain_text("4 steps:")
    served.engine.steps.clear()
    computed(served, step(0))  # another server
    expect(note).to_contain_text("1 step:")


@pytest.mark.deep
def test_one_long_step_does_not_flatten_the_others(open_page, served, expect):
    computed(served, *[step(number) for number in range(60)], step(60, decode=2.0))
    page = open_page()
    expect(page.locator("#steps-chart .lane-note")).to_contain_text("61 steps")
    assert page.locator("#steps-chart .lane-top").inner_text() == "14 ms"
    assert drawn(page, "cuts") == 1


# ---- where an answer's time went


PARTS = LatencyParts(queue=0.06, prompt=0.02, decode=0.1, engine=0.02, queue_for=(("no_slot", 0.06),))


def timed(served) -> None:
    """Let the next answer take as long as `PARTS`, and say so."""

    def script(request):
        arrived = time.monotonic()
        yield Wait(PARTS.total)
        instants = (arrived, arrived + 0.06, arrived + 0.08, arrived + 0.18, arrived + 0.2)
        yield from (delta("Hello"), stop(), RequestFinished(Usage(5, 2), Timings(*instants, parts=PARTS)))

    served.engine.script = script


def test_an_answer_shows_where_its_time_went_and_the_steps_it_lived_through(open_page, served, expect):
    timed(served)
    computed(
        served, step(1), step(2, own=OwnPart(0.0, 0.01, 7), prompts=0.01, chunk=9), step(3, own=OwnPart(0.004, 0, 1))
    )
    page = open_page()
    say(page, "Hi")
    button = page.get_by_role("button", name="Show where its time went")
    button.click()
    view = page.get_by_role("region", name="Where the time went")
    expect(view.locator(".life-parts")).to_contain_text("waited in the queuefor a slot 60 ms60 ms")
    expect(button).to_have_attribute("aria-pressed", "true")
    widths = view.locator(".meter i").evaluate_all("all => all.map((i) => parseFloat(i.style.width))")
    assert sum(widths) == pytest.approx(100, abs=0.1)
    told = served.http.get(f"/v1/requests/{served.request.id}/latency").json()["parts_ms"]
    shares = {name: 100 * told[name] / told["total"] for name in ("queue", "prompt", "decode")}
    drawn_as = {name: view.locator(f".meter .part-{name}") for name in shares}
    for name, share in shares.items():
        assert float(drawn_as[name].evaluate("i => parseFloat(i.style.width)")) == pytest.approx(share, abs=0.01)
    expect(view.locator("h3")).to_have_text("The 2 steps it lived through")
    assert drawn(page, "own", ".life-steps") == 2
    page.get_by_role("slider", name="Steps of this answer").focus()
    page.keyboard.press("Home")
    expect(view.locator(".lane-note")).to_contain_text("Its own part: 7 positions, 10 ms.")
    button.click()
    expect(view).to_have_count(0)
    page.reload()
    button.click()
    expect(view.locator("h3")).to_have_text("The 2 steps it lived through")


@pytest.mark.deep
def test_what_the_server_does_not_remember_is_said_in_its_words(open_page, served, expect):
    served.engine.script = always(delta("Hello"), stop(), RequestFinished(Usage(5, 2)))
    page = open_page(expect_console=True)  # the browser logs that it was not found
    say(page, "Hi")
    page.get_by_role("button", name="Show where its time went").click()
    view = page.get_by_role("region", name="Where the time went")
    expect(view.locator(".note")).to_have_count(2)
    expect(view.locator(".note").first).to_contain_text("No such request is remembered")


@pytest.mark.deep
def test_an_answer_that_was_stopped_has_no_such_button(open_page, served, expect):
    page = open_page()
    say(page, "Hi")
    expect(answers(page)).to_contain_text("Hello")
    expect(page.get_by_role("button", name="Show where its time went")).to_have_count(1)
    page.get_by_role("button", name="Regenerate answer").click()
    expect(page.locator(".branch-count")).to_have_text("2 / 2")


# ---- prefixes and shares

TREE = PrefixTree(
    16,
    20,
    (
        PrefixNode(-1, 0, 6, 2, 5, 480, 0, 8),
        PrefixNode(0, 96, 5, 0, 0, 0, 3, 0),
        PrefixNode(-1, 0, 4, 0, 1, 64, 1, 0),
        PrefixNode(0, 96, 3, 3, 1, 48, 1, 0),
    ),
    2,
)


def test_cached_prefixes_are_a_tree_that_is_asked_for_when_it_is_opened(open_page, served, expect):
    served.engine.prefixes = TREE
    page = open_page()
    page.wait_for_timeout(LOOKED)
    assert "prefixes" not in served.engine.looks
    page.get_by_text("Tree of prefixes").click()
    expect(page.locator("#prefixes-note")).to_have_text(
        "320 tokens in 4 runs; 32 tokens in smaller ones are not drawn."
    )
    places = page.locator(".prefix-ground").evaluate_all(
        "all => all.map((r) => [r.x, r.y].map((v) => v.baseVal.value))"
    )
    assert [(round(x), round(y)) for x, y in places] == [(0, 1), (0, 11), (700, 1), (250, 11)]
    chart = chart_of(page, "Cached prefixes")
    chart.focus()
    page.keyboard.press("Home")
    told = (
        "96 tokens from the beginning. Found 5 times, which spared 480 tokens; of use just now. 2 of 6 blocks in use."
    )
    expect(page.locator("#prefixes-note")).to_have_text(told)
    page.keyboard.press("ArrowRight")
    expect(chart).to_have_attribute(
        "aria-valuetext", "80 tokens after 96 tokens. Never found yet; last of use 3 admissions ago."
    )
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 10)
    expect(page.locator("#prefixes-note")).to_contain_text("64 tokens from the beginning. Found once")


TENANTS = [
    {"tenant": "", "share": 3.0, "running": 3, "waiting": 0, "waiting_tokens": 0, "tokens": 1500, "own": False},
    {
        "tenant": "0badcafe12345678",
        "share": 1.0,
        "running": 1,
        "waiting": 2,
        "waiting_tokens": 9,
        "tokens": 500,
        "own": True,
    },
]


def test_shares_are_shown_where_callers_have_keys(open_page, served, expect):
    served.engine.state = dataclasses.replace(HEALTHY, steps=1)
    page = open_page(before=lambda page: page.route("**/engine/tenants", lambda r: r.fulfill(json={"data": TENANTS})))
    card = page.get_by_role("region", name="Shares")
    expect(card.locator("tbody th")).to_have_text(["You", "Others"])
    expect(card.locator("tbody tr").first).to_contain_text("12500")
    widths = card.locator(".share-bar i").evaluate_all("all => all.map((i) => i.style.width)")
    assert widths == ["25%", "100%", "25%", "75%", "0%", "75%"]


@pytest.mark.deep
def test_without_keys_there_are_no_shares(open_page, served, expect):
    page = open_page()
    expect(page.locator("#engine-state")).to_have_text("Working")
    page.wait_for_timeout(LOOKED)
    expect(page.locator("#tenants-card")).to_be_hidden()


@pytest.mark.deep
def test_all_of_it_fits_a_phone(open_page, served, expect):
    timed(served)
    computed(served, *[step(number, own=OwnPart(0.004, 0.0, 1)) for number in range(80)])
    served.engine.prefixes = TREE
    page = open_page(**PHONE)
    say(page, "Hi")
    page.get_by_role("button", name="Show where its time went").tap()
    expect(page.locator(".life h3")).to_contain_text("80 steps")
    right = "all => Math.max(...all.map((e) => e.getBoundingClientRect().right))"
    assert page.locator(".life *").evaluate_all(right) <= 390
    page.get_by_role("button", name="Engine and settings", exact=True).click()
    page.get_by_text("Tree of prefixes").tap()
    expect(page.locator("#prefixes-note")).to_contain_text("320 tokens")
    assert page.locator("#steps-chart *, #prefixes-view *").evaluate_all(right) <= 390
    page.locator("#prefixes-chart .prefixes").tap(position={"x": 20, "y": 10})
    expect(page.locator("#prefixes-note")).to_contain_text("96 tokens from the beginning")
