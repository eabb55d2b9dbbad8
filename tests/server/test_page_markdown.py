"""Markdown on the page: tables and code, whole and while they grow."""

from __future__ import annotations

import threading

import pytest
from browser import say
from scripted_engine import Until, always, delta, finished, stop

pytestmark = pytest.mark.browser

TABLE = """| Name | Share | Note |
|:-----|------:|:----:|
| one  | 12.5  | a \\| b |
| **two** | 87.5 | first<br>second |"""

CODE = {
    "python": (
        'def f(n):\n    """Doc."""\n    return {"a": 0x1F, None: 2.5}  # why',
        "keyword call string number comment constant",
    ),
    "js": ("const a = `x ${1}`; // y\nx instanceof Map; f(null)", "keyword string comment type call constant"),
    "json": ('{"a": [1, true, "b"]}', "property number constant string"),
    "sh": ('for f in *.py; do echo "$f" --flag; done # all', "keyword string constant comment"),
    "cpp": ("#include <x>\nint main() { return 0; } /* y */", "meta constant call keyword number comment"),
    "rust": ("fn main() -> Vec<u8> { 'x' }", "keyword call type constant string"),
    "go": ('func f() string { return "a" }', "keyword call constant string"),
    "java": ("public class A { String s = null; }", "keyword type constant"),
    "sql": ("SELECT a, count(*) FROM t WHERE b = 'c' -- d", "keyword call string comment"),
    "html": ('<a href="x">y</a><!-- z -->', "keyword property string comment"),
    "css": ("@media (x) { a { color: #fff; /* c */ } }", "keyword property number comment"),
    "yaml": ("a: true\nb: 'c' # d", "property constant string comment"),
    "toml": ("[a]\nb = 1", "meta property number"),
    "diff": ("@@ -1 +1 @@\n-a\n+b", "meta removed added"),
}


def whole(text: str):
    return always(delta(text), stop(), finished())


def test_a_table_has_its_columns_their_sides_and_marks_within_cells(open_page, served, expect):
    served.engine.script = whole(TABLE)
    page = open_page()
    say(page, "Hi")
    table = page.get_by_role("region", name="Table")
    expect(table.get_by_role("columnheader")).to_have_text(["Name", "Share", "Note"])
    expect(table.get_by_role("cell")).to_have_text(["one", "12.5", "a | b", "two", "87.5", "firstsecond"])
    assert table.locator("td strong").inner_text() == "two"
    assert table.locator("td br").count() == 1
    sides = table.locator("tbody tr:first-child td").evaluate_all(
        "all => all.map((e) => getComputedStyle(e).textAlign)"
    )
    assert sides == ["left", "right", "center"]


@pytest.mark.deep
def test_every_part_of_a_table_that_grows_is_shown_as_a_table(open_page):
    """As rendered after every character: never a line of dashes where a table will be."""
    page = open_page()
    seen = page.evaluate(
        """async (text) => {
          const { render } = await import("/page/markdown.js");
          const host = document.createElement("div");
          const shapes = new Set();
          for (let end = 1; end <= text.length; end += 1) {
            render(host, text.slice(0, end), { growing: true });
            shapes.add([...host.childNodes].map((e) => e.className || e.tagName).join());
          }
          render(host, text);
          return [[...shapes], host.querySelectorAll("td").length];
        }""",
        TABLE,
    )
    assert seen == [["scrolls"], 6]


@pytest.mark.deep
def test_a_fence_that_grows_never_shows_its_marks_and_what_is_finished_is_left_alone(open_page):
    page = open_page()
    text = "Before\n\n```python\nx = 1\n```\n\nafter"
    shapes, same = page.evaluate(
        """async (text) => {
          const { render } = await import("/page/markdown.js");
          const host = document.createElement("div");
          const shapes = [];
          let before = null, same = true;
          for (let end = 1; end <= text.length; end += 1) {
            render(host, text.slice(0, end), { growing: true });
            const shape = host.innerText.replace(/\\s+/g, " ");
            if (shapes.at(-1) !== shape) shapes.push(shape);
            if (end === 10) before = host.firstChild;
            if (end > 10) same &&= host.firstChild === before;
          }
          return [shapes, same];
        }""",
        text,
    )
    assert same
    assert not any("`" in shape for shape in shapes)
    assert shapes[-1].replace(" ", "") == "Beforepythonx=1after"


@pytest.mark.deep
def test_what_merely_began_like_a_table_or_a_list_is_told_in_the_end(open_page, served, expect):
    more = threading.Event()
    served.engine.script = always(delta("| or so"), Until(more), stop(), finished())
    page = open_page()
    say(page, "Hi")
    expect(page.get_by_role("columnheader")).to_have_text(["or so"])
    more.set()
    expect(page.locator(".answer p")).to_have_text("| or so")
    expect(page.get_by_role("region", name="Table")).to_have_count(0)


def test_code_is_coloured_and_stays_the_same_text(open_page, served, expect):
    served.engine.script = whole("\n".join(f"```{language}\n{code}\n```" for language, (code, _) in CODE.items()))
    page = open_page()
    say(page, "Hi")
    blocks = page.locator("pre code")
    expect(blocks).to_have_text([code for code, _ in CODE.values()])
    for at, (language, (_, kinds)) in enumerate(CODE.items()):
        found = blocks.nth(at).locator("span").evaluate_all("all => all.map((e) => e.className.replace('code-', ''))")
        assert set(kinds.split()) <= set(found), (language, found)


@pytest.mark.deep
def test_code_of_an_unknown_language_or_of_great_length_stays_plain(open_page, served, expect):
    served.engine.script = whole("```klingon\nif (x) return 1\n```\n\n```py\n" + "x = 1\n" * 6000 + "```")
    page = open_page()
    say(page, "Hi")
    expect(page.locator("pre")).to_have_count(2)
    expect(page.locator("pre span")).to_have_count(0)


@pytest.mark.deep
def test_colouring_takes_time_in_proportion_to_the_code(open_page):
    page = open_page()
    measure = """async ([seed, language]) => {
      const { highlighted } = await import("/page/syntax.js");
      const text = seed.repeat(Math.ceil(29000 / seed.length));
      const begun = performance.now();
      const nodes = highlighted(text, language);
      const same = nodes.map((node) => node.textContent ?? node).join("") === text;
      return [performance.now() - begun, same];
    }"""
    for seed in (
        "a",
        "a ",
        '"',
        '"\\',
        "'''",
        "/*",
        "//",
        "<!--",
        "-",
        "$" + "{",
        "#",
        "0",
        ".",
        "@",
        "[",
        "\n",
        "=",
        " :",
    ):
        for language in CODE:
            took, same = page.evaluate(measure, [seed, language])
            assert same, (seed, language)
            assert took < 1500, (seed, language)
