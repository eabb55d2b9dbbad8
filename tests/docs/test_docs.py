"""The documents name what exists, and the project says what it promises."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = re.compile(r"\((\.\./bench/results/[^)]+\.json)\)")
FORMS = (
    ("the 4-bit file", "penstock (file)", "penstock file"),
    ("`int8`", "penstock (int8)", "penstock int8"),
    ("`none` (bfloat16)", "penstock (bf16)", "penstock none, bfloat16"),
)


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
    rule = re.search(r"/\.installed-test: .*?\(EXTRAS\) ([a-z -]+)\)", (ROOT / "Makefile").read_text(), re.DOTALL)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [each for extra in rule[1].split() for each in extras[extra]]
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
    ]:
        name = requirement.split(">")[0].removeprefix("types-").lower()
        assert name in page.lower(), name


@pytest.mark.parametrize("script", sorted((ROOT / "docs").glob("write_*.py")), ids=lambda script: script.stem)
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


def test_the_figures_of_the_tuning_page_are_those_of_the_records_that_it_links():
    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    compare, quality = (json.loads((ROOT / "docs" / path).read_text(encoding="utf-8")) for path in RECORD.findall(page))
    speeds = {
        each["name"]: [(round(r["decode_tok_s"]), round(r["prefill_tok_s"])) for r in each["rows"]]
        for each in compare["contenders"]
    }
    costs = {each["name"]: each for each in quality["rows"]}
    for shown, ours, measured in FORMS:
        decode, prefill = ([f"{value:,}" for value in values] for values in zip(*speeds[ours], strict=True))
        assert f"| {shown} | {' / '.join(decode)} | {' / '.join(prefill)} |" in page
        row = costs[measured]
        figures = f"{row['weight_bytes'] / 1e6:.0f} MB | {row['kl_mean']:.4f} | {100 * row['same_top']:.1f} %"
        assert f"| {shown} | {figures} |" in page
