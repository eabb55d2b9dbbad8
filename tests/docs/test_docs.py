"""The documents name what exists, and the project says what it promises."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRITERS = sorted(
    script for script in (ROOT / "docs").glob("write_*.py") if script.stem != "write_figures"
)  # which writes tables into hand-written pages


def loaded(script: Path):
    spec = importlib.util.spec_from_file_location(f"docs_{script.stem}", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checker():
    return loaded(ROOT / "docs" / "check.py")


def test_every_link_leads_somewhere_and_every_name_exists():
    check = checker()
    assert [problem for document in check.documents() for problem in check.problems(document)] == []


def test_a_name_that_does_not_exist_is_found(tmp_path, monkeypatch):
    check = checker()
    monkeypatch.setattr(check, "ROOT", tmp_path)
    (tmp_path / "code.py").write_text("class A:\n    def b(self): ...\n")
    page = tmp_path / "page.md"
    page.write_text("[`A.b`](code.py) [`A.c`](code.py) [text](missing.md) [`code.py`](code.py)")
    assert list(check.problems(page)) == [
        "page.md: code.py defines no A.c",
        "page.md: the link to missing.md leads nowhere",
    ]


def test_the_tour_names_at_least_thirty_things():
    check = checker()
    tour = (ROOT / "docs" / "tour.md").read_text()
    assert sum(check.names_code(m["text"], ROOT / "docs" / m["target"]) for m in check.LINK.finditer(tour)) >= 30


def test_make_test_installs_all_that_a_test_would_skip_without():
    import tomllib

    wanted = {
        name for file in ROOT.glob("tests/**/*.py") for name in re.findall(r'importorskip\("(\w+)', file.read_text())
    }
    rule = re.search(r"/\.installed-test: .*?\(EXTRAS\) (.*)", (ROOT / "Makefile").read_text(), re.DOTALL)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    words = re.findall(r"[a-z][a-z-]*", rule[1].splitlines()[0])  # one of them where there is a browser
    asked = [each for extra in extras.keys() & set(words) for each in extras[extra]]
    installed = {re.match(r"[\w-]+", each)[0].replace("-", "_") for each in asked}
    exact = {line.partition("==")[0].replace("-", "_") for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert "matplotlib" in wanted
    assert wanted <= installed & exact


def test_every_dependency_has_its_line():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "dependencies.md").read_text()
    extras = project["optional-dependencies"]
    for requirement in [
        *project["dependencies"],
        *extras["hub"],
        *extras["bench"],
        *extras["test"],
        *extras["check"],
        *extras["docs"],
        *extras["notebook"],
    ]:
        name = requirement.split(">")[0].removeprefix("types-").lower()
        assert name in page.lower(), name


@pytest.mark.parametrize("script", WRITERS, ids=lambda script: script.stem)
def test_generated_pages_say_what_the_code_says(script):
    """`make docs-pages` writes them again."""
    writer = loaded(script)
    assert writer.PAGE.read_text(encoding="utf-8") == writer.page()


def test_anchors_paths_and_targets_that_do_not_exist_are_found(tmp_path, monkeypatch):
    check = checker()
    monkeypatch.setattr(check, "ROOT", tmp_path)
    (tmp_path / "Makefile").write_text("serve: it\n")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "page.md"
    page.write_text(
        "# A `title`, twice\n\n## POST /v1/x\n\n# A title twice\n\n"
        "[a](#a-title-twice) [b](#a-title-twice_1) [c](#post-v1x)\n"
        "[d](page.md#none) `docs/` `docs/none.py` `make serve` `make none`\n\n```\n[e](none) `make none`\n```\n"
    )
    assert list(check.problems(page)) == [
        "page.md: page.md has no heading #none",
        "page.md: there is no docs/none.py",
        "page.md: the Makefile has no target none",
    ]


def test_a_page_that_the_navigation_forgets_is_found(tmp_path, monkeypatch):
    check = checker()
    assert list(check.navigation_problems()) == []
    monkeypatch.setattr(check, "ROOT", tmp_path)
    (tmp_path / "docs" / "adr").mkdir(parents=True)
    for name in ("a.md", "b.md", "adr/1.md"):
        (tmp_path / "docs" / name).touch()
    (tmp_path / "mkdocs.yml").write_text("nav:\n  - A: a.md\n  # - B: b.md\n  - C: c.md\n  - adr/\n")
    assert list(check.navigation_problems()) == [
        "mkdocs.yml: the navigation does not show b.md",
        "mkdocs.yml: there is no docs/c.md",
    ]


def figures():
    return loaded(ROOT / "docs" / "write_figures.py")


@pytest.mark.parametrize(("page", "tables"), [("README.md", 1), ("docs/figures.md", 20), ("docs/tuning.md", 4)])
def test_the_figures_of_a_page_are_those_of_the_records_that_it_links(page, tables):
    """`docs/write_figures.py` writes them again, after a link was changed to a new record."""
    writer = figures()
    assert ROOT / page in writer.PAGES
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(writer.BLOCK.findall(text)) == text.count("<!-- end of figures -->") == tables
    assert writer.written(ROOT / page) == text


def test_figures_taken_from_single_runs_are_those_that_the_comparison_took():
    """Two ways to the same numbers: the writer's, and the summary that `bench/compare.py` wrote."""
    writer = figures()
    link = re.search(writer.RECORD.format(kind="compare"), (ROOT / "README.md").read_text(encoding="utf-8"))
    record = json.loads((ROOT / link[1]).read_text(encoding="utf-8"))
    ours, peers = ([each for each in record["contenders"] if each["ours"] is own] for own in (True, False))
    assert ours
    assert peers
    for rate in ("prefill", "decode"):
        for each in (*ours, *peers):
            assert writer.rates(each, rate) == pytest.approx([row[f"{rate}_tok_s"] for row in each["rows"]])
            for own in ours:
                told = [row["ours_over_theirs"][own["name"]][rate][0] for row in each["rows"]]
                assert writer.ratios(own, each, rate) == pytest.approx(told)
        best = [each["ours_over_theirs"][0] for each in record["best"] if each["rate"] == rate]
        assert writer.best_ratios(ours, peers, rate) == pytest.approx(best)


def test_a_page_with_other_figures_than_its_record_is_found_and_mended(tmp_path, monkeypatch, capsys):
    writer, page = figures(), tmp_path / "page.md"
    row = {"weight_bytes": 2e6, "kl_mean": 0.25, "same_top": 0.5}
    record = {"rows": [{"name": name} | row for _, _, name in writer.FORMS]}
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "today-quality-x.json").write_text(json.dumps(record))
    around = (
        "a\n\n<!-- figures: cost-of-forms -->\n{}<!-- end of figures -->\n\n([b](bench/results/today-quality-x.json))\n"
    )
    page.write_text(around.format("| old |\n"))
    monkeypatch.setattr(writer, "PAGES", (page,))
    assert writer.main(["--check"]) == 1
    assert capsys.readouterr().out == "page.md is not what the records say: run docs/write_figures.py\n"
    assert writer.main([]) == writer.main(["--check"]) == 0
    rows = ["| weights | bytes of weights | divergence | same top token |", "| --- | --- | --- | --- |"]
    rows += [f"| {title} | 2 MB | 0.2500 | 50.0 % |" for title, _, _ in writer.FORMS]
    assert page.read_text() == around.format("".join(f"{each}\n" for each in rows))
    page.write_text("<!-- figures: cost-of-forms -->\n<!-- end of figures -->\n")
    with pytest.raises(ValueError, match="no link to a record of 'quality'"):
        writer.main([])
    page.write_text("<!-- figures: none -->\n<!-- end of figures -->\n")
    with pytest.raises(ValueError, match="no table 'none'"):
        writer.main([])


def test_ratios_are_shown_with_two_decimals_below_2():
    assert figures()._ratios([0.5, 1.994, 1.996, 12.34]) == "0.50 / 1.99 / 2.0 / 12.3"


def test_the_evening_path_of_the_tour_is_as_short_as_it_says():
    tour = (ROOT / "docs" / "tour.md").read_text()
    path = tour.partition("## An evening's path")[2].partition("\n## ")[0]
    files = re.findall(r"^\| \[`[^`]+`\]\(\.\./([^)]+)\)", path, flags=re.MULTILINE)
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    assert len(files) == 13, "the tour says thirteen"
    assert 3300 < lines < 3500, f"the tour says about 3,400 lines; there are {lines}"
