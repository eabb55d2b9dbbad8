"""The documents name what exists, and the project says what it promises."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def checker():
    spec = importlib.util.spec_from_file_location("docs_check", ROOT / "docs" / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_every_dependency_has_its_line():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "dependencies.md").read_text()
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *extras["hub"], *extras["bench"], *extras["test"], *extras["check"]]:
        name = requirement.split(">")[0].removeprefix("types-").lower()
        assert name in page.lower(), name
