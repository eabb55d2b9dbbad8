"""The pictures of docs/page.md: a conversation with a table, code, a branch and probabilities, light, dark and narrow;
and the engine's inside.

Each run checks that all of it is in the window. `make docs-images` (PENSTOCK_PICTURES=docs/images) keeps the pictures.
The engine is scripted, so that they change when the page does, and not with a model.
"""

from __future__ import annotations

import io
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from browser import PHONE, answers, say
from PIL import Image
from scripted_engine import HEALTHY, Wait, delta, finished, stop

from penstock.contract.engine_views import OwnPart, PrefixNode, PrefixTree, StepStall, StepView
from penstock.contract.events import ChoiceDelta, RequestFinished, TokenPiece, Usage
from penstock.contract.measurements import LatencyParts, Timings
from penstock.contract.plan import StallReason
from penstock.contract.ports import Health

pytestmark = pytest.mark.browser

LARGEST = 150_000  # bytes of one picture
WIDE = {"viewport": {"width": 1320, "height": 920}}

RIVERS = """Three rivers, and what a turbine of one metre of head gets from them:

| River | Length (km) | Flow (m³/s) | Sea |
|:------|------------:|------------:|:----|
| Danube | 2,850 | 6,500 | Black Sea |
| Rhine | 1,233 | 2,900 | North Sea |
| Elbe | 1,094 | 860 | North Sea |

```python
def power(flow: float, head: float = 1.0) -> float:
    \"\"\"Watts of falling water.\"\"\"
    return 0.9 * 9.81 * 1000 * flow * head  # nine tenths arrive
```"""

PLENTY = (
    "The Danube| is| the| second|-longest| river| in| Europe|,| flowing| through| ten| countries| before| it| reaches"
)
SHARES = (0.91, 0.97, 0.88, 0.74, 0.98, 0.93, 0.86, 0.97, 0.55, 0.31, 0.64, 0.22, 0.95, 0.6, 0.62, 0.58)
LAST = ((" the", 0.99, " a"), (" Black", 0.83, " sea"), (" Sea", 0.99, " Forest"), (".", 0.97, ","))
TEN = {" ten": 0.22, " several": 0.31, " many": 0.17, " four": 0.09, " Germany": 0.05}


def pieces():
    """The second answer: each token, its probability, and its alternatives."""
    for text, share in zip(PLENTY.split("|"), SHARES, strict=True):
        yield piece(
            text, share, TEN if text == " ten" else {text: share, " which": (1 - share) / 2, " that": (1 - share) / 4}
        )
    for text, share, other in LAST:
        yield piece(text, share, {text: share, other: 1 - share})


def piece(text: str, share: float, others: dict[str, float]) -> ChoiceDelta:
    ranked = sorted(others.items(), key=lambda item: -item[1])
    top = tuple(TokenPiece(at, name.encode(), math.log(p)) for at, (name, p) in enumerate(ranked))
    return ChoiceDelta(0, text, (TokenPiece(7, text.encode(), math.log(share), top),))


def at_work(served, prompt: int, cached: int, *steps) -> None:
    """The next answer, at a pace that can be watched."""
    paced = [each for step in steps for each in (step, Wait(0.012))]
    served.engine.script = lambda request: (*paced, stop(), finished(prompt, len(steps), cached))


def state_now() -> Health:
    """An engine that decodes about 90 tokens a second, with some variation."""
    t = time.monotonic()
    generated = 90 * t + 14 * math.sin(1.7 * t) + 5 * math.sin(5 * t)
    busy = {"running": 3, "waiting": 0, "slots": 64, "total_blocks": 1024, "free_blocks": 700, "cached_blocks": 210}
    work = {
        "steps": 1840,
        "generated_tokens": generated,
        "computed_tokens": generated + 300 * t + 90 * math.sin(2.3 * t),
    }
    return replace(HEALTHY, **busy, **work, query_tokens=5200, hit_tokens=3328)


def planned_steps() -> list[StepView]:
    """A hundred steps of an engine with some guesses, three prompts in chunks, and a time without free slots."""
    steps = []
    for number in range(100):
        rows = 3 + (number // 17) % 3
        drafted = 2 if number % 5 == 3 else 0
        chunk = 96 if number % 37 in (6, 7, 8, 9) or number > 94 else 0
        decode = 0.0108 + 0.0007 * rows + 0.0009 * drafted + 0.0006 * math.sin(1.9 * number)
        prompts = 0.019 + 0.0016 * math.sin(3 * number) if chunk else 0.0
        stall = StepStall(StallReason.NO_SLOT, 1, 0) if 48 < number < 71 else None
        own = OwnPart(decode / rows, prompts if number < 71 else 0.0, 97 if chunk and number < 71 else 1)
        steps.append(
            StepView(
                step=1740 + number,
                at=number / 50,
                decode=decode,
                prompts=prompts,
                drafting=0.0,
                restored=0.0,
                engine=0.0011 + 0.0008 * (number % 11 == 0),
                foreseen=0.0106 + 0.0008 * rows + 0.0009 * drafted + (0.0187 if chunk else 0.0),
                decoding=rows,
                drafted=drafted,
                chunk=chunk,
                read=0,
                waiting=2 if stall else 0,
                stall=stall,
                own=own if number >= 43 else None,
            )
        )
    return steps


def grown_tree() -> PrefixTree:
    """A system prompt that nearly all share, conversations below it, and some prompts of their own."""
    shape = [
        (-1, 14, 4, 31), (0, 12, 12, 17), (0, 9, 0, 9), (1, 22, 22, 6), (-1, 26, 0, 2), (1, 11, 0, 5), (2, 18, 0, 3),
        (3, 16, 16, 2), (0, 15, 0, 1), (3, 9, 0, 1), (2, 7, 7, 2), (4, 12, 0, 0), (5, 8, 0, 0), (6, 9, 0, 0),
        (7, 8, 8, 0), (-1, 10, 0, 0), (6, 4, 0, 0), (12, 3, 0, 0),
    ]  # fmt: skip
    below = [0] * len(shape)
    for index in reversed(range(len(shape))):
        parent, blocks, *_ = shape[index]
        if parent >= 0:
            below[parent] += blocks + below[index]
    starts: list[int] = []
    for parent, *_ in shape:
        starts.append(0 if parent < 0 else starts[parent] + 16 * shape[parent][1])
    nodes = [
        PrefixNode(parent, starts[index], blocks, held, hits, 16 * blocks * hits, index % 5, below[index])
        for index, (parent, blocks, held, hits) in enumerate(shape)
    ]
    return PrefixTree(16, sum(blocks for _, blocks, *_ in shape), tuple(nodes), 0)


PARTS = LatencyParts(
    intake=0.004,
    queue=0.19,
    prompt=0.117,
    other_prompts=0.093,
    decode=0.61,
    other_decodes=0.041,
    engine=0.052,
    queue_for=(("no_slot", 0.17), ("next_step", 0.02)),
)


def converse(page, served, expect, narrow: bool) -> None:
    for question in ("Why is the sky blue?", "A short poem about rivers"):
        at_work(served, 24, 0, delta("Because"))
        say(page, question)
        expect(page.locator(".stats")).to_be_visible()
        page.evaluate("document.querySelector('#new-chat').click()")
    at_work(served, 61, 32, delta("Soon."))
    say(page, "Compare three European rivers.")
    expect(page.locator(".stats")).to_be_visible()
    at_work(served, 61, 48, *(delta(line + "\n") for line in RIVERS.split("\n")))
    page.get_by_label("Regenerate answer").click()
    expect(page.locator(".branch-count")).to_have_text("2 / 2")
    if narrow:
        page.get_by_role("button", name="Engine and settings", exact=True).click()
    page.get_by_label("Token probabilities").check()
    if narrow:
        page.keyboard.press("Escape")
    at_work(served, 243, 224, *pieces())
    page.locator("#panel").evaluate("(panel) => panel.scrollTo(0, 0)")
    say(page, "Tell me more about the longest.")
    expect(answers(page).last.locator(".stats")).to_be_visible()


def keep(page, tmp_path: Path, name: str) -> None:
    """Take the picture with 32 shades a colour: a third smaller, and it looks the same."""
    kept = Path(os.environ.get("PENSTOCK_PICTURES") or tmp_path) / f"{name}.png"
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    shot.point(lambda v: v & 0xF8 | v >> 5).save(kept, optimize=True)
    assert kept.stat().st_size < LARGEST


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("page-light", WIDE | {"color_scheme": "light"}),
        ("page-dark", WIDE | {"color_scheme": "dark"}),
        ("page-narrow", PHONE | {"viewport": {"width": 390, "height": 1060}, "device_scale_factor": 1.5}),
    ],
)
def test_a_conversation_with_everything_in_it_fits_the_window(
    open_page, served, expect, tmp_path, monkeypatch, name, options
):
    monkeypatch.setattr(served.engine, "health", state_now)
    served.engine.steps = planned_steps()
    narrow = name == "page-narrow"
    page = open_page(**options, reduced_motion="reduce")
    converse(page, served, expect, narrow)
    uncertain = page.locator(".token", has_text=" ten")
    uncertain.tap() if narrow else uncertain.hover()
    for seen in (page.get_by_role("region", name="Table"), page.locator(".code"), page.locator(".branches")):
        expect(seen).to_be_in_viewport()
    expect(page.locator("#token-card")).to_contain_text("22.0 %")
    expect(page.locator("#notice")).to_be_hidden()
    keep(page, tmp_path, name)


@pytest.mark.deep
def test_the_engines_inside_fits_the_window(open_page, served, expect, tmp_path, monkeypatch):
    monkeypatch.setattr(served.engine, "health", state_now)
    served.engine.steps, served.engine.prefixes = planned_steps(), grown_tree()

    def script(request):
        arrived = time.monotonic()
        yield Wait(PARTS.total - 0.6)
        for word in ("Rivers", "carry", "water", "to", "the", "sea."):
            yield from (delta(word + " "), Wait(0.1))
        yield stop()
        instants = (arrived + PARTS.intake, arrived + 0.2, arrived + 0.4, arrived + 1.0, arrived + PARTS.total)
        yield RequestFinished(Usage(243, 57, 96), Timings(*instants, parts=PARTS))

    served.engine.script = script
    page = open_page(viewport={"width": 1320, "height": 1010}, color_scheme="light", reduced_motion="reduce")
    say(page, "What do rivers do?")
    page.get_by_role("button", name="Show where its time went").click()
    expect(page.locator(".life h3")).to_have_text("The 57 steps it lived through")
    page.get_by_text("Tree of prefixes").click()
    expect(page.locator("#prefixes-note")).to_contain_text("18 runs")
    page.locator("#prefixes-view").scroll_into_view_if_needed()
    box = page.locator(".life-steps .lanes").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.22, box["y"] + 60)
    expect(page.locator(".life .lane-note")).to_contain_text("waiting: no slot is free (1 needed, 0 there).")
    for seen in (page.locator("#steps-chart"), page.locator("#prefixes-note"), page.locator(".life .lane-note")):
        expect(seen).to_be_in_viewport()
    keep(page, tmp_path, "page-steps")
