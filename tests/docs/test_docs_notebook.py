"""The notebook of the documentation: its code names what exists, its outputs are of one run, and it runs."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import notebooks
import pytest

from penstock.cli import penstock

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "a-minute-of-serving.ipynb"
CELLS = notebooks.cells(NOTEBOOK)
CODE = [cell for cell in CELLS if cell.code]
MOST_BYTES = 300_000
LIMIT = 900.0  # seconds; it takes two minutes on a quiet machine
SAID = {
    "every plan is the same": r"^\d+ steps replayed: every plan is the same$",
    "an answer is confirmed": r"^1 of 1 certified answers confirmed, 0 refuted, 0 undecided$",
    "fewer blocks": r"^\d+ blocks, and \d+: \d+ of 49 requests are over later$",
}
"""What the notebook is to say, whatever it measures."""


@pytest.mark.parametrize("cell", CODE, ids=lambda cell: f"cell-{CODE.index(cell)}")
def test_what_its_code_imports_exists(cell):
    for node in ast.walk(ast.parse(cell.source)):
        match node:
            case ast.ImportFrom(module=module, names=names):
                there = importlib.import_module(module)
                assert [each.name for each in names if not hasattr(there, each.name)] == []
            case ast.Import(names=names):
                for each in names:
                    importlib.import_module(each.name)


def test_the_options_in_its_code_are_options():
    """The options of the commands that it runs: `"serve", ..., "--port"`."""
    code = "\n".join(cell.source for cell in CODE)
    used = set(re.findall(r'"--([a-z-]+)"', code))
    assert {"record", "certificate"} <= used
    known: set[str] = set()
    for command in ("serve", "verify"):
        assert f'"{command}"' in code
        of = penstock.get_command(click.Context(penstock), command)
        known |= {name.removeprefix("--") for each in of.params for name in (*each.opts, *each.secondary_opts)}
    assert used <= known


def test_its_outputs_are_of_one_run_from_top_to_bottom():
    cells = [each for each in json.loads(NOTEBOOK.read_text())["cells"] if each["cell_type"] == "code"]
    assert [each["execution_count"] for each in cells] == list(range(1, len(cells) + 1)), "make notebook runs it"
    said = "\n".join(cell.said for cell in CODE)
    assert [name for name, line in SAID.items() if not re.search(line, said, re.MULTILINE)] == []
    assert str(Path.home()) not in said
    assert "/tmp" not in said
    assert sum(len(cell.pictures) for cell in CODE) == 3
    assert NOTEBOOK.stat().st_size < MOST_BYTES


def test_it_becomes_a_page_with_its_pictures_beside_it(tmp_path):
    page, pictures = notebooks.markdown(NOTEBOOK), notebooks.pictures(NOTEBOOK)
    assert page.startswith("# A minute of serving\n")
    assert page.count("```python\n") == len(CODE)
    assert re.findall(r"!\[[^]]+\]\(([^)]+)\)", page) == list(pictures)
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values())
    assert "```python" not in notebooks.prose(NOTEBOOK)
    strange = {"cells": [{"cell_type": "raw", "source": ["x"]}]}
    (tmp_path / "strange.ipynb").write_text(json.dumps(strange))
    with pytest.raises(ValueError, match="kind 'raw' is not shown"):
        notebooks.cells(tmp_path / "strange.ipynb")
    failed = {"cell_type": "code", "source": ["x"], "outputs": [{"output_type": "error", "ename": "NameError"}]}
    (tmp_path / "failed.ipynb").write_text(json.dumps({"cells": [failed]}))
    with pytest.raises(ValueError, match="kind 'error' is not shown"):
        notebooks.markdown(tmp_path / "failed.ipynb")


@pytest.mark.deep
@pytest.mark.model
def test_it_runs_from_top_to_bottom(default_model, tmp_path):
    """As a script: that needs no notebook runner, and every cell is plain Python."""
    (tmp_path / "notebook.py").write_text("\n\n".join(cell.source for cell in CODE))
    environment = {**os.environ, "MPLBACKEND": "agg", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "notebook.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert [name for name, line in SAID.items() if not re.search(line, done.stdout, re.MULTILINE)] == []
