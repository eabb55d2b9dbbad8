"""The page in headless Chromium, the real server, a scripted engine: each test is one use of the page."""

from __future__ import annotations

import dataclasses
import re
import threading

import pytest
from browser import PHONE, answers, messages_of, say
from scripted_engine import HEALTHY, Until, Wait, always, delta, finished, length, stop

from penstock.contract.errors import Overloaded
from penstock.contract.events import ChoiceDelta, TokenPiece
from penstock.contract.request import Message

pytestmark = pytest.mark.browser

MARKDOWN = """# Title

A paragraph with **bold**, *slanted*, `a < b` and [a link](https://example.org/a).
Its second line, with 2 * 3 * 4 and snake_case_names.

1. one
2. two
   - below two
   - again

- a
- b

> quoted

| x | y |
|---|---|
| 1 | 2 |

```python
def f(a):
    return "<b>" + a
```

The end, with an unclosed **mark."""

HOSTILE = """<img src=x onerror=alert(1)> <script>alert(2)</script>

[click](javascript:alert(3)) [data](data:text/html,x) [local](/v1/models) <a href="https://evil.example">x</a>

```
</code></pre><script>alert(4)</script>
```"""


# ---- talking


def test_an_answer_is_shown_with_what_it_cost_and_kept_over_a_reload(open_page, served, expect):
    served.engine.script = always(delta("Hel"), Wait(0.1), delta("lo"), stop(), finished())
    page = open_page()
    expect(page.get_by_role("heading", name="acme/tiny-1")).to_be_visible()
    page.get_by_label("System prompt").fill("Be brief.")
    say(page, "Hi")
    expect(answers(page)).to_contain_text("Hello")
    expect(page.locator(".stats")).to_have_text(re.compile(r"^[\d.]+ tok/s\d+ ms to first token2 tokens$"))
    assert messages_of(served.request) == [("system", "Be brief."), ("user", "Hi")]
    say(page, "More")
    expect(answers(page)).to_have_count(2)
    assert messages_of(served.request)[1:] == [("user", "Hi"), ("assistant", "Hello"), ("user", "More")]
    page.reload()
    expect(answers(page)).to_have_count(2)
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    expect(page).to_have_title("Hi · Penstock")


def test_escape_and_the_stop_button_end_an_answer_for_the_engine_too(open_page, served, expect):
    served.engine.script = always(delta("begun"), Wait())
    page = open_page()
    for turn, leave in enumerate(
        (lambda: page.keyboard.press("Escape"), lambda: page.get_by_label("Stop answering").click())
    ):
        say(page, "Hi")
        expect(answers(page).nth(turn)).to_contain_text("begun")
        assert len(served.engine.live) == 1
        leave()
        expect(answers(page).nth(turn)).to_contain_text("Stopped.")
        served.engine.wait_until(lambda: not served.engine.live)
    expect(page.get_by_label("Send message")).to_be_visible()


def test_a_stopped_answer_tells_its_tokens_and_not_its_pieces(open_page, served, expect):
    pieces = tuple(TokenPiece(7, part, -0.5) for part in (b"be", b"g", b"un"))
    served.engine.script = always(ChoiceDelta(0, "begun", pieces), Wait())
    page = open_page()
    say(page, "Hi")
    expect(answers(page)).to_contain_text("begun")
    page.keyboard.press("Escape")
    expect(page.locator(".stats")).to_have_text(re.compile(r"^[\d.]+ m?s to first token3 tokens$"))


def test_copying_gives_the_text_as_the_model_wrote_it(open_page, served, expect):
    served.engine.script = always(delta("**bold**\n\n```py\nx = 1\n```"), stop(), finished())
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    say(page, "Hi")
    page.get_by_label("Copy answer").click()
    expect(page.locator("#notice-text")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "**bold**\n\n```py\nx = 1\n```"
    page.get_by_label("Copy code").click()
    expect(page.locator("#said")).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1"


def test_a_refusal_is_shown_in_the_servers_words_and_can_be_tried_again(open_page, served, expect):
    served.engine.script = always(Overloaded("7 sequences are waiting already.", retry_after=3))
    page = open_page(expect_console=True)  # the browser itself reports the status
    say(page, "Hi")
    expect(page.get_by_role("alert")).to_have_text("7 sequences are waiting already.")
    served.engine.reset()
    page.get_by_label("Try again").click()
    expect(answers(page)).to_contain_text("Hello")
    expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.deep
def test_an_answer_cut_by_its_limit_says_so(open_page, served, expect):
    served.engine.script = always(delta("Hel"), length(), finished())
    page = open_page()
    say(page, "Hi")
    expect(answers(page)).to_contain_text("The answer reached its length limit.")


@pytest.mark.deep
def test_conversations_can_be_switched_deleted_and_brought_back(open_page, served, expect):
    page = open_page()
    say(page, "first talk")
    expect(page.locator(".stats")).to_be_visible()
    page.get_by_role("button", name="New conversation").click()
    say(page, "second talk")
    expect(page.locator(".stats")).to_be_visible()
    assert messages_of(served.request) == [("user", "second talk")]
    listed = page.locator(".conversation")
    expect(listed).to_have_text(["second talk", "first talk"])
    page.get_by_label("More about first talk").click()
    page.get_by_role("menuitem", name="Delete").click()
    expect(listed).to_have_text(["second talk"])
    page.get_by_role("button", name="Undo").click()
    expect(listed).to_have_text(["first talk", "second talk"])
    expect(page.get_by_role("article", name="You")).to_contain_text("first talk")


# ---- what a model writes is text


def test_text_that_pretends_to_be_markup_stays_text(open_page, served, expect):
    served.engine.script = always(delta(HOSTILE), stop(), finished())
    page = open_page()
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    say(page, "Hi")
    expect(page.locator(".stats")).to_be_visible()
    body = page.locator(".answer")
    assert body.locator("img, script, iframe, form").count() == 0
    links = body.locator("a").evaluate_all("all => all.map((a) => a.href)")
    assert links == ["https://evil.example/"]  # an address written out: it leads there and nowhere else
    for visible in ("<img src=x onerror=alert(1)>", "<script>alert(2)</script>", "[click](javascript:alert(3))"):
        expect(body).to_contain_text(visible)
    page.reload()
    expect(body).to_contain_text("<script>alert(4)</script>")
    assert page.locator(".answer script, .answer img").count() == 0


def test_markdown_becomes_elements_and_growing_it_piece_by_piece_comes_to_the_same(open_page, served, expect):
    pieces = [MARKDOWN[at : at + 3] for at in range(0, len(MARKDOWN), 3)]
    served.engine.script = always(*map(delta, pieces), stop(), finished(completion=len(pieces)))
    page = open_page()
    say(page, "Hi")
    expect(page.locator(".stats")).to_be_visible()
    body = page.locator(".answer")
    grown = body.inner_html()
    page.reload()  # rendered at once, from what was kept
    expect(page.locator(".stats")).to_be_visible()
    assert body.inner_html() == grown
    assert body.locator("h3").inner_text() == "Title"
    assert body.locator("p strong").all_inner_texts() == ["bold"]
    assert body.locator("p em").all_inner_texts() == ["slanted"]
    assert body.locator("ol > li").count() == 2
    assert body.locator("ol > li ul > li").all_inner_texts() == ["below two", "again"]
    assert body.locator("td").all_inner_texts() == ["1", "2"]
    assert body.locator("pre code").inner_text() == 'def f(a):\n    return "<b>" + a'
    link = body.get_by_role("link", name="a link")
    assert (link.get_attribute("href"), link.get_attribute("rel")) == (
        "https://example.org/a",
        "noopener noreferrer nofollow",
    )
    for visible in ("2 * 3 * 4", "snake_case_names", "an unclosed **mark."):
        expect(body).to_contain_text(visible)


@pytest.mark.deep
def test_rendering_takes_time_in_proportion_to_the_text_whatever_it_is(open_page):
    page = open_page()
    measure = """async (seed) => {
      const { render } = await import("/page/markdown.js");
      const text = seed.repeat(Math.ceil(100000 / seed.length));
      const begun = performance.now();
      render(document.createElement("div"), text);
      return performance.now() - begun;
    }"""
    for seed in (
        "*a ",
        "**a",
        "[",
        "[a](",
        "`",
        "``a`",
        "_a",
        "> ",
        "- a\n  ",
        "~~~ ",
        "| ",
        "# ",
        " ",
        "h",
        "http://a",
        "\\",
        "|-",
        "a\n",
        "|a\n",
        "|a|\n|-|\n|",
        "```py\n",
        "`",
    ):
        assert page.evaluate(measure, seed) < 4000, seed


# ---- controls


def test_controls_are_made_of_what_the_server_says_and_only_what_was_set_is_sent(open_page, served, expect):
    page = open_page()
    say(page, "Hi")
    expect(page.locator(".stats")).to_be_visible()
    assert served.request.sampling.entries == ()
    page.get_by_label("temperature", exact=True).fill("0.5")
    expect(page.get_by_label("temperature, slider")).to_have_value("0.5")
    page.get_by_label("top_k", exact=True).fill("5")
    page.get_by_label("stop", exact=True).fill("END\n\\n\\n")
    page.get_by_text("More parameters").click()
    page.get_by_label("ignore_eos", exact=True).check()
    page.get_by_label("stop_token_ids", exact=True).fill("3, 4")
    say(page, "Again")
    expect(page.locator(".stats")).to_have_count(2)
    assert dict(served.request.sampling.entries) == {"temperature": 0.5, "top_k": 5}
    rules = served.request.stop
    assert (rules.strings, rules.token_ids, rules.ignore_eos) == (("END", "\n\n"), (3, 4), True)
    page.get_by_label("Reset temperature to its default").click()
    say(page, "Once more")
    expect(page.locator(".stats")).to_have_count(3)
    assert dict(served.request.sampling.entries) == {"top_k": 5}


@pytest.mark.deep
def test_a_value_that_cannot_be_is_marked_and_not_sent(open_page, served, expect):
    page = open_page()
    field = page.get_by_label("top_p", exact=True)
    for wrong in ("2", "0", "x"):
        field.fill(wrong)
        expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#sampling-top_p-fault")).to_have_text("This must be a number.")
    say(page, "Hi")
    expect(page.locator(".stats")).to_be_visible()
    assert not served.request.sampling.has("top_p")


# ---- the engine, live


def test_the_live_view_follows_the_engine(open_page, served, expect):
    page = open_page()
    expect(page.locator("#value-running")).to_have_text("1")
    expect(page.locator("#value-waiting")).to_have_text("2")
    served.engine.state = dataclasses.replace(
        HEALTHY, running=3, slots=8, cached_blocks=10, hit_tokens=25, query_tokens=100, generated_tokens=400
    )
    expect(page.locator("#value-running")).to_have_text("3")
    expect(page.locator("#unit-running")).to_have_text("of 8")
    expect(page.locator("#blocks-held")).to_have_text("10")
    expect(page.locator("#blocks-cached")).to_have_text("10")
    expect(page.locator("#blocks-empty")).to_have_text("20")
    expect(page.locator("#value-hits")).to_have_text("25 %")
    expect(page.locator("#plot-decode path.plot-line")).to_have_attribute("d", re.compile("^M"))
    served.engine.state = dataclasses.replace(HEALTHY, alive=False, reason="out of memory")
    expect(page.locator("#engine-state")).to_have_text("The engine is dead: out of memory")


def test_a_server_that_wants_a_key_gets_it_from_its_field(open_page, served, expect):
    def guard(route) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            body = '{"error": {"message": "Missing key.", "type": "authentication_error", "param": null, "code": null}}'
            route.fulfill(status=401, content_type="application/json", body=body)

    page = open_page(expect_console=True, before=lambda page: page.route(re.compile(r"/(v1|engine)/"), guard))
    key = page.get_by_label("API key")
    expect(key).to_be_focused()
    expect(page.locator("#notice-text")).to_have_text("This server wants an API key.")
    key.fill("secret")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="acme/tiny-1")).to_be_visible()
    expect(page.locator("#value-waiting")).to_have_text("2")
    say(page, "Hi")
    expect(answers(page)).to_contain_text("Hello")
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


# ---- for everybody


@pytest.mark.deep
def test_everything_can_be_reached_and_used_by_keyboard(open_page, expect):
    page = open_page(viewport={"width": 900, "height": 700})  # here the page does not take the focus by itself
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the message field")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.get_by_label("Theme: as the system").focus()
    page.keyboard.press("/")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("Hi")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    expect(page.get_by_role("article", name="You")).to_contain_text("Hi\nthere")
    expect(page.locator("#said")).to_have_text("Answer: Hello")


def test_everything_that_can_be_operated_has_a_name(open_page, expect):
    page = open_page()
    say(page, "Hi")
    expect(page.locator(".stats")).to_be_visible()
    page.get_by_text("More parameters").click()
    tree = page.locator("body").aria_snapshot()
    nameless = re.findall(
        r"^\s*- (?:button|textbox|slider|switch|checkbox|link|article|region)(?::.*| \[.*|)$", tree, re.MULTILINE
    )
    assert nameless == []
    assert len(re.findall(r"- (?:button|textbox|slider|switch) ", tree)) > 15


@pytest.mark.deep
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_its_ground(open_page, expect, theme):
    page = open_page(color_scheme=theme)
    contrast = """([ink, ground]) => {
      const probe = document.createElement("span");
      document.body.append(probe);
      const channels = (name) => {
        probe.style.color = `var(--${name})`;
        return getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(Number);
      };
      const light = (name) => {
        const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = channels(name).map((v) => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const [high, low] = [light(ink), light(ground)].sort((a, b) => b - a);
      probe.remove();
      return (high + 0.05) / (low + 0.05);
    }"""
    pairs = [("ink", "surface"), ("ink", "ground"), ("soft", "surface"), ("soft", "ground"), ("soft", "sunken")]
    pairs += [
        ("on-accent", "accent"),
        ("on-tint", "tint"),
        ("accent", "surface"),
        ("bad", "surface"),
        ("good", "surface"),
        ("good", "ground"),
        ("bad", "ground"),
    ]
    pairs += [(f"code-{kind}", "ground") for kind in ("keyword", "string", "number", "call", "type", "property")]
    for pair in pairs:
        assert page.evaluate(contrast, list(pair)) >= 4.5, pair  # WCAG 2.2, success criterion 1.4.3


@pytest.mark.deep
def test_the_theme_is_the_systems_until_another_is_chosen_and_then_stays(open_page, expect):
    page = open_page(color_scheme="dark")
    ground = "() => getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.get_by_label("Theme: as the system").click()
    expect(page.get_by_label("Theme: light")).to_be_visible()
    light = page.evaluate(ground)
    assert light != dark
    page.reload()
    assert page.evaluate(ground) == light
    page.get_by_label("Theme: light").click()
    assert page.evaluate(ground) == dark


@pytest.mark.deep
def test_a_phone_has_room_for_everything_and_drawers_that_give_the_focus_back(open_page, served, expect):
    served.engine.script = always(delta("```\n" + "wide " * 60 + "\n```\n\n" + "long" * 80), stop(), finished())
    page = open_page(**PHONE)
    say(page, "Hi " + "there" * 60)
    expect(page.locator(".stats")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    boxes = page.locator(".message, .composer, .bar, .code").evaluate_all(
        "all => all.map((e) => e.getBoundingClientRect().right)"
    )
    assert max(boxes) <= PHONE["viewport"]["width"]
    small = page.locator(".bar button, .composer button, .message-actions button").evaluate_all(
        "all => all.map((e) => e.getBoundingClientRect()).filter((r) => r.width && Math.min(r.width, r.height) < 40)"
    )
    assert small == []
    for opener, drawer in (("Conversations", "#conversations"), ("Engine and settings", "#panel")):
        assert page.locator(drawer).evaluate("(e) => e.inert")
        page.get_by_role("button", name=opener, exact=True).click()
        assert not page.locator(drawer).evaluate("(e) => e.inert")
        assert page.evaluate("(id) => document.querySelector(id).contains(document.activeElement)", drawer)
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name=opener, exact=True)).to_be_focused()


@pytest.mark.deep
def test_a_growing_answer_is_followed_until_the_reader_scrolls_up(open_page, served, expect):
    more = threading.Event()
    served.engine.script = always(
        *[delta(f"line {i}\n\n") for i in range(60)], Until(more), delta("last words"), stop(), finished()
    )
    page = open_page()
    say(page, "Hi")
    expect(answers(page)).to_contain_text("line 59")
    distance = """() => {
      const transcript = document.querySelector("#transcript");
      return transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight;
    }"""
    expect(page.get_by_text("line 59")).to_be_in_viewport()
    page.locator("#transcript").hover()
    page.mouse.wheel(0, -600)
    expect(page.get_by_role("button", name="Latest")).to_be_visible()
    before = page.evaluate(distance)
    more.set()
    expect(page.locator(".stats")).to_be_attached()
    assert page.evaluate(distance) >= before
    page.get_by_role("button", name="Latest").click()
    expect(page.get_by_text("last words", exact=True)).to_be_in_viewport()


@pytest.mark.deep
def test_the_page_works_where_the_browser_keeps_nothing(open_page, served, expect):
    refuse = (
        "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no', 'SecurityError'); } });"
    )
    page = open_page(before=lambda page: page.add_init_script(refuse))
    say(page, "Hi")
    expect(answers(page)).to_contain_text("Hello")
    expect(page.locator("#storage-note")).to_contain_text("keeps nothing")
    assert served.request.prompt.messages == (Message("user", "Hi"),)
